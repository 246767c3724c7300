//! `docs/frames.md`: kinds, verdicts, the keys of a record and of `pawl_status`.

use std::collections::BTreeSet;

use clap::ValueEnum as _;
use pawl_shared::protocol::decode_value;
use pawl_shared::tap::{Passed, TapRecord};

use super::{between, check_same, quoted, read, rows, section, ticked};
use crate::frames::Kind;

fn names(items: impl Iterator<Item = impl Into<String>>) -> BTreeSet<String> {
    items.map(Into::into).collect()
}

/// What stands in backticks in the first column of a section's table.
fn first_column(page: &str, heading: &str) -> BTreeSet<String> {
    let rows = rows(section(page, heading));
    names(rows.flat_map(|row| ticked(row[0]).map(str::to_owned).collect::<Vec<_>>()))
}

#[test]
fn kinds_that_a_filter_takes() {
    let code = Kind::value_variants().iter().map(|kind| kind.name());
    let page = read("docs/frames.md");
    let on_page = between(&page, "`--kind` (", ")");
    check_same("kinds", &names(code), &names(on_page.split(", ")));
    for kind in Kind::value_variants() {
        let typed = kind.to_possible_value().expect("none is hidden");
        assert_eq!(typed.get_name(), kind.name());
    }
}

#[test]
fn verdicts_of_a_replay() {
    let code = read("src/frames/replay/compare.rs");
    let code = between(&code, "pub fn name(&self)", "pub fn detail");
    let page = read("docs/frames.md");
    check_same("verdicts", &names(quoted(code)), &first_column(&page, "## Replays"));
}

#[test]
fn keys_of_a_record() {
    let mut code = BTreeSet::new();
    for passed in [Passed::ToCore(Vec::new()), Passed::Left(String::new())] {
        let record = TapRecord { at: 0.0, client: 0, epoch: None, missed: 0, passed };
        let map = decode_value(&record.encode()).expect("a record is a map");
        let keys = map.as_map().expect("a record is a map").iter();
        code.extend(keys.filter_map(|(key, _)| key.as_str().map(str::to_owned)));
    }
    check_same("keys", &code, &first_column(&read("docs/frames.md"), "## Recordings"));
}

#[test]
fn keys_of_the_status() {
    let code = read("engine-core/src/engine/status.rs");
    let keys = code.split("\n").filter_map(|line| line.trim().strip_prefix("(\"")?.split_once('"'));
    let code = names(keys.map(|(key, _)| key));
    let page = read("docs/frames.md");
    let table = rows(section(&page, "## Clients"));
    let on_page = table.flat_map(|row| {
        // The columns of lists are told in the second column.
        let first: Vec<String> = ticked(row[0]).map(str::to_owned).collect();
        let list = first.len() == 1 && ["frontends", "requests"].contains(&first[0].as_str());
        let inner = ticked(row[1]).map(str::to_owned).filter(|_| list);
        first.iter().cloned().chain(inner.collect::<Vec<_>>()).collect::<Vec<_>>()
    });
    check_same("keys of pawl_status", &code, &names(on_page));
}
