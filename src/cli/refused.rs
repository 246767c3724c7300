//! Flags of `vllm serve` that Pawl knows but does not have: refused by name, with the way out,
//! rather than as a spelling mistake.

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command};

/// Name and way out. Names as in vLLM 0.33.
pub const REFUSED: &[(&str, &str)] = &[
    ("tensor-parallel-size", "Pawl runs a model on one device; leave it out"),
    ("pipeline-parallel-size", "Pawl runs a model on one device; leave it out"),
    ("data-parallel-size", "start one core for each replica and put a balancer before them"),
    (
        "data-parallel-size-local",
        "use `pawl engine-core --handshake` or `pawl api-server --await-core`",
    ),
    ("data-parallel-address", "use `pawl engine-core --handshake tcp://HOST:PORT`"),
    ("data-parallel-rpc-port", "use `pawl engine-core --handshake tcp://HOST:PORT`"),
    ("data-parallel-rank", "one core has rank 0; leave it out"),
    ("headless", "use `pawl engine-core`"),
    ("quantization", "the GGUF file says how its weights are quantised; leave it out"),
    ("load-format", "Pawl reads GGUF; leave it out"),
    ("trust-remote-code", "Pawl runs no code that comes with a model; leave it out"),
    ("enforce-eager", "Pawl has no graph compilation to switch off; leave it out"),
    ("compilation-config", "Pawl has no graph compilation; leave it out"),
    ("gpu-memory-utilization", "on a CPU, size the KV cache with --kv-cache-memory-bytes"),
    ("dtype", "the GGUF file says the types of its weights; see --kv-cache-dtype"),
    ("tokenizer", "the tokenizer comes with the GGUF, or as tokenizer.json beside it"),
    ("tokenizer-mode", "the tokenizer comes with the GGUF; leave it out"),
    ("revision", "name a local GGUF file"),
    ("hf-overrides", "Pawl reads its configuration from the GGUF; leave it out"),
    ("enable-lora", "Pawl has no LoRA adapters yet; merge the adapter into the GGUF"),
    ("lora-modules", "Pawl has no LoRA adapters yet; merge the adapter into the GGUF"),
    ("enable-auto-tool-choice", "Pawl does not parse tool calls yet; leave it out"),
    ("tool-call-parser", "Pawl does not parse tool calls yet; leave it out"),
    ("reasoning-parser", "Pawl does not parse reasoning yet; it stays in the content"),
    ("speculative-config", "Pawl does not draft tokens yet; leave it out"),
    ("kv-transfer-config", "Pawl has no KV connectors; leave it out"),
    ("kv-events-config", "Pawl publishes no KV events yet; leave it out"),
    ("structured-outputs-config", "Pawl has no structured output yet; leave it out"),
    ("prefix-caching-hash-algo", "Pawl hashes blocks with SHA-256; leave it out"),
    ("ssl-keyfile", "put a TLS proxy before Pawl"),
    ("ssl-certfile", "put a TLS proxy before Pawl"),
    ("uds", "use --host and --port"),
    ("otlp-traces-endpoint", "Pawl exports no traces yet; see --request-timing"),
    ("enable-mfu-metrics", "Pawl does not estimate FLOPs; leave it out"),
    ("kv-cache-metrics", "Pawl does not sample block lifetimes; leave it out"),
    ("show-hidden-metrics-for-version", "Pawl hides no metric; leave it out"),
];

const PREFIX: &str = "refused-";

/// Adds the refused flags, hidden, to the subcommands that take vLLM's flags.
pub fn add_refused(command: Command) -> Command {
    ["serve", "engine-core", "api-server", "batch"].into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |mut subcommand| {
            for (flag, _) in REFUSED {
                if subcommand.get_arguments().any(|a| a.get_long() == Some(flag)) {
                    continue;
                }
                subcommand = subcommand.arg(
                    Arg::new(format!("{PREFIX}{flag}"))
                        .long(*flag)
                        .num_args(0..)
                        .action(ArgAction::Append)
                        .hide(true),
                );
            }
            subcommand
        })
    })
}

/// Refuses what was typed of them.
pub fn check(matches: &ArgMatches) -> Result<(), clap::Error> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    for (flag, way_out) in REFUSED {
        let typed = matches
            .try_contains_id(&format!("{PREFIX}{flag}"))
            .is_ok_and(|known| known && matches.value_source(&format!("{PREFIX}{flag}")).is_some());
        if typed {
            let text = format!("`pawl {name}` does not have vLLM's --{flag}: {way_out}\n");
            return Err(clap::Error::raw(ErrorKind::UnknownArgument, text));
        }
    }
    Ok(())
}
