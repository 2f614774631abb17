"""The cluster answers: golden continuations, chat, text in and out, log-probabilities, sampling, through the public gRPC API."""
import base64
import math
import threading

import grpc
import numpy as np
import pytest

from conftest import (GOLDENS, MODEL, Client, collect, common_pb2, expect_golden, free_pages, golden, health_pb2, inference_pb2,
                      wait_until, worker_grpc, worker_pb2)

STOP, LENGTH = common_pb2.FINISH_STOP, common_pb2.FINISH_LENGTH
SYSTEM = ("You are ChatGPT, a large language model trained by OpenAI.")


@pytest.mark.parametrize("prompt", GOLDENS["prompts"], ids=lambda p: p["name"])
def test_greedy_continuation_is_the_golden_one(client, prompt):
    """bf16 KV: equal wherever the golden margin exceeds 0.05."""
    n = len(prompt["greedy"])
    out = client.generate(tokens=prompt["ids"], max_tokens=n)
    compared = expect_golden(out.ids, prompt, 0.05)
    assert compared >= 1 or prompt["greedy_margin"][0] <= 0.05
    if compared == n:
        assert out.ids == prompt["greedy"]
        assert out.finish == (STOP if prompt["stopped"] else LENGTH)
    assert out.usage.prompt_tokens == len(prompt["ids"])
    assert out.usage.completion_tokens == len(out.ids)
    assert out.timing.ttft_us > 0 and out.timing.total_us >= out.timing.ttft_us


def test_f32_kv_is_closer_still(new_fleet):
    fleet = new_fleet(prefill_flags=("--kv-dtype", "f32"), decode_flags=("--kv-dtype", "f32"))
    client = fleet.client()
    for prompt in GOLDENS["prompts"]:
        out = client.generate(tokens=prompt["ids"], max_tokens=len(prompt["greedy"]), logprobs=20)
        expect_golden(out.ids, prompt, 1e-3)
        logits = np.frombuffer(base64.b64decode(prompt["logits_f32_base64"]), "<f4").astype(np.float64)
        logprobs = logits - (logits.max() + math.log(np.exp(logits - logits.max()).sum()))
        top = out.logprobs[0].top
        assert len(top) == 20
        for (want_id, want_logit), entry, following in zip(prompt["top20"], top, prompt["top20"][1:]):
            if want_logit - following[1] > 1e-3:
                assert entry.id == want_id
            assert abs(entry.logprob - logprobs[entry.id]) < 2e-3
        assert out.logprobs[0].chosen.id == out.ids[0]
    client.close()


def test_fp8_kv_takes_half_the_bytes_of_full_layers_and_gives_the_same_text_where_it_is_sure(new_fleet):
    fleet = new_fleet(prefill_flags=("--kv-dtype", "e4m3"), decode_flags=("--kv-dtype", "e4m3"))
    client = fleet.client()
    n_same = 0
    for prompt in GOLDENS["prompts"]:
        out = client.generate(tokens=prompt["ids"], max_tokens=len(prompt["greedy"]))
        expect_golden(out.ids, prompt, 6)
        n_same += out.ids == prompt["greedy"]
    assert n_same > len(GOLDENS["prompts"]) / 2
    client.close()


def test_many_at_once_give_what_each_gives_alone(client, fleet):
    prompts = [p for p in GOLDENS["prompts"] if p["n"] < 500]
    alone = [client.generate(tokens=p["ids"], max_tokens=24, temperature=1.0, sampling={"seed": 7}).ids for p in prompts]
    calls = [client.start(tokens=p["ids"], max_tokens=24, temperature=1.0, sampling={"seed": 7}) for p in prompts]
    together = [None] * len(calls)

    def read(i):
        together[i] = collect(calls[i]).ids

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert together == alone


def test_text_in_and_text_out(client):
    prompt = golden("copied text")
    ids = list(client.stub.Tokenize(inference_pb2.TokenizeRequest(text=prompt["text"].encode(), parse_special=True)).token_ids)
    assert ids == prompt["ids"]
    out = client.generate(text=prompt["text"], parse_special=True, max_tokens=len(prompt["greedy"]))
    assert expect_golden(out.ids, prompt, 0.05) > 3
    plain = client.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=out.ids))
    assert out.text == plain.text
    raw = client.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=out.ids, keep_special=True))
    assert raw.text.decode() == prompt["greedy_text"]


def test_special_strings_in_ordinary_text_stay_text(client):
    ids = list(client.stub.Tokenize(inference_pb2.TokenizeRequest(text=b"<|end|>")).token_ids)
    special = list(client.stub.Tokenize(inference_pb2.TokenizeRequest(text=b"<|end|>", parse_special=True)).token_ids)
    assert special == [2025] and 2025 not in ids and len(ids) > 1


def test_text_events_hold_whole_characters(client):
    prompt = golden("copied text")
    for seed in range(6):
        out = client.generate(tokens=prompt["ids"], max_tokens=60, temperature=3.0, sampling={"seed": seed}, ignore_eos=True)
        for event in out.events:
            event.text.decode("utf-8")      # raises on a cut character
        assert out.text == client.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=out.ids)).text


def chat(client, *messages, effort="medium", **stop):
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role=r, content=c.encode()) for r, c in messages], reasoning_effort=effort,
        current_date="2025-11-03", sampling=common_pb2.Sampling(temperature=0), stop=common_pb2.Stop(**stop))
    said = {}
    last = None
    for event in client.stub.Chat(request, timeout=60):
        for delta in event.deltas:
            said[delta.channel] = said.get(delta.channel, b"") + delta.text
        last = event
    return said.get(inference_pb2.CHANNEL_REASONING, b"").decode(), said.get(inference_pb2.CHANNEL_FINAL, b"").decode(), last


def test_chat_reasons_apart_from_the_answer(client):
    reasoning, final, last = chat(client, ("user", "What is 47 + 38?"))
    assert "85" in final and "<|" not in final
    assert reasoning and "<|" not in reasoning
    assert last.finish_reason == STOP and last.reasoning_tokens > 0
    assert last.usage.completion_tokens > last.reasoning_tokens
    reasoning, final, last = chat(client, ("user", "What is 12 + 30?"), effort="low")
    assert "42" in final and reasoning == "" and last.reasoning_tokens == 0


def test_chat_remembers_and_obeys(client):
    _, final, _ = chat(client, ("user", "My name is Alice."), ("assistant", "Nice to meet you, Alice."), ("user", "What is my name?"))
    assert "Alice" in final
    _, final, _ = chat(client, ("developer", "Answer in upper case."), ("user", "What is the capital of France?"))
    assert "PARIS" in final


def test_seed_decides_the_draws(client):
    prompt = golden("die, before the number")

    def roll(**sampling):
        return client.generate(tokens=prompt["ids"], max_tokens=1, temperature=1.0, sampling=sampling)

    assert [roll(seed=s).ids for s in range(8)] == [roll(seed=s).ids for s in range(8)]
    outs = [roll() for _ in range(24)]
    assert len({o.seed for o in outs}) == 24, "an unset seed is drawn and reported"
    assert len({tuple(o.ids) for o in outs}) > 1
    again = roll(seed=outs[0].seed)
    assert again.ids == outs[0].ids


def test_top_k_one_is_greedy_and_top_p_tiny_too(client):
    prompt = golden("capital, high effort")
    want = client.generate(tokens=prompt["ids"], max_tokens=20).ids
    assert client.generate(tokens=prompt["ids"], max_tokens=20, temperature=1.0, sampling={"top_k": 1, "seed": 3}).ids == want
    assert client.generate(tokens=prompt["ids"], max_tokens=20, temperature=1.0, sampling={"top_p": 1e-6, "seed": 3}).ids == want


def test_stop_ids_and_limits(client, fleet):
    prompt = golden("counting")
    full = client.generate(tokens=prompt["ids"], max_tokens=64)
    stop_at = full.ids[5]
    cut = client.generate(tokens=prompt["ids"], max_tokens=64, stop_ids=[stop_at])
    assert cut.ids == full.ids[:full.ids.index(stop_at) + 1] and cut.finish == STOP
    one = client.generate(tokens=prompt["ids"], max_tokens=1)
    assert one.ids == full.ids[:1] and one.finish == LENGTH
    first = client.generate(tokens=prompt["ids"], max_tokens=9, stop_ids=[full.ids[0]])
    assert first.ids == full.ids[:1] and first.finish == STOP
    forced = client.generate(tokens=prompt["ids"], max_tokens=100, ignore_eos=True)
    assert len(forced.ids) == 100 and forced.finish == LENGTH
    late = client.generate(tokens=prompt["ids"], max_tokens=9, stop_ids=[full.ids[0]], min_tokens=3)
    assert len(late.ids) >= 3 and full.ids[0] not in late.ids[:2]


def test_logprobs_are_of_the_raw_logits(client):
    prompt = golden("greeting")
    cold = client.generate(tokens=prompt["ids"], max_tokens=5, logprobs=5)
    warm = client.generate(tokens=prompt["ids"], max_tokens=1, logprobs=5, temperature=2.0, sampling={"top_k": 1})
    assert [(t.id, t.logprob) for t in warm.logprobs[0].top] == [(t.id, t.logprob) for t in cold.logprobs[0].top]
    assert len(cold.logprobs) == len(cold.ids)
    for entry, token, want in zip(cold.logprobs, cold.ids, prompt["greedy_logprob"]):
        assert entry.chosen.id == token == entry.top[0].id
        assert abs(entry.chosen.logprob - want) < 0.05
        assert [t.logprob for t in entry.top] == sorted((t.logprob for t in entry.top), reverse=True)


def test_timing_names_workers_and_transport(client):
    out = client.generate(tokens=golden("counting")["ids"], max_tokens=8)
    t = out.timing
    assert t.prefill_worker == "prefill-0" and t.decode_worker == "decode-0"
    assert t.transport not in ("", "?") and t.handoff_bytes > 0 and t.prefill_us > 0 and t.decode_us > 0


def test_models_health_and_worker_status(client, fleet):
    models = client.stub.ListModels(inference_pb2.ListModelsRequest()).models
    assert [m.id for m in models] == [MODEL.name]
    assert models[0].vocab_size in (2037, 2048) and models[0].max_context_tokens > 4096
    for service in ("", "tandem.v1.Inference"):
        assert client.health.Check(health_pb2.HealthCheckRequest(service=service)).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as error:
        client.health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    for worker in fleet.prefill + fleet.decode:
        with grpc.insecure_channel(worker.rpc) as channel:
            assert "{" in worker_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest()).state_json


def test_cancel_and_deadline_free_everything(client, fleet):
    start = free_pages(fleet.decode[0]), free_pages(fleet.prefill[0])
    prompt = golden("text of 1900 tokens")["ids"]
    for n_events in (0, 1, 3):
        call = client.start(tokens=prompt, max_tokens=2000, ignore_eos=True)
        for _ in range(n_events):
            next(call)
        call.cancel()
    with pytest.raises(grpc.RpcError) as error:
        client.generate(tokens=prompt, max_tokens=100000, ignore_eos=True, timeout=1.0)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until("all pages are free again", lambda: (free_pages(fleet.decode[0]), free_pages(fleet.prefill[0])) == start, 10)
    assert client.generate(tokens=golden("counting")["ids"], max_tokens=4).ids


def test_a_slow_reader_loses_its_own_request_only(fleet):
    """The router's queue for one client is bounded; others go on."""
    slow, other = Client(fleet.router.rpc), Client(fleet.router.rpc)
    call = slow.start(tokens=golden("counting")["ids"], max_tokens=400, ignore_eos=True, logprobs=20)
    next(call)
    for _ in range(3):
        assert len(other.generate(tokens=golden("counting")["ids"], max_tokens=20, ignore_eos=True).ids) == 20
    rest = collect(call)
    assert rest.finish == LENGTH, "a reader that is merely late gets everything"
    slow.close()
    other.close()
