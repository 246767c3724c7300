//! Which cores there are for threads.

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
