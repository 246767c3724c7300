//! Pages written by hand, compared with what the code says.

use std::collections::BTreeSet;

use super::{between, check_same, markdown, quoted, read, root, rows, section, ticked};

fn set<T: Into<String>>(items: impl IntoIterator<Item = T>) -> BTreeSet<String> {
    items.into_iter().map(Into::into).collect()
}

#[test]
fn the_index_names_every_page() {
    let files = std::fs::read_dir(root().join("docs")).unwrap();
    let files = files.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    let index = read("docs/README.md");
    let linked = index.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
    let linked = linked.filter(|link| !link.starts_with("..")).map(str::to_owned);
    check_same("docs/README.md", &set(files.filter(|f| f != "README.md")), &set(linked));
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for path in markdown() {
        let text = std::fs::read_to_string(&path).unwrap();
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap().split('#').next().unwrap();
            let external = link.contains("://") || link.is_empty();
            if !external && !path.parent().unwrap().join(link).exists() {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Names of files in the prose go stale unnoticed.
#[test]
fn paths_in_the_prose_exist() {
    const TOPS: [&str; 9] = [
        "src/",
        "shared/",
        "engine-core/",
        "api-server/",
        "tests/",
        "docs/",
        "deploy/",
        "proto/",
        "shaders/",
    ];
    let mut broken = Vec::new();
    for path in markdown() {
        let text = std::fs::read_to_string(&path).unwrap();
        for word in ticked(&text).filter(|word| !word.contains(char::is_whitespace)) {
            // Names with a wildcard or a set in them stand for several.
            let plain = word.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
            let ours = TOPS.iter().any(|top| word.starts_with(top));
            if plain && ours && !root().join(word).exists() {
                broken.push(format!("{}: {word}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Each command line in the documentation is one that the command takes.
#[test]
fn commands_in_the_documentation_parse() {
    let mut broken = Vec::new();
    let mut tried = 0;
    for path in markdown() {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(|line| line.trim().trim_start_matches("$ "));
        let lines =
            lines.map(|line| line.split(" #").next().unwrap().trim_end_matches(['\\', '&']));
        for command in lines.chain(ticked(&text)).filter(|word| word.starts_with("pawl ")) {
            // Places for the reader's own words, and lines that are cut short.
            if command.contains(['…', '[', '<', '·']) || command.contains(" …") {
                continue;
            }
            let words = command.replace("HOST", "localhost").replace("PORT", "5555");
            let words = words.replace(" ADDR", " ipc:///tmp/a").replace(" FILE", " f");
            let words: Vec<&str> = words.split_whitespace().collect();
            tried += 1;
            if let Err(why) = crate::cli::known_flags(&words) {
                broken.push(format!("{}: {command}: {why}", path.display()));
            }
        }
    }
    assert!(tried > 10, "only {tried} commands were found");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn routes_are_on_the_page() {
    let page = read("docs/api.md");
    let code = read("api-server/src/http/mod.rs");
    let code = between(&code, "pub fn router(", "let mut router");
    let table = section(&page, "## Routes");
    let on_page = rows(table).flat_map(|row| ticked(row[0]).collect::<Vec<_>>());
    let on_page = on_page.map(|cell| cell.rsplit(' ').next().unwrap());
    let on_page = on_page.filter(|cell| cell.starts_with('/'));
    // A part of a path that stands for anything is in capitals on the page.
    let code = quoted(code).map(|route| route.replace("{*name}", "NAME"));
    check_same("routes", &set(code), &set(on_page));

    let admin = read("api-server/src/admin/mod.rs");
    let admin = between(&admin, "Router::new()", ".with_state");
    let part = section(&page, "## The admin listener");
    let words = ticked(part).map(|word| word.rsplit(' ').next().unwrap());
    let on_page = set(words.filter(|word| word.starts_with('/')));
    check_same("routes of the admin listener", &set(quoted(admin)), &on_page);
}

#[test]
fn request_fields_are_on_the_page() {
    let mut code = BTreeSet::new();
    for file in ["sampling", "completion", "chat"] {
        let text = read(&format!("api-server/src/openai/{file}.rs"));
        for list in text.split("FIELDS: &[&str] =").skip(1) {
            code.extend(set(quoted(between(list, "&[", "]"))));
        }
    }
    code.insert("prompt".into());
    let page = read("docs/api.md");
    let table = section(&page, "## Requests");
    // What stands after `:` or in other columns are values, not fields.
    let mut on_page = BTreeSet::new();
    for row in rows(table.split("\n\nRefused by name").next().unwrap()) {
        on_page.extend(set(ticked(row[0])));
    }
    for paragraph in ["Refused by name:", "Taken and of no effect:"] {
        on_page.extend(set(ticked(between(table, paragraph, ".\n"))));
    }
    on_page.remove("X-Request-Id");
    on_page.remove("stream_options.include_usage");
    check_same("request fields", &code, &on_page);
}

/// The fate table names the histograms of whole requests; the code's table says which they are.
#[test]
fn the_fate_table_names_the_histograms_that_the_code_has() {
    let reference = pawl_api_server::metrics::reference_markdown();
    let moving = |when: &str| {
        let rows = rows(&reference).filter(|row| row.get(4).is_some_and(|moves| *moves == when));
        rows.map(|row| {
            let name = row[0].trim_matches('`').trim_start_matches("vllm:").to_owned();
            name.trim_end_matches("_seconds").to_owned()
        })
        .collect::<BTreeSet<_>>()
    };
    let page = read("docs/metrics.md");
    let one = between(&page, "\n(1) ", ". A request that");
    check_same(
        "(1)",
        &moving("each completed request (stop, length, repetition)"),
        &set(ticked(one)),
    );
    let two = between(&page, "\n(2) ", ":");
    check_same("(2)", &moving("when all n choices have completed"), &set(ticked(two)));
}

#[test]
fn what_a_batch_says_of_bad_lines() {
    let code: String = ["input", "mod"].map(|f| read(&format!("src/batch/{f}.rs"))).concat();
    let calls = code.split("BadLine::new(").skip(1).filter_map(|rest| quoted(rest).next());
    let fields = code.split("BadLine { code: ").skip(1).filter_map(|rest| quoted(rest).next());
    let page = read("docs/batch.md");
    let on_page = rows(section(&page, "## Lines that are no requests"));
    let on_page = on_page.map(|row| row[0].trim_matches('`').to_owned());
    let code = calls.chain(fields).chain(["invalid_line"]).filter(|c| c.contains('_'));
    check_same("codes of bad lines", &set(code), &set(on_page));
}
