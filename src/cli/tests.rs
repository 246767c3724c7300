//! Where a flag's value comes from, and what is refused.

use super::{Cli, Command, parse_from};

fn parse(args: &[&str]) -> Result<Cli, String> {
    let args = std::iter::once("pawl").chain(args.iter().copied()).map(Into::into).collect();
    parse_from(args).map_err(|error| error.to_string())
}

fn serve(args: &[&str]) -> crate::serve::ServeArgs {
    match parse(&[&["serve"], args].concat()).unwrap().command {
        Command::Serve(mut args) => {
            args.core.fold_negations();
            *args
        }
        other => panic!("{other:?}"),
    }
}

fn config_file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

#[test]
fn a_file_gives_what_was_not_typed() {
    let file = config_file(
        "max-num-seqs = 7\nport = 1234\nasync-scheduling = false\ndisable-log-stats = true\n\
         served-model-name = [\"a\", \"b\"]\nlog-level = \"debug\"\nmax_model_len = \"8k\"",
    );
    let path = file.path().display().to_string();
    let args = serve(&["--config", &path, "--port", "99"]);
    assert_eq!(args.core.max_num_seqs, 7);
    assert_eq!(args.frontend.port, 99, "the command line wins");
    assert_eq!(args.core.depth(), Some(1));
    assert!(args.frontend.api.disable_log_stats);
    assert_eq!(args.shared.served_model_name, ["a", "b"]);
    assert_eq!(args.core.max_model_len.map(|count| count.0), Some(8000));
    let log = parse(&["serve", "--config", &path]).unwrap().log;
    assert_eq!(log.log_level, "debug");
}

#[test]
fn what_a_file_may_not_say() {
    let check = |text: &str, words: &[&str]| {
        let file = config_file(text);
        let error = parse(&["serve", "--config", &file.path().display().to_string()]).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
    };
    check("max-num-sequences = 3", &["max-num-sequences", "pawl serve"]);
    check("no-async-scheduling = true", &["async-scheduling = false"]);
    check("port = \"many\"", &["--port", "many"]);
    check("port = ", &["--config"]);
    check("[port]\nx = 1", &["port"]);
    let error = parse(&["serve", "--config", "/does/not/exist"]).unwrap_err();
    assert!(error.contains("/does/not/exist"), "{error}");
}

#[test]
fn the_last_of_a_pair_wins() {
    assert_eq!(serve(&[]).core.depth(), None);
    assert_eq!(serve(&["--async-scheduling"]).core.depth(), Some(2));
    assert_eq!(serve(&["--no-async-scheduling"]).core.depth(), Some(1));
    assert_eq!(serve(&["--async-scheduling", "--no-async-scheduling"]).core.depth(), Some(1));
    assert_eq!(serve(&["--no-async-scheduling", "--async-scheduling"]).core.depth(), Some(2));
    assert_eq!(serve(&["--async-scheduling=false"]).core.depth(), Some(1));
}

#[test]
fn flags_of_vllm_that_are_missing_are_refused_by_name() {
    let error = parse(&["serve", "--tensor-parallel-size", "2"]).unwrap_err();
    assert!(error.contains("--tensor-parallel-size"), "{error}");
    assert!(error.contains("one device"), "{error}");
    let unknown = parse(&["serve", "--max-num-sequences", "2"]).unwrap_err();
    assert!(unknown.contains("unexpected argument"), "{unknown}");
}

#[test]
fn no_refused_flag_is_one_that_we_have() {
    use clap::CommandFactory;
    let command = Cli::command();
    for subcommand in ["serve", "engine-core", "api-server", "batch"] {
        let subcommand = command.find_subcommand(subcommand).unwrap();
        for (flag, _) in super::refused::REFUSED {
            let ours = subcommand.get_arguments().any(|arg| arg.get_long() == Some(flag));
            assert!(!ours, "--{flag} is refused, and a flag of {}", subcommand.get_name());
        }
    }
}

#[test]
fn every_flag_is_an_environment_variable_of_its_name() {
    use clap::CommandFactory;
    let command = Cli::command();
    for subcommand in ["serve", "engine-core", "api-server", "batch"] {
        let subcommand = command.find_subcommand(subcommand).unwrap();
        for arg in subcommand.get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            let exempt = ["help", "version", "supervised", "reuse-port"].contains(&long);
            if exempt || long.starts_with("no-") {
                continue;
            }
            let expected = format!("PAWL_{}", long.to_uppercase().replace('-', "_"));
            let env = arg.get_env().map(|name| name.to_string_lossy().into_owned());
            assert_eq!(env.as_deref(), Some(expected.as_str()), "--{long}");
        }
    }
}

/// What the supervisor writes for its children says the same as what it was told.
#[test]
fn a_written_file_reads_back() {
    let args = serve(&["--max-num-seqs", "9", "--no-enable-prefix-caching", "--api-key", "s,t"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("core.toml");
    super::write_config(&path, &args.core).unwrap();
    let path = path.display().to_string();
    let again = parse(&["engine-core", "--listen", "ipc:///tmp/x/core", "--config", &path]);
    let Command::EngineCore(again) = again.unwrap().command else { panic!("another command") };
    assert_eq!(toml::to_string(&again.core).unwrap(), toml::to_string(&args.core).unwrap());
    assert_eq!(again.core.enable_prefix_caching, Some(false));
}
