//! The same requests however their steps are cut: alone or in a batch of up to 32, prompts whole or
//! in chunks, prefixes cached or not, preempted or not, on one thread or two, one step in flight or
//! two. Every token is the same.

use std::path::Path;

use pawl_shared::model_card::testing::default_model;

use super::{goldens, greedy, system};
use crate::harness::{Run, rounds};

struct Request {
    prompt: Vec<u32>,
    count: usize,
}

/// Prompts of the goldens, and pieces of the perplexity's text, of which several begin alike. They
/// end after different numbers of tokens, so that a batch passes through all sizes as it ends.
fn requests() -> Vec<Request> {
    let text = include_str!("../../goldens/perplexity.json");
    let text: Vec<(u32, Option<f64>)> = serde_json::from_str(text).unwrap();
    let piece = |index: usize| {
        let (first, len) = (150 * (index % 4), 17 + 9 * (index / 4));
        text[first..first + len].iter().map(|(token, _)| *token).collect()
    };
    let goldens = goldens().into_iter().map(|golden| golden.prompt);
    // The goldens are short: they need several times the blocks that they begin with, so that a
    // small pool preempts.
    let least = [20; 24].into_iter().chain([4; 26]);
    let requests: Vec<_> = goldens
        .chain((0..26).map(piece))
        .zip(least)
        .enumerate()
        .map(|(index, (prompt, least))| Request { prompt, count: least + 7 * index % 25 })
        .collect();
    assert_eq!(requests.len(), 50);
    requests
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Requests in a step at most.
    batch: usize,
    /// Tokens in a step at most.
    chunk: usize,
    cached: bool,
    preempted: bool,
    threads: usize,
    /// Whether a step is planned while another runs.
    ahead: bool,
}

impl Cut {
    fn flags(&self) -> Vec<String> {
        let on_off = |on: bool, flag: &str| format!("--{}{flag}", if on { "" } else { "no-" });
        let mut flags = vec![
            format!("--max-num-seqs={}", self.batch),
            format!("--max-num-batched-tokens={}", self.chunk),
            format!("--threads={}", self.threads),
            on_off(self.cached, "enable-prefix-caching"),
            on_off(self.ahead, "async-scheduling"),
            "--max-model-len=512".to_owned(),
        ];
        if self.preempted {
            // Room for about eight of the fifty at their ends (16 tokens a block).
            flags.push("--num-gpu-blocks-override=34".to_owned());
        }
        flags
    }

    /// The texts of `requests`, sent all at once.
    fn texts(&self, model: &Path, requests: &[Request]) -> Vec<Vec<u32>> {
        let run = Run::new();
        let flags = self.flags();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let (_core, frontend) = system(&run, model, &flags);
        let http = frontend.http;
        let all = || -> Vec<Vec<u32>> {
            std::thread::scope(|scope| {
                let send = |request: &Request| greedy(http, &request.prompt, request.count);
                let threads = requests.iter().map(|request| scope.spawn(move || send(request)));
                let threads: Vec<_> = threads.collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            })
        };
        let mut texts = all();
        if self.cached && !self.preempted {
            // Once more: now all that is asked has been computed before.
            let cold = std::mem::replace(&mut texts, all());
            assert_eq!(cold, texts, "{self:?}, cold and warm");
            assert!(frontend.scrape().get("vllm:prefix_cache_hits_total") > 1_000.0, "{self:?}");
        }
        if self.preempted && self.batch > 16 {
            let preempted = frontend.scrape().get("vllm:num_preemptions_total");
            assert!(preempted > 0.0, "{self:?}: the pool was meant to be too small");
        }
        texts
    }
}

const ALONE: Cut =
    Cut { batch: 1, chunk: 2048, cached: false, preempted: false, threads: 1, ahead: false };

/// Each value of each setting, and most pairs.
const SOME: [Cut; 5] = [
    Cut { batch: 32, chunk: 2048, cached: true, threads: 2, ahead: true, ..ALONE },
    Cut { batch: 7, chunk: 24, threads: 2, ..ALONE },
    Cut { batch: 32, chunk: 64, cached: true, preempted: true, ahead: true, ..ALONE },
    Cut { batch: 32, chunk: 33, preempted: true, threads: 2, ..ALONE },
    Cut { batch: 2, chunk: 512, cached: true, ..ALONE },
];

fn every_cut() -> Vec<Cut> {
    let mut cuts = vec![ALONE];
    let mut each = |change: &dyn Fn(Cut) -> Vec<Cut>| {
        cuts = cuts.iter().flat_map(|cut| change(*cut)).collect();
    };
    each(&|cut| [1, 2, 5, 8, 17, 32].map(|batch| Cut { batch, ..cut }).into());
    each(&|cut| [33, 200, 2048].map(|chunk| Cut { chunk, ..cut }).into());
    each(&|cut| [false, true].map(|cached| Cut { cached, ..cut }).into());
    each(&|cut| [false, true].map(|preempted| Cut { preempted, ..cut }).into());
    each(&|cut| [1, 2].map(|threads| Cut { threads, ..cut }).into());
    each(&|cut| [false, true].map(|ahead| Cut { ahead, ..cut }).into());
    cuts
}

#[test]
fn weights_greedy_text_is_the_same_however_steps_are_cut() {
    let Some(model) = default_model() else { return };
    let requests = requests();
    let alone = ALONE.texts(&model, &requests);
    let cuts = if rounds(0, 1) == 0 { SOME.to_vec() } else { every_cut() };
    for cut in cuts {
        assert_eq!(cut.texts(&model, &requests), alone, "{cut:?}");
    }
}
