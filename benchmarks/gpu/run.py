"""Is the GPU path correct, and how close is it to what the GPU can do? Five calls of at most eight minutes each.

    make gpu-kit                                                        # here: packages that the machine lacks
    run.py truth --kit .gpu-kit/truth --out gpu.jsonl                   # there: engine and limit engine, attention
    run.py features --kit .gpu-kit/features --out gpu.jsonl             # packed weights, adapters, drafts, tiers, NIXL
    run.py servers --kit .gpu-kit/servers --out gpu.jsonl               # one replica, a pair, a kill
    run.py kernels --out gpu.jsonl                                      # references, tests, launches, kernels by time
    run.py others --out gpu.jsonl                                       # other tiles, other engines
    run.py report --out gpu.jsonl                                       # Markdown for a record

`run.py` stands for `python benchmarks/gpu/run.py`.

Every figure is appended to the rows file as soon as it is measured. The same call again measures what is missing. A
case that fails, crashes or hangs is a row with the reason, and the others run. `--dry` runs everything at toy sizes on
the CPU, in Triton's interpreter.

Needs torch and Triton; the kit brings what else is not there. No network: weights are random. Times of kernels are
medians of replays of a CUDA graph, over the pages of so many layers that they do not fit into the cache.
"""

import argparse
import os
import signal
import sys
import time
import uuid
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu.kit import environment
from gpu.report import report
from gpu.rows import Rows
from gpu.supervise import supervise

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("truth", "features", "servers", "kernels", "others")
_RUN, _DEADLINE = "CROSSDOCK_GPU_RUN", "CROSSDOCK_GPU_DEADLINE"  # the process that measures has them, no other


def main() -> None:
    """Measure in a process that is watched, then print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="+", choices=[*CALLS, "report"], metavar="CALL", help=", ".join(CALLS))
    parser.add_argument("--out", type=Path, required=True, help="the rows file: JSON lines, appended to")
    parser.add_argument("--kit", type=Path, help="a folder that `make gpu-kit` wrote; later calls find its packages")
    parser.add_argument("--seconds", type=float, default=480.0, help="when to end whatever is measured (default: 480)")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "gpu", help="for compiled kernels and the kit")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU, in Triton's interpreter")
    args = parser.parse_args()
    if _RUN in os.environ:
        measure(args)
        return
    ended: list[int] = []  # by a time limit from outside: then the process that measures must end as well
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    run, deadline = uuid.uuid4().hex[:8], time.time() + args.seconds
    rows = Rows(args.out, run)
    if args.calls != ["report"]:
        values = environment(ROOT, args.cache.resolve(), args.kit, args.dry)
        values |= {_RUN: run, _DEADLINE: str(deadline)}
        supervise([sys.executable, *sys.argv], values, rows, deadline, lambda: bool(ended))
    print("\n" + report(rows))


def measure(args: argparse.Namespace) -> None:
    """Measure the calls' sections in this process."""
    import torch
    from gpu import sections
    from gpu.cases import Bench, DeviceLostError, work
    from gpu.device import Cpu, Cuda
    from gpu.sizes import DRY, REAL
    from gpu.supervise import DEVICE_LOST

    if not args.dry and not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
        raise SystemExit(
            f"torch {torch.__version__}, built {built}, finds no GPU. `nvidia-smi` shows GPU and driver: CUDA 13 needs "
            f"580 or newer. --dry needs no GPU"
        )
    rows = Rows(args.out, os.environ[_RUN])
    bench = Bench(Cpu() if args.dry else Cuda(), DRY if args.dry else REAL, rows)
    now = sections.describe(bench)
    for name, before in rows.figures("machine", "device").items():
        if name != "date" and before != now[name]:
            raise SystemExit(f"{args.out} has rows of {name} {before}, and this is {now[name]}: give another --out")
    torch.manual_seed(0)
    try:
        work(sections.of(args.calls), bench, float(os.environ[_DEADLINE]))
    except DeviceLostError:
        sys.stdout.flush()
        os._exit(DEVICE_LOST)  # whatever runs at exit would wait for the device


if __name__ == "__main__":
    main()
