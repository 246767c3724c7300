//! What the system tells about a process.

use std::time::Duration;

fn read(pid: i32, name: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

/// Resident memory.
pub fn resident_kib(pid: i32) -> u64 {
    let status = read(pid, "status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    kib.unwrap_or_else(|| panic!("process {pid} has no memory: it is gone"))
}

/// Time on processors so far, of all threads.
pub fn cpu_time(pid: i32) -> Duration {
    let stat = read(pid, "stat");
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
    let ticks = |index: usize| fields[index].parse::<u64>().unwrap();
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).unwrap().unwrap();
    Duration::from_secs_f64((ticks(11) + ticks(12)) as f64 / per_second as f64)
}

/// What its open descriptors are.
fn descriptors(pid: i32) -> Vec<String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.map(|link| link.display().to_string()).collect()
}

/// The tcp ports (IPv4) it listens on.
pub fn listening_ports(pid: i32) -> Vec<u16> {
    const LISTENS: &str = "0A";
    let own = descriptors(pid);
    let table = read(pid, "net/tcp");
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, *fields.get(3)?, fields.get(9)?);
        let ours = state == LISTENS && own.contains(&format!("socket:[{inode}]"));
        let (_, port) = local.split_once(':')?;
        ours.then(|| u16::from_str_radix(port, 16).ok())?
    };
    table.lines().filter_map(port).collect()
}
