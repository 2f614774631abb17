#!/usr/bin/env python3
"""The same shapes through PyTorch: its attention back ends (no sinks there), cuBLAS, its FP8 grouped GEMM. Times with CUDA
graphs, cold L2. One argument: "experts" for the experts' peers alone, nothing or "" for all."""
import sys

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel


def graph_time(call, n_turns, n):
    """Median seconds of call(turn), replayed as a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(n_turns):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(n):
                call(i % n_turns)
        times = []
        for k in range(11):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            torch.cuda.synchronize()
            if k > 1:
                times.append(a.elapsed_time(b) / n * 1e-3)
    return sorted(times)[len(times) // 2]


@triton.jit
def read(x, y, n, BLOCK: tl.constexpr):
    """Reads all of x, adds up, writes a number a program: the least that any product with these bytes must do."""
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for at in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        total += tl.load(x + i, mask=i < n, other=0)
    tl.store(y + tl.program_id(0), tl.sum(total, 0))


def read_only():
    for name, n_bytes in (("QKV", 5120 * 2880 * 2), ("O", 2880 * 4096 * 2), ("LM head", 201088 * 2880 * 2)):
        turns = max(1, (256 << 20) // n_bytes + 1)
        xs = [torch.randint(1 << 30, (n_bytes // 4,), device="cuda", dtype=torch.int32) for _ in range(turns)]
        y = torch.empty(8192, device="cuda", dtype=torch.int32)
        best = min((graph_time(lambda i: read[(grid,)](xs[i], y, n_bytes // 4, BLOCK=block, num_warps=8), turns, turns * 3),
                    grid, block)
                   for grid in (132, 264, 528, 1056) for block in (2048, 4096, 8192))
        print(f"peer: reading {name}'s bytes: {best[0] * 1e6:.2f} us, {n_bytes / best[0] * 1e-12:.2f} TB/s "
              f"(grid {best[1]}, block {best[2]})")


def timed(name, flops, call, n_turns):
    try:
        s = graph_time(call, n_turns, max(n_turns, 4))
    except RuntimeError as e:
        print(f"peer: {name}: {str(e).splitlines()[0]}")
        return None
    print(f"peer: {name}: {s * 1e6:.1f} us, {flops / s * 1e-12:.0f} TFLOP/s", flush=True)
    return s


def fp8(*shape):
    """Random E4M3, no zeros to speak of; in pieces, since there is no generator for the type."""
    out = torch.empty(*shape, device="cuda", dtype=torch.float8_e4m3fn)
    for part in out.view(-1).split(1 << 26):
        part.copy_(torch.randn(part.numel(), device="cuda", dtype=torch.float16) * 8)
    return out


def ends(n_rows, n_experts, is_even):
    """Where each expert's rows end among 4 n_rows: even, or as random routing leaves them."""
    slots = 4 * n_rows
    if is_even:
        counts = torch.full((n_experts,), slots // n_experts)
    else:
        counts = torch.bincount(torch.rand(n_rows, n_experts).topk(4, dim=1).indices.flatten(), minlength=n_experts)
        counts = counts // 16 * 16  # it wants multiples
        counts[0] += slots - counts.sum()
    return counts.cumsum(0).to("cuda", torch.int32)


def experts():
    """One MoE layer's two products: dense of equal size through cuBLASLt, grouped through PyTorch with a scale a row."""
    up, down = (5760, 2880), (2880, 2880)
    ones = torch.ones(4 * 8192, 1, device="cuda")
    for n_rows in (2048, 8192):
        total = 0.0
        for n_out, n_in in (up, down):
            x, ws = fp8(4 * n_rows, n_in), [fp8(n_out, n_in) for _ in range(16)]
            one, flops = torch.ones((), device="cuda"), 2 * 4 * n_rows * n_out * n_in
            s = timed(f"cuBLASLt FP8 dense, {4 * n_rows} rows, {n_in} -> {n_out}, tensor-wise scales", flops,
                      lambda i: torch._scaled_mm(x, ws[i].t(), one, one, out_dtype=torch.bfloat16), len(ws))
            total += s or 0
            cols = torch.ones(1, n_out, device="cuda")
            timed(f"cuBLASLt FP8 dense, {4 * n_rows} rows, {n_in} -> {n_out}, row-wise scales", flops,
                  lambda i: torch._scaled_mm(x, ws[i].t(), ones[:4 * n_rows], cols, out_dtype=torch.bfloat16), len(ws))
        print(f"peer: cuBLASLt FP8 dense, both products of {n_rows} tokens: {total * 1e6:.1f} us, "
              f"{2 * 4 * n_rows * 3 * 2880 * 2880 / total * 1e-12:.0f} TFLOP/s")
    for n_experts in (32, 128):
        for n_rows in (2048, 8192):
            for is_even in (True, False):
                total, off = 0.0, ends(n_rows, n_experts, is_even)
                for n_out, n_in in (up, down):
                    x, w = fp8(4 * n_rows, n_in), fp8(n_experts, n_out, n_in)
                    scales = torch.ones(n_experts, n_out, device="cuda")
                    s = timed(f"PyTorch grouped FP8, {n_experts}, {n_rows} tokens, {'even' if is_even else 'random'} rows, "
                              f"{n_in} -> {n_out}", 2 * 4 * n_rows * n_out * n_in,
                              lambda i: torch._scaled_grouped_mm(x, w.transpose(-2, -1), ones.flatten()[:4 * n_rows], scales,
                                                                 offs=off, out_dtype=torch.bfloat16), 1)
                    total = total + s if s is not None else float("nan")
                print(f"peer: PyTorch grouped FP8, {n_experts}, {n_rows} tokens, {'even' if is_even else 'random'} rows, both: "
                      f"{total * 1e6:.1f} us, {2 * 4 * n_rows * 3 * 2880 * 2880 / total * 1e-12:.0f} TFLOP/s")


def attention_and_dense():
    for t in (2048, 8192, 32768):
        q = torch.randn(1, 64, t, 64, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 8, t, 64, device="cuda", dtype=torch.bfloat16).repeat_interleave(8, 1) for _ in range(2))
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    s = graph_time(lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 4)
                rate = 2 * t * (t + 1) * 4096 / s * 1e-12
                print(f"peer: {name} attention, causal, {t} tokens: {s * 1e6:.1f} us, {rate:.0f} TFLOP/s")
            except RuntimeError as e:
                print(f"peer: {name} attention, {t} tokens: {e}")
    for name, n_out, n_in, turns in (("QKV", 5120, 2880, 9), ("O", 2880, 4096, 11), ("LM head", 201088, 2880, 1)):
        ws = [torch.randn(n_out, n_in, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
        for rows in (1, 8, 32, 128, 2048, 8192):
            if n_out > 100000 and rows > 128:
                break
            x = torch.randn(rows, n_in, device="cuda", dtype=torch.bfloat16)
            s = graph_time(lambda i: x @ ws[i].t(), turns, turns * 3)
            tb, rate = 2 * n_out * n_in / s * 1e-12, 2 * rows * n_out * n_in / s * 1e-12
            print(f"peer: cuBLAS {name}, {rows} rows: {s * 1e6:.2f} us, {tb:.2f} TB/s, {rate:.0f} TFLOP/s")
    read_only()


torch.manual_seed(0)
if sys.argv[1:] != ["experts"]:
    attention_and_dense()
experts()
