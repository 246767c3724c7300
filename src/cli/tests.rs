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
    check("tensor_parallel_size = 2", &["tensor_parallel_size", "one device"]);
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

/// How `pawl serve ARGS` is refused, or what it warns of.
fn sifted(args: &str) -> String {
    let words: Vec<&str> = args.split_whitespace().collect();
    let told = match parse(&[&["serve"], &words[..]].concat()) {
        Ok(cli) if cli.warnings.is_empty() => "taken".into(),
        Ok(cli) => cli.warnings.join("; "),
        Err(error) => error.lines().next().unwrap().to_owned(),
    };
    format!("{args} => {told}")
}

#[test]
fn what_a_start_script_of_vllm_says_is_taken_left_out_or_refused_by_name() {
    let told = [
        "m --served-model-name a b --api-key s t",
        "--max_num_seqs 4 --no_enable_prefix_caching --block_size=32",
        "-asc 2",
        "-tp 1 -pp=1",
        "-tp 2",
        "-tp=2",
        "--tensor_parallel_size=2",
        "--tensor-parallel-size",
        "-O3",
        "-O 3 --port 99",
        "--dtype auto",
        "--dtype bfloat16",
        "--speculative-config.method ngram",
        "--enforce-eager --uvicorn-log-level warning --port 99",
        "--no-enable-log-requests",
        "--disable-log-requests --swap-space 4",
        "--generation-config vllm",
        "--chat-template-content-format auto",
        "--gpu-memory-utilization 0.9 --device vulkan:1",
        "--gpu-memory-utilization 1.5",
        "--device tpu",
        "--model m",
        "-- --dtype",
        "--max-num-sequences 2",
        "--max-model-length 2",
        "--tensor-paralel-size 2",
        "--tensor-parallel 2",
        "--gpu-mem-utilization 0.9",
        "--port 1 --port 2",
        "--api-key= --port 1",
        "--max-model-len auto",
        "--max-model-len -1",
        "--max-model-len 0",
        "--seed -1",
        "--served-model-name=",
        "--max-num-queued-reqs 0",
        "--watermark 1",
        "--mock-step-ms 1e300",
        "--mock-step-ms -1",
        "--max-n 0",
        "--max-connections 0",
        "--log-level chatty",
        "--log-level info,pawl::request=warn",
        "--log-level info,,=",
    ];
    insta::assert_snapshot!(told.map(sifted).join("\n"));
    let version = parse(&["serve", "--version"]).unwrap_err();
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "not taken for --revision: {version}");
    let near = parse(&["serve", "--max-model-length", "5"]).unwrap_err();
    assert!(near.contains("a similar argument exists: '--max-model-len'"), "{near}");
    let error = parse(&["serve", "-tp", "2", "--dtype", "bfloat16"]).unwrap_err();
    assert!(error.contains("-tp") && error.contains("--dtype"), "all that is refused: {error}");
}

#[test]
fn what_is_typed_last_or_empty() {
    assert_eq!(serve(&["--port", "1", "--port", "2"]).frontend.port, 2);
    let keys = serve(&["--api-key", "", "--api-key", "k"]).frontend.api_key;
    assert_eq!(keys, ["k"]);
    assert_eq!(serve(&["--max-model-len", "auto"]).core.max_model_len, None);
    assert_eq!(serve(&["--max-model-len=-1"]).core.max_model_len, None);
}

#[test]
fn a_file_may_say_what_has_no_effect() {
    let file = config_file("tensor-parallel-size = 1\nenforce-eager = true\nport = 7");
    let cli = parse(&["serve", "--config", &file.path().display().to_string()]).unwrap();
    assert_eq!(cli.warnings.len(), 2, "{:?}", cli.warnings);
    let yaml = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(yaml.path(), "port: 7\n").unwrap();
    let error = parse(&["serve", "--config", &yaml.path().display().to_string()]).unwrap_err();
    assert!(error.contains("not as YAML"), "{error}");
}

#[test]
fn values_behind_what_is_left_out_are_kept() {
    let args = serve(&["--swap-space", "4", "--port", "99", "-O", "--max_num_seqs", "7", "m"]);
    assert_eq!((args.frontend.port, args.core.max_num_seqs), (99, 7));
    assert_eq!(args.model.as_deref(), Some("m"));
}

#[test]
fn no_foreign_flag_is_one_that_we_have_or_is_named_twice() {
    use clap::CommandFactory;
    let command = Cli::command();
    let serve = command.find_subcommand("serve").unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for name in super::refused::FOREIGN.iter().flat_map(|(names, ..)| names.split_whitespace()) {
        let mut longs = serve.get_arguments().filter_map(clap::Arg::get_long);
        let ours = longs.any(|long| name.strip_prefix("--") == Some(long));
        assert!(!ours, "{name} is refused, and a flag of ours");
        assert!(seen.insert(name), "{name} is there twice");
    }
}

#[test]
fn a_port_that_a_service_of_that_name_left_is_explained() {
    let error = parse(&["serve", "--port", "tcp://10.0.0.1:8000"]).unwrap_err();
    assert!(error.contains("Kubernetes"), "{error}");
}

#[test]
fn a_core_that_is_elsewhere_takes_no_flags_here() {
    let elsewhere = ["serve", "--await-core", "tcp://127.0.0.1:29550"];
    let error = parse(&[&elsewhere[..], &["--max-num-seqs", "4"]].concat()).unwrap_err();
    assert!(error.contains("--max-num-seqs") && error.contains("--await-core"), "{error}");
    parse(&[&elsewhere[..], &["--scheduling-policy", "priority"]].concat()).unwrap();
    let error = parse(&["serve", "--advertise", "here"]).unwrap_err();
    assert!(error.contains("--await-core"), "{error}");
}

/// What would end in an overflow, or in an error after an hour of load.
#[test]
fn figures_of_a_bench_are_bounded() {
    for flags in [
        "serve --num-warmups 4294967295",
        "serve --random-input-len 4294967295",
        "serve --random-prefix-len 4294967295",
        "serve --random-output-len 4294967295",
        "serve --ready-check-timeout-sec 18446744073709551615",
        "serve --request-rate 1e-300",
        "serve --burstiness 1e-300",
        "serve --header x",
        "serve --metadata x",
        "step --batch-size 4294967295",
        "step --context 4294967295",
        "step --decode-steps 4294967295",
        "step --prefill 4294967295",
    ] {
        let words: Vec<&str> = flags.split(' ').collect();
        let error = parse(&[&["bench"], &words[..]].concat()).unwrap_err();
        assert!(error.contains("invalid value") && error.contains(words[1]), "{flags}: {error}");
    }
}

#[test]
fn threads_are_at_least_one_and_boundedly_many() {
    assert_eq!(serve(&["--threads", "1024"]).core.threads, Some(1024));
    for bad in ["0", "1025", "10000", "-1", "many"] {
        for command in ["serve", "engine-core"] {
            let flag = format!("--threads={bad}");
            let error = parse(&[command, &flag, "--listen", "ipc:///tmp/x/core"]).unwrap_err();
            assert!(command == "serve" || error.contains("from 1 to 1024"), "{bad}: {error}");
        }
    }
}

#[test]
fn origins_as_json_are_refused_rather_than_taken_for_names() {
    let error = parse(&["serve", "--allowed-origins", "[\"*\"]"]).unwrap_err();
    assert!(error.contains("without brackets"), "{error}");
}

#[test]
fn every_flag_is_an_environment_variable_of_its_name() {
    use clap::CommandFactory;
    let command = Cli::command();
    for subcommand in ["serve", "engine-core", "api-server", "batch"] {
        let subcommand = command.find_subcommand(subcommand).unwrap();
        for arg in subcommand.get_arguments() {
            let Some(long) = arg.get_long() else { continue };
            let exempt =
                ["help", "version", "supervised", "reuse-port", "listed-pair"].contains(&long);
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
