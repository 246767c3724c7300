//! A pool of parked workers that run one function together, and the barrier they meet at.
//!
//! A step is hundreds of operations of a few microseconds each, so threads meet by spinning. The
//! spin is bounded: a thread that waits longer yields, then sleeps until it is woken, because other
//! work shares these cores and a polling thread would slow it down.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Turns of spinning before the first yield: some microseconds, the length of an operation.
const SPINS: u32 = 1_000;
/// Yields before the thread goes to sleep.
const YIELDS: u32 = 64;

/// A counter that threads can wait on: spin, then yield, then sleep.
#[derive(Debug, Default)]
struct Event {
    generation: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Event {
    fn now(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    fn advance(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        // SeqCst on both sides: either this load sees the sleeper, or the sleeper, which counts
        // itself before its last look at the generation, sees the new one.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }

    fn wait_past(&self, seen: u32) {
        for _ in 0..SPINS {
            if self.now() != seen {
                return;
            }
            std::hint::spin_loop();
        }
        for _ in 0..YIELDS {
            if self.now() != seen {
                return;
            }
            std::thread::yield_now();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.generation.load(Ordering::SeqCst) == seen {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Where all threads of a pool meet.
#[derive(Debug)]
pub struct Barrier {
    threads: u32,
    arrived: AtomicU32,
    event: Event,
}

impl Barrier {
    fn new(threads: usize) -> Self {
        let threads = u32::try_from(threads).expect("a machine has fewer than 2^32 threads");
        Self { threads, arrived: AtomicU32::new(0), event: Event::default() }
    }

    /// Returns once every thread of the pool has called it. What they wrote before is visible after.
    pub fn wait(&self) {
        if self.threads == 1 {
            return;
        }
        let seen = self.event.now();
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.event.advance();
        } else {
            self.event.wait_past(seen);
        }
    }
}

/// The function that the workers run, as a pointer whose lifetime `run` guards.
type Task = *const (dyn Fn(usize) + Sync);

#[derive(Debug)]
struct Shared {
    task: Mutex<Option<SendTask>>,
    start: Event,
    barrier: Barrier,
    quit: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct SendTask(Task);

// SAFETY: the function is Sync, and `run` returns only after every worker is done with it.
unsafe impl Send for SendTask {}

/// See [`Pool::meeting`].
#[derive(Clone, Debug)]
pub struct Meeting(Arc<Shared>);

impl Meeting {
    /// The pool's barrier.
    pub fn barrier(&self) -> &Barrier {
        &self.0.barrier
    }
}

/// The threads of a device. The caller of [`Pool::run`] is thread 0.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller counted; `cores`, if there are enough, are what the
    /// workers are pinned to. The caller is not pinned: it is not ours.
    ///
    /// # Errors
    /// The system's, if it gives no thread.
    pub fn new(threads: usize, cores: &[usize]) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            task: Mutex::new(None),
            start: Event::default(),
            barrier: Barrier::new(threads),
            quit: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let core = if cores.len() >= threads { cores.get(index).copied() } else { None };
            // The generation is read here, not in the worker: a worker that starts late must not
            // take the first task for an old one.
            let seen = shared.start.now();
            let worker = std::thread::Builder::new()
                .name(format!("pawl-cpu-{index}"))
                .spawn(move || work(&shared, index, core, seen))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that take part, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Where the threads of a running task meet, to be kept while it runs.
    pub fn meeting(&self) -> Meeting {
        Meeting(Arc::clone(&self.shared))
    }

    /// Runs `task(thread index)` on every thread, and returns when all are done. A panic in it
    /// ends the process: the others wait at a barrier that would never fill.
    pub fn run(&mut self, task: &(dyn Fn(usize) + Sync)) {
        let bomb = AbortOnPanic;
        if !self.workers.is_empty() {
            // SAFETY: only the lifetime is changed; the barrier below is passed by every worker
            // after its last use of the task, and a panic on the way ends the process.
            let task: Task = unsafe {
                std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(
                    task,
                )
            };
            *self.shared.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(SendTask(task));
            self.shared.start.advance();
        }
        task(0);
        self.shared.barrier.wait();
        std::mem::forget(bomb);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        self.shared.start.advance();
        for worker in self.workers.drain(..) {
            // A worker that panicked has ended the process already.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, index: usize, core: Option<usize>, mut seen: u32) {
    if let Some(core) = core {
        let mut set = nix::sched::CpuSet::new();
        // Refused in some containers; the thread then runs where the system puts it.
        let _ = set
            .set(core)
            .and_then(|()| nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set));
    }
    loop {
        shared.start.wait_past(seen);
        seen = seen.wrapping_add(1);
        if shared.quit.load(Ordering::SeqCst) {
            return;
        }
        let bomb = AbortOnPanic;
        let task = *shared.task.lock().unwrap_or_else(PoisonError::into_inner);
        let SendTask(task) = task.expect("a task is set before the start event");
        // SAFETY: `run` keeps the function alive until this worker has passed the barrier.
        unsafe { (*task)(index) };
        shared.barrier.wait();
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

/// The cores that this process may run on.
#[must_use]
pub fn allowed_cores() -> Vec<usize> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0));
    let allowed = set.map(|set| {
        (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
    });
    allowed.unwrap_or_default()
}

/// Of `cores`, one for each physical core: two hardware threads of a core share its multipliers,
/// and a decode that reads memory gains nothing from the second.
#[must_use]
pub fn physical_cores(cores: &[usize]) -> Vec<usize> {
    let mut seen = std::collections::BTreeSet::new();
    let mut first_of_its_core = |cpu: &usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        // Where the system does not tell, each is its own.
        let siblings = std::fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string());
        seen.insert(siblings)
    };
    cores.iter().copied().filter(|cpu| first_of_its_core(cpu)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_thread_runs_every_task_and_sees_what_the_others_wrote() {
        let mut pool = Pool::new(4, &[]).unwrap();
        let slots: Vec<AtomicUsize> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..200 {
            let shared = Arc::clone(&pool.shared);
            pool.run(&|index| {
                slots[index].store(round, Ordering::Relaxed);
                shared.barrier.wait();
                for slot in &slots {
                    assert_eq!(slot.load(Ordering::Relaxed), round);
                }
            });
        }
    }

    #[test]
    fn a_sleeping_pool_wakes_up() {
        let mut pool = Pool::new(3, &[]).unwrap();
        let count = AtomicUsize::new(0);
        pool.run(&|_| _ = count.fetch_add(1, Ordering::Relaxed));
        // Until the workers sleep, as they do after their bounded spin.
        while pool.shared.start.sleepers.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        pool.run(&|_| _ = count.fetch_add(1, Ordering::Relaxed));
        assert_eq!(count.into_inner(), 6);
    }
}
