"""How much faster are the CPU kernels than torch, at the sizes of SmolLM2-135M?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/kernels.py --threads 1       # a minute

Prints milliseconds per layer and ratios for attention, then GFLOP/s and milliseconds for the linears.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch, paged_attention, reference_paged_attention, store_kv
from crossdock.kernels.build import cpu_flags
from crossdock.kernels.decoder import PackedLinear

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 9, 3, 64, 16, 30


def milliseconds(seconds: float, *functions: Callable[[], object]) -> list[float]:
    """Return the least time of each function. Calls alternate, so that other load affects all functions alike.

    One thread is timed by its CPU time, several threads by wall-clock time.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(functions)
    for function in functions:
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, function in enumerate(functions):
            start = clock()
            function()
            best[i] = min(best[i], clock() - start)
    return [1e3 * t for t in best]


def batch_of(lengths: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Return queries, keys and values of one layer of a pool, and the batch, for (query_len, kv_len) per sequence."""
    per_sequence = [-(-kv // PAGE_SIZE) for _, kv in lengths]
    layers = 4  # enough that neighbours in the pool are not neighbours of a layer
    pool = torch.randn(sum(per_sequence), KV_HEADS, layers, 2, PAGE_SIZE, HEAD_DIM, dtype=dtype)
    ids = torch.randperm(sum(per_sequence)).int().split(per_sequence)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    starts = torch.tensor([0, *[q for q, _ in lengths]]).cumsum(0).int()
    slots = torch.cat(
        [
            (ids[s].long() * PAGE_SIZE).repeat_interleave(PAGE_SIZE)[kv - q : kv] + torch.arange(kv - q, kv) % PAGE_SIZE
            for s, (q, kv) in enumerate(lengths)
        ]
    )
    kv_len = torch.tensor([kv for _, kv in lengths]).int()
    q = torch.randn(int(starts[-1]), HEADS, HEAD_DIM, dtype=dtype)
    longest = max(q for q, _ in lengths), max(kv for _, kv in lengths)
    return q, pool[:, :, 1, 0], pool[:, :, 1, 1], AttentionBatch(starts, kv_len, table, slots, *longest)


def attention(seconds: float) -> None:
    print(f"\nattention, ms per layer ({HEADS} q / {KV_HEADS} kv heads of {HEAD_DIM}, pages of {PAGE_SIZE})")
    print("torch: the reference, which gathers and masks; SDPA's is_causal, below, takes half as long for a prefill")
    print(f"{'batch':34} {'dtype':5} {'torch':>9} {'ours':>9} {'ratio':>7}")
    for name, lengths in {
        "decode 1 at 1024": [(1, 1024)],
        "decode 8 at 1024": [(1, 1024)] * 8,
        "decode 32 at 1024": [(1, 1024)] * 32,
        "decode 1 at 8192": [(1, 8192)],
        "prefill 512": [(512, 512)],
        "prefill 2048": [(2048, 2048)],
        "chunk 256 at 4096": [(256, 4096)],
        "chunk 256 at 2048 + decode 16 at 512": [(256, 2048), *[(1, 512)] * 16],
    }.items():
        for dtype in (torch.bfloat16, torch.float32):
            q, k, v, batch = batch_of(lengths, dtype)

            def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, batch: AttentionBatch = batch) -> Tensor:
                return paged_attention(q, k, v, batch, scale=HEAD_DIM**-0.5)

            def reference(q: Tensor = q, k: Tensor = k, v: Tensor = v, batch: AttentionBatch = batch) -> Tensor:
                return reference_paged_attention(q, k, v, batch, scale=HEAD_DIM**-0.5)

            times = milliseconds(seconds, ours, reference)
            label = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
            print(f"{name:34} {label:5} {times[1]:9.3f} {times[0]:9.3f} {times[1] / times[0]:6.1f}x")
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(1, HEADS, 2048, HEAD_DIM, dtype=dtype)
        y = torch.randn(1, HEADS, 2048, HEAD_DIM, dtype=dtype)
        (t,) = milliseconds(seconds, lambda x=x, y=y: F.scaled_dot_product_attention(x, y, y, is_causal=True))
        print(f"for comparison, torch SDPA is_causal on contiguous {dtype} 2048: {t:.1f} ms")
    for count in (8, 512):
        q, k, v, batch = batch_of([(count, count)], torch.bfloat16)
        new = torch.randn(count, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        (t,) = milliseconds(seconds / 4, lambda new=new, k=k, v=v, batch=batch: store_kv(new, new, k, v, batch.slots))
        print(f"store_kv of {count} tokens: {1e3 * t:.1f} us")


def linears(seconds: float) -> None:
    if "avx512_bf16" not in cpu_flags():
        print("\nno AVX512-BF16: the packed linears do not run here")
        return
    shapes = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
    print("\nlinears in bf16, GFLOP/s (ms): F.linear | oneDNN, weight prepacked | ours")
    print(f"{'':8} {'M':>5} {'F.linear':>16} {'prepacked':>16} {'ours':>16}")
    totals: dict[int, list[float]] = {}
    for name, (N, K) in shapes.items():
        # As many copies as the model has layers: a weight that stays in the cache makes all of them too fast.
        count = 1 if name == "head" else LAYERS
        weights = [torch.randn(N, K, dtype=torch.bfloat16) for _ in range(count)]
        prepacked = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in weights]
        packed = [PackedLinear(w) for w in weights]
        for M in (1, 4, 8, 16, 32, 64, 256, 1024):
            if name == "head" and M > 64:
                continue
            x = torch.randn(M, K, dtype=torch.bfloat16)

            def torch_linear(x: Tensor = x, weights: list[Tensor] = weights) -> None:
                for w in weights:
                    F.linear(x, w)

            def onednn(x: Tensor = x, prepacked: list[Tensor] = prepacked) -> None:
                for w in prepacked:
                    torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")

            def ours(x: Tensor = x, packed: list[PackedLinear] = packed) -> None:
                for linear in packed:
                    linear(x)

            times = milliseconds(seconds, torch_linear, onednn, ours)
            cells = [f"{2e-6 * M * N * K * count / t:8.0f} ({t / count:.3f})" for t in times]
            print(f"{name:8} {M:5} " + " ".join(f"{cell:>16}" for cell in cells))
            totals.setdefault(M, [0.0] * 3)
            totals[M] = [a + b for a, b in zip(totals[M], times, strict=True)]
    print("whole model, ms (above M=64 without the head):")
    for M, times in totals.items():
        print(f"{'all':8} {M:5} " + " ".join(f"{t:16.2f}" for t in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.4, help="per measurement")
    parser.add_argument("--only", choices=["attention", "linears"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    with torch.inference_mode():
        if arguments.only != "linears":
            attention(arguments.seconds)
        if arguments.only != "attention":
            linears(arguments.seconds)


if __name__ == "__main__":
    main()
