"""Is the GPU path correct, and how close is it to what the GPU can do?

    python benchmarks/gpu.py --output gpu.json                          # all sections: less than ten minutes
    python benchmarks/gpu.py --only decode prefill                      # two of them

Measures the ceilings first: bytes per second copied, FLOP per second of a matrix product. Then prints each section's
times beside their share of the ceiling, and beside torch's own kernels. A section that fails is reported, and the
others run.

Needs torch, triton, transformers, for the checks pytest and for the engine pydantic, msgpack and llguidance, but no
network. Where crossdock is not installed, make it importable from the checkout:
`mkdir -p .typing && ln -sfn .. .typing/crossdock && export PYTHONPATH=$PWD/.typing`. Times of kernels are medians of
replays of a CUDA graph, over the pages of so many layers that they do not fit into the cache.
"""

import argparse
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels import triton_attention
from crossdock.kernels.attention import AttentionBatch, reference_paged_attention
from crossdock.kernels.triton_attention import Tiles, paged_attention, store_kv

ROOT = Path(__file__).resolve().parents[1]
HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16  # of Llama-3.1-8B
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # keys and values of one layer
L2_BYTES = 64 << 20  # at least the cache of these GPUs
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 131072,
}
Result = dict[str, Any]


def graph_of(*functions: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return one graph of all functions in order. They run once before the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph


def seconds(*functions: Callable[[], object], repeats: int = 20) -> float:
    """Return the seconds of one function, where all do the same on other data: the median over replays of a graph."""
    graph = graph_of(*functions)
    return timed(graph.replay, repeats) / len(functions)


def timed(run: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds of a call on the GPU."""
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


class PagedLayers:
    """Random pages of several layers in the pool's layout, and a batch of (query_len, kv_len) on them."""

    def __init__(self, lengths: Sequence[tuple[int, int]]) -> None:
        per_sequence = [-(-kv // PAGE_SIZE) for _, kv in lengths]
        kv_bytes = sum(kv for _, kv in lengths) * TOKEN_BYTES
        self.num_layers = max(2, min(32, 8 * L2_BYTES // kv_bytes))
        shape = (sum(per_sequence), KV_HEADS, self.num_layers, 2, PAGE_SIZE, DIM)
        self.pool = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        ids = torch.randperm(sum(per_sequence)).int().split(per_sequence)
        starts = torch.tensor([0, *[q for q, _ in lengths]]).cumsum(0).int()
        positions = [torch.arange(kv - q, kv) for q, kv in lengths]
        slots = [
            pages[where // PAGE_SIZE].long() * PAGE_SIZE + where % PAGE_SIZE
            for pages, where in zip(ids, positions, strict=True)
        ]
        self.q = torch.randn(int(starts[-1]), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.batch = AttentionBatch(
            query_start=starts.cuda(),
            kv_len=torch.tensor([kv for _, kv in lengths]).int().cuda(),
            page_table=torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).cuda(),
            slots=torch.cat(slots).cuda(),
            max_query_len=max(q for q, _ in lengths),
            max_kv_len=max(kv for _, kv in lengths),
        )

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        return self.pool[:, :, number, 0], self.pool[:, :, number, 1]

    def attention(self, kernel: Callable[..., Tensor] = paged_attention) -> list[Callable[[], Tensor]]:
        """Return the attention of each layer as a function."""

        def of(number: int) -> Callable[[], Tensor]:
            return lambda: kernel(self.q, *self.layer(number), self.batch, scale=DIM**-0.5)

        return [of(number) for number in range(self.num_layers)]


def ceilings() -> Result:
    """Measure bytes per second of a copy and FLOP per second of a product in bf16."""
    x = torch.randn(1 << 31, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / timed(lambda: y.copy_(x))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {"bandwidth": bandwidth, "matmul": 2 * 8192**3 / timed(lambda: a @ b)}


def checks(_: Result) -> Result:
    """Run the tests marked gpu, and compare one layer of each shape measured below with the torch reference."""
    errors = {}
    for name, lengths in CHECKED.items():
        layers = PagedLayers(lengths)
        ours, theirs = (
            layers.attention(kernel)[0]().double() for kernel in (paged_attention, reference_paged_attention)
        )
        errors[name] = float((ours - theirs).norm() / theirs.norm())
        print(f"  {name:24} relative error {errors[name]:.1e}")
        assert errors[name] < 1e-2, name
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "tests/kernels/test_triton.py",
        "tests/workers/model/test_gpu.py",
    ]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    print("\n".join(tests.stdout.splitlines()[-15:]), tests.stderr[-500:])
    return {"errors": errors, "tests": tests.stdout.splitlines()[-1:], "rc": tests.returncode}


CHECKED = {
    "decodes": [(1, 1024), (1, 1), (1, 8192), (1, 77)] * 4,
    "chunk and decodes": [*[(1, 1000)] * 20, (512, 4096), (300, 300)],
    "prefill": [(2048, 2048)],
}


def decode(limits: Result) -> Result:
    """Time the attention of decode steps, beside torch's SDPA on contiguous keys and values."""
    found = {}
    for size in (1, 64, 256):
        for context in (1024, 8192):
            layers = PagedLayers([(1, context)] * size)
            least = size * context * TOKEN_BYTES / limits["bandwidth"]
            ours = seconds(*layers.attention())
            del layers
            theirs = _sdpa_decode(size, context)
            found[f"{size} x {context}"] = row = {
                "us": ours * 1e6,
                "of_bandwidth": least / ours,
                "sdpa_us": theirs * 1e6,
            }
            print(f"  {size:4} x {context:5}: {show(row)}")
    return found


def _sdpa_decode(size: int, context: int) -> float:
    q = torch.randn(size, HEADS, 1, DIM, dtype=torch.bfloat16, device="cuda")
    copies = max(2, min(32, 8 * L2_BYTES // (size * context * TOKEN_BYTES)))
    kv = [torch.randn(2, size, KV_HEADS, context, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    return seconds(*(lambda x=x: F.scaled_dot_product_attention(q, x[0], x[1], enable_gqa=True) for x in kv))


def prefill(limits: Result) -> Result:
    """Time the attention of prompts and chunks, beside torch's SDPA and flex attention; and storing keys and values."""
    found = {}
    cases = {
        "prefill 2048": [(2048, 2048)],
        "prefill 8192": [(8192, 8192)],
        "chunk 2048 at 8192": [(2048, 8192)],
        "chunk 512 at 8192 + 64 decodes": [*[(1, 1024)] * 64, (512, 8192)],
    }
    for name, lengths in cases.items():
        layers = PagedLayers(lengths)
        flop = sum(4 * HEADS * DIM * q * (kv - (q - 1) / 2) for q, kv in lengths)
        ours = seconds(*layers.attention()[:4])
        found[name] = row = {"us": ours * 1e6, "of_matmul": flop / ours / limits["matmul"]}
        if len(lengths) == 1 and lengths[0][0] == lengths[0][1]:
            row |= _torch_prefill(lengths[0][0])
        print(f"  {name}: {show(row)}")
    layers = PagedLayers([(8192, 8192)])
    k, v = (torch.randn(8192, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    store = seconds(lambda: store_kv(k, v, *layers.layer(0), layers.batch.slots))
    found["store_kv 8192"] = {"us": store * 1e6, "of_bandwidth": 4 * k.nbytes / store / limits["bandwidth"]}
    print(f"  store_kv of 8192 tokens: {show(found['store_kv 8192'])}")
    return found


def _torch_prefill(tokens: int) -> dict[str, float]:
    q, k, v = (
        torch.randn(1, heads, tokens, DIM, dtype=torch.bfloat16, device="cuda") for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    sdpa = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return {"sdpa_us": sdpa * 1e6, "flex_us": flex(q, k, v) * 1e6}


def flex(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return the seconds of torch's flex attention, compiled and causal."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cuda")
    compiled = torch.compile(flex_attention)
    return timed(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))


def tiles(_: Result) -> Result:
    """Time other tiles than the ones chosen without a GPU."""
    chosen = triton_attention.tiles_for
    found = {}
    for name, lengths, candidates in [
        ("decode 64 x 8192", [(1, 8192)] * 64, [(16, n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (3, 5)]),
        ("decode 1 x 8192", [(1, 8192)], [(16, n, w, s) for n in (32, 64, 128) for w in (4, 8) for s in (3, 5)]),
        (
            "prefill 8192",
            [(8192, 8192)],
            [(m, n, w, s) for m, w in ((128, 8), (64, 4)) for n in (64, 128) for s in (2, 3)],
        ),
    ]:
        layers = PagedLayers(lengths)
        for candidate in candidates:
            triton_attention.tiles_for = lambda *_, sizes=candidate: Tiles(*sizes)
            try:
                found[f"{name} {candidate}"] = seconds(*layers.attention()[:4]) * 1e6
            except Exception as error:  # such as too little shared memory
                print(f"  {name} {candidate}: {type(error).__name__}")
        best = sorted((us, key) for key, us in found.items() if key.startswith(name))
        print("\n".join(f"  {key}: {us:.1f} us" for us, key in best[:4]))
        triton_attention.tiles_for = chosen
    return found


def step(limits: Result) -> Result:
    """Time steps of Llama-3.1-8B with random weights, as transformers launches them and as a CUDA graph."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from crossdock.workers.model.load import wrap_module

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = LlamaForCausalLM(LlamaConfig(**LLAMA))
    torch.set_default_dtype(torch.float32)
    model = wrap_module(module, 16384)
    weights = sum(p.nbytes for p in module.parameters()) - module.model.embed_tokens.weight.nbytes
    head = module.lm_head.weight.nbytes
    model.allocate_pool(20_000, PAGE_SIZE)
    found = {}
    for name, lengths in {
        **{f"decode {size} x {context}": [(1, context)] * size for size in (1, 16, 64, 256) for context in (1024,)},
        "decode 32 x 8192": [(1, 8192)] * 32,
        "chunk 2048": [(2048, 2048)],
        "chunk 512 + 64 decodes": [*[(1, 1024)] * 64, (512, 4096)],
    }.items():
        batch, where = _random_batch(lengths, 20_000)
        ids, rows = torch.randint(0, 128000, (len(where),), device="cuda"), batch.query_start[1:].long() - 1

        def run(ids: Tensor = ids, where: Tensor = where, batch: AttentionBatch = batch, rows: Tensor = rows) -> Tensor:
            return model.forward(ids, where, batch, rows).argmax(-1)

        kv_bytes = sum(kv for _, kv in lengths) * TOKEN_BYTES * LLAMA["num_hidden_layers"]
        flop = (weights - head) * len(where) + head * len(rows)  # two for each weight of two bytes
        least = max((weights + kv_bytes) / limits["bandwidth"], flop / limits["matmul"])
        run()
        eager = timed(run, 5)
        found[name] = row = {"least_ms": least * 1e3, "eager_ms": eager * 1e3}
        try:
            with torch.inference_mode():
                graph = seconds(run, repeats=5)
            row |= {"graph_ms": graph * 1e3, "of_least": least / graph}
        except RuntimeError as error:
            row["graph"] = str(error).splitlines()[0]
            torch.cuda.synchronize()
        print(f"  {name}: {show(row)}")
    return found


def _random_batch(lengths: Sequence[tuple[int, int]], num_pages: int) -> tuple[AttentionBatch, Tensor]:
    """Return a batch of (query_len, kv_len) on random pages of the model's pool, and the positions of its tokens."""
    per_sequence = [-(-kv // PAGE_SIZE) for _, kv in lengths]
    table = torch.nn.utils.rnn.pad_sequence(
        list(torch.randperm(num_pages)[: sum(per_sequence)].int().split(per_sequence)), batch_first=True
    )
    positions = [torch.arange(kv - q, kv) for q, kv in lengths]
    slots = [table[s, p // PAGE_SIZE].long() * PAGE_SIZE + p % PAGE_SIZE for s, p in enumerate(positions)]
    starts = torch.tensor([0, *[q for q, _ in lengths]]).cumsum(0).int().cuda()
    lens = torch.tensor([kv for _, kv in lengths]).int().cuda()
    longest = max(q for q, _ in lengths), max(kv for _, kv in lengths)
    batch = AttentionBatch(starts, lens, table.cuda(), torch.cat(slots).cuda(), *longest)
    return batch, torch.cat(positions).cuda()


def engine(limits: Result) -> Result:
    """Time the engine with random weights of three shapes: see gpu_engine.py."""
    from gpu_engine import SECONDS, SHAPES, measured

    found = {}
    began = time.perf_counter()
    for number, (shape, values) in enumerate(SHAPES.items()):
        started = time.perf_counter()
        if started - began > SECONDS:
            print(f"  {shape}: no time left")
            continue
        try:
            found[shape] = measured(values, limits, is_first=number == 0)
        except Exception as error:  # the other shapes are still measured
            traceback.print_exc()
            found[shape] = {"failed": repr(error)}
        gc.collect()
        torch.cuda.empty_cache()
        print(f"  {shape} ({time.perf_counter() - started:.0f} s)")
        for name, row in found[shape].items():
            print(f"    {name}: {show(row) if isinstance(row, dict) else row}", flush=True)
    return found


def show(row: Result) -> str:
    """Return the figures of a row in one line."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


SECTIONS: dict[str, Callable[[Result], Result]] = {
    "checks": checks,
    "decode": decode,
    "prefill": prefill,
    "engine": engine,
    "step": step,
    "tiles": tiles,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    limits = ceilings()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton_attention.triton.__version__}"
    print(f"{device}: {limits['bandwidth'] / 1e12:.2f} TB/s copied, {limits['matmul'] / 1e12:.0f} TFLOP/s in bf16")
    report: Result = {"device": device, "ceilings": limits}
    for name in arguments.only:
        print(f"{name}:", flush=True)
        started = time.perf_counter()
        try:
            report[name] = SECTIONS[name](limits)
        except Exception as error:  # the other sections are still measured
            traceback.print_exc()
            report[name] = {"failed": repr(error)}
        gc.collect()
        torch.cuda.empty_cache()
        print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
