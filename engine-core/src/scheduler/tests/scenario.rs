//! Scenario files: a script in, a trace out, once at depth 1 and once at depth 2.
//!
//! ```text
//! config blocks=9 block=4 seqs=4 budget=64 length=32 policy=priority    (first line)
//! add 1 prompt=10 max=4        a request of 10 tokens of its own; like=1: those of request 1
//! step 3                       turns of the loop; `run`: until idle
//! abort 1 | leave 7 (client) | stats 0 (client) | nan 1 | pace 20 (ms a token)
//! reset | reset running        of the prefix cache
//! ```

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use pawl_shared::protocol::{EngineCoreEvent, EventKind, SamplingParams, StopReason};

use super::fake_runner::VOCAB;
use super::world::{Ask, Fate, World};
use crate::kv_cache::CacheConfig;
use crate::scheduler::{ClientIndex, Policy, RequestOutput, SchedulerConfig};
use crate::step::{BlockTableUpdate, RequestKey};

#[test]
fn scenarios() {
    insta::glob!("../scenarios", "*.txt", |path| insta::assert_snapshot!(check(path)));
}

fn check(path: &Path) -> String {
    let script = std::fs::read_to_string(path).expect("a scenario is readable");
    let [one, two] = [1, 2].map(|depth| Scenario::run(&script, depth));
    for (key, fate) in one.world.fates.iter().filter(|(_, fate)| !fate.aborted) {
        let other = &two.world.fates[key];
        let told = |fate: &Fate| (fate.delivered.clone(), fate.finish);
        assert_eq!(told(fate), told(other), "request {key} at depth 1 and 2");
    }
    format!("== depth 1\n{}\n== depth 2\n{}", one.trace, two.trace)
}

struct Scenario {
    world: World,
    trace: String,
}

type Words<'a> = BTreeMap<&'a str, &'a str>;

fn number<T: std::str::FromStr>(words: &Words<'_>, name: &str, default: T) -> T {
    let parse = |text: &&str| text.parse().unwrap_or_else(|_| panic!("{name}={text}"));
    words.get(name).map_or(default, parse)
}

fn numbers(words: &Words<'_>, name: &str) -> Option<Vec<u32>> {
    let text = words.get(name)?;
    Some(text.split(',').map(|id| id.parse().expect("token ids")).collect())
}

impl Scenario {
    fn run(script: &str, depth: usize) -> Self {
        let lines = || script.lines().map(|line| line.split('#').next().unwrap_or("").trim());
        let mut lines = lines().filter(|line| !line.is_empty());
        let config = lines.next().expect("a scenario starts with its config");
        let words = words(config);
        let cache = CacheConfig {
            num_blocks: number(&words, "blocks", 64),
            block_size: number(&words, "block", 4),
            prefix_caching: number(&words, "caching", true),
        };
        let time = |name| {
            let ms: u64 = number(&words, name, 0);
            (ms > 0).then_some(Duration::from_millis(ms))
        };
        let config = SchedulerConfig {
            max_num_seqs: number(&words, "seqs", 8),
            max_num_batched_tokens: number(&words, "budget", 64),
            max_model_len: number(&words, "length", 64),
            long_prefill_token_threshold: number(&words, "threshold", 0),
            chunked_prefill: number(&words, "chunked", true),
            policy: match words.get("policy") {
                Some(&"priority") => Policy::Priority,
                _ => Policy::Fcfs,
            },
            watermark: number(&words, "watermark", 0.0),
            reserve_full_isl: number(&words, "reserve", true),
            max_step: time("max_step_ms"),
            max_shared_step: time("max_shared_step_ms"),
            max_queued: number(&words, "queue", 100),
        };
        let mut this = Self { world: World::new(config, cache, depth), trace: String::new() };
        lines.for_each(|line| this.command(line));
        this
    }

    fn command(&mut self, line: &str) {
        let mut parts = line.split_whitespace();
        let verb = parts.next().expect("lines are not empty");
        let subject: Option<u64> = parts.next().and_then(|word| word.parse().ok());
        let words = words(line);
        if !matches!(verb, "step" | "run") {
            writeln!(self.trace, "> {line}").unwrap();
        }
        match (verb, subject) {
            ("add", Some(key)) => {
                if let Err(rejected) = self.world.add(ask(key, &words)) {
                    writeln!(self.trace, "  rejected: {rejected}").unwrap();
                }
                let script = numbers(&words, "script").unwrap_or_default();
                self.world.runner.scripts.insert(RequestKey(key), script);
            }
            ("abort", Some(key)) => {
                let known = self.world.abort(key);
                writeln!(self.trace, "  {}", if known { "gone" } else { "unknown" }).unwrap();
            }
            ("leave", Some(client)) => self.world.abort_client(client as u32),
            ("nan", Some(key)) => {
                self.world.runner.nans.insert(RequestKey(key));
            }
            ("pace", Some(millis)) => self.world.per_token = Duration::from_millis(millis),
            ("stats", Some(client)) => self.stats(client as u32),
            ("reset", _) => {
                if line.ends_with("running") {
                    self.world.scheduler.preempt_running(self.world.now);
                }
                let done = self.world.scheduler.reset_prefix_cache();
                writeln!(self.trace, "  {done}").unwrap();
            }
            ("step", count) => (0..count.unwrap_or(1)).for_each(|_| self.turn()),
            ("run", _) => {
                for _ in 0..1000 {
                    if self.world.idle() {
                        return;
                    }
                    self.turn();
                }
                panic!("still not idle after 1000 turns");
            }
            _ => panic!("a scenario says {line:?}"),
        }
    }

    fn turn(&mut self) {
        let submitted = self.world.submit();
        if submitted {
            self.plan();
        }
        if let Some((step, outputs)) = self.world.collect(submitted) {
            writeln!(self.trace, "result {step}{}", self.state()).unwrap();
            outputs.iter().for_each(|output| self.output(output));
        }
    }

    fn plan(&mut self) {
        let plan = &self.world.last_plan;
        let finished: Vec<_> = plan.finished.iter().map(|key| key.0.to_string()).collect();
        let forget = match finished.as_slice() {
            [] => String::new(),
            some => format!(" forgets {}", some.join(",")),
        };
        writeln!(self.trace, "plan {}{}{forget}", plan.step, self.state()).unwrap();
        for scheduled in &plan.scheduled {
            let end = scheduled.first_position + scheduled.num_tokens;
            let blocks = match &scheduled.blocks {
                BlockTableUpdate::Append(blocks) if blocks.is_empty() => String::new(),
                BlockTableUpdate::Append(blocks) => format!(" +{}", list(blocks)),
                BlockTableUpdate::Replace(blocks) => format!(" ={}", list(blocks)),
            };
            let samples = if scheduled.samples { " samples" } else { "" };
            let (key, first) = (scheduled.key.0, scheduled.first_position);
            writeln!(self.trace, "  {key}: {first}..{end}{blocks}{samples}").unwrap();
        }
    }

    fn state(&self) -> String {
        let keys = |ranks: &mut dyn Iterator<Item = u64>| {
            ranks.map(|key| key.to_string()).collect::<Vec<_>>().join(",")
        };
        let scheduler = &self.world.scheduler;
        let lists = [
            ("runs", keys(&mut scheduler.running.iter().map(|rank| rank.key.0))),
            ("waits", keys(&mut scheduler.waiting.iter().map(|rank| rank.key.0))),
            ("deferred", keys(&mut scheduler.deferred.iter().map(|rank| rank.key.0))),
        ];
        let told = lists.iter().filter(|(_, keys)| !keys.is_empty());
        let mut state: String = told.map(|(name, keys)| format!(" {name} {keys}")).collect();
        write!(state, " kv {:.2}", scheduler.kv.usage()).unwrap();
        format!(" |{state} |")
    }

    fn output(&mut self, output: &RequestOutput) {
        let RequestOutput { key, output, .. } = output;
        let mut line = format!("  {}: {:?}", key.0, output.new_token_ids);
        if let Some(reason) = output.finish_reason {
            write!(line, " {}", reason.as_str()).unwrap();
        }
        match &output.stop_reason {
            Some(StopReason::Token(token)) => write!(line, " on {token}").unwrap(),
            Some(StopReason::Text(text)) => write!(line, " on {text}").unwrap(),
            None => {}
        }
        output.events.iter().for_each(|event| write!(line, " {}", told(event)).unwrap());
        if let Some(p) = output.prefill_stats {
            write!(
                line,
                " prefill prompt={} computed={} cached={} created={}",
                p.num_prompt_tokens,
                p.num_computed_tokens,
                p.num_cached_tokens,
                p.num_cache_creation_tokens
            )
            .unwrap();
        }
        if let Some(rows) = &output.new_logprobs {
            write!(line, " {rows:?}").unwrap();
        }
        if let Some(error) = &output.error {
            write!(line, " {} nans={}", error.code, output.num_nans_in_logits).unwrap();
        }
        writeln!(self.trace, "{line}").unwrap();
    }

    fn stats(&mut self, client: u32) {
        let stats = self.world.scheduler.take_stats(ClientIndex(client));
        let p = &stats.prefix_cache_stats;
        let pawl = stats.pawl.expect("our own stats have our own part");
        writeln!(
            self.trace,
            "  running {} waiting {} skipped {} kv {:.2} steps {} preemptions {} | prefix{} \
             {}: {}/{} again {}: {}/{}",
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            stats.num_skipped_waiting_reqs,
            stats.kv_cache_usage,
            stats.step_counter,
            pawl.num_preemptions,
            if p.reset { " reset" } else { "" },
            p.requests,
            p.hits,
            p.queries,
            p.preempted_requests,
            p.preempted_hits,
            p.preempted_queries,
        )
        .unwrap();
    }
}

fn words(line: &str) -> Words<'_> {
    line.split_whitespace().filter_map(|word| word.split_once('=')).collect()
}

fn list(blocks: &[crate::step::BlockId]) -> String {
    blocks.iter().map(|block| block.0.to_string()).collect::<Vec<_>>().join(",")
}

fn told(event: &EngineCoreEvent) -> String {
    let kind = match event.kind {
        EventKind::Queued => "queued",
        EventKind::Scheduled => "scheduled",
        EventKind::Preempted => "preempted",
    };
    format!("{kind}@{:.0}", event.timestamp)
}

fn ask(key: u64, words: &Words<'_>) -> Ask {
    let like: u64 = number(words, "like", key);
    let own = |index: u64| (VOCAB + 1000 * like + index) as u32;
    let prompt: u64 = number(words, "prompt", 0);
    let mut prompt: Vec<u32> = (0..prompt).map(own).collect();
    // Tokens of its own behind those it shares.
    prompt.extend((0..number(words, "tail", 0_u64)).map(|i| (900_000 + 1000 * key + i) as u32));
    Ask {
        key,
        client: number(words, "client", 0),
        prompt,
        priority: number(words, "priority", 0),
        salt: words.get("salt").map(ToString::to_string),
        sampling: SamplingParams {
            max_tokens: Some(number(words, "max", 4)),
            min_tokens: number(words, "min", 0),
            eos_token_id: words.get("eos").map(|id| id.parse().expect("a token id")),
            stop_token_ids: numbers(words, "stop").unwrap_or_default(),
            logprobs: words.get("logprobs").map(|count| count.parse().expect("a count")),
            skip_reading_prefix_cache: words.get("skip_cache").map(|_| true),
            ..SamplingParams::default()
        },
    }
}
