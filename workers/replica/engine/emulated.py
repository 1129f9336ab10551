"""An engine on an emulated device: steps take the seconds that a profile predicts, and tokens follow from the request.

No torch, no weights, no KV memory. All the rest is real: scheduler, pages by number, pipeline, transfers, profiles.
"""

import time
import zlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from crossdock.kvtransfer.layout import LayerShape, PageGroup, PoolSpec, Shard
from crossdock.kvtransfer.transport import Memory
from crossdock.workers.model.architecture import decoder_fields
from crossdock.workers.model.end_tokens import end_of_tokenizer
from crossdock.workers.model.weights.untrusted import read_config_file, read_json_if_any
from crossdock.workers.replica.config import EngineConfig, StepSizes
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.executor import Executor
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import NO_WORK, StepCost, StepWork
from crossdock.workers.schedule.cost.stages import Stages
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding, ItemFailure
from crossdock.workers.schedule.request.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.request import Request, Status, TokenDelta
from crossdock.workers.schedule.request.submission import Grammar, InvalidField, SamplingParams

_WORDS = range(512, 32_000)  # ids that are pieces of words in the usual vocabularies, and no special tokens
_MIX = 0x9E3779B97F4A7C15  # odd, and its bits are as good as random: 2^64 / golden ratio
_CHUNKS = (16, 64, 256, 1024, 4096)
_STREAMS = (1, 4, 16, 64, 256)
_CONTEXTS = (32, 2048, 16_384)
_ADAPTERS = (1 << 20, 1 << 24)  # numbers in the matrices of one
_FINISHED = Status.FINISHED  # once: Python 3.11 takes 0.2 µs to look up a member of an enum


class _Pictures(NamedTuple):
    """The pictures of a step, as `Pipeline` reads them."""

    seconds: float
    failures: Mapping[bytes, ItemFailure]


class _Step(NamedTuple):
    """A step that has begun."""

    ends: float
    pictures: _Pictures | None


@dataclass(slots=True)
class EmulatedRunner:
    """Gives each step the seconds of a cost, behind the steps before it in every stage."""

    cost: StepCost
    encoder_cost: EncoderCost | None
    stages: Stages
    clock: Callable[[], float]
    vary: Callable[[float], float] = lambda predicted: predicted  # returns the seconds that the next step takes
    ends: float = 0.0  # when the newest step does
    graphs_text: str = ""

    @property
    def num_stages(self) -> int:
        return len(self.stages.shares)

    def begin(self, batch: Batch) -> tuple[_Step, list[range]]:
        """Begin a step behind those that run."""
        items = batch.encoder.items
        encoding = self.encoder_cost.seconds(items) if items and self.encoder_cost is not None else 0.0
        seconds = self.vary(self.cost.seconds(batch.work) + encoding)
        self.ends = self.stages.begin(seconds, self.clock())
        return _Step(self.ends, _Pictures(encoding, {}) if encoding else None), []

    def is_usual(self, inputs: _Step) -> bool:
        return True

    def finish(self, step: tuple[_Step, list[range]], previous_tokens: Any = None) -> tuple[_Step, list[range]]:
        return step

    def finish_pooled(self, step: tuple[_Step, list[range]], previous_tokens: Any = None) -> Any:
        raise AssertionError("requests for vectors are refused")

    def wait(self) -> None:
        pass


class _Drawn(NamedTuple):
    """The tokens of a step that runs ahead."""

    on_device: Mapping[str, SampledToken]
    ends: float
    sleep_until: Callable[[float], None]

    def read(self, void: Collection[str] = ()) -> tuple[Mapping[str, SampledToken], Collection[str]]:
        self.sleep_until(self.ends)
        return self.on_device, ()


class TokenMaker(Protocol):
    """Makes the tokens of requests: `TokensByPosition`, and `DrawnDrafts` of simulations."""

    def add(self, request: Request) -> None: ...

    def remove(self, request_id: str) -> None: ...

    def sampled(self, part: Scheduled) -> SampledToken:
        """Return the token that follows a part of a step, and the part's drafts that are accepted."""


@dataclass(slots=True)
class TokensByPosition:
    """Makes tokens that depend on a request's prompt, its seed and the position alone.

    So a stream has the same tokens on every replica, after any failure, in any batch.
    """

    tokens: Sequence[int]  # tokens that may be made
    _keys: dict[str, int] = field(default_factory=dict)  # by request

    def add(self, request: Request) -> None:
        seed = 0 if request.sampling.temperature == 0 else request.sampling.seed
        self._keys[request.id] = zlib.crc32(array("Q", request.submission.prompt_token_ids).tobytes()) ^ (seed * _MIX)

    def remove(self, request_id: str) -> None:
        self._keys.pop(request_id, None)

    def sampled(self, part: Scheduled) -> SampledToken:
        """Return the token that follows a part of a step."""
        mixed = ((self._keys[part.request.id] + part.start + part.num_tokens) * _MIX) & (2**64 - 1)
        return SampledToken(self.tokens[(mixed >> 32) % len(self.tokens)])


@dataclass(slots=True)
class EmulatedSampler:
    """Has the tokens of a maker when the step that makes them has ended."""

    maker: TokenMaker
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def add(self, request: Request, grammar: Any = None) -> None:
        self.maker.add(request)

    def accept(self, request_id: str, token_id: int) -> None:
        pass

    def remove(self, request_id: str) -> None:
        self.maker.remove(request_id)

    def complete(self, deltas: Sequence[TokenDelta]) -> None:
        pass

    def pool(self, batch: Batch, hidden: Any) -> None:
        pass

    def reads_tokens(self, batch: Batch) -> bool:
        return False

    def draw(self, batch: Batch, logits: _Step, rows: Sequence[range], previous_tokens: Any = None) -> _Drawn:
        """Return the tokens of a step, which `read` waits for."""
        return _Drawn(self._tokens(batch), logits.ends, self._sleep_until)

    def sample(self, batch: Batch, logits: _Step, rows: Sequence[range]) -> dict[str, SampledToken]:
        """Wait for the end of a step. Returns its tokens by request."""
        self._sleep_until(logits.ends)
        return self._tokens(batch)

    def _tokens(self, batch: Batch) -> dict[str, SampledToken]:
        return {
            part.request.id: self.maker.sampled(part)
            for part in batch.scheduled
            if part.samples and part.request.status is not _FINISHED
        }

    def _sleep_until(self, ends: float) -> None:
        if (seconds := ends - self.clock()) > 0:
            self.sleep(seconds)


class NoGrammars:
    """Refuses every grammar: an emulated device computes no logits that a grammar could mask."""

    def warm_up(self) -> None:
        pass

    def compile(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Any:
        raise _refusal("grammar", "structured outputs and forced tool calls")

    def close(self) -> None:
        pass

    async def compiled(
        self, grammar: Grammar, token_ids: Sequence[int] = (), may_refuse: bool = True, owner: str = ""
    ) -> Any:
        return self.compile(grammar)


def emulated_engine(
    profile: SchedulingProfile,
    config: EngineConfig,
    folder: Path,
    max_model_len: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    tokenizer: Path | None = None,
    *,
    fits_memory: bool = False,
) -> Engine:
    """Return a calibrated engine that takes the seconds of `profile`.

    Of the model in `folder`, only the configuration and the names of end tokens are read; `tokenizer` is the directory
    of another tokenizer. Steps end at times of `clock`, which `sleep` waits for. `fits_memory`: as `new_engine` has it.

    Raises:
        ValueError: the settings do not fit the profile; the message names the field.
    """
    config = config.sized(StepSizes(profile.max_num_batched_tokens, profile.max_num_seqs), profile.max_model_len)
    vocab_size = _vocab_size(folder)
    page_bytes = profile.page_bytes * config.page_size // profile.page_size
    num_pages = profile.num_pages * profile.page_size // config.page_size
    if config.kv_cache_memory is not None:
        num_pages = int(config.kv_cache_memory) // max(page_bytes, 1)
    windows = profile.windows
    longest = max_model_len or profile.max_model_len
    if fits_memory:
        needs = PageNeeds(config.page_size, windows, config.max_num_batched_tokens, profile.state_pages)
        longest = needs.longest_request(num_pages, longest) or longest
    stages = Stages.of(profile.pipeline_parallel_size, profile.interval_share)
    ends = _eos_token_ids(folder) | end_of_tokenizer(tokenizer or folder, vocab_size)
    is_one_stage = len(stages.shares) == 1
    words = [token for token in (_WORDS if vocab_size > _WORDS.stop else range(vocab_size)) if token not in ends]
    executor = Executor(
        config,
        EmulatedRunner(profile.cost, profile.encoder_cost, stages, clock),
        EmulatedSampler(TokensByPosition(words), clock, sleep),
        NoGrammars(),
        PagePool(
            num_pages,
            config.page_size,
            config.enable_prefix_caching,
            windows,
            profile.state_pages,
            events=config.new_page_events(),
        ),
        lambda: Memory(0, num_pages * page_bytes, bytes_per_second=profile.bytes_per_second),
        longest,
        vocab_size,
        ends,
        is_ahead=is_one_stage and config.async_scheduling is not False,
        check=_check,
        spec_of=lambda name: pool_spec_of(profile, config.page_size, page_bytes, num_pages, name),
        encoding=_encoding(profile),
        why_text_alone="this emulated device has no encoder: take a profile with encoder_cost, such as h100-vl7b",
    )
    engine = Engine(executor, clock)
    _calibrate(engine, profile)
    return engine


def advertised(engine: Engine, profile: SchedulingProfile) -> SchedulingProfile:
    """Return the profile that an emulated replica advertises: `profile`, with the settings of its engine."""
    return profile.model_copy(update={**engine.settings, "tiers": ()})


def _calibrate(engine: Engine, profile: SchedulingProfile) -> None:
    """Begin with the costs of the profile; the engine then learns from its steps, as on any device."""
    cost = profile.cost
    most = engine.config.max_num_batched_tokens
    works = [StepWork.of([(start, min(tokens, most))]) for start, tokens in product((0, *_CONTEXTS), _CHUNKS)]
    works += [StepWork.of([], [context] * streams) for context, streams in product(_CONTEXTS, _STREAMS)]
    works += [StepWork.of([(2048, 64)], [2048] * streams) for streams in _STREAMS]
    if cost.per_adapter or cost.per_adapted:
        works += [StepWork.of([], [256] * 8)._replace(adapters=size, adapted=8 * size) for size in _ADAPTERS]
        works += [NO_WORK.plus_chunk(0, min(256, most), size) for size in _ADAPTERS]
    sweep = [(work, cost.seconds(work)) for work in works]
    alone = [seconds for _, seconds in sweep] if profile.pipeline_parallel_size > 1 else []
    intervals = [(profile.interval_share * seconds, seconds) for seconds in alone]
    fit = engine.calibrate(sweep, intervals, cost.most_context)
    fit.overrun = profile.overrun
    engine.scheduler.learn(fit.cost, fit.overrun, engine.intervals.share)
    if (encoder := profile.encoder_cost) is not None:
        rows = [[64], [256], [1024], [1024] * 4]
        engine.calibrate_encoder([(each, encoder.base + sum(map(encoder.added_seconds, each))) for each in rows])


def _check(sampling: SamplingParams) -> None:
    """Refuse what only logits can answer. InvalidField: names the field."""
    if sampling.pooling is not None:
        raise _refusal("pooling", "vectors of prompts")
    if sampling.logprobs is not None:
        raise _refusal("logprobs", "log-probabilities")
    if sampling.prompt_logprobs is not None:
        raise _refusal("prompt_logprobs", "log-probabilities of prompts")
    for name in ("logit_bias", "allowed_token_ids", "bad_words"):
        if getattr(sampling, name):
            raise _refusal(name, "chosen tokens")


def _refusal(name: str, what: str) -> InvalidField:
    return InvalidField(f"{name}: an emulated device computes no logits, and so no {what}; leave it out", name)


def pool_spec_of(profile: SchedulingProfile, page_size: int, page_bytes: int, num_pages: int, name: str) -> PoolSpec:
    """Return a pool whose pages have the bytes of the profile's, with one layer for each group of layers."""
    layers = tuple(LayerShape(1, page_bytes // page_size, 0) for _ in profile.windows)
    shard = Shard(0, ((0, 1),) * len(layers))
    groups = tuple(
        PageGroup(None, (layer,), window.tokens) if isinstance(window, AttentionChunk) else PageGroup(window, (layer,))
        for layer, window in enumerate(profile.windows)
    )
    state = f"{profile.state_pages} pages" if profile.state_pages else ""
    has_groups = groups if len(groups) > 1 else ()
    return PoolSpec(f"{name} emulated", "bytes", 1, page_size, layers, (shard,), 0, num_pages, has_groups, state)


def _encoding(profile: SchedulingProfile) -> Encoding | None:
    if profile.encoder_cost is None:
        return None
    return Encoding(profile.encoder_tokens, None, profile.keeps_items_whole)


def _vocab_size(folder: Path) -> int:
    size = decoder_fields(read_config_file(folder)).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"model: {folder / 'config.json'} has no vocab_size")
    return size


def _eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a text, as the model's files name them. An emulated device never makes one."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json_if_any(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return frozenset(found)
