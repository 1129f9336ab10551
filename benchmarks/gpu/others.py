"""Throughput of other engines with the same weights' shape and the same prompts. Last: their interfaces change."""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu.cases import Bench, Case, Section, UnavailableError
from gpu.engines import batch_prompts
from gpu.models import random_module
from gpu.rows import Figures
from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig


def others(bench: Bench) -> Iterator[Case]:
    """Yield output tokens per second of every engine that is installed."""
    yield Case("transformers, continuous batching", partial(_transformers, bench))
    yield Case("vLLM", partial(_vllm, bench))


def _transformers(bench: Bench) -> Figures:
    """Measure `generate_batch`, which makes its own pool in the free memory; the first batch warms it up."""
    module: Any = random_module(bench, next(iter(bench.sizes.models)))
    module.eval().requires_grad_(False).set_attn_implementation("sdpa")
    prompts, new_tokens = batch_prompts(bench), bench.sizes.batch[2]
    # No token ends a stream: all engines generate equally many.
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1)
    options: dict[str, Any] = {"generation_config": config}
    if bench.sizes.is_dry:  # by default its pool takes most of the memory of the machine
        options["continuous_batching_config"] = ContinuousBatchingConfig(page_size=16, num_blocks=8)
    module.generate_batch(prompts[:2], **options)
    started = time.perf_counter()
    outputs = module.generate_batch(prompts, **options)
    seconds = time.perf_counter() - started
    made = sum(len(output.generated_tokens) for output in outputs.values())
    return {"tokens_per_s": made / seconds, "tokens": made, "expected_tokens": len(prompts) * new_tokens}


def _vllm(bench: Bench) -> Figures:
    """Measure vLLM's offline engine in a process of its own, with random weights of the same configuration."""
    if importlib.util.find_spec("vllm") is None:
        raise UnavailableError("vllm is not installed")
    values = dict(next(iter(bench.sizes.models.values())))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = ["LlamaForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        order = {"model": folder, "prompts": batch_prompts(bench), "new_tokens": bench.sizes.batch[2]}
        script = Path(__file__).with_name("vllm_throughput.py")
        done = subprocess.run(
            [sys.executable, script], input=json.dumps(order), stdout=subprocess.PIPE, text=True, check=True
        )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


SECTIONS = [Section("others", 160.0, others)]
