"""Chat Completions through the real openai package: answers, streams, options, tools and the whole loop of a tool call."""
import asyncio
import json
import shutil
import subprocess

import openai
import pytest

from conftest import IS_SANITIZED, inference_pb2, wait_until

MODEL_NAME = "tiny-model"
SUM = [{"role": "user", "content": "What is 47 + 38?"}]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Gets the current weather in the provided location.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}}
TIME = {"type": "function", "function": {
    "name": "get_time", "description": "Gets the local time in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
TIMEOUT = 60 if not IS_SANITIZED else 300


@pytest.fixture
def api(fleet):
    with openai.OpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as o:
        yield o


def ask(api, messages=SUM, **settings):
    return api.chat.completions.create(model=MODEL_NAME, messages=messages, **{"temperature": 0, **settings})


def joined(stream):
    """What a client makes of a stream of one choice: a message like that of the answer in one piece, and all chunks."""
    message, chunks = {"content": "", "reasoning": "", "tool_calls": []}, []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning", None) or ""
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(message["tool_calls"])
                    message["tool_calls"].append({"id": call.id, "type": call.type, "function": {
                        "name": call.function.name, "arguments": call.function.arguments}})
                else:
                    message["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments
            if choice.finish_reason is not None:
                message["finish_reason"] = choice.finish_reason
    return message, chunks


# ---- answers -------------------------------------------------------------------------------------------------------------

def test_an_answer_has_content_and_reasoning_and_usage(api):
    r = ask(api)
    choice = r.choices[0]
    assert r.object == "chat.completion" and r.model == MODEL_NAME and r.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content == "47 + 38 = 85."
    assert choice.message.reasoning.startswith("Ones: 7 + 8 = 15") and choice.message.tool_calls is None
    assert choice.message.reasoning_content == choice.message.reasoning
    assert choice.finish_reason == "stop" and choice.logprobs is None
    assert r.usage.prompt_tokens > 50 and r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    assert 0 < r.usage.completion_tokens_details.reasoning_tokens < r.usage.completion_tokens
    assert r.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_stream_says_the_same_as_the_answer_in_one_piece(api):
    whole = ask(api)
    message, chunks = joined(ask(api, stream=True, stream_options={"include_usage": True}))
    assert message["content"] == whole.choices[0].message.content
    assert message["reasoning"] == whole.choices[0].message.reasoning
    assert message["finish_reason"] == "stop"
    first, last = chunks[0], chunks[-1]
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert last.choices == [] and all(c.usage is None for c in chunks[:-1])
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.completion_tokens_details == whole.usage.completion_tokens_details
    assert len({c.id for c in chunks}) == 1 and all(c.object == "chat.completion.chunk" for c in chunks)
    assert sum(1 for c in chunks if c.choices and c.choices[0].finish_reason) == 1


def test_without_include_usage_no_chunk_mentions_it(api):
    _, chunks = joined(ask(api, stream=True))
    assert all("usage" not in c.model_dump(exclude_unset=True) and c.choices for c in chunks)


def test_messages_may_be_strings_or_parts(api):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is 47 + 38?"}]}]
    assert ask(api, parts).choices[0].message.content == "47 + 38 = 85."


def test_a_conversation_goes_on(api):
    messages = [{"role": "system", "content": "Stay on topic."}, *SUM,
                {"role": "assistant", "content": "47 + 38 = 85.", "reasoning": "Easy."},
                {"role": "user", "content": "What is 12 + 30?"}]
    assert ask(api, messages).choices[0].message.content == "12 + 30 = 42."
    assert ask(api, [{**m, "role": m["role"].replace("system", "developer")} for m in messages]).choices[0].message.content \
        == "12 + 30 = 42."


def test_reasoning_effort_shows(api):
    low, high = ask(api, reasoning_effort="low"), ask(api, reasoning_effort="high")
    assert low.choices[0].message.content == high.choices[0].message.content == "47 + 38 = 85."
    assert low.usage.completion_tokens_details.reasoning_tokens < high.usage.completion_tokens_details.reasoning_tokens


def test_reasoning_can_be_left_out(api):
    r = ask(api, extra_body={"include_reasoning": False})
    assert r.choices[0].message.content == "47 + 38 = 85." and r.choices[0].message.reasoning is None
    assert r.usage.completion_tokens_details.reasoning_tokens > 0
    message, _ = joined(ask(api, stream=True, extra_body={"include_reasoning": False}))
    assert message["content"] == "47 + 38 = 85." and message["reasoning"] == ""


# ---- options -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_on_new_tokens_ends_with_length(api, name):
    r = ask(api, **{name: 7})
    assert r.usage.completion_tokens == 7 and r.choices[0].finish_reason == "length"
    assert r.choices[0].message.content is None and r.choices[0].message.reasoning != ""


def test_several_choices_with_seeds_are_the_same_again(api):
    settings = {"n": 3, "temperature": 2, "seed": 11, "max_tokens": 40, "messages": [{"role": "user", "content": "Tell me a story."}]}
    one, two = ask(api, **settings), ask(api, **settings)
    texts = [[(c.message.content, c.message.reasoning) for c in r.choices] for r in (one, two)]
    assert [c.index for c in one.choices] == [0, 1, 2] and texts[0] == texts[1]
    assert len(set(texts[0])) > 1, "choices draw from seeds of their own"
    assert ask(api, **{**settings, "n": 1}).choices[0].message.reasoning == one.choices[0].message.reasoning


@pytest.mark.parametrize("stop,expected", [
    (" = 85", "47 + 38"), ("= 8", "47 + 38 "), (["never", "38"], "47 + "), ("85.", "47 + 38 = "), ("7 + 3", "4")])
def test_stop_strings_end_the_answer_and_never_leak(api, stop, expected):
    r = ask(api, stop=stop)
    assert r.choices[0].message.content == expected and r.choices[0].finish_reason == "stop"
    assert r.choices[0].message.reasoning.startswith("Ones"), "reasoning is not searched"
    message, chunks = joined(ask(api, stop=stop, stream=True))
    assert message["content"] == expected and message["finish_reason"] == "stop"


def test_what_looks_like_a_stop_string_and_is_none_comes_out_in_the_end(api):
    assert ask(api, stop=["85. And", "= 86"]).choices[0].message.content == "47 + 38 = 85."


def test_a_stop_string_stops_the_workers(fleet, api):
    before = fleet.decode[0].metrics()["tandem_generated_tokens_total"]
    r = ask(api, stop="47", extra_body={"ignore_eos": True}, max_tokens=1500)
    assert r.choices[0].finish_reason == "stop"
    wait_until("nobody works any more", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0)
    assert fleet.decode[0].metrics()["tandem_generated_tokens_total"] - before < 200


def test_logit_bias_and_penalties_are_heeded(fleet, client, api):
    ids = list(client.stub.Tokenize(inference_pb2.TokenizeRequest(text=b"85")).token_ids)
    assert "85" not in (ask(api, logit_bias={str(i): -100 for i in ids}).choices[0].message.content or "")
    assert ask(api, presence_penalty=2, frequency_penalty=2).choices[0].message.content != "47 + 38 = 85."


def test_logprobs_tell_of_content_alone(api):
    r = ask(api, logprobs=True, top_logprobs=3)
    entries = r.choices[0].logprobs.content
    assert "".join(e.token for e in entries) == r.choices[0].message.content
    for e in entries:
        assert bytes(e.bytes).decode() == e.token and e.logprob <= 0 and len(e.top_logprobs) == 3
        assert e.top_logprobs[0].logprob == e.logprob, "greedy"
        assert sorted((t.logprob for t in e.top_logprobs), reverse=True) == [t.logprob for t in e.top_logprobs]
    streamed = []
    for chunk in ask(api, logprobs=True, top_logprobs=3, stream=True):
        if chunk.choices and chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [e.token for e in streamed] == [e.token for e in entries]


def test_logprobs_end_where_a_stop_string_begins(api):
    entries = ask(api, logprobs=True, stop=" = 85").choices[0].logprobs.content
    assert "".join(e.token for e in entries) == "47 + 38"


def test_user_metadata_and_strange_fields_are_ignored(api):
    r = ask(api, user="somebody", metadata={"a": "b"}, store=False, extra_body={"nobody_knows": [1, 2]},
            response_format={"type": "text"})
    assert r.choices[0].message.content == "47 + 38 = 85."


# ---- refusals ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings,param", [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "tools[0].function.strict"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"extra_body": {"best_of": 3}}, "best_of"),
    ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens"),
    ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, "chat_template_kwargs"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -3}, "max_completion_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"presence_penalty": 5}, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"reasoning_effort": "none"}, "reasoning_effort"),
    ({"reasoning_effort": "minimal"}, "reasoning_effort"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice.function.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "browser"}]}, "tools[0].type"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [*SUM, {"role": "tool", "tool_call_id": "c9", "content": "x"}]}, "messages[1].tool_call_id"),
])
def test_what_cannot_be_done_is_refused_by_name(api, settings, param):
    with pytest.raises(openai.BadRequestError) as e:
        ask(api, **settings)
    assert e.value.status_code == 400 and e.value.param == param and param in e.value.message
    assert e.value.type == "invalid_request_error"


def test_another_model_is_not_found(api):
    with pytest.raises(openai.NotFoundError) as e:
        api.chat.completions.create(model="gpt-17", messages=SUM)
    assert e.value.param == "model" and e.value.code == "model_not_found" and "gpt-17" in e.value.message


def test_a_prompt_longer_than_the_context_is_refused_as_such(api):
    with pytest.raises(openai.BadRequestError) as e:
        ask(api, [{"role": "user", "content": "word " * 140000}])
    assert e.value.code == "context_length_exceeded" and e.value.param == "messages"


# ---- tools ---------------------------------------------------------------------------------------------------------------

def weather(location):
    return json.dumps({"temperature": 13, "condition": "foggy"}) if location == "Milan" else "{}"


def test_the_loop_of_a_tool_call_goes_round(api):
    messages = [{"role": "user", "content": "What is the weather in Milan?"}]
    r = ask(api, messages, tools=[WEATHER, TIME])
    choice = r.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    call = choice.message.tool_calls[0]
    assert len(choice.message.tool_calls) == 1 and call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"location": "Milan"}
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": weather("Milan")}]
    answer = ask(api, messages, tools=[WEATHER, TIME]).choices[0]
    assert answer.finish_reason == "stop" and answer.message.tool_calls is None
    assert "13 degrees and foggy in Milan" in answer.message.content


def test_the_loop_goes_round_streamed_too(api):
    messages = [{"role": "user", "content": "What is the weather in Milan?"}]
    message, _ = joined(ask(api, messages, tools=[WEATHER, TIME], stream=True))
    assert message["finish_reason"] == "tool_calls" and message["content"] == "" and len(message["tool_calls"]) == 1
    call = message["tool_calls"][0]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == {"location": "Milan"}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": message["reasoning"]},
                 {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": weather("Milan")}]}]
    answer, _ = joined(ask(api, messages, tools=[WEATHER, TIME], stream=True))
    assert "13 degrees and foggy in Milan" in answer["content"] and answer["finish_reason"] == "stop"


def test_ids_of_calls_are_unique(api):
    messages = [{"role": "user", "content": "What is the weather in Milan?"}]
    ids = [c.message.tool_calls[0].id for c in ask(api, messages, tools=[WEATHER], n=4).choices]
    assert len(set(ids)) == 4


def test_no_tools_are_offered_when_none_is_chosen(api):
    messages = [{"role": "user", "content": "What is the weather in Milan?"}]
    chosen = ask(api, messages, tools=[WEATHER, TIME], tool_choice="none")
    without = ask(api, messages)
    assert chosen.usage.prompt_tokens == without.usage.prompt_tokens


def test_a_named_tool_is_called_whatever_the_question(api):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    messages = [{"role": "user", "content": "What is the weather in Milan?"}]
    r = ask(api, messages, tools=[TIME, WEATHER], tool_choice=choice).choices[0]
    assert r.finish_reason == "stop" and r.message.content is None and r.message.reasoning is None
    assert [c.function.name for c in r.message.tool_calls] == ["get_weather"]
    assert json.loads(r.message.tool_calls[0].function.arguments) == {"location": "Milan"}
    other = ask(api, tools=[TIME, WEATHER], tool_choice=choice, max_tokens=40).choices[0]
    assert other.message.tool_calls[0].function.name == "get_weather"
    message, _ = joined(ask(api, messages, tools=[TIME, WEATHER], tool_choice=choice, stream=True))
    assert message["tool_calls"][0]["function"]["name"] == "get_weather" and message["finish_reason"] == "stop"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"location": "Milan"}


def test_some_tool_is_called_when_one_is_required(api):
    r = ask(api, [{"role": "user", "content": "What is the weather in Milan?"}], tools=[TIME, WEATHER],
            tool_choice="required").choices[0]
    assert r.finish_reason == "tool_calls" and r.message.tool_calls[0].function.name == "get_weather"
    sums = ask(api, tools=[TIME, WEATHER], tool_choice="required", max_tokens=60).choices[0]
    assert sums.message.tool_calls and sums.message.content is None


def test_one_call_at_most_without_parallel_calls(api):
    r = ask(api, [{"role": "user", "content": "What is the weather in Hanoi and Milan?"}], tools=[WEATHER],
            parallel_tool_calls=False).choices[0]
    assert len(r.message.tool_calls) == 1 and r.finish_reason == "tool_calls"


def test_arguments_that_are_not_json_go_out_as_they_are_and_are_counted(fleet, api):
    def counts():
        m = fleet.router.metrics()
        return m["tandem_tool_calls_total"], m["tandem_tool_calls_not_json_total"]

    choice = {"type": "function", "function": {"name": "get_weather"}}
    messages = [{"role": "user", "content": "What is the weather in Milan?"}]
    before = counts()
    cut = ask(api, messages, tools=[WEATHER], tool_choice=choice, max_tokens=3).choices[0]
    assert cut.finish_reason == "length" and '{"location":"Milan"}'.startswith(cut.message.tool_calls[0].function.arguments)
    assert counts() == (before[0] + 1, before[1] + 1)
    ask(api, messages, tools=[WEATHER], tool_choice=choice)
    assert counts() == (before[0] + 2, before[1] + 1)


def test_what_was_cached_of_a_prompt_is_counted(api):
    messages = [{"role": "user", "content": "Remember this. " * 40}]
    ask(api, messages, max_tokens=2)
    usage = ask(api, messages, max_tokens=2).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize("stream", [False, True])
def test_curl_gets_an_answer(fleet, stream):
    body = json.dumps({"messages": SUM, "temperature": 0, "stream": stream})
    done = subprocess.run(["curl", "-sSN", "--fail", f"http://{fleet.router.http}/v1/chat/completions", "-H",
                           "Content-Type: application/json", "-d", body], capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    if stream:
        assert done.stdout.startswith("data: {") and done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "47 + 38 = 85."


def test_the_async_client_streams_too(fleet):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", timeout=TIMEOUT) as o:
            async def one():
                text = ""
                async for chunk in await o.chat.completions.create(model=MODEL_NAME, messages=SUM, temperature=0, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text
            return await asyncio.gather(*(one() for _ in range(8)))
    assert asyncio.run(run()) == ["47 + 38 = 85."] * 8
