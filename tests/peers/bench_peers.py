#!/usr/bin/env python3
"""Serves the same model by Pawl and by a peer in turn, puts the same load on both, and prints them
side by side.

    tests/peers/bench_peers.py [--pawl target/release/pawl] [--streams 1,8,32] [--rounds 5]

The peer is llama.cpp's server, as the package xllamacpp builds it, in a virtual environment that is
made outside the tree (--venv) on the first run. Each round starts, loads and stops one server and
then the other, so that a machine that drifts does so for both; the figures are medians over rounds.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEER = "xllamacpp==2026.10.11549"
# How long a server may take to be ready, a load to end, and a server to stop.
READY_S, LOAD_S, STOP_S = 120, 600, 10

# Runs in the peer's own Python: prints its address, serves until its input ends.
SERVE_LLAMA = """
import os, sys, xllamacpp
model, streams, threads, context = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = model
params.n_parallel = streams
params.n_ctx = context
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print("serving at", server.listening_address, flush=True)
# Nobody reads what comes after: it must not fill the pipe.
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.stdin.read()
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pawl", type=pathlib.Path, default=ROOT / "target/release/pawl")
    parser.add_argument("--model", type=pathlib.Path, help="GGUF file [default: the default model]")
    outside = pathlib.Path(tempfile.gettempdir(), "pawl-peers")
    parser.add_argument("--venv", type=pathlib.Path, default=outside)
    parser.add_argument("--streams", default="1,8,32", help="streams at once, one load for each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3, help="requests of each stream in a load")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    # Also then the server that runs is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    pawl = args.pawl.resolve()
    model = args.model or output(pawl, "model", "fetch", "--print-path")
    model = pathlib.Path(model).resolve()
    python = peer_python(args.venv)
    streams = [int(n) for n in args.streams.split(",")]
    print(f"{datetime.date.today()}, {output(pawl, '--version')}, {PEER}, {model.name},")
    print(f"{platform.machine()}, {args.threads} threads; medians of {args.rounds} rounds\n")
    figures = {}
    for number in range(args.rounds):
        # Whoever goes first changes, too.
        for name in ["pawl", "llama.cpp"][:: 1 if number % 2 == 0 else -1]:
            for n in streams:
                serve = pawl_server if name == "pawl" else llama_server
                program = pawl if name == "pawl" else python
                with serve(program, model, n, args) as address:
                    result = load(pawl, address, n, args)
                figures.setdefault((n, name), []).append(result)
                said = f"round {number + 1}, {n} streams, {name}: {result['output_throughput']:.0f}"
                print(said, "tokens/s", file=sys.stderr, flush=True)
    table(streams, figures)


def table(streams, figures):
    metrics = [
        ("tokens/s", "output_throughput"),
        ("TTFT p50, ms", "median_ttft_ms"),
        ("ITL p50, ms", "median_itl_ms"),
        ("ITL p99, ms", "p99_itl_ms"),
    ]
    print("| streams | | pawl | llama.cpp | ratio of medians | ratios of rounds |")
    print("|---|---|---|---|---|---|")
    for n in streams:
        for title, key in metrics:
            ours, theirs = ([r[key] for r in figures[n, name]] for name in ("pawl", "llama.cpp"))
            a, b = statistics.median(ours), statistics.median(theirs)
            ratios = [x / y for x, y in zip(ours, theirs)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| {n} | {title} | {a:.1f} | {b:.1f} | {a / b:.2f} | {spread} |")


def load(pawl, address, streams, args):
    """What `pawl bench serve` saw."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "base-url": address,
            "max-concurrency": streams,
            "num-prompts": max(args.requests * streams, 5),
            "num-warmups": 1,
            "random-input-len": args.input_len,
            "random-output-len": args.output_len,
            "temperature": 0,
            # llama.cpp's server closes a connection after a stream, now and then under a request.
            "header": "connection=close",
            "result-dir": folder,
            "result-filename": "result.json",
        }
        command = [pawl, "bench", "serve", "--ignore-eos", "--save-result", "--disable-tqdm"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        subprocess.run(command, check=True, timeout=LOAD_S, stdout=subprocess.DEVNULL)
        result = json.loads(pathlib.Path(folder, "result.json").read_text())
    if result["failed"]:
        raise SystemExit(f"{result['failed']} requests failed at {address}")
    return result


@contextlib.contextmanager
def pawl_server(pawl, model, streams, args):
    with socket.socket() as free, socket.socket() as free_admin:
        free.bind(("127.0.0.1", 0))
        free_admin.bind(("127.0.0.1", 0))
        port, admin_port = free.getsockname()[1], free_admin.getsockname()[1]
    command = [pawl, "serve", model, "--port", port, "--admin-port", admin_port]
    command += ["--threads", args.threads, "--max-model-len", context(args)]
    with running(command) as process:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(process, f"{address}/v1/models")
        yield address


@contextlib.contextmanager
def llama_server(python, model, streams, args):
    whole_context = streams * context(args)
    command = [python, "-c", SERVE_LLAMA, model, streams, args.threads, whole_context]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := re.search(r"serving at (\S+)", line):
                address = found[1].rstrip("/")
                wait_until_ready(process, f"{address}/v1/models")
                yield address
                return
        raise SystemExit("llama.cpp's server ended before it served")


def context(args):
    """Positions of one stream: what is sent and made, and some room for a tokenizer's surprises."""
    return args.input_len + args.output_len + 128


@contextlib.contextmanager
def running(command, **pipes):
    """The process, in a group of its own, which is ended whatever happens."""
    pipes.setdefault("stdout", subprocess.DEVNULL)
    process = subprocess.Popen(
        [str(part) for part in command], stderr=subprocess.DEVNULL, start_new_session=True, **pipes
    )
    try:
        yield process
    finally:
        # A server that reads its input ends with it.
        if process.stdin:
            process.stdin.close()
        else:
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process, url):
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"{process.args[0]} ended before it was ready")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"{process.args[0]} was not ready within {READY_S} s")


def peer_python(folder):
    python = folder / "bin/python"
    installed = folder / "installed"
    if not installed.exists() or installed.read_text() != PEER:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True, timeout=1800)
        installed.write_text(PEER)
    return python


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
