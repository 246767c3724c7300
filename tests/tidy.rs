//! The laws of the source tree, checked as text. Each law is a function with its reason; a file
//! that breaks one is named with its line.

// Everything here is a test; clippy sees only functions marked as one.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// One file of the tree, as git would list it.
struct Source {
    /// Relative to the workspace, with `/`.
    path: String,
    text: String,
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn under(&self, folder: &str) -> bool {
        self.path.starts_with(folder)
    }

    /// Lines of code with their numbers: no comments, and no literal text, so that a law may be
    /// spoken of in either.
    fn code(&self) -> Vec<(usize, String)> {
        self.text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, without_literals_and_comments(line)))
            .collect()
    }
}

fn without_literals_and_comments(line: &str) -> String {
    let mut out = String::new();
    let mut chars = line.chars().peekable();
    let mut in_string = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if in_string => {
                chars.next();
            }
            '"' => in_string = !in_string,
            '/' if !in_string && chars.peek() == Some(&'/') => break,
            _ if in_string => {}
            _ => out.push(c),
        }
    }
    out
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Text files of the tree, without what is built or hidden.
fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if matches!(name.as_str(), "target" | ".git" | "__pycache__") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = std::fs::read_to_string(&path) {
                let path = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
                found.push(Source { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Fails with every place where `breaks` finds something.
fn law(reason: &str, breaks: impl Fn(&Source) -> Vec<(usize, String)>) {
    let mut broken = Vec::new();
    for source in sources() {
        for (line, what) in breaks(&source) {
            broken.push(format!("{}:{line}: {what}", source.path));
        }
    }
    assert!(broken.is_empty(), "{reason}\n  {}", broken.join("\n  "));
}

/// Places in `source`'s code where one of `words` stands as a whole word.
fn places(source: &Source, words: &[&str]) -> Vec<(usize, String)> {
    let boundary = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let mut found = Vec::new();
    for (number, line) in source.code() {
        for word in words {
            let hit = line.match_indices(word).any(|(at, _)| {
                boundary(line[..at].chars().next_back())
                    && boundary(line[at + word.len()..].chars().next())
            });
            if hit {
                found.push((number, (*word).to_owned()));
            }
        }
    }
    found
}

#[test]
fn device_code_lives_under_device() {
    law("device code lives only under engine-core/src/device/ (and its benches)", |source| {
        if !source.is_rust()
            || source.under("engine-core/src/device/")
            || source.under("engine-core/benches/")
            || source.under("tests/tidy")
        {
            return Vec::new();
        }
        // `half` is only a crate name where a path follows it.
        let words = ["wgpu", "naga", "target_feature", "std::arch", "core::arch", "half::"];
        places(source, &words)
    });
}

#[test]
fn scheduler_and_kv_cache_know_no_device_model_or_runner() {
    law("scheduler/ and kv_cache/ speak of block ids and token counts only", |source| {
        let pure =
            source.under("engine-core/src/scheduler/") || source.under("engine-core/src/kv_cache/");
        if !pure {
            return Vec::new();
        }
        places(source, &["crate::device", "crate::model", "crate::runner", "Instant", "tokio"])
    });
}

#[test]
fn state_machines_are_told_the_time_and_intervals_never_come_from_the_wall_clock() {
    law("a state machine gets its time from a Clock", |source| {
        let machines = [
            "shared/src/rendezvous/",
            "engine-core/src/engine/",
            "engine-core/src/scheduler/",
            "api-server/src/output_handler/",
        ];
        let test = source.path.contains("/tests/") || source.path.ends_with("tests.rs");
        if test || !machines.iter().any(|folder| source.under(folder)) {
            return Vec::new();
        }
        places(source, &["Instant", "SystemTime", "SystemClock"])
    });
    law(
        "the wall clock is for people: it is read by the Clock, for the log and for names",
        |source| {
            let homes =
                ["shared/src/clock.rs", "shared/src/telemetry.rs", "src/bench/serve/mod.rs"];
            let test = source.path.contains("/tests/") || source.under("tests/");
            if !source.is_rust() || test || homes.contains(&source.path.as_str()) {
                return Vec::new();
            }
            places(source, &["SystemTime"])
        },
    );
}

#[test]
fn crates_stay_in_their_folders() {
    let homes: [(&[&str], &str); 3] = [
        (&["zeromq"], "shared/src/transport"),
        (&["rmp", "rmp_serde", "rmpv"], "shared/src/protocol"),
        (&["prometheus"], "api-server/src/metrics"),
    ];
    for (words, home) in homes {
        law(&format!("{words:?} only under {home}"), |source| {
            let elsewhere = source.is_rust()
                && !source.under(home)
                && !source.under("tests/")
                && !source.under(&format!("{}/benches/", home.split('/').next().unwrap()));
            if elsewhere {
                places(source, words).into_iter().filter(|(n, _)| uses_crate(source, *n)).collect()
            } else {
                Vec::new()
            }
        });
    }
}

/// Whether line `number` names a crate as a path (`use x`, `x::`), not a variable or a field.
fn uses_crate(source: &Source, number: usize) -> bool {
    let line = &source.code()[number - 1].1;
    line.contains("::") || line.trim_start().starts_with("use ")
}

#[test]
fn no_vendor_or_driver_names() {
    law("tuning is a function of limits and features, never of a vendor's name", |source| {
        let shader = source.path.ends_with(".wgsl");
        if !(source.is_rust() || shader) || source.under("tests/tidy") {
            return Vec::new();
        }
        let names =
            ["nvidia", "radeon", "amdgpu", "adreno", "lavapipe", "llvmpipe", "geforce", "radv"];
        let mut found = Vec::new();
        for (index, line) in source.text.lines().enumerate() {
            let lower = line.to_lowercase();
            found.extend(
                names.iter().filter(|n| lower.contains(**n)).map(|n| (index + 1, (*n).to_owned())),
            );
        }
        found
    });
}

#[test]
fn unsafe_has_a_home_and_a_reason() {
    law("unsafe lives in the devices and in the one line that maps a file", |source| {
        let home = source.under("engine-core/src/device/cpu")
            || source.path == "engine-core/src/device/vulkan/mod.rs"
            || source.path == "shared/src/model_card/map.rs"
            || source.under("engine-core/benches/");
        if !source.is_rust() || home || source.under("tests/tidy") {
            return Vec::new();
        }
        places(source, &["unsafe"])
    });
    law("each unsafe says why it is sound", |source| {
        if !source.is_rust() || source.under("tests/tidy") {
            return Vec::new();
        }
        let lines: Vec<&str> = source.text.lines().collect();
        places(source, &["unsafe"])
            .into_iter()
            // A declaration passes the duty on; its `# Safety` section says what the duty is.
            .filter(|(number, _)| !lines[number - 1].contains("unsafe fn"))
            .filter(|(number, _)| !reason_above(&lines, *number))
            .collect()
    });
}

/// Whether a `SAFETY:` comment stands in the statement's line or close above it.
fn reason_above(lines: &[&str], number: usize) -> bool {
    let from = number.saturating_sub(8);
    lines[from..number].iter().any(|line| line.contains("SAFETY:"))
}

#[test]
fn files_stay_readable() {
    law("a file that passes 500 lines wants to be a folder; 700 is too long", |source| {
        if !source.is_rust() {
            return Vec::new();
        }
        let lines = source.text.lines().count();
        if lines > 700 { vec![(lines, format!("{lines} lines"))] } else { Vec::new() }
    });
    law("lines end within 100 columns (tests may hold whole values as they are)", |source| {
        let test = source.path.contains("/tests/") || source.path.ends_with("tests.rs");
        if !source.is_rust() || test {
            return Vec::new();
        }
        let code = source.text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        code.lines()
            .enumerate()
            .filter(|(_, line)| line.chars().count() > 100 && !line.contains("http"))
            .map(|(index, line)| (index + 1, format!("{} columns", line.chars().count())))
            .collect()
    });
}

#[test]
fn nothing_unfinished_or_local_is_committed() {
    law("no unfinished code, no ignored test, no path of one machine", |source| {
        if source.under("tests/tidy") || source.path.ends_with(".snap") {
            return Vec::new();
        }
        let words = ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!(", "#[ignore", "/root/"];
        let mut found = Vec::new();
        for (index, line) in source.text.lines().enumerate() {
            found.extend(
                words.iter().filter(|w| line.contains(**w)).map(|w| (index + 1, (*w).to_owned())),
            );
        }
        found
    });
}

#[test]
fn every_folder_of_the_layout_says_what_it_is() {
    let folders = ["proto", "shared", "engine-core", "api-server", "shaders", "tests", "deploy"];
    let missing: BTreeSet<_> =
        folders.iter().filter(|f| !root().join(f).join("README.md").is_file()).collect();
    assert!(missing.is_empty(), "folders without a README.md: {missing:?}");
}

#[test]
fn arrows_between_crates_point_one_way() {
    let depends = |package: &str, on: &str| {
        let manifest = std::fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
        manifest.lines().any(|line| line.starts_with(on))
    };
    for (package, forbidden) in [
        ("shared", "pawl-"),
        ("engine-core", "pawl-api-server"),
        ("engine-core", "axum"),
        ("engine-core", "tonic"),
        ("api-server", "pawl-engine-core"),
        ("api-server", "wgpu"),
    ] {
        assert!(!depends(package, forbidden), "{package} must not depend on {forbidden}");
    }
}
