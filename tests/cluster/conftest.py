"""Real processes on loopback: fixtures that start daemons and clusters, and clients for them.

BUILD names the build folder (default build). Stubs are generated from proto/ into it by grpcio-tools. A session-wide cluster
serves the tests that leave it as they found it; tests that kill or configure start their own."""
import contextlib
import fcntl
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import grpc
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
BIN = BUILD / "bin"
MODEL = ROOT / "tests/tiny/tiny-model"
GOLDENS = json.loads((ROOT / "tests/tiny/goldens.json").read_text())
IS_SANITIZED = "asan" in BUILD.name or "tsan" in BUILD.name
PATIENCE = 60 if not IS_SANITIZED else 180   # seconds that a fleet may take to get ready; the machine may be busy


def _generate_stubs() -> pathlib.Path:
    from grpc_tools import protoc

    out = BUILD / "gen/python"
    out.mkdir(parents=True, exist_ok=True)
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "proto").glob("*.proto"))
    newest = max((ROOT / p).stat().st_mtime for p in protos)
    mark = out / ".done"
    with (out / ".lock").open("w") as lock:   # several processes of one run come here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not mark.exists() or mark.stat().st_mtime < newest:
            code = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={out}", f"--grpc_python_out={out}"]
                               + [str(ROOT / p) for p in protos])
            assert code == 0, "grpc_tools.protoc failed"
            mark.touch()
    return out


sys.path.insert(0, str(_generate_stubs()))
common_pb2 = importlib.import_module("proto.common_pb2")
inference_pb2 = importlib.import_module("proto.inference_pb2")
inference_grpc = importlib.import_module("proto.inference_pb2_grpc")
worker_pb2 = importlib.import_module("proto.worker_pb2")
worker_grpc = importlib.import_module("proto.worker_pb2_grpc")
fleet_pb2 = importlib.import_module("proto.fleet_pb2")
fleet_grpc = importlib.import_module("proto.fleet_pb2_grpc")
health_pb2 = importlib.import_module("proto.health_pb2")
health_grpc = importlib.import_module("proto.health_pb2_grpc")


def wait_until(what, condition, seconds=20.0, every=0.02):
    """Returns condition()'s first true value; fails with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"waited {seconds} s for: {what}"
        time.sleep(every)


def http_get(address, path, timeout=10):
    """(status, body) of a GET."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics_of(address) -> dict:
    """Prometheus samples of a daemon as {name{labels}: value}; the daemon label is cut off."""
    out = {}
    for line in http_get(address, "/metrics")[1].splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            out[name.split("{")[0] if 'le="' not in name else name] = float(value)
    return out


def metric_labels(address, name) -> list:
    return [line for line in http_get(address, "/metrics")[1].splitlines() if line.startswith(name + "{")]


class Daemon:
    """One daemon process started by the test itself (no supervisor). wrap: a command that ends by executing its arguments."""

    def __init__(self, directory, role, name, *flags, wait=True, env=None, model=MODEL, wrap=()):
        self.role, self.name = role, name
        self.directory = pathlib.Path(directory)
        self.address_file = self.directory / f"{name}.json"
        with contextlib.suppress(FileNotFoundError):
            self.address_file.unlink()
        self.log_path = self.directory / f"{name}.log"
        self.log = open(self.log_path, "ab")
        self.process = subprocess.Popen(
            [*wrap, str(BIN / f"tandem-{role}"), "--model", str(model), "--name", name, "--address-file", str(self.address_file), *flags],
            stdout=self.log, stderr=self.log, env={**os.environ, **(env or {})})
        self.rpc = self.http = None
        if wait:
            self.wait_listening()

    def wait_listening(self):
        def look():
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{self.log_text()}"
            return self.address_file.exists()
        wait_until(f"{self.name} listens", look, PATIENCE)
        info = json.loads(self.address_file.read_text())
        self.rpc, self.http = info["rpc"], info["http"]
        return self

    def log_text(self):
        return self.log_path.read_text(errors="replace")

    def statez(self):
        return json.loads(http_get(self.http, "/statez")[1])

    def metrics(self):
        return metrics_of(self.http)

    def kill(self, signum=signal.SIGKILL):
        self.process.send_signal(signum)
        if signum == signal.SIGKILL:
            self.process.wait()

    def stop(self, seconds=40):
        """SIGTERM; returns the exit status. What a sanitizer found, leaks at the end too, fails the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
            found = [line for line in self.log_text().splitlines() if "Sanitizer: " in line or ": runtime error: " in line]
            assert not found, f"{self.name}: {found}\n{self.log_text()[-6000:]}"
            return status
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} did not stop within {seconds} s:\n{self.log_text()[-3000:]}") from None
        finally:
            self.log.close()


class Fleet:
    """A router with workers, each a child of the test, so that they can be killed one by one."""

    def __init__(self, directory, n_prefill=1, n_decode=1, router_flags=(), prefill_flags=(), decode_flags=(), model=MODEL,
                 wrap=(), prefill_on="prefill"):
        """prefill_on: by default every prompt is handed over, whatever would be faster."""
        self.directory, self.model, self.wrap = pathlib.Path(directory), model, wrap
        self.router_flags, self.flags = ("--prefill-on", prefill_on, *router_flags), {"prefill": prefill_flags, "decode": decode_flags}
        self.daemons = []
        try:
            self.start(n_prefill, n_decode)
        except BaseException:
            self.close()
            raise

    def start(self, n_prefill, n_decode):
        self.router = self.add("router", "router", *self.router_flags)
        self.prefill = [self.add("prefill", f"prefill-{i}", wait=False) for i in range(n_prefill)]
        self.decode = [self.add("decode", f"decode-{i}", wait=False) for i in range(n_decode)]
        for worker in self.prefill + self.decode:
            worker.wait_listening()
        self.wait_workers(n_prefill, n_decode, PATIENCE)
        self.wait_ready()

    def add(self, role, name, *flags, wait=True):
        if role != "router":
            flags = ("--router", self.router.rpc, *self.flags[role], *flags)
        daemon = Daemon(self.directory, role, name, *flags, wait=False, model=self.model, wrap=self.wrap)
        self.daemons.append(daemon)
        return daemon.wait_listening() if wait else daemon

    def wait_ready(self):
        wait_until("the fleet is ready", lambda: http_get(self.router.http, "/readyz")[0] == 200, PATIENCE)

    def wait_workers(self, n_prefill, n_decode, seconds=20):
        def look():
            m = self.router.metrics()
            return m["tandem_workers_prefill"] == n_prefill and m["tandem_workers_decode"] == n_decode
        wait_until(f"{n_prefill} prefill and {n_decode} decode workers in the pool", look, seconds)

    def client(self):
        return Client(self.router.rpc)

    def close(self):
        with contextlib.ExitStack() as all_of_them:      # each is stopped, even if one does not want to
            for daemon in self.daemons:
                if daemon.process.poll() is None:
                    all_of_them.callback(daemon.stop)


class Client:
    """The public API by grpcio."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.stub = inference_grpc.InferenceStub(self.channel)
        self.health = health_grpc.HealthStub(self.channel)

    def request(self, tokens=None, text=None, max_tokens=16, temperature=0.0, logprobs=None, stop_ids=(), **more):
        sampling = common_pb2.Sampling(temperature=temperature, **more.pop("sampling", {}))
        stop = common_pb2.Stop(max_tokens=max_tokens, token_ids=stop_ids, ignore_eos=more.pop("ignore_eos", False),
                               min_tokens=more.pop("min_tokens", 0))
        r = inference_pb2.GenerateRequest(sampling=sampling, stop=stop, **more)
        if tokens is not None:
            r.token_ids.ids.extend(tokens)
        if text is not None:
            r.text = text if isinstance(text, bytes) else text.encode()
        if logprobs is not None:
            r.want_logprobs, r.n_logprobs = True, logprobs
        return r

    def start(self, timeout=60, **settings):
        return self.stub.Generate(self.request(**settings), timeout=timeout)

    def generate(self, timeout=60, **settings):
        """Runs to the end: an object with ids, text, logprobs, finish, usage, timing."""
        return collect(self.start(timeout=timeout, **settings))

    def close(self):
        self.channel.close()


class Result:
    pass


def collect(call):
    out = Result()
    out.ids, out.text, out.logprobs, out.finish, out.usage, out.timing, out.events = [], b"", [], 0, None, None, []
    out.request_id, out.seed = "", None
    for event in call:
        out.events.append(event)
        if len(out.events) == 1:
            out.request_id, out.seed = event.request_id, event.seed
        out.ids.extend(event.token_ids)
        out.text += event.text
        out.logprobs.extend(event.logprobs)
        if event.finish_reason:
            out.finish, out.usage, out.timing = event.finish_reason, event.usage, event.timing
    return out


def golden(name):
    return next(p for p in GOLDENS["prompts"] if p["name"] == name)


def expect_golden(ids, prompt, bound, n=None):
    """ids equals (the first n of) the golden greedy continuation up to the first step whose margin is within the bound."""
    for i, (want, margin) in enumerate(list(zip(prompt["greedy"], prompt["greedy_margin"]))[:n]):
        if margin <= bound:
            return i
        assert i < len(ids) and ids[i] == want, f"{prompt['name']}: token {i} is {ids[i:i + 1]}, golden {want}"
    return len(prompt["greedy"][:n])


def free_pages(worker) -> tuple:
    m = worker.metrics()
    return m["tandem_kv_pages_free_sliding"], m["tandem_kv_pages_free_full"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """The shared cluster: leave it as you found it."""
    f = Fleet(tmp_path_factory.mktemp("fleet"))
    yield f
    f.close()


@pytest.fixture
def client(fleet):
    c = fleet.client()
    yield c
    c.close()


@pytest.fixture
def new_fleet(tmp_path):
    """A function that starts a fleet of the test's own."""
    fleets = []

    def start(**settings):
        directory = tmp_path / f"fleet-{len(fleets)}"
        directory.mkdir()
        f = Fleet(directory, **settings)
        fleets.append(f)
        return f

    yield start
    for f in fleets:
        f.close()
