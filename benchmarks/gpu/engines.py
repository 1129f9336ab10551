"""Time the whole engine with random weights: decodes, prompts whole and in chunks, gaps of streams, throughput.

`measure_step` is a step without the scheduler: making and sending inputs, the forward pass, sampling, and the tokens'
way back to the host, one after the other ("in turn"). Decodes are measured in two more ways: "ahead", where a step
begins before the host has the tokens of the step before, as in service; and "replay", the CUDA graph alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gpu.cases import Bench, Case, Once, Section, UnavailableError
from gpu.models import Weights, paged, random_module
from gpu.rows import Figures

from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import measure_ahead, measure_step, warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

VOCABULARY = 30_000  # the prompts' token ids are below this, and below the model's vocabulary


class Engines:
    """Engines on one model with random weights, one at a time: each has the memory that the one before had."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        max_model_len: int | None = None,
        prepare: Callable[[Any], None] = lambda _: None,
        *,
        tokenizer: Path | None = None,
        **options: Any,
    ) -> None:
        """`prepare` changes transformers' module, for example packs weights. `options`: of loading.

        `tokenizer`: its folder, for grammars.
        """
        self._bench, self._name, self._max_model_len = bench, name, max_model_len
        self._tokenizer = tokenizer
        self._prepare, self._options = prepare, options
        self._model = Once(self._load)
        self._engine: Engine | None = None
        self._settings: dict[str, Any] = {}
        self._is_warm = False

    def _load(self) -> Any:
        module = random_module(self._bench, self._name)
        weights = Weights.of(module)  # before our layers take them from the module
        self._prepare(module)
        return paged(self._bench, module, self._max_model_len, **self._options), weights

    @property
    def weights(self) -> Weights:
        """Return the bytes of the model's weights."""
        return self._model()[1]

    def engine(self, *, is_warm: bool = False, **settings: Any) -> Engine:
        """Return an idle engine with these settings besides those of all; `is_warm`: it predicts steps."""
        if self._engine is None or self._settings != settings:
            self._drop()
            model = self._model()[0]
            self._engine = new_engine(model, EngineConfig(**self._bench.sizes.engine, **settings), self._tokenizer)
            self._settings, self._is_warm = settings, False
            model.pool.tensor.normal_()
        if is_warm and not self._is_warm:
            warm_up(self._engine)
            self._is_warm = True
        return self._engine

    def _drop(self) -> None:
        if self._engine is not None:
            self._engine.model.pool.free()
        self._engine = None
        self._bench.device.collect()

    def free(self) -> None:
        """Free the engine and the model."""
        self._drop()
        self._model.free()
        self._bench.device.collect()


def steps_of(bench: Bench, engines: Engines, name: str) -> Iterator[Case]:
    """Yield decodes and prompts of one model."""
    sizes = bench.sizes
    for streams, context in sizes.decodes:
        yield Case(f"{name}: decode {streams} x {context}", partial(decode, bench, engines, streams, context))
    yield Case(f"{name}: prefill {sizes.prompt}", partial(prefill, bench, engines))
    yield Case(f"{name}: chunks of {sizes.chunk} beside {sizes.streams} decodes", partial(_chunks, bench, engines))


def engine(bench: Bench) -> Iterator[Case]:
    """Yield all figures of the first model."""
    name = next(iter(bench.sizes.models))
    engines, sizes = Engines(bench, name), bench.sizes
    ahead = {"async_scheduling": True}
    yield from steps_of(bench, engines, name)
    for start, tokens in sizes.deep:
        case = f"{name}: chunk of {tokens} at {start} beside {sizes.streams} decodes"
        yield Case(case, partial(_deep, bench, engines, start, tokens))
    yield Case("predictions, percent of what a step took", partial(_predictions, bench, engines))
    yield Case("gaps", partial(_gaps, bench, engines, ahead))
    yield Case("throughput, ahead", partial(_throughput, bench, engines, ahead))
    yield Case("throughput, in turn", partial(_throughput, bench, engines, {"async_scheduling": False}))
    for streams, context in sizes.decodes:
        case = f"{name}: decode {streams} x {context}, eager"
        yield Case(case, partial(decode, bench, engines, streams, context, is_eager=True))
    engines.free()


def _seconds(
    bench: Bench, engine: Engine, chunk: tuple[int, int] | None, streams: int, context: int, repeats: int = 7
) -> float:
    """Return the median seconds of a step, see `_measured`."""
    return _measured(bench, engine, chunk, streams, context, repeats)[1]


def _measured(
    bench: Bench, engine: Engine, chunk: tuple[int, int] | None, streams: int, context: int, repeats: int
) -> tuple[StepWork, float]:
    """Return a step and its median seconds; the first run is not counted. A dry run has one more.

    Raises:
        UnavailableError: the pool does not hold the step.
    """
    vocabulary = min(VOCABULARY, engine.model.vocab_size)
    num_runs = 2 if bench.sizes.is_dry else repeats + 1
    step = measure_step(engine, chunk, streams, context, num_runs, vocabulary)
    if step is None:
        raise UnavailableError(f"the pool of {engine.pages.num_pages} pages does not hold the step")
    return step[0], statistics.median(step[1][1:])


def decode(bench: Bench, engines: Engines, streams: int, context: int, *, is_eager: bool = False) -> Figures:
    """Measure a decode step in turn, ahead, and as its graph alone; eager ones in turn."""
    engine = engines.engine(**({"enforce_eager": True} if is_eager else {"async_scheduling": True}))
    kv_bytes = streams * context * engine.model.layout(engine.config.page_size).token_bytes
    least = (engines.weights.read(streams) + kv_bytes) / bench.bandwidth
    seconds = _seconds(bench, engine, None, streams, context - 1)
    found = {"least_ms": least * 1e3, "in_turn_ms": seconds * 1e3, "in_turn_over_least": seconds / least}
    if not is_eager:
        ahead = _ahead(bench, engine, streams, context - 1)
        found |= {"ahead_ms": ahead * 1e3, "ahead_over_least": ahead / least}
        if (replay := engine.executor.runner.replay_of(streams)) is not None:
            alone = bench.device.timed(replay)
            found |= {"replay_ms": alone * 1e3, "replay_over_least": alone / least}
    return found


def _ahead(bench: Bench, engine: Engine, streams: int, context: int) -> float:
    """Return the median seconds from end to end of steps that begin ahead, as in service: the host's work is hidden."""
    vocabulary = min(VOCABULARY, engine.model.vocab_size)
    intervals = measure_ahead(engine, streams, context, 2 if bench.sizes.is_dry else 10, vocabulary)
    if intervals is None:
        raise UnavailableError(f"the pool of {engine.pages.num_pages} pages does not hold the step")
    return statistics.median(intervals)


def prefill(bench: Bench, engines: Engines) -> Figures:
    """Measure a prompt in one step."""
    engine, tokens = engines.engine(async_scheduling=True), bench.sizes.prompt
    seconds = _seconds(bench, engine, (0, tokens), 0, 0, 3)
    config = engine.model.config
    attention = 2 * config.num_attention_heads * config.head_dim * tokens**2 * config.num_hidden_layers
    flop = engines.weights.flop(tokens, 1) + attention
    return {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds, "of_peak": flop / seconds / bench.peak}


def _chunks(bench: Bench, engines: Engines) -> Figures:
    """Measure a prompt in chunks beside decodes. Its throughput counts all tokens computed, those of decodes too."""
    engine, sizes = engines.engine(async_scheduling=True), bench.sizes
    beside = sizes.streams, sizes.stream_context - 1
    starts = range(0, sizes.prompt, sizes.chunk)
    alone = _seconds(bench, engine, (0, sizes.prompt), 0, 0, 3)
    chunks = [_seconds(bench, engine, (start, sizes.chunk), *beside, 3) for start in starts]
    throughput = (sizes.prompt + len(chunks) * sizes.streams) / sum(chunks)
    return {
        "longest_step_ms": max(chunks) * 1e3,
        "prompt_tokens_per_s": sizes.prompt / sum(chunks),
        "tokens_per_s": throughput,
        "of_prefill": throughput / (sizes.prompt / alone),
    }


def _deep(bench: Bench, engines: Engines, start: int, tokens: int) -> Figures:
    """Measure a step with a chunk deep in a prompt. With contexts in parts, a step of few tokens is a short one."""
    sizes, engine = bench.sizes, engines.engine(async_scheduling=True)
    seconds = _seconds(bench, engine, (start, tokens), sizes.streams, sizes.stream_context - 1, 3)
    return {"ms": seconds * 1e3, "prompt_tokens_per_s": tokens / seconds}


def _predictions(bench: Bench, engines: Engines) -> Figures:
    """Compare steps that the warm-up did not measure with what the scheduler then predicts, and give its cost."""
    sizes, engine = bench.sizes, engines.engine(is_warm=not bench.sizes.is_dry, async_scheduling=True)
    context = sizes.stream_context - 1
    cost = engine.scheduler.forecast.cost or StepCost(base=0.1, per_prefill_token=0.01)  # a dry run is not warm
    kinds: dict[str, tuple[tuple[int, int] | None, int, int]] = {
        f"decode {streams} x {length}": (None, streams, length - 1) for streams, length in sizes.decodes
    }
    kinds |= {f"prefill {tokens}": ((0, tokens), 0, 0) for tokens in (sizes.chunk, sizes.prompt)}
    for start, tokens in [*sizes.deep, (sizes.prompt, sizes.chunk)]:
        kinds[f"chunk of {tokens} at {start} beside {sizes.streams}"] = (start, tokens), sizes.streams, context
    found: Figures = {}
    for name, kind in kinds.items():
        with suppress(UnavailableError):
            work, seconds = _measured(bench, engine, *kind, 3)
            found[name] = 100 * (cost.seconds(work) / seconds - 1)
    return {**found, **asdict(cost)}


def _ids(bench: Bench, count: int, seed: int) -> list[int]:
    most = min(VOCABULARY, next(iter(bench.sizes.models.values()))["vocab_size"])
    ids: list[int] = np.random.default_rng(seed).integers(3, most, count).tolist()
    return ids


def _gaps(bench: Bench, engines: Engines, settings: dict[str, Any]) -> Figures:
    """Measure the gaps of running streams: alone, and while long prompts arrive one after another."""
    sizes, engine = bench.sizes, engines.engine(is_warm=not bench.sizes.is_dry, **settings)
    room = engine.model.max_model_len - sizes.stream_context
    for number in range(sizes.streams):
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        prompt = _ids(bench, sizes.stream_context, number)
        engine.add(Submission(f"stream-{number}", prompt, params, slo_class="interactive"))
    last: dict[str, float] = {}
    while len(last) < sizes.streams:
        last |= {delta.request_id: engine.clock() for delta in engine.step().deltas}

    def run(is_loaded: bool, length: float) -> tuple[list[float], int]:
        found, num_tokens, num_prompts, waiting = [], 0, 0, ""
        last.clear()
        until = engine.clock() + length
        while engine.has_work and (engine.clock() < until or len(found) < 2 * sizes.streams):
            if is_loaded and engine.scheduler.table.get(waiting) is None:
                waiting = f"prompt-{num_prompts}"
                num_prompts += 1
                params = SamplingParams(max_tokens=1, temperature=0.0)
                engine.add(Submission(waiting, _ids(bench, sizes.gap_prompt, 1000 + num_prompts), params))
            step = engine.step()
            now = engine.clock()
            num_tokens += sum(part.num_tokens for part in step.batch.scheduled[step.batch.num_decodes :])
            for delta in step.deltas:
                if delta.request_id.startswith("stream"):
                    if delta.request_id in last:
                        found.append(now - last[delta.request_id])
                    last[delta.request_id] = now
        return sorted(found), num_tokens

    found: Figures = {}
    for name, is_loaded, length in (("quiet", False, sizes.gap_seconds / 4), ("loaded", True, sizes.gap_seconds)):
        gaps, num_tokens = run(is_loaded, length)
        found |= {f"{name}_p50_ms": gaps[len(gaps) // 2] * 1e3, f"{name}_p99_ms": gaps[len(gaps) * 99 // 100] * 1e3}
    engine.fail_all("measured")
    if not num_tokens:
        raise ValueError("no prompt was computed beside the streams: their gaps show nothing")
    rate = num_tokens / sizes.gap_seconds
    tpot_ms = 1e3 * engine.config.slo_classes[0].tpot_s
    return {**found, "of_tpot": found["loaded_p99_ms"] / tpot_ms, "prompt_tokens_per_s": rate}


def batch_prompts(bench: Bench) -> list[list[int]]:
    """Return the prompts that every server is given at once."""
    count, length, _ = bench.sizes.batch
    return [_ids(bench, length, 5000 + number) for number in range(count)]


def _throughput(bench: Bench, engines: Engines, settings: dict[str, Any]) -> Figures:
    """Return output tokens per second with all prompts in flight at once."""
    engine = engines.engine(is_warm=not bench.sizes.is_dry, **settings)  # the interpreter would take 5 s to calibrate
    return {"tokens_per_s": generate(engine, batch_prompts(bench), bench.sizes.batch[2])}


def generate(engine: Engine, prompts: Sequence[list[int]], new_tokens: int, **sampling: Any) -> float:
    """Return output tokens per second with all prompts in flight at once, greedy unless `sampling` says otherwise."""
    engine.pages.block_pool.clear_cache()
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=new_tokens, ignore_eos=True)
        engine.add(Submission(f"batch-{number}", prompt, params))
    while engine.has_work:
        engine.step()
    return len(prompts) * new_tokens / (time.perf_counter() - started)


def shapes(bench: Bench) -> Iterator[Case]:
    """Yield decodes and prompts of the other models."""
    for name in list(bench.sizes.models)[1:]:
        engines = Engines(bench, name, bench.sizes.shape_len)
        yield from steps_of(bench, engines, name)
        engines.free()


SECTIONS = [Section("engine", 200.0, engine)]
SHAPES = Section("shapes", 110.0, shapes)
