#!/usr/bin/env python3
"""How many server-sent streams one core of the router carries: a real router pinned to a core, scripted workers that give each of
N streams a token per step, N connections that read. Prints the router's share of its core and its CPU time per token.

    tests/bench/sse_streams.py --streams 500 --step-ms 50 --seconds 10"""
import argparse
import json
import os
import pathlib
import selectors
import socket
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cluster"))
from conftest import Daemon, metrics_of, wait_until  # noqa: E402
from fake_workers import FakeDecode, FakePrefill  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")


class FakeFleet:
    model = "tiny-model"

    def __init__(self, directory, core, step_seconds, extra):
        self.router = Daemon(directory, "router", "router", "--max-queue", "100000", *extra, wrap=("taskset", "-c", str(core)))
        self.prefill, self.decode = [FakePrefill(self, "prefill")], [FakeDecode(self, "decode")]
        self.decode[0].step_seconds = step_seconds
        wait_until("both have joined", lambda: metrics_of(self.router.http)["tandem_workers_decode"] == 1 and
                   metrics_of(self.router.http)["tandem_workers_prefill"] == 1)

    def stop(self):
        for worker in self.prefill + self.decode:
            worker.stop()
        self.router.stop()


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def open_stream(address, body):
    host, port = address.rsplit(":", 1)
    s = socket.create_connection((host, int(port)))
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
              % (len(body), body))
    s.setblocking(False)
    return s


def read_all(selector, counts, seconds):
    """Reads whatever comes for some time: the number of events, and of streams that ended."""
    end, n_ended = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for key, _ in selector.select(0.05):
            piece = key.fileobj.recv(1 << 18)
            counts[key.fd] += piece.count(b"data: {")
            if not piece or b"[DONE]" in piece:
                selector.unregister(key.fileobj)
                n_ended += 1
        time.sleep(0.01)     # many events a call: it is the router that is measured
    return n_ended


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--core", type=int, default=0)
    a = parser.parse_args()
    body = json.dumps({"prompt": [1, 2, 3], "stream": True, "max_tokens": 4000, "ignore_eos": True}).encode()
    with tempfile.TemporaryDirectory() as directory:
        fleet = FakeFleet(directory, a.core, a.step_ms / 1000, ("--request-timeout", "600000"))
        try:
            selector, counts, sockets = selectors.DefaultSelector(), {}, []
            for _ in range(a.streams):
                s = open_stream(fleet.router.http, body)
                sockets.append(s)
                counts[s.fileno()] = 0
                selector.register(s, selectors.EVENT_READ)
            begin = time.monotonic()
            while min(counts.values()) < 2 and time.monotonic() < begin + 120:
                read_all(selector, counts, 0.2)
            n_before, cpu = dict(counts), cpu_seconds(fleet.router.process.pid)
            begin = time.monotonic()
            n_ended = read_all(selector, counts, a.seconds)
            seconds = time.monotonic() - begin
            cpu = cpu_seconds(fleet.router.process.pid) - cpu
            got = [counts[fd] - n_before[fd] for fd in counts]
            print(f"{a.streams} streams, a step every {a.step_ms:g} ms, {seconds:.1f} s: {sum(got) / seconds:.0f} tokens/s "
                  f"({min(got)} to {max(got)} a stream), router {100 * cpu / seconds:.0f}% of a core, "
                  f"{1e6 * cpu / max(1, sum(got)):.1f} us a token, {n_ended} ended early, "
                  f"{metrics_of(fleet.router.http)['tandem_http_clients_dropped_total']:.0f} dropped")
            for s in sockets:
                s.close()
        finally:
            fleet.stop()


if __name__ == "__main__":
    main()
