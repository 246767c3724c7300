//! Threads that run one function together.
//!
//! A step is hundreds of operations of a few microseconds each, so threads wait for one another by
//! spinning. The spin is bounded: a thread that waits longer yields, then sleeps until it is woken,
//! because other work shares these cores and a polling thread would slow it down. For the same
//! reason nobody waits for a thread that the system has not let run: a worker that comes too late
//! for a task is not part of it.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::event::Event;
use super::sync::{Arc, AtomicBool, AtomicU64, Builder, JoinHandle, Mutex};

/// The function that the workers run, as a pointer whose lifetime `run` guards.
type Task = *const (dyn Fn(usize) + Sync);

#[derive(Clone, Copy, Debug)]
struct SendTask(Task);

// SAFETY: the function is Sync, and `run` returns only after every worker is done with it.
unsafe impl Send for SendTask {}

/// Set in [`Shared::gate`] while workers may join the task.
const OPEN: u64 = 1 << 31;

#[derive(Debug)]
struct Shared {
    task: Mutex<Option<SendTask>>,
    /// Number of the task (upper half), [`OPEN`], and the workers inside (lower bits).
    gate: AtomicU64,
    start: Event,
    left: Event,
    quit: AtomicBool,
}

impl Shared {
    fn task_number(&self) -> u64 {
        self.gate.load(Ordering::Acquire) >> 32
    }

    /// Counts a worker in, unless the task is over.
    fn join(&self) -> bool {
        let enter = |gate: u64| (gate & OPEN != 0).then_some(gate + 1);
        self.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok()
    }
}

/// The threads of a device. The caller of [`Pool::run`] is thread 0.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller counted.
    ///
    /// # Errors
    /// The system's, if it gives no thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            task: Mutex::new(None),
            gate: AtomicU64::new(0),
            start: Event::default(),
            left: Event::default(),
            quit: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = Builder::new()
                .name(format!("pawl-cpu-{index}"))
                .spawn(move || work(&shared, index))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Workers that sleep until there is a task, or are about to.
    #[cfg(test)]
    pub fn sleepers(&self) -> u32 {
        self.shared.start.sleepers()
    }

    /// Threads that may take part, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(thread index)` on this thread and on those workers that come before this
    /// thread's own call returns; returns when all of them are done. So `task(0)` must see to it
    /// that all the work is done, and may share it with whoever is there. A panic in it ends the
    /// process: others would wait for what the thread was to finish.
    pub fn run(&mut self, task: &(dyn Fn(usize) + Sync)) {
        let bomb = AbortOnPanic;
        if self.workers.is_empty() {
            task(0);
            std::mem::forget(bomb);
            return;
        }
        // SAFETY: only the lifetime is changed. Workers use the task between joining and leaving;
        // none joins once the gate is shut below, and all have left when this returns. A panic on
        // the way ends the process.
        let erased: Task = unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task)
        };
        let shared = &*self.shared;
        *shared.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(SendTask(erased));
        shared.gate.store((shared.task_number() + 1) << 32 | OPEN, Ordering::Release);
        shared.start.notify();
        task(0);
        shared.gate.fetch_and(!OPEN, Ordering::Relaxed);
        let empty = || shared.gate.load(Ordering::Acquire) & (OPEN - 1) == 0;
        shared.left.wait(empty);
        std::mem::forget(bomb);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::Release);
        self.shared.start.notify();
        for worker in self.workers.drain(..) {
            // A worker that panicked has ended the process already.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let quit = || shared.quit.load(Ordering::Acquire);
        shared.start.wait(|| quit() || shared.task_number() != seen);
        if quit() {
            return;
        }
        let bomb = AbortOnPanic;
        if shared.join() {
            // Inside, so that the number cannot change before this worker leaves.
            seen = shared.task_number();
            let task = *shared.task.lock().unwrap_or_else(PoisonError::into_inner);
            let SendTask(task) = task.expect("a task is set before the gate opens");
            // SAFETY: `run` keeps the function alive until this worker has left.
            unsafe { (*task)(index) };
            shared.gate.fetch_sub(1, Ordering::Release);
            shared.left.notify();
        } else {
            seen = shared.task_number();
        }
        std::mem::forget(bomb);
    }
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        // Only reached by unwinding; the panic's message is already out.
        std::process::abort();
    }
}
