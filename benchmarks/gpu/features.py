"""Measure what has no figure on a GPU yet: packed weights, adapters, drafts, sampling, pages that leave for the host,
latents, JSON, new weights, sleep.

Each figure stands beside that of plain weights, or of the same streams without the feature, on the same card.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.cases import Bench, Case, Section
from gpu.engines import Engines, batch_prompts, decode, generate, prefill
from gpu.models import paged, random_module, write_tokenizer
from gpu.rows import Figures
from torch import nn

from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.model.weights.packed_layers import put_experts, put_linear
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.sleep import Sleep
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams, Submission

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))

from adapters import random_adapter, run_round

_RANK = 16  # of adapters
_DRAFTS = 3  # tokens a stream
_UPDATED_POOL = 1 << 30  # bytes of pages: two models and pools are there at once
_ENTRY = {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}}
_SCHEMA = {"type": "array", "minItems": 200, "items": {**_ENTRY, "required": ["name", "count"]}}
"""JSON that is longer than any answer here."""
_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
}


def sampling(bench: Bench) -> Iterator[Case]:
    """Yield the throughput of the first model with each way to sample."""
    engines = Engines(bench, next(iter(bench.sizes.models)))
    for name, way in _WAYS.items():
        yield Case(name, partial(_sampled, bench, engines, way))
    engines.free()


def _sampled(bench: Bench, engines: Engines, way: dict[str, Any]) -> Figures:
    engine = engines.engine(is_warm=not bench.sizes.is_dry, async_scheduling=True)
    count, _, new_tokens = bench.sizes.batch
    prompts = [prompt[: bench.sizes.stream_context // 32 or 1] for prompt in batch_prompts(bench)]
    rate = generate(engine, prompts, new_tokens, **way)
    return {"tokens_per_s": rate, "ms_a_step": 1e3 * count / rate}


def rows_in_e4m3(weight: torch.Tensor) -> PackedMatrix:
    """Round a weight [N, K] with a scale for each row, as `--quantization fp8` does."""
    scales = (weight.abs().amax(1, keepdim=True).float() / 448).clamp(min=1e-12)
    return PackedMatrix("e4m3", (weight / scales).to(torch.float8_e4m3fn), scales, None, weight.shape[1])


def random_codes(kind: Any, group: int, rows: int, columns: int, device: str) -> PackedMatrix:
    """Return random codes of four bits, with small scales for groups of columns."""
    group = min(group, columns)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    return PackedMatrix(kind, codes, torch.full((rows, columns // group), 2.0**-8, device=device), None, group)


def pack_linears(pack: Callable[[torch.Tensor], PackedMatrix], module: Any) -> None:
    """Pack the linears of all layers."""
    for part in module.model.layers.modules():
        if isinstance(part, nn.Linear):
            put_linear(part, pack(part.weight.detach()))


def pack_experts(module: Any) -> None:
    """Replace the experts of gpt-oss by random codes of MXFP4."""
    module.set_experts_implementation("eager")  # as a checkpoint whose experts are packed is loaded
    for layer in module.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, name).shape
            device, dtype = str(getattr(experts, name).device), getattr(experts, name).dtype
            experts.is_transposed = True
            codes = [[random_codes("e2m1", 32, outputs, inputs, device)] for _ in range(count)]
            put_experts(experts, name, codes, dtype)


def packed(bench: Bench) -> Iterator[Case]:
    """Yield decodes and a prompt with packed weights, beside those of plain ones in this rows file."""
    name, device = next(iter(bench.sizes.models)), bench.device.name
    forms: dict[str, Callable[[torch.Tensor], PackedMatrix]] = {
        "FP8 by rows": rows_in_e4m3,
        "W4A16": lambda weight: random_codes("int4", 128, *weight.shape, device),
    }
    for form, pack in forms.items():
        engines = Engines(bench, name, bench.sizes.shape_len, partial(pack_linears, pack))
        for streams, context in bench.sizes.decodes:
            plain = f"{name}: decode {streams} x {context}", "ahead_ms"
            yield Case(f"{form}: decode {streams} x {context}", partial(_packed, bench, engines, plain))
        plain = f"{name}: prefill {bench.sizes.prompt}", "ms"
        yield Case(f"{form}: prefill", partial(_packed, bench, engines, plain))
        engines.free()
    for name in bench.sizes.coded:
        engines = Engines(bench, name, bench.sizes.shape_len, pack_experts)
        for streams, context in bench.sizes.decodes:
            case = f"{name} in MXFP4: decode {streams} x {context}"
            yield Case(case, partial(decode, bench, engines, streams, context))
        yield Case(f"{name} in MXFP4: prefill", partial(prefill, bench, engines))
        engines.free()


def _packed(bench: Bench, engines: Engines, plain: tuple[str, str]) -> Figures:
    case, figure = plain
    if "prefill" in case:
        ms = prefill(bench, engines)["ms"]
    else:
        streams, context = (int(word) for word in case.rpartition("decode ")[2].split(" x "))
        ms = decode(bench, engines, streams, context)["ahead_ms"]
    kernels = engines.engine(async_scheduling=True).model.kernels
    return {"ms": ms, "of_plain": ms / bench.rows.figures("engine", case).get(figure, float("nan")), "by": kernels}


def adapters(bench: Bench) -> Iterator[Case]:
    """Yield streams of several adapters beside the same streams of the base model."""
    count, _ = bench.sizes.adapters
    name = next(iter(bench.sizes.models))
    engines = Engines(bench, name, bench.sizes.shape_len, max_lora_rank=_RANK, max_loras=count)
    yield Case("adapters", partial(_adapters, bench, engines))
    engines.free()


def _adapters(bench: Bench, engines: Engines) -> Figures:
    count, streams = bench.sizes.adapters
    lora = {"enable_lora": True, "max_loras": count, "max_lora_rank": _RANK, "enable_prefix_caching": False}
    engine = engines.engine(is_warm=not bench.sizes.is_dry, **lora)
    tokens = bench.sizes.batch[2]
    with tempfile.TemporaryDirectory() as folder:
        own = [random_adapter(engine, Path(folder) / str(number), _RANK, number) for number in range(count)]
        kinds = {"base": [None] * count * streams, "adapters": own * streams}
        rates = {}
        for kind, of_stream in kinds.items():
            for turn, length in (("first", 2), ("timed", tokens)):  # the first round loads adapters
                sizes = {"streams": count * streams, "tokens": length, "vocabulary": engine.model.vocab_size}
                sizes["prompt_len"] = bench.sizes.batch[1]
                found = run_round(engine, of_stream, **sizes, name=f"{kind} {turn}")
            rates[f"{kind}_tokens_per_s"] = found.rate
    if engine.adapters is not None:
        engine.adapters.close()
    return {**rates, "step_over_base": rates["base_tokens_per_s"] / rates["adapters_tokens_per_s"]}


def drafts(bench: Bench) -> Iterator[Case]:
    """Yield streams that repeat themselves, with drafts from their own text and without."""
    engines = Engines(bench, next(iter(bench.sizes.models)), bench.sizes.shape_len)
    for streams in bench.sizes.drafted:
        yield Case(f"{streams} streams", partial(_drafted, bench, engines, streams))
    engines.free()


def _drafted(bench: Bench, engines: Engines, streams: int) -> Figures:
    tokens, found = bench.sizes.batch[2], dict[str, Any]()
    part = batch_prompts(bench)[0][: 3 if bench.sizes.is_dry else 8]
    prompts = [[*part, number + 3, *part, number + 3, *part] for number in range(streams)]
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=_DRAFTS)
    for name, settings in (("plain", {"async_scheduling": False}), ("drafted", {"speculative_config": config})):
        engine = engines.engine(is_warm=not bench.sizes.is_dry, **settings)
        generate(engine, prompts, 2)
        found[f"{name}_tokens_per_s"] = generate(engine, prompts, tokens)
    return {**found, "gain": found["drafted_tokens_per_s"] / found["plain_tokens_per_s"]}


def evictions(bench: Bench) -> Iterator[Case]:
    """Yield decode steps beside pages that go to the host's memory."""
    engines = Engines(bench, next(iter(bench.sizes.models)))
    yield Case(f"{bench.sizes.evicted} pages", partial(_evicted, bench, engines))
    engines.free()


def _evicted(bench: Bench, engines: Engines) -> Figures:
    """Measure how long steps wait that write to evicted pages: to all of them, and to one while the others leave."""
    count = bench.sizes.evicted
    engine = engines.engine(async_scheduling=True)
    pages = engine.model.pool.by_page[:count].view(torch.uint8).view(count, -1)
    copies = PoolCopies(pages, count)
    x = torch.zeros(1, device=bench.device.name)

    def step(written: range) -> None:
        for page in range(count):
            copies.copy_out([page], [page])
        copies.claim(written)
        x.add_(1)

    seconds = bench.device.timed(lambda: step(range(count)), 5)
    of_one = bench.device.timed(lambda: step(range(1)), 5)
    copies.settle_all()
    differing = int((copies.slots.to(pages.device) != pages).any(1).sum())
    rate = pages.nbytes / seconds / 1e9
    return {"ms": 1e3 * seconds, "one_page_ms": 1e3 * of_one, "gb_per_s": rate, "pages_that_differ": differing}


def latents(bench: Bench) -> Iterator[Case]:
    """Yield decodes of models whose pages hold latents."""
    for name in bench.sizes.latent:
        engines = Engines(bench, name, bench.sizes.shape_len)
        for streams, context in bench.sizes.decodes:
            case = f"{name}: decode {streams} x {context}"
            yield Case(case, partial(decode, bench, engines, streams, context))
        engines.free()


def structured(bench: Bench) -> Iterator[Case]:
    """Yield streams that write JSON by a schema, beside the same streams without one."""
    sizes = bench.sizes
    name, shape = next(iter((sizes.served if sizes.is_dry else sizes.models).items()))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), shape["vocab_size"])
        engines = Engines(bench, name, None, partial(_end_with, shape["vocab_size"] - 1), tokenizer=Path(folder))
        yield Case("JSON", partial(_structured, bench, engines))
        engines.free()


def _end_with(token: int, module: Any) -> None:
    """Have `token` end answers, the tokenizer's last one: grammars need an end that is no text."""
    module.config.eos_token_id = module.generation_config.eos_token_id = token


def _structured(bench: Bench, engines: Engines) -> Figures:
    grammar = Grammar("json_schema", json.dumps(_SCHEMA))
    plain = _sampled(bench, engines, {})
    written = _sampled(bench, engines, {"grammar": grammar})
    return {**written, "over_plain": written["ms_a_step"] / plain["ms_a_step"]}


def updates(bench: Bench) -> Iterator[Case]:
    """Yield an update of all weights in place."""
    yield Case("all weights", partial(_updated, bench))


def _updated(bench: Bench) -> Figures:
    """Measure the reading of new weights, which goes on beside steps, and the pause in which they are put in place.

    Recorded steps read them afterwards: the tokens must be those of an engine that began with these weights.
    """
    name = next(iter(bench.sizes.served))
    prompts, tokens = batch_prompts(bench)[:8], bench.sizes.batch[2]
    with tempfile.TemporaryDirectory() as folder:
        module = random_module(bench, name)
        module.save_pretrained(folder)
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        expected = _answers(_engine_of(bench, module), prompts, tokens)
        del module
        bench.device.collect()
        engine = _engine_of(bench, random_module(bench, name))
        before = _answers(engine, prompts, tokens)
        weights = engine.executor.new_weights
        assert weights is not None
        started = time.perf_counter()
        weights.call("start", {})
        weights.call("read", {"folder": folder})
        read_s = time.perf_counter() - started
        started = time.perf_counter()
        weights.put()
        engine.executor.runner.wait()
        pause_s = time.perf_counter() - started
        engine.pages.block_pool.clear_cache()
        found = _answers(engine, prompts, tokens)
    differing = sum(one != other for one, other in zip(found, expected, strict=True))
    changed = sum(one != other for one, other in zip(found, before, strict=True))
    return {
        "gb": num_bytes / 1e9,
        "read_s": read_s,
        "pause_ms": 1e3 * pause_s,
        "answers_that_differ": differing,
        "answers_that_changed": changed,
    }


def sleeps(bench: Bench) -> Iterator[Case]:
    """Yield a sleep of each level. Memory is counted as the device's driver counts it."""
    for level in (1, 2):
        yield Case(f"level {level}", partial(_slept, bench, level))


def _slept(bench: Bench, level: int) -> Figures:
    """Measure what a sleep gives back, and how long it and waking take, with steps recorded again.

    At level 1 the host keeps the weights of a GPU; at level 2 they are read from files again.
    """
    prompts, tokens = batch_prompts(bench)[:8], bench.sizes.batch[2]
    with tempfile.TemporaryDirectory() as folder:
        module = random_module(bench, next(iter(bench.sizes.served)))
        module.save_pretrained(folder)
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        engine = _engine_of(bench, module)
        engine.model.pool.wait_for_memory()
        expected = _answers(engine, prompts, tokens)
        num_bytes += engine.model.pool.tensor.nbytes
        sleep = Sleep(engine, Path(folder), fingerprint(Path(folder)))
        bench.device.collect()
        used = bench.device.used()
        started = time.perf_counter()
        sleep.sleep(level)
        bench.device.wait()
        slept = time.perf_counter()
        freed = used - bench.device.used()
        called = time.perf_counter()
        sleep.read([])
        sleep.wake([])
        bench.device.wait()
        awake = time.perf_counter()
        found = _answers(engine, prompts, tokens)
    return {
        "gb": num_bytes / 1e9,
        "freed_share": freed / num_bytes,
        "sleep_s": slept - started,
        "wake_s": awake - called,
        "answers_that_differ": sum(one != other for one, other in zip(found, expected, strict=True)),
    }


def _engine_of(bench: Bench, module: Any) -> Engine:
    return new_engine(paged(bench, module), EngineConfig(**{**bench.sizes.engine, "kv_cache_memory": _UPDATED_POOL}))


def _answers(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy tokens of each prompt."""
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.add(Submission(f"{number}", prompt, params))
    while engine.has_work:
        for delta in engine.step().deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [found[f"{number}"] for number in range(len(prompts))]


SAMPLING = Section("sampling", 60.0, sampling)
SECTIONS = [
    Section("packed weights", 150.0, packed),
    Section("adapters", 60.0, adapters),
    Section("drafts", 60.0, drafts),
    Section("evicted pages", 20.0, evictions),
]
BESIDE_SERVERS = [
    Section("latents", 60.0, latents),
    Section("structured output", 40.0, structured),
    Section("weight update", 40.0, updates),
    Section("sleep", 40.0, sleeps),
]
"""The sections of the call `servers` that fit into its time."""
