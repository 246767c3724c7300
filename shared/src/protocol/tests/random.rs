//! Any value of each message comes back as it was sent.

use bytes::Bytes;
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option::of;
use proptest::prelude::*;

use crate::clock::Stamp;
use crate::protocol::*;

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9-]{0,40}", "\\PC{0,12}"]
}

fn id() -> impl Strategy<Value = RequestId> {
    text().prop_map(RequestId::from)
}

/// Numbers that equal themselves.
fn float() -> impl Strategy<Value = f64> {
    prop_oneof![
        Just(0.0),
        Just(1.0),
        Just(f64::INFINITY),
        -1e3..1e3_f64,
        any::<f64>().prop_filter("NaN is not equal to itself", |value| !value.is_nan()),
    ]
}

fn pairs<T: std::fmt::Debug>(
    value: impl Strategy<Value = T>,
) -> impl Strategy<Value = Vec<(String, T)>> {
    vec((text(), value), 0..4)
}

/// Any value but nil, which an optional field cannot tell from nothing.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::Bool),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        float().prop_map(Value::Float),
        text().prop_map(Value::Text),
        vec(any::<u8>(), 0..300).prop_map(Value::Bytes),
        (any::<i8>(), vec(any::<u8>(), 0..40))
            .prop_filter("pickles are refused", |(kind, _)| ![1, 2].contains(kind))
            .prop_map(|(kind, bytes)| Value::Ext(kind, bytes)),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            vec(prop_oneof![inner.clone(), Just(Value::Nil)], 0..5).prop_map(Value::Array),
            vec((inner.clone(), inner), 0..5).prop_map(Value::Map),
        ]
    })
}

/// Around the size from which tensors have their own frame.
fn tensor() -> impl Strategy<Value = Tensor> {
    (0..3_usize, 0..48_usize).prop_flat_map(|(rows, columns)| {
        let data = vec(any::<u8>(), rows * columns * 4);
        let shape = if rows == 1 { vec![columns] } else { vec![rows, columns] };
        data.prop_map(move |data| Tensor {
            dtype: "<f4".to_owned(),
            shape: shape.clone(),
            data: data.into(),
        })
    })
}

prop_compose! {
    fn lora()(
        lora_name in text(), lora_int_id in any::<u32>(), lora_path in text(),
        base_model_name in of(text()), load_inplace in any::<bool>(),
        is_3d_lora_weight in any::<bool>(),
    ) -> LoraRequest {
        LoraRequest {
            lora_name, lora_int_id, lora_path, base_model_name, load_inplace, is_3d_lora_weight,
        }
    }
}

prop_compose! {
    fn numbers()(
        n in any::<u32>(), presence_penalty in float(), frequency_penalty in float(),
        repetition_penalty in float(), temperature in float(), top_p in float(),
        top_k in any::<u32>(), min_p in float(), seed in of(0_i64..i64::MAX),
        max_tokens in of(any::<u32>()), min_tokens in any::<u32>(),
        logprobs in of(any::<i32>()),
    ) -> SamplingParams {
        SamplingParams {
            n, presence_penalty, frequency_penalty, repetition_penalty, temperature, top_p, top_k,
            min_p, seed, max_tokens, min_tokens, logprobs, ..SamplingParams::default()
        }
    }
}

prop_compose! {
    fn lists()(
        stop in vec(text(), 0..3), stop_token_ids in vec(any::<u32>(), 0..4),
        prompt_logprobs in of(any::<i32>()), prompt_logprob_token_ids in of(tensor()),
        prompt_logprob_start in of(any::<u32>()), logprob_token_ids in of(vec(any::<u32>(), 0..4)),
        all_stop_token_ids in btree_set(any::<u32>(), 0..4),
        logit_bias in of(btree_map(any::<u32>(), float(), 0..4)),
        allowed_token_ids in of(vec(any::<u32>(), 0..4)), bad_words in vec(text(), 0..3),
        bad_words_token_ids in of(vec(vec(any::<u32>(), 0..3), 0..3)),
        trace_decode_token_ids in of(vec(any::<u32>(), 0..4)),
    ) -> SamplingParams {
        SamplingParams {
            stop, stop_token_ids, prompt_logprobs, prompt_logprob_token_ids, prompt_logprob_start,
            logprob_token_ids, all_stop_token_ids, logit_bias, allowed_token_ids, bad_words,
            bad_words_token_ids, trace_decode_token_ids, ..SamplingParams::default()
        }
    }
}

prop_compose! {
    fn flags()(
        (ignore_eos, flat_logprobs, detokenize, skip_special_tokens)
            in any::<(bool, bool, bool, bool)>(),
        (spaces_between_special_tokens, include_stop_str_in_output) in any::<(bool, bool)>(),
        (skip_clone, watermarking_skipped)
            in any::<(bool, bool)>(),
        output_kind in prop_oneof![
            Just(OutputKind::Cumulative), Just(OutputKind::Delta), Just(OutputKind::FinalOnly),
        ],
        stream_interval in of(any::<u32>()), output_text_buffer_length in any::<u32>(),
        eos_token_id in of(any::<u32>()), skip_reading_prefix_cache in of(any::<bool>()),
        thinking_token_budget in of(any::<u32>()), routed_experts_prompt_start in any::<u32>(),
        watermarking in of(any::<bool>()),
        (structured_outputs, extra_args, repetition_detection)
            in (of(value()), of(value()), of(value())),
    ) -> SamplingParams {
        SamplingParams {
            ignore_eos, flat_logprobs, detokenize, skip_special_tokens,
            spaces_between_special_tokens, include_stop_str_in_output, skip_clone,
            watermarking_skipped, output_kind, stream_interval, output_text_buffer_length,
            eos_token_id, skip_reading_prefix_cache, thinking_token_budget,
            routed_experts_prompt_start, watermarking, structured_outputs, extra_args,
            repetition_detection, ..SamplingParams::default()
        }
    }
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    prop_oneof![numbers(), lists(), flags()]
}

prop_compose! {
    fn request()(
        (request_id, prompt_token_ids, sampling_params) in
            (id(), of(vec(any::<u32>(), 0..50)), of(sampling())),
        (mm_features, pooling_params, reasoning_parser_kwargs, kv_hints) in
            (of(value()), of(value()), of(value()), of(value())),
        (arrival_time, lora_request, cache_salt) in (float(), of(lora()), of(text())),
        (data_parallel_rank, client_index, current_wave, priority) in
            (of(any::<u32>()), any::<u32>(), any::<u64>(), any::<i64>()),
        prompt_embeds in of(tensor()), prompt_is_token_ids in of(vec(any::<bool>(), 0..5)),
        trace_headers in of(pairs(text())),
        (resumable, abort_immediately, reasoning_ended) in
            (any::<bool>(), any::<bool>(), of(any::<bool>())),
        (external_req_id, session_id) in (of(text()), of(text())),
    ) -> EngineCoreRequest {
        EngineCoreRequest {
            request_id, prompt_token_ids, mm_features, sampling_params, pooling_params,
            arrival_time, lora_request, cache_salt, data_parallel_rank, prompt_embeds,
            prompt_is_token_ids, client_index, current_wave, priority, trace_headers, resumable,
            external_req_id, reasoning_ended, reasoning_parser_kwargs, abort_immediately,
            session_id, kv_hints,
        }
    }
}

type Rows = (Vec<Vec<u32>>, Vec<Vec<f32>>, Vec<u32>);

/// Ids beyond 2^31 among them, which need eight bytes.
fn logprob_rows() -> impl Strategy<Value = Rows> {
    (0..5_usize, 0..30_usize).prop_flat_map(|(rows, width)| {
        let token = prop_oneof![0..50_000_u32, any::<u32>()];
        let logprob = prop_oneof![-30.0..0.0_f32, Just(f32::NEG_INFINITY)];
        (vec(vec(token, width), rows), vec(vec(logprob, width), rows), vec(any::<u32>(), rows))
    })
}

fn event() -> impl Strategy<Value = EngineCoreEvent> {
    const KINDS: [EventKind; 3] = [EventKind::Queued, EventKind::Scheduled, EventKind::Preempted];
    (proptest::sample::select(&KINDS[..]), float())
        .prop_map(|(kind, timestamp)| EngineCoreEvent { kind, timestamp })
}

prop_compose! {
    fn prefill()(n in any::<[u64; 6]>()) -> PrefillStats {
        PrefillStats {
            num_prompt_tokens: n[0],
            num_computed_tokens: n[1],
            num_cached_tokens: n[2],
            num_local_cached_tokens: n[3],
            num_external_cached_tokens: n[4],
            num_cache_creation_tokens: n[5],
        }
    }
}

prop_compose! {
    fn output()(
        (request_id, new_token_ids) in (id(), vec(any::<u32>(), 0..5)),
        (lists, tensors) in (of(logprob_rows()), of(logprob_rows())),
        (pooling_output, routed_experts, prompt_token_id_logprobs) in
            (of(tensor()), of(tensor()), of(tensor())),
        finish_reason in of(proptest::sample::select(&FinishReason::ALL[..])),
        stop_reason in of(prop_oneof![
            any::<u32>().prop_map(StopReason::Token), text().prop_map(StopReason::Text),
        ]),
        (events, prefill_stats) in (vec(event(), 0..4), of(prefill())),
        (kv_transfer_params, ec_transfer_params, new_sampling_mask, spec_decode_metrics) in
            (of(value()), of(value()), of(value()), of(value())),
        trace_headers in of(pairs(text())), num_nans_in_logits in any::<u32>(),
        mm_cache_miss_hashes in of(vec(text(), 0..3)),
        error in of((text(), text(), any::<bool>())),
    ) -> EngineCoreOutput {
        EngineCoreOutput {
            request_id, new_token_ids, pooling_output, finish_reason, stop_reason, events,
            kv_transfer_params, ec_transfer_params, trace_headers, prefill_stats, routed_experts,
            num_nans_in_logits, mm_cache_miss_hashes, new_sampling_mask, spec_decode_metrics,
            prompt_token_id_logprobs,
            new_logprobs: lists.map(|(token_ids, logprobs, ranks)| {
                LogprobsLists { token_ids, logprobs, ranks }
            }),
            new_prompt_logprobs: tensors.map(|(token_ids, logprobs, ranks)| {
                LogprobsTensors { token_ids, logprobs, ranks }
            }),
            error: error.map(|(code, message, retryable)| OutputError { code, message, retryable }),
        }
    }
}

prop_compose! {
    fn prefix_cache()(
        reset in any::<bool>(), n in any::<[u64; 6]>(), hits_by_source in pairs(any::<u64>()),
    ) -> PrefixCacheStats {
        PrefixCacheStats {
            reset,
            requests: n[0],
            queries: n[1],
            hits: n[2],
            preempted_requests: n[3],
            preempted_queries: n[4],
            preempted_hits: n[5],
            hits_by_source,
        }
    }
}

prop_compose! {
    fn spec_decoding()(
        n in any::<[u64; 4]>(), accepted in vec(any::<u64>(), 0..4),
        drafted in vec(any::<u64>(), 0..4),
    ) -> SpecDecodingStats {
        SpecDecodingStats {
            num_spec_tokens: n[0],
            num_drafts: n[1],
            num_draft_tokens: n[2],
            num_accepted_tokens: n[3],
            num_accepted_tokens_per_pos: accepted,
            num_draft_tokens_per_pos: drafted,
        }
    }
}

prop_compose! {
    fn pawl()(
        (num_preemptions, num_scheduled_tokens, resent) in any::<(u64, u64, bool)>(),
        schedule_seconds in float(), execute_seconds in float(), update_seconds in float(),
    ) -> PawlStats {
        PawlStats {
            num_preemptions, schedule_seconds, execute_seconds, update_seconds,
            num_scheduled_tokens, resent,
        }
    }
}

prop_compose! {
    fn stats()(
        (num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs) in any::<(u64, u64, u64)>(),
        num_kv_fetch_reqs_by_stage in any::<[u64; 3]>(),
        (step_counter, current_wave) in any::<(u64, u64)>(), kv_cache_usage in float(),
        prefix_cache_stats in prefix_cache(), spec_decoding_stats in of(spec_decoding()),
        iteration_details in of(value()),
        evictions in vec((float(), float(), vec(float(), 0..3)), 0..3),
        (waiting_lora_adapters, running_lora_adapters) in
            (pairs(any::<u64>()), pairs(any::<u64>())),
        pawl in of(pawl()),
    ) -> SchedulerStats {
        let kv_cache_eviction_events = evictions.into_iter().map(
            |(lifetime_seconds, idle_seconds, reuse_gaps_seconds)| KvCacheEvictionEvent {
                lifetime_seconds, idle_seconds, reuse_gaps_seconds,
            },
        );
        SchedulerStats {
            num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs,
            num_kv_fetch_reqs_by_stage, step_counter, current_wave, kv_cache_usage,
            prefix_cache_stats, spec_decoding_stats, iteration_details,
            kv_cache_eviction_events: kv_cache_eviction_events.collect(),
            waiting_lora_adapters, running_lora_adapters, pawl,
        }
    }
}

/// What vLLM's Rust frontend dies of is not in the frame, whatever is in the message.
fn check_sendable(frames: &[Bytes]) {
    const REQUIRED: [&str; 7] = [
        "num_running_reqs",
        "num_waiting_reqs",
        "step_counter",
        "current_wave",
        "kv_cache_usage",
        "prefix_cache_stats",
        "kv_cache_eviction_events",
    ];
    let frame = dump(&frames[0]).unwrap();
    let [_, outputs, stats, timestamp, utility, finished, wave, start_wave, _] =
        frame.as_array().unwrap()
    else {
        panic!("nine elements, not {frame:?}");
    };
    assert!(wave.is_nil() && start_wave.is_nil(), "a coordinator's");
    assert!(timestamp.as_f64().unwrap() > 0.0, "zero means now");
    let outputs = outputs.as_array().unwrap();
    assert!(outputs.iter().all(|output| output.as_array().unwrap().len() == 19));
    if utility.is_nil() {
        assert_eq!(
            stats.as_map().unwrap().iter().filter(|(key, _)| *key != "pawl".into()).count(),
            18
        );
        assert!(REQUIRED.iter().all(|key| stats.get(key).is_some_and(|value| !value.is_nil())));
    } else {
        assert!(outputs.is_empty() && stats.is_nil() && finished.is_nil(), "a reply is alone");
        assert_eq!(utility.as_array().unwrap().len(), 3);
    }
}

fn check_client(message: &ClientMessage) {
    assert_eq!(ClientMessage::decode(&message.encode()).unwrap(), *message);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn values(value in value()) {
        prop_assert_eq!(decode_value(&encode_value(&value)).unwrap(), value);
    }

    #[test]
    fn requests(request in request()) {
        check_client(&ClientMessage::Add(Box::new(request)));
    }

    #[test]
    fn other_client_messages(
        ids in vec(id(), 0..20), wave in any::<u64>(), exclude_engine in of(any::<u32>()),
        client_index in any::<u32>(), call_id in any::<u64>(), method in text(),
        args in vec(value(), 0..4),
    ) {
        check_client(&ClientMessage::Abort(ids));
        check_client(&ClientMessage::StartDpWave { wave, exclude_engine });
        check_client(&ClientMessage::Utility(UtilityCall { client_index, call_id, method, args }));
    }

    #[test]
    fn steps(
        nanos in any::<u64>(), stats in stats(), engine_index in any::<u32>(),
        outputs in vec(output(), 0..4), finished in vec(id(), 0..4),
    ) {
        let stamp = Stamp::from_nanos(nanos);
        let frame = StepFrame::new(stamp, stats.clone(), engine_index, outputs.clone())
            .with_finished(finished.clone());
        let expected = EngineMessage::Step {
            engine_index,
            timestamp: stamp.seconds(),
            stats: Some(stats),
            outputs,
            finished_requests: finished,
        };
        check_sendable(&frame.encode());
        prop_assert_eq!(EngineMessage::decode(&frame.encode()).unwrap(), expected);
    }

    #[test]
    fn utility_replies(
        nanos in any::<u64>(), engine_index in any::<u32>(), call_id in any::<u64>(),
        value in value(), failure in of(text()),
    ) {
        let stamp = Stamp::from_nanos(nanos);
        let reply = UtilityReply { call_id, result: failure.map_or(Ok(value), Err) };
        let frame = UtilityFrame::new(stamp, reply.clone(), engine_index);
        let expected =
            EngineMessage::Utility { engine_index, timestamp: stamp.seconds(), reply };
        check_sendable(&frame.encode());
        prop_assert_eq!(EngineMessage::decode(&frame.encode()).unwrap(), expected);
    }

    #[test]
    fn handshakes(
        ready in any::<bool>(), local in any::<bool>(), headless in any::<bool>(),
        addresses in vec((text(), text()), 1..4), coordinator in of(text()),
        parallel_config in pairs(value()),
    ) {
        let status = if ready { HelloStatus::Ready } else { HelloStatus::Hello };
        let hello = EngineHello { status, local, headless };
        prop_assert_eq!(EngineHello::decode(&hello.encode()).unwrap(), hello);
        let (inputs, outputs) = addresses.into_iter().unzip();
        let init = HandshakeInit {
            inputs,
            outputs,
            coordinator_input: coordinator.clone(),
            coordinator_output: coordinator.clone(),
            frontend_stats_publish_address: coordinator,
            parallel_config,
        };
        prop_assert_eq!(HandshakeInit::decode(&init.encode()).unwrap(), init);
    }

    /// What was left away comes back as vLLM's default, so a message is compared once complete.
    #[test]
    fn ready_responses(n in any::<[u64; 13]>(), texts in vec(text(), 4), size in of(float())) {
        let sent = ReadyResponse {
            max_model_len: n[0],
            num_gpu_blocks: n[1],
            block_size: n[2],
            dp_stats_address: Some(texts[0].clone()).filter(|text| !text.is_empty()),
            dtype: texts[1].clone(),
            vllm_version: texts[2].clone(),
            world_size: n[3],
            data_parallel_size: n[4],
            tensor_parallel_size: n[5],
            pipeline_parallel_size: n[6],
            decode_context_parallel_size: n[7],
            data_parallel_rank: n[8],
            max_num_seqs: n[9],
            max_num_batched_tokens: n[10],
            instance_id: texts[3].clone(),
            supports_lora: n[11] > 0,
            max_loras: n[11],
            kv_cache_size_tokens: Some(n[12]),
            kv_cache_max_concurrency: size,
            extra: vec![("pawl_block".to_owned(), n[0].into())],
        };
        let complete = ReadyResponse::decode(&sent.encode()).unwrap();
        prop_assert_eq!(complete.extra.len(), 10);
        let without_extra = |response: ReadyResponse| ReadyResponse { extra: vec![], ..response };
        prop_assert_eq!(without_extra(complete.clone()), without_extra(sent));
        prop_assert_eq!(ReadyResponse::decode(&complete.encode()).unwrap(), complete);
    }

    /// Bytes that nobody wrote.
    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..200), type_byte in 0..5_u8) {
        let frame = Bytes::from(bytes);
        let _ = ClientMessage::decode(&[vec![type_byte].into(), frame.clone(), frame.clone()]);
        let _ = EngineMessage::decode(&[frame.clone(), frame.clone()]);
        let _ = dump(&frame).map(|value| value.to_json());
    }
}
