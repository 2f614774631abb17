"""Surroundings that are not as they should be: full disks, closed descriptors, few descriptors, little shared memory, signals."""
import contextlib
import datetime
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import time

import grpc
import pytest

from conftest import BIN, IS_SANITIZED, MODEL, collect, expect_golden, golden, http_get, wait_until

HAS_LOG = pathlib.Path("/dev/full").exists()


def redirected(how):
    """A wrap that starts the daemon with redirections."""
    return ("bash", "-c", f'exec "$@" {how}', "bash")


def expect_answers(fleet):
    client = fleet.client()
    prompt = golden("counting")
    expect_golden(client.generate(tokens=prompt["ids"], max_tokens=20).ids, prompt, 0.05, 20)
    client.close()


def expect_clean_end(fleet):
    for d in reversed(fleet.daemons):
        assert d.stop() == 0, d.name


# --- clocks ------------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(IS_SANITIZED, reason="a preloaded library comes before the sanitizer's")
def test_steps_of_the_wall_clock_change_nothing_but_the_log(new_fleet, tmp_path):
    day = 86400
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))

    def step(seconds):
        with open(clock, "r+b") as f:
            f.write(struct.pack("<q", seconds * 10**9))

    preload = pathlib.Path(BIN).parent / "lib" / "clock_step.so"
    fleet = new_fleet(wrap=("env", f"LD_PRELOAD={preload.resolve()}", f"CLOCK_STEP_FILE={clock}"),
                      decode_flags=("--layer-delay", "2"), prefill_flags=("--layer-delay", "2"))
    client = fleet.client()
    prompt = golden("counting")
    for steps in ([day, 40 * day], [-day, 0], [-30 * day, 3600]):
        call = client.start(tokens=prompt["ids"], max_tokens=len(prompt["greedy"]), timeout=60)
        ids, last = [], None
        for n, last in enumerate(call):             # the clock is stepped while the request runs
            ids.extend(last.token_ids)
            if n < len(steps):
                step(steps[n])
        expect_golden(ids, prompt, 0.05)
        assert last.finish_reason
        for field, value in last.timing.ListFields():
            if field.name.endswith("_us"):
                assert value < 60e6, field.name
        time.sleep(1.2)                             # two heartbeats: nobody is taken for silent
        m = fleet.router.metrics()
        assert (m["tandem_workers_prefill"], m["tandem_workers_decode"]) == (1, 1)
    with pytest.raises(grpc.RpcError) as error:     # deadlines are still met
        begin = time.monotonic()
        client.generate(tokens=prompt["ids"], max_tokens=30000, ignore_eos=True, timeout=1)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - begin < 20
    wait_until("pages are back", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0, 10)
    client.close()
    expect_clean_end(fleet)
    for d in fleet.daemons:                         # the steps did reach it: its last line is an hour ahead
        stamp = d.log_text().strip().splitlines()[-1].split()[0].rstrip("Z")
        ahead = datetime.datetime.fromisoformat(stamp).replace(tzinfo=datetime.timezone.utc).timestamp() - time.time()
        assert 3000 < ahead < 3700


# --- where the log goes ------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not HAS_LOG, reason="no /dev/full here")
def test_full_disk_for_logs_loses_lines_and_nothing_else(new_fleet):
    fleet = new_fleet(wrap=redirected("2>/dev/full"))
    expect_answers(fleet)
    for d in fleet.daemons:
        assert d.metrics()["tandem_log_lines_lost_total"] > 0
    expect_clean_end(fleet)


def test_log_pipe_without_a_reader_loses_lines_and_nothing_else(new_fleet):
    fleet = new_fleet(wrap=redirected("2> >(exec true)"))
    expect_answers(fleet)
    for d in fleet.daemons:
        assert d.metrics()["tandem_log_lines_lost_total"] > 0
    expect_clean_end(fleet)


def test_log_pipe_whose_reader_stalls_does_not_stall_the_daemon(new_fleet):
    fleet = new_fleet(wrap=redirected("2> >(exec sleep 60)"), router_flags=("--log-level", "debug"),
                      decode_flags=("--log-level", "debug"), prefill_flags=("--log-level", "debug"))
    began = time.monotonic()
    for _ in range(10):
        expect_answers(fleet)
    assert time.monotonic() - began < 60
    expect_clean_end(fleet)


def test_closed_standard_descriptors_are_not_taken_by_sockets(new_fleet):
    fleet = new_fleet(wrap=redirected("0<&- 1>&- 2>&-"))
    for d in fleet.daemons if not IS_SANITIZED else []:
        assert {os.readlink(f"/proc/{d.process.pid}/fd/{fd}") for fd in range(3)} == {"/dev/null"}
    expect_answers(fleet)
    expect_clean_end(fleet)


# --- few descriptors ---------------------------------------------------------------------------------------------------------
def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit here")
def test_few_file_descriptors_are_said_and_survived(new_fleet):
    fleet = new_fleet(wrap=("prlimit", "--nofile=64:64"))
    for d in fleet.daemons:
        assert "few_open_files" in d.log_text() and "limit=64" in d.log_text()
    expect_answers(fleet)
    for d in fleet.daemons:
        with contextlib.ExitStack() as held:
            for i in range(160):
                host, port = (d.rpc if i % 2 else d.http).rsplit(":", 1)
                with contextlib.suppress(OSError):
                    held.enter_context(socket.create_connection((host, int(port)), timeout=2))
            wait_until("clients have all that they get", lambda d=d: len(os.listdir(f"/proc/{d.process.pid}/fd")) >= 55, 10)
            assert "accept_refused" in d.log_text()
            before = cpu_seconds(d.process.pid)
            time.sleep(1)
            assert cpu_seconds(d.process.pid) - before < 0.5, f"{d.name} spins"
            assert d.process.poll() is None
    for d in fleet.daemons:
        wait_until("the pages answer again", lambda d=d: http_get(d.http, "/healthz")[0] == 200, 20)
    fleet.wait_workers(1, 1)
    wait_until("ready again", lambda: http_get(fleet.router.http, "/readyz")[0] == 200, 20)
    expect_answers(fleet)
    expect_clean_end(fleet)


# --- little shared memory ----------------------------------------------------------------------------------------------------
def small_shm(shmmax):
    """A private IPC and mount namespace with 1 MiB in /dev/shm and System V segments of at most shmmax bytes."""
    return ("unshare", "--ipc", "--mount", "sh", "-c",
            f'mount -t tmpfs -o size=1m tmpfs /dev/shm && echo {shmmax} > /proc/sys/kernel/shmmax && exec "$@"', "sh")


needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*small_shm(65536), "true"], capture_output=True).returncode != 0,
    reason="needs mount and IPC namespaces and a writable kernel.shmmax")


@needs_namespaces
@pytest.mark.parametrize("shmmax", [16 << 20, 65536], ids=["too little for pages", "too little for UCX's queues"])
def test_too_little_shared_memory_is_said_with_sizes_and_works(new_fleet, shmmax):
    fleet = new_fleet(wrap=small_shm(shmmax))
    for d in fleet.prefill + fleet.decode:
        short = next(line for line in d.log_text().splitlines() if "shared_memory_short" in line)
        assert " warn " in short and "dev_shm_free_bytes=1048576" in short, short
        pool = next(line for line in d.log_text().splitlines() if "pool_not_shared" in line)
        assert "bytes=" in pool and "emulated" in pool, pool
        if shmmax > 1 << 20:
            assert " warn " in pool and "/dev/shm has only 1048576 bytes free" in pool, pool
    expect_answers(fleet)
    expect_clean_end(fleet)


# --- signals -----------------------------------------------------------------------------------------------------------------
def test_hang_ups_and_broken_pipes_harm_nobody(new_fleet):
    fleet = new_fleet()
    client = fleet.client()
    call = client.start(tokens=golden("counting")["ids"], max_tokens=200, ignore_eos=True)
    for _ in range(3):
        for d in fleet.daemons:
            d.kill(signal.SIGHUP)
            d.kill(signal.SIGPIPE)
        time.sleep(0.05)
    assert len(collect(call).ids) == 200
    client.close()
    expect_clean_end(fleet)


@pytest.mark.parametrize("victim", ["router", "prefill", "decode"])
def test_sigint_twice_exits_at_once(new_fleet, victim):
    fleet = new_fleet(prefill_flags=("--layer-delay", "200"))
    client = fleet.client()
    call = client.start(tokens=golden("text of 1900 tokens")["ids"], max_tokens=30000, ignore_eos=True)
    if victim != "prefill":
        next(call)
    daemon = {"router": fleet.router, "prefill": fleet.prefill[0], "decode": fleet.decode[0]}[victim]
    wait_until("it has work", lambda: daemon.metrics()["tandem_rpc_calls_open"] > 0, 10)
    time.sleep(0.2)
    daemon.kill(signal.SIGINT)
    time.sleep(0.5)
    assert daemon.process.poll() is None, "the first lets the request go on"
    began = time.monotonic()
    daemon.kill(signal.SIGINT)
    daemon.process.wait(30)
    assert time.monotonic() - began < 5
    assert daemon.process.returncode not in (-signal.SIGSEGV, -signal.SIGABRT)
    client.close()


# --- trouble on request ------------------------------------------------------------------------------------------------------
def has_faults(tmp_path):
    out = subprocess.run([str(BIN / "tandem-router"), "--model", "/no/such/model"], capture_output=True, text=True, timeout=60,
                         env={**os.environ, "TANDEM_FAULT": "nonsense"})
    return "TANDEM_FAULT" in out.stderr and "not understood" in out.stderr


def test_fault_points_are_armed_from_the_environment_in_debug_builds_only(tmp_path):
    assert has_faults(tmp_path) == IS_SANITIZED
    if not IS_SANITIZED:
        return
    for role in ("router", "prefill", "decode"):
        out = subprocess.run([str(BIN / f"tandem-{role}"), "--model", str(MODEL)], capture_output=True, text=True, timeout=120,
                             env={**os.environ, "TANDEM_FAULT": "ALLOC:0:1000000"})
        assert out.returncode > 0 and "memory" in out.stderr, out.stderr
