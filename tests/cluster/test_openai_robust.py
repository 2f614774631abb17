"""The JSON API against clients that misbehave, hang up, read slowly or come in crowds; and what it says when it cannot serve."""
import http.client
import json
import os
import random
import shutil
import signal
import socket
import threading

import pytest

from conftest import Daemon, http_get, metrics_of, wait_until
from fake_workers import FakeDecode, FakePrefill

CHAT = "/v1/chat/completions"
SUM = [{"role": "user", "content": "What is 47 + 38?"}]


def body_of(**settings):
    return {"model": "tiny-model", "messages": SUM, "max_tokens": 8, "temperature": 0, **settings}


def connect(address, timeout=60):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout)


def request_bytes(path, body, *headers, method="POST"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: t", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class OneFile:
    """A socket that has one reader for all answers, so that none takes bytes of the next one with it."""

    def __init__(self, sock):
        self.file = sock.makefile("rb")

    def makefile(self, _):
        return self

    def __getattr__(self, name):
        return getattr(self.file, name)

    def close(self):
        pass


def answer(sock, method="POST"):
    """(status, headers, body) of the next answer on a socket, or on a OneFile."""
    reply = http.client.HTTPResponse(sock if isinstance(sock, OneFile) else OneFile(sock), method=method)
    reply.begin()
    return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()


def ask(address, path, body, *headers, method="POST"):
    with connect(address) as s:
        s.sendall(request_bytes(path, body, *headers, method=method))
        return answer(s, method)


def error_of(raw):
    error = json.loads(raw)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


# ---- bodies --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("body,words", [
    (b"", "not JSON"), (b"{", "not JSON"), (b"[]", "JSON object"), (b"3", "not JSON"), (b"null", "not JSON"),
    (b'"text"', "not JSON"), (b"{}", "messages"), (b'{"messages": SUM}', "not JSON"),
    (b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', "not UTF-8 at byte 39"),
    (b'{"messages":[{"role":"user","content":"\xc3"}]}', "not UTF-8 at byte 39"),
    (b'{"messages":[{"role":"user","content":"\\ud800 alone"}]}', "not JSON"),
    (b'{"messages":[{"role":"user","content":"\\udc00\\ud800"}]}', "not JSON"),
    (b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested deeper"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested deeper"),
    (b'{"messages":[' + b"0," * 1200000 + b"0]}", "more than 1000000 values"),
    (b'{"temperature":1e999,"messages":[{"role":"user","content":"x"}]}', "not JSON"),
    (b'{"seed":99999999999999999999,"messages":[{"role":"user","content":"x"}]}', "not JSON"),
    (b'{"a\\u0000b": 1, "messages": 2}', "not JSON"),
    (b'{"model":"tiny\\u0000model","messages":[{"role":"user","content":"x"}]}', "model"),
    (b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1}{"more":1}', "not JSON"),
    (b"\x00" * 100, "not JSON"), (b"\xef\xbb\xbf{}", "not JSON"),
], ids=lambda p: repr(p[:24]) if isinstance(p, bytes) else p)
def test_bad_bodies_get_a_400_that_says_why(fleet, body, words):
    status, headers, raw = ask(fleet.router.http, CHAT, body)
    error = error_of(raw)
    assert status == 400 and words in error["message"] and error["type"] == "invalid_request_error"
    assert headers["content-type"] == "application/json"


def test_zero_bytes_in_a_text_are_text(fleet):
    body = body_of(messages=[{"role": "user", "content": "What\0is 47 + 38?"}])
    status, _, raw = ask(fleet.router.http, CHAT, body)
    assert status == 200 and json.loads(raw)["usage"]["completion_tokens"] > 0


def test_of_duplicate_keys_the_last_counts(fleet):
    raw = json.dumps(body_of()).replace('"max_tokens": 8', '"max_tokens": 2, "max_tokens": 3')
    status, _, reply = ask(fleet.router.http, CHAT, raw.encode())
    assert status == 200 and json.loads(reply)["usage"]["completion_tokens"] == 3


def test_pairs_of_surrogates_are_one_character(fleet):
    status, _, raw = ask(fleet.router.http, "/tokenize", b'{"prompt":"\\ud83d\\ude00"}')
    assert status == 200
    _, _, text = ask(fleet.router.http, "/detokenize", {"tokens": json.loads(raw)["tokens"]})
    assert json.loads(text) == {"prompt": "\U0001F600"}


def test_a_body_over_the_bound_is_refused_before_it_is_read(fleet):
    with connect(fleet.router.http) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100000000\r\n\r\n")
        status, _, raw = answer(s)
    assert status == 413 and error_of(raw)["message"]


@pytest.mark.parametrize("content_type,status", [
    ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200),
    ("application/vnd.x+json", 200), ("text/plain", 415), ("application/x-www-form-urlencoded", 415),
    ("multipart/form-data; boundary=x", 415), ("application/jsonx", 415), ("json", 415)])
def test_only_json_is_taken(fleet, content_type, status):
    data = json.dumps(body_of(max_tokens=1)).encode()
    with connect(fleet.router.http) as s:
        s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                  + data)
        got, _, raw = answer(s)
    assert got == status
    if status == 415:
        assert content_type in error_of(raw)["message"]


def mutate(rng, raw):
    """One of the ways in which bodies go wrong."""
    pieces = [b"null", b"true", b"-1", b"1e308", b"0.5", b'""', b"[]", b"{}", b"[[]]", b'{"a":1}', b'"\\ud800"', b"\xff", b"\\u0000",
              b"9" * 30, b'"x"', b",", b"{", b"}", b"[", b"]", b'"', b":", b"\\", b"\x00"]
    out = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind, at = rng.randrange(6), rng.randrange(len(out) or 1)
        if kind == 0:
            out[at:at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del out[at:at + rng.randrange(1, 12)]
        elif kind == 2:
            out[at:at] = rng.choice(pieces)
        elif kind == 3:
            end = at + rng.randrange(1, 20)
            out[at:at] = out[at:end]
        elif kind == 4:     # a value by another
            colon = out.find(b":", at)
            end = min((e for e in (out.find(c, colon) for c in b",}]") if e > 0), default=len(out))
            if colon >= 0:
                out[colon + 1:end] = rng.choice(pieces)
        else:
            out = out[:at]
    return bytes(out)


SEEDS = [
    (CHAT, {"model": "nobody", "messages": [
        {"role": "system", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Héllo"}]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "strict": False, "parameters": {
            "type": "object", "properties": {"a": {"type": ["integer", "null"], "enum": [1], "default": 1},
                                             "b": {"oneOf": [{"type": "string"}, {"type": "array", "items": {}}]}}}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False, "max_tokens": 1, "n": 2,
        "stop": ["x", "yy"], "seed": -5, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1, "frequency_penalty": -1,
        "logit_bias": {"5": -1.5}, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low", "stream": True,
        "stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "metadata": {"a": "b"}, "user": "u"}),
    ("/v1/completions", {"model": "nobody", "prompt": ["a", "b"], "max_tokens": 1, "echo": True, "stop": "q", "n": 2,
                         "stop_token_ids": [1], "min_tokens": 0, "ignore_eos": False, "top_k": 4, "min_p": 0.1}),
    ("/v1/completions", {"model": "nobody", "prompt": [[1, 2, 3], [4]], "max_tokens": 1, "logprobs": 2}),
    ("/v1/responses", {"model": "nobody", "instructions": "Be.", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Héllo"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"}],
        "tools": [{"type": "function", "name": "f", "strict": False, "parameters": {"type": "object"}}], "tool_choice": "required",
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "include": ["message.output_text.logprobs"],
        "top_logprobs": 1, "store": False, "truncation": "disabled", "metadata": {"a": "b"}, "max_output_tokens": 1, "stream": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}], "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#"}}}}}]}),
    ("/tokenize", {"prompt": "Hi", "parse_special": True}),
    ("/detokenize", {"tokens": [1, 2, 3], "keep_special": True}),
    (CHAT, {"model": "tiny-model", "messages": SUM, "max_tokens": 1}),
]
WEIGHTS = [40, 15, 10, 20, 2, 10, 5, 5, 3]
DELIBERATE = {200, 400, 404, 413}


def test_ten_thousand_mutated_bodies_bring_no_error_of_ours(new_fleet):
    """Most name a model that is not served: they are read to the end, and cost no worker anything."""
    fleet = new_fleet(router_flags=("--max-output-tokens", "2"))
    rng, seen = random.Random(11), {}
    host, port = fleet.router.http.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for i in range(10000):
        path, seed = rng.choices(SEEDS, WEIGHTS)[0]
        raw = mutate(rng, json.dumps(seed, ensure_ascii=False).encode())
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read()
        assert reply.status in DELIBERATE, f"{i}: {reply.status} {text[:300]!r} for {path} {raw!r}"
        if reply.status != 200:
            error_of(text)
        seen[reply.status] = seen.get(reply.status, 0) + 1
    connection.close()
    assert all(seen.get(status, 0) > 50 for status in (200, 400, 404)), seen
    assert fleet.router.process.poll() is None
    wait_until("all requests are over", lambda: fleet.router.statez()["state"]["running"] == 0)


# ---- HTTP ----------------------------------------------------------------------------------------------------------------

def test_pipelined_requests_are_answered_in_order(fleet):
    with connect(fleet.router.http) as s:
        s.sendall(b"".join(request_bytes(CHAT, body_of(max_tokens=n)) for n in (3, 1, 2)) +
                  request_bytes("/tokenize", {"prompt": "a"}))
        file = OneFile(s)
        got = [json.loads(answer(file)[2]) for _ in range(4)]
    assert [g["usage"]["completion_tokens"] for g in got[:3]] == [3, 1, 2] and got[3]["count"] == 1


def test_a_pipelined_request_waits_for_the_stream_before_it(fleet):
    with connect(fleet.router.http) as s:
        s.sendall(request_bytes(CHAT, body_of(stream=True)) + request_bytes("/tokenize", {"prompt": "a"}))
        file = OneFile(s)
        status, headers, raw = answer(file)
        assert status == 200 and headers["content-type"].startswith("text/event-stream") and raw.endswith(b"data: [DONE]\n\n")
        assert json.loads(answer(file)[2])["count"] == 1


def test_expect_100_continue_is_answered_before_the_body(fleet):
    data = json.dumps(body_of()).encode()
    with connect(fleet.router.http) as s:
        s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
                  f"Content-Length: {len(data)}\r\n\r\n".encode())
        assert s.recv(100).startswith(b"HTTP/1.1 100 ")
        s.sendall(data)
        assert answer(s)[0] == 200


def test_chunked_bodies_are_put_together(fleet):
    data = json.dumps(body_of()).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(data[i:i + 7]), data[i:i + 7]) for i in range(0, len(data), 7)) + b"0\r\n\r\n"
    with connect(fleet.router.http) as s:
        s.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for i in range(0, len(chunks), 11):
            s.sendall(chunks[i:i + 11])
        status, _, raw = answer(s)
    assert status == 200 and json.loads(raw)["usage"]["completion_tokens"] == 8


def test_head_and_options_and_wrong_methods(fleet):
    a = fleet.router.http
    status, headers, raw = ask(a, "/v1/models", b"", method="HEAD")
    assert status == 200 and raw == b"" and int(headers["content-length"]) > 50
    status, headers, _ = ask(a, CHAT, b"", method="GET")
    assert status == 405 and headers["allow"] == "POST"
    status, headers, _ = ask(a, CHAT, b"", "Origin: https://x.example", method="OPTIONS")
    assert status == 204 and headers["allow"] == "POST" and "access-control-allow-origin" not in headers
    assert ask(a, "/v1/nothing", b"")[0] == 404


@pytest.mark.parametrize("origin", ["*", "https://chat.example.org"])
def test_pages_of_the_origin_that_is_set_may_use_the_api_and_nothing_else(tmp_path, origin):
    router = Daemon(tmp_path, "router", "router", "--cors-origin", origin)
    try:
        status, headers, _ = ask(router.http, CHAT, b"", f"Origin: {origin}", "Access-Control-Request-Method: POST",
                                 "Access-Control-Request-Headers: authorization, content-type", method="OPTIONS")
        assert status == 204 and headers["access-control-allow-origin"] == origin
        assert headers["access-control-allow-methods"] == "POST" and int(headers["access-control-max-age"]) > 0
        assert headers["access-control-allow-headers"] == "authorization, content-type"
        assert ("vary" in headers) == (origin != "*")
        for path, body, method in ((CHAT, body_of(), "POST"), ("/v1/models", b"", "GET"), (CHAT, b"{", "POST")):
            assert ask(router.http, path, body, method=method)[1]["access-control-allow-origin"] == origin
        assert "access-control-allow-origin" not in ask(router.http, "/statez", b"", method="GET")[1]
    finally:
        router.stop()


def test_a_request_keeps_the_name_its_client_gave_it(fleet):
    assert ask(fleet.router.http, CHAT, body_of(), "X-Request-Id: mine-1")[1]["x-request-id"] == "mine-1"
    made = ask(fleet.router.http, CHAT, body_of(), "X-Request-Id: " + "x" * 300)[1]["x-request-id"]
    assert made.startswith("req-")


# ---- what cannot be served -----------------------------------------------------------------------------------------------

def test_without_workers_it_is_a_503_with_a_time_to_come_back(tmp_path):
    router = Daemon(tmp_path, "router", "router")
    try:
        for stream in (False, True):
            status, headers, raw = ask(router.http, CHAT, body_of(stream=stream))
            error = error_of(raw)
            assert status == 503 and int(headers["retry-after"]) >= 1 and "worker" in error["message"]
            assert error["type"] == "service_unavailable_error"
        assert ask(router.http, "/tokenize", {"prompt": "a"})[0] == 200
        assert http_get(router.http, "/readyz")[0] == 503 and http_get(router.http, "/healthz")[0] == 200
    finally:
        router.stop()


def test_more_than_may_wait_get_a_429_with_a_time_to_come_back(new_fleet):
    fleet = new_fleet(router_flags=("--max-queue", "2"), prefill_flags=("--layer-delay", "100"))
    results = [None] * 12

    def one(i):
        results[i] = ask(fleet.router.http, CHAT, body_of(max_tokens=1))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(results))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    statuses = [r[0] for r in results]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 3
    _, headers, raw = results[statuses.index(429)]
    assert int(headers["retry-after"]) >= 1 and error_of(raw)["type"] == "rate_limit_error"
    assert error_of(raw)["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_of_many_choices_cannot_wait_none_is_made(new_fleet, stream):
    fleet = new_fleet(router_flags=("--max-queue", "3"), prefill_flags=("--layer-delay", "50"))
    status, headers, raw = ask(fleet.router.http, CHAT, body_of(n=16, stream=stream, max_tokens=500, ignore_eos=True))
    assert status == 429 and "retry-after" in headers and error_of(raw)["type"] == "rate_limit_error"
    wait_until("all is over", lambda: fleet.router.statez()["state"]["clients"] == 0)
    wait_until("nobody works any more", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0)
    assert ask(fleet.router.http, CHAT, body_of())[0] == 200


def test_a_deadline_ends_a_stream_with_an_error_event(new_fleet):
    fleet = new_fleet(router_flags=("--request-timeout", "1500"), decode_flags=("--layer-delay", "30"))
    status, _, raw = ask(fleet.router.http, CHAT, body_of(stream=True, max_tokens=500, ignore_eos=True))
    events = [e[6:] for e in raw.decode().split("\n\n") if e]
    assert status == 200 and events[-1] == "[DONE]" and "deadline" in json.loads(events[-2])["error"]["message"]
    status, _, raw = ask(fleet.router.http, CHAT, body_of(max_tokens=500, ignore_eos=True))
    assert status == 504 and error_of(raw)["type"] == "server_error"


def test_a_draining_router_finishes_its_streams_and_takes_no_more(new_fleet):
    fleet = new_fleet(decode_flags=("--layer-delay", "10"))
    with connect(fleet.router.http) as s:
        s.sendall(request_bytes(CHAT, body_of(stream=True, max_tokens=40, ignore_eos=True)))
        first = s.recv(100)
        fleet.router.process.send_signal(signal.SIGTERM)
        wait_until("it is not ready", lambda: http_get(fleet.router.http, "/readyz")[0] == 503)
        assert ask(fleet.router.http, CHAT, body_of())[0] == 503
        raw = first
        while piece := s.recv(65536):
            raw += piece
    assert raw.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]\n\n" in raw
    assert fleet.router.process.wait(20) == 0


# ---- clients that leave, that are slow, that are many ------------------------------------------------------------------------

@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_stops_the_work_within_a_step(new_fleet, stream):
    fleet = new_fleet(decode_flags=("--layer-delay", "40"))     # a step takes a while: hundreds of tokens would take minutes
    decode = fleet.decode[0]

    def generated():
        return decode.metrics()["tandem_generated_tokens_total"]

    with connect(fleet.router.http) as s:
        s.sendall(request_bytes(CHAT, body_of(stream=stream, max_tokens=1000, ignore_eos=True)))
        wait_until("tokens are made", lambda: generated() >= 3)
    before = generated()
    wait_until("nobody works any more", lambda: decode.metrics()["tandem_sequences_running"] == 0)
    assert generated() - before <= 2
    wait_until("the request is over", lambda: fleet.router.statez()["state"]["clients"] == 0)


def test_clients_that_leave_while_they_wait_are_forgotten(new_fleet):
    fleet = new_fleet(prefill_flags=("--layer-delay", "100"))
    sockets = [connect(fleet.router.http) for _ in range(10)]
    for s in sockets:
        s.sendall(request_bytes(CHAT, body_of(max_tokens=100)))
    wait_until("they wait", lambda: fleet.router.statez()["state"]["waiting"] > 5)
    for s in sockets:
        s.close()
    wait_until("they are forgotten", lambda: fleet.router.statez()["state"]["clients"] == 0)
    assert ask(fleet.router.http, CHAT, body_of())[0] == 200


def test_a_client_that_does_not_read_is_dropped_and_hurts_nobody(new_fleet):
    fleet = new_fleet(router_flags=("--max-client-backlog", "8192"))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = fleet.router.http.rsplit(":", 1)
        slow.connect((host, int(port)))
        slow.sendall(request_bytes(CHAT, body_of(stream=True, n=8, max_tokens=2000, ignore_eos=True, logprobs=True,
                                                 top_logprobs=20)))
        wait_until("it is dropped", lambda: metrics_of(fleet.router.http)["tandem_http_clients_dropped_total"] == 1, 60)
        wait_until("its work has ended", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0)
        assert ask(fleet.router.http, CHAT, body_of())[0] == 200
    assert fleet.router.statez()["state"]["clients"] == 0


def test_many_streams_at_once_are_all_served(fleet):
    """How many one core carries is measured by tests/bench/sse_streams.py."""
    n, done = 40, []

    def one():
        _, _, raw = ask(fleet.router.http, CHAT, body_of(stream=True, max_tokens=120))
        done.append(raw.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"stop"' in raw)

    threads = [threading.Thread(target=one) for _ in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert done == [True] * n


class ScriptedFleet:
    """A real router held to one core, and workers that give every request a token at each step."""
    model = "tiny-model"

    def __init__(self, directory):
        one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0)))) if shutil.which("taskset") else ()
        self.router = Daemon(directory, "router", "router", "--max-queue", "100000", wrap=one_core)
        self.prefill, self.decode = [FakePrefill(self, "prefill")], [FakeDecode(self, "decode")]
        wait_until("both have joined", lambda: metrics_of(self.router.http)["tandem_workers_decode"] == 1 and
                   metrics_of(self.router.http)["tandem_workers_prefill"] == 1)

    def stop(self):
        for worker in self.prefill + self.decode:
            worker.stop()
        return self.router.stop()


def test_five_hundred_streams_at_once_are_all_served_by_one_core(tmp_path):
    fleet = ScriptedFleet(tmp_path)
    fleet.decode[0].step_seconds, fleet.decode[0].tokens_per_step = 0.03, 0
    body = {"prompt": [1, 2, 3], "stream": True, "max_tokens": 100, "ignore_eos": True}
    try:
        sockets = [connect(fleet.router.http, 120) for _ in range(500)]
        for s in sockets:
            s.sendall(request_bytes("/v1/completions", body))
        wait_until("all are being served", lambda: fleet.router.statez()["state"]["running"] == 500, 60)
        fleet.decode[0].tokens_per_step = 1
        for s in sockets:
            status, _, raw = answer(s)
            events = raw.decode().split("\n\n")
            assert status == 200 and events[-2] == "data: [DONE]" and '"finish_reason":"length"' in events[-3]
            s.close()
        wait_until("nobody is left", lambda: fleet.router.statez()["state"]["clients"] == 0)
        assert metrics_of(fleet.router.http)["tandem_http_clients_dropped_total"] == 0
    finally:
        assert fleet.stop() == 0


def test_a_lost_worker_ends_the_answer_and_not_the_router(new_fleet):
    fleet = new_fleet(decode_flags=("--layer-delay", "20"))
    with connect(fleet.router.http) as s:
        s.sendall(request_bytes(CHAT, body_of(stream=True, max_tokens=300, ignore_eos=True)))
        wait_until("tokens are made", lambda: fleet.decode[0].metrics()["tandem_generated_tokens_total"] >= 3)
        fleet.decode[0].kill()
        _, _, raw = answer(s)
    events = [e[6:] for e in raw.decode().split("\n\n") if e]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["type"] == "service_unavailable_error"
    assert ask(fleet.router.http, CHAT, body_of())[0] == 503
