//! Large, aligned memory: weights, activations and the KV cache.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::device::DeviceError;

/// Size of a huge page; regions are rounded up to it.
const HUGE: usize = 2 << 20;

/// A zeroed region of anonymous memory, page-aligned, backed by huge pages where the system gives
/// them (without them, streams of weights read at about half speed). Pages cost memory only once
/// touched.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<c_void>,
    mapped: usize,
    len: usize,
}

// SAFETY: the region is plain memory, owned by this value alone; who may write which part is the
// business of `Buffer`'s callers.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// A region of at least `len` bytes, zeroed.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if the system refuses.
    pub fn new(what: &'static str, len: usize) -> Result<Self, DeviceError> {
        let memory = |cause: std::io::Error| DeviceError::Memory { what, bytes: len, cause };
        let too_large = || memory(std::io::ErrorKind::OutOfMemory.into());
        let mapped = len.max(1).checked_next_multiple_of(HUGE).ok_or_else(too_large)?;
        // One huge page more than needed, so that the start can be moved up to a boundary.
        let with_slack = mapped.checked_add(HUGE).and_then(NonZeroUsize::new);
        let with_slack = with_slack.ok_or_else(too_large)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh anonymous mapping at an address of the system's choice touches nothing.
        let start = unsafe { mmap_anonymous(None, with_slack, prot, flags) }
            .map_err(|errno| memory(errno.into()))?;
        // SAFETY: advice about our own mapping; a refusal (no huge pages here) changes nothing.
        let _ = unsafe { madvise(start, with_slack.get(), MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self { start, mapped: with_slack.get(), len: mapped })
    }

    fn aligned_start(&self) -> *mut u8 {
        let start = self.start.as_ptr().cast::<u8>();
        start.wrapping_add(start.align_offset(HUGE))
    }

    /// The values at `[offset, offset + len · size_of::<T>())`.
    pub fn buffer<T: bytemuck::Pod>(&self, offset: usize, len: usize) -> Buffer<T> {
        let bytes = len * size_of::<T>();
        assert!(offset.is_multiple_of(align_of::<T>()), "buffer at {offset} is not aligned");
        assert!(offset + bytes <= self.len, "buffer reaches beyond its arena");
        Buffer { start: self.aligned_start().wrapping_add(offset).cast(), len }
    }
}

#[cfg(test)]
impl Arena {
    /// What of it the system has given memory to.
    pub fn resident_bytes(&self) -> usize {
        const PAGE: usize = 4096;
        let mut pages = vec![0_u8; self.mapped.div_ceil(PAGE)];
        // SAFETY: the mapping is ours, and there is a byte for each of its pages.
        let rc = unsafe { libc::mincore(self.start.as_ptr(), self.mapped, pages.as_mut_ptr()) };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 == 1).count() * PAGE
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and no `Buffer` outlives the device that owns it.
        let _ = unsafe { munmap(self.start, self.mapped) };
    }
}

/// A part of an arena that several threads read and write, each its own part at a time. The arena
/// must outlive it: both are kept by the same device.
#[derive(Clone, Copy, Debug)]
pub struct Buffer<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: a pointer into an arena; the accessors below are unsafe where two threads could meet.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: bytemuck::Pod> Buffer<T> {
    /// Values in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// `[at, at + len)` for reading.
    ///
    /// # Safety
    /// No thread writes that part while the slice lives, and the arena outlives the slice.
    pub unsafe fn slice<'a>(&self, at: usize, len: usize) -> &'a [T] {
        assert!(at + len <= self.len, "read of {at}+{len} beyond {}", self.len);
        // SAFETY: inside the region (asserted), initialised (zeroed by the system, T is plain
        // data), not written meanwhile (the caller's promise).
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }

    /// `[at, at + len)` for writing.
    ///
    /// # Safety
    /// No other thread reads or writes that part while the slice lives, and the arena outlives it.
    pub unsafe fn slice_mut<'a>(&self, at: usize, len: usize) -> &'a mut [T] {
        assert!(at + len <= self.len, "write of {at}+{len} beyond {}", self.len);
        // SAFETY: as in `slice`, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// A pointer to value `at`, where it and what follows up to `end` is inside.
    ///
    /// # Safety
    /// As for `slice_mut`, for what is written through it.
    pub unsafe fn pointer(&self, at: usize, end: usize) -> *mut T {
        assert!(at <= end && end <= self.len, "a pointer to {at} of {end} beyond {}", self.len);
        // SAFETY: inside the region (asserted).
        unsafe { self.start.add(at) }
    }
}

/// Lays buffers out one after another, each on its own cache line.
#[derive(Debug, Default)]
pub struct Layout {
    end: usize,
}

impl Layout {
    /// Bytes laid out so far.
    pub fn len(&self) -> usize {
        self.end
    }

    /// The offset of the next `bytes` bytes, on a cache line.
    pub fn place(&mut self, bytes: usize) -> usize {
        let at = self.end.next_multiple_of(64);
        self.end = at + bytes;
        at
    }
}

/// Gives what was allocated and freed again back to the system: reading a model's metadata leaves
/// tens of megabytes in the allocator, which would keep them for a process that will never again
/// ask for so much.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call has no requirements; it may be made at any time, from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
