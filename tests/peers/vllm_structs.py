"""The messages of vLLM's engine-core wire as msgspec structs, with strict decoding.

Written from the protocol reference, not from vLLM. The fields are in vLLM's order: for the
`array_like` structs that order is the wire.
"""

import array
import enum
import json
from typing import Any, NamedTuple, Optional, Union

import msgspec

ZERO_COPY_THRESHOLD = 256
DEAD = b"ENGINE_CORE_DEAD"
ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"


class ProtocolError(Exception):
    """The peer sent what it must not."""


# ---- the structs ----


class SamplingParams(msgspec.Struct, omit_defaults=True):
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: Optional[bool] = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Optional[int] = None
    stop: Union[str, list[str], None] = None
    stop_token_ids: Optional[list[int]] = None
    ignore_eos: bool = False
    max_tokens: Optional[int] = 16
    min_tokens: int = 0
    logprobs: Optional[int] = None
    prompt_logprobs: Optional[int] = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Optional[int] = None
    logprob_token_ids: Optional[list[int]] = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int = 0
    stream_interval: Optional[int] = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    _eos_token_id: Optional[int] = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _watermarking_skipped: bool = False
    structured_outputs: Optional[dict[str, Any]] = None
    logit_bias: Optional[dict[int, float]] = None
    allowed_token_ids: Optional[list[int]] = None
    extra_args: Optional[dict[str, Any]] = None
    bad_words: Optional[list[str]] = None
    _bad_words_token_ids: Optional[list[list[int]]] = None
    skip_reading_prefix_cache: Optional[bool] = None
    thinking_token_budget: Optional[int] = None
    repetition_detection: Optional[dict[str, int]] = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Optional[list[int]] = None


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True):
    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: Optional[str] = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class Tensor(NamedTuple):
    """`data` is ext 3, or the index of a frame counted from the payload."""

    dtype: str
    shape: list[int]
    data: Any


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    request_id: str
    prompt_token_ids: Optional[list[int]]
    mm_features: Optional[list[Any]]
    sampling_params: Optional[SamplingParams]
    pooling_params: Optional[list[Any]]
    arrival_time: float
    lora_request: Optional[LoRARequest]
    cache_salt: Optional[str]
    data_parallel_rank: Optional[int]
    prompt_embeds: Optional[Tensor] = None
    prompt_is_token_ids: Optional[list[bool]] = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Optional[dict[str, str]] = None
    resumable: bool = False
    external_req_id: Optional[str] = None
    reasoning_ended: Optional[bool] = None
    reasoning_parser_kwargs: Optional[dict[str, Any]] = None
    abort_immediately: bool = False
    session_id: Optional[str] = None
    kv_hints: Optional[dict[str, Any]] = None


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


class EventType(enum.IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct):
    type: EventType
    timestamp: float


class PrefillStats(msgspec.Struct):
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class LogprobsLists(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    sampled_token_ranks: Tensor
    cu_num_generated_tokens: Optional[list[int]] = None


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: Any = None
    extra: Any = None


class OutputError(msgspec.Struct):
    code: str
    message: str
    retryable: bool = False


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Optional[LogprobsLists] = None
    new_prompt_logprobs_tensors: Optional[LogprobsTensors] = None
    pooling_output: Optional[Tensor] = None
    finish_reason: Optional[FinishReason] = None
    stop_reason: Union[int, str, None] = None
    events: Optional[list[EngineCoreEvent]] = None
    kv_transfer_params: Optional[dict[str, Any]] = None
    ec_transfer_params: Optional[dict[str, Any]] = None
    trace_headers: Optional[dict[str, str]] = None
    prefill_stats: Optional[PrefillStats] = None
    routed_experts: Optional[Tensor] = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: Optional[list[str]] = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Optional[dict[str, Any]] = None
    prompt_token_id_logprobs: Optional[Tensor] = None
    error: Optional[OutputError] = None


class PrefixCacheStats(msgspec.Struct):
    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = msgspec.field(default_factory=dict)


class SpecDecodingStats(msgspec.Struct):
    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = msgspec.field(default_factory=list)


class KVCacheEvictionEvent(msgspec.Struct):
    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: list[float]


class KVFetchStages(msgspec.Struct):
    waiting_to_start: int = 0
    in_progress: int = 0
    completed_waiting: int = 0


class SchedulerStats(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: KVFetchStages = msgspec.field(default_factory=KVFetchStages)
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: Optional[dict[str, Any]] = None
    prefix_cache_stats: PrefixCacheStats = msgspec.field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: Optional[PrefixCacheStats] = None
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = msgspec.field(default_factory=list)
    spec_decoding_stats: Optional[SpecDecodingStats] = None
    kv_connector_stats: Optional[dict[str, Any]] = None
    ec_connector_stats: Optional[dict[str, Any]] = None
    waiting_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    running_lora_adapters: dict[str, int] = msgspec.field(default_factory=dict)
    cudagraph_stats: Optional[dict[str, Any]] = None
    perf_stats: Optional[dict[str, Any]] = None


class UtilityResult(NamedTuple):
    type_info: Any
    value: Any


class UtilityOutput(msgspec.Struct, array_like=True):
    call_id: int
    failure_message: Optional[str] = None
    result: Optional[UtilityResult] = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = msgspec.field(default_factory=list)
    scheduler_stats: Optional[SchedulerStats] = None
    timestamp: float = 0.0
    utility_output: Optional[UtilityOutput] = None
    finished_requests: Optional[set[str]] = None
    wave_complete: Optional[int] = None
    start_wave: Optional[int] = None
    weight_version: Optional[str] = None


class EngineCoreReadyResponse(msgspec.Struct):
    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dp_stats_address: Optional[str]
    dtype: str
    vllm_version: str
    world_size: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    data_parallel_rank: int
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    supports_lora: bool
    max_loras: int
    mamba_block_size: Optional[int] = None
    kv_cache_size_tokens: Optional[int] = None
    kv_cache_max_concurrency: Optional[float] = None
    kv_events_config: Optional[dict[str, Any]] = None
    weight_transfer_backend: Optional[str] = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: Optional[int] = None
    coord_store_port: int = 0
    coordinator_input_address: Optional[str] = None
    coordinator_output_address: Optional[str] = None


class Hello(msgspec.Struct):
    status: str
    local: bool
    headless: bool


class Addresses(msgspec.Struct):
    inputs: list[str]
    outputs: list[str]
    coordinator_input: Optional[str] = None
    coordinator_output: Optional[str] = None
    frontend_stats_publish_address: Optional[str] = None


class Init(msgspec.Struct):
    addresses: Addresses
    parallel_config: dict[str, Any] = msgspec.field(default_factory=dict)


class UtilityCall(NamedTuple):
    client_index: int
    call_id: int
    method: str
    args: list[Any]


class StartDpWave(NamedTuple):
    wave: int
    exclude_engine: Optional[int]


# ---- encoding and decoding ----


def unpack(payload, kind):
    """`payload` as `kind`; anything else is the peer's mistake."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a {kind}: {error}: {payload[:200].hex()}") from error


def pack(value):
    return msgspec.msgpack.encode(value)


TYPECODES = {"<i4": "i", "int32": "i", "<i8": "q", "int64": "q", "<f4": "f", "float32": "f"}


def tensor_rows(tensor, frames):
    """The numbers of a tensor, as a list or a list of rows."""
    data = tensor.data
    if isinstance(data, int):
        if not 1 <= data < len(frames):
            raise ProtocolError(f"tensor in frame {data} of {len(frames)}")
        data = frames[data]
        if len(data) < ZERO_COPY_THRESHOLD:
            raise ProtocolError(f"a frame for {len(data)} bytes")
    elif isinstance(data, msgspec.msgpack.Ext) and data.code == 3:
        data = data.data
        if len(data) >= ZERO_COPY_THRESHOLD and tensor.shape:
            raise ProtocolError(f"{len(data)} bytes inline")
    else:
        raise ProtocolError(f"tensor data {data!r}")
    numbers = array.array(TYPECODES[tensor.dtype])
    numbers.frombytes(data)
    size = 1
    for extent in tensor.shape:
        size *= extent
    if size != len(numbers):
        raise ProtocolError(f"{len(numbers)} numbers for shape {tensor.shape}")
    if len(tensor.shape) == 2:
        width = tensor.shape[1]
        return [numbers[i * width : (i + 1) * width].tolist() for i in range(tensor.shape[0])]
    return numbers.tolist()


def make_tensor(dtype, shape, numbers, aux):
    data = array.array(TYPECODES[dtype], numbers).tobytes()
    if len(data) < ZERO_COPY_THRESHOLD:
        return Tensor(dtype, shape, msgspec.msgpack.Ext(3, data))
    aux.append(data)
    return Tensor(dtype, shape, len(aux))


STATS_KEYS = [
    "num_running_reqs",
    "num_waiting_reqs",
    "step_counter",
    "current_wave",
    "kv_cache_usage",
    "prefix_cache_stats",
    "kv_cache_eviction_events",
]
PREFIX_KEYS = [
    "reset",
    "requests",
    "queries",
    "hits",
    "preempted_requests",
    "preempted_queries",
    "preempted_hits",
]


def check_what_kills_vllm_rs(payload):
    """vLLM's Rust frontend never recovers from any of these; the Python one takes them."""
    frame = msgspec.msgpack.decode(payload)
    if not isinstance(frame, list) or len(frame) != 9:
        raise ProtocolError(f"{len(frame)} elements in EngineCoreOutputs, not 9")
    _, outputs, stats, timestamp, utility, finished, wave, start_wave, _ = frame
    if wave is not None or start_wave is not None:
        raise ProtocolError("wave control on a client's socket")
    if utility is not None:
        if outputs or stats is not None or finished:
            raise ProtocolError("a utility output that is not alone")
    elif not outputs and stats is None and not finished:
        raise ProtocolError("a wholly empty frame")
    if timestamp == 0.0:
        raise ProtocolError("a timestamp of zero")
    for output in outputs:
        if len(output) != 19:
            raise ProtocolError(f"{len(output)} elements in EngineCoreOutput, not 19")
        if min(output[1], default=0) < 0:
            raise ProtocolError("a negative token id")
    if stats is not None:
        missing = [key for key in STATS_KEYS if key not in stats]
        missing += [key for key in PREFIX_KEYS if key not in stats["prefix_cache_stats"]]
        missing += [key for key in SchedulerStats.__struct_fields__ if key not in stats]
        if missing:
            raise ProtocolError(f"scheduler_stats without {missing}")


def plain(value):
    """`value` for JSON."""
    if isinstance(value, msgspec.msgpack.Ext):
        return {"ext": value.code, "bytes": value.data.hex()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def say(event, **fields):
    line = {"event": event, **{key: plain(item) for key, item in fields.items()}}
    print(json.dumps(line), flush=True)


def plain_output(output, frames):
    told = plain(output)
    told = {key: item for key, item in told.items() if item is not None}
    for field in ("new_logprobs", "new_prompt_logprobs_tensors"):
        logprobs = getattr(output, field)
        if logprobs is not None:
            told[field] = {
                "token_ids": tensor_rows(logprobs[0], frames),
                "logprobs": tensor_rows(logprobs[1], frames),
                "ranks": tensor_rows(logprobs[2], frames),
            }
    return told


def decode_outputs(frames):
    """One message of the output socket, checked as both of vLLM's frontends would."""
    outputs = unpack(frames[0], EngineCoreOutputs)
    check_what_kills_vllm_rs(frames[0])
    return outputs


def decode_client(frames):
    kind, payload = frames[0], frames[1]
    if kind == ADD:
        request = unpack(payload, EngineCoreRequest)
        if request.prompt_embeds is not None:
            tensor_rows(request.prompt_embeds, frames[1:])
        return "add", request
    if kind == ABORT:
        return "abort", unpack(payload, list[str])
    if kind == START_DP_WAVE:
        return "start_dp_wave", unpack(payload, StartDpWave)
    if kind == UTILITY:
        return "utility", unpack(payload, UtilityCall)
    raise ProtocolError(f"type byte {kind!r}")
