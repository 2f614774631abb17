"""Workers of several ranks: whatever --tp and --ep of either side, clients get the same tokens and log-probabilities bit for
bit, and the hand-off moves the closed form's bytes."""
import subprocess
import threading

import pytest

from conftest import BIN, GOLDENS, MODEL, Daemon, free_pages, wait_until
from test_handoff import closed_form

TPS = (1, 2, 4, 8)
N_TOKENS = 6


def prompts():
    named = {p["name"]: p["ids"] for p in GOLDENS["prompts"]}
    short = sorted((ids for ids in named.values() if len(ids) < 200), key=len)
    return [short[0], short[len(short) // 2], named["counting"], named["text of 1900 tokens"]]


def ask(client, ids, **more):
    return client.generate(tokens=ids, max_tokens=N_TOKENS, ignore_eos=True, logprobs=5, timeout=300, **more)


def said(out):
    """What must not depend on ranks: tokens, and log-probabilities to the last bit."""
    return list(out.ids), [p.SerializeToString(deterministic=True) for p in out.logprobs]


@pytest.fixture(scope="module")
def one_rank(fleet):
    """Answers of workers with one rank each."""
    client = fleet.client()
    greedy = [said(ask(client, ids)) for ids in prompts()]
    drawn = [said(ask(client, ids, temperature=0.9, sampling={"seed": 5})) for ids in prompts()[:2]]
    client.close()
    return greedy, drawn


def flags(tp, ep=1):
    return ("--tp", str(tp), "--ep", str(ep))


def check(fleet, one_rank):
    client = fleet.client()
    start = free_pages(fleet.decode[0])
    for ids, want in zip(prompts(), one_rank[0]):
        out = ask(client, ids)
        assert said(out) == want, f"prompt of {len(ids)} tokens"
        assert out.timing.handoff_bytes == closed_form(len(ids))
    for ids, want in zip(prompts(), one_rank[1]):
        assert said(ask(client, ids, temperature=0.9, sampling={"seed": 5})) == want
    wait_until("pages are back", lambda: free_pages(fleet.decode[0]) == start, 10)
    client.close()


@pytest.mark.parametrize("decode_tp", TPS)
@pytest.mark.parametrize("prefill_tp", TPS)
def test_any_ranks_hand_over_to_any_ranks(new_fleet, one_rank, prefill_tp, decode_tp):
    check(new_fleet(prefill_flags=flags(prefill_tp), decode_flags=flags(decode_tp)), one_rank)


@pytest.mark.parametrize("tp", TPS[1:])
def test_whole_experts_a_rank_change_nothing(new_fleet, one_rank, tp):
    fleet = new_fleet(prefill_flags=flags(tp, tp), decode_flags=flags(tp, tp))
    check(fleet, one_rank)
    metrics = fleet.decode[0].metrics()
    assert metrics["tandem_handoff_bytes_total"] == fleet.prefill[0].metrics()["tandem_handoff_bytes_total"]


def test_workers_of_different_ranks_share_a_fleet(new_fleet, one_rank):
    fleet = new_fleet(prefill_flags=flags(1), decode_flags=flags(2))
    fleet.add("prefill", "prefill-4", *flags(4))
    fleet.add("decode", "decode-8", *flags(8, 8))
    fleet.wait_workers(2, 2)
    client = fleet.client()
    wrong = []

    def one(i):
        which = i % len(one_rank[0])
        if said(ask(client, prompts()[which])) != one_rank[0][which]:
            wrong.append(i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    for worker in fleet.daemons[1:]:
        assert worker.metrics()["tandem_handoffs_completed_total"] > 0, f"{worker.name} had no part in it"
    client.close()


@pytest.mark.parametrize("tp,ep", [(2, 1), (4, 4), (8, 1), (8, 8)])
def test_a_rank_holds_its_share(fleet, tmp_path, tp, ep):
    whole = fleet.decode[0].statez()["state"]["ranks"][0]
    worker = Daemon(tmp_path, "decode", "d", *flags(tp, ep))
    state = worker.statez()["state"]
    assert len(state["ranks"]) == tp
    for rank in state["ranks"]:
        assert rank["replicated_weight_bytes"] == whole["replicated_weight_bytes"]
        assert rank["weight_bytes"] <= whole["sharded_weight_bytes"] // tp + whole["replicated_weight_bytes"]
    assert state["weight_bytes"] == sum(r["weight_bytes"] for r in state["ranks"])
    assert worker.stop() == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("given,named", [(("--tp", "3"), "--tp"), (("--tp", "16"), "--tp"), (("--tp", "4", "--ep", "2"), "--ep"),
                                         (("--ep", "8"), "--ep"), (("--tp", "0"), "--tp")])
def test_divisions_that_do_not_work_are_named(role, given, named):
    done = subprocess.run([str(BIN / f"tandem-{role}"), "--model", str(MODEL), *given], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
