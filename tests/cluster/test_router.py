"""The router against scripted workers: retries, refusals, silence, nonsense on the wire, slow and vanishing clients."""
import json
import signal
import time

import grpc
import pytest

from conftest import IS_SANITIZED, MODEL, Client, Daemon, collect, http_get, inference_grpc, inference_pb2, wait_until
from fake_workers import FIRST, FakeDecode, FakePrefill, fleet_grpc, fleet_pb2, token

SLOW = 4 if IS_SANITIZED else 1


class ScriptedFleet:
    model = MODEL.name

    def __init__(self, directory, *flags, n_prefill=1, n_decode=1, context=4096):
        self.router = Daemon(directory, "router", "router", "--heartbeat", "50", *flags)
        self.prefill = [FakePrefill(self, f"p{i}", context=context) for i in range(n_prefill)]
        self.decode = [FakeDecode(self, f"d{i}", context=context) for i in range(n_decode)]
        self.client = Client(self.router.rpc)
        self.wait(n_prefill, n_decode)

    def wait(self, n_prefill, n_decode):
        def look():
            m = self.router.metrics()
            return (m["tandem_workers_prefill"], m["tandem_workers_decode"]) == (n_prefill, n_decode)
        wait_until(f"{n_prefill} prefill and {n_decode} decode workers", look, 20)

    def start(self, max_tokens=8, **more):
        return self.client.start(tokens=[1, 2, 3], max_tokens=max_tokens, **more)

    def state(self):
        return self.router.statez()["state"]

    def expect_idle(self):
        """No client, no request, nothing that a worker is still charged with."""
        wait_until("no client is left", lambda: self.state()["clients"] == 0, 20)
        for w in self.state()["workers"]:
            assert (w["requests"], w["prefilling"], w["prefill_tokens"]) == (0, 0, 0), w

    def close(self):
        self.client.close()
        for worker in self.prefill + self.decode:
            worker.ended.set()
        if self.router.process.poll() is None:
            assert self.router.stop() == 0
        for worker in self.prefill + self.decode:
            worker.server.stop(0)


@pytest.fixture
def scripted(tmp_path):
    fleets = []

    def start(*flags, **settings):
        fleets.append(ScriptedFleet(tmp_path, *flags, **settings))
        return fleets[-1]

    yield start
    for f in fleets:
        f.close()


def ids_of(call):
    return collect(call).ids


def answer(n):
    return [token(i) for i in range(n)]


def error_of(call):
    with pytest.raises(grpc.RpcError) as error:
        for _ in call:
            pass
    return error.value.code(), error.value.details()


def test_peers_are_introduced_once(scripted):
    f = scripted()
    for _ in range(3):
        assert ids_of(f.start()) == answer(8)
    assert f.decode[0].log.count(("peer", "p0")) == 1
    assert [entry[2] for entry in f.prefill[0].log if entry[0] == "run"] == [False, True, False, False]


def test_tokens_that_overtake_the_first_token_come_after_it(scripted):
    f = scripted()
    f.prefill[0].first_comes_late = True
    assert ids_of(f.start(max_tokens=40)) == answer(40)
    assert ids_of(f.start(max_tokens=3)) == answer(3)   # even the end came before the first token


def test_a_first_token_that_is_the_last(scripted):
    f = scripted()
    out = collect(f.start(max_tokens=1))
    assert out.ids == [FIRST] and out.timing.handoff_bytes == 0
    wait_until("the decode worker is told", lambda: f.decode[0].has("first"))
    assert not f.decode[0].has("cancel")


def test_several_tokens_of_one_step_travel_in_one_event(scripted):
    f = scripted()
    f.decode[0].tokens_per_step = 5
    out = collect(f.start(max_tokens=26))
    assert out.ids == answer(26) and len(out.events) == 1 + 5 + 1


def test_a_failing_prefill_worker_is_replaced(scripted):
    f = scripted(n_prefill=2)
    f.prefill[0].fail = (grpc.StatusCode.INTERNAL, "INTERNAL")
    for _ in range(4):
        assert ids_of(f.start()) == answer(8)
    assert f.prefill[0].count("run") > 0
    f.prefill[1].fail = f.prefill[0].fail
    assert ids_of(f.start()) == answer(8)
    assert f.decode[0].count("local") == 1, "after both have failed, the decode worker did it alone"
    f.expect_idle()


def test_failures_that_no_retry_cures_are_passed_on_at_once(scripted):
    f = scripted(n_prefill=2)
    for worker in f.prefill:
        worker.known.add(f.decode[0].incarnation)
        worker.fail = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert error_of(f.start())[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert sum(w.count("run") for w in f.prefill) == 1


def test_prefill_worker_dies_before_the_first_token(scripted):
    f = scripted(n_prefill=2)
    for worker in f.prefill:
        worker.delay = 0.5
    calls = [f.start() for _ in range(4)]
    wait_until("both compute", lambda: all(w.count("run") >= 2 for w in f.prefill))
    f.prefill[1].stop()
    assert [ids_of(c) for c in calls] == [answer(8)] * 4


def test_decode_worker_dies_before_and_after_the_first_token(scripted):
    f = scripted(n_decode=2)
    f.prefill[0].delay = 0.4
    calls = [f.start() for _ in range(2)]
    wait_until("both have one", lambda: all(d.count("start") for d in f.decode))
    f.decode[1].stop()
    assert [ids_of(c) for c in calls] == [answer(8)] * 2
    f.prefill[0].delay = 0
    f.decode[0].step_seconds = 0.05
    call = f.start(max_tokens=1000)
    next(call)
    f.decode[0].stop()
    code, details = error_of(call)
    assert code == grpc.StatusCode.UNAVAILABLE and "d0" in details
    assert error_of(f.start())[0] == grpc.StatusCode.UNAVAILABLE
    f.expect_idle()


def migrating(scripted, **settings):
    """A fleet with two decode workers, and a call that one of them is answering: (fleet, call, its first ids, who has it, other)."""
    f = scripted(n_decode=2, **settings)
    for d in f.decode:
        d.step_seconds = 0.02
    call = f.start(max_tokens=60)
    ids = [i for _ in range(5) for i in next(call).token_ids]
    has, other = sorted(f.decode, key=lambda d: not d.requests)
    assert has.requests and not other.requests
    return f, call, ids, has, other


def rest_of(call, ids):
    out = collect(call)
    out.ids = ids + out.ids
    return out


def test_a_stream_goes_on_at_another_decode_worker(scripted):
    f, call, ids, has, other = migrating(scripted)
    has.stop()
    out = rest_of(call, ids)
    assert out.ids == answer(60) and out.usage.prompt_tokens == 3 and out.usage.completion_tokens == 60
    assert out.timing.migrations == 1 and out.timing.decode_worker == other.name
    f.expect_idle()
    assert f.router.metrics()["tandem_requests_migrated_total"] == 1


def test_a_stream_goes_on_without_prefill_workers(scripted):
    f, call, ids, has, other = migrating(scripted)
    f.prefill[0].stop()
    f.wait(0, 2)
    has.stop()
    out = rest_of(call, ids)
    assert out.ids == answer(60) and out.timing.prefill_worker == ""
    assert other.count("local") == 1
    assert ids_of(f.start()) == answer(8), "and new requests are served too"


def test_a_preempted_stream_waits_in_the_router_for_room(scripted):
    f, call, ids, has, other = migrating(scripted)
    other.refuse_with = has.refuse_with = "NO_PAGES"
    stream_id = next(iter(has.requests))
    for d in f.decode:
        d.load.n_running, d.load.free_full_pages = 1, 0     # others hold everything
    wait_until("reported", lambda: all(w["load"]["n_running"] for w in f.state()["workers"] if w["role"] == "decode"))
    has.requests.pop(stream_id)
    has.finished(stream_id, status_name="PREEMPTED", message="taken by an older one", is_lost=True)
    wait_until("it waits", lambda: f.state()["waiting"] == 1)
    starts = has.count("start") + other.count("start")
    time.sleep(0.3)
    assert has.count("start") + other.count("start") == starts, "nobody is asked before there is room"
    newcomer = f.start()
    wait_until("nobody overtakes it", lambda: f.state()["waiting"] == 2)
    other.refuse_with = has.refuse_with = None
    other.load.free_full_pages = 50
    out = rest_of(call, ids)
    assert out.ids == answer(60) and out.timing.decode_worker == other.name
    assert ids_of(newcomer) == answer(8)
    assert f.router.metrics()["tandem_requests_preempted_total"] == 1
    f.expect_idle()


def test_a_stream_leaves_a_worker_whose_grace_ends(scripted):
    f, call, ids, has, other = migrating(scripted)
    stream_id = next(iter(has.requests))
    has.requests.pop(stream_id)
    has.refuse_with = "DRAINING"
    has.finished(stream_id, status_name="DRAINING", message="the worker's grace period is over", is_lost=True)
    out = rest_of(call, ids)
    assert out.ids == answer(60) and out.timing.decode_worker == other.name


def test_what_saw_two_workers_die_is_not_tried_a_third_time(scripted):
    f = scripted(n_decode=3)
    for d in f.decode:
        d.step_seconds = 0.02
    call = f.start(max_tokens=1000)
    for _ in range(2):
        for _ in range(5):
            next(call)
        next(d for d in f.decode if d.requests).stop()
        f.decode = [d for d in f.decode if not d.ended.is_set()]
    code, details = error_of(call)
    assert code == grpc.StatusCode.UNAVAILABLE and "second worker that died" in details
    assert len(f.decode) == 1 and not f.decode[0].has("start")
    assert ids_of(f.start()) == answer(8)


def test_a_run_that_its_worker_cancels_is_not_told_as_cancelled(scripted):
    """gRPC ends the calls of a server that shuts down with CANCELLED, which the client has not done."""
    f = scripted()
    f.prefill[0].known.add(f.decode[0].incarnation)
    f.prefill[0].fail = (grpc.StatusCode.CANCELLED, "CANCELED")
    assert ids_of(f.start()) == answer(8)
    assert f.decode[0].count("local") == 1


def test_a_worker_with_a_hanging_step_loses_its_requests_to_others(scripted):
    f, call, ids, has, other = migrating(scripted)
    has.step_seconds, has.load.last_step_age_us = 1000, 400_000     # of --step-timeout 300
    out = rest_of(call, ids)
    assert out.ids == answer(60) and out.timing.decode_worker == other.name
    assert "a step hangs" in f.router.log_text()


def test_no_room_anywhere_is_said_in_the_end_and_waiting_helps(scripted):
    f = scripted()
    f.decode[0].refuse_with = "NO_PAGES"
    code, details = error_of(f.start())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "told to refuse" in details
    assert f.decode[0].count("start") == 3
    f.decode[0].load.quarantined_pages = 5      # that come back when a sender is known to be dead
    wait_until("reported", lambda: any(w["load"]["quarantined_pages"] for w in f.state()["workers"]))
    call, before = f.start(), f.decode[0].count("start")
    wait_until("refused many times", lambda: f.decode[0].count("start") > before + 5)
    f.decode[0].load.quarantined_pages, f.decode[0].refuse_with = 0, None
    assert ids_of(call) == answer(8)
    f.decode[0].refuse_with = "NO_PAGES"
    f.decode[0].load.n_running = 1      # somebody else's request, that may end
    wait_until("reported", lambda: f.state()["workers"][0]["load"]["n_running"] + f.state()["workers"][1]["load"]["n_running"])
    call = f.start()
    wait_until("refused many times", lambda: f.decode[0].count("start") > 8)
    f.decode[0].refuse_with = None
    assert ids_of(call) == answer(8)


def test_the_queue_is_bounded_and_in_the_router(scripted):
    f = scripted("--max-queue", "5")
    f.prefill[0].delay = 0.4 * SLOW
    calls = [f.start(max_tokens=2) for _ in range(12)]
    wait_until("two are out, five wait", lambda: f.state()["waiting"] == 5 and f.prefill[0].count("run") >= 2)
    results = []
    for call in calls:
        try:
            results.append(ids_of(call))
        except grpc.RpcError as error:
            results.append(error.code())
    assert results.count(answer(2)) == 7 and results.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 5


def test_a_silent_worker_leaves_the_pool_and_may_come_back(scripted):
    f = scripted("--worker-timeout", "500")
    f.prefill[0].beats = False
    f.wait(0, 1)
    wait_until("it is told", lambda: f.prefill[0].count("join refused"))
    assert http_get(f.router.http, "/readyz")[0] == 200, "the decode worker can serve alone"
    assert ids_of(f.start()) == answer(8) and f.decode[0].count("local") == 1
    f.decode[0].beats = False
    wait_until("not ready", lambda: http_get(f.router.http, "/readyz")[0] == 503)
    f.decode[0] = FakeDecode(f, "d1")
    f.prefill.append(FakePrefill(f, "p1"))
    f.wait(1, 1)
    assert ids_of(f.start()) == answer(8)


def test_a_worker_that_contradicts_the_fleet_is_refused_by_field(scripted):
    f = scripted()
    odd = FakePrefill(f, "odd", layout=dict(page_tokens=32))
    wait_until("refused", lambda: odd.count("join refused"))
    code, details = odd.log[-1][1:]
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "page_tokens" in details and "32" in details
    odd.stop()


def test_a_restart_at_the_same_address_is_another_life(scripted):
    f = scripted()
    assert ids_of(f.start()) == answer(8)
    port = f.decode[0].port
    f.decode[0].stop()
    f.decode[0] = FakeDecode(f, "d0", port=port)
    f.wait(1, 1)
    wait_until("the stream is up", lambda: f.decode[0].has("hello"))
    assert ids_of(f.start()) == answer(8)
    assert f.prefill[0].log[-1][2], "the new life was introduced"


def test_nonsense_from_a_decode_worker_harms_only_its_own_requests(scripted):
    f = scripted()
    f.decode[0].step_seconds = 0.02
    call = f.start(max_tokens=1000)
    next(call)
    f.decode[0].say(stream_ids=[999999, 5], token_ids=[1, 2], finished=[dict(stream_id=77)], reserved=[dict(stream_id=3)])
    next(call)      # news of unknown streams is ignored
    f.decode[0].say(stream_ids=[1, 2], token_ids=[1])
    assert error_of(call)[0] == grpc.StatusCode.UNAVAILABLE
    wait_until("the stream is opened again", lambda: f.decode[0].log.count(("hello",)) == 2)
    f.wait(1, 1)
    assert ids_of(f.start()) == answer(8)


def test_join_is_a_protocol(scripted):
    f = scripted()

    def join(*updates):
        def say():
            yield from updates
            time.sleep(0.5)
        with grpc.insecure_channel(f.router.rpc) as channel, pytest.raises(grpc.RpcError) as error:
            list(fleet_grpc.FleetStub(channel).Join(say(), timeout=10))
        return error.value.code(), error.value.details()

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    code, details = join(fleet_pb2.JoinUpdate(load=fleet_pb2.Load()))
    assert code == invalid and "identity must come first" in details
    code, details = join(fleet_pb2.JoinUpdate(identity=fleet_pb2.Identity(role=2, name="a\nb", rpc_address="x")))
    assert code == invalid and "name" in details
    spare = FakePrefill(f, "spare")
    f.wait(2, 1)
    again = fleet_pb2.JoinUpdate(identity=spare.identity())
    assert join(again, again)[0] == invalid
    spare.stop()


def test_a_client_that_does_not_read_loses_its_own_request_only(scripted):
    f = scripted("--max-client-backlog", "8192", context=1 << 20)
    f.decode[0].tokens_per_step = 200
    # a fixed window: by default the client's library would take megabytes before it stops reading
    with grpc.insecure_channel(f.router.rpc, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        call = inference_grpc.InferenceStub(channel).Generate(f.client.request(tokens=[1], max_tokens=1 << 19), timeout=120)
        next(call)
        wait_until("the decode worker is told to stop", lambda: f.decode[0].has("cancel"), 60 * SLOW)
        assert ids_of(f.start()) == answer(8)
        assert error_of(call)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_clients_that_leave_at_any_time_leave_nothing_behind(scripted):
    f = scripted()
    for i in range(150):
        call = f.start(max_tokens=50)
        time.sleep(0.001 * (i % 12))
        call.cancel()
    for i in range(12):     # some while a pool thread works at their text
        call = f.client.start(text="a b c " * (60000 if i % 2 else 4000), max_tokens=5)
        time.sleep(0.003 * i)
        call.cancel()
    f.expect_idle()
    wait_until("the decode worker has nothing", lambda: not f.decode[0].requests)
    assert ids_of(f.start()) == answer(8)


def test_request_ids_come_from_field_or_metadata_or_are_made(scripted):
    f = scripted()
    assert collect(f.start(request_id="mine")).request_id == "mine"
    request = f.client.request(tokens=[1], max_tokens=2)
    assert collect(f.client.stub.Generate(request, metadata=[("x-request-id", "theirs")])).request_id == "theirs"
    made = {collect(f.start(max_tokens=2)).request_id for _ in range(5)}
    assert len(made) == 5 and all(m.startswith("req-") and len(m) == 20 for m in made)
    assert error_of(f.start(request_id="two words"))[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_chat_refuses_by_field(scripted):
    f = scripted()

    def chat(**fields):
        return error_of(f.client.stub.Chat(inference_pb2.ChatRequest(**fields), timeout=20))

    user = inference_pb2.ChatMessage(role="user", content=b"Hi")
    for fields, name in [(dict(), "messages"), (dict(messages=[user], reasoning_effort="none"), "reasoning_effort"),
                         (dict(messages=[user], current_date="today"), "current_date"),
                         (dict(messages=[user, inference_pb2.ChatMessage(role="usr")]), "messages[1].role"),
                         (dict(messages=[inference_pb2.ChatMessage(role="user", content=b"\xff")]), "messages[0].content"),
                         (dict(messages=[inference_pb2.ChatMessage(role="tool", content=b"4")]), "messages[0].name")]:
        code, details = chat(**fields)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and name in details


def test_long_texts_do_not_hold_others_up(scripted):
    f = scripted()
    text = "What is 47 + 38? " * 120000
    long = f.client.stub.Tokenize.future(inference_pb2.TokenizeRequest(text=text.encode()))
    assert ids_of(f.start()) == answer(8)
    ids = list(long.result(60).token_ids)
    assert f.client.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text.decode() == text


def test_draining_lets_requests_finish_and_tells_workers(scripted):
    f = scripted()
    f.decode[0].step_seconds = 0.02
    call = f.start(max_tokens=40)
    next(call)
    f.router.kill(signal.SIGTERM)
    wait_until("not ready", lambda: http_get(f.router.http, "/readyz")[0] == 503, 5)
    assert len(ids_of(call)) == 39
    assert f.router.process.wait(10) == 0
    wait_until("the workers know", lambda: f.prefill[0].count("join refused") and f.decode[0].count("join refused"))


def test_draining_is_bounded_and_a_second_interrupt_ends_at_once(scripted):
    f = scripted("--drain-timeout", "300", context=1 << 20)
    f.decode[0].step_seconds = 0.02
    call = f.start(max_tokens=100000)
    next(call)
    f.router.kill(signal.SIGTERM)
    assert error_of(call)[0] == grpc.StatusCode.UNAVAILABLE
    assert f.router.process.wait(10) == 0
    (f.router.directory / "again").mkdir()
    g = ScriptedFleet(f.router.directory / "again", context=1 << 20)
    g.decode[0].step_seconds = 0.02
    call = g.start(max_tokens=100000)
    next(call)
    g.router.kill(signal.SIGINT)
    wait_until("draining", lambda: http_get(g.router.http, "/readyz")[0] == 503, 5)
    assert g.router.process.poll() is None
    g.router.kill(signal.SIGINT)
    assert g.router.process.wait(5) == 130
    g.close()


def test_statez_shows_requests_and_workers(scripted):
    f = scripted()
    f.decode[0].step_seconds = 0.02
    call = f.start(max_tokens=400, request_id="look-here")
    next(call)
    state = f.state()
    assert [r["id"] for r in state["requests"]] == ["look-here"]
    request = state["requests"][0]
    assert request["state"] in ("HANDOFF", "DECODING") and request["decode"] == "d0" and request["prefill"] == "p0"
    assert {(w["name"], w["role"], w["state"]) for w in state["workers"]} == {("p0", "prefill", "live"), ("d0", "decode", "live")}
    json.dumps(state)
    call.cancel()
    f.expect_idle()
