//! Flags of `vllm serve` that Pawl knows but does not have. Most are refused by name, with the way
//! out, rather than as a spelling mistake, and so are names that are almost one of them. What asks
//! for nothing, or for what Pawl does anyway, is left out with a warning: a start script need not
//! break for it.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{Command, Error};

use super::environment::{SLIPS_MAX, distance};

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answer {
    Refused,
    /// Refused, but with one of these values, which say what Pawl does anyway.
    Only(&'static [&'static str]),
    /// Has no effect, and takes no value.
    Switch,
    /// Has no effect, whatever its value.
    AnyValue,
}
use Answer::{AnyValue, Only, Refused, Switch};

const DEVICE: &str = "Pawl runs a model on one device; leave it out";
const REPLICAS: &str = "start one core for each replica and put a balancer before them";
const DIAL: &str = "use `pawl engine-core --handshake tcp://HOST:PORT`";
const QUANTISED: &str = "the GGUF file says how its weights are quantised; leave it out";
const GGUF: &str = "Pawl reads one GGUF file; leave it out";
const TOKENIZER: &str = "the tokenizer comes with the GGUF, or as tokenizer.json beside it";
const GPU: &str = "Pawl has no such kernels to choose; leave it out";
const LORA: &str = "Pawl has no LoRA adapters yet; merge the adapter into the GGUF";
const MEDIA: &str = "Pawl takes text alone; leave it out";
const TOOLS: &str = "Pawl does not parse tool calls yet; leave it out";
const DRAFTS: &str = "Pawl does not draft tokens yet; leave it out";
const OFFLOAD: &str = "the KV cache and the weights are in main memory already; leave it out";
const TLS: &str = "put a TLS proxy before Pawl";
const LOGS: &str = "see --log-level and --log-format";

/// Names, apart by spaces; what becomes of them; and the way out. As of vLLM 0.33, with what older
/// start scripts still say.
pub const FOREIGN: &[(&str, Answer, &str)] = &[
    ("--tensor-parallel-size -tp", Only(&["1"]), DEVICE),
    ("--pipeline-parallel-size -pp", Only(&["1"]), DEVICE),
    ("--decode-context-parallel-size -dcp", Only(&["1"]), DEVICE),
    ("--prefill-context-parallel-size -pcp", Only(&["1"]), DEVICE),
    ("--nnodes -n", Only(&["1"]), DEVICE),
    ("--node-rank -r", Only(&["0"]), DEVICE),
    ("--distributed-executor-backend", Only(&["mp", "uni"]), DEVICE),
    (
        "--enable-expert-parallel -ep --master-addr --master-port --device-ids --worker-cls \
         --worker-extension-cls --all2all-backend --enable-eplb --eplb-config --enable-dbo \
         --numa-bind",
        Refused,
        DEVICE,
    ),
    ("--disable-custom-all-reduce --ray-workers-use-nsight", Switch, "there is one device"),
    ("--max-parallel-loading-workers", AnyValue, "there is one device"),
    ("--data-parallel-size -dp", Only(&["1"]), REPLICAS),
    (
        "--data-parallel-size-local -dpl",
        Only(&["1"]),
        "use `pawl engine-core --handshake` or `pawl api-server --await-core`",
    ),
    ("--data-parallel-address -dpa --data-parallel-rpc-port -dpp", Refused, DIAL),
    (
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr",
        Only(&["0"]),
        "one core has rank 0; leave it out",
    ),
    (
        "--data-parallel-backend -dpb --data-parallel-hybrid-lb -dph --data-parallel-external-lb \
         -dpe --data-parallel-multi-port-external-lb -dpm",
        Refused,
        REPLICAS,
    ),
    ("--headless", Refused, "use `pawl engine-core`"),
    ("--model", Refused, "name the model without a flag, as in `pawl serve MODEL`"),
    ("--quantization -q", Only(&["gguf"]), QUANTISED),
    ("--quantization-config --allow-deprecated-quantization", Refused, QUANTISED),
    ("--load-format", Only(&["auto", "gguf"]), GGUF),
    ("--model-impl --config-format", Only(&["auto"]), GGUF),
    (
        "--model-loader-extra-config --hf-config-path --hf-overrides --model-class-overrides \
         --rope-scaling --rope-theta --ignore-patterns --safetensors-load-strategy --convert \
         --task --pooler-config",
        Refused,
        GGUF,
    ),
    ("--use-tqdm-on-load", Switch, "there is a progress bar on a terminal"),
    ("--revision --code-revision", Refused, "name a local GGUF file"),
    ("--download-dir", Refused, "set PAWL_CACHE_DIR for the default model, HF_HOME for the hub"),
    ("--hf-token", Refused, "log in with Hugging Face's own command; leave it out"),
    ("--trust-remote-code", Switch, "Pawl runs no code that comes with a model"),
    ("--enforce-eager", Switch, "Pawl has no graph compilation to switch off"),
    ("--optimization-level -O", AnyValue, "Pawl has no graph compilation"),
    (
        "--compilation-config -cc --cudagraph-capture-sizes --max-cudagraph-capture-size \
         --max-seq-len-to-capture",
        Refused,
        "Pawl has no graph compilation; leave it out",
    ),
    ("--performance-mode --attention-backend", Only(&["auto"]), GPU),
    ("--attention-config -ac --kernel-config --moe-backend --linear-backend", Refused, GPU),
    ("--disable-cascade-attn", Switch, "Pawl has no cascade attention to switch off"),
    ("--disable-hybrid-kv-cache-manager", Switch, "there is one kind of KV cache"),
    ("--device-memory-utilization", Refused, "see --gpu-memory-utilization"),
    ("--swap-space", AnyValue, "a preempted request is computed again"),
    ("--cpu-offload-gb --kv-offloading-size", Only(&["0"]), OFFLOAD),
    ("--offload-backend --kv-offloading-backend", Refused, OFFLOAD),
    ("--prefix-caching-hash-algo", Only(&["sha256"]), "Pawl hashes blocks with SHA-256"),
    ("--calculate-kv-scales --kv-cache-dtype-skip-layers", Refused, "see --kv-cache-dtype"),
    ("--dtype", Only(&["auto"]), "the GGUF file says its weights' types; see --kv-cache-dtype"),
    ("--tokenizer --tokenizer-revision", Refused, TOKENIZER),
    ("--tokenizer-mode", Only(&["auto"]), TOKENIZER),
    ("--skip-tokenizer-init", Refused, "clients may send token ids all the same; leave it out"),
    (
        "--generation-config",
        Only(&["auto"]),
        "generation_config.json beside the model is read; remove it, or leave the flag out",
    ),
    ("--override-generation-config", Refused, "write generation_config.json beside the model"),
    (
        "--chat-template-content-format",
        Only(&["auto"]),
        "Pawl sees from the template what it takes; leave it out",
    ),
    ("--default-chat-template-kwargs", Refused, "clients send chat_template_kwargs"),
    ("--logits-processors --logits-processor-pattern", Refused, "see logit_bias in a request"),
    ("--logprobs-mode", Only(&["raw_logprobs"]), "Pawl gives raw_logprobs; leave it out"),
    ("--stream-interval", Only(&["1"]), "Pawl sends every token as it comes; leave it out"),
    ("--max-num-queued-tokens", Refused, "see --max-num-queued-reqs"),
    ("--scheduler-cls", Refused, "see --scheduling-policy"),
    ("--num-scheduler-steps --multi-step-stream-outputs", Refused, "see --async-scheduling"),
    ("--use-v2-block-manager", Switch, "there is one block manager"),
    ("--preemption-mode", Only(&["recompute"]), "a preempted request is computed again"),
    ("--enable-sleep-mode", Refused, "Pawl cannot give back its memory; leave it out"),
    ("--enable-prompt-embeds", Refused, "Pawl takes text and token ids; leave it out"),
    (
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --media-io-kwargs \
         --mm-processor-cache-type --mm-encoder-tp-mode --enable-mm-embeds \
         --interleave-mm-strings --allowed-local-media-path --allowed-media-domains \
         --trust-request-mm-kwargs",
        Refused,
        MEDIA,
    ),
    (
        "--language-model-only --skip-mm-profiling --disable-chunked-mm-input \
         --disable-mm-preprocessor-cache",
        Switch,
        "Pawl takes text alone",
    ),
    (
        "--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype \
         --fully-sharded-loras --lora-target-modules",
        Refused,
        LORA,
    ),
    (
        "--enable-auto-tool-choice --tool-call-parser --tool-parser-plugin --tool-server \
         --exclude-tools-when-tool-choice-none",
        Refused,
        TOOLS,
    ),
    (
        "--reasoning-parser --reasoning-parser-plugin --reasoning-config --enable-reasoning",
        Refused,
        "Pawl does not parse reasoning yet; it stays in the content",
    ),
    ("--speculative-config -sc --spec-method --spec-model --spec-tokens", Refused, DRAFTS),
    ("--speculative-model --num-speculative-tokens", Refused, DRAFTS),
    ("--kv-transfer-config --ec-transfer-config", Refused, "Pawl has no KV connectors"),
    ("--kv-events-config", Refused, "Pawl publishes no KV events yet; leave it out"),
    (
        "--structured-outputs-config --guided-decoding-backend",
        Refused,
        "Pawl has no structured output yet; leave it out",
    ),
    ("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs", Refused, TLS),
    ("--ssl-ciphers --enable-ssl-refresh", Refused, TLS),
    ("--uds", Refused, "use --host and --port"),
    ("--root-path", Refused, "have the proxy take the path's beginning away"),
    ("--middleware", Refused, "put a proxy before Pawl"),
    ("--allow-credentials", Refused, "Pawl's keys are bearer tokens, not cookies; leave it out"),
    ("--allowed-methods --allowed-headers", Refused, "see --allowed-origins"),
    ("--uvicorn-log-level", AnyValue, LOGS),
    ("--log-config-file --logging-config", Refused, LOGS),
    ("--disable-uvicorn-access-log", Switch, "there is no access log"),
    ("--disable-access-log-for-endpoints", AnyValue, "there is no access log"),
    ("--enable-log-requests", Switch, "a line for each request is logged anyway"),
    (
        "--disable-log-requests",
        Switch,
        "a line for each request is logged, without its text; `--log-level \
         info,pawl::request=warn` leaves them out",
    ),
    ("--max-log-len", AnyValue, "what requests say is never logged"),
    ("--enable-log-outputs --enable-log-deltas", Refused, "use `pawl frames tap`"),
    ("--aggregate-engine-logging", Switch, "there is one engine"),
    ("--disable-frontend-multiprocessing", Switch, "the core is always another process"),
    ("--disable-fastapi-docs", Switch, "there are no such pages"),
    ("--enable-server-load-tracking", Switch, "/load always tells"),
    (
        "--enable-force-include-usage",
        Refused,
        "clients ask for it with stream_options.include_usage",
    ),
    ("--return-tokens-as-token-ids", Refused, "clients ask for it with return_token_ids"),
    ("--enable-tokenizer-info-endpoint", Refused, "see /tokenize"),
    ("--h11-max-incomplete-event-size --h11-max-header-count", Refused, "see --max-body-bytes"),
    ("--profiler-config", Refused, "see the `pawl:` series of /metrics"),
    (
        "--otlp-traces-endpoint --collect-detailed-traces",
        Refused,
        "Pawl exports no traces yet; see --request-timing",
    ),
    ("--enable-mfu-metrics", Refused, "Pawl does not estimate FLOPs; leave it out"),
    ("--kv-cache-metrics --kv-cache-metrics-sample", Refused, "Pawl does not sample blocks"),
    ("--show-hidden-metrics-for-version", AnyValue, "Pawl hides no metric"),
    ("--additional-config --kv-sharing-fast-prefill", Refused, "Pawl has nothing like it"),
];

/// Shorter names are too like one another to guess at.
const NAME_LETTERS_MIN: usize = 8;

/// Subcommands that take vLLM's flags.
pub const SERVING: [&str; 4] = ["serve", "engine-core", "api-server", "batch"];

/// Arguments that are ours alone, and what is to be said of those that were left out.
pub struct Sifted {
    pub args: Vec<OsString>,
    pub warnings: Vec<String>,
}

/// Writes flags as ours are written (vLLM takes `--max_num_seqs` too), leaves out what has no
/// effect, and refuses what is only vLLM's.
///
/// # Errors
/// The flags that are refused, each with the way out.
pub fn sift(command: &Command, args: Vec<OsString>) -> Result<Sifted, Error> {
    let subcommand = super::file::chosen_subcommand(command, &args);
    let serving = subcommand.as_deref().filter(|name| SERVING.contains(name));
    let mut sifted = Sifted { args: Vec::new(), warnings: Vec::new() };
    let mut rest = args.into_iter().peekable();
    let mut refused = String::new();
    // The program's own name.
    sifted.args.extend(rest.next());
    while let Some(arg) = rest.next() {
        let Some(text) = arg.to_str().filter(|text| text.starts_with('-') && *text != "-") else {
            sifted.args.push(arg);
            continue;
        };
        if text == "--" {
            sifted.args.push(arg);
            sifted.args.extend(rest);
            break;
        }
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (text, None),
        };
        let name = match name {
            "-asc" => "--api-server-count".to_owned(),
            _ if name.starts_with("--") => name.replace('_', "-"),
            _ => name.to_owned(),
        };
        let foreign = serving.filter(|name_of| !is_ours(command, name_of, &name));
        let Some((known, answer, way_out)) = foreign.and_then(|_| find(&name)) else {
            if let Some(name_of) = foreign
                && let Some((meant, way_out)) = meant(command, name_of, &name)
            {
                refused += &format!(
                    "`pawl {name_of}` has no {name}, and not vLLM's {meant}, if that is meant: \
                     {way_out}\n"
                );
                continue;
            }
            sifted.args.push(match value {
                Some(value) => format!("{name}={value}").into(),
                None => name.into(),
            });
            continue;
        };
        // `-O3` has its value in its name.
        let own = name.strip_prefix("-O").filter(|value| !value.is_empty());
        let value = value.or_else(|| own.map(str::to_owned));
        let mut take_value = || {
            let next = |next: OsString| next.to_string_lossy().into_owned();
            let is_value = |next: &OsString| !next.to_string_lossy().starts_with('-');
            value.clone().or_else(|| rest.next_if(is_value).map(next))
        };
        match answer {
            Only(values) if take_value().is_some_and(|v| values.contains(&&*v)) => continue,
            Refused | Only(_) => {
                let name_of = serving.unwrap_or_default();
                refused += &format!("`pawl {name_of}` does not have vLLM's {known}: {way_out}\n");
                continue;
            }
            Switch => {}
            AnyValue => drop(take_value()),
        }
        sifted.warnings.push(format!("{known} has no effect: {way_out}"));
    }
    if !refused.is_empty() {
        return Err(Error::raw(ErrorKind::UnknownArgument, refused));
    }
    Ok(sifted)
}

/// The flags of a subcommand, without their dashes.
fn ours<'a>(command: &'a Command, subcommand: &str) -> impl Iterator<Item = &'a str> {
    let owner = command.find_subcommand(subcommand);
    let all = command.get_arguments().chain(owner.into_iter().flat_map(Command::get_arguments));
    // Added only when the command line is read.
    all.filter_map(clap::Arg::get_long).chain(["help", "version"])
}

fn is_ours(command: &Command, subcommand: &str, name: &str) -> bool {
    name.strip_prefix("--").is_some_and(|long| ours(command, subcommand).any(|own| own == long))
}

/// The flag of vLLM that `name` almost is, or is the beginning of, if it is further from all of
/// ours; and the way out. Where one of ours is as near, clap says so.
fn meant(command: &Command, subcommand: &str, name: &str) -> Option<(&'static str, &'static str)> {
    let long = name.strip_prefix("--").filter(|long| long.len() >= NAME_LETTERS_MIN)?;
    let slips = |known: &str| if known.starts_with(long) { 1 } else { distance(long, known) };
    let own = ours(command, subcommand).map(slips).min()?;
    let (slips, known, way_out) = FOREIGN
        .iter()
        .flat_map(|(names, _, way_out)| names.split_whitespace().map(move |name| (name, way_out)))
        .filter_map(|(known, way_out)| Some((slips(known.strip_prefix("--")?), known, *way_out)))
        .min()?;
    (slips <= SLIPS_MAX && slips < own).then_some((known, way_out))
}

/// The flag of vLLM that `name` is: itself, a part of it (`--x.y`), or `--no-x`, which switches off
/// what Pawl has not.
fn find(name: &str) -> Option<(String, Answer, &'static str)> {
    let base = match name {
        _ if name.starts_with("-O") => "-O",
        _ => name.split(['.', '+']).next().unwrap_or(name),
    };
    let by_name = |name: &str| {
        FOREIGN.iter().find(|(names, ..)| names.split_whitespace().any(|known| known == name))
    };
    if let Some((_, answer, way_out)) = by_name(base) {
        return Some((base.to_owned(), *answer, way_out));
    }
    let (_, _, way_out) = by_name(&format!("--{}", base.strip_prefix("--no-")?))?;
    Some((base.to_owned(), Switch, way_out))
}

/// What becomes of vLLM's flag `--name` with these values in a file, if it is one: why it has no
/// effect, or (as an error) the way out.
pub fn in_a_file(name: &str, values: &[String]) -> Option<Result<String, &'static str>> {
    let (known, answer, way_out) = find(&format!("--{name}"))?;
    let no_effect = match answer {
        Refused => false,
        Only(allowed) => values.iter().all(|value| allowed.contains(&&**value)),
        Switch | AnyValue => true,
    };
    Some(if no_effect { Ok(format!("{known} has no effect: {way_out}")) } else { Err(way_out) })
}
