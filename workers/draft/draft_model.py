"""Draft with a small causal LM that has the target's vocabulary: greedily, several streams in one batch."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.sampling.sampler import argmax
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

CATCH_UP_TOKENS = 256
"""Most tokens besides drafts that one call computes: the prompt of a new stream takes several steps of the target."""

_MATCH = 4
"""Tokens of a match whose drafts are about as probable as a small model's, before the policy has seen any."""

_PAGE_SIZE = 16  # tokens, or the least that attention can read
_SWEEP = ((1, 1), (4, 1), (16, 1), (1, 16), (1, 64), (1, CATCH_UP_TOKENS))
"""Forward passes that are timed at the start: sequences, and tokens of each."""

_REPEATS = 3


@dataclass(slots=True, eq=False)
class _DraftedStream:
    """One stream: the request's tokens, and those that the small model has seen."""

    tokens: Sequence[int]  # the request's own list
    seen: Request  # the request's tokens at the last call, and the drafts after them
    num_known: int = 0  # tokens of `seen` that are no drafts

    def catch_up(self, forced: Sequence[int] = ()) -> int:
        """Take over the request's new tokens, and return how many the small model has to compute.

        Keys and values of accepted drafts stay; keys and values of rejected drafts are written over. `forced`: tokens
        that will follow the request's own.
        """
        mine = self.seen.token_ids
        tokens = [*self.tokens, *forced] if forced else self.tokens
        num_tokens = len(tokens)
        same = min(self.num_known, num_tokens)
        most = min(len(mine), num_tokens)
        while same < most and mine[same] == tokens[same]:
            same += 1
        mine[same:] = tokens[same:]
        self.num_known = num_tokens
        self.seen.num_computed_tokens = min(self.seen.num_computed_tokens, same, num_tokens - 1)
        return num_tokens - self.seen.num_computed_tokens


@dataclass(slots=True, eq=False)
class DraftModel:
    """Drafts with a model of its own, which keeps keys and values of its own for every stream that drafts."""

    model: LoadedModel
    pages: PagePool
    clock: Callable[[], float] = time.perf_counter  # seconds
    _streams: dict[str, _DraftedStream] = field(default_factory=dict)  # by request; those that drafted last come last
    _fit: StepCostFit = field(init=False)
    _mean_context: float = 0.0  # tokens before each part of the last forward pass

    def __post_init__(self) -> None:
        self.model.allocate_pool(self.pages.num_pages, self.pages.page_size)
        self._fit = self._swept()

    @classmethod
    def load(cls, config: SpeculativeConfig, target: LoadedModel) -> Self:
        """Load the small model onto the device of `target`, in the same dtype: another would round ties otherwise.

        Raises:
            ValueError: the vocabulary is not the target's, or the memory holds no page; or as in `load_model`.
        """
        memory = int(config.draft_kv_cache_memory)
        spec = ModelSpec(config.model, dtype=str(target.dtype).removeprefix("torch."))
        model = load_model(spec, str(target.device), kv_bytes=memory)
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"model: {config.model} has a vocabulary of {model.vocab_size} tokens and the model that is served one "
                f"of {target.vocab_size}: a small model can draft only for a model with the same vocabulary"
            )
        if model.states is not None:
            raise ValueError(f"model: {config.model} has recurrent layers: a small model that drafts may have none")
        page_size = max(_PAGE_SIZE, model.attention.page_multiple)
        page_bytes = model.layout(page_size).page_bytes
        if memory < page_bytes:
            raise ValueError(f"draft_kv_cache_memory ({memory}) must be at least {page_bytes} bytes, one page")
        return cls(model, PagePool(memory // page_bytes, page_size, enable_prefix_caching=False))

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request. `token_ids` is its own list, prompt and output, which grows with each accepted token."""
        self.remove(request_id)
        self._streams[request_id] = _DraftedStream(token_ids, Request(Submission(request_id, [], SamplingParams())))

    def remove(self, request_id: str) -> None:
        """Forget a request; one that was never added is ignored."""
        if self._streams.pop(request_id, None) is not None:
            self.pages.release(request_id)

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        """Return a match length: one constant for requests whose tokens the small model can take, 0 for others."""
        num_tokens = len(self._streams[request_id].tokens) + len(forced)
        return _MATCH if num_tokens < self.model.max_model_len else 0

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`.

        The first draft computes the two newest tokens of a stream, each further one computes the draft before it.
        """
        if num_tokens <= 0:
            return 0.0
        cost = self._fit.cost
        context = num_streams * self._mean_context
        first = cost.seconds(StepWork.of([(0, 2)] * num_streams))
        return first + (num_tokens - 1) * cost.decode_step_seconds(num_streams, context)

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        """Return at most so many drafts for each request, after its `forced` tokens.

        A request gets no drafts while the small model must compute more of its prompt than one call may, and while
        there are no pages. Requests that drafted least recently lose their pages first.
        """
        parts, limits = self._catching_up(wanted, forced)
        drafts: dict[str, list[int]] = {request_id: [] for request_id in limits}
        while parts:
            for part, token in zip(parts, self._run(parts), strict=True):
                part.request.num_computed_tokens += part.num_tokens
                if part.request.id in drafts:
                    drafts[part.request.id].append(token)
                    part.request.token_ids.append(token)
            requests = [part.request for part in parts]
            parts = [self._part(one, 1) for one in requests if len(drafts.get(one.id, ())) < limits.get(one.id, 0)]
        return drafts

    def _catching_up(
        self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]]
    ) -> tuple[list[Scheduled], dict[str, int]]:
        """Return the parts that the small model computes before it drafts, and the most drafts of each request.

        Requests with the fewest tokens to compute go first: a long prompt must not keep others from drafting.
        """
        streams = {request_id: self._streams[request_id] for request_id in wanted}
        missing = sorted((stream.catch_up(forced.get(name, ())), name) for name, stream in streams.items())
        parts = list[Scheduled]()
        limits = dict[str, int]()
        left = CATCH_UP_TOKENS
        for num_missing, request_id in missing:
            stream = self._streams[request_id] = self._streams.pop(request_id)  # the latest to draft
            num_tokens = min(num_missing, left)
            most = min(wanted[request_id], self.model.max_model_len - stream.num_known)
            if min(most, num_tokens) <= 0 or not self._make_room(request_id, stream.num_known + most - 1, streams):
                continue
            parts.append(self._part(stream.seen, num_tokens))
            left -= num_tokens
            if num_tokens == num_missing:
                limits[request_id] = most
        return parts, limits

    def _make_room(self, request_id: str, num_tokens: int, wanted: Collection[str]) -> bool:
        """Give a request pages for `num_tokens`, and return whether there are enough.

        Missing pages are taken from requests that are not `wanted`, first from the one that drafted least recently.
        """
        num_missing = -(-num_tokens // self.pages.page_size) - len(self.pages.pages_of(request_id))
        if num_missing <= 0:
            return True
        if num_missing > self.pages.block_pool.num_available:
            for other, stream in self._streams.items():
                if other not in wanted and self.pages.release(other):
                    stream.seen.num_computed_tokens = 0
                    if num_missing <= self.pages.block_pool.num_available:
                        break
            else:
                return False
        self.pages.allocate(request_id, num_missing)
        return True

    def _part(self, request: Request, num_tokens: int) -> Scheduled:
        start = request.num_computed_tokens
        return Scheduled(request, start, num_tokens, self.pages.pages_of(request.id), samples=True)

    def _run(self, parts: Sequence[Scheduled]) -> list[int]:
        """Compute one forward pass, and return the most probable token after each part."""
        tokens, work, seconds = self._timed(parts)
        self._fit.observe(work, seconds)
        self._mean_context = (work.context + work.chunk_context) / len(parts)
        return tokens

    def _timed(self, parts: Sequence[Scheduled]) -> tuple[list[int], StepWork, float]:
        """Compute one forward pass. Return the most probable token after each part, the work and the seconds."""
        batch = Batch(parts, sum(part.num_tokens == 1 for part in parts))
        started = self.clock()
        logits = StepInputs.of(batch, self.pages.page_size)[0].run(self.model)
        tokens: list[int] = argmax(logits).tolist()  # waits for the device
        return tokens, batch.work, self.clock() - started

    def _swept(self) -> StepCostFit:
        """Fit the cost of forward passes to one pass of each size that the pool holds."""
        sweep = []
        for num_streams, num_tokens in _SWEEP:
            num_pages = -(-num_tokens // self.pages.page_size)
            if num_tokens > self.model.max_model_len or not self.pages.block_pool.can_allocate(num_streams * num_pages):
                continue
            requests = [
                Request(Submission(f"sweep {number}", [0] * num_tokens, SamplingParams()))
                for number in range(num_streams)
            ]
            for request in requests:
                self.pages.allocate(request.id, num_pages)
            timed = [self._timed([self._part(one, num_tokens) for one in requests]) for _ in range(_REPEATS)]
            sweep.append(min((timing[1:] for timing in timed), key=lambda timing: timing[1]))
            for request in requests:
                self.pages.release(request.id)
        return StepCostFit(sweep)
