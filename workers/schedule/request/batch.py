"""One step as data: what it computes, and what it found."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from msgspec import Struct

from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import Request, TokenLogprobs, adapter_work


class StatePages(NamedTuple):
    """Where one part of a step finds and leaves the recurrent state of its request.

    The state of all recurrent layers is one row of bytes: page i holds bytes [i * page_bytes, (i + 1) * page_bytes).
    """

    read: Sequence[int]  # the state before the part's first token; empty: the state is zeros
    write: Sequence[int]  # the state after its last token; may be the same pages as `read` if there are no drafts
    is_snapshot: bool = False  # later requests may begin from `write`, which no part writes to again


NO_STATE = StatePages((), ())


class Scheduled(Struct, gc=False):
    """One request's part of a step: compute its tokens `[start, start + num_tokens)`.

    A struct that the garbage collector leaves out, because every stream needs a new one for each token.
    """

    request: Request
    start: int
    num_tokens: int  # of a stream: accepted tokens that are computed again, the newest one, and drafts
    pages: Sequence[int]  # page i holds tokens [i * page_size, (i + 1) * page_size) of the request; see `HOLE`
    samples: bool  # the part has the newest token, whose logits give the next one
    reason: str = "decode"  # why the request is in this step
    further_pages: Sequence[Sequence[int]] = ()  # of each group of layers after the first, as `pages`
    drafts: Sequence[int] = ()  # the part's tokens after the newest one, which the step verifies
    state: StatePages = NO_STATE  # of models with recurrent layers


class EncoderWork(NamedTuple):
    """Lists the work of a step before its forward pass: forget embeddings, then encode items in one batch."""

    evicted: Sequence[bytes] = ()  # content hashes
    items: Sequence[Item] = ()


NO_ENCODER_WORK = EncoderWork()


class Batch(Struct, frozen=True):
    """One step: decodes of one token first, then decodes of several tokens, then chunks.

    A struct, because every step needs a new one, and a frozen dataclass takes many times as long to make.
    """

    scheduled: Sequence[Scheduled]
    num_decodes: int  # with and without drafts
    limit: str = ""  # what bounded the chunks
    num_skipped: int = 0  # streams left out in favour of more urgent ones
    encoder: EncoderWork = NO_ENCODER_WORK  # before the forward pass; `work` does not count these seconds

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the step computes."""
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def num_drafts(self) -> int:
        """Return how many drafted tokens the step verifies."""
        return sum(len(part.drafts) for part in self.scheduled[: self.num_decodes])

    @property
    def work(self) -> StepWork:
        """Return the work of the step, in the terms of `StepCost`."""
        decodes = self.scheduled[: self.num_decodes]
        work = StepWork.of(
            [(part.start, part.num_tokens) for part in self.scheduled[self.num_decodes :]],
            [part.start for part in decodes],
        )
        if decodes and decodes[-1].num_tokens > 1:  # they are at the end
            for part in decodes:
                if part.num_tokens > 1:  # a token that is computed again takes what a draft does
                    work = work.plus_drafts(part.start, part.num_tokens - 1)
        adapted = [part.num_tokens * own.num_weights for part in self.scheduled if (own := part.request.adapter)]
        if not adapted:
            return work
        adapters = adapter_work([part.request for part in decodes]).adapters
        return work._replace(adapters=adapters, adapted=sum(adapted))

    @property
    def is_scored(self) -> bool:
        """Return whether a chunk needs log-probabilities of its tokens, which `work` does not count."""
        chunks = self.scheduled[self.num_decodes :]
        return any(part.request.sampling.prompt_logprobs is not None for part in chunks)

    @property
    def wants_vectors(self) -> bool:
        chunks = self.scheduled[self.num_decodes :]
        return any(part.request.sampling.pooling is not None for part in chunks)

    @property
    def has_drafts(self) -> bool:
        several = takewhile(lambda part: part.num_tokens > 1, reversed(self.scheduled[: self.num_decodes]))
        return any(part.drafts for part in several)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


class SampledToken(Struct, gc=False):
    """The token that a step sampled for one request, after the drafts that it accepted."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False  # the grammar is complete: no token may follow
    error: str | None = None  # the grammar cannot continue: this request fails, others go on
    is_not_finite: bool = False  # the model computed NaN or infinity: there is no token, and this request fails
    accepted: Sequence["SampledToken"] = ()  # the drafts before this token that equal what their rows sampled
