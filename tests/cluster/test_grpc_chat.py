"""The gRPC call Chat offers what Chat Completions offer over HTTP, and says the same."""
import json

import grpc
import openai
import pytest

from conftest import IS_SANITIZED, common_pb2, inference_pb2, wait_until

SUM, MILAN = "What is 47 + 38?", "What is the weather in Milan?"
SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
WEATHER = dict(name="get_weather", description="Gets the current weather in the provided location.", parameters=json.dumps(SCHEMA).encode())
TIME = dict(name="get_time", description="Gets the local time in a city.",
            parameters=b'{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}')
TIMEOUT = 60 if not IS_SANITIZED else 300
C = inference_pb2.ChatChannel


def message(role, content="", **more):
    return inference_pb2.ChatMessage(role=role, content=content.encode(), **more)


def request(*messages, temperature=0.0, max_tokens=0, **more):
    return inference_pb2.ChatRequest(messages=messages, sampling=common_pb2.Sampling(temperature=temperature),
                                     stop=common_pb2.Stop(max_tokens=max_tokens), **more)


class Answer:
    """What a client makes of the events of one choice."""

    def __init__(self):
        self.text = dict.fromkeys(C.values(), "")
        self.calls, self.ends, self.logprobs = [], [], []
        self.finish = self.usage = self.timing = None
        self.reasoning_tokens = 0

    def take(self, event):
        assert self.finish is None, "nothing follows the end"
        for d in event.deltas:
            assert not (d.end and d.text)
            self.logprobs += d.logprobs
            if d.end:
                self.ends.append((d.channel, d.end))
            if d.call_id:
                assert d.recipient == "functions." + d.function and d.call_index == len(self.calls)
                self.calls.append([d.call_id, d.function, ""])
            if d.channel == C.CHANNEL_TOOL_CALL:
                self.calls[d.call_index][2] += d.text.decode()
            else:
                self.text[d.channel] += d.text.decode()
        if event.finish_reason:
            self.finish = common_pb2.FinishReason.Name(event.finish_reason)
        if event.HasField("usage"):
            self.usage, self.timing, self.reasoning_tokens = event.usage, event.timing, event.reasoning_tokens

    @property
    def final(self):
        return self.text[C.CHANNEL_FINAL]

    @property
    def reasoning(self):
        return self.text[C.CHANNEL_REASONING]


def answers(client, r):
    out = {}
    for i, event in enumerate(client.stub.Chat(r, timeout=TIMEOUT)):
        assert (event.request_id != "") == (i == 0)
        out.setdefault(event.choice, Answer()).take(event)
    assert sum(a.usage is not None for a in out.values()) == 1 and all(a.finish for a in out.values())
    return [out[i] for i in sorted(out)]


def ask(client, *messages, **more):
    return answers(client, request(*messages, **more))[0]


def refused(client, r):
    with pytest.raises(grpc.RpcError) as error:
        list(client.stub.Chat(r, timeout=TIMEOUT))
    return error.value.code(), error.value.details()


@pytest.fixture
def api(fleet):
    with openai.OpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as o:
        yield o


def test_both_apis_say_the_same(client, api):
    a = ask(client, message("system", "Stay on topic."), message("user", SUM))
    r = api.chat.completions.create(model="tiny-model", temperature=0, messages=[
        {"role": "system", "content": "Stay on topic."}, {"role": "user", "content": SUM}])
    assert a.final == r.choices[0].message.content == "47 + 38 = 85." and a.reasoning == r.choices[0].message.reasoning
    assert a.finish == "FINISH_STOP" and a.ends == [(C.CHANNEL_REASONING, 1), (C.CHANNEL_FINAL, 1)]
    assert (a.usage.prompt_tokens, a.usage.completion_tokens) == (r.usage.prompt_tokens, r.usage.completion_tokens)
    assert a.reasoning_tokens == r.usage.completion_tokens_details.reasoning_tokens
    assert a.timing.ttft_us > 0 and a.timing.decode_worker != ""


def test_the_loop_of_a_tool_call_goes_round(client):
    tools = [WEATHER, TIME]
    first = ask(client, message("user", MILAN), tools=tools)
    assert first.finish == "FINISH_TOOL_CALLS" and first.final == "" and len(first.calls) == 1
    call_id, name, arguments = first.calls[0]
    assert call_id.startswith("call_") and name == "get_weather" and json.loads(arguments) == {"location": "Milan"}
    history = [message("user", MILAN), message("assistant", reasoning=first.reasoning.encode(), tool_calls=[
        dict(id=call_id, name=name, arguments=arguments.encode())])]
    result = json.dumps({"temperature": 13, "condition": "foggy"})
    for last in (message("tool", result, tool_call_id=call_id), message("tool", result, name="get_weather")):
        answer = ask(client, *history, last, tools=tools)
        assert answer.finish == "FINISH_STOP" and not answer.calls and "13 degrees and foggy in Milan" in answer.final


def test_tools_prompt_and_count_like_over_http(client, api):
    a = ask(client, message("user", MILAN), tools=[WEATHER])
    r = api.chat.completions.create(model="tiny-model", temperature=0, messages=[{"role": "user", "content": MILAN}], tools=[
        {"type": "function", "function": {"name": "get_weather", "description": WEATHER["description"], "parameters": SCHEMA}}])
    assert a.usage.prompt_tokens == r.usage.prompt_tokens
    assert a.calls[0][2] == r.choices[0].message.tool_calls[0].function.arguments


def test_the_choice_of_tools(client):
    none = ask(client, message("user", SUM), tools=[WEATHER], tool_choice=inference_pb2.TOOLS_NONE)
    assert none.usage.prompt_tokens == ask(client, message("user", SUM)).usage.prompt_tokens
    named = ask(client, message("user", MILAN), tools=[WEATHER, TIME], tool_choice=inference_pb2.TOOLS_NAMED, tool_name="get_weather")
    assert named.calls[0][1] == "get_weather"


def test_stop_strings_choices_and_log_probabilities(client):
    a = ask(client, message("user", SUM), stop_strings=[b"= 85"], reasoning_effort="low")
    assert a.final == "47 + 38 " and a.finish == "FINISH_STOP"
    out = answers(client, request(message("user", SUM), n=3, reasoning_effort="low"))
    assert [o.final for o in out] == ["47 + 38 = 85."] * 3
    a = ask(client, message("user", SUM), reasoning_effort="low", n_logprobs=2)
    ids = [p.chosen.id for p in a.logprobs]
    assert client.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text.decode() == a.final
    assert all(len(p.top) == 2 and p.chosen.logprob <= 0 for p in a.logprobs)


def test_parts_reasoning_and_limits(client):
    parts = [inference_pb2.ContentPart(text=SUM.encode())]
    assert ask(client, inference_pb2.ChatMessage(role="user", parts=parts)).final == "47 + 38 = 85."
    hidden = ask(client, message("user", SUM), hide_reasoning=True)
    assert hidden.reasoning == "" and hidden.final == "47 + 38 = 85." and hidden.reasoning_tokens > 0
    cut = ask(client, message("user", SUM), max_tokens=9)
    assert cut.finish == "FINISH_LENGTH" and cut.usage.completion_tokens == 9 and cut.ends == [(C.CHANNEL_REASONING, 2)]


def test_kept_reasoning_makes_a_longer_prompt(client):
    history = [message("user", SUM), message("assistant", "47 + 38 = 85.", reasoning=b"Easy. " * 10), message("user", "What is 12 + 30?")]
    dropped, kept = ask(client, *history, max_tokens=1), ask(client, *history, max_tokens=1, keep_reasoning=True)
    assert kept.usage.prompt_tokens > dropped.usage.prompt_tokens + 10


@pytest.mark.parametrize("more, said", [
    (dict(tools=[dict(name="a b")]), "tools[0].name"),
    (dict(tools=[dict(name="f", parameters=b"{")]), "tools[0].parameters"),
    (dict(tool_choice=2), "tool_choice"),
    (dict(tool_choice=3, tool_name="f"), "tool_name"),
    (dict(stop_strings=[b""]), "stop_strings[0]"),
    (dict(n=1000), "n"),
    (dict(n_logprobs=21), "n_logprobs"),
    (dict(reasoning_effort="minimal"), "reasoning_effort"),
])
def test_what_cannot_be_done_is_refused_by_field(client, more, said):
    code, details = refused(client, request(message("user", "Hi"), **more))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith(said + ": ")


def test_a_result_without_its_call_and_a_wrong_model_are_refused(client):
    code, details = refused(client, request(message("user", "Hi"), message("tool", "4", tool_call_id="x")))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("messages[1].tool_call_id: ")
    code, details = refused(client, request(message("user", "Hi"), model="another"))
    assert code == grpc.StatusCode.NOT_FOUND and "another" in details
    code, details = refused(client, request(message("user", "word " * 40000)))
    assert details.startswith("messages: ")


def test_a_client_that_leaves_stops_the_work(client, fleet):
    r = request(message("user", "Tell a short story about a fox and a lake."), max_tokens=2000)
    r.stop.ignore_eos = True
    call = client.stub.Chat(r, timeout=TIMEOUT)
    for event in call:
        if event.deltas:
            break
    call.cancel()
    wait_until("nobody works any more", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0)


def test_a_deadline_ends_the_call(client, fleet):
    r = request(message("user", "Tell a short story about a fox and a lake."), max_tokens=3000)
    r.stop.ignore_eos = True
    with pytest.raises(grpc.RpcError) as error:
        list(client.stub.Chat(r, timeout=1))
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until("nobody works any more", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0)


def test_arguments_that_are_not_json_are_counted(client, fleet):
    def count(name):
        return fleet.router.metrics()[f"tandem_tool_calls{name}_total"]

    whole = ask(client, message("user", MILAN), tools=[WEATHER], reasoning_effort="low")
    n_calls, n_bad = count(""), count("_not_json")
    assert len(whole.calls) == 1 and n_calls > 0
    cut = ask(client, message("user", MILAN), tools=[WEATHER], reasoning_effort="low", max_tokens=whole.usage.completion_tokens - 2)
    assert cut.finish == "FINISH_LENGTH" and 0 < len(cut.calls[0][2]) < len(whole.calls[0][2])
    assert (count(""), count("_not_json")) == (n_calls + 1, n_bad + 1)
