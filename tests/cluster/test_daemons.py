"""Daemons as an operator meets them: flags, environment, HTTP pages, signals, ports, starting order."""
import json
import os
import random
import signal
import socket
import subprocess
import time

import grpc
import pytest

from conftest import (BIN, MODEL, PATIENCE, Client, Daemon, collect, common_pb2, expect_golden, free_port, golden, health_grpc,
                      health_pb2, http_get, inference_pb2, wait_until)

ROLES = ["router", "prefill", "decode"]


def run(role, *flags, env=None, timeout=60):
    return subprocess.run([str(BIN / f"tandem-{role}"), *flags], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})})


@pytest.mark.parametrize("role", ROLES)
def test_help_lists_flags_with_their_environment_twins(role):
    out = run(role, "--help")
    assert out.returncode == 0
    for word in ("--model", "TANDEM_MODEL", "--rpc-address", "--drain-timeout"):
        assert word in out.stdout
    assert ("--max-batch" in out.stdout) == (role == "decode")
    assert run(role, "--version").returncode == 0


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("flags, culprit", [
    (["--no-such-flag", "1"], "--no-such-flag"),
    (["--drain-timeout", "soon"], "--drain-timeout"),
    (["--drain-timeout", "99999999999"], "--drain-timeout"),
    (["--drain-timeout"], "--drain-timeout"),
    (["--log-level", "loud"], "--log-level"),
    (["stray"], "stray"),
])
def test_bad_flags_are_named(role, flags, culprit):
    out = run(role, "--model", str(MODEL), *flags)
    assert out.returncode not in (0, -signal.SIGABRT, -signal.SIGSEGV)
    assert culprit in out.stderr


@pytest.mark.parametrize("role", ROLES)
def test_a_missing_model_is_named(role):
    out = run(role)
    assert out.returncode > 0 and "--model" in out.stderr
    out = run(role, "--model", "/no/such/model", "--router", "127.0.0.1:1") if role != "router" else run(role, "--model", "/no/such/model")
    assert out.returncode > 0 and "/no/such/model" in out.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_device_that_cannot_serve_is_refused(role):
    for device in ("cuda", "abacus"):
        out = run(role, "--model", str(MODEL), "--device", device)
        assert out.returncode > 0 and "--device" in out.stderr and device in out.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("flags, named", [(("--tp", "2"), "--tp"), (("--kv-dtype", "f32"), "--kv-dtype")])
def test_what_a_gpu_cannot_do_is_refused_by_name(role, flags, named):
    out = run(role, "--model", str(MODEL), "--device", "cuda", *flags)
    assert out.returncode > 0 and named in out.stderr and "cuda" in out.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bf16_activations_are_for_experts_in_fewer_bits(device):
    out = run("decode", "--model", str(MODEL), "--device", device, "--moe-activations", "bf16")
    assert out.returncode > 0 and "--moe-activations" in out.stderr and "--moe-weights" in out.stderr


def test_flags_of_another_daemon_are_refused():
    out = run("router", "--model", str(MODEL), "--kv-dtype", "f32")
    assert out.returncode > 0 and "--kv-dtype" in out.stderr


def test_environment_twins_and_precedence(tmp_path):
    port = free_port()
    d = Daemon(tmp_path, "router", "r", env={"TANDEM_HTTP_ADDRESS": f"127.0.0.1:{port}"})
    assert d.http.endswith(f":{port}")
    assert d.stop() == 0
    d = Daemon(tmp_path, "router", "r", "--http-address", "127.0.0.1:0", env={"TANDEM_HTTP_ADDRESS": "127.0.0.1:1"})
    assert d.stop() == 0
    out = run("router", "--model", str(MODEL), env={"TANDEM_DRAIN_TIMEOUT": "never"})
    assert out.returncode > 0 and "TANDEM_DRAIN_TIMEOUT" in out.stderr


@pytest.mark.parametrize("flag", ["--rpc-address", "--http-address"])
@pytest.mark.parametrize("role", ROLES)
def test_a_port_in_use_is_named(role, flag):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        address = f"127.0.0.1:{s.getsockname()[1]}"
        more = [] if role == "router" else ["--router", "127.0.0.1:1"]
        out = run(role, "--model", str(MODEL), flag, address, *more)
        assert out.returncode > 0 and address in out.stderr


def test_pages_of_every_daemon(fleet):
    for d in [fleet.router, *fleet.prefill, *fleet.decode]:
        assert http_get(d.http, "/healthz")[0] == 200
        assert http_get(d.http, "/readyz")[0] == 200
        status, text = http_get(d.http, "/metrics")
        assert status == 200 and "# TYPE tandem_rpc_calls_total counter" in text
        assert json.loads(http_get(d.http, "/statez")[1])
        assert http_get(d.http, "/nowhere")[0] == 404
        with grpc.insecure_channel(d.rpc) as channel:
            reply = health_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_requests_carry_their_id_through_all_logs(new_fleet):
    fleet = new_fleet(router_flags=("--log-level", "debug"), prefill_flags=("--log-level", "debug"),
                      decode_flags=("--log-level", "debug"))
    client = fleet.client()
    out = client.generate(tokens=golden("counting")["ids"], max_tokens=3, request_id="find-me-17")
    assert out.request_id == "find-me-17"
    for d in fleet.daemons:
        wait_until(f"req= in the log of {d.name}", lambda d=d: "req=find-me-17" in d.log_text(), 5)
    client.close()


def test_workers_may_start_before_the_router(tmp_path):
    port = free_port()
    address = f"127.0.0.1:{port}"
    workers = [Daemon(tmp_path, role, role, "--router", address) for role in ("prefill", "decode")]
    router = Daemon(tmp_path, "router", "router", "--rpc-address", address)
    wait_until("ready", lambda: http_get(router.http, "/readyz")[0] == 200, PATIENCE)
    client = Client(address)
    prompt = golden("counting")
    expect_golden(client.generate(tokens=prompt["ids"], max_tokens=20).ids, prompt, 0.05, 20)
    client.close()
    # and the router may come back at the same address
    assert router.stop() == 0
    router = Daemon(tmp_path, "router", "router", "--rpc-address", address)
    wait_until("ready again", lambda: http_get(router.http, "/readyz")[0] == 200, PATIENCE)
    client = Client(address)
    expect_golden(client.generate(tokens=prompt["ids"], max_tokens=20).ids, prompt, 0.05, 20)
    client.close()
    for d in [router, *workers]:
        assert d.stop() == 0


def test_no_decode_worker_is_said_at_once(tmp_path):
    router = Daemon(tmp_path, "router", "router")
    assert http_get(router.http, "/readyz")[0] == 503
    client = Client(router.rpc)
    begin = time.monotonic()
    with pytest.raises(grpc.RpcError) as error:
        client.generate(tokens=[1, 2, 3])
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() - begin < 5
    client.close()
    assert router.stop() == 0


@pytest.mark.parametrize("victim", ["router", "prefill", "decode"])
def test_sigterm_lets_running_requests_finish(new_fleet, victim):
    fleet = new_fleet(prefill_flags=("--layer-delay", "30"))
    client = fleet.client()
    prompt = golden("counting")
    call = client.start(tokens=prompt["ids"], max_tokens=60, ignore_eos=True)
    daemon = {"router": fleet.router, "prefill": fleet.prefill[0], "decode": fleet.decode[0]}[victim]
    if victim != "prefill":
        next(call)
    else:
        time.sleep(0.1)
    daemon.kill(signal.SIGTERM)
    n = sum(len(e.token_ids) for e in call) + (0 if victim == "prefill" else 1)
    assert n == 60
    assert daemon.process.wait(40) == 0
    client.close()


def test_sigterm_is_bounded_by_the_drain_timeout(new_fleet):
    fleet = new_fleet(decode_flags=("--drain-timeout", "300"))
    client = fleet.client()
    call = client.start(tokens=golden("counting")["ids"], max_tokens=30000, ignore_eos=True)
    next(call)
    begin = time.monotonic()
    fleet.decode[0].kill(signal.SIGTERM)
    assert fleet.decode[0].process.wait(20) == 0 and time.monotonic() - begin < 10
    with pytest.raises(grpc.RpcError):
        for _ in call:
            pass
    client.close()


def test_garbage_on_every_port_harms_nobody(fleet, client):
    rng = random.Random(5)
    daemons = [fleet.router, *fleet.prefill, *fleet.decode]
    h2_preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for d in daemons:
        for address in (d.rpc, d.http):
            host, port = address.rsplit(":", 1)
            for kind in range(30):
                blob = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 3000)))
                if kind % 3 == 1:
                    blob = h2_preface + blob
                if kind % 3 == 2:
                    blob = b"GET /" + blob
                with socket.create_connection((host, int(port)), timeout=5) as s:
                    try:
                        s.sendall(blob)
                        s.settimeout(0.02)
                        s.recv(100)
                    except OSError:
                        pass
    prompt = golden("counting")
    expect_golden(client.generate(tokens=prompt["ids"], max_tokens=20).ids, prompt, 0.05, 20)
    for d in daemons:
        assert d.process.poll() is None and http_get(d.http, "/healthz")[0] == 200


def test_two_fleets_side_by_side_do_not_meet(fleet, new_fleet):
    other = new_fleet()
    assert other.router.metrics()["tandem_workers_decode"] == 1 == fleet.router.metrics()["tandem_workers_decode"]
    a, b = fleet.client(), other.client()
    calls = [c.start(tokens=golden("counting")["ids"], max_tokens=40, ignore_eos=True) for c in (a, b)]
    assert collect(calls[0]).ids == collect(calls[1]).ids
    a.close()
    b.close()


def test_a_restarted_worker_is_a_new_incarnation(new_fleet):
    fleet = new_fleet()
    client = fleet.client()
    prompt = golden("counting")
    for role in ("decode", "prefill"):
        old = getattr(fleet, role)[0]
        old.kill(signal.SIGKILL)
        fresh = fleet.add(role, old.name, "--rpc-address", old.rpc)
        getattr(fleet, role)[0] = fresh
        wait_until("the pool has the new one", lambda: fresh.name in fleet.router.log_text(), 10)
        fleet.wait_ready()

        def answers():
            try:
                return client.generate(tokens=prompt["ids"], max_tokens=20).ids
            except grpc.RpcError as e:
                assert e.code() == grpc.StatusCode.UNAVAILABLE
                return None
        expect_golden(wait_until("an answer", answers, 10, 0.2), prompt, 0.05, 20)
    client.close()
