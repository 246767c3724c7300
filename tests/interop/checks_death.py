"""Several frontends of both kinds on one core, and either side killed."""

import contextlib
import http.client
import signal
import time

from checks_serving import idle
from lab import check, free_port, in_parallel, reason_of, wait_for


def crowd(lab, *flags):
    """Two frontends of each kind on one core: (theirs, ours, their handshake ports)."""
    handshakes = [free_port(), free_port()]
    theirs = [lab.vllm(f"vllm-{n}", port) for n, port in enumerate(handshakes)]
    lab.crowd_core = lab.core(*flags, handshakes=handshakes)
    ours = [lab.native(f"native-{n}") for n in range(2)]
    for server in theirs + ours:
        server.ready()
    return theirs, ours, handshakes


def ends(stream):
    """How a stream ends, and after how many seconds: its finish reason, "error" or "cut"."""
    started = time.monotonic()
    events = []
    with contextlib.suppress(OSError, http.client.HTTPException):
        events = stream.rest()
    seconds = time.monotonic() - started
    if any(event != "[DONE]" and "error" in event for event in events):
        return "error", seconds
    return reason_of(events) or "cut", seconds


def crowded(lab):
    """Four frontends at once: everyone gets its own answer, and the sums are right."""
    theirs, ours, _ = crowd(lab)
    servers = theirs + ours
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    answers = in_parallel([lambda s=s: s.complete(**body) for s in servers * 4])
    texts = {answer["choices"][0]["text"] for answer in answers}
    check(len(texts) == 1, f"{texts}")
    lengths = range(1, 9)
    in_parallel([
        lambda s=s, n=n: s.complete(prompt=f"{n} and", max_tokens=n, ignore_eos=True)
        for s in servers for n in lengths
    ])
    idle(ours[0])
    expected = 4 * 12 + sum(lengths)
    for server in servers:
        counted = server.metrics().sum("vllm:generation_tokens_total")
        check(counted == expected, f"{server.process.name}: {counted}, expected {expected}")
    return [f"{16 + 4 * len(lengths)} requests"]


def storm(lab):
    """200 streams over four frontends, of which every third client hangs up in the middle."""
    theirs, ours, _ = crowd(lab, "--runner", "mock", "--mock-step-ms", "2")
    servers = theirs + ours

    def client(number):
        stream = servers[number % 4].stream(prompt=f"client {number}", max_tokens=40 + number % 60)
        stream.first()
        if number % 3 == 0:
            stream.hang_up()
            return "gone"
        return ends(stream)[0]

    fates = in_parallel([lambda n=n: client(n) for n in range(200)])
    check(fates.count("length") + fates.count("stop") == 133, f"{sorted(set(fates))}")
    idle(ours[0])
    for server in servers:
        check(server.complete(prompt="a", max_tokens=1), "after the storm")
    return ["67 hung up, 133 answered whole"]


def frontend_killed(lab):
    """`kill -9` of a frontend of each kind: the others feel nothing, and it may come back."""
    theirs, ours, handshakes = crowd(lab, "--runner", "mock", "--mock-step-ms", "10")
    stay = [s.stream(prompt="stays", max_tokens=400) for s in (theirs[0], ours[0])]
    for stream in stay:
        stream.first()
    notes = []
    for victim in (theirs[1], ours[1]):
        doomed = [victim.stream(prompt="doomed", max_tokens=8000) for _ in range(5)]
        for stream in doomed:
            stream.first()

        def running():
            return ours[0].metrics().sum("vllm:num_requests_running")

        wait_for("all to run", lambda: running() == 7)
        victim.process.kill()
        _, seconds = wait_for("its requests to be gone", lambda: running() == 2, 2)
        notes.append(f"requests of {victim.process.name} gone after {seconds:.2f} s")
    back = lab.vllm("vllm-1-again", handshakes[1])
    seconds = back.ready()
    notes.append(f"vllm-rs started again is served after {seconds:.1f} s")
    check(back.complete(prompt="a", max_tokens=3)["usage"]["completion_tokens"] == 3, "again")
    lab.native("native-1-again").ready()
    for stream in stay:
        reason, _ = ends(stream)
        check(reason == "length", f"a stream beside the dead ended with {reason}")
    idle(ours[0])
    return notes


def frontend_stopped_and_started(lab):
    """A frontend of vLLM's that comes and goes: our core dials again each time."""
    handshake = free_port()
    lab.core("--runner", "mock", handshakes=[handshake])
    for life, number in enumerate([signal.SIGTERM, signal.SIGKILL, signal.SIGTERM]):
        server = lab.vllm(f"vllm-{life}", handshake)
        server.ready()
        check(server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2, "life")
        server.process.signal(number)
        server.process.popen.wait(timeout=20)
    server = lab.vllm("vllm-last", handshake)
    return [f"fourth life served after {server.ready():.1f} s"]


def core_killed(lab):
    """`kill -9` of the core under streams, then another core in its place."""
    theirs, ours, handshakes = crowd(lab, "--runner", "mock", "--mock-step-ms", "10")
    streams = {s: s.stream(prompt="a", max_tokens=8000) for s in (theirs[0], ours[0])}
    for stream in streams.values():
        stream.first()
    lab.crowd_core.kill()
    reason, seconds = ends(streams[ours[0]])
    check(reason == "error" and seconds < 2, f"our frontend: {reason} after {seconds:.1f} s")
    notes = [f"our stream ended after {seconds:.2f} s"]
    streams[theirs[0]].socket.settimeout(10)
    reason, seconds = ends(streams[theirs[0]])
    if reason == "cut" and seconds > 9:
        notes.append("a stream of vllm-rs hangs (it has no heartbeat)")
    else:
        notes.append(f"a stream of vllm-rs ended with {reason} after {seconds:.1f} s")
    lab.core("--runner", "mock", handshakes=handshakes)
    for server in ours:
        server.ready()
        check(server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2, "ours")
    notes.append("ours serve again by themselves")
    # vLLM's frontend shakes hands once in its life: it is started again.
    theirs[0].process.kill()
    again = lab.vllm("vllm-0-again", handshakes[0])
    again.ready()
    check(again.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2, "again")
    notes.append("vllm-rs does once it is started again")
    return notes


def core_stopped(lab):
    """SIGTERM to the core: every stream ends, and vLLM's frontend is told."""
    theirs, ours, _ = crowd(lab, "--runner", "mock", "--mock-step-ms", "10")
    streams = [s.stream(prompt="a", max_tokens=8000) for s in (theirs[0], ours[0])]
    for stream in streams:
        stream.first()
    check(lab.crowd_core.stop() == 0, "the core ends well")
    reason, seconds = ends(streams[0])
    check(reason != "cut" and seconds < 5, f"vllm-rs: {reason} after {seconds:.1f} s")
    notes = [f"a stream of vllm-rs ended with {reason}"]
    reason, seconds = ends(streams[1])
    check(reason in ("abort", "error") and seconds < 5, f"ours: {reason} after {seconds:.1f} s")
    notes.append(f"ours with {reason}")
    # Its handshake is over for good, so it must know that it will never be served again.
    for server in theirs:
        wait_for("503", lambda s=server: s.request("GET", "/health", timeout=5)[0] == 503, 5)
        status, answer = server.refusal(prompt="a", max_tokens=2)
        check(status >= 500, f"a request after the end: {status} {answer}")
    return notes


CHECKS = [
    ("crowded", crowded),
    ("storm", storm),
    ("frontend killed", frontend_killed),
    ("frontend restarted", frontend_stopped_and_started),
    ("core killed", core_killed),
    ("core stopped", core_stopped),
]
