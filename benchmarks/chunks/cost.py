"""How much more work is a prompt in chunks than a prompt in one step?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/chunks/cost.py       # six sizes of chunks, two repeats: 2 minutes

Prints a row per size of chunk: steps, FLOP, bytes of KV written and read, bytes of weights read, and seconds. Then the
same bytes for a GPU and a model of `crossdock simulate`: KV written for a chunk, and its share of the step's seconds.

FLOP dense: torch's flop counter over transformers' own eager forward, chunk by chunk into a DynamicCache, on the meta
device (shapes only). Eager attention multiplies every query of a chunk with every key up to the chunk's end and masks
afterwards, so one large chunk computes twice the pairs it needs; that half is not a gain of chunking.
FLOP causal: the same linears, and only the pairs that attention needs, n * (context + (n + 1) / 2) of a chunk: what a
kernel that skips the masked tiles computes.
KV written: every token's keys and values, once. KV read: each step reads every token up to its chunk's end at least
once (its query tiles then find them in the cache). Weights read: those of the layers, once per step, likewise.
Seconds: the steps of a Crossdock engine with no other request, median of the repeats. CPU s: the least seconds of CPU
time of all threads, which other processes on the machine change less.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tables import add_output_options, markdown, write
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.report.presets import GPUS, preset
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.request.submission import SamplingParams, Submission


@dataclass(frozen=True, slots=True)
class Flop:
    """The work of one prompt in chunks."""

    linear: int
    dense_attention: int
    causal_attention: int
    layer_bytes: int  # of the weights that every step reads: all but embeddings and head


def flop(path: Path, chunks: list[int]) -> Flop:
    """Count the work of one prompt in these chunks; logits are computed for the last token alone."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).eval()
    cache, start, dense_pairs = DynamicCache(config=config), 0, 0
    linear = attention = 0
    for number, tokens in enumerate(chunks):
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            keep = 1 if number == len(chunks) - 1 else torch.zeros(0, dtype=torch.int64, device="meta")
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        for operation, count in counter.get_flop_counts()["Global"].items():
            if "bmm" in str(operation):  # scores and weighted values; linears are mm and addmm
                attention += count
            else:
                linear += count
        start += tokens
        dense_pairs += tokens * start
    total = sum(chunks)
    everything = sum(weight.numel() * weight.itemsize for weight in model.base_model.parameters())
    embeddings = model.get_input_embeddings().weight
    layer_bytes = everything - embeddings.numel() * embeddings.itemsize
    return Flop(linear, attention, attention * (total * (total + 1) // 2) // dense_pairs, layer_bytes)


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one prompt: of all steps, of CPU time, and of the longest step."""

    total: float
    cpu: float
    longest: float


def seconds(engine: Engine, prompt: list[int], repeats: int, most_s: float) -> tuple[Seconds, StepWork]:
    """Return medians of the prompt's seconds, but the least CPU time; and the work, to check its sum.

    After `most_s` seconds no further repeat begins.
    """
    totals, cpu, longest, works = [], [], [], []
    for number in range(repeats):
        if sum(totals) > most_s:
            break
        engine.add(Submission(f"{number}", prompt, SamplingParams(max_tokens=1, temperature=0.0)))
        steps, cpu_before = [], time.process_time()
        while engine.has_work:
            steps.append(engine.step())
        cpu.append(time.process_time() - cpu_before)
        totals.append(sum(step.seconds for step in steps))
        longest.append(max(step.seconds for step in steps))
        works = [step.batch.work for step in steps]
    done = StepWork(sum(work.prefill_tokens for work in works), sum(work.attended for work in works))
    return Seconds(median(totals), min(cpu), median(longest)), done


def written_on_gpus(names: list[str], chunk: int) -> list[list[str]]:
    """Return the rows of the KV bytes that a chunk writes, at the published bandwidth, beside its predicted step."""
    lines = [["GPU, model", "KV of the chunk MiB", "written in µs", "step ms", "share"]]
    for name in names:
        profile = preset(name)
        num_bytes = chunk * profile.token_bytes
        seconds = num_bytes / (GPUS[name.partition("-")[0]].bandwidth * profile.tensor_parallel_size)
        step = profile.cost.seconds(StepWork.of([(0, chunk)]))
        cells = (f"{num_bytes / 2**20:.0f}", f"{seconds * 1e6:.0f}", f"{step * 1e3:.1f}", f"{seconds / step:.2%}")
        lines.append([name, *cells])
    return lines


def sizes_of(tokens: int) -> list[int]:
    """Return the sizes of chunks to measure for a prompt; the last one is the prompt in one step."""
    return [size for size in (64, 128, 256, 512, 1024, 2048) if size < tokens] + [tokens]


def measure(arguments: argparse.Namespace, path: Path) -> tuple[dict[int, tuple[Flop, list[int], Seconds]], int]:
    """Return counts, chunks and seconds by size of chunk; and the KV bytes of a token."""
    tokens = arguments.tokens
    config = {"chunk_policy": "fixed", "enable_prefix_caching": False, "max_num_seqs": 1, "admission": "queue"}
    prompt = [(7919 * position) % 40_000 for position in range(tokens)]
    rows = {}
    engine: Engine | None = None
    for size in sizes_of(tokens):
        limits = {"max_num_batched_tokens": tokens + 64, "max_prefill_tokens": size}
        settings = EngineConfig.model_validate(config | limits)
        if engine is None:
            engine = load_engine(ReplicaSpec(settings.model_spec(arguments.model), settings, os.cpu_count() or 1))
            warm_up(engine)
        else:
            engine = new_engine(engine.model, settings)
        taken, work = seconds(engine, prompt, arguments.repeats, arguments.seconds / len(sizes_of(tokens)))
        assert (work.prefill_tokens, work.attended) == (tokens, tokens**2 / 2)
        chunks = [min(size, tokens - start) for start in range(0, tokens, size)]
        rows[size] = (flop(path, chunks), chunks, taken)
    assert engine is not None
    return rows, engine.model.layout(16).token_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; default: the embedded model")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=180, help="of all prompts; no further repeat begins after them"
    )
    parser.add_argument("--gpus", nargs="*", default=["a100-8b", "h100-8b", "b200-8b", "h100-70b"])
    add_output_options(parser, "chunk-cost")
    arguments = parser.parse_args()

    path, tokens = resolve_model(arguments.model), arguments.tokens
    rows, token_bytes = measure(arguments, path)
    whole, _, of_whole = rows[tokens]
    heads = ["chunk", "steps", "TFLOP causal", "TFLOP dense", "KV written MiB", "KV read MiB", "weights read GiB"]
    lines = [[*heads, "seconds", "relative", "CPU s", "relative", "longest step s"]]
    for size, (counts, chunks, taken) in rows.items():
        causal, dense = counts.linear + counts.causal_attention, counts.linear + counts.dense_attention
        read = sum(sum(chunks[: number + 1]) for number in range(len(chunks)))
        work = (f"{causal / 1e12:.3f}", f"{dense / 1e12:.3f}", f"{tokens * token_bytes / 2**20:.0f}")
        moved = (
            f"{read * token_bytes / 2**20:.0f} ({read / tokens:.1f}x)",
            f"{len(chunks) * counts.layer_bytes / 2**30:.2f}",
        )
        times = (f"{taken.total:.2f}", f"{taken.total / of_whole.total:.2f}x")
        times += (f"{taken.cpu:.2f}", f"{taken.cpu / of_whole.cpu:.2f}x", f"{taken.longest:.2f}")
        lines.append([f"{size}", f"{len(chunks)}", *work, *moved, *times])
    share = whole.causal_attention / (whole.linear + whole.causal_attention)
    told = f"{path.name}, a prompt of {tokens} tokens; attention is {share:.0%} of the causal FLOP."
    on_gpus = markdown(written_on_gpus(arguments.gpus, 512))
    told += f"\n\n{markdown(lines)}\nA chunk of 512 tokens on GPUs, estimated from data sheets:\n\n{on_gpus}"
    write(arguments, told, lines)


if __name__ == "__main__":
    main()
