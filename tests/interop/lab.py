"""Processes, requests and metrics for the checks in this folder. Standard library only."""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

VLLM = "0.33.0"
PATIENCE = 60.0


class Failed(Exception):
    """A check that did not hold."""


def check(holds, text):
    if not holds:
        raise Failed(text)


def wait_for(what, condition, seconds=PATIENCE):
    """The first value of `condition` that is true, and the seconds it took."""
    started = time.monotonic()
    while True:
        value = condition()
        if value:
            return value, time.monotonic() - started
        if time.monotonic() - started > seconds:
            raise Failed(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


def free_port():
    """A port that the kernel has just chosen. Somebody else could take it before it is bound
    again; vLLM's frontend cannot be told to choose by itself."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def fetch_vllm_rs(cache):
    """The program of that name out of vLLM's wheel, fetched through pip where it is missing."""
    program = cache / f"vllm-rs-{VLLM}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            pip = [sys.executable, "-m", "pip", "download", f"vllm=={VLLM}", "--no-deps"]
            pip += ["--only-binary", ":all:", "--dest", folder]
            subprocess.run(pip, check=True, timeout=1800)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = archive.extract("vllm/vllm-rs", folder)
            os.chmod(part, 0o755)
            os.replace(part, program)
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    check(said.stdout.strip() == f"vllm-rs {VLLM}", f"{program} says {said.stdout!r}")
    return program


class Process:
    def __init__(self, name, popen, log):
        self.name, self.popen, self.log = name, popen, log

    def alive(self):
        return self.popen.poll() is None

    def signal(self, number):
        self.popen.send_signal(number)

    def kill(self):
        self.popen.kill()
        self.popen.wait(timeout=10)

    def stop(self):
        """SIGTERM, and what it ended with."""
        if self.alive():
            self.popen.terminate()
        return self.popen.wait(timeout=15)


class Lab:
    """A folder with a log for each process; everything started here ends with it."""

    def __init__(self, pawl, vllm_rs, python, model, folder):
        self.pawl, self.vllm_rs, self.python = pawl, vllm_rs, python
        self.model, self.folder = model, folder
        self.hf = folder / "hf"
        self.processes = []
        self.lives = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            if process.alive():
                process.popen.terminate()
        for process in reversed(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=10)
            if process.alive():
                process.kill()

    def start(self, name, argv, **env):
        self.lives += 1
        log = self.folder / f"{self.lives:02}-{name}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PAWL_", "VLLM_"))}
        environment.update(env, TMPDIR=str(self.folder))
        with open(log, "wb") as out:
            popen = subprocess.Popen(
                [str(arg) for arg in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=environment, cwd=self.folder,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def core(self, *flags, handshakes=()):
        """Our core, listening for our frontends and dialling vLLM's."""
        argv = [self.pawl, "engine-core", self.model, "--listen", self.core_address(), *flags]
        for port in handshakes:
            argv += ["--handshake", f"tcp://127.0.0.1:{port}"]
        return self.start("core", argv)

    def core_address(self):
        return f"ipc://{self.folder}/core"

    def vllm(self, name, handshake, *flags):
        """vLLM's frontend, which owns the handshake port `handshake`."""
        port = free_port()
        program = [self.vllm_rs]
        if self.python:
            program = [self.python, "-m", "vllm.entrypoints.cli.main"]
        argv = [*program, "serve", self.hf, "--served-model-name", "model"]
        argv += ["--data-parallel-size", 1, "--data-parallel-size-local", 0]
        argv += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", handshake]
        argv += ["--host", "127.0.0.1", "--port", port, *flags]
        env = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        return Server(self.start(name, argv, **env), port)

    def native(self, name):
        """Our api-server."""
        ports = self.folder / f"{name}.ports"
        ports.unlink(missing_ok=True)
        argv = [self.pawl, "api-server", "--core", self.core_address(), "--port", 0]
        argv += ["--admin-port", 0, "--port-file", ports, "--served-model-name", "model"]
        process = self.start(name, argv)

        def bound():
            check(process.alive(), f"{name} ended, see {process.log}")
            with contextlib.suppress(OSError, ValueError):
                return json.loads(ports.read_text())

        found, _ = wait_for("the port file", bound)
        return Server(process, found["port"], found["admin_port"])


class Server:
    """A frontend of either kind."""

    def __init__(self, process, port, admin_port=None):
        self.process, self.port, self.admin_port = process, port, admin_port or port

    def ready(self):
        def healthy():
            check(self.process.alive(), f"{self.process.name} ended, see {self.process.log}")
            with contextlib.suppress(OSError):
                return self.request("GET", "/health", timeout=5)[0] == 200

        # Python takes a minute to import all that it imports.
        _, seconds = wait_for(f"{self.process.name} to be healthy", healthy, 5 * PATIENCE)
        return seconds

    def request(self, method, path, body=None, timeout=PATIENCE, port=None):
        """Status, and the body as JSON or text."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout)
        try:
            headers = {"content-type": "application/json"}
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(text)
        return answer.status, text

    def post(self, path, body, **options):
        status, answer = self.request("POST", path, {"model": "model", **body}, **options)
        check(status == 200, f"{self.process.name}: POST {path} {body}: {status} {answer}")
        return answer

    def complete(self, **body):
        return self.post("/v1/completions", body)

    def chat(self, **body):
        return self.post("/v1/chat/completions", body)

    def refusal(self, path="/v1/completions", **body):
        return self.request("POST", path, {"model": "model", **body})

    def stream(self, path="/v1/completions", **body):
        return Stream(self, path, body)

    def metrics(self):
        status, text = self.request("GET", "/metrics", port=self.admin_port)
        check(status == 200, f"/metrics: {status}")
        return Metrics(text)


class Stream:
    """An answer that is read as it comes."""

    def __init__(self, server, path, body, timeout=PATIENCE):
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
        body = {"model": "model", "stream": True, **body}
        headers = {"content-type": "application/json"}
        self.connection.request("POST", path, json.dumps(body), headers)
        # Taken now: the connection forgets it once the answer has begun.
        self.socket = self.connection.sock
        self.answer = self.connection.getresponse()
        check(self.answer.status == 200, f"stream: {self.answer.status}")

    def events(self):
        """The events as JSON, then "[DONE]"; ends without it where the stream is cut."""
        while True:
            line = self.answer.readline()
            if not line:
                return
            if line.startswith(b"data: "):
                data = line[6:].strip().decode()
                yield data if data == "[DONE]" else json.loads(data)
                if data == "[DONE]":
                    return

    def rest(self):
        return list(self.events())

    def first(self):
        """Reads until there is text."""
        for event in self.events():
            if event != "[DONE]" and text_of([event]):
                return event
        raise Failed("a stream without text")

    def hang_up(self):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def text_of(events):
    parts = []
    for event in events:
        for choice in event.get("choices", []) if event != "[DONE]" else []:
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)


def reason_of(events):
    choices = [c for e in events if e != "[DONE]" for c in e.get("choices", [])]
    reasons = [c["finish_reason"] for c in choices if c.get("finish_reason")]
    return reasons[-1] if reasons else None


def in_parallel(jobs):
    """Runs the functions on threads; their results, or the first error."""
    results = [None] * len(jobs)

    def work(index, job):
        try:
            results[index] = (job(), None)
        except Exception as error:  # Handed to whoever waits.
            results[index] = (None, error)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        check(not thread.is_alive(), "a request that does not end")
    for _, error in results:
        if error is not None:
            raise error
    return [result for result, _ in results]


class Metrics:
    """Series of an exposition in either format: {(name, labels): value}."""

    def __init__(self, text):
        self.series = {}
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            head, value = line.rsplit(" ", 1)
            name, _, labels = head.partition("{")
            pairs = labels.rstrip("}").split('",') if labels else []
            labels = frozenset(tuple(p.strip().rstrip('"').split('="', 1)) for p in pairs if p)
            self.series[name, labels] = float(value)

    def sum(self, name, **labels):
        wanted = set(labels.items())
        found = [v for (n, have), v in self.series.items() if n == name and wanted <= set(have)]
        return sum(found)

    def comparable(self):
        """What must be equal for the same requests, whatever the time they took: counters, and of
        histograms the counts and, where they hold tokens, the sums and buckets. Without labels that
        name the process; zeros are left out, since a series may be missing until it counts."""
        kept = {}
        for (name, labels), value in self.series.items():
            if not name.startswith("vllm:") or value == 0:
                continue
            timed = "seconds" in name
            whole = name.endswith(("_total", "_count"))
            tokens = name.endswith(("_sum", "_bucket")) and not timed
            if whole or tokens:
                # `1.0` and `1` are the same bound.
                plain = {(k, str(float(v)) if k == "le" else v) for k, v in labels}
                plain -= {(k, v) for k, v in plain if k in ("engine", "model_name")}
                kept[name, frozenset(plain)] = value
        return kept


def make_lab(pawl, vllm_rs, python, model, keep):
    """A folder with a short name, since sockets lie in it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="pawl"))

    @contextlib.contextmanager
    def lab():
        try:
            with Lab(pawl, vllm_rs, python, model, folder) as made:
                yield made
        finally:
            if keep:
                print(f"logs: {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)

    return lab()


def bounded(seconds):
    """Ends this process, and with it what it started, after that time."""

    def out_of_time(*_):
        raise TimeoutError(f"not done within {seconds} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(seconds)
