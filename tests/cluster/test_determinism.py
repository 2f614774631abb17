"""A request's tokens depend on nothing but the request: 200 of them, each alone on a fleet that remembers nothing, and again all
at once on a fleet where everything that must not matter happens: full batches, small chunks, several prompts in a pass, prefix
hits, prompts computed by decode workers, several ranks, steps planned ahead, too few pages, workers that are killed."""
import concurrent.futures
import random
import threading
import time

from conftest import IS_SANITIZED, Fleet, golden, wait_until
from direct import DecodeWorker

N = 200 if not IS_SANITIZED else 40
COLD = ("--prefix-cache", "0")


def make_requests():
    """Conversations that share beginnings, prompts of their own, all ways of drawing."""
    rng = random.Random(4)
    shared = [golden("text of 500 tokens")["ids"], golden("text of 1900 tokens")["ids"][:450]]
    requests = []
    for i in range(N):
        tokens = list(rng.choice(shared)[:rng.choice((64, 128, 200, 333, 448))]) if rng.random() < 0.7 else []
        tokens += [rng.randrange(2000) for _ in range(rng.randrange(1, 60))]
        r = dict(tokens=tokens, max_tokens=rng.randrange(4, 24), ignore_eos=True, temperature=rng.choice((0.0, 0.8, 1.2)),
                 sampling=dict(seed=rng.randrange(1 << 40)))
        if i % 5 == 0:
            r["logprobs"] = 3
        if i % 7 == 0:
            r["sampling"].update(repetition_penalty=1.2, top_p=0.9, top_k=40)
        requests.append(r)
    return requests


def bits(out):
    return out.ids, [(p.chosen.id, p.chosen.logprob, [(t.id, t.logprob) for t in p.top]) for p in out.logprobs]


def is_plain(r):
    """What direct.py can ask for."""
    return "logprobs" not in r and len(r["sampling"]) == 1


def test_tokens_depend_on_the_request_alone(new_fleet):
    requests = make_requests()
    alone = new_fleet(prefill_flags=COLD, decode_flags=(*COLD, "--max-batch", "1"))
    client = alone.client()
    want = [bits(client.generate(**r)) for r in requests]
    client.close()
    for daemon in alone.prefill + alone.decode:
        daemon.stop()

    crowd = new_fleet(n_prefill=2, n_decode=2,
                      prefill_flags=("--kv-bytes", str(20 << 20), "--prefill-chunk-tokens", "50", "--max-prefill-batch", "4"),
                      decode_flags=("--kv-bytes", str(28 << 20), "--max-batch", "12", "--local-prefill-tokens", "48",
                                    "--quarantine", "50", "--step-depth", "2"))
    crowd.decode.append(crowd.add("decode", "decode-tp", "--tp", "2", "--ep", "2"))
    crowd.wait_workers(2, 3)
    client = crowd.client()
    local = DecodeWorker(crowd.decode[0].rpc)      # nobody kills this one
    order = list(range(N))
    random.Random(9).shuffle(order)
    n_done, lock = 0, threading.Lock()

    def run(i):
        nonlocal n_done
        out = bits(client.generate(timeout=240, **requests[i]))    # migrated if need be
        with lock:
            n_done += 1
        return i, out

    def run_local(i):
        r = requests[i]
        while True:
            s = local.run(r["tokens"], r["max_tokens"], temperature=r["temperature"], seed=r["sampling"]["seed"], timeout=240)
            if s.finished.status_name == "OK":
                return i, (s.ids, [])
            assert s.finished.status_name in ("NO_PAGES", "PREEMPTED"), s.finished
            time.sleep(0.1)

    with concurrent.futures.ThreadPoolExecutor(28) as pool:
        plain = [i for i in order if is_plain(requests[i])][:N // 5]
        calls = [pool.submit(run, i) for i in order] + [pool.submit(run_local, i) for i in plain]
        wait_until("a third is done", lambda: n_done > N // 3, 240)
        crowd.decode[1].kill()
        crowd.decode.append(crowd.add("decode", "decode-new", wait=False))
        wait_until("two thirds are done", lambda: n_done > 2 * N // 3, 240)
        crowd.prefill[1].kill()
        crowd.prefill.append(crowd.add("prefill", "prefill-new", "--tp", "2", wait=False))
        got = [c.result() for c in calls]
    for i, out in got:
        assert out == want[i], f"request {i} {requests[i]}"
    # All of that did happen.
    survivors = [w.metrics() for w in (crowd.prefill[0], crowd.decode[0], crowd.decode[2])]

    def total(name):
        return sum(m[f"tandem_{name}_total"] for m in survivors)
    assert total("prefix_hit_tokens") > 0 and total("prefix_evicted_pages") > 0 and total("handoffs_completed") > 0, survivors
    assert survivors[1]["tandem_steps_total"] < survivors[1]["tandem_generated_tokens_total"]
    local.close()
    client.close()
