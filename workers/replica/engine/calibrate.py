"""Measures the seconds of steps on this device, so that the scheduler can predict steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from statistics import median

from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.remembered_sweep import remembered_factor, remembered_sweep
from crossdock.workers.report.profile import SchedulingProfile, TierSize
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.request.batch import NO_STATE, Batch, Scheduled, StatePages
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams, Submission

_SWEPT_CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SWEPT_STREAMS = (1, 2, 4, 8, 16, 32, 64)
_STREAMS_IN_CONTEXT = (1, 4, 16, 64)  # these also after longer contexts and beside a chunk
_LONG_STEP = 0.1  # seconds
# Median of a step's seconds by the least, from which it is repeated; how long.
_SPREAD = 1.25
_REPEATED_S = 0.3
_MOST_SCORED_FACTOR = 4.0  # more than this is the noise of a busy machine
_SWEPT_PICTURES = ((2, 1), (8, 1), (8, 4), (16, 1), (24, 1))  # (size, number of pictures in a batch)
_SWEPT_CONTEXT = 131_072  # tokens of all streams together
_LENGTHS_OF_TILES = (256, 16, 8, 4, 2)  # of chunks, beside 64, for which GPUs compile kernels of unlike tiles


def warm_up(engine: Engine) -> SchedulingProfile:
    """Make an idle engine ready: run it once, so that no user pays for first calls, then measure steps of every kind.

    From then on the scheduler predicts. Returns the profile that the replica advertises.
    """
    model = engine.model
    pages = engine.pages
    for length in (64, *(_LENGTHS_OF_TILES if model.device.type == "cuda" else ())):
        prompt = [(length + position) % model.vocab_size for position in range(min(length, model.max_model_len - 4))]
        engine.add(Submission("warm-up", prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
        while engine.has_work:
            engine.step()
    _run_whole_picture(engine)
    pages.block_pool.clear_cache()

    with model.pool.memory_paused():
        sweep = remembered_sweep(engine, lambda: _sweep(engine), lambda: _check(engine))
        fit = engine.calibrate(sweep, _intervals(engine), model.most_context)
        engine.scheduler.forecast.scored_factor = remembered_factor(engine, lambda: _scored_factor(engine))
        if pictures := _encoder_sweep(engine):
            engine.calibrate_encoder(pictures)
    return SchedulingProfile(
        **engine.settings,
        windows=pages.windows,
        state_pages=pages.state_pages,
        tensor_parallel_size=model.part.position.tensor_size,
        pipeline_parallel_size=model.part.position.num_stages,
        device=model.device.type,
        kernels=model.kernels,
        cost=fit.cost,
        encoder_cost=engine.encoder_fit.cost if engine.encoder_fit is not None else None,
        encoder_tokens=engine.scheduler.encoding.capacity,
        keeps_items_whole=engine.scheduler.encoding.keeps_items_whole,
        tiers=_tiers(engine),
        overrun=fit.overrun,
        interval_share=engine.intervals.share,
    )


def _tiers(engine: Engine) -> tuple[TierSize, ...]:
    """Return the tiers below the pool."""
    sizes = {"host": int(engine.config.kv_cache_host_memory or 0), "files": engine.config.kv_files[1]}
    return tuple(
        TierSize(name=tier.name, num_bytes=sizes[tier.name], bytes_per_second=engine.page_bytes / tier.load_s)
        for tier in engine.scheduler.loading.tiers.tiers
    )


def _run_whole_picture(engine: Engine) -> None:
    """Run a picture whose rows see later rows, if the model has any: their chunks have a kernel variant on GPUs."""
    encoder = engine.model.encoder
    config = engine.model.config
    if encoder is None or not encoder.attends_both_ways:
        return
    item = encoder.example(2)
    prompt = [config.image_token_id] * item.num_embedding_tokens + [0]
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    with suppress(InvalidField):  # then requests with pictures are refused as well
        engine.add(Submission("warm-up", prompt, sampling, items=[item]))
    while engine.has_work:
        engine.step()
    engine.scheduler.encoding.clear()
    encoder.clear()


def _sweep(engine: Engine) -> list[tuple[StepWork, float]]:
    """Return steps of every kind and their seconds, the best of three: chunks of several sizes and contexts, decodes in
    several numbers and contexts, and both together. A step that other work disturbed is repeated.

    The content of pages does not matter to the time, so deep contexts are swept without computing them. The sweep takes
    5 s of two cores (CPU time; SmolLM2-135M, Zen 4, 2026-11-21).
    """
    sweep: list[tuple[StepWork, float]] = []
    engine.model.pool.wait_for_memory()  # pages that were never written are read faster than they will be

    def measure(chunk: tuple[int, int] | None, num_streams: int = 0, context: int = 0) -> float:
        seconds = list[float]()
        while not seconds or (sum(seconds) < _REPEATED_S and median(seconds) > _SPREAD * min(seconds)):
            if (step := measure_step(engine, chunk, num_streams, context)) is None:
                return 0.0
            work = step[0]
            seconds = seconds + step[1]
        sweep.append((work, min(seconds)))
        return min(seconds)

    config = engine.config
    longest = min(engine.model.max_model_len, engine.pages.num_pages * config.page_size)
    ceiling = min(config.max_num_batched_tokens, longest)
    small = large = min(64, ceiling)
    for large in [tokens for tokens in _SWEPT_CHUNKS if tokens <= ceiling] or [ceiling]:
        if measure((0, large)) > _LONG_STEP:
            break  # on this device a larger one only takes longer
    shallow, deep = ((longest - max(small, large)) // part // config.page_size * config.page_size for part in (4, 1))
    if shallow:
        measure((shallow, large))
        for start, tokens in product((shallow, deep), (small, min(16, small))):  # a chunk of any size reads the context
            measure((start, tokens))
    most = engine.model.most_context
    contexts = (32, 256, 2048, *([int(2 * most), int(8 * most)] if most < longest else []))
    for streams in _SWEPT_STREAMS:
        if streams > config.max_num_seqs:
            break
        for context in contexts if streams in _STREAMS_IN_CONTEXT else (32,):
            if (
                context < longest
                and streams * context <= _SWEPT_CONTEXT
                and measure(None, streams, context) > _LONG_STEP
            ):
                break
        if streams in _STREAMS_IN_CONTEXT:
            measure((0, small), streams, min(32, longest - 1))
        if shallow and streams in (4, 64):
            measure((shallow, small), streams, min(256, longest - 1))
    return sweep


def _check(engine: Engine) -> list[tuple[StepWork, float]]:
    """Return two steps of the sweep and their seconds, the best of three: a chunk, and decodes."""
    config = engine.config
    longest = min(engine.model.max_model_len, engine.pages.num_pages * engine.config.page_size)
    chunk = min(64, config.max_num_batched_tokens, longest)
    streams = min(4, config.max_num_seqs)
    steps = measure_step(engine, (0, chunk), 0, 0), measure_step(engine, None, streams, min(32, longest - 1))
    return [(step[0], min(step[1])) for step in steps if step is not None]


def _scored_factor(engine: Engine) -> float:
    """Return the factor by which a chunk takes longer when the log-probabilities of its tokens are wanted.

    Every token then needs logits, and their order.
    """
    longest = min(engine.model.max_model_len, engine.pages.num_pages * engine.config.page_size)
    chunk = 0, min(64, engine.config.max_num_batched_tokens, longest)
    plain = measure_step(engine, chunk, 0, 0)
    scored = measure_step(engine, chunk, 0, 0, num_alternatives=20)
    usual = engine.scheduler.forecast.cost.chunk_seconds(*chunk) if engine.scheduler.forecast.cost is not None else 0.0
    if plain is None or scored is None or not usual:
        return 1.0
    return min(1 + max(min(scored[1]) - min(plain[1]), 0.0) / usual, _MOST_SCORED_FACTOR)


def _encoder_sweep(engine: Engine) -> list[tuple[list[int], float]]:
    """Return (rows of each picture, seconds) of batches of pictures, the best of two; none where there is no encoder.

    Larger pictures are measured only while one takes little time. The others are learnt from requests.
    """
    encoder = engine.model.encoder
    measured = list[tuple[list[int], float]]()
    if encoder is None:
        return measured
    for size, number in _SWEPT_PICTURES:
        items = [encoder.example(size)] * number
        if items[0].num_embedding_tokens > engine.model.max_model_len:
            break
        seconds = min(encoder.measure(items) for _ in range(2))
        measured.append(([item.num_embedding_tokens for item in items], seconds))
        if seconds > _LONG_STEP:
            break
    return measured


def _intervals(engine: Engine) -> list[tuple[float, float]]:
    """Return the interval at which steps of three kinds end in a full pipeline, and their seconds alone.

    The kinds are a chunk, a chunk beside streams, and decodes. Nothing is measured where there is one stage.
    """
    if engine.model.part.position.num_stages == 1:
        return []
    config = engine.config
    longest = min(engine.model.max_model_len, engine.pages.num_pages * config.page_size)
    large, small = (min(tokens, config.max_num_batched_tokens, longest) for tokens in (256, 64))
    few, many = (min(streams, config.max_num_seqs) for streams in (4, 16))
    found = []
    for chunk, num_streams, context in (((0, large), 0, 0), ((0, small), few, 32), (None, many, 32)):
        with _step_of(engine, chunk, num_streams, min(context, longest - 1)) as batch:
            if batch is not None:
                alone = min(engine.run_batch(batch) for _ in range(3))
                found.append((median(engine.run_batch_often(batch)), alone))
    return found


def measure_step(
    engine: Engine,
    chunk: tuple[int, int] | None,
    num_streams: int,
    context: int,
    repeats: int = 3,
    vocabulary: int = 1,
    num_alternatives: int | None = None,
) -> tuple[StepWork, list[float]] | None:
    """Return the work, and the seconds of each of `repeats` runs, of one step on an idle engine.

    The step is `chunk`, (start, tokens), beside `num_streams` decodes after `context` tokens each. Token ids are spread
    over the first `vocabulary`, since experts are chosen by them. `num_alternatives`: beside the log-probability of
    each prompt token; None: no log-probabilities. Returns None where the pool does not hold the step.
    """
    with _step_of(engine, chunk, num_streams, context, vocabulary, num_alternatives) as batch:
        return None if batch is None else (batch.work, [engine.run_batch(batch) for _ in range(repeats)])


def measure_ahead(
    engine: Engine, num_streams: int, context: int, times: int, vocabulary: int = 1
) -> list[float] | None:
    """Return the seconds between the ends of decode steps that begin before the host has the tokens of the step before.

    As `measure_step` otherwise, which runs one step after the other, with the host's work between them.
    """
    with _step_of(engine, None, num_streams, context, vocabulary) as batch:
        return None if batch is None else engine.run_batch_often(batch, times)


@contextmanager
def _step_of(
    engine: Engine,
    chunk: tuple[int, int] | None,
    num_streams: int,
    context: int,
    vocabulary: int = 1,
    num_alternatives: int | None = None,
) -> Iterator[Batch | None]:
    """Yield the step that `measure_step` runs, with pages for it; None where the pool does not hold the step."""
    size = engine.config.page_size
    wanted = [(context, 1)] * num_streams + ([chunk] if chunk is not None else [])
    state_pages = engine.pages.state_pages
    needs = PageNeeds(size, engine.pages.windows, engine.config.max_num_batched_tokens, state_pages)
    if sum(needs.at_once(start + tokens) for start, tokens in wanted) > engine.pages.block_pool.num_available:
        yield None
        return
    parts = []
    for number, (start, tokens) in enumerate(wanted):
        name = f"warm-up-{number}"
        token_ids = [(number + place) * 7919 % vocabulary for place in range(start + tokens)]
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=num_alternatives)
        request = Request(Submission(name, token_ids, sampling))
        total = needs.pages(start + tokens)
        pages, *further = (
            _repeated(engine.pages.allocate(name, total if most is None else min(total, most), group), total)
            for group, most in enumerate(needs.most)
        )
        state = _zero_state(engine, name) if state_pages else NO_STATE
        parts.append(Scheduled(request, start, tokens, pages, samples=True, further_pages=further, state=state))
    yield Batch(parts, num_streams)
    for part in parts:
        engine.pages.release(part.request.id)


def _zero_state(engine: Engine, owner: str) -> StatePages:
    """Return zeroed pages for the recurrent state of a part: old contents may be NaN."""
    engine.pages.states.allocate(owner)
    pages = engine.pages.states.by_owner[owner].own
    engine.model.pool.by_page[list(pages)] = 0
    return StatePages(pages, pages)


def _repeated(pages: Sequence[int], count: int) -> list[int]:
    """Repeat `pages` up to `count` pages: before its window, a group may have any pages."""
    return [pages[number % len(pages)] for number in range(count)]
