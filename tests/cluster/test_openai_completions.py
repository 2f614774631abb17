"""Completions, models and the tokenizer's endpoints through the real openai package and plain HTTP."""
import json
import urllib.error
import urllib.request

import openai
import pytest

from conftest import GOLDENS, IS_SANITIZED, golden, http_get

MODEL_NAME = "tiny-model"


@pytest.fixture
def api(fleet):
    with openai.OpenAI(base_url=f"http://{fleet.router.http}/v1", api_key="none", max_retries=0,
                       timeout=60 if not IS_SANITIZED else 300) as o:
        yield o


def complete(api, prompt, **settings):
    return api.completions.create(model=MODEL_NAME, prompt=prompt, **{"temperature": 0, **settings})


def post(fleet, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{fleet.router.http}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def text_of(fleet, ids):
    return post(fleet, "/detokenize", {"tokens": ids, "keep_special": False})[1]["prompt"]


def test_a_text_is_continued(fleet, api):
    prompt = golden("copied text")
    n = len(prompt["greedy"])
    r = complete(api, prompt["text"], max_tokens=n)
    assert r.object == "text_completion" and r.id.startswith("cmpl-") and r.usage.prompt_tokens == len(prompt["ids"])
    assert r.choices[0].text.startswith(text_of(fleet, prompt["greedy"][:3])) and r.usage.completion_tokens <= n


def test_texts_and_token_ids_and_lists_of_them_say_the_same(fleet, api):
    prompts = [p for p in GOLDENS["prompts"] if p["n"] < 300][:3]
    alone = [complete(api, p["ids"], max_tokens=8).choices[0].text for p in prompts]
    assert alone == [complete(api, p["text"], max_tokens=8).choices[0].text for p in prompts]
    for form in ("ids", "text"):
        r = complete(api, [p[form] for p in prompts], max_tokens=8)
        assert [c.text for c in r.choices] == alone and [c.index for c in r.choices] == [0, 1, 2]
        assert r.usage.prompt_tokens == sum(len(p["ids"]) for p in prompts)


def test_several_prompts_with_several_choices_are_numbered_prompt_by_prompt(api):
    a, b = GOLDENS["prompts"][0]["ids"], GOLDENS["prompts"][1]["ids"]
    r = complete(api, [a, b], n=2, max_tokens=6)
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    assert r.choices[0].text == r.choices[1].text == complete(api, a, max_tokens=6).choices[0].text
    assert r.choices[2].text == r.choices[3].text == complete(api, b, max_tokens=6).choices[0].text


def test_a_stream_adds_up_to_the_whole(api):
    ids = golden("copied text")["ids"]
    whole = complete(api, ids, max_tokens=12, n=2)
    texts, finishes, usage = ["", ""], [None, None], None
    for chunk in complete(api, ids, max_tokens=12, n=2, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for c in chunk.choices:
            texts[c.index] += c.text
            finishes[c.index] = c.finish_reason or finishes[c.index]
    assert texts == [c.text for c in whole.choices] and finishes == [c.finish_reason for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_sixteen_tokens_are_made_when_nothing_is_said(api):
    r = complete(api, golden("copied text")["ids"], extra_body={"ignore_eos": True})
    assert r.usage.completion_tokens == 16 and r.choices[0].finish_reason == "length"


def test_logprobs_lie_along_the_text(fleet, api):
    r = complete(api, golden("copied text")["ids"], max_tokens=10, logprobs=3)
    l = r.choices[0].logprobs
    assert len(l.tokens) == len(l.token_logprobs) == len(l.top_logprobs) == len(l.text_offset) == r.usage.completion_tokens
    for token, logprob, top, offset in zip(l.tokens, l.token_logprobs, l.top_logprobs, l.text_offset):
        assert top[token] == logprob == max(top.values()) and len(top) == 3
        if not token.startswith("<|"):
            assert r.choices[0].text[offset:].startswith(token)
    parts = {"tokens": [], "text_offset": []}
    for chunk in complete(api, golden("copied text")["ids"], max_tokens=10, logprobs=3, stream=True):
        for c in chunk.choices:
            for name in parts:
                parts[name] += getattr(c.logprobs, name) if c.logprobs else []
    assert parts == {"tokens": l.tokens, "text_offset": l.text_offset}


def test_echo_repeats_the_prompt(fleet, api):
    prompt = golden("copied text")
    plain = complete(api, prompt["text"], max_tokens=5)
    assert complete(api, prompt["text"], max_tokens=5, echo=True).choices[0].text == prompt["text"] + plain.choices[0].text
    assert complete(api, prompt["ids"], max_tokens=5, echo=True).choices[0].text == prompt["text"] + plain.choices[0].text
    streamed = "".join(c.choices[0].text for c in complete(api, prompt["text"], max_tokens=5, echo=True, stream=True))
    assert streamed == prompt["text"] + plain.choices[0].text


def test_stop_strings_cut_the_text(api):
    prompt = golden("copied text")
    text = complete(api, prompt["ids"], max_tokens=12).choices[0].text
    r = complete(api, prompt["ids"], max_tokens=12, stop=[text[4:7]])
    assert r.choices[0].text == text[:text.index(text[4:7])] and r.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("settings,param", [
    ({"suffix": "x"}, "suffix"), ({"echo": True, "logprobs": 1}, "echo"), ({"best_of": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [99999999]}, "prompt"), ({"prompt": ["a"] * 100, "n": 2}, "n"), ({"prompt": ["a"] * 129}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"), ({"n": "two"}, "n"), ({"seed": 1.5}, "seed"), ({"stream": "yes"}, "stream"),
    ({"logit_bias": [1]}, "logit_bias"), ({"extra_body": {"min_tokens": 99}}, "min_tokens"),
    ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"extra_body": {"stop_token_ids": [99999999]}}, "stop_token_ids"),
    ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
])
def test_what_cannot_be_done_is_refused_by_name(api, settings, param):
    with pytest.raises(openai.BadRequestError) as e:
        complete(api, **{"prompt": "Hello", **settings})
    assert e.value.param == param and param in e.value.message and e.value.type == "invalid_request_error"


def test_the_model_is_listed_and_found_by_name(fleet, api):
    models = api.models.list().data
    assert [m.id for m in models] == [MODEL_NAME] and models[0].object == "model" and models[0].max_model_len > 1000
    assert api.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError) as e:
        api.models.retrieve("gpt-17")
    assert e.value.code == "model_not_found"


def test_tokenize_and_detokenize_are_each_others_inverse(fleet):
    text = "Héllo, 世界 <|start|>\n\0 end"
    status, reply = post(fleet, "/tokenize", {"model": MODEL_NAME, "prompt": text, "return_token_strs": True})
    assert status == 200 and reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) and reply["max_model_len"] > 0
    assert "<|start|>" in reply["token_strs"]
    assert post(fleet, "/detokenize", {"tokens": reply["tokens"]})[1] == {"prompt": text}
    ordinary = post(fleet, "/tokenize", {"prompt": text, "parse_special": False})[1]
    assert ordinary["count"] > reply["count"]
    assert post(fleet, "/detokenize", {"tokens": ordinary["tokens"]})[1] == {"prompt": text}


def test_a_long_text_is_tokenized_too(fleet):
    text = "The quick brown fox. " * 20000
    status, reply = post(fleet, "/tokenize", {"prompt": text})
    assert status == 200
    assert post(fleet, "/detokenize", {"tokens": reply["tokens"]})[1]["prompt"] == text


def test_tokenize_renders_a_conversation(fleet):
    messages = [{"role": "user", "content": "Hi"}]
    reply = post(fleet, "/tokenize", {"messages": messages, "reasoning_effort": "low"})[1]
    text = post(fleet, "/detokenize", {"tokens": reply["tokens"]})[1]["prompt"]
    assert "Reasoning: low" in text and text.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")


@pytest.mark.parametrize("path,body,status,param", [
    ("/tokenize", {}, 400, "prompt"), ("/tokenize", {"prompt": 3}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "model": "gpt-17"}, 404, "model"),
    ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ("/detokenize", {}, 400, "tokens"), ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"), ("/detokenize", {"tokens": [1e9]}, 400, "tokens"),
])
def test_bad_tokenizer_requests_name_the_field(fleet, path, body, status, param):
    got, reply = post(fleet, path, body)
    assert got == status and reply["error"]["param"] == param


def test_the_pages_of_health_are_on_the_same_port(fleet):
    assert http_get(fleet.router.http, "/healthz")[0] == 200 and http_get(fleet.router.http, "/readyz")[0] == 200
