//! One of each message with every field set, and the plainest of each.

use crate::clock::Stamp;
use crate::protocol::*;
use bytes::Bytes;

/// A message as its frames, and how it is decoded again.
pub(super) struct Sample {
    pub name: &'static str,
    pub frames: Vec<Bytes>,
    /// The index of the payload among the frames.
    pub payload: usize,
    pub decode: fn(&[Bytes]) -> Result<String, DecodeError>,
}

pub(super) fn all() -> Vec<Sample> {
    let client = |name, message: ClientMessage| Sample {
        name,
        frames: message.encode(),
        payload: 1,
        decode: |frames| ClientMessage::decode(frames).map(|message| format!("{message:#?}")),
    };
    let engine = |name, frames| Sample {
        name,
        frames,
        payload: 0,
        decode: |frames| EngineMessage::decode(frames).map(|message| format!("{message:#?}")),
    };
    let map = |name, payload, decode| Sample { name, frames: vec![payload], payload: 0, decode };
    let stamp = Stamp::from_nanos(2_500_000_000);
    let outputs = vec![plain_output(), full_output()];
    let reply = |result| UtilityReply { call_id: 0xe687_bc8e_ecce_11f1, result };
    let supported = Ok(Value::Array(vec!["generate".into()]));
    vec![
        client("add_plain", ClientMessage::Add(Box::new(plain_request()))),
        client("add_full", ClientMessage::Add(Box::new(full_request()))),
        client("abort", ClientMessage::Abort(vec!["a-1".into(), "b-2".into()])),
        client("start_dp_wave", ClientMessage::StartDpWave { wave: 3, exclude_engine: Some(300) }),
        client(
            "utility_call",
            ClientMessage::Utility(UtilityCall {
                client_index: 1,
                call_id: 0xe687_bc8e_ecce_11f1,
                method: "pause_generation".to_owned(),
                args: vec!["abort".into(), true.into(), Value::Nil],
            }),
        ),
        engine("step_stats_only", StepFrame::new(stamp, idle_stats(), 0, vec![]).encode()),
        engine("step_full", {
            let frame = StepFrame::new(stamp, full_stats(), 1, outputs);
            frame.with_finished(vec!["c-3".into()]).encode()
        }),
        engine("utility_reply", UtilityFrame::new(stamp, reply(supported), 0).encode()),
        engine("utility_reply_nil", UtilityFrame::new(stamp, reply(Ok(Value::Nil)), 0).encode()),
        engine(
            "utility_failure",
            UtilityFrame::new(stamp, reply(Err("no such method".to_owned())), 0).encode(),
        ),
        engine("dead", vec![Bytes::from_static(ENGINE_CORE_DEAD)]),
        map(
            "hello",
            EngineHello { status: HelloStatus::Hello, local: false, headless: true }.encode(),
            |frames| EngineHello::decode(&frames[0]).map(|hello| format!("{hello:#?}")),
        ),
        map("init", full_init().encode(), |frames| {
            HandshakeInit::decode(&frames[0]).map(|init| format!("{init:#?}"))
        }),
        map("ready_response", full_ready().encode(), |frames| {
            ReadyResponse::decode(&frames[0]).map(|ready| format!("{ready:#?}"))
        }),
        map("value", encode_value(&full_value()), |frames| {
            decode_value(&frames[0]).map(|value| format!("{value:#?}"))
        }),
    ]
}

/// The stats of an engine that does nothing.
pub(super) fn idle_stats() -> SchedulerStats {
    SchedulerStats { pawl: None, ..testing::idle_stats() }
}

fn full_stats() -> SchedulerStats {
    SchedulerStats {
        num_running_reqs: 2,
        num_waiting_reqs: 3,
        num_skipped_waiting_reqs: 1,
        num_kv_fetch_reqs_by_stage: [4, 5, 6],
        step_counter: 70_000,
        current_wave: 1,
        kv_cache_usage: 0.25,
        prefix_cache_stats: PrefixCacheStats {
            reset: true,
            requests: 1,
            queries: 200,
            hits: 128,
            preempted_requests: 1,
            preempted_queries: 64,
            preempted_hits: 32,
            hits_by_source: vec![("local".to_owned(), 128)],
        },
        spec_decoding_stats: Some(SpecDecodingStats {
            num_spec_tokens: 3,
            num_drafts: 2,
            num_draft_tokens: 6,
            num_accepted_tokens: 4,
            num_accepted_tokens_per_pos: vec![2, 1, 1],
            num_draft_tokens_per_pos: vec![2, 2, 2],
        }),
        iteration_details: Some(Value::map(
            [("iteration_index", 7_u32)].map(|(k, v)| (k, v.into())),
        )),
        kv_cache_eviction_events: vec![KvCacheEvictionEvent {
            lifetime_seconds: 3.5,
            idle_seconds: 1.5,
            reuse_gaps_seconds: vec![0.5, 0.25],
        }],
        waiting_lora_adapters: vec![("adapter".to_owned(), 1)],
        running_lora_adapters: vec![("adapter".to_owned(), 2)],
        pawl: Some(PawlStats {
            num_preemptions: 1,
            schedule_seconds: 0.0001,
            execute_seconds: 0.01,
            update_seconds: 0.0002,
            num_scheduled_tokens: 512,
            resent: false,
        }),
    }
}

fn plain_output() -> EngineCoreOutput {
    EngineCoreOutput { new_token_ids: vec![42], ..EngineCoreOutput::new("a-1".into()) }
}

/// 40 columns a row, so that ids (160 bytes) stay inline and a second row makes an aux frame.
fn full_output() -> EngineCoreOutput {
    let columns = |base: u32| (0..40).map(|column| base + column).collect::<Vec<_>>();
    let lower = |base: f32| (0..40).map(|column| base - column as f32).collect::<Vec<_>>();
    let tensor = |data: &'static [u8]| {
        Some(Tensor { dtype: "<i2".to_owned(), shape: vec![2], data: Bytes::from_static(data) })
    };
    EngineCoreOutput {
        request_id: "b-2".into(),
        new_token_ids: vec![7, 70_000],
        new_logprobs: Some(LogprobsLists {
            token_ids: vec![columns(100), columns(200)],
            logprobs: vec![lower(-0.5), lower(-0.25)],
            ranks: vec![1, 2],
        }),
        new_prompt_logprobs: Some(LogprobsTensors {
            token_ids: vec![vec![5], vec![6]],
            logprobs: vec![vec![-1.5], vec![-2.5]],
            ranks: vec![9, 300],
        }),
        pooling_output: tensor(&[1, 0, 2, 0]),
        finish_reason: Some(FinishReason::Repetition),
        stop_reason: Some(StopReason::Text("repetition_detected".to_owned())),
        events: vec![
            EngineCoreEvent { kind: EventKind::Queued, timestamp: 1.0 },
            EngineCoreEvent { kind: EventKind::Scheduled, timestamp: 1.25 },
            EngineCoreEvent { kind: EventKind::Preempted, timestamp: 1.5 },
        ],
        kv_transfer_params: Some(Value::map([("block", Value::from(3_u32))])),
        ec_transfer_params: Some(Value::map([("cache", Value::Nil)])),
        trace_headers: Some(vec![("traceparent".to_owned(), "00-ab".to_owned())]),
        prefill_stats: Some(PrefillStats {
            num_prompt_tokens: 300,
            num_computed_tokens: 172,
            num_cached_tokens: 128,
            num_local_cached_tokens: 128,
            num_external_cached_tokens: 0,
            num_cache_creation_tokens: 160,
        }),
        routed_experts: tensor(&[3, 0, 4, 0]),
        num_nans_in_logits: 2,
        mm_cache_miss_hashes: Some(vec!["hash".to_owned()]),
        new_sampling_mask: Some(Value::Array(vec![1_u32.into(), Value::Nil, Value::Nil])),
        spec_decode_metrics: Some(Value::map([("num_spec_tokens", Value::from(3_u32))])),
        prompt_token_id_logprobs: tensor(&[5, 0, 6, 0]),
        error: Some(OutputError {
            code: "validation_error".to_owned(),
            message: "not so".to_owned(),
            retryable: true,
        }),
    }
}

fn plain_request() -> EngineCoreRequest {
    let sampling = SamplingParams { max_tokens: Some(4), ..SamplingParams::default() };
    EngineCoreRequest::new("a-1".into(), vec![1, 200, 40_000, 100_000], sampling)
}

fn full_request() -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: "b-2".into(),
        prompt_token_ids: Some(vec![1, 2, 3]),
        mm_features: Some(Value::Array(vec![Value::map([("modality", Value::from("image"))])])),
        sampling_params: Some(full_sampling()),
        pooling_params: Some(Value::Array(vec![true.into(), Value::Nil])),
        arrival_time: 1.8e9,
        lora_request: Some(LoraRequest {
            lora_name: "adapter".to_owned(),
            lora_int_id: 1,
            lora_path: "/adapters/one".to_owned(),
            base_model_name: Some("base".to_owned()),
            load_inplace: true,
            is_3d_lora_weight: true,
        }),
        cache_salt: Some("tenant".to_owned()),
        data_parallel_rank: Some(1),
        prompt_embeds: Some(Tensor {
            dtype: "float32".to_owned(),
            shape: vec![2, 64],
            data: (0..128).flat_map(|i| (i as f32).to_le_bytes()).collect(),
        }),
        prompt_is_token_ids: Some(vec![true, false, true]),
        client_index: 2,
        current_wave: 5,
        priority: -3,
        trace_headers: Some(vec![("traceparent".to_owned(), "00-ab".to_owned())]),
        resumable: true,
        external_req_id: Some("b".to_owned()),
        reasoning_ended: Some(false),
        reasoning_parser_kwargs: Some(Value::map([("chat_template_kwargs", Value::Map(vec![]))])),
        abort_immediately: true,
        session_id: Some("session".to_owned()),
        kv_hints: Some(Value::map([("protocol_version", Value::from(1_u32))])),
    }
}

fn full_sampling() -> SamplingParams {
    SamplingParams {
        n: 2,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        repetition_penalty: 1.25,
        temperature: 0.75,
        top_p: 0.5,
        top_k: 40,
        min_p: 0.125,
        seed: Some(-7),
        stop: vec!["\n\n".to_owned(), "END".to_owned()],
        stop_token_ids: vec![2, 32_000],
        ignore_eos: true,
        max_tokens: Some(300),
        min_tokens: 5,
        logprobs: Some(-1),
        prompt_logprobs: Some(0),
        prompt_logprob_token_ids: Some(Tensor {
            dtype: "<i4".to_owned(),
            shape: vec![],
            data: Bytes::from_static(&[9, 0, 0, 0]),
        }),
        prompt_logprob_start: Some(1),
        logprob_token_ids: Some(vec![3, 4]),
        flat_logprobs: true,
        detokenize: false,
        skip_special_tokens: false,
        spaces_between_special_tokens: false,
        include_stop_str_in_output: true,
        output_kind: OutputKind::Delta,
        stream_interval: Some(4),
        skip_clone: true,
        output_text_buffer_length: 3,
        eos_token_id: Some(2),
        all_stop_token_ids: [2, 32_000].into(),
        structured_outputs: Some(Value::map([("json_object", Value::from(true))])),
        logit_bias: Some([(5, -100.0), (70_000, 0.5)].into()),
        allowed_token_ids: Some(vec![5, 6]),
        extra_args: Some(Value::map([("key", Value::from("value"))])),
        bad_words: vec!["bad".to_owned()],
        bad_words_token_ids: Some(vec![vec![8, 9], vec![10]]),
        skip_reading_prefix_cache: Some(true),
        thinking_token_budget: Some(64),
        repetition_detection: Some(Value::map([("min_count", Value::from(3_u32))])),
        routed_experts_prompt_start: 1,
        trace_decode_token_ids: Some(vec![11]),
        watermarking: Some(true),
        watermarking_skipped: true,
    }
}

fn full_init() -> HandshakeInit {
    HandshakeInit {
        inputs: vec!["ipc:///run/in-0".to_owned(), "ipc:///run/in-1".to_owned()],
        outputs: vec!["ipc:///run/out-0".to_owned(), "ipc:///run/out-1".to_owned()],
        coordinator_input: Some("tcp://127.0.0.1:1".to_owned()),
        coordinator_output: Some("tcp://127.0.0.1:2".to_owned()),
        frontend_stats_publish_address: Some("tcp://127.0.0.1:3".to_owned()),
        parallel_config: vec![("data_parallel_size".to_owned(), 1_u32.into())],
    }
}

pub(super) fn full_ready() -> ReadyResponse {
    ReadyResponse {
        max_model_len: 2048,
        num_gpu_blocks: 512,
        block_size: 16,
        dp_stats_address: Some("tcp://127.0.0.1:4".to_owned()),
        dtype: "float32".to_owned(),
        vllm_version: "0.33.0".to_owned(),
        world_size: 1,
        data_parallel_size: 1,
        tensor_parallel_size: 1,
        pipeline_parallel_size: 1,
        decode_context_parallel_size: 1,
        data_parallel_rank: 0,
        max_num_seqs: 256,
        max_num_batched_tokens: 2048,
        instance_id: "core-1".to_owned(),
        supports_lora: false,
        max_loras: 0,
        kv_cache_size_tokens: Some(8192),
        kv_cache_max_concurrency: Some(4.0),
        extra: vec![
            ("enable_sleep_mode".to_owned(), true.into()),
            ("pawl_version".to_owned(), "0.1.0".into()),
        ],
    }
}

fn full_value() -> Value {
    Value::map([
        ("nil", Value::Nil),
        ("largest", u64::MAX.into()),
        ("smallest", i64::MIN.into()),
        ("float", 1.5.into()),
        ("bytes", vec![0xff_u8, 0x00].into()),
        ("timestamp", Value::Ext(-1, vec![0, 0, 0, 9])),
        ("keys", Value::Map(vec![(5_u32.into(), f64::NAN.to_string().into())])),
        ("nested", Value::Array(vec![Value::Array(vec![]), "text".into()])),
    ])
}
