"""common/rpc against a foreign client (grpcio): the small server tests/support/rpc_echo_server."""
import concurrent.futures
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from conftest import BIN, IS_SANITIZED, free_port, health_grpc, health_pb2, inference_pb2, wait_until

reflection_pb2 = importlib.import_module("proto.reflection_pb2")

UTF8 = "größer als 100 % – „ja“ 😀 \"x\"\\n"


class Echo:
    """The server as a process and a channel to it."""

    def __init__(self, address="127.0.0.1:0", *keepalive):
        self.process = subprocess.Popen([str(BIN / "rpc_echo_server"), address, *keepalive], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("listening "), line + self.process.stderr.read()
        self.address = f"127.0.0.1:{line.split()[1]}"
        self.log = []
        threading.Thread(target=self._drain_log, daemon=True).start()
        self.channel = grpc.insecure_channel(self.address)
        self.health = health_grpc.HealthStub(self.channel)

    def _drain_log(self):
        for line in self.process.stderr:
            self.log.append(line)

    def method(self, name, kind="unary_unary"):
        return getattr(self.channel, kind)(f"/tandem.test.Echo/{name}",
                                           request_serializer=inference_pb2.TokenizeRequest.SerializeToString,
                                           response_deserializer=inference_pb2.DetokenizeReply.FromString)

    def call(self, name, model="", text=b"", timeout=20, **more):
        return self.method(name)(request(model, text), timeout=timeout, **more).text

    def close(self):
        self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.wait(20) == 0, "".join(self.log)


def request(model="", text=b""):
    return inference_pb2.TokenizeRequest(model=model, text=text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def shared():
    e = Echo()
    yield e
    e.close()


@pytest.fixture
def echo():
    e = Echo()
    yield e
    e.close()


def status_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


# --- calls -------------------------------------------------------------------------------------------------------------------
def test_unary_echoes(shared):
    assert shared.call("Unary", text=UTF8).decode() == UTF8
    assert shared.call("Unary", text=bytes(range(256))) == bytes(range(256))
    assert shared.call("Unary") == b""


def test_stream_is_in_order(shared):
    replies = shared.method("Count", "unary_stream")(request("500"), timeout=20)
    assert [r.text for r in replies] == [str(i).encode() for i in range(500)]
    assert replies.code() == grpc.StatusCode.OK


def test_stream_of_nothing_is_ok(shared):
    assert list(shared.method("Count", "unary_stream")(request("0"), timeout=20)) == []


def test_bidi_answers_each_message_before_the_next(shared):
    answered = threading.Event()

    def requests():
        for i in range(20):
            answered.clear()
            yield request(text=f"m{i}")
            assert answered.wait(20)

    got = []
    for reply in shared.method("Bidi", "stream_stream")(requests(), timeout=40):
        got.append(reply.text)
        answered.set()
    assert got == [f"m{i}".encode() for i in range(20)]


def test_300_calls_at_once(shared):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        calls = [shared.method("Unary").future(request(text=str(i)), timeout=60) for i in range(300)]
        assert list(pool.map(lambda c: int(c.result().text), calls)) == list(range(300))


# --- ends --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, code", [
    ("INVALID", grpc.StatusCode.INVALID_ARGUMENT), ("NOT_FOUND", grpc.StatusCode.NOT_FOUND),
    ("NO_PAGES", grpc.StatusCode.RESOURCE_EXHAUSTED), ("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE),
    ("UNKNOWN_PEER", grpc.StatusCode.FAILED_PRECONDITION), ("STALE", grpc.StatusCode.ABORTED),
    ("INTERNAL", grpc.StatusCode.INTERNAL), ("CANCELED", grpc.StatusCode.CANCELLED)])
def test_status_text_and_name_arrive(shared, name, code):
    error = status_of(lambda: shared.call("Unary", model=name, text=UTF8))
    assert error.code() == code
    assert error.details() == UTF8
    assert dict(error.trailing_metadata())["tandem-status"] == name


@pytest.mark.parametrize("name, retry", [("INVALID", False), ("NO_PAGES", True), ("BUSY", True), ("UNAVAILABLE", False)])
def test_status_details_say_what_a_program_can_act_upon(shared, name, retry):
    for text in ("sampling.top_p: is 3, which is above 1", "messages[2].role: is empty", "nothing in particular: is wrong", UTF8, ""):
        error = status_of(lambda: shared.call("Unary", model=name, text=text))
        status = rpc_status.from_call(error)        # also checks that code and message are those of the call
        assert status.message == text
        found = {any_.TypeName(): any_ for any_ in status.details}
        info = error_details_pb2.ErrorInfo()
        assert found.pop("google.rpc.ErrorInfo").Unpack(info) and (info.reason, info.domain) == (name, "tandem")
        if name == "INVALID" and text[:8] in ("sampling", "messages"):
            bad = error_details_pb2.BadRequest()
            assert found.pop("google.rpc.BadRequest").Unpack(bad)
            assert [(v.field, v.description) for v in bad.field_violations] == [tuple(text.split(": ", 1))]
        if retry:
            again = error_details_pb2.RetryInfo()
            assert found.pop("google.rpc.RetryInfo").Unpack(again) and again.retry_delay.ToTimedelta().total_seconds() == 1
        assert not found


def test_long_status_texts_fit_the_trailers(shared):
    error = status_of(lambda: shared.call("Unary", model="INVALID", text="prompt: " + "\u20ac" * 1000))
    assert len(error.details().encode()) in range(1000, 1025)
    bad = error_details_pb2.BadRequest()
    assert [d.Unpack(bad) for d in rpc_status.from_call(error).details if d.Is(bad.DESCRIPTOR)] == [True]
    assert bad.field_violations[0].field == "prompt"


def test_unknown_method_is_named(shared):
    for path in ("/tandem.test.Echo/Nothing", "/no.such.Service/Unary", "/tandem.test.Echo/" + "x" * 3000):
        call = shared.channel.unary_unary(path)
        error = status_of(lambda: call(b"", timeout=20))
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED
        assert path[:100] in error.details()


def test_deadline_ends_the_call_on_both_sides(echo):
    call = echo.method("Sleep", "unary_stream")(request(), timeout=0.5)
    began = time.monotonic()
    error = status_of(lambda: list(call))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 10
    wait_until("the server saw the deadline", lambda: echo.call("Last") == b"DEADLINE")


def test_cancel_reaches_an_idle_call(echo):
    call = echo.method("Sleep", "unary_stream")(request(), timeout=60)
    assert next(call).text == b"asleep"
    call.cancel()
    wait_until("the server saw the cancel", lambda: echo.call("Last") == b"CANCELED")


def test_vanished_client_reaches_an_idle_call(echo):
    code = ("import grpc,sys,os\n"
            f"c=grpc.insecure_channel('{echo.address}').unary_stream('/tandem.test.Echo/Sleep')(b'')\n"
            "next(c)\nos._exit(0)\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    wait_until("the server saw it leave", lambda: echo.call("Last") == b"CANCELED")


def test_hung_client_is_found_by_keepalive():
    """A stopped process keeps its connection; only pings tell that nobody is there."""
    e = Echo("127.0.0.1:0", "500", "500")
    code = ("import grpc,time\n"
            f"c=grpc.insecure_channel('{e.address}').unary_stream('/tandem.test.Echo/Sleep')(b'')\n"
            "next(c)\nprint('open',flush=True)\ntime.sleep(60)\n")
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "open\n"
    time.sleep(2)
    assert e.call("Last") == b""          # a living one answers the pings
    client.send_signal(signal.SIGSTOP)
    wait_until("the server gave it up", lambda: e.call("Last") == b"CANCELED")
    client.kill()
    client.wait()
    e.close()


def test_server_killed_mid_stream_is_unavailable():
    e = Echo()
    call = e.method("Sleep", "unary_stream")(request(), timeout=60)
    next(call)
    e.process.kill()
    error = status_of(lambda: next(call))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    e.process.wait()
    e.channel.close()


# --- limits ------------------------------------------------------------------------------------------------------------------
def test_oversize_message_is_refused(shared):
    for n in (65536, 70000, 1 << 20):
        error = status_of(lambda: shared.call("Unary", text=b"x" * n))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(shared.call("Unary", text=b"x" * 65000)) == 65000


def test_undecodable_message_is_refused_by_name(shared):
    call = shared.channel.unary_unary("/tandem.test.Echo/Unary")
    for junk in (b"\x0a\x05ab", b"\xff" * 40, b"\x0f"):
        error = status_of(lambda: call(junk, timeout=20))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "tandem.v1.TokenizeRequest" in error.details()
    error = status_of(lambda: call(b"\x0a\x01\xff", timeout=20))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "model: is not valid UTF-8" in error.details()


@pytest.mark.parametrize("how", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages_are_taken(shared, how):
    for text in (b"", b"x", b"\0" * 65000, os.urandom(60000), UTF8.encode() * 500):
        assert shared.call("Unary", text=text, compression=how) == text
    replies = shared.method("Bidi", "stream_stream")((request(text=f"{i} " * 100) for i in range(20)), timeout=20, compression=how)
    assert [r.text for r in replies] == [f"{i} ".encode() * 100 for i in range(20)]
    error = status_of(lambda: shared.call("Unary", text=b"\0" * 65536, compression=how))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def peak_kb(process):
    return int(next(line for line in open(f"/proc/{process.pid}/status") if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize("how", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_decompression_bombs_cost_no_more_than_the_limit(echo, how):
    echo.call("Unary", text=b"\0" * 65000, compression=how)
    before = peak_kb(echo.process)
    bomb = b"\0" * (50 << 20)
    for _ in range(3):
        error = status_of(lambda: echo.call("Unary", text=bomb, compression=how, timeout=120))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "decompresses to more than the limit of 65536 bytes" in error.details()
    if not IS_SANITIZED:
        assert peak_kb(echo.process) - before < 4096
    assert echo.call("Unary", text=b"fine") == b"fine"


def test_message_after_the_only_one_is_refused(shared):
    call = shared.method("Sleep", "stream_stream")(iter([request(), request()]), timeout=20)
    error = status_of(lambda: list(call))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_no_message_at_all_is_refused(shared):
    error = status_of(lambda: list(shared.method("Unary", "stream_stream")(iter([]), timeout=20)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no request message" in error.details()


def test_promised_message_that_never_comes_ends_the_call():
    e = Echo("127.0.0.1:0", "10000", "5000", "300")
    never = threading.Event()

    def nothing():
        never.wait(30)
        yield from ()
    for method in ("Unary", "Bidi"):
        error = status_of(lambda m=method: list(e.method(m, "stream_stream")(nothing())))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "no request message within 300 ms"
    call = e.method("Bidi", "stream_stream")(iter_then_wait([request(text="first")], never))
    assert next(call).text == b"first"
    time.sleep(0.6)                       # a call that has begun may be idle, and so may one with a deadline
    assert call.is_active()
    late = e.method("Bidi", "stream_stream")(wait_then_iter([request(text="late")], 0.6), timeout=20)
    assert [r.text for r in late] == [b"late"]
    never.set()
    e.close()


def iter_then_wait(items, event):
    yield from items
    event.wait(30)


def wait_then_iter(items, seconds):
    time.sleep(seconds)
    yield from items


def test_slow_reader_is_aborted_though_its_window_is_full(echo):
    call = echo.method("Flood", "unary_stream")(request("abort"), timeout=60)
    wait_until("the server gave up", lambda: echo.call("Last") == b"SLOW_CLIENT")
    error = status_of(lambda: [None for _ in call])
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "read faster, bitte schön"


def test_slow_reader_costs_bounded_memory_and_the_loop_stays_free(echo):
    def resident_kb():
        return int(next(line for line in open(f"/proc/{echo.process.pid}/status") if line.startswith("VmRSS")).split()[1])
    echo.call("Unary")
    before = resident_kb()
    calls = [echo.method("Flood", "unary_stream")(request(), timeout=60) for _ in range(4)]
    for call in calls:
        next(call)
    time.sleep(1)
    assert echo.call("Unary", text=b"alive") == b"alive"
    assert resident_kb() - before < 4 * 16 * 1024
    for call in calls:
        call.cancel()
    wait_until("the server dropped them", lambda: echo.call("Last") == b"CANCELED")


# --- metadata ----------------------------------------------------------------------------------------------------------------
def test_metadata_can_be_read(shared):
    md = (("x-tandem-a", "first"), ("x-tandem-b", "zweiter"), ("x-tandem-a", "again"))
    assert shared.call("Metadata", text="x-tandem-a", metadata=md) == b"first"
    assert shared.call("Metadata", text="x-tandem-b", metadata=md) == b"zweiter"
    assert status_of(lambda: shared.call("Metadata", text="x-tandem", metadata=md)).code() == grpc.StatusCode.NOT_FOUND


def test_metadata_over_the_limit_costs_at_most_its_own_connection(shared):
    with grpc.insecure_channel(shared.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
        call = own.unary_unary("/tandem.test.Echo/Unary")
        error = status_of(lambda: call(b"", timeout=20, metadata=(("x-long", "v" * 40000),)))
        assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert shared.call("Unary", text=b"fine") == b"fine"


# --- health ------------------------------------------------------------------------------------------------------------------
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_check(shared):
    def check(service):
        return shared.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status
    assert check("") == SERVING
    assert check("tandem.test.Echo") == SERVING
    assert status_of(lambda: check("no.such.Service")).code() == grpc.StatusCode.NOT_FOUND
    shared.call("Serving", model="off")
    assert check("") == NOT_SERVING
    shared.call("Serving", model="on")
    assert check("") == SERVING


def test_health_watch(shared):
    watch = shared.health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
    assert next(watch).status == SERVING
    shared.call("Serving", model="off")
    assert next(watch).status == NOT_SERVING
    shared.call("Serving", model="on")
    assert next(watch).status == SERVING
    watch.cancel()
    unknown = shared.health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=60)
    assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()


def test_health_with_the_standard_package(shared):
    """In a process of its own: it registers the same message names as our stubs."""
    code = ("import grpc\nfrom grpc_health.v1 import health_pb2, health_pb2_grpc\n"
            f"s=health_pb2_grpc.HealthStub(grpc.insecure_channel('{shared.address}'))\n"
            "print(s.Check(health_pb2.HealthCheckRequest(service='tandem.test.Echo'),timeout=20).status)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"


# --- reflection --------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["v1", "v1alpha"])
def ask(shared, request):
    """A function that asks one question and returns the answer."""
    method = shared.channel.stream_stream(f"/grpc.reflection.{request.param}.ServerReflection/ServerReflectionInfo",
                                          request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                                          response_deserializer=reflection_pb2.ServerReflectionResponse.FromString)
    return lambda **q: list(method(iter([reflection_pb2.ServerReflectionRequest(host="h", **q)]), timeout=20))[0]


def test_reflection_lists_the_services(ask):
    answer = ask(list_services="")
    assert [s.name for s in answer.list_services_response.service] == [
        "tandem.test.Echo", "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"]
    assert answer.valid_host == "h"
    assert answer.original_request.WhichOneof("message_request") == "list_services"


def test_reflection_gives_files_with_what_they_import(ask):
    def names(answer):
        return [descriptor_pb2.FileDescriptorProto.FromString(f).name
                for f in answer.file_descriptor_response.file_descriptor_proto]
    assert names(ask(file_containing_symbol="tandem.v1.Fleet.Join")) == [
        "proto/fleet.proto", "proto/worker.proto", "proto/common.proto"]
    assert names(ask(file_by_filename="proto/common.proto")) == ["proto/common.proto"]
    assert names(ask(file_containing_symbol="grpc.health.v1.HealthCheckResponse.ServingStatus")) == ["proto/health.proto"]


def test_reflection_says_what_is_not_there(ask):
    for question in ({"file_by_filename": "no.proto"}, {"file_containing_symbol": "tandem.v1.Nothing"},
                     {"all_extension_numbers_of_type": "tandem.v1.Usage"}):
        assert ask(**question).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert ask().error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


# --- life --------------------------------------------------------------------------------------------------------------------
def test_sigterm_finishes_what_runs_and_takes_no_more():
    e = Echo()
    finish = threading.Event()

    def requests():
        yield request(text="one")
        assert finish.wait(20)
        yield request(text="two")

    call = e.method("Bidi", "stream_stream")(requests(), timeout=30)
    assert next(call).text == b"one"
    watch = e.health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
    assert next(watch).status == SERVING
    e.process.send_signal(signal.SIGTERM)
    assert next(watch).status == NOT_SERVING
    host, port = e.address.split(":")

    def refused():
        try:
            socket.create_connection((host, int(port)), 1).close()
            return False
        except OSError:
            return True
    wait_until("the port is closed", refused)
    finish.set()
    assert [r.text for r in call] == [b"two"]
    assert e.process.wait(20) == 0
    e.channel.close()


def test_sigterm_cancels_what_does_not_end():
    e = Echo()
    call = e.method("Sleep", "unary_stream")(request(), timeout=60)
    next(call)
    began = time.monotonic()
    e.process.send_signal(signal.SIGTERM)
    error = status_of(lambda: next(call))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert e.process.wait(20) == 0
    assert time.monotonic() - began > 1.9
    e.channel.close()


def test_port_in_use_is_said():
    port = free_port()
    e = Echo(f"127.0.0.1:{port}")
    second = subprocess.run([str(BIN / "rpc_echo_server"), e.address], capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert f"cannot listen on {e.address}: Address already in use" in second.stderr
    e.close()


def test_garbage_does_not_disturb(shared):
    host, port = shared.address.split(":")
    for junk in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(2048)):
        with socket.create_connection((host, int(port)), 5) as s:
            s.sendall(junk)
    assert shared.call("Unary", text=b"fine") == b"fine"
    assert shared.process.poll() is None
