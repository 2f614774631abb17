#!/usr/bin/env python3
"""What prompts that a decode worker prefills itself cost the streams that it is decoding: their inter-token latency without
and with a long prompt always in the batch, over the budgets of --local-prefill-tokens.

    tests/bench/local_prefill.py --streams 8 --rounds 5 --budgets default,16,64,256"""
import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cluster"))
from conftest import MODEL, Daemon  # noqa: E402
from direct import DecodeWorker  # noqa: E402


def prompt(n, salt):
    return [(i * i * 3 + i * (salt + 5) + salt * 77) % 2000 for i in range(n)]


def gaps(streams, begin, end):
    """Times between two tokens of a stream, of those that came within [begin, end]."""
    out = []
    for s in streams:
        times = [t for t in list(s.times) if begin <= t <= end]
        out += [b - a for a, b in zip(times, times[1:])]
    return out


def at(sorted_values, share):
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))] * 1e3


def measure(a, budget):
    flags = () if budget == "default" else ("--local-prefill-tokens", budget)
    with tempfile.TemporaryDirectory() as directory:
        worker = Daemon(directory, "decode", "decode", "--prefix-cache", "0", *flags, model=a.model)
        decode = DecodeWorker(worker.rpc)
        try:
            streams = [decode.start(prompt(100, i), 100000) for i in range(a.streams)]
            for s in streams:
                assert s.has_token.wait(60)
            time.sleep(1)
            alone, mixed, n_prefilled, busy_s = [], [], 0, 0.0
            for _ in range(a.rounds):       # in turns, so that whatever else the machine does hits both
                begin = time.monotonic()
                time.sleep(a.seconds)
                middle = time.monotonic()
                long = None
                while time.monotonic() < middle + a.seconds or not long.is_over.is_set():
                    if (long is None or long.is_over.wait(0.002)) and time.monotonic() < middle + a.seconds:
                        n_prefilled += 1
                        long = decode.start(prompt(a.prompt, 1000 + n_prefilled), 1)
                end = time.monotonic()
                busy_s += end - middle
                alone += gaps(streams, begin, middle)
                mixed += gaps(streams, middle, end)
            alone, mixed, rate = sorted(alone), sorted(mixed), n_prefilled * a.prompt / busy_s
            row = [len(alone), at(alone, .5), at(alone, .99), len(mixed), at(mixed, .5), at(mixed, .99),
                   at(mixed, .99) / at(alone, .99), rate]
            print(f"{budget:>8}", *(f"{v:>9.2f}" if isinstance(v, float) else f"{v:>9}" for v in row), flush=True)
        finally:
            decode.call.cancel()
            decode.close()
            worker.stop()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=str(MODEL))
    p.add_argument("--streams", type=int, default=8)
    p.add_argument("--prompt", type=int, default=1000, help="tokens of each long prompt")
    p.add_argument("--seconds", type=float, default=2, help="without, then with a long prompt, in each round")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--budgets", default="default")
    a = p.parse_args()
    names = ("gaps", "p50 ms", "p99 ms", "gaps with", "p50 ms", "p99 ms", "p99 x", "prefill/s")
    print(f"{'budget':>8}", *(f"{n:>9}" for n in names))
    for budget in a.budgets.split(","):
        measure(a, budget)


if __name__ == "__main__":
    main()
