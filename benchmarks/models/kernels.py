"""Which CPU kernel is the fastest for how many rows, and is it the one that is chosen? At the sizes of SmolLM2-135M.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/models/kernels.py --threads 1       # two minutes

Prints milliseconds of all layers of a step for all candidates, with the one that a server chooses and how many times
slower than the best it is; then of packed weights, beside the time that the memory and the products allow.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

import torch
from tables import hardware

from crossdock.kernels.cpu.choice import KernelChoice, of_plain_weights
from crossdock.kernels.cpu.decoder import DecoderShape
from crossdock.kernels.cpu.huge_pages import HugePages
from crossdock.kernels.cpu.linear import rounds_rows, usable_kernels, usable_packed_kernels
from crossdock.kernels.cpu.packed_linear import CodeForm
from crossdock.kernels.cpu.stack_choice import CHUNK_ROWS, CONTEXT, stack_cells
from crossdock.kernels.options import Kernel

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
SHAPE = DecoderShape(
    hidden=576,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate=1536,
    eps=1e-5,
    qk_eps=0.0,
    scale=HEAD_DIM**-0.5,
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


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


def shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def layers(seconds: float, dtype: torch.dtype) -> None:
    """Time all layers of a step: decodes below 64 rows, one chunk from there."""
    kernels = usable_kernels(dtype)
    choice = of_plain_weights(kernels)
    print(f"\nall layers of a step in {shown(dtype)}, ms; chosen: {choice}")
    print(f"{'':8} {'rows':>5} " + " ".join(f"{kernel:>16}" for kernel in kernels) + "   chosen, chosen / best")
    cells = stack_cells(SHAPE, LAYERS, dtype, kernels, ROWS)
    ratios = []
    for rows in ROWS:
        calls = [cells[kernel, rows][0] for kernel in kernels]
        times = milliseconds(max(seconds, 5e-3 * rows), *calls)
        ratios.append(times[kernels.index(choice.at(rows))] / min(times))
        print(f"{'layers':8} {rows:5} {' '.join(f'{t:16.2f}' for t in times)} {verdict(times, choice, rows, kernels)}")
    print(f"worst ratio of layers, {shown(dtype)}: {max(ratios):.2f}")


def packed(seconds: float, dtype: torch.dtype) -> None:
    """Time all layers of a step from packed weights, beside plain ones and the floor.

    The floor of some rows is the longer of reading the weights and the decodes' keys and values from memory, as fast as
    torch adds numbers that lie there as weights do, and of multiplying as fast as torch's own square product. Reading
    and layers take turns.
    """
    forms: dict[str, CodeForm | None] = {
        f"plain, {shown(dtype)}": None,
        "int8, a scale a row": CodeForm("int8", SHAPE.intermediate, has_offsets=False),
        "int4, groups of 32": CodeForm("int4", 32, has_offsets=False),
        "int4, 128, zero points": CodeForm("int4", 128, has_offsets=True),
        "fp8 (e4m3), 128": CodeForm("e4m3", 128, has_offsets=False),
        "mxfp4 (e2m1), 32": CodeForm("e2m1", 32, has_offsets=False),
    }
    rows = [count for count in ROWS if count not in (64, 128, 512)]
    everything = HugePages().take(1 << 26, torch.float32).fill_(1.0)
    square = torch.ones(1536, 1536, dtype=dtype)
    rate = 2 * 1536**3 / milliseconds(seconds, partial(torch.mm, square, square))[0]  # operations a ms
    token = LAYERS * KV_HEADS * 2 * HEAD_DIM * dtype.itemsize  # bytes of its keys and values
    print(f"\nall layers of a step in {shown(dtype)}, ms (times the floor); products reach {1e-6 * rate:.0f} GFLOP/s")
    print(f"{'weights':24} {'kernel':6} " + " ".join(f"{count:>14}" for count in rows))
    for name, form in forms.items():
        matrices = SHAPE.matrices(LAYERS)
        size = sum(
            each.num_bytes(torch.bfloat16, form) for each in matrices
        )  # beside float32 rows too, see NativeLinear
        flops = sum(2 * each.out_features * each.in_features * each.count for each in matrices)
        kernels = usable_kernels(dtype) if form is None else usable_packed_kernels(dtype)
        if form is not None and form.kind != "e4m3" and rounds_rows():
            kernels = (*kernels, "int8")
        for kernel in kernels:
            cells, shares = stack_cells(SHAPE, LAYERS, dtype, [kernel], rows, form), []
            for count in rows:
                read, took = milliseconds(max(seconds, 4e-3 * count), everything.sum, cells[kernel, count][0])
                num_bytes = size + (count * CONTEXT * token if count < CHUNK_ROWS else 0)
                floor = max(num_bytes / everything.nbytes * read, count * flops / rate)
                shares.append(f"{took:7.2f} ({took / floor:4.1f})")
            print(f"{name:24} {kernel:6} {' '.join(shares)}", flush=True)


def verdict(times: list[float], choice: KernelChoice, rows: int, kernels: Sequence[Kernel]) -> str:
    """Return the kernel chosen for these rows, and how many times slower it is than the fastest."""
    chosen = choice.at(rows)
    return f"   {chosen:7}{times[kernels.index(chosen)] / min(times):5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.4, help="per measurement")
    parser.add_argument("--only", choices=["layers", "packed"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of packed products")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {hardware()}")
    with torch.inference_mode():
        if arguments.only in (None, "packed"):
            packed(arguments.seconds, getattr(torch, arguments.dtype))
        if arguments.only in (None, "layers"):
            for dtype in (torch.bfloat16, torch.float32):
                layers(arguments.seconds, dtype)


if __name__ == "__main__":
    main()
