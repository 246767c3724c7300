//! `docs/wire.md`: names that travel, and the figures of bounds and times.

use std::collections::BTreeSet;

use pawl_shared::rendezvous::message::JOIN_VERSION;
use pawl_shared::rendezvous::{ACK_INTERVAL, HeartbeatConfig, OUTBOX_BYTES_MAX, WINDOW_BYTES};

use super::{between, check_same, quoted, read, rows, section, ticked};

fn names(items: impl Iterator<Item = impl Into<String>>) -> BTreeSet<String> {
    items.map(Into::into).collect()
}

#[test]
fn control_messages_and_their_fields() {
    let code = read("shared/src/rendezvous/message.rs");
    let code = between(&code, "fn parts(&self)", "pub fn decode");
    // `"NAME"` and then `("field", …)` each; a JOIN of another version repeats one of both.
    let mut current = "";
    let code = names(quoted(code).map(|word| {
        if word.chars().all(|c| c.is_ascii_uppercase() || c == '_') {
            current = word;
            return word.to_owned();
        }
        format!("{current}.{word}")
    }));
    let page = read("docs/wire.md");
    let mut on_page = BTreeSet::new();
    for row in rows(section(&page, "## Joining")) {
        let name = row[0].trim_matches('`');
        on_page.insert(name.to_owned());
        on_page.extend(ticked(row[2]).map(|field| format!("{name}.{field}")));
    }
    check_same("control messages", &code, &on_page);
}

#[test]
fn methods_that_can_be_called() {
    let code = read("engine-core/src/engine/utility.rs");
    let code = between(&code, "match call.method.as_str() {", "_ => return");
    let arms = code.lines().filter_map(|line| line.trim().split_once("=>"));
    let code = names(arms.flat_map(|(names, _)| quoted(names).collect::<Vec<_>>()));
    let page = read("docs/wire.md");
    let on_page = rows(section(&page, "## Calls"));
    let on_page = names(on_page.flat_map(|row| ticked(row[0]).collect::<Vec<_>>()));
    check_same("methods", &code, &on_page);
}

#[test]
fn codes_of_failed_requests() {
    let admission = read("engine-core/src/engine/admission.rs");
    let admission = between(&admission, "mod code {", "\n}").lines();
    let mut code =
        names(admission.filter_map(|line| line.split_once("&str = ")?.1.split('"').nth(1)));
    let scheduler = read("engine-core/src/scheduler/mod.rs");
    code.extend(names(quoted(between(&scheduler, "let code = if", ";"))));
    let update = read("engine-core/src/scheduler/update.rs");
    code.extend(names(quoted(between(&update, "OutputError {\n            code: ", ","))));
    let page = read("docs/wire.md");
    let on_page = rows(section(&page, "## Requests that fail in the core"));
    let on_page = names(on_page.map(|row| row[0].trim_matches('`')));
    check_same("codes", &code, &on_page);
}

#[test]
fn what_is_added_to_vllms_messages() {
    let stats = read("shared/src/protocol/stats.rs");
    let stats = between(&stats, "pub struct PawlStats {", "\n}");
    let stats = stats.lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(':'));
    let ready = read("engine-core/src/core/mod.rs");
    let ready = quoted(&ready).filter(|word| word.starts_with("pawl_")).collect::<Vec<_>>();
    let code = names(
        stats
            .map(|(name, _)| format!("pawl.{name}"))
            .chain(ready.iter().map(|word| (*word).to_owned())),
    );
    let page = read("docs/wire.md");
    let on_page = rows(section(&page, "## What is added"));
    let on_page = names(on_page.flat_map(|row| ticked(row[1]).collect::<Vec<_>>()));
    check_same("additions", &code, &on_page);
}

#[test]
fn figures() {
    let beat = HeartbeatConfig::default();
    let code = [
        format!("version {JOIN_VERSION} of joining"),
        format!("{} MiB on their way", WINDOW_BYTES >> 20),
        format!("{} MiB in its outbox", OUTBOX_BYTES_MAX >> 20),
        format!("{} ms", ACK_INTERVAL.as_millis()),
        format!("silent for {} s", beat.silence.as_secs()),
        format!("after {} s", beat.dead.as_secs()),
        format!("more than {} s", beat.own_jump.as_secs()),
    ];
    let page = read("docs/wire.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let missing: Vec<_> = code.iter().filter(|text| !page.contains(text.as_str())).collect();
    assert!(missing.is_empty(), "docs/wire.md does not say {missing:?}");
}
