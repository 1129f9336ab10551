"""Draft with a small causal LM that has the target's vocabulary: greedily, several streams in one batch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from crossdock.workers.draft.passes import CATCH_UP_TOKENS, MATCH, DraftPasses, draft_pages, new_stream
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.sampling.sampler import argmax
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.request import Request


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
    _passes: DraftPasses = field(init=False)

    def __post_init__(self) -> None:
        self.model.allocate_pool(self.pages.num_pages, self.pages.page_size)
        longest, most_context = self.model.max_model_len, self.model.most_context
        self._passes = DraftPasses(self._compute, self.pages, self.clock, longest, most_context)

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
        pages = draft_pages(memory, model.attention.page_multiple, lambda size: model.layout(size).page_bytes)
        return cls(model, pages)

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request. `token_ids` is its own list, prompt and output, which grows with each accepted token."""
        self.remove(request_id)
        self._streams[request_id] = _DraftedStream(token_ids, new_stream(request_id))

    def remove(self, request_id: str) -> None:
        """Forget a request; one that was never added is ignored."""
        if self._streams.pop(request_id, None) is not None:
            self.pages.release(request_id)

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        """Return a match length: one constant for requests whose tokens the small model can take, 0 for others."""
        num_tokens = len(self._streams[request_id].tokens) + len(forced)
        return MATCH if num_tokens < self.model.max_model_len else 0

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`."""
        return self._passes.seconds(num_streams, num_tokens)

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        """Return at most so many drafts for each request, after its `forced` tokens.

        A request gets no drafts while the small model must compute more of its prompt than one call may, and while
        there are no pages. Requests that drafted least recently lose their pages first.
        """
        parts, limits = self._catching_up(wanted, forced)
        drafts: dict[str, list[int]] = {request_id: [] for request_id in limits}
        is_further = False
        while parts:
            for part, token in zip(parts, self._passes.run(parts, is_further=is_further), strict=True):
                part.request.num_computed_tokens += part.num_tokens
                if part.request.id in drafts:
                    drafts[part.request.id].append(token)
                    part.request.token_ids.append(token)
            seen = [part.request for part in parts]
            parts = [self._passes.part(one, 1) for one in seen if len(drafts.get(one.id, ())) < limits.get(one.id, 0)]
            is_further = True
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
            others = (other.seen for name, other in self._streams.items() if name not in streams)
            num_seen = stream.num_known + most - 1
            if min(most, num_tokens) <= 0 or not self._passes.make_room(stream.seen, num_seen, others):
                continue
            parts.append(self._passes.part(stream.seen, num_tokens))
            left -= num_tokens
            if num_tokens == num_missing:
                limits[request_id] = most
        return parts, limits

    def _compute(self, inputs: StepInputs) -> Tensor:
        return argmax(inputs.run(self.model))
