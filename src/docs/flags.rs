//! `docs/flags.md`, from the flags themselves.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command, CommandFactory};

use crate::cli::{Answer, Cli, FOREIGN, SERVING};

#[test]
fn the_page_of_flags() {
    check_generated_page(&mut Cli::command());
}

fn check_generated_page(command: &mut Command) {
    command.build();
    let mut page = String::from(HEAD);
    let _ = writeln!(page, "\n## Every command\n");
    flags_table(&mut page, &[command], |arg| arg.is_global_set());

    let serving: Vec<&Command> =
        SERVING.iter().map(|name| command.find_subcommand(name).expect(name)).collect();
    let _ = writeln!(page, "\n## `pawl {}`", SERVING.join("`, `pawl "));
    for command in &serving {
        let _ = writeln!(page, "\n`{}`: {}", usage(command), about(command));
        arguments(&mut page, command);
    }
    for heading in headings(&serving) {
        let _ = writeln!(page, "\n### {heading}\n");
        flags_table(&mut page, &serving, |arg| arg.get_help_heading() == Some(heading));
    }

    let others = command.get_subcommands().filter(|c| !SERVING.contains(&c.get_name()));
    for command in others.filter(|c| c.get_name() != "help") {
        section(&mut page, command);
    }

    let _ = writeln!(page, "\n## Flags of vLLM\n\n{FOREIGN_HEAD}");
    let _ = writeln!(page, "| flag | is | since, or the way out |\n|---|---|---|");
    for (names, answer, way_out) in FOREIGN {
        let names = names.replace(' ', "`, `");
        let is = match answer {
            Answer::Refused => "refused".into(),
            Answer::Only(values) => format!("refused but for `{}`", values.join("`, `")),
            Answer::Switch | Answer::AnyValue => "without effect".to_owned(),
        };
        let _ = writeln!(page, "| `{names}` | {is} | {} |", escaped(way_out));
    }
    super::check_generated("docs/flags.md", &page);
}

const HEAD: &str = "# Flags

This page is made from the code (`UPDATE_DOCS=1 cargo nextest run -p pawl page_of_flags`).

A flag's value comes from the first of these that has one: the command line, the environment, the
file named by `--config`, the default. In the environment `--max-num-seqs` is `PAWL_MAX_NUM_SEQS`,
in the file it is the key `max-num-seqs`. Flags without a variable are marked with an asterisk.
Where there is `--no-x`, the variable and the key are those of `--x`, with `true` or `false`.
Names and meanings are those of `vllm serve` where it has them. Unknown flags are refused.
";

const FOREIGN_HEAD: &str = "\
Names may be written with underscores, as `--max_num_seqs`. Of vLLM's flags that Pawl does not have,
these are refused with the way out, or left out with a warning where they change nothing.
";

/// A command that is not among the serving ones, and what is below it.
fn section(page: &mut String, command: &Command) {
    if command.has_subcommands() {
        for below in command.get_subcommands().filter(|c| c.get_name() != "help") {
            section(page, below);
        }
        return;
    }
    let _ = writeln!(page, "\n## `{}`\n", path(command));
    let _ = writeln!(page, "`{}`: {}", usage(command), about(command));
    arguments(page, command);
    if command.get_arguments().any(|arg| is_flag(arg) && !arg.is_global_set()) {
        page.push('\n');
        flags_table(page, &[command], |arg| !arg.is_global_set());
    }
}

fn path(command: &Command) -> String {
    command.get_bin_name().unwrap_or(command.get_name()).to_owned()
}

fn usage(command: &Command) -> String {
    let text = command.clone().render_usage().to_string();
    text.trim_start_matches("Usage: ").replace('\n', " ")
}

fn about(command: &Command) -> String {
    command.get_about().map(|about| about.to_string()).unwrap_or_default()
}

fn arguments(page: &mut String, command: &Command) {
    if command.get_positionals().next().is_some() {
        page.push('\n');
    }
    for arg in command.get_positionals() {
        let name = arg.get_value_names().unwrap_or_default().join(" ");
        let _ = writeln!(page, "- `{name}`: {}", help(arg));
    }
}

fn is_flag(arg: &Arg) -> bool {
    let hidden = arg.is_hide_set() || ["help", "version"].contains(&arg.get_id().as_str());
    arg.get_long().is_some() && !hidden
}

/// Headings in the order in which they come.
fn headings<'a>(commands: &[&'a Command]) -> Vec<&'a str> {
    let mut headings = Vec::new();
    for arg in commands.iter().flat_map(|command| command.get_arguments()) {
        if let Some(heading) = arg.get_help_heading().filter(|_| is_flag(arg))
            && !headings.contains(&heading)
        {
            headings.push(heading);
        }
    }
    headings
}

/// A row for each flag; where commands say the same of one, a single row.
fn flags_table(page: &mut String, commands: &[&Command], wanted: impl Fn(&Arg) -> bool) {
    let several = commands.len() > 1;
    let mut rows: Vec<(String, Vec<&str>)> = Vec::new();
    for command in commands {
        for arg in command.get_arguments().filter(|arg| is_flag(arg) && wanted(arg)) {
            let row = row(command, arg);
            match rows.iter_mut().find(|(known, _)| *known == row) {
                Some((_, names)) => names.push(command.get_name()),
                None => rows.push((row, vec![command.get_name()])),
            }
        }
    }
    let of = if several { " of |" } else { "" };
    let _ = writeln!(page, "| flag | default | what it does |{of}");
    let _ = writeln!(page, "|---|---|---|{}", if several { "---|" } else { "" });
    for (row, names) in rows {
        let of = if several { format!(" {} |", names.join(", ")) } else { String::new() };
        let _ = writeln!(page, "{row}{of}");
    }
}

fn row(command: &Command, arg: &Arg) -> String {
    let long = arg.get_long().expect("only flags come here");
    let value = match arg.get_action() {
        ArgAction::Set | ArgAction::Append
            if arg.get_num_args().is_some_and(|n| n.takes_values()) =>
        {
            let names = arg.get_value_names().unwrap_or_default().join(" ");
            let possible: Vec<String> = arg
                .get_possible_values()
                .iter()
                .filter(|value| !value.is_hide_set())
                .map(|value| value.get_name().to_owned())
                .collect();
            let text = if possible.is_empty() { names } else { possible.join("\\|") };
            if arg.is_require_equals_set() { format!("[={text}]") } else { format!(" {text}") }
        }
        _ => String::new(),
    };
    // The variable of a negation is that of what it negates.
    let negates = long.strip_prefix("no-").is_some_and(|positive| {
        command.get_arguments().any(|other| other.get_long() == Some(positive))
    });
    let star = if arg.get_env().is_some() || negates { "" } else { " *" };
    // Neither a switch nor a list has a default worth a word.
    let default: Vec<_> = match arg.get_action() {
        ArgAction::SetTrue => Vec::new(),
        _ => arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect(),
    };
    let (help, told) = default_told(&help(arg));
    let default = if default.is_empty() { told } else { format!("`{}`", default.join(" ")) };
    format!("| `--{long}{value}`{star} | {default} | {help} |")
}

/// A default that is no plain value stands at the end of the help, in brackets.
fn default_told(help: &str) -> (String, String) {
    match help.split_once("[default: ") {
        Some((help, default)) => (help.trim().to_owned(), default.trim_end_matches(']').to_owned()),
        None => (help.to_owned(), String::new()),
    }
}

fn help(arg: &Arg) -> String {
    escaped(&arg.get_help().map(|help| help.to_string()).unwrap_or_default())
}

/// Within a cell of a table.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;").replace('*', "\\*")
}
