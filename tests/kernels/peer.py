#!/usr/bin/env python3
"""The same shapes through PyTorch: its attention back ends (no sinks there) and cuBLAS. Times with CUDA graphs, cold L2."""
import torch
import torch.nn.functional as F
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


def main():
    torch.manual_seed(0)
    for t in (2048, 8192, 32768):
        q = torch.randn(1, 64, t, 64, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(1, 8, t, 64, device="cuda", dtype=torch.bfloat16).repeat_interleave(8, 1) for _ in range(2))
        for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    s = graph_time(lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 4)
                print(f"peer: {name} attention, causal, {t} tokens: {s * 1e6:.1f} us, {2 * t * (t + 1) * 4096 / s * 1e-12:.0f} TFLOP/s")
            except RuntimeError as e:
                print(f"peer: {name} attention, {t} tokens: {e}")
    for name, n_out, n_in, turns in (("QKV", 5120, 2880, 9), ("O", 2880, 4096, 11), ("LM head", 201088, 2880, 1)):
        ws = [torch.randn(n_out, n_in, device="cuda", dtype=torch.bfloat16) for _ in range(turns)]
        for rows in (1, 8, 32, 128, 2048, 8192):
            if n_out > 100000 and rows > 128:
                break
            x = torch.randn(rows, n_in, device="cuda", dtype=torch.bfloat16)
            s = graph_time(lambda i: x @ ws[i].t(), turns, turns * 3)
            print(f"peer: cuBLAS {name}, {rows} rows: {s * 1e6:.2f} us, {2 * n_out * n_in / s * 1e-12:.2f} TB/s, {2 * rows * n_out * n_in / s * 1e-12:.0f} TFLOP/s")
    x = torch.randn(1 << 31, device="cuda", dtype=torch.bfloat16)
    s = graph_time(lambda i: x.view(torch.int32).sum(), 1, 3)
    print(f"peer: sum over 4 GiB: {2 * x.numel() / s * 1e-12:.2f} TB/s")


main()
