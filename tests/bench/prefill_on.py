#!/usr/bin/env python3
"""What the choice of who computes prompts is worth: the same requests at the same times with every prompt on prefill workers,
every prompt on decode workers, and the router's own choice. Chats: some begin anew with a long prompt, the others go on with a
short one behind a beginning that the caches know.

    tests/bench/prefill_on.py --rate 4 --seconds 20 --layer-delay 2"""
import argparse
import pathlib
import random
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cluster"))
from conftest import MODEL, Fleet  # noqa: E402


def make_load(a):
    """[(second, tokens, max_tokens)]: turns of chats."""
    rng, out, t, chats = random.Random(a.seed), [], 0.0, []
    while t < a.seconds:
        t += rng.expovariate(a.rate)
        if not chats or rng.random() < a.new:
            chats.append([rng.randrange(2000) for _ in range(rng.randrange(a.prompt // 2, a.prompt))])
            chat = chats[-1]
        else:
            chat = rng.choice(chats[-4:])
            chat += [rng.randrange(2000) for _ in range(rng.randrange(5, 40))]
        out.append((t, list(chat), rng.randrange(20, 60)))
    return out


def at(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] * 1e3


def measure(a, on, load):
    flags = ("--layer-delay", a.layer_delay) if a.layer_delay != "0" else ()
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(directory, n_prefill=a.prefill, n_decode=a.decode, prefill_on=on, prefill_flags=flags, decode_flags=flags,
                      model=a.model)
        client = fleet.client()
        try:
            for n in (600, 50, 600, 50):        # what is measured is there from the start
                client.generate(tokens=[(i * 7 + n) % 2000 for i in range(n)], max_tokens=4, ignore_eos=True)
            time.sleep(1)
            ttft, gaps, whole, n_local = [], [], [], [0]

            def ask(tokens, n):
                begin = last = time.monotonic()
                for event in client.start(tokens=tokens, max_tokens=n, ignore_eos=True, timeout=300):
                    now = time.monotonic()
                    if event.token_ids:
                        (gaps if last > begin else ttft).append(now - last)
                        last = now
                    if event.finish_reason:
                        n_local[0] += event.timing.prefill_worker == ""
                whole.append(time.monotonic() - begin)

            threads, begin = [], time.monotonic()
            for second, tokens, n in load:
                time.sleep(max(0, begin + second - time.monotonic()))
                threads.append(threading.Thread(target=ask, args=(tokens, n)))
                threads[-1].start()
            for t in threads:
                t.join()
            mean = 1e3 / len(load)
            print(f"{on:>8} {len(load):>8} {n_local[0]:>8} {sum(ttft) * mean:>9.1f} {at(ttft, .5):>9.1f} {at(ttft, .95):>9.1f} "
                  f"{at(gaps, .5):>9.2f} {at(gaps, .99):>9.2f} {sum(whole) * mean:>9.1f} {time.monotonic() - begin:>9.1f}", flush=True)
        finally:
            client.close()
            fleet.close()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=str(MODEL))
    p.add_argument("--prefill", type=int, default=1, help="workers")
    p.add_argument("--decode", type=int, default=1, help="workers")
    p.add_argument("--rate", type=float, default=4, help="requests a second")
    p.add_argument("--new", type=float, default=0.4, help="share of requests that begin a chat")
    p.add_argument("--prompt", type=int, default=1500, help="tokens of a chat's beginning at most")
    p.add_argument("--seconds", type=float, default=20)
    p.add_argument("--layer-delay", default="0", help="ms: as if a device computed, when processors are few")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    names = ("requests", "local", "ttft ms", "p50", "p95", "itl p50", "itl p99", "whole ms", "took s")
    print(f"{'on':>8}", " ".join(f"{n:>{8 if i < 2 else 9}}" for i, n in enumerate(names)))
    load = make_load(a)
    for on in ("prefill", "decode", "auto"):
        measure(a, on, load)


if __name__ == "__main__":
    main()
