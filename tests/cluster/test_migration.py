"""Workers die, hang, run out of pages and leave under running requests: what clients get is what they would have got from a fleet
left alone, bit for bit, once each."""
import os
import random
import signal
import threading
import time

import grpc
import pytest

from conftest import IS_SANITIZED, Fleet, collect, free_pages, golden, inference_grpc, wait_until

SLOW = 4 if IS_SANITIZED else 1
STEP = ("--layer-delay", "2")      # a step takes 12 ms and more, so that there is a middle to meet
TEXT = golden("text of 500 tokens")
SHORT = golden("counting")

# What must go on across a migration: draws by index, penalties and min_tokens by what counts as generated, log-probabilities.
KINDS = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=1.0, sampling=dict(seed=7, top_p=0.95)),
    "penalties": dict(temperature=0.9, sampling=dict(seed=11, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)),
    "logprobs": dict(temperature=0.7, sampling=dict(seed=3), logprobs=5),
    "min tokens": dict(temperature=1.0, sampling=dict(seed=5), min_tokens=50, ignore_eos=False, logprobs=0),
}


class Answer:
    """A call read by a thread of its own, as it comes."""

    def __init__(self, client, timeout=120, **settings):
        self.events, self.error = [], None
        self.call = client.start(timeout=timeout, **settings)
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        try:
            for event in self.call:
                self.events.append(event)
        except grpc.RpcError as error:
            self.error = error

    def n_ids(self):
        return sum(len(e.token_ids) for e in list(self.events))

    def wait(self, n_ids):
        wait_until(f"{n_ids} tokens", lambda: self.n_ids() >= n_ids or not self.thread.is_alive(), 60 * SLOW, every=0.002)
        assert self.error is None and self.thread.is_alive(), (self.error, self.n_ids())

    def result(self):
        self.thread.join(180)
        assert not self.thread.is_alive(), "a request is stuck"
        if self.error is not None:
            raise self.error
        return collect(self.events)


def facts(out):
    """All that must not depend on where a request was computed."""
    return (out.ids, out.text, [p.SerializeToString() for p in out.logprobs], out.finish, out.usage.prompt_tokens,
            out.usage.completion_tokens)


class World:
    """A fleet of two and two that is made whole again after each blow."""

    def __init__(self, directory, **settings):
        flags = dict(prefill_flags=STEP, decode_flags=STEP)
        self.fleet = Fleet(directory, n_prefill=2, n_decode=2, **{**flags, **settings})
        self.client = self.fleet.client()
        self.n, self.seen = 0, {}

    def undisturbed(self, **settings):
        key = repr(settings)
        if key not in self.seen:
            self.seen[key] = facts(Answer(self.client, **settings).result())
        return self.seen[key]

    def worker_of(self, role, request_id):
        """The worker that has the request now."""
        for r in self.fleet.router.statez()["state"]["requests"]:
            if r["id"] == request_id and r[role]:
                return next(d for d in getattr(self.fleet, role) if d.name == r[role])
        return None

    def heal(self):
        for role in ("prefill", "decode"):
            workers = getattr(self.fleet, role)
            for i, d in enumerate(workers):
                if d.process.poll() is not None:
                    self.n += 1
                    workers[i] = self.fleet.add(role, f"{role}-{self.n + 1}", wait=False)
        for d in self.fleet.prefill + self.fleet.decode:
            d.wait_listening()
        names = {d.name for d in self.fleet.prefill + self.fleet.decode}

        def are_in():       # by name: the router may not have noticed yet who is dead
            workers = self.fleet.router.statez()["state"]["workers"]
            return {w["name"] for w in workers if w["state"] == "live" and w["is_wired"]} == names
        wait_until("all workers are in the pool", are_in, 60)
        self.fleet.wait_workers(len(self.fleet.prefill), len(self.fleet.decode), 60)

    def expect_nothing_left(self):
        def look():
            s = self.fleet.router.statez()["state"]
            return s["running"] == s["waiting"] == 0 and all(w["requests"] == 0 for w in s["workers"])
        wait_until("the router is idle", look, 20)
        for d in self.fleet.prefill + self.fleet.decode:
            def all_back(d=d):
                m = d.metrics()
                return all(m[f"tandem_kv_pages_free_{g}"] == m[f"tandem_kv_pages_total_{g}"] for g in ("sliding", "full"))
            wait_until(f"all pages of {d.name} are back", all_back, 10 * SLOW)

    def close(self):
        self.client.close()
        self.fleet.close()


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory):
    w = World(tmp_path_factory.mktemp("migration"))
    yield w
    w.close()


@pytest.fixture
def world(shared_world):
    shared_world.heal()
    yield shared_world
    shared_world.heal()
    shared_world.expect_nothing_left()


@pytest.fixture
def new_world(tmp_path):
    worlds = []

    def start(**settings):
        worlds.append(World(tmp_path, **settings))
        return worlds[-1]

    yield start
    for w in worlds:
        w.close()


@pytest.mark.parametrize("kind", KINDS)
def test_decode_killed_in_mid_stream(world, kind):
    settings = dict(tokens=TEXT["ids"], max_tokens=60, **{"ignore_eos": True, **KINDS[kind]})
    want = world.undisturbed(**settings)
    a = Answer(world.client, request_id=f"mid-{kind.replace(' ', '-')}", **settings)
    a.wait(20)
    victim = world.worker_of("decode", a.events[0].request_id)
    victim.kill(signal.SIGKILL)
    out = a.result()
    assert facts(out) == want
    assert out.timing.migrations == 1 and out.timing.decode_worker != victim.name


@pytest.mark.parametrize("at", ["begin", "computing", "sending"])
def test_prefill_killed(world, at):
    settings = dict(tokens=golden("text of 1900 tokens")["ids"], max_tokens=40, temperature=1.0, sampling=dict(seed=9), ignore_eos=True)
    want = world.undisturbed(**settings)
    a = Answer(world.client, request_id=f"prefill-{at}", **settings)
    if at == "sending":
        wait_until("the first token", lambda: a.n_ids() >= 1, 20, every=0.0005)
    else:
        wait_until("it has a prefill worker", lambda: world.worker_of("prefill", f"prefill-{at}"), 10, every=0.001)
        time.sleep({"begin": 0, "computing": 0.03}[at])
    victim = world.worker_of("prefill", f"prefill-{at}") or world.fleet.prefill[0]
    victim.kill(signal.SIGKILL)
    assert facts(a.result()) == want


def test_without_prefill_workers_the_cluster_serves_the_same(world):
    settings = dict(tokens=TEXT["ids"], max_tokens=30, ignore_eos=True, **KINDS["logprobs"])
    want = world.undisturbed(**settings)
    for p in world.fleet.prefill:
        p.kill(signal.SIGKILL)
    world.fleet.wait_workers(0, 2)
    out = Answer(world.client, **settings).result()
    assert facts(out) == want and out.timing.prefill_worker == "" and out.timing.handoff_bytes == 0


def test_what_saw_two_workers_die_ends(world):
    a = Answer(world.client, tokens=SHORT["ids"], max_tokens=2000, ignore_eos=True, request_id="twice")
    for n in (10, 20):
        a.wait(n)
        wait_until("somebody has it", lambda: world.worker_of("decode", "twice"), 10).kill(signal.SIGKILL)
        world.heal()
    with pytest.raises(grpc.RpcError) as error:
        a.result()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE and "second worker that died" in error.value.details()


def test_without_decode_workers_requests_end_at_once(world):
    a = Answer(world.client, tokens=SHORT["ids"], max_tokens=2000, ignore_eos=True)
    a.wait(5)
    for d in world.fleet.decode:
        d.kill(signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as error:
        a.result()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    world.fleet.wait_workers(2, 0)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as error:
        world.client.generate(tokens=SHORT["ids"])
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() - began < 5


def test_a_drain_whose_grace_ends_hands_its_requests_on(new_world):
    world = new_world(decode_flags=(*STEP, "--drain-timeout", "300"), prefill_flags=(*STEP, "--drain-timeout", "300"))
    settings = dict(tokens=TEXT["ids"], max_tokens=120, ignore_eos=True, **KINDS["sampled"])
    want = world.undisturbed(**settings)
    answers = [Answer(world.client, request_id=f"drain-{i}", **settings) for i in range(4)]
    for a in answers:
        a.wait(10)
    leaving = world.fleet.decode[0], world.fleet.prefill[0]
    for d in leaving:
        d.kill(signal.SIGTERM)
    late = Answer(world.client, **settings)
    outs = [a.result() for a in [*answers, late]]
    assert [facts(o) for o in outs] == [want] * 5
    assert any(o.timing.migrations for o in outs), "those that the leaving worker had went on at the other"
    assert [d.process.wait(20) for d in leaving] == [0, 0]


def test_a_run_cut_off_by_an_orderly_end_is_done_elsewhere(new_world):
    """Prompts that are computed when their worker's grace ends."""
    world = new_world(prefill_flags=("--layer-delay", "150", "--drain-timeout", "0"))
    settings = dict(tokens=TEXT["ids"], max_tokens=5, ignore_eos=True)
    want = world.undisturbed(**settings)
    answers = [Answer(world.client, **settings) for _ in range(4)]
    wait_until("both compute", lambda: all(p.metrics()["tandem_sequences_running"] for p in world.fleet.prefill), 10)
    world.fleet.prefill[0].kill(signal.SIGTERM)
    assert [facts(a.result()) for a in answers] == [want] * 4


def test_a_hung_step_loses_its_requests_to_others(new_world):
    world = new_world(router_flags=("--heartbeat", "50"))
    settings = dict(tokens=SHORT["ids"], max_tokens=20, ignore_eos=True, **KINDS["sampled"])
    want = world.undisturbed(**settings)
    world.fleet.decode[1].kill(signal.SIGKILL)
    world.fleet.decode[1] = world.fleet.add("decode", "decode-hung", "--layer-delay", "10000", "--step-timeout", "500")
    world.fleet.wait_workers(2, 2)
    answers = [Answer(world.client, **settings) for _ in range(4)]
    outs = [a.result() for a in answers]
    assert [facts(o) for o in outs] == [want] * 4
    assert any(o.timing.migrations for o in outs)
    assert world.fleet.decode[1].process.wait(20) != 0, "it says that it is broken by its exit status"


def test_requests_that_find_no_pages_wait_and_go_on(new_world):
    """Many sequences that grow, in pools that hold a few of them: each is computed in pieces, none differs, none waits for ever."""
    pages = ("--kv-bytes", str(6 << 20), "--kv-page-tokens", "16")
    world = new_world(decode_flags=pages, prefill_flags=("--kv-page-tokens", "16"))
    settings = [dict(tokens=TEXT["ids"][: 60 + 7 * i], max_tokens=400, ignore_eos=True, temperature=1.0, sampling=dict(seed=i))
                for i in range(10)]
    want = [world.undisturbed(**s) for s in settings]
    answers = [Answer(world.client, **s) for s in settings]
    outs = [a.result() for a in answers]
    assert [facts(o) for o in outs] == want
    assert world.fleet.router.metrics()["tandem_requests_preempted_total"] > 0, "make the pools smaller"
    world.expect_nothing_left()


def test_a_dead_routers_requests_are_dropped(new_world):
    world = new_world()
    answers = [Answer(world.client, tokens=TEXT["ids"], max_tokens=4000, ignore_eos=True) for _ in range(4)]
    for a in answers[:2]:
        a.wait(5)
    world.fleet.router.kill(signal.SIGKILL)
    killed = time.monotonic()
    for d in world.fleet.prefill + world.fleet.decode:
        wait_until(f"{d.name} has dropped them", lambda d=d: d.metrics()["tandem_sequences_running"] == 0, 5 * SLOW)
        total = d.metrics()["tandem_kv_pages_total_full"]
        wait_until(f"pages of {d.name} are back", lambda d=d, total=total: free_pages(d)[1] == total, 5 * SLOW)
    assert time.monotonic() - killed < 5 * SLOW
    for a in answers:
        with pytest.raises(grpc.RpcError):
            a.result()


def chaos(world, rng, seconds, n_clients):
    """Clients check each answer against the undisturbed one while workers are killed one after another. Returns
    (answers that were checked, those that migrated, errors by text)."""
    prompts = [SHORT["ids"], golden("die, before the number")["ids"], TEXT["ids"]]
    kinds = list(KINDS.values())
    orders = [dict(tokens=prompts[i % 3], max_tokens=50 + 10 * (i % 4), ignore_eos=True) | kinds[i % len(kinds)] for i in range(8)]
    want = [world.undisturbed(**o) for o in orders]
    stop, wrong, counts, errors = threading.Event(), [], [0, 0], []

    def client(i):
        mine, c = random.Random(rng.random()), world.fleet.client()
        while not stop.is_set():
            k = mine.randrange(len(orders))
            try:
                out = collect(c.start(timeout=90, **orders[k]))
                counts[0] += 1
                counts[1] += out.timing.migrations > 0
                if facts(out) != want[k]:
                    wrong.append((k, out.ids, want[k][0], out.timing))
            except grpc.RpcError as error:
                errors.append((error.code(), error.details()))
        c.close()

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n_clients)]
    for t in threads:
        t.start()
    end = time.monotonic() + seconds
    while not wrong and (time.monotonic() < end or (min(counts) < 2 and time.monotonic() < end + 60 * SLOW)):
        time.sleep(0.3 + rng.random() * 0.7)
        role = rng.choice(["prefill", "decode", "decode"])
        rng.choice(getattr(world.fleet, role)).kill(signal.SIGKILL)
        world.heal()
    stop.set()
    for t in threads:
        t.join(120)
        assert not t.is_alive(), "a client is stuck"
    assert not wrong, wrong[0]
    return counts[0], counts[1], errors


def test_random_kills_change_no_token(world):
    seed = int(os.environ.get("SEED", "1"))
    seconds = float(os.environ.get("CHAOS_SECONDS", "8"))
    n, n_migrated, errors = chaos(world, random.Random(seed), seconds, 6)
    # only what saw two workers die may fail
    assert all(code == grpc.StatusCode.UNAVAILABLE and "second worker that died" in text for code, text in errors), "\n".join(map(str, errors))
    print(f"{n} answers, {n_migrated} of them migrated, {len(errors)} requests saw two workers die")
    assert n > 8 and n_migrated > 0 and len(errors) < max(3, n / 4), (n, n_migrated, len(errors))


def test_random_kills_change_no_token_wherever_prompts_are_computed(new_world):
    """The same with everything else that may move a request: pools that hold few of them, and prompts computed on either side."""
    pages = (*STEP, "--kv-page-tokens", "16")
    world = new_world(prefill_on="auto", router_flags=("--heartbeat", "100"),
                      prefill_flags=(*pages, "--prefill-chunk-tokens", "128"), decode_flags=(*pages, "--kv-bytes", str(5 << 20)))
    seed = int(os.environ.get("SEED", "2"))
    n, n_migrated, errors = chaos(world, random.Random(seed), float(os.environ.get("CHAOS_SECONDS", "8")), 8)
    assert all(code == grpc.StatusCode.UNAVAILABLE and "second worker that died" in text for code, text in errors), "\n".join(map(str, errors))
    m = world.fleet.router.metrics()
    print(f"{n} answers, {n_migrated} of them migrated, {len(errors)} requests saw two workers die, "
          f"{m['tandem_requests_local_total']:.0f} prompts on decode workers, {m['tandem_requests_preempted_total']:.0f} preemptions")
    assert n > 8 and n_migrated > 0 and len(errors) < max(3, n / 4), (n, n_migrated, len(errors))
    world.heal()
    world.expect_nothing_left()


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_prompts_are_computed_where_it_costs_less(new_fleet, slow):
    """By what the workers measured, not by what they are called: a delay in each layer makes one of them slow."""
    delay = ("--layer-delay", {"prefill": "400", "decode": "60"}[slow])     # far beyond what a busy machine adds to the other
    fleet = new_fleet(prefill_on="auto", router_flags=("--heartbeat", "50"), **{f"{slow}_flags": delay})
    client = fleet.client()
    settings = dict(tokens=TEXT["ids"][:200], max_tokens=3, ignore_eos=True, **KINDS["sampled"])
    first = client.generate(**settings)
    assert first.timing.prefill_worker, "nothing is known yet"

    def paces():
        return {w["role"]: w["load"]["prefill_tokens_per_s"] for w in fleet.router.statez()["state"]["workers"]}

    def generate(tokens):
        wait_until("all report that they rest", lambda: not any(w["load"]["n_running"] for w in fleet.router.statez()["state"]["workers"]), 10)
        return client.generate(tokens=tokens, max_tokens=2)

    wait_until("the prefill worker's pace is known", lambda: paces()["prefill"] > 0, 10)
    fleet.prefill[0].kill(signal.SIGKILL)       # so that the decode worker has to show its own
    fleet.wait_workers(0, 1)
    assert facts(client.generate(**settings)) == facts(first)
    wait_until("the decode worker's pace is known", lambda: paces()["decode"] > 0, 10)
    fleet.prefill.append(fleet.add("prefill", "prefill-again"))
    fleet.wait_workers(1, 1)
    client.generate(**settings)
    wait_until("both are known", lambda: paces().get("prefill", 0) > 0, 10)
    before = fleet.router.metrics()["tandem_requests_local_total"]
    outs = [generate(TEXT["ids"][i:][:200]) for i in range(1, 4)]
    assert [o.timing.prefill_worker == "" for o in outs] == [slow == "prefill"] * 3, paces()
    assert fleet.router.metrics()["tandem_requests_local_total"] - before == (3 if slow == "prefill" else 0)
    client.close()


def test_a_prompt_goes_where_its_beginning_is_known(new_fleet):
    """Turns of a chat come back to the workers that have the earlier ones, also when others would be next in turn."""
    fleet = new_fleet(n_prefill=2, n_decode=2, router_flags=("--heartbeat", "50"))
    client = fleet.client()
    prompt, places, cached = list(golden("text of 1900 tokens")["ids"][:700]), [], []
    for turn in range(5):
        out = client.generate(tokens=prompt, max_tokens=8, ignore_eos=True)
        places.append((out.timing.prefill_worker, out.timing.decode_worker))
        cached.append(out.usage.cached_tokens)
        prompt += out.ids + TEXT["ids"][turn * 10: turn * 10 + 60]
        blocks = len(prompt) // 64 - 2
        wait_until("the router hears of it", lambda: sum(
            w["known_blocks"] >= blocks for w in fleet.router.statez()["state"]["workers"]) == 2, 10)
    assert len(set(places)) == 1, places
    assert cached[0] == 0 and all(c >= 640 for c in cached[1:]), cached
    client.close()


def test_a_client_that_does_not_read_holds_nobody_up(new_fleet):
    """The batch goes on; the router keeps what is unread up to a bound, then ends that request alone."""
    fleet = new_fleet(router_flags=("--max-client-backlog", "8192"))
    client = fleet.client()
    start = free_pages(fleet.decode[0])
    settings = dict(tokens=SHORT["ids"], max_tokens=1500, ignore_eos=True)
    with grpc.insecure_channel(fleet.router.rpc, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        lazy = inference_grpc.InferenceStub(channel).Generate(client.request(logprobs=20, **{**settings, "max_tokens": 3000}), timeout=120)
        next(lazy)
        readers = [Answer(client, **settings) for _ in range(2)]
        outs = [r.result() for r in readers]
        assert [len(o.ids) for o in outs] == [1500] * 2 and outs[0].ids == outs[1].ids
        with pytest.raises(grpc.RpcError) as error:
            for _ in lazy:
                pass
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_until("its pages are back", lambda: free_pages(fleet.decode[0]) == start, 10)
    client.close()
