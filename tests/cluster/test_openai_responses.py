"""Responses through the real openai package: items, events in order, tools, and the whole loop of a tool call."""
import asyncio
import json

import httpx
import openai
import pytest

from conftest import IS_SANITIZED, wait_until

MODEL_NAME = "tiny-model"
SUM = "What is 47 + 38?"
MILAN = "What is the weather in Milan?"
WEATHER = {"type": "function", "name": "get_weather", "description": "Gets the current weather in the provided location.",
           "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}
TIME = {"type": "function", "name": "get_time", "description": "Gets the local time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TIMEOUT = 60 if not IS_SANITIZED else 300


@pytest.fixture
def api(fleet):
    with openai.OpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as o:
        yield o


def ask(api, input=SUM, **settings):
    return api.responses.create(model=MODEL_NAME, input=input, **{"temperature": 0, **settings})


def post(fleet, **body):
    return httpx.post(f"http://{fleet.router.http}/v1/responses", json={"temperature": 0, **body}, timeout=TIMEOUT)


def weather(location):
    return json.dumps({"temperature": 13, "condition": "foggy"})


# ---- answers -------------------------------------------------------------------------------------------------------------

def test_a_response_holds_reasoning_and_message_items_and_usage(api):
    r = ask(api)
    assert r.object == "response" and r.id.startswith("resp_") and r.status == "completed" and r.model == MODEL_NAME
    assert r.error is None and r.incomplete_details is None and r.created_at > 1_600_000_000
    thought, message = r.output
    assert thought.type == "reasoning" and thought.id.startswith("rs_") and thought.summary == [] and thought.status == "completed"
    assert [p.type for p in thought.content] == ["reasoning_text"] and thought.content[0].text.startswith("Ones: 7 + 8 = 15")
    assert message.type == "message" and message.id.startswith("msg_") and message.role == "assistant"
    assert message.status == "completed" and [p.type for p in message.content] == ["output_text"]
    assert message.content[0].text == r.output_text == "47 + 38 = 85." and message.content[0].annotations == []
    assert r.usage.input_tokens > 50 and r.usage.total_tokens == r.usage.input_tokens + r.usage.output_tokens
    assert 0 < r.usage.output_tokens_details.reasoning_tokens < r.usage.output_tokens
    assert r.usage.input_tokens_details.cached_tokens >= 0


def test_the_requests_settings_are_echoed_and_nothing_is_stored(api):
    r = ask(api, instructions="Answer with the result only.", metadata={"a": "b"}, store=True, max_output_tokens=50, top_p=0.5,
            reasoning={"effort": "low"}, tools=[WEATHER], tool_choice="none", parallel_tool_calls=False, user="me")
    assert r.output_text == "85" or "85" in r.output_text
    assert r.store is False and r.previous_response_id is None and r.instructions == "Answer with the result only."
    assert r.metadata == {"a": "b"} and r.max_output_tokens == 50 and r.temperature == 0 and r.top_p == 0.5
    assert r.reasoning.effort == "low" and r.tool_choice == "none" and r.parallel_tool_calls is False and r.user == "me"
    assert [t.name for t in r.tools] == ["get_weather"] and r.text.format.type == "text" and r.truncation == "disabled"


def test_chat_completions_and_responses_make_the_same_of_the_same(api):
    r = ask(api, instructions="Stay on topic.")
    chat = api.chat.completions.create(model=MODEL_NAME, temperature=0, messages=[
        {"role": "system", "content": "Stay on topic."}, {"role": "user", "content": SUM}])
    assert r.output_text == chat.choices[0].message.content
    assert r.output[0].content[0].text == chat.choices[0].message.reasoning
    assert (r.usage.input_tokens, r.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    first_item = ask(api, [{"role": "developer", "content": "Stay on topic."}, {"role": "user", "content": SUM}])
    assert first_item.usage.input_tokens == r.usage.input_tokens


def test_a_response_cut_by_the_limit_is_incomplete(api):
    r = ask(api, max_output_tokens=9)
    assert r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens" and r.usage.output_tokens == 9
    assert [(i.type, i.status) for i in r.output] == [("reasoning", "incomplete")]
    events = list(ask(api, max_output_tokens=9, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output[0].status == "incomplete"
    assert next(e for e in events if e.type == "response.output_item.done").item.status == "incomplete"


def test_log_probabilities_come_when_asked_for(api):
    r = ask(api, include=["message.output_text.logprobs"], top_logprobs=2, reasoning={"effort": "low"})
    entries = r.output[-1].content[0].logprobs
    assert "".join(e.token for e in entries) == r.output_text
    assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 and bytes(e.bytes).decode() == e.token for e in entries)
    assert ask(api, reasoning={"effort": "low"}).output[-1].content[0].logprobs == []
    events = list(ask(api, include=["message.output_text.logprobs"], reasoning={"effort": "low"}, stream=True))
    streamed = [l.token for e in events if e.type == "response.output_text.delta" for l in e.logprobs]
    assert streamed == [e.token for e in entries]


# ---- input ---------------------------------------------------------------------------------------------------------------

def test_the_output_of_one_response_is_the_input_of_the_next(api):
    first = ask(api, "My name is Alice.")
    second = ask(api, [{"role": "user", "content": "My name is Alice."}, *[i.model_dump(exclude_none=True) for i in first.output],
                       {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]}])
    assert "Alice" in second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens


def test_old_reasoning_leaves_the_prompt(api):
    items = [{"role": "user", "content": SUM},
             {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "unused"}],
              "content": [{"type": "reasoning_text", "text": "A long thought. " * 20}]},
             {"role": "assistant", "content": [{"type": "output_text", "text": "47 + 38 = 85.", "annotations": []}]},
             {"role": "user", "content": "What is 12 + 30?"}]
    r = ask(api, items)
    assert r.output_text == "12 + 30 = 42."
    assert r.usage.input_tokens == ask(api, [items[0], *items[2:]]).usage.input_tokens
    # A reasoning item without content is no message at all.
    assert ask(api, [items[0], {**items[1], "content": []}, *items[2:]]).usage.input_tokens == r.usage.input_tokens


@pytest.mark.parametrize("body, param", [
    ({}, "input"),
    ({"input": 7}, "input"),
    ({"input": []}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "reasoning", "content": []}]}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "include": ["file_search_call.results"]}, "include"),
    ({"input": "a", "reasoning": {"effort": "minimal"}}, "reasoning.effort"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "a", "tools": [{"type": "function", "name": "f", "strict": True}]}, "tools[0].strict"),
    ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "instructions": 7}, "instructions"),
    ({"input": "a", "metadata": 7}, "metadata"),
    ({"input": "a", "max_tool_calls": 3}, "max_tool_calls"),
])
def test_what_cannot_be_done_is_refused_by_name(fleet, body, param):
    reply = post(fleet, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param and param in reply.json()["error"]["message"]


def test_errors_are_the_packages_own(api):
    with pytest.raises(openai.BadRequestError) as error:
        ask(api, "word " * 40000)
    assert error.value.param == "input" and error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        ask(api, previous_response_id="resp_1")
    assert error.value.param == "previous_response_id" and error.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="another", input="Hello")


def test_what_changes_nothing_is_ignored(fleet):
    reply = post(fleet, input="Hello", store=False, metadata=None, service_tier="auto", prompt_cache_key="x", made_up={"a": 1},
                 include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}, stream_options={"include_obfuscation": False})
    assert reply.status_code == 200 and reply.json()["status"] == "completed"


# ---- events --------------------------------------------------------------------------------------------------------------

MESSAGE_EVENTS = ["response.output_item.added", "response.content_part.added", "response.output_text.delta",
                  "response.output_text.done", "response.content_part.done", "response.output_item.done"]
REASONING_EVENTS = ["response.output_item.added", "response.reasoning_part.added", "response.reasoning_text.delta",
                    "response.reasoning_text.done", "response.reasoning_part.done", "response.output_item.done"]
CALL_EVENTS = ["response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
               "response.output_item.done"]


def raw_events(fleet, **body):
    """(event name, data) of each, as they are on the wire."""
    events, name = [], None
    with httpx.stream("POST", f"http://{fleet.router.http}/v1/responses", json={"temperature": 0, "stream": True, **body},
                      timeout=TIMEOUT) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line[len("event: "):]
            elif line.startswith("data: "):
                events.append((name, json.loads(line[len("data: "):])))
                name = None
    return events


def without_repeats(names):
    return [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]


def check_items(events):
    """Every event of an item names it; deltas, done events and items say the same. Returns the items."""
    items = []
    for name, e in events:
        if "output_index" in e:
            assert e["output_index"] == len(items) - (name != "response.output_item.added")
        if name == "response.output_item.added":
            assert e["item"]["status"] == "in_progress" and not e["item"].get("content") and not e["item"].get("arguments")
            items.append(e["item"])
            text, part = "", None
        elif "item_id" in e:
            assert e["item_id"] == items[-1]["id"]
            assert ("content_index" in e) == (items[-1]["type"] != "function_call") and e.get("content_index", 0) == 0
            if name.endswith(".delta"):
                assert e["delta"] != ""
                text += e["delta"]
            elif name.endswith(("text.done", "arguments.done")):
                assert e.get("text", e.get("arguments")) == text
            elif name.endswith("part.added"):
                assert e["part"]["text"] == ""
            elif name.endswith("part.done"):
                part = e["part"]
                assert part["text"] == text
        elif name == "response.output_item.done":
            item = e["item"]
            assert item["id"] == items[-1]["id"] and item["type"] == items[-1]["type"]
            assert item["arguments"] == text if item["type"] == "function_call" else item["content"] == [part]
            items[-1] = item
    return items


def test_every_event_comes_in_its_place_with_its_number(fleet):
    events = raw_events(fleet, input=SUM)
    assert [e["sequence_number"] for _, e in events] == list(range(len(events)))
    assert all(name == e["type"] for name, e in events)
    assert without_repeats([name for name, _ in events]) == [
        "response.created", "response.in_progress", *REASONING_EVENTS, *MESSAGE_EVENTS, "response.completed"]
    for name, e in events[:2]:
        assert e["response"]["status"] == "in_progress" and e["response"]["output"] == [] and e["response"]["usage"] is None
    items = check_items(events)
    final = events[-1][1]["response"]
    assert final["output"] == items and final["status"] == "completed"
    assert {e["response"]["id"] for _, e in events if "response" in e} == {final["id"]}


def test_the_events_of_a_call(fleet):
    events = raw_events(fleet, input=MILAN, tools=[WEATHER, TIME])
    assert without_repeats([name for name, _ in events]) == [
        "response.created", "response.in_progress", *REASONING_EVENTS, *CALL_EVENTS, "response.completed"]
    items = check_items(events)
    assert events[-1][1]["response"]["output"] == items and items[-1]["name"] == "get_weather"
    done = next(e for name, e in events if name == "response.function_call_arguments.done")
    assert done["name"] == "get_weather" and json.loads(done["arguments"]) == {"location": "Milan"}


def without_ids(response):
    drop = {"id", "call_id", "created_at"}
    if isinstance(response, dict):
        return {k: without_ids(v) for k, v in response.items() if k not in drop}
    return [without_ids(v) for v in response] if isinstance(response, list) else response


@pytest.mark.parametrize("more", [{"input": SUM}, {"input": MILAN, "tools": [WEATHER]}, {"input": SUM, "max_output_tokens": 20}])
def test_the_last_event_equals_the_answer_in_one_piece(fleet, more):
    whole = post(fleet, **more).json()
    streamed = raw_events(fleet, **more)[-1][1]["response"]
    assert without_ids({**streamed, "usage": None}) == without_ids({**whole, "usage": None})
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_ids_are_unique(fleet):
    seen = []
    for _ in range(3):
        response = post(fleet, input=MILAN, tools=[WEATHER]).json()
        seen += [response["id"], *[i["id"] for i in response["output"]], *[i["call_id"] for i in response["output"] if "call_id" in i]]
    assert len(seen) == len(set(seen)) == 12


# ---- tools ---------------------------------------------------------------------------------------------------------------

def test_the_loop_of_a_tool_call_goes_round(api):
    items = [{"role": "user", "content": MILAN}]
    r = ask(api, items, tools=[WEATHER, TIME])
    assert [i.type for i in r.output] == ["reasoning", "function_call"] and r.status == "completed"
    call = r.output[-1]
    assert call.name == "get_weather" and json.loads(call.arguments) == {"location": "Milan"}
    assert call.id.startswith("fc_") and call.call_id.startswith("call_") and call.status == "completed"
    items += r.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": weather("Milan")})
    answer = ask(api, items, tools=[WEATHER, TIME])
    assert "13 degrees and foggy in Milan" in answer.output_text
    assert all(i.type != "function_call" for i in answer.output)


def test_the_loop_goes_round_streamed_too(api):
    items = [{"role": "user", "content": MILAN}]
    events = list(ask(api, items, tools=[WEATHER, TIME], stream=True))
    call = next(e.item for e in events if e.type == "response.output_item.done" and e.item.type == "function_call")
    assert json.loads("".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")) == {"location": "Milan"}
    final = events[-1].response
    items += [i.model_dump(exclude_none=True) for i in final.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": weather("Milan")}]})
    events = list(ask(api, items, tools=[WEATHER, TIME], stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert "13 degrees and foggy in Milan" in text == events[-1].response.output_text


def test_the_packages_own_accumulator_follows_the_stream(api):
    with api.responses.stream(model=MODEL_NAME, input=MILAN, tools=[WEATHER], temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert json.loads(final.output[-1].arguments) == {"location": "Milan"}
    with api.responses.stream(model=MODEL_NAME, input=SUM, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "47 + 38 = 85."


def test_a_choice_of_none_offers_no_tools_and_a_named_one_makes_its_call(api):
    none = ask(api, tools=[WEATHER], tool_choice="none")
    assert none.usage.input_tokens == ask(api).usage.input_tokens and none.output_text == "47 + 38 = 85."
    r = ask(api, MILAN, tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "get_weather"})
    assert r.output[-1].type == "function_call" and r.output[-1].name == "get_weather"


def test_many_at_once_keep_their_streams_apart(fleet):
    async def one(o, a):
        text = ""
        async for e in await o.responses.create(model=MODEL_NAME, input=f"What is {a} + 30?", temperature=0, stream=True):
            text += e.delta if e.type == "response.output_text.delta" else ""
        return text

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as o:
            return await asyncio.gather(*[one(o, a) for a in range(11, 17)])

    assert asyncio.run(all_of_them()) == [f"{a} + 30 = {a + 30}." for a in range(11, 17)]


def test_a_client_that_leaves_stops_the_work(api, fleet):
    stream = ask(api, "Tell a short story about a fox and a lake.", stream=True, max_output_tokens=2000, extra_body={"ignore_eos": True})
    for e in stream:
        if e.type.endswith(".delta"):
            break
    stream.close()
    wait_until("nobody works any more", lambda: fleet.decode[0].metrics()["tandem_sequences_running"] == 0)


# ---- trouble -------------------------------------------------------------------------------------------------------------

def test_a_failure_in_the_middle_is_the_last_event(new_fleet):
    fleet = new_fleet()
    with openai.OpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as api:
        events = []
        for e in ask(api, "Tell a short story about a fox and a lake.", stream=True, max_output_tokens=3000, extra_body={"ignore_eos": True}):
            events.append(e)
            if e.type.endswith("text.delta") and fleet.decode[0].process.poll() is None:
                fleet.decode[0].kill()
        assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
        assert events[-1].response.error.code == "server_error" and events[-1].response.error.message
        assert [e.sequence_number for e in events] == list(range(len(events)))
