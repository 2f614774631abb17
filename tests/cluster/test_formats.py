"""tandemctl render and parse: prompts and model output as JSON, without a cluster."""
import json
import os
import pathlib
import random
import re
import subprocess

import pytest

import harmony_rules
from conftest import BIN, MODEL

CASES_FILE = pathlib.Path(__file__).resolve().parents[1] / "cases" / "harmony-cases.json"
CASES = json.loads(CASES_FILE.read_text())
RELEASED = os.environ.get("TANDEM_GPTOSS_TOKENIZER")


def ctl(*args, stdin=None):
    return subprocess.run([str(BIN / "tandemctl"), *map(str, args)], input=stdin, capture_output=True, text=True, timeout=60)


def lines(*args, stdin=None):
    done = ctl(*args, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def one(*args, stdin=None):
    out = lines(*args, stdin=stdin)
    assert len(out) == 1
    return out[0]


def test_every_case_is_rendered_as_its_text():
    out = {line["name"]: line["text"] for line in lines("render", "--model", MODEL, CASES_FILE)}
    assert out == {c["name"]: c["text"] for c in CASES["render"] + CASES["chat"]}


@pytest.mark.skipif(not RELEASED, reason="TANDEM_GPTOSS_TOKENIZER names no released tokenizer.json")
def test_every_case_gives_the_ids_and_results_of_the_released_vocabulary():
    for command, sections in (("render", ("render", "chat")), ("parse", ("parse",))):
        out = lines(command, "--model", RELEASED, "--check", CASES_FILE)
        assert [line["name"] for line in out] == [c["name"] for s in sections for c in CASES[s]]
        assert [line["name"] for line in out if line["differs"]] == []


def test_one_case_alone_is_enough(tmp_path):
    case = CASES["chat"][3]
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    assert one("render", "--model", MODEL, path)["text"] == case["text"]
    assert one("render", "--model", MODEL, CASES_FILE, "--name", case["name"])["text"] == case["text"]


def test_a_bare_request_is_rendered_with_the_date_given():
    case = CASES["chat"][3]
    out = one("render", "--model", MODEL, "--date", case["date"], "-", stdin=json.dumps(case["request"]))
    assert out["text"] == case["text"]


def test_a_request_of_responses_is_rendered_too():
    chat = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
                         {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                         {"role": "tool", "tool_call_id": "c", "content": "4"}], "reasoning_effort": "low",
            "tools": [{"type": "function", "function": {"name": "f"}}]}
    responses = {"instructions": "Be brief.", "input": [
        {"role": "user", "content": "Weather?"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"}], "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "f"}]}
    a, b = (one("render", "--model", MODEL, "-", stdin=json.dumps(r)) for r in (chat, responses))
    assert a["ids"] == b["ids"] and "type f = () => any;" in a["text"] and "Reasoning: low" in a["text"]
    assert one("render", "--model", MODEL, "-", stdin=json.dumps({"request": responses}))["ids"] == a["ids"]


def test_a_call_that_is_demanded_has_begun():
    request = {"messages": [{"role": "user", "content": "Hi"}], "tools": [
        {"type": "function", "function": {"name": n}} for n in ("f", "g")]}
    free = one("render", "--model", MODEL, "-", stdin=json.dumps(request))["text"]
    for choice in ({"type": "function", "function": {"name": "g"}}, "required"):
        text = one("render", "--model", MODEL, "-", stdin=json.dumps({**request, "tool_choice": choice}))["text"]
        assert text.startswith(free + "<|channel|>commentary to=functions")
        assert text.endswith(".g <|constrain|>json<|message|>") == (choice != "required")


def test_a_prompt_goes_to_ids_and_back():
    out = one("render", "--model", MODEL, "-", stdin=json.dumps({"messages": [{"role": "user", "content": "<|end|> is a token"}]}))
    back = one("detokenize", "--model", MODEL, "--special", "--token-ids", ",".join(map(str, out["ids"])))
    assert back["text"] == out["text"]
    ends = one("tokenize", "--model", MODEL, "--special", "--text", "<|end|>")["token_ids"]
    assert out["ids"].count(ends[0]) == 2  # of the system and the user message; the one that the user wrote is text


def test_parse_reads_token_ids_and_shows_messages_stream_result_and_events():
    text = '<|channel|>analysis to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>'
    ids = one("tokenize", "--model", MODEL, "--special", "--text", text)["token_ids"]
    out = one("parse", "--model", MODEL, "--token-ids", ",".join(map(str, ids)), "--tools", "f")
    assert out["text"] == text and out["ids"] == ids and out["tools"] == ["f"] and out["stopped_by"] == "stop"
    assert out["messages"] == [{"channel": "analysis", "recipient": "functions.f", "content_type": "<|constrain|>json",
                                "content": '{"a":1}', "complete": True}]
    assert out["chat"] == {"reasoning": None, "content": None, "finish_reason": "tool_calls",
                           "tool_calls": [{"name": "f", "arguments": '{"a":1}'}]}
    events = [e["event"] for e in out["events"]]
    assert events[0] == "message_start" and events[-2:] == ["message_end", "turn_end"] and set(events[1:-2]) == {"text"}
    assert one("parse", "--model", MODEL, "--text", text, "--tools", "f") == out


def test_parse_takes_cases_and_says_what_differs(tmp_path):
    case = dict(next(c for c in CASES["parse"] if c["name"] == "cut inside arguments"))
    case["ids"] = one("tokenize", "--model", MODEL, "--special", "--text", case["text"])["token_ids"]
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    out = one("parse", "--model", MODEL, "--check", path)
    assert out["differs"] == [] and out["chat"]["finish_reason"] == "length"
    case["hidden"] = 3
    path.write_text(json.dumps([case]))
    done = ctl("parse", "--model", MODEL, "--check", path)
    assert done.returncode == 1 and json.loads(done.stdout)["differs"] == ["hidden"]


@pytest.mark.parametrize("args, stdin, said", [
    (["render", "-"], "{}", "--model"),
    (["render", "--model", MODEL], None, "CASE.json"),
    (["render", "--model", MODEL, "-"], "{", "line 1"),
    (["render", "--model", MODEL, "/nowhere.json"], None, "/nowhere.json"),
    (["render", "--model", MODEL, "-"], "{}", "messages"),
    (["render", "--model", MODEL, "-"], "[]", "no cases"),
    (["render", "--model", MODEL, "--name", "x", "-"], '{"messages": []}', '"x"'),
    (["render", "--model", MODEL, "-"], '{"name": "n", "request": {"messages": [{"role": "user"}]}}', 'case "n": messages[0].content'),
    (["render", "--model", MODEL, "-"], '{"mode": "song", "messages": []}', "mode"),
    (["render", "--model", MODEL, "-"], '{"mode": "completion", "messages": [{"role": "user"}]}', "messages[0].content"),
    (["render", "--model", MODEL, "-"], '{"mode": "completion", "messages": [{"content": "a"}]}', "messages[0].role"),
    (["render", "--model", MODEL, "-"], '{"mode": "completion", "messages": [{"role": "user", "content": [{"type": "x"}]}]}', "messages[0].content"),
    (["render", "--model", MODEL, "--format", "song", "-"], "{}", "song"),
    (["parse", "--model", MODEL], None, "--token-ids"),
    (["parse", "--model", MODEL, "--token-ids", "1", "--text", "a"], None, "one of"),
    (["parse", "--model", MODEL, "--token-ids", "1,x"], None, "x"),
    (["parse", "--model", MODEL, "--token-ids", "1", "--stopped-by", "luck"], None, "stopped_by"),
    (["parse", "--model", MODEL, "-"], '{"ids": [1, -1]}', "ids[1]"),
    (["parse", "--model", MODEL, "-"], '{"ids": [1], "tools": [1]}', "tools[0]"),
    (["parse", "--model", MODEL, "-"], '{"ids": [1], "tools": {}}', "tools"),
])
def test_bad_input_is_named(args, stdin, said):
    done = ctl(*args, stdin=stdin)
    assert done.returncode in (1, 2) and said in done.stderr, done.stderr
    assert done.stdout == ""


# ---- the rules -----------------------------------------------------------------------------------------------------------

SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>", "<|endoftext|>"]
PIECES = ["assistant", "user", "tool", ":x", " to=functions.f", " to=f", " to=", " to=all", " to=assistant", "functions.g", "python",
          "analysis", "commentary", "final", "finally", "reply", " json", "json", " code", " ", "\n", "{", "}", '{"a": 1}', "Sure.", "So",
          " then", "<", "|", "é", "\u00a0", "\u3000"]


def token_ids():
    """{piece: its ids}; the last ones hold parts of a character."""
    ids = {p: one("tokenize", "--model", MODEL, "--special", "--text", p)["token_ids"] for p in PIECES + SPECIAL}
    for i in one("tokenize", "--model", MODEL, "--text", "\U0001f9ea")["token_ids"]:
        ids[bytes.fromhex(one("detokenize", "--model", MODEL, "--token-ids", i)["bytes_hex"])] = [i]
    return ids


def test_the_cases_follow_the_rules():
    """The second implementation is worth something: it reproduces every case whose text says all of it."""
    for c in CASES["parse"]:
        if c["text"] and "\ufffd" not in c["text"]:
            tokens = [t if t in SPECIAL else t.encode() for t in re.split(r"(<\|[a-z]+\|>)", c["text"]) if t]
            assert harmony_rules.read(tokens, c["tools"], c["stopped_by"]) == {k: c[k] for k in ("messages", "hidden", "stream", "chat")}, c["name"]


def test_random_streams_are_read_by_the_rules(tmp_path):
    ids, rng = token_ids(), random.Random(5)
    specials, others = [[ids[s], s] for s in SPECIAL], [[v, k if isinstance(k, bytes) else k.encode()] for k, v in ids.items() if k not in SPECIAL]
    cases, expected = [], []
    for i in range(4000):
        stream = [rng.choice(specials if rng.random() < 0.4 else others) for _ in range(rng.randrange(30))]
        stopped_by, tools = rng.choice(["stop", "length"]), rng.choice([[], ["f"], ["f", "g"]])
        cases.append({"name": str(i), "ids": [t for piece in stream for t in piece[0]], "stopped_by": stopped_by, "tools": tools})
        expected.append(harmony_rules.read([piece[1] for piece in stream], tools, stopped_by))
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    for case, out, want in zip(cases, lines("parse", "--model", MODEL, path), expected):
        got = {k: out[k] for k in want}
        assert got == want, out["text"] or case["ids"]
