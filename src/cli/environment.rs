//! Variables of the environment that look like ours.

use std::collections::BTreeSet;

use clap::{Command, CommandFactory};

/// Variables that are no flags.
const OTHERS: [&str; 1] = ["PAWL_CACHE_DIR"];
/// Beginnings of those that only tests read.
const OF_TESTS: [&str; 2] = ["PAWL_TEST_", "PAWL_SIM_"];

/// Most letters that a slip of the pen changes.
pub(super) const SLIPS_MAX: usize = 3;

/// A warning for each `PAWL_…` variable that nothing reads.
pub fn unknown_variables(
    variables: impl Iterator<Item = (String, String)>,
) -> impl Iterator<Item = String> {
    let known = known();
    variables.filter_map(move |(name, value)| {
        let ours = name.starts_with("PAWL_")
            && !OF_TESTS.iter().any(|beginning| name.starts_with(beginning))
            && !of_a_service(&name, &value);
        (ours && !known.contains(&name)).then(|| {
            let nearest = known.iter().map(|other| (distance(&name, other), other)).min();
            let hint = match nearest {
                Some((slips, other)) if slips <= SLIPS_MAX => format!(", did you mean {other}?"),
                _ => String::new(),
            };
            format!("the environment variable {name} has no effect: nothing is called so{hint}")
        })
    })
}

/// Kubernetes tells each container of each service, whatever that is called.
fn of_a_service(name: &str, value: &str) -> bool {
    let of_a_port = name
        .split_once("_PORT_")
        .is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()));
    of_a_port || name.contains("_SERVICE_") || value.starts_with("tcp://")
}

fn known() -> BTreeSet<String> {
    fn add(command: &Command, known: &mut BTreeSet<String>) {
        let names = command.get_arguments().filter_map(|arg| arg.get_env());
        known.extend(names.map(|name| name.to_string_lossy().into_owned()));
        command.get_subcommands().for_each(|below| add(below, known));
    }
    let mut known = BTreeSet::from(OTHERS.map(str::to_owned));
    add(&super::Cli::command(), &mut known);
    known
}

/// Letters that must be put in, taken out or changed to make `a` into `b`.
pub(super) fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.bytes().enumerate() {
            let changed = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_nothing_reads_is_told_with_the_nearest_that_is_read() {
        let variables = [
            ("PAWL_MAX_NUM_SEQS", "4"),
            ("PAWL_MAX_NUM_SEQ", "4"),
            ("PAWL_ENABLE_TELEPATHY", "1"),
            ("PAWL_CACHE_DIR", "/x"),
            ("PAWL_TEST_MODEL", "/x"),
            ("PAWL_SERVICE_HOST", "10.0.0.1"),
            ("PAWL_FRONTEND_PORT", "tcp://10.0.0.1:8000"),
            ("PAWL_FRONTEND_PORT_8000_TCP_ADDR", "10.0.0.1"),
            ("HOME", "/x"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let told: Vec<String> = unknown_variables(variables.into_iter()).collect();
        insta::assert_snapshot!(told.join("\n"), @r"
        the environment variable PAWL_MAX_NUM_SEQ has no effect: nothing is called so, did you mean PAWL_MAX_NUM_SEQS?
        the environment variable PAWL_ENABLE_TELEPATHY has no effect: nothing is called so
        ");
    }

    #[test]
    fn distances() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("same", "same"), 0);
    }
}
