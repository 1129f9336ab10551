"""How many tokens a second does `LLM.generate` make, beside vLLM's class of the same name?

    python benchmarks/offline.py --prompts 256
    python benchmarks/offline.py --prompts 256 --vllm VENV

Both run the embedded model at their defaults, each in a process of its own, on the same prompts: token ids of 32 to 256
tokens, half of them behind one of four beginnings, with outputs of 16 to 128 tokens. The first call of each is not
counted. `benchmarks/peers/vllm.sh install` makes the environment.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = (100, 40_000)  # token ids that are plain text


def workload(count: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts as token ids, and how many tokens follow each."""
    draw = random.Random(5)
    beginnings = [[draw.randint(*VOCABULARY) for _ in range(96)] for _ in range(4)]
    prompts, lengths = [], []
    for number in range(count):
        own = [draw.randint(*VOCABULARY) for _ in range(draw.randint(32, 160))]
        prompts.append(beginnings[number % 4] + own if number % 2 else own)
        lengths.append(draw.randint(16, 128))
    return prompts, lengths


def measure(package: str, model: str, count: int, repeats: int) -> None:
    """Print the seconds of each call, in a process of either package."""
    module = __import__(package)
    kwargs: dict[str, Any] = {} if package == "crossdock" else {"disable_log_stats": True}
    began = time.perf_counter()
    llm = module.LLM(model, max_model_len=2048, **kwargs)
    start_s = time.perf_counter() - began
    seconds = []
    for repeat in range(repeats + 1):
        prompts, lengths = workload(count if repeat else 8)
        prompts = [[100 + repeat, *prompt] for prompt in prompts]  # no call finds the pages of the one before
        params = [module.SamplingParams(temperature=0, max_tokens=each, ignore_eos=True) for each in lengths]
        as_given = prompts if package == "crossdock" else [{"prompt_token_ids": prompt} for prompt in prompts]
        began = time.perf_counter()
        found = llm.generate(as_given, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        assert [len(one.outputs[0].token_ids) for one in found] == lengths
    first = [one.outputs[0].token_ids[:8] for one in found[:64]]
    print("RESULT " + json.dumps({"start_s": start_s, "seconds": seconds[1:], "first": first}), flush=True)


def run(python: str, package: str, arguments: argparse.Namespace) -> Any:
    """Measure in a process of that package, and return its figures."""
    command = [python, __file__, "--package", package, "--model", arguments.model]
    numbers = ["--prompts", str(arguments.prompts), "--repeats", str(arguments.repeats)]
    output = subprocess.run([*command, *numbers], stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT "))[7:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2, help="counted calls of generate")
    parser.add_argument("--model", default="")
    parser.add_argument("--vllm", type=Path, help="environment of vLLM")
    parser.add_argument("--package", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.model:
        from crossdock.workers.model.weights.checkpoint import default_model_dir

        arguments.model = str(default_model_dir())
    if arguments.package:
        measure(arguments.package, arguments.model, arguments.prompts, arguments.repeats)
        return
    _, lengths = workload(arguments.prompts)
    pythons = {"crossdock": sys.executable}
    if arguments.vllm is not None:
        pythons["vllm"] = str(arguments.vllm / "bin" / "python")
    rates, firsts = {}, {}
    for package, python in pythons.items():
        found = run(python, package, arguments)
        rates[package], firsts[package] = sum(lengths) / min(found["seconds"]), found["first"]
        each = ", ".join(f"{seconds:.1f}" for seconds in found["seconds"])
        print(f"{package}: {rates[package]:,.0f} output tokens/s; calls {each} s; start {found['start_s']:.0f} s")
    if "vllm" in rates:
        pairs = list(zip(firsts["crossdock"], firsts["vllm"], strict=True))
        same = sum(own == theirs for own, theirs in pairs)
        print(f"ratio {rates['crossdock'] / rates['vllm']:.2f}; the same first 8 tokens in {same} of {len(pairs)}")


if __name__ == "__main__":
    main()
