#!/usr/bin/env python3
"""vLLM's side of the engine-core wire, played with pyzmq and msgspec.

What `vllm_structs` refuses, vLLM's Python frontend refuses. Four commands, each bounded by
--timeout seconds:

  frontend  owns a handshake address, lets one engine in, asks for tokens
  engine    dials a handshake address, answers with scripted tokens
  decode    reads hex frames from stdin, prints them as JSON
  samples   prints hex frames as msgspec writes them

All print one JSON object a line. The exit status is 0 when all went as told, 1 when the peer broke
the protocol or a request failed, 3 when the time was over.
"""

import argparse
import json
import os
import sys
import time
import uuid

import msgspec
import zmq

from vllm_structs import *  # Every message, and how it is read.


class OutOfTime(Exception):
    """--timeout is over."""


# ---- sockets ----


class Deadline:
    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def left_ms(self):
        left = self.end - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return int(left * 1000) + 1


def make_socket(context, kind, identity=None):
    """As vLLM's: no limit on queues, no heartbeats."""
    sock = context.socket(kind)
    sock.linger = 1000
    sock.set_hwm(0)
    if identity is not None:
        sock.identity = identity
    return sock


def receive(sock, deadline):
    if not sock.poll(deadline.left_ms()):
        raise OutOfTime
    return sock.recv_multipart()


def bind(sock, address):
    """Binds, and tells the address to connect to."""
    sock.bind(address)
    return sock.last_endpoint.decode().rstrip("\0")


# ---- frontend ----


class Frontend:
    def __init__(self, args):
        self.args = args
        self.deadline = Deadline(args.timeout)
        self.context = zmq.Context()
        self.engine = None
        self.tokens = {}
        self.finished = {}
        self.calls = {}
        self.last_stats = None

    def run(self):
        args = self.args
        handshake = make_socket(self.context, zmq.ROUTER)
        self.input = make_socket(self.context, zmq.ROUTER)
        self.output = make_socket(self.context, zmq.PULL)
        input_at, output_at = bind(self.input, args.input), bind(self.output, args.output)
        say("bound", handshake=bind(handshake, args.handshake), input=input_at, output=output_at)
        self.shake_hands(handshake, input_at, output_at)
        handshake.close()
        # vLLM's Python frontend makes these two calls before anything else.
        if self.call("reset_mm_cache", []) is not None:
            raise ProtocolError("reset_mm_cache returns nil")
        if "generate" not in self.call("get_supported_tasks", []):
            raise ProtocolError("no task generate")
        if args.stdin:
            self.obey_stdin()
        else:
            self.ask_for_tokens()
        say("done", tokens=self.tokens, finished=self.finished)
        if args.until_dead:
            while receive(self.output, self.deadline) != [DEAD]:
                pass
            say("dead")
        for sock in (self.input, self.output):
            sock.close()
        self.context.term()

    def shake_hands(self, handshake, input_at, output_at):
        said_hello = said_ready = False
        ready_response = None
        poller = zmq.Poller()
        poller.register(handshake, zmq.POLLIN)
        poller.register(self.input, zmq.POLLIN)
        while not (said_ready and ready_response):
            happened = dict(poller.poll(self.deadline.left_ms()))
            if handshake in happened:
                identity, payload = handshake.recv_multipart()
                hello = unpack(payload, Hello)
                say(hello.status.lower(), identity=identity, message=hello)
                if identity != self.args.index.to_bytes(2, "little"):
                    raise ProtocolError(f"identity {identity.hex()}")
                if hello.local or not hello.headless:
                    raise ProtocolError("an engine started elsewhere is not local, and headless")
                if hello.status == "HELLO" and not said_hello:
                    said_hello = True
                    init = Init(Addresses([input_at], [output_at]))
                    handshake.send_multipart([identity, pack(init)])
                elif hello.status == "READY" and said_hello and not said_ready:
                    said_ready = True
                else:
                    raise ProtocolError(f"{hello.status} out of turn")
            if self.input in happened:
                frames = self.input.recv_multipart()
                if ready_response is not None or len(frames) != 2:
                    raise ProtocolError("more than a ready response on the input socket")
                self.engine = frames[0]
                ready_response = unpack(frames[1], EngineCoreReadyResponse)
                if ready_response.supports_lora != (ready_response.max_loras > 0):
                    raise ProtocolError("supports_lora contradicts max_loras")
                raw = msgspec.msgpack.decode(frames[1])
                missing = set(EngineCoreReadyResponse.__struct_fields__) - set(raw)
                if missing:
                    raise ProtocolError(f"ready response without {sorted(missing)}")
                say("ready_response", identity=self.engine, message=raw)

    def send(self, kind, payload):
        self.input.send_multipart([self.engine, kind, pack(payload)])

    def call(self, method, args):
        """Calls and waits; other frames are handled meanwhile."""
        call_id = self.start_call(method, args)
        while call_id in self.calls:
            self.take_frame()
        return self.answer

    def start_call(self, method, args):
        call_id = uuid.uuid1().int >> 64
        self.calls[call_id] = method
        self.send(UTILITY, UtilityCall(0, call_id, method, args))
        return call_id

    def add(self, request_id, prompt, sampling):
        params = msgspec.convert(sampling, SamplingParams)
        params.stop_token_ids = params.stop_token_ids or []
        params.stop, params.bad_words = params.stop or [], params.bad_words or []
        params.skip_reading_prefix_cache = bool(params.prompt_logprobs is not None)
        request = EngineCoreRequest(
            request_id, prompt, None, params, None, time.time(), None, None, None,
            external_req_id=request_id,
        )
        self.tokens[request_id] = []
        self.last_stats = None  # Only stats that come after this can say that the engine is idle.
        self.send(ADD, request)

    def abort(self, ids):
        for request_id in ids:
            self.finished.setdefault(request_id, "aborted by us")
        self.last_stats = None
        self.send(ABORT, ids)

    def take_frame(self):
        frames = receive(self.output, self.deadline)
        if frames == [DEAD]:
            say("dead")
            raise ProtocolError("the engine died")
        message = decode_outputs(frames)
        if message.engine_index != self.args.index:
            raise ProtocolError(f"engine index {message.engine_index}")
        if message.utility_output is not None:
            reply = message.utility_output
            method = self.calls.pop(reply.call_id, None)
            if method is None:
                raise ProtocolError(f"a reply to no call: {reply.call_id}")
            self.answer = reply.result.value if reply.result is not None else None
            say("utility", method=method, failure=reply.failure_message, result=self.answer)
            return
        if message.scheduler_stats is not None:
            self.last_stats = message.scheduler_stats
        for output in message.outputs:
            self.take_output(output)
        say(
            "outputs",
            timestamp=message.timestamp,
            outputs=[plain_output(output, frames) for output in message.outputs],
            stats=message.scheduler_stats,
            pawl=(msgspec.msgpack.decode(frames[0])[2] or {}).get("pawl"),
            finished_requests=message.finished_requests,
        )

    def take_output(self, output):
        request_id = output.request_id
        if request_id not in self.tokens:
            raise ProtocolError(f"output for {request_id}, which was never asked for")
        if request_id in self.finished:
            if self.finished[request_id] == "aborted by us":
                return  # It may have been under way already.
            raise ProtocolError(f"output for {request_id} after its last one")
        first = not self.tokens[request_id]
        if first and output.new_token_ids:
            if output.prefill_stats is None or not output.events:
                raise ProtocolError("a first token without events or prefill_stats")
        self.tokens[request_id] += output.new_token_ids
        if output.finish_reason is not None:
            self.finished[request_id] = output.finish_reason.name

    def is_idle(self):
        stats = self.last_stats
        idle = stats is not None and stats.num_running_reqs == 0 and stats.num_waiting_reqs == 0
        return idle and len(self.finished) == len(self.tokens)

    def ask_for_tokens(self):
        args = self.args
        sampling = {"max_tokens": args.max_tokens, "ignore_eos": True, **json.loads(args.sampling)}
        for number in range(args.requests):
            self.add(f"request-{number}", args.prompt, sampling)
        aborted = False
        while not self.is_idle():
            self.take_frame()
            if args.abort_after is not None and not aborted:
                if len(self.tokens["request-0"]) >= args.abort_after:
                    aborted = True
                    self.abort(["request-0"])
        errors = [id for id, reason in self.finished.items() if reason == "ERROR"]
        if errors:
            raise ProtocolError(f"failed requests: {errors}")

    def obey_stdin(self):
        """One command a line: {"add": {"id", "prompt", "sampling"}}, {"abort": [ids]},
        {"utility": [method, args]}; the end of the input waits until the engine is idle."""
        say("ready_for_commands")
        os.set_blocking(sys.stdin.fileno(), False)
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        poller.register(self.output, zmq.POLLIN)
        pending, open_input = b"", True
        while open_input or self.calls or (self.tokens and not self.is_idle()):
            happened = dict(poller.poll(self.deadline.left_ms()))
            if self.output in happened:
                self.take_frame()
            if sys.stdin.fileno() in happened:
                chunk = os.read(sys.stdin.fileno(), 1 << 16)
                if not chunk:
                    open_input = False
                    poller.unregister(sys.stdin.fileno())
                *lines, pending = (pending + chunk).split(b"\n")
                for line in filter(None, lines):
                    self.obey(json.loads(line))

    def obey(self, command):
        if "add" in command:
            add = command["add"]
            self.add(add["id"], add["prompt"], add.get("sampling", {}))
        elif "abort" in command:
            self.abort(command["abort"])
        elif "utility" in command:
            method, args = command["utility"]
            self.start_call(method, args)
        else:
            raise SystemExit(f"unknown command {command}")


# ---- engine ----


class Running:
    def __init__(self, request):
        self.request = request
        self.queued = time.monotonic()
        self.scheduled = None
        self.made = 0


class Engine:
    def __init__(self, args):
        self.args = args
        self.deadline = Deadline(args.timeout)
        self.context = zmq.Context()
        self.identity = args.index.to_bytes(2, "little")
        self.running = {}
        self.steps = 0
        self.completed = 0
        self.stats_due = set()

    def run(self):
        handshake = make_socket(self.context, zmq.DEALER, self.identity)
        handshake.connect(self.args.handshake)
        handshake.send(pack(Hello("HELLO", False, True)))
        init = unpack(receive(handshake, self.deadline)[0], Init)
        say("init", message=init)
        addresses = init.addresses
        if len(addresses.inputs) != len(addresses.outputs) or not addresses.inputs:
            raise ProtocolError("as many inputs as outputs, one at least")
        self.inputs = [
            make_socket(self.context, zmq.DEALER, self.identity) for _ in addresses.inputs
        ]
        self.outputs = [make_socket(self.context, zmq.PUSH) for _ in addresses.outputs]
        ready = pack(self.ready_response())
        for sock, address in zip(self.outputs, addresses.outputs):
            sock.connect(address)
        for sock, address in zip(self.inputs, addresses.inputs):
            sock.connect(address)
            sock.send(ready)
        handshake.send(pack(Hello("READY", False, True)))
        handshake.close()
        say("ready")
        try:
            self.loop()
        finally:
            for sock in self.inputs + self.outputs:
                sock.close()
            self.context.term()
        say("done", completed=self.completed, steps=self.steps)

    def ready_response(self):
        args = self.args
        return EngineCoreReadyResponse(
            max_model_len=args.max_model_len,
            num_gpu_blocks=1024,
            block_size=16,
            dp_stats_address=None,
            dtype="float32",
            vllm_version="0.33.0",
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            instance_id="python-peer",
            supports_lora=False,
            max_loras=0,
            kv_cache_size_tokens=16384,
            kv_cache_max_concurrency=8.0,
        )

    def loop(self):
        args = self.args
        poller = zmq.Poller()
        for sock in self.inputs:
            poller.register(sock, zmq.POLLIN)
        while args.requests is None or self.completed < args.requests or self.stats_due:
            wait = 0 if self.running or self.stats_due else self.deadline.left_ms()
            self.deadline.left_ms()
            for client, sock in enumerate(self.inputs):
                if sock in dict(poller.poll(wait)):
                    wait = 0
                    self.take_message(client, sock.recv_multipart())
            if self.running or self.stats_due:
                self.step()
                if args.die_after is not None and self.steps >= args.die_after:
                    for sock in self.outputs:
                        sock.send(DEAD)
                    say("died")
                    return
                time.sleep(args.step_ms / 1000)

    def take_message(self, client, frames):
        kind, message = decode_client(frames)
        say(kind, client=client, message=message)
        if kind == "add":
            if message.request_id in self.running:
                raise ProtocolError(f"a second ADD of {message.request_id}: fatal in vLLM")
            if message.sampling_params is None or message.prompt_token_ids is None:
                raise ProtocolError("an ADD without sampling_params or prompt_token_ids")
            if message.client_index != client:
                raise ProtocolError(f"client_index {message.client_index} on socket {client}")
            self.running[message.request_id] = Running(message)
        elif kind == "abort":
            for request_id in message:
                if self.running.pop(request_id, None):
                    self.completed += 1
                    self.stats_due.add(client)
        elif kind == "utility":
            self.answer(client, message)
        else:
            raise ProtocolError("wave control from a frontend")

    def answer(self, client, call):
        answers = {
            "reset_mm_cache": None,
            "get_supported_tasks": ["generate"],
            "is_sleeping": False,
            "is_scheduler_paused": False,
            "reset_prefix_cache": True,
        }
        if call.method in answers:
            reply = UtilityOutput(call.call_id, None, UtilityResult(None, answers[call.method]))
        else:
            failure = f"Call to {call.method} method failed: no such method"
            reply = UtilityOutput(call.call_id, failure, None)
        frame = EngineCoreOutputs(self.args.index, [], None, time.monotonic(), reply)
        self.outputs[client].send(pack(frame))

    def step(self):
        """One token for each request; the stats go to the first client that has outputs."""
        self.steps += 1
        now = time.monotonic()
        by_client, aux = {}, {}
        for request_id in list(self.running):
            client = self.running[request_id].request.client_index
            output = self.next_output(self.running[request_id], now, aux.setdefault(client, []))
            by_client.setdefault(client, []).append(output)
            if output.finish_reason is not None:
                del self.running[request_id]
                self.completed += 1
        stats = SchedulerStats(
            num_running_reqs=len(self.running),
            step_counter=self.steps,
            kv_cache_usage=len(self.running) / 1024,
        )
        recipients = by_client or {client: [] for client in self.stats_due or {0}}
        self.stats_due = set(by_client) if not self.running and by_client else set()
        for number, (client, outputs) in enumerate(recipients.items()):
            frame = EngineCoreOutputs(
                self.args.index, outputs, stats if number == 0 or not outputs else None,
                time.monotonic(), weight_version="default",
            )
            self.outputs[client].send_multipart([pack(frame), *aux.get(client, [])])

    def next_output(self, running, now, aux):
        request, params = running.request, running.request.sampling_params
        script = self.args.tokens
        token = script[running.made % len(script)]
        output = EngineCoreOutput(request.request_id, [token])
        if running.made == 0:
            tokens = len(request.prompt_token_ids)
            output.prefill_stats = PrefillStats(tokens, tokens, 0, 0, 0, tokens)
            output.events = [
                EngineCoreEvent(EventType.QUEUED, running.queued),
                EngineCoreEvent(EventType.SCHEDULED, now),
            ]
        running.made += 1
        if params.logprobs is not None:
            columns = max(params.logprobs, 0) + 1
            ids = [token] + [i for i in range(columns) if i != token][: columns - 1]
            output.new_logprobs = LogprobsLists(
                make_tensor("<i4", [1, columns], ids, aux),
                make_tensor("<f4", [1, columns], [-0.5 - i for i in range(columns)], aux),
                make_tensor("<i8", [1], [1], aux),
            )
        if running.made >= params.min_tokens:
            if token == params._eos_token_id:
                output.finish_reason = FinishReason.STOP
            elif token in (params.stop_token_ids or []):
                output.finish_reason, output.stop_reason = FinishReason.STOP, token
        if output.finish_reason is None and running.made >= (params.max_tokens or 1):
            output.finish_reason = FinishReason.LENGTH
        return output


# ---- frames as hex ----


def decode_lines(args):
    """Lines `KIND HEX [HEX...]`: the frames of one message, as they are on its socket."""
    kinds = {"hello": Hello, "init": Init, "ready_response": EngineCoreReadyResponse}
    for line in sys.stdin:
        kind, *frames = line.split()
        frames = [bytes.fromhex(frame) for frame in frames]
        if kind == "engine" and frames == [DEAD]:
            say("dead")
        elif kind == "engine":
            message = decode_outputs(frames)
            outputs = [plain_output(output, frames) for output in message.outputs]
            say("engine", message=message, outputs=outputs)
        elif kind == "client":
            name, message = decode_client(frames)
            say(name, message=message)
        elif kind in kinds:
            say(kind, message=unpack(frames[0], kinds[kind]))
        else:
            raise ProtocolError(f"unknown kind {kind}")


def print_samples(args):
    """Messages as msgspec writes them, for our decoder: lines that `decode` reads too."""

    def line(kind, *frames):
        print(kind, *(frame.hex() for frame in frames))

    params = SamplingParams(
        temperature=0.7, top_k=-1, stop="END", stop_token_ids=[2], bad_words=[], max_tokens=8,
        logit_bias={5: -1.0}, _all_stop_token_ids={0, 2}, logprobs=3, output_kind=2,
    )
    lora = LoRARequest("adapter", 1, "/adapters/one")
    request = EngineCoreRequest("r1", [1, 2, 3], None, params, None, 1.5, lora, None, None)
    line("client", ADD, pack(request))
    line("client", ABORT, pack(["r1", "r2"]))
    line("client", START_DP_WAVE, pack(StartDpWave(1, None)))
    line("client", UTILITY, pack(UtilityCall(0, 2**63 + 5, "pause_generation", ["abort", True])))
    line("hello", pack(Hello("HELLO", False, True)))
    line("init", pack(Init(Addresses(["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:2"]))))
    line("ready_response", pack(Engine(args).ready_response()))
    aux = []
    wide = LogprobsLists(
        make_tensor("<i4", [1, 100], list(range(100)), aux),
        make_tensor("<f4", [1, 100], [-0.5 * i for i in range(100)], aux),
        make_tensor("<i8", [1], [1], aux),
    )
    output = EngineCoreOutput(
        "r1", [7], wide, finish_reason=FinishReason.STOP, stop_reason=7,
        events=[EngineCoreEvent(EventType.QUEUED, 1.0)], prefill_stats=PrefillStats(3, 3),
        error=OutputError("code", "message"),
    )
    stats = SchedulerStats(num_running_reqs=1, kv_cache_usage=0.5)
    step = EngineCoreOutputs(0, [output], stats, 2.0, None, {"r1"}, weight_version="default")
    line("engine", pack(step), *aux)
    reply = UtilityOutput(2**63 + 5, None, UtilityResult(None, ["generate"]))
    line("engine", pack(EngineCoreOutputs(0, [], None, 2.0, reply)))
    line("engine", DEAD)


# ---- command line ----


def token_list(text):
    return [int(token) for token in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, run, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--timeout", type=float, default=60.0, help="seconds for everything")
        sub.add_argument("--index", type=int, default=0, help="the engine's index")
        sub.set_defaults(run=run)
        return sub

    sub = command("frontend", lambda args: Frontend(args).run(), "play vLLM's frontend")
    sub.add_argument("--handshake", required=True, help="address to bind")
    sub.add_argument("--input", default="tcp://127.0.0.1:*", help="address to bind")
    sub.add_argument("--output", default="tcp://127.0.0.1:*", help="address to bind")
    sub.add_argument("--requests", type=int, default=1)
    sub.add_argument("--prompt", type=token_list, default=[1, 2, 3], help="token ids")
    sub.add_argument("--max-tokens", type=int, default=4)
    sub.add_argument("--sampling", default="{}", help="more sampling parameters, as JSON")
    sub.add_argument("--abort-after", type=int, help="tokens after which the first is aborted")
    sub.add_argument("--stdin", action="store_true", help="commands come from stdin")
    sub.add_argument("--until-dead", action="store_true", help="wait for the engine's death notice")

    sub = command("engine", lambda args: Engine(args).run(), "play vLLM's engine")
    sub.add_argument("--handshake", required=True, help="address to connect to")
    sub.add_argument("--tokens", type=token_list, default=[72, 105], help="said over and over")
    sub.add_argument("--step-ms", type=float, default=5.0)
    sub.add_argument("--max-model-len", type=int, default=2048)
    sub.add_argument("--requests", type=int, help="end after so many (aborted ones count)")
    sub.add_argument("--die-after", type=int, help="steps after which the death notice is sent")

    command("decode", decode_lines, "hex frames on stdin, JSON on stdout")
    sub = command("samples", print_samples, "hex frames on stdout")
    sub.set_defaults(max_model_len=2048)

    args = parser.parse_args()
    try:
        args.run(args)
    except ProtocolError as error:
        say("error", message=str(error))
        os._exit(1)
    except OutOfTime:
        say("error", message=f"{args.timeout} s are over")
        os._exit(3)


if __name__ == "__main__":
    main()
