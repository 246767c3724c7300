//! The reference pages say what the code does, in both directions: what is in the code is on the
//! page, and what is on the page is in the code. With `UPDATE_DOCS` set in the environment, these
//! tests write the generated pages instead of comparing them.

mod deploy;
mod flags;
mod frames;
mod pages;
mod wire;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Compares a page that is generated whole, or writes it.
fn check_generated(path: &str, text: &str) {
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(root().join(path), text).unwrap();
        return;
    }
    assert!(read(path) == text, "{path} is stale: run this test with UPDATE_DOCS=1");
}

/// Fails with what is only in the code and what is only on the page.
fn check_same(what: &str, code: &BTreeSet<String>, page: &BTreeSet<String>) {
    let only = |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).cloned().collect();
    let (missing, stale): (Vec<String>, Vec<String>) = (only(code, page), only(page, code));
    assert!(!code.is_empty(), "nothing was found in the code for {what}");
    assert!(
        missing.is_empty() && stale.is_empty(),
        "{what}: not on the page: {missing:?}; on the page but not in the code: {stale:?}"
    );
}

/// The part of `text` between two markers.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let start = text.find(from).unwrap_or_else(|| panic!("no {from:?}")) + from.len();
    let length = text[start..].find(to).unwrap_or_else(|| panic!("no {to:?} after {from:?}"));
    &text[start..start + length]
}

/// Every text in double quotes, of code without escapes in them.
fn quoted(code: &str) -> impl Iterator<Item = &str> {
    code.split('"').skip(1).step_by(2)
}

/// Every text in backticks.
fn ticked(page: &str) -> impl Iterator<Item = &str> {
    page.split('`').skip(1).step_by(2)
}

/// The cells of a table's rows, head and rule left out.
fn rows(table: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = table.lines().filter(|line| line.starts_with('|'));
    lines.skip(2).map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
}

/// The section of a page under a heading, up to the next of any level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let start = page.find(heading).unwrap_or_else(|| panic!("no section {heading:?}"));
    let rest = &page[start + heading.len()..];
    &rest[..rest.find("\n#").unwrap_or(rest.len())]
}

/// Markdown files of the tree.
fn markdown() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !matches!(name.as_str(), "target" | ".git") {
                folders.push(path);
            } else if name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}
