"""KV hand-off between the real processes: bytes, overlap, and what is left after either side is killed."""
import json
import os
import signal
import threading
import time

import grpc
import pytest

from conftest import (GOLDENS, Fleet, IS_SANITIZED, MODEL, PATIENCE, collect, expect_golden, free_pages, free_port, golden,
                      metric_labels, wait_until)

CONFIG = json.loads((MODEL / "config.json").read_text())
PAGE = 64
SECOND = 1.0 if not IS_SANITIZED else 10.0    # within which pages come back


def closed_form(n_tokens, cached=0, bytes_per_element=2):
    """Whole pages; full layers: all of them; sliding layers: those that meet positions [n - 127, n - 1]; of both only what
    the decode worker does not hold already."""
    layers = CONFIG["num_hidden_layers"]
    page = 2 * PAGE * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * bytes_per_element
    end = -(-n_tokens // PAGE)
    first = max(0, n_tokens - (CONFIG["sliding_window"] - 1)) // PAGE
    return page * (layers // 2 * (end - cached // PAGE) + layers // 2 * (end - max(first, cached // PAGE)))


COLD = ("--prefix-cache", "0")


@pytest.fixture(scope="module")
def cold_fleet(tmp_path_factory):
    """Nothing is remembered: every byte is computed and moved anew."""
    f = Fleet(tmp_path_factory.mktemp("cold"), prefill_flags=COLD, decode_flags=COLD)
    yield f
    f.close()


@pytest.mark.parametrize("prompt", GOLDENS["prompts"], ids=lambda p: p["name"])
def test_bytes_moved_equal_the_closed_form(cold_fleet, prompt):
    fleet, client = cold_fleet, cold_fleet.client()
    before = fleet.prefill[0].metrics()["tandem_handoff_bytes_total"], fleet.decode[0].metrics()["tandem_handoff_bytes_total"]
    out = client.generate(tokens=prompt["ids"], max_tokens=3, ignore_eos=True)
    assert out.timing.handoff_bytes == closed_form(len(prompt["ids"]))
    after = fleet.prefill[0].metrics()["tandem_handoff_bytes_total"], fleet.decode[0].metrics()["tandem_handoff_bytes_total"]
    assert [b - a for a, b in zip(before, after)] == [closed_form(len(prompt["ids"]))] * 2
    client.close()


def test_a_long_prompt_holds_the_sliding_pages_of_its_window_and_chunk_only(new_fleet):
    """20,000 tokens: in the prefill worker chunk by chunk, in the decode worker as it arrives and grows."""
    chunk, window, n = 512, CONFIG["sliding_window"], 20000
    flags = ("--prefill-chunk-tokens", str(chunk))
    fleet = new_fleet(prefill_flags=flags, decode_flags=("--max-batch", "4"))
    client = fleet.client()
    ids = [(i * i + 7 * i) % 2000 for i in range(n)]
    out = client.generate(tokens=ids, max_tokens=70, ignore_eos=True, timeout=400)
    assert len(out.ids) == 70 and out.timing.handoff_bytes == closed_form(n)

    def span(positions):            # pages that so many positions in a row meet at most
        return 1 + -(-(positions - 1) // PAGE)
    most = [w.metrics()["tandem_sequence_sliding_pages_max"] for w in (fleet.prefill[0], fleet.decode[0])]
    assert 0 < most[0] <= span(window - 1 + chunk) and 0 < most[1] <= span(window)
    wait_until("pages are back", lambda: free_pages(fleet.decode[0]) == total_pages(fleet.decode[0]), 5)
    assert free_pages(fleet.prefill[0]) == total_pages(fleet.prefill[0])
    client.close()


def total_pages(worker):
    m = worker.metrics()
    return m["tandem_kv_pages_total_sliding"], m["tandem_kv_pages_total_full"]


def test_the_second_turn_computes_and_moves_what_is_new(new_fleet):
    """A conversation against the same fleet turn by turn and against one that remembers nothing: equal tokens."""
    warm, cold = new_fleet(), new_fleet(prefill_flags=COLD, decode_flags=COLD)
    clients = warm.client(), cold.client()
    history = list(golden("text of 500 tokens")["ids"])
    known = held = 0                # whole pages in the prefill worker, in the decode worker
    for turn in range(4):
        before = [w.metrics() for w in (warm.prefill[0], warm.decode[0])]
        outs = [c.generate(tokens=history, max_tokens=90, ignore_eos=True, temperature=1.0, sampling={"seed": 5 + turn}) for c in clients]
        after = [w.metrics() for w in (warm.prefill[0], warm.decode[0])]
        assert outs[0].ids == outs[1].ids
        n = len(history)
        assert known <= outs[0].usage.cached_tokens < known + PAGE and outs[1].usage.cached_tokens == 0
        assert outs[0].timing.handoff_bytes == closed_form(n, held) and outs[1].timing.handoff_bytes == closed_form(n)
        hits = [b["tandem_prefix_hit_tokens_total"] - a["tandem_prefix_hit_tokens_total"] for a, b in zip(before, after)]
        assert hits == [outs[0].usage.cached_tokens, held]
        assert all(b["tandem_prefix_lookups_total"] - a["tandem_prefix_lookups_total"] == 1 for a, b in zip(before, after))
        known, held = n // PAGE * PAGE, (n + 89) // PAGE * PAGE
        history += outs[0].ids + golden("counting")["ids"][:37]
    assert cold.prefill[0].metrics()["tandem_prefix_lookups_total"] == 0
    for c in clients:
        c.close()


def test_a_lost_decode_worker_costs_a_transfer_not_a_prefill(new_fleet):
    fleet = new_fleet()
    client = fleet.client()
    prompt = golden("text of 1900 tokens")
    first = client.generate(tokens=prompt["ids"], max_tokens=8)
    fleet.decode[0].kill()
    fleet.decode.append(fleet.add("decode", "decode-new"))
    fleet.wait_workers(1, 1)
    before = fleet.prefill[0].metrics()
    again = client.generate(tokens=prompt["ids"], max_tokens=8)
    after = fleet.prefill[0].metrics()
    n = len(prompt["ids"])
    assert again.ids == first.ids
    assert again.timing.handoff_bytes == closed_form(n)
    assert after["tandem_prefix_hit_tokens_total"] - before["tandem_prefix_hit_tokens_total"] >= n // PAGE * PAGE
    client.close()


def test_transport_is_a_metric_and_is_one_sided(client, fleet):
    client.generate(tokens=golden("counting")["ids"], max_tokens=3)
    lines = metric_labels(fleet.prefill[0].http, "tandem_handoff_transport")
    assert lines and any('transport="sysv mapped"' in line or 'transport="posix mapped"' in line for line in lines)
    assert '"one_sided": true' in json.dumps(fleet.prefill[0].statez())
    assert "decode_worker_known" in fleet.prefill[0].log_text() and 'mapped"' in fleet.prefill[0].log_text()


def test_puts_through_ucx_work_too(new_fleet):
    fleet = new_fleet(prefill_flags=("--no-xfer-mapped",))
    client = fleet.client()
    prompt = golden("text of 500 tokens")
    out = client.generate(tokens=prompt["ids"], max_tokens=len(prompt["greedy"]))
    expect_golden(out.ids, prompt, 0.05)
    assert out.timing.transport in ("sysv", "posix") and out.timing.handoff_bytes == closed_form(prompt["n"])
    client.close()


def test_no_kv_is_sent_when_the_first_token_ends_the_request(client, fleet):
    start = free_pages(fleet.decode[0])
    before = fleet.prefill[0].metrics()["tandem_handoff_bytes_total"]
    out = client.generate(tokens=golden("counting")["ids"], max_tokens=1)
    assert len(out.ids) == 1 and out.timing.handoff_bytes == 0
    wait_until("pages are back", lambda: free_pages(fleet.decode[0]) == start, 5)
    # layers were put while computing, before it was known that they are not needed; none is counted as handed over
    assert fleet.decode[0].metrics()["tandem_kv_pages_quarantined"] == 0
    assert fleet.prefill[0].metrics()["tandem_handoff_bytes_total"] >= before


def test_puts_overlap_with_compute(new_fleet):
    """With 5 ms a layer, at most one layer's bytes remain when the last layer is done."""
    fleet = new_fleet(prefill_flags=("--layer-delay", "5", *COLD), decode_flags=COLD)
    client = fleet.client()
    prompt = golden("text of 1900 tokens")["ids"]
    client.generate(tokens=prompt, max_tokens=2)
    before = fleet.prefill[0].metrics()
    for _ in range(5):
        client.generate(tokens=prompt, max_tokens=2)
    after = fleet.prefill[0].metrics()
    n = after["tandem_handoff_tail_bytes_count"] - before["tandem_handoff_tail_bytes_count"]
    tail = after["tandem_handoff_tail_bytes_sum"] - before["tandem_handoff_tail_bytes_sum"]
    full_layer = 2 * PAGE * CONFIG["num_key_value_heads"] * CONFIG["head_dim"] * 2 * -(-len(prompt) // PAGE)
    assert n == 5 and tail / n <= full_layer
    client.close()


# --- whatever dies in the middle ------------------------------------------------------------------------------------------
# --page-canary: a page that is written while nobody holds it is found when it is taken next.
KILLS = int(os.environ.get("HANDOFF_KILLS", "20" if not IS_SANITIZED else "4"))
WATCHED = (*COLD, "--page-canary", "1")
VICTIM = golden("text of 500 tokens")


def slow_fleet(new_fleet, **settings):
    """A fleet whose prefill takes 20 ms a layer, so that a hand-off can be met in its middle; warmed up."""
    fleet = new_fleet(prefill_flags=("--layer-delay", "20", *WATCHED), decode_flags=("--local-prefill-tokens", "512", *WATCHED),
                      **settings)
    client = fleet.client()
    client.generate(tokens=VICTIM["ids"], max_tokens=2)
    return fleet, client


def outcome(call):
    try:
        return collect(call)
    except grpc.RpcError as error:
        return error.code()


def begin_three(client, **settings):
    """Three calls with a reader each; the list fills with what becomes of them."""
    results = []
    calls = [client.start(tokens=VICTIM["ids"], max_tokens=30, ignore_eos=True, **settings) for _ in range(3)]
    threads = [threading.Thread(target=lambda c=c: results.append(outcome(c))) for c in calls]
    for t in threads:
        t.start()
    return results, threads


def expect_unharmed(*workers):
    for w in workers:
        assert w.process.poll() is None, w.log_text()[-3000:]
        m = w.metrics()
        assert m["tandem_kv_pages_written_free_total"] == 0, w.log_text()[-3000:]
        assert m.get("tandem_kv_pages_quarantined", 0) == 0


def test_prefill_killed_in_mid_put(new_fleet):
    fleet, client = slow_fleet(new_fleet)
    decode = fleet.decode[0]
    start = free_pages(decode)
    for i in range(KILLS):
        results, threads = begin_three(client)
        wait_until("a reservation is held", lambda: free_pages(decode) != start, 10)
        time.sleep(0.01 + 0.15 * i / KILLS)
        fleet.prefill[-1].kill(signal.SIGKILL)
        killed = time.monotonic()
        wait_until("no page is kept for the dead", lambda: decode.metrics()["tandem_kv_pages_quarantined"] == 0, SECOND, every=0.01)
        assert time.monotonic() - killed < 1.5 * SECOND
        for t in threads:
            t.join(60)
        for r in results:       # without a prefill worker the decode worker does it alone
            assert not isinstance(r, grpc.StatusCode) and len(r.ids) == 30 and r.ids == results[0].ids, r
        wait_until("all pages are back", lambda: free_pages(decode) == start, 5)
        fleet.prefill.append(fleet.add("prefill", f"prefill-{i + 1}"))
        fleet.wait_workers(1, 1)
        out = client.generate(tokens=VICTIM["ids"], max_tokens=len(VICTIM["greedy"]))
        expect_golden(out.ids, VICTIM, 0.05)
        wait_until("pages are back", lambda: free_pages(decode) == start, 5)
        expect_unharmed(decode)
    client.close()


def test_decode_killed_in_mid_put(new_fleet):
    fleet, client = slow_fleet(new_fleet)
    prefill = fleet.prefill[0]
    start = free_pages(prefill)
    for i in range(KILLS):
        results, threads = begin_three(client)
        wait_until("a prefill runs", lambda: free_pages(prefill) != start, 10)
        time.sleep(0.01 + 0.15 * i / KILLS)
        fleet.decode[-1].kill(signal.SIGKILL)
        for t in threads:
            t.join(60)
        assert all(r == grpc.StatusCode.UNAVAILABLE for r in results), results
        wait_until("pages are back within a second", lambda: free_pages(prefill) == start, SECOND, every=0.01)
        fleet.decode.append(fleet.add("decode", f"decode-{i + 1}"))
        fleet.wait_workers(1, 1)
        out = client.generate(tokens=VICTIM["ids"], max_tokens=len(VICTIM["greedy"]))
        expect_golden(out.ids, VICTIM, 0.05)
        wait_until("pages are back", lambda: free_pages(prefill) == start, 5)
        expect_unharmed(prefill)
    client.close()


def test_router_killed_between_reserved_and_run(new_fleet):
    """The decode worker sleeps while the router asks it for pages; then the router sleeps, and is killed when the answer lies
    in its socket: pages are reserved, and the prefill worker never hears of it."""
    address = f"127.0.0.1:{free_port()}"
    fleet, client = slow_fleet(new_fleet, router_flags=("--rpc-address", address))
    decode, prefill = fleet.decode[0], fleet.prefill[0]
    start = free_pages(decode), free_pages(prefill)
    for i in range(KILLS):
        runs = prefill.metrics()["tandem_handoffs_total"]
        decode.kill(signal.SIGSTOP)
        results, threads = begin_three(client)
        wait_until("the router has asked",
                   lambda: "RESERVING" in [r["state"] for r in fleet.router.statez()["state"]["requests"]], 10)
        time.sleep(0.05)
        fleet.router.kill(signal.SIGSTOP)
        decode.kill(signal.SIGCONT)
        wait_until("pages are reserved", lambda: free_pages(decode) != start[0], 10)
        fleet.router.kill(signal.SIGKILL)
        wait_until("pages are back within a second", lambda: free_pages(decode) == start[0], SECOND, every=0.01)
        for t in threads:
            t.join(60)
        assert all(r == grpc.StatusCode.UNAVAILABLE for r in results), results
        assert prefill.metrics()["tandem_handoffs_total"] == runs
        fleet.router = fleet.add("router", f"router-{i + 1}", *fleet.router_flags)
        fleet.wait_workers(1, 1)
        client.close()
        client = fleet.client()
        out = client.generate(tokens=VICTIM["ids"], max_tokens=len(VICTIM["greedy"]))
        expect_golden(out.ids, VICTIM, 0.05)
        wait_until("pages are back", lambda: (free_pages(decode), free_pages(prefill)) == start, 5)
        expect_unharmed(decode, prefill)
    client.close()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_pages_come_back_within_a_second_of_a_cancel_or_deadline_at_any_moment(new_fleet, how):
    """From the reservation over the puts of each layer into decoding, at both ends, whatever else is under way."""
    fleet, client = slow_fleet(new_fleet)
    workers = fleet.decode[0], fleet.prefill[0]
    start = [free_pages(w) for w in workers]
    for i in range(25):
        after = 0.012 * i
        calls = [client.start(tokens=VICTIM["ids"][:len(VICTIM["ids"]) - k], max_tokens=3000, ignore_eos=True,
                              timeout=after if how == "deadline" and after > 0 else 60) for k in range(2)]
        threads = [threading.Thread(target=lambda c=c: outcome(c)) for c in calls]
        for t in threads:
            t.start()
        time.sleep(after)
        for c in calls:
            c.cancel()
        wait_until("pages are back within a second", lambda: [free_pages(w) for w in workers] == start, SECOND, every=0.01)
        for t in threads:
            t.join(30)
    out = client.generate(tokens=VICTIM["ids"], max_tokens=len(VICTIM["greedy"]))
    expect_golden(out.ids, VICTIM, 0.05)
    expect_unharmed(*workers)
    client.close()


def test_silent_prefill_keeps_pages_pinned_until_it_answers(new_fleet):
    fleet, client = slow_fleet(new_fleet)
    decode, prefill = fleet.decode[0], fleet.prefill[0]
    start = free_pages(decode)
    for _ in range(3):
        call = client.start(tokens=VICTIM["ids"], max_tokens=30)
        wait_until("a reservation is held", lambda: free_pages(decode) != start, 10)
        time.sleep(0.08)
        prefill.kill(signal.SIGSTOP)
        call.cancel()
        pinned = wait_until("pinned pages are counted", lambda: decode.metrics()["tandem_kv_pages_quarantined"], 5)
        held = free_pages(decode)
        for _ in range(20):
            time.sleep(0.05)
            assert free_pages(decode) == held, "pages that a living sender may still write are not free"
        assert decode.metrics()["tandem_kv_pages_quarantined"] == pinned
        prefill.kill(signal.SIGCONT)
        wait_until("pages are back within a second", lambda: free_pages(decode) == start, SECOND, every=0.01)
        expect_unharmed(decode, prefill)
        out = client.generate(tokens=VICTIM["ids"], max_tokens=len(VICTIM["greedy"]))
        expect_golden(out.ids, VICTIM, 0.05)
        wait_until("pages are back", lambda: free_pages(decode) == start, 5)
    client.close()


def test_tcp_works_too(new_fleet):
    fleet = new_fleet(prefill_flags=("--ucx-tls", "tcp"), decode_flags=("--ucx-tls", "tcp"))
    client = fleet.client()
    prompt = golden("text of 500 tokens")
    out = client.generate(tokens=prompt["ids"], max_tokens=len(prompt["greedy"]))
    expect_golden(out.ids, prompt, 0.05)
    assert "tcp" in out.timing.transport and out.timing.handoff_bytes == closed_form(prompt["n"])
    client.close()


def test_different_layouts_are_refused_by_field(new_fleet, tmp_path):
    fleet = new_fleet()
    odd = fleet.add("prefill", "prefill-odd", "--kv-page-tokens", "32")
    wait_until("the refusal is in a log", lambda: "page_tokens" in fleet.router.log_text() + odd.log_text(), PATIENCE)
    assert fleet.router.metrics()["tandem_workers_prefill"] == 1
