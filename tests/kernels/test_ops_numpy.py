"""Single CPU ops on the small checkpoint's weights against the NumPy oracle in float64, on random inputs with outliers."""
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build")
MODEL = ROOT / "tests/tiny/tiny-model"
sys.path.insert(0, str(ROOT / "tests/support/reference"))
import gptoss_numpy as oracle  # noqa: E402

model = oracle.Model(str(MODEL))
cfg = model.cfg
SHAPES = [(1, 0), (1, 127), (1, 128), (1, 300), (5, 0), (37, 120), (130, 0), (64, 200)]   # rows, start


def run(op, layer, n_rows, start, *inputs):
    blob = b"".join(np.ascontiguousarray(a, np.float32).tobytes() for a in inputs)
    out = subprocess.run([str(BUILD / "bin/cpu_ops"), str(MODEL), op, str(layer), str(n_rows), str(start)], input=blob,
                         capture_output=True, check=False)
    assert out.returncode == 0, out.stderr.decode()
    return np.frombuffer(out.stdout, np.float32).astype(np.float64)


def noise(seed, *shape, outliers=True):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if outliers:
        x[..., ::97] *= 30
    return x.astype(np.float32).astype(np.float64)


def close(got, want, bound=2e-6):
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert np.isfinite(got).all() and error < bound, f"relative L2 {error:.3g} of {bound:.3g} allowed"


def split(flat, *shapes):
    parts, at = [], 0
    for shape in shapes:
        n = int(np.prod(shape))
        parts.append(flat[at:at + n].reshape(shape))
        at += n
    assert at == len(flat)
    return parts


def test_embed():
    ids = np.array([0, 5, 2047, 2024, 5])
    got = run("embed", 0, 5, 0, ids).reshape(5, cfg.hidden)
    assert (got == model.w("model.embed_tokens.weight")[ids]).all()


@pytest.mark.parametrize("layer", [0, 3])
def test_rmsnorm(layer):
    x = noise(layer, 9, cfg.hidden)
    x[4] *= 1e-4
    got = run("rmsnorm", layer, 9, 0, x).reshape(x.shape)
    close(got, oracle.rms_norm(x, model.weight(f"model.layers.{layer}.input_layernorm.weight"), cfg.eps))


@pytest.mark.parametrize("n_rows, start", SHAPES + [(3, 70000), (2, 131069)])
def test_qkv_with_yarn(n_rows, start):
    layer, D = 1, cfg.head_dim
    t = noise(n_rows, n_rows, cfg.hidden, outliers=False)
    q, k, v = split(run("qkv", layer, n_rows, start, t), (n_rows, cfg.heads, D), (n_rows, cfg.kv_heads, D), (n_rows, cfg.kv_heads, D))
    pos, p = np.arange(start, start + n_rows), f"model.layers.{layer}.self_attn."
    # the angle is a product of float32 numbers: about 0.005 rad at the end of the context
    bound = 2e-6 + 4e-8 * (start + n_rows)
    close(q, model.rope(model.linear(t, p + "q_proj").reshape(q.shape), pos), bound)
    close(k, model.rope(model.linear(t, p + "k_proj").reshape(k.shape), pos), bound)
    close(v, model.linear(t, p + "v_proj").reshape(v.shape))


@pytest.mark.parametrize("layer", [0, 1], ids=["sliding", "full"])
@pytest.mark.parametrize("n_rows, start", SHAPES)
def test_attention_with_sinks(layer, n_rows, start):
    n, D, rep = start + n_rows, cfg.head_dim, cfg.heads // cfg.kv_heads
    q = noise(1, n_rows, cfg.heads, D, outliers=False) * 2
    k, v = noise(2, n, cfg.kv_heads, D, outliers=False), noise(3, n, cfg.kv_heads, D)
    got = run("attention", layer, n_rows, start, q, k, v).reshape(q.shape)
    mask = oracle.visible(np.arange(start, n), np.arange(n), cfg.window if cfg.sliding[layer] else 0)
    kh, vh = (np.repeat(a.transpose(1, 0, 2), rep, 0) for a in (k, v))
    sink = model.weight(f"model.layers.{layer}.self_attn.sinks")
    want = oracle.sink_attention(q.transpose(1, 0, 2), kh, vh, sink, mask, D ** -0.5)
    close(got, want.transpose(1, 0, 2))


def test_o_proj_residual_and_norm():
    layer, T = 2, 11
    o, x = noise(4, T, cfg.heads * cfg.head_dim), noise(5, T, cfg.hidden)
    got_x, got_t = split(run("o_proj", layer, T, 0, o, x), (T, cfg.hidden), (T, cfg.hidden))
    want = x + model.linear(o, f"model.layers.{layer}.self_attn.o_proj")
    close(got_x, want)
    close(got_t, oracle.rms_norm(want, model.weight(f"model.layers.{layer}.post_attention_layernorm.weight"), cfg.eps))


@pytest.mark.parametrize("n_rows", [1, 3, 40])
@pytest.mark.parametrize("layer", [0, 5])
def test_moe(layer, n_rows):
    t, x = noise(6 + layer, n_rows, cfg.hidden) * 3, noise(7, n_rows, cfg.hidden)   # large enough to meet the clamps
    ids, weights, got = split(run("moe", layer, n_rows, 0, t, x), (n_rows, cfg.topk), (n_rows, cfg.topk), (n_rows, cfg.hidden))
    want, want_ids, want_weights = model.moe(layer, t)
    assert (ids == want_ids).all()
    close(weights, want_weights, 1e-5)
    close(got, x + want, 1e-5)


def test_lm_head():
    t = noise(8, 4, cfg.hidden)
    close(run("lm_head", 0, 4, 0, t).reshape(4, cfg.vocab), model.logits(t))
