#!/usr/bin/env python3
"""Random load on a real fleet whose workers are killed, stopped, continued and drained at random; nothing may leak.

    make soak ARGS='--kills 200 --minutes 60 --seed 1'

A round: clients send greedy requests with known answers, cancel, set short deadlines, read slowly, vanish; meanwhile workers get
SIGKILL (and are started again), SIGSTOP+SIGCONT, SIGTERM. Then the load ends, the fleet is whole again, and everything must be back
where it was: free pages, gauges, open calls, file descriptors and memory of the survivors, shared-memory segments; at the very end
the descriptors are counted against the start without the slack that they have in between. What a client
got of a greedy answer must be its beginning, whatever happened to the workers. One worker is spared for a while, so that it sees many
peers die. The soak runs until both --kills and --minutes are reached. A failure prints its seed, the states and the logs' folder."""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROUND_CLIENTS = 6
KV_BYTES = 64 << 20
FD_SLACK = 16                # connections that come and go with the peers
FD_SLACK_AT_END = 2          # a poll of /metrics that is just being closed
RSS_SLACK = 64 << 20
STUCK_S = 60                 # a request without a deadline of its own must be over by then


def enter_private_ipc():
    """Goes on in an IPC and mount namespace of its own, so that every segment left over is this fleet's. False: not permitted."""
    if os.environ.get("SOAK_PRIVATE_IPC"):
        return os.environ["SOAK_PRIVATE_IPC"] == "yes"
    wrap = ["unshare", "--ipc", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm && exec \"$@\"", "soak"]
    is_allowed = subprocess.run(wrap + ["true"], capture_output=True).returncode == 0
    os.environ["SOAK_PRIVATE_IPC"] = "yes" if is_allowed else "no"
    if is_allowed:
        os.execvp(wrap[0], wrap + [sys.executable, *sys.argv])
    return False


IS_PRIVATE = enter_private_ipc() if __name__ == "__main__" else False
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import grpc  # noqa: E402

import conftest  # noqa: E402
from conftest import GOLDENS, PATIENCE, Client, Fleet, free_pages, http_get, wait_until  # noqa: E402

Code = grpc.StatusCode


# --- what the system holds ---------------------------------------------------------------------------------------------------
def fds_of(pid) -> list:
    out = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            out.append(re.sub(r"\d+", "#", os.readlink(f"/proc/{pid}/fd/{fd}")))
        except FileNotFoundError:
            pass
    return out


def rss_of(pid) -> int:
    """Private memory: segments shared with peers are counted apart."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", text).group(1)) * 1024


def segments() -> dict:
    """Shared-memory segments by name: how many processes have each."""
    out = {f"/dev/shm/{name}": 1 for name in os.listdir("/dev/shm")} if IS_PRIVATE else {}
    for line in pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        column = line.split()
        if IS_PRIVATE:
            out[f"shmid {column[1]} of pid {column[4]}"] = int(column[6])
    return out


# --- clients -----------------------------------------------------------------------------------------------------------------
class Load:
    """Client threads that run until stop(). What went wrong collects in `wrong`."""

    def __init__(self, address, seed, n_clients=ROUND_CLIENTS):
        self.address, self.wrong, self.ends = address, [], collections.Counter()
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(random.Random(seed * 1000 + i),)) for i in range(n_clients)]
        for t in self.threads:
            t.start()

    def stop(self):
        self.stopped.set()
        for t in self.threads:
            t.join(STUCK_S + 30)
            if t.is_alive():
                self.wrong.append("a client is stuck")

    def run(self, rng):
        client = Client(self.address)
        kinds = [self.whole] * 5 + [self.cancelled] * 3 + [self.late] * 2 + [self.slow, self.vanishing, self.sampled, self.invalid]
        while not self.stopped.is_set():
            kind = rng.choice(kinds)
            try:
                client = kind(client, rng) or client
                self.ends[f"{kind.__name__} ok"] += 1
            except grpc.RpcError as error:
                self.ends[f"{kind.__name__} {error.code().name}"] += 1
                allowed = {Code.UNAVAILABLE} | ({Code.DEADLINE_EXCEEDED} if kind == self.late else set())
                if error.code() not in allowed:
                    self.wrong.append(f"{kind.__name__}: {error.code().name}: {error.details()}")
                time.sleep(rng.random() * 0.1)      # nobody hammers a fleet that has no worker
            except Exception as error:              # noqa: BLE001: whatever it is, it belongs in the report
                self.wrong.append(f"{kind.__name__}: {error!r}")
        client.close()

    def start(self, client, rng, timeout=STUCK_S, n=None, **more):
        prompt = rng.choice(GOLDENS["prompts"])
        return prompt, client.start(tokens=prompt["ids"], max_tokens=n or len(prompt["greedy"]), timeout=timeout, **more)

    def check(self, prompt, ids):
        """What came is the beginning of the greedy answer, as far as its margins decide it."""
        for i, (got, want, margin) in enumerate(zip(ids, prompt["greedy"], prompt["greedy_margin"])):
            if margin <= 0.05:
                return
            if got != want:
                self.wrong.append(f"{prompt['name']}: token {i} is {got}, golden {want}")
                return

    def read(self, prompt, call, pause=0.0, n_events=None):
        ids, finish = [], 0
        try:
            for n, event in enumerate(call):
                ids.extend(event.token_ids)
                finish = event.finish_reason
                if pause:
                    time.sleep(pause)
                if n_events is not None and n >= n_events:
                    return ids
        finally:
            self.check(prompt, ids)
        if not finish:
            self.wrong.append(f"{prompt['name']}: OK without a finish reason")
        return ids

    def whole(self, client, rng):
        self.read(*self.start(client, rng))

    def cancelled(self, client, rng):
        prompt, call = self.start(client, rng, n=1000, ignore_eos=False)
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.2)
        else:
            self.read(prompt, call, n_events=rng.randrange(6))
        call.cancel()

    def late(self, client, rng):
        self.read(*self.start(client, rng, timeout=0.02 + rng.random() * 0.6))

    def slow(self, client, rng):
        self.read(*self.start(client, rng, logprobs=20), pause=0.03)

    def sampled(self, client, rng):
        _, call = self.start(client, rng, temperature=1.0, sampling={"seed": rng.randrange(1 << 40), "top_p": 0.9})
        for _ in call:
            pass

    def vanishing(self, client, rng):
        """The connection breaks under its calls."""
        self.start(client, rng)
        self.start(client, rng)
        time.sleep(rng.random() * 0.1)
        client.close()
        return Client(self.address)

    def invalid(self, client, rng):
        try:
            list(client.start(tokens=[1 << 30], max_tokens=4, timeout=STUCK_S))
            self.wrong.append("a token that does not exist was taken")
        except grpc.RpcError as error:
            if error.code() not in (Code.INVALID_ARGUMENT, Code.UNAVAILABLE):
                self.wrong.append(f"invalid: {error.code().name}")


# --- the fleet under fire ----------------------------------------------------------------------------------------------------
class Soak:
    def __init__(self, directory, seed):
        self.rng, self.seed = random.Random(seed), seed
        flags = ("--kv-bytes", str(KV_BYTES), "--layer-delay", "2", "--drain-timeout", "10000")
        self.fleet = Fleet(directory, n_prefill=2, n_decode=2, prefill_flags=flags, decode_flags=flags)
        self.n_kills = self.n_rounds = 0
        self.ends, self.faults = collections.Counter(), collections.Counter()
        self.first_seen = {}
        self.n_started = 0
        self.wrong = []

    def warm_up(self):
        """What a daemon has after some load is what it may have later."""
        warm = Load(self.fleet.router.rpc, self.seed)
        time.sleep(2)
        warm.stop()
        self.wrong += warm.wrong
        self.start_segments = len(segments())
        self.settle()
        self.start_fds = self.fds_by_role()
        print(f"at the start: {self.sizes()}", flush=True)

    def fds_by_role(self) -> dict:
        """The most that a daemon of each role has."""
        out = collections.Counter()
        for d in [self.fleet.router, *self.workers()]:
            out[d.role] = max(out[d.role], len(fds_of(d.process.pid)))
        return out

    def check_end(self):
        """Pages are checked in each round; here the descriptors too are where they were at the start."""
        def more():
            return {role: n for role, n in self.fds_by_role().items() if n > self.start_fds[role] + FD_SLACK_AT_END}
        try:
            wait_until("descriptors are back", lambda: not more(), 30, 0.5)
        except AssertionError:
            self.wrong.append(f"descriptors at the end: {more()}, at the start {dict(self.start_fds)}")

    def workers(self):
        return self.fleet.prefill + self.fleet.decode

    def spared(self):
        return self.workers()[self.n_rounds // 10 % 4]

    def restart(self, worker):
        role = getattr(self.fleet, worker.role)
        self.n_started += 1
        name = f"{worker.role}-{self.n_started + 1}"
        fresh = self.fleet.add(worker.role, name, wait=False)
        role[role.index(worker)] = fresh
        self.fleet.daemons.remove(worker)
        worker.log.close()
        return fresh

    def strike(self):
        """One fault on one worker."""
        spared = self.spared()
        victims = [w for w in self.workers() if w is not spared]
        worker = self.rng.choice(victims)
        kind = self.rng.choice(["kill"] * 5 + ["stop", "stop and kill", "term"])
        self.faults[f"{kind} {worker.role}"] += 1
        if kind == "term":
            was_up = worker.address_file.exists()      # before, there is nothing to drain, and the signal just kills
            worker.kill(signal.SIGTERM)
            status = worker.process.wait(60)
            if status != 0 and (was_up or status != -signal.SIGTERM):
                self.wrong.append(f"{worker.name} ended with {status} after SIGTERM, see {worker.log_path}")
        if kind.startswith("stop"):
            worker.kill(signal.SIGSTOP)
            time.sleep(0.05 + self.rng.random() * self.rng.choice([0.3, 2.0]))
        if kind.endswith("kill"):
            worker.kill(signal.SIGKILL)
            self.n_kills += 1
        if kind == "stop":
            worker.kill(signal.SIGCONT)
        else:
            return self.restart(worker)
        return None

    def round(self, n_strikes):
        load = Load(self.fleet.router.rpc, self.seed + self.n_rounds)
        for _ in range(n_strikes):
            time.sleep(0.1 + self.rng.random() * 0.8)
            fresh = self.strike()
            if fresh is not None and self.rng.random() < 0.7:      # else it comes while the next one dies
                fresh.wait_listening()
        for worker in self.workers():
            worker.wait_listening()
        self.fleet.wait_workers(2, 2, PATIENCE)
        time.sleep(0.3)
        load.stop()
        self.wrong += load.wrong
        self.ends += load.ends
        self.settle()
        self.n_rounds += 1

    # -- everything back where it was
    def settle(self):
        for daemon in [self.fleet.router, *self.workers()]:
            if daemon.process.poll() is not None:
                self.wrong.append(f"{daemon.name} died by itself: {daemon.process.returncode}, see {daemon.log_path}")
        if self.wrong:
            return
        try:
            wait_until("pages, gauges and calls are back", lambda: not self.unsettled(), 15, 0.1)
        except AssertionError:
            self.wrong.append(f"not settled: {self.unsettled()}")
        try:
            wait_until("descriptors, memory and segments are bounded", lambda: not self.grown(), 10, 0.2)
        except AssertionError:
            self.wrong.append(f"grown: {self.grown()}")

    def unsettled(self) -> list:
        out = []

        def expect(what, got, want):
            if got != want:
                out.append(f"{what} is {got}, not {want}")
        m = self.fleet.router.metrics()
        expect("router requests_running", m["tandem_requests_running"], 0)
        expect("router rpc_calls_open (four joins)", m["tandem_rpc_calls_open"], 4)
        expect("workers", (m["tandem_workers_prefill"], m["tandem_workers_decode"]), (2, 2))
        state = self.fleet.router.statez()["state"]
        expect("router clients", state["clients"], 0)
        expect("router waiting", state["waiting"], 0)
        expect("router requests", state["requests"], [])
        for w in self.workers():
            m = w.metrics()
            expect(f"{w.name} sequences", (m["tandem_sequences_running"], m["tandem_sequences_waiting"]), (0, 0))
            expect(f"{w.name} quarantined pages", m.get("tandem_kv_pages_quarantined", 0), 0)
            expect(f"{w.name} free pages", free_pages(w), (m["tandem_kv_pages_total_sliding"], m["tandem_kv_pages_total_full"]))
        return out

    def grown(self) -> list:
        out = []
        for d in [self.fleet.router, *self.workers()]:
            fds, rss = fds_of(d.process.pid), rss_of(d.process.pid)
            first = self.first_seen.setdefault(d.name, (fds, rss))
            if len(fds) > len(first[0]) + FD_SLACK:
                more = collections.Counter(fds) - collections.Counter(first[0])
                out.append(f"{d.name}: {len(fds)} descriptors, {len(first[0])} at first; more: {dict(more)}")
            if rss > first[1] + RSS_SLACK:
                out.append(f"{d.name}: {rss >> 20} MiB, {first[1] >> 20} at first")
        now = segments()
        orphans = [name for name, n_users in now.items() if n_users == 0]
        if orphans:
            out.append(f"segments that nobody has: {orphans}")
        if len(now) > self.start_segments + 4:
            out.append(f"{len(now)} segments, {self.start_segments} at first: {sorted(now)}")
        return out

    def sizes(self):
        return " ".join(f"{d.name}={len(fds_of(d.process.pid))}fd,{rss_of(d.process.pid) >> 20}M"
                        for d in [self.fleet.router, *self.workers()])

    def finish(self):
        """Ends the fleet; its segments must go with it."""
        self.fleet.close()
        for d in self.fleet.daemons:
            if d.process.returncode != 0:
                self.wrong.append(f"{d.name} ended with {d.process.returncode}, see {d.log_path}")
        if segments():
            self.wrong.append(f"segments left behind: {sorted(segments())}")

    def report(self):
        print(f"FAILED with seed {self.seed} in round {self.n_rounds}")
        for line in self.wrong[:20]:
            print("  " + line)
        print(f"  logs and states: {self.fleet.directory}")
        for d in [self.fleet.router, *self.workers()]:
            try:
                (self.fleet.directory / f"{d.name}.state.json").write_text(json.dumps(d.statez(), indent=1))
                (self.fleet.directory / f"{d.name}.metrics.txt").write_text(http_get(d.http, "/metrics")[1])
            except Exception as error:              # noqa: BLE001
                print(f"  {d.name} does not answer: {error!r}")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=200, help="SIGKILLs at least (200)")
    p.add_argument("--minutes", type=float, default=60, help="minutes at least (60)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--quick", action="store_true", help="some 40 seconds on an idle machine: 6 kills")
    p.add_argument("--directory", help="for logs; default: a temporary one")
    o = p.parse_args()
    if o.quick:
        o.kills, o.minutes = 6, 0.3
    directory = pathlib.Path(o.directory or tempfile.mkdtemp(prefix="tandem-soak-"))
    directory.mkdir(parents=True, exist_ok=True)
    print(f"soak: seed={o.seed} kills={o.kills} minutes={o.minutes} logs={directory} build={conftest.BUILD} "
          f"private_ipc={IS_PRIVATE}", flush=True)
    began = time.monotonic()
    soak = Soak(directory, o.seed)
    try:
        soak.fleet.wait_workers(2, 2, PATIENCE)
        soak.warm_up()
        while not soak.wrong and (soak.n_kills < o.kills or time.monotonic() - began < o.minutes * 60):
            share = (time.monotonic() - began) / max(1.0, o.minutes * 60)
            is_due = soak.n_kills <= o.kills * share or share >= 1
            soak.round(soak.rng.randrange(1, 5) if is_due else 0)
            print(f"round {soak.n_rounds} at {time.monotonic() - began:.0f} s: kills={soak.n_kills} "
                  f"requests={sum(soak.ends.values())} {soak.sizes()}", flush=True)
        if not soak.wrong:
            soak.check_end()
    finally:
        if soak.wrong:
            soak.report()
        soak.finish()
    for table in (soak.faults, soak.ends):
        print("  " + ", ".join(f"{name} {n}" for name, n in sorted(table.items())))
    if soak.wrong:
        print("soak: FAILED: " + "; ".join(soak.wrong[:3]))
        return 1
    print(f"soak: passed: {soak.n_rounds} rounds, {soak.n_kills} kills, {sum(soak.ends.values())} requests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
