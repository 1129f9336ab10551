"""How fast is the whole engine on one GPU, with random weights in the shapes of known models?

    python benchmarks/gpu.py --only engine                              # this is a section of gpu.py: four minutes

Returns figures of decode steps with and without CUDA graphs, prompts in one step and in chunks, gaps of running streams
beside long prompts, and tokens per second beside transformers' continuous batching. `step_seconds` is a step without
the scheduler: making and sending inputs, the forward pass, sampling, and the tokens' way back to the host.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.calibrate import measure_step, warm_up
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine
from crossdock.workers.schedule.request import SamplingParams, Submission

_DENSE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        **_DENSE,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        **_DENSE,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        **_DENSE,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        # Random experts are near ties, among which bfloat16 chooses differently: a check of the logits would fail.
        "initializer_range": 0.002,
    },
}
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "admission": "queue"}
VOCABULARY = 30_000  # the prompts' token ids are below this
SECONDS = 240.0  # no shape begins later: all sections of gpu.py together must take less than ten minutes

Result = dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """Bytes of a module's weights by the part that reads them; all are bfloat16."""

    dense: int
    head: int
    experts: int
    expert_share: float  # of the experts: the share that one token uses

    @classmethod
    def of(cls, module: Any) -> "Weights":
        sizes = {name: parameter.nbytes for name, parameter in module.named_parameters() if "embed_tokens" not in name}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        head = module.get_output_embeddings().weight.nbytes
        config = module.config
        share = config.num_experts_per_tok / config.num_experts if experts else 0.0
        return cls(sum(sizes.values()) - experts - head, head, experts, share)

    def read(self, num_tokens: int) -> float:
        """Return the bytes that a step must read, if tokens choose all experts equally often."""
        return self.dense + self.head + self.experts * (1 - (1 - self.expert_share) ** num_tokens)

    def flop(self, num_tokens: int, num_rows: int) -> float:
        """Return the FLOP of a step: two for each weight of two bytes."""
        return (self.dense + self.experts * self.expert_share) * num_tokens + self.head * num_rows


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()
    return found


def step_seconds(
    engine: Engine, chunk: tuple[int, int] | None, num_streams: int = 0, context: int = 0, repeats: int = 7
) -> float | None:
    """Return the median of `measure_step`. None: the step does not fit into the pool."""
    step = measure_step(engine, chunk, num_streams, context, repeats + 1, VOCABULARY)
    return statistics.median(step[1][1:]) if step is not None else None


def decodes(engine: Engine, weights: Weights, bandwidth: float) -> Result:
    """Time decode steps with and without graphs, beside the time to read weights and KV."""
    found: Result = {}
    token_bytes = engine.model.layout(engine.config.page_size).token_bytes
    recorded = engine.pipeline.runner.graphs
    for size in (1, 64, 256):
        for context in (1024, 8192):
            row: Result = {"least_ms": (weights.read(size) + size * context * token_bytes) / bandwidth * 1e3}
            for name, graphs in (("graph", recorded), ("eager", None)):
                engine.pipeline.runner = replace(engine.pipeline.runner, graphs=graphs)
                seconds = step_seconds(engine, None, size, context - 1)
                if seconds is None:
                    row["does_not_fit"] = True
                elif name == "eager" or recorded is not None:
                    row |= {f"{name}_ms": seconds * 1e3, f"{name}_of_least": row["least_ms"] / seconds / 1e3}
            engine.pipeline.runner = replace(engine.pipeline.runner, graphs=recorded)
            found[f"decode {size} x {context}"] = row
    return found


def prefills(engine: Engine, weights: Weights, matmul: float, tokens: int = 8192, chunk: int = 2048) -> Result:
    """Time a prompt in one step, as a share of the matmul peak; and beside 64 decodes, in one step and in chunks."""
    config = engine.model.config
    attention = 2 * config.num_attention_heads * config.head_dim * tokens**2 * config.num_hidden_layers
    alone = step_seconds(engine, (0, tokens), repeats=3)
    whole = step_seconds(engine, (0, tokens), 64, 1023, 3)
    chunks = [step_seconds(engine, (start, chunk), 64, 1023, 3) for start in range(0, tokens, chunk)]
    if alone is None or whole is None or None in chunks:
        return {f"prefill {tokens}": {"does_not_fit": True}}
    return {
        f"prefill {tokens}": {"ms": alone * 1e3, "of_matmul": (weights.flop(tokens, 1) + attention) / alone / matmul},
        f"prefill {tokens} beside 64 decodes": {
            "monolithic_ms": whole * 1e3,
            f"chunks_of_{chunk}_ms": sum(chunks) * 1e3,
            "longest_gap_ms": max(chunks) * 1e3,
        },
    }


def gaps(engine: Engine, prompt_tokens: int = 32_768, num_streams: int = 64, seconds: float = 10.0) -> Result:
    """Measure the gaps of running streams: alone, and while long prompts arrive one after another."""
    for number in range(num_streams):
        params = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
        engine.add(Submission(f"stream-{number}", ids(1024, number), params, slo_class="interactive"))
    last: dict[str, float] = {}
    while len(last) < num_streams:
        last |= {delta.request_id: engine.clock() for delta in engine.step().deltas}

    def run(is_loaded: bool, length: float) -> tuple[list[float], int]:
        found, num_tokens, num_prompts, waiting = [], 0, 0, ""
        last.clear()
        until = engine.clock() + length
        while (now := engine.clock()) < until:
            if is_loaded and engine.scheduler.get(waiting) is None:
                waiting = f"prompt-{num_prompts}"
                num_prompts += 1
                params = SamplingParams(max_tokens=1, temperature=0.0)
                engine.add(Submission(waiting, ids(prompt_tokens, 1000 + num_prompts), params))
            step = engine.step()
            now = engine.clock()
            num_tokens += sum(part.num_tokens for part in step.batch.scheduled[step.batch.num_decodes :])
            for delta in step.deltas:
                if delta.request_id.startswith("stream"):
                    if delta.request_id in last:
                        found.append(now - last[delta.request_id])
                    last[delta.request_id] = now
        return sorted(found), num_tokens

    row: Result = {}
    for name, is_loaded, length in (("quiet", False, seconds / 4), ("loaded", True, seconds)):
        found, num_tokens = run(is_loaded, length)
        row |= {f"{name}_p50_ms": found[len(found) // 2] * 1e3, f"{name}_p99_ms": found[len(found) * 99 // 100] * 1e3}
    engine.fail_all("measured")
    return {f"64 streams under {prompt_tokens}-token prompts": row | {"prefill_tokens_per_s": num_tokens / seconds}}


def throughput(engine: Engine, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Return output tokens per second with all prompts in flight at once."""
    engine.pages.clear_cache()
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Submission(f"batch-{number}", prompt, params))
    while engine.has_work:
        engine.step()
    return len(prompts) * new_tokens / (time.perf_counter() - started)


def transformers_throughput(module: Any, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Return the same of transformers' continuous batching, which makes its own pool in the free memory."""
    module.set_attn_implementation("sdpa")
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    started = time.perf_counter()
    outputs = module.generate_batch(list(prompts), generation_config=config)
    return sum(len(output.generated_tokens) for output in outputs.values()) / (time.perf_counter() - started)


def measured(values: dict[str, Any], limits: Result, is_first: bool, device: str = "cuda") -> Result:
    """Return all figures of one shape; the longest measurements only of the first shape."""
    values = dict(values)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engine = Engine(wrap_module(module), EngineConfig(**SETTINGS))
    assert engine.model.pool is not None
    engine.model.pool.normal_()
    weights = Weights.of(module)
    found = decodes(engine, weights, limits["bandwidth"])
    found |= prefills(engine, weights, limits["matmul"])
    if not is_first:
        return found
    warm_up(engine)
    found |= gaps(engine)
    prompts = [ids(1024, 5000 + number) for number in range(64)]
    row: Result = {"tokens_per_s": throughput(engine, prompts, 256)}
    engine.pipeline.is_ahead = False
    row["in_turn_tokens_per_s"] = throughput(engine, prompts, 256)
    found["64 prompts of 1024, 256 tokens each"] = row
    engine.model.free_pool()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    try:
        row["transformers_tokens_per_s"] = transformers_throughput(module, prompts, 256)
    except Exception as error:  # its interface changes between releases
        row["transformers"] = repr(error)
    return found
