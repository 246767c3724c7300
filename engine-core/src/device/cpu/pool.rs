//! Threads that run one function together.
//!
//! A step is hundreds of operations of a few microseconds each, so threads wait for one another by
//! spinning. The spin is bounded: a thread that waits longer yields, then sleeps until it is woken,
//! because other work shares these cores and a polling thread would slow it down. For the same
//! reason nobody waits for a thread that the system has not let run: a worker that comes too late
//! for a task is not part of it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Turns of spinning before the first yield: some tens of microseconds, longer than an operation.
const SPINS: u32 = 1_000;
/// Yields before the thread goes to sleep.
const YIELDS: u32 = 64;

/// Something that threads wait for: spin, then yield, then sleep.
#[derive(Debug, Default)]
pub struct Event {
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Event {
    /// Returns once `ready` says so. `ready` must load with SeqCst what is stored with SeqCst
    /// before [`Event::notify`].
    pub fn wait(&self, ready: impl Fn() -> bool) {
        if self.spin(SPINS, &ready) {
            return;
        }
        for _ in 0..YIELDS {
            if ready() {
                return;
            }
            std::thread::yield_now();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Either the notifier sees this sleeper, or the sleeper sees what the notifier stored.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !ready() {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether `ready` came true within so many turns.
    pub fn spin(&self, turns: u32, ready: &impl Fn() -> bool) -> bool {
        for _ in 0..turns {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        ready()
    }

    /// Wakes those who sleep.
    pub fn notify(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }
}

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
        self.gate.load(Ordering::SeqCst) >> 32
    }

    /// Counts a worker in, unless the task is over.
    fn join(&self) -> bool {
        let enter = |gate: u64| (gate & OPEN != 0).then_some(gate + 1);
        self.gate.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok()
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
            let worker = std::thread::Builder::new()
                .name(format!("pawl-cpu-{index}"))
                .spawn(move || work(&shared, index))?;
            pool.workers.push(worker);
        }
        Ok(pool)
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
        shared.gate.store((shared.task_number() + 1) << 32 | OPEN, Ordering::SeqCst);
        shared.start.notify();
        task(0);
        shared.gate.fetch_and(!OPEN, Ordering::SeqCst);
        let empty = || shared.gate.load(Ordering::SeqCst) & (OPEN - 1) == 0;
        shared.left.wait(empty);
        std::mem::forget(bomb);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
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
        let quit = || shared.quit.load(Ordering::SeqCst);
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
            shared.gate.fetch_sub(1, Ordering::SeqCst);
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

    /// Runs `count` pieces of work, claimed by whoever is there.
    fn share(pool: &mut Pool, count: usize) -> usize {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        pool.run(&|_| {
            while next.fetch_add(1, Ordering::Relaxed) < count {
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        done.into_inner()
    }

    #[test]
    fn all_work_is_done_whoever_comes() {
        for threads in [1, 2, 4] {
            let mut pool = Pool::new(threads).unwrap();
            for round in 0..300 {
                assert_eq!(share(&mut pool, round), round);
            }
        }
    }

    #[test]
    fn a_sleeping_pool_wakes_up() {
        let mut pool = Pool::new(3).unwrap();
        for _ in 0..2 {
            // Until the workers sleep, as they do after their bounded spin.
            while pool.shared.start.sleepers.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            let there = AtomicUsize::new(0);
            pool.run(&|_| {
                there.fetch_add(1, Ordering::SeqCst);
                while there.load(Ordering::SeqCst) < 3 {
                    std::thread::yield_now();
                }
            });
        }
    }
}
