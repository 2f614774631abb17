"""Bad checkpoints and bad requests: an error that names the culprit, no crash, no leaked page."""
import json
import math
import shutil
import signal
import struct

import grpc
import pytest

from conftest import MODEL, BIN, common_pb2, free_pages, golden, inference_pb2, wait_until
from test_daemons import run

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]


def refused(call, code=INVALID):
    with pytest.raises(grpc.RpcError) as error:
        for _ in call:
            pass
    assert error.value.code() == code, error.value
    return error.value.details()


@pytest.mark.parametrize("settings, field", [
    (dict(tokens=[5, 2048, 7]), "token_ids"),
    (dict(tokens=[2**32 - 1]), "token_ids"),
    (dict(tokens=[]), "prompt"),
    (dict(text=""), "prompt"),
    (dict(), "prompt"),
    (dict(text=b"\xff\xfe"), "text"),
    (dict(tokens=[1], temperature=math.nan), "temperature"),
    (dict(tokens=[1], temperature=-1), "temperature"),
    (dict(tokens=[1], temperature=math.inf), "temperature"),
    (dict(tokens=[1], sampling=dict(top_p=0.0)), "top_p"),
    (dict(tokens=[1], sampling=dict(top_p=1.5)), "top_p"),
    (dict(tokens=[1], sampling=dict(top_p=math.nan)), "top_p"),
    (dict(tokens=[1], sampling=dict(min_p=-0.1)), "min_p"),
    (dict(tokens=[1], sampling=dict(repetition_penalty=0.0)), "repetition_penalty"),
    (dict(tokens=[1], sampling=dict(presence_penalty=math.nan)), "presence_penalty"),
    (dict(tokens=[1], sampling=dict(frequency_penalty=1e9)), "frequency_penalty"),
    (dict(tokens=[1], sampling=dict(logit_bias={99999: 1.0})), "logit_bias"),
    (dict(tokens=[1], logprobs=21), "n_logprobs"),
    (dict(tokens=[1], stop_ids=[1 << 30]), "token_ids"),
    (dict(tokens=[1], max_tokens=2, min_tokens=3), "min_tokens"),
])
def test_bad_requests_are_refused_by_field(client, fleet, settings, field):
    start = free_pages(fleet.decode[0]), free_pages(fleet.prefill[0])
    assert field in refused(client.start(**settings))
    assert (free_pages(fleet.decode[0]), free_pages(fleet.prefill[0])) == start
    assert client.generate(tokens=[5, 6, 7], max_tokens=2, ignore_eos=True).ids


def test_an_unknown_model_is_not_found(client):
    assert "nothing-like-it" in refused(client.start(tokens=[1], model="nothing-like-it"), grpc.StatusCode.NOT_FOUND)
    assert client.generate(tokens=[1], model=MODEL.name, max_tokens=1).ids


def test_a_prompt_longer_than_the_context_is_refused(client):
    """INVALID above what any worker takes; what only some have memory for is RESOURCE_EXHAUSTED. Both name the numbers."""
    assert str(CONTEXT + 1) in refused(client.start(tokens=[5] * (CONTEXT + 1), max_tokens=1))
    held = client.stub.ListModels(inference_pb2.ListModelsRequest()).models[0].max_context_tokens
    assert 4096 < held < CONTEXT
    details = refused(client.start(tokens=[5] * (held + 1), max_tokens=1), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert str(held) in details


def test_a_prompt_larger_than_all_pages_is_refused(new_fleet):
    """Workers announce the context that their KV memory holds: beyond it no retry can help."""
    fleet = new_fleet(prefill_flags=("--kv-bytes", "4M"), decode_flags=("--kv-bytes", "4M"))
    client = fleet.client()
    refused(client.start(tokens=[5] * 5000, max_tokens=1))
    for prompt_tokens in (10, 200):
        assert client.generate(tokens=[5] * prompt_tokens, max_tokens=2, ignore_eos=True).ids
    client.close()


def test_workers_of_different_memory_serve_what_fits_all(new_fleet):
    fleet = new_fleet(prefill_flags=("--kv-bytes", "64M"), decode_flags=("--kv-bytes", "4M"))
    client = fleet.client()
    refused(client.start(tokens=[5] * 5000, max_tokens=1), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert client.generate(tokens=[5] * 10, max_tokens=2, ignore_eos=True).ids
    client.close()


def test_oversize_and_undecodable_messages(fleet):
    with grpc.insecure_channel(fleet.router.rpc) as channel:
        raw = channel.unary_stream("/tandem.v1.Inference/Generate", request_serializer=lambda b: b, response_deserializer=lambda b: b)
        for blob, codes in [(b"\xff" * 100, {INVALID}), (b"\x12\xff\xff\xff\xff\x0f", {INVALID}),
                            (b"\0" * (5 << 20), {grpc.StatusCode.RESOURCE_EXHAUSTED}),
                            (b"\x2a\x00" * (1 << 19), {INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED})]:
            with pytest.raises(grpc.RpcError) as error:
                list(raw(blob))
            assert error.value.code() in codes, error.value
        with pytest.raises(grpc.RpcError) as error:
            list(channel.unary_stream("/tandem.v1.Inference/Nothing")(b""))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert fleet.router.process.poll() is None


# ---- checkpoints ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def broken(tmp_path):
    """A private copy of the checkpoint to damage."""
    target = tmp_path / "broken-model"
    shutil.copytree(MODEL, target)
    for path in target.iterdir():
        path.chmod(0o644)
    return target


def must_refuse(model, *culprits, roles=("prefill", "decode")):
    for role in roles:
        out = run(role, "--model", str(model), *(["--router", "127.0.0.1:1"] if role != "router" else []))
        assert out.returncode > 0, f"{role} ended with {out.returncode}: {out.stderr[-500:]}"
        for culprit in culprits:
            assert culprit in out.stderr, f"{role}: {culprit!r} not in: {out.stderr[-500:]}"


def edit_header(path, change):
    blob = path.read_bytes()
    n = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8:8 + n])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + n:])


SHARD = "model-00001-of-00002.safetensors"
NORM = "model.layers.0.input_layernorm.weight"


def test_truncated_shard(broken):
    blob = (broken / SHARD).read_bytes()
    for size in (0, 5, 100, len(blob) - 1):
        (broken / SHARD).write_bytes(blob[:size])
        must_refuse(broken, SHARD, roles=("decode",))


def test_lying_headers(broken):
    original = (broken / SHARD).read_bytes()
    header = json.loads(original[8:8 + struct.unpack("<Q", original[:8])[0]])
    name = next(k for k in header if "q_proj.weight" in k)

    def with_change(change, *culprits):
        (broken / SHARD).write_bytes(original)
        edit_header(broken / SHARD, change)
        must_refuse(broken, SHARD, *culprits, roles=("decode",))

    with_change(lambda h: h[name].update(data_offsets=[0, 1 << 60]), name)
    with_change(lambda h: h[name].update(data_offsets=[-1, 5]), name)
    with_change(lambda h: h[name].update(data_offsets=[10, 5]), name)
    with_change(lambda h: h[name].update(shape=[1 << 40, 1 << 40]), name)
    with_change(lambda h: h[name].update(shape=[3, -3]), name)
    with_change(lambda h: h[name].update(dtype="I64"), name)
    with_change(lambda h: h[name].update(dtype=7), name)
    with_change(lambda h: h.update({name: "no object"}), name)
    other = next(k for k in header if k != name and "proj.weight" in k)
    with_change(lambda h: h[name].update(data_offsets=h[other]["data_offsets"]))
    for blob in (struct.pack("<Q", 1 << 62) + original[8:], struct.pack("<Q", 4) + b"nope" + original[8:], b"\xff" * 64):
        (broken / SHARD).write_bytes(blob)
        must_refuse(broken, SHARD, roles=("decode",))


def test_missing_tensor_and_missing_file(broken):
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    shard = index["weight_map"][NORM]
    edit_header(broken / shard, lambda h: h.pop(NORM))
    must_refuse(broken, NORM)
    (broken / shard).unlink()
    must_refuse(broken, shard)


@pytest.mark.parametrize("change, culprit", [
    (dict(hidden_size=320), "config.json calls for"),
    (dict(num_local_experts=16), "config.json calls for"),
    (dict(num_hidden_layers=7), "layer"),
    (dict(num_hidden_layers=0), "num_hidden_layers"),
    (dict(num_attention_heads=-1), "num_attention_heads"),
    (dict(head_dim="64"), "head_dim"),
    (dict(vocab_size=1 << 40), "vocab_size"),
    (dict(num_experts_per_tok=99), "num_experts_per_tok"),
    (dict(layer_types=["sliding_attention"]), "layer_types"),
    (dict(rope_scaling=None), "rope"),
    (dict(model_type="llama"), "model_type"),
    (dict(sliding_window=0), "sliding_window"),
    (dict(rms_norm_eps="tiny"), "rms_norm_eps"),
])
def test_config_that_does_not_fit(broken, change, culprit):
    config = json.loads((broken / "config.json").read_text())
    config.update(change)
    (broken / "config.json").write_text(json.dumps(config))
    must_refuse(broken, culprit, roles=("decode",))


def test_config_that_is_no_json(broken):
    (broken / "config.json").write_text("{")
    must_refuse(broken, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model":{}}', '{"model":{"type":"WordPiece"}}', "\0" * 100])
def test_corrupt_tokenizer(broken, text):
    (broken / "tokenizer.json").write_text(text)
    must_refuse(broken, "tokenizer.json", roles=("router",))


def test_tokenizer_details(broken):
    original = json.loads((broken / "tokenizer.json").read_text())

    def with_change(change, *culprits):
        copy = json.loads(json.dumps(original))
        change(copy)
        (broken / "tokenizer.json").write_text(json.dumps(copy))
        must_refuse(broken, "tokenizer.json", *culprits, roles=("router",))

    with_change(lambda t: t.update(normalizer={"type": "NFC"}), "normalizer")
    with_change(lambda t: t["model"]["vocab"].update({"zzzzzz": 5}), "vocab")
    with_change(lambda t: t["pre_tokenizer"].update(type="Whitespace"), "pre_tokenizer")
    with_change(lambda t: t["model"].update(merges=[["nope", "nope"]]), "merges")
    with_change(lambda t: t["added_tokens"][0].update(id=3), "id 3")


