"""Forward passes of a model that drafts: the pages of its streams, the newest token of each, and what passes cost."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.schedule.cost.cost import NO_LIMIT, StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

CATCH_UP_TOKENS = 256
"""Most tokens besides drafts that one call computes: the prompt of a new stream takes several steps of the target."""

MATCH = 4
"""Tokens of a match whose drafts are about as probable as a small model's, before the policy has seen any."""

_PAGE_SIZE = 16  # tokens, or the least that attention can read
_SWEEP = (
    *((1, 0, 1), (4, 0, 1), (16, 0, 1), (1, 0, 16), (1, 0, 64), (1, 0, CATCH_UP_TOKENS)),
    *((1, 256, 1), (4, 1024, 1), (1, 1024, 2), (1, 4096, 2)),
)
"""Forward passes that are timed at the start: sequences, tokens before those of the pass, and tokens of each.

The content of pages does not matter to the time, so contexts are not computed. Without contexts, drafts after 1,000
tokens were predicted up to 1.6 times too long until some hundred of them had been learnt from, on a simulated device.
"""

_REPEATS = 3


def new_stream(name: str, token_ids: Sequence[int] = (), num_computed_tokens: int = 0) -> Request:
    """Return the tokens that a model which drafts has of one stream, as a request of its own."""
    return Request(Submission(name, list(token_ids), SamplingParams()), num_computed_tokens=num_computed_tokens)


def draft_pages(memory: int, page_multiple: int, bytes_of: Callable[[int], int]) -> PagePool:
    """Return the pages of a model that drafts.

    Args:
        memory: draft_kv_cache_memory, in bytes.
        page_multiple: tokens; a page has a multiple of as many.
        bytes_of: returns the bytes of a page of so many tokens.

    Raises:
        ValueError: the memory holds no page.
    """
    page_size = max(_PAGE_SIZE, page_multiple)
    page_bytes = bytes_of(page_size)
    if memory < page_bytes:
        raise ValueError(f"draft_kv_cache_memory ({memory}) must be at least {page_bytes} bytes, one page")
    return PagePool(memory // page_bytes, page_size, enable_prefix_caching=False)


@dataclass(slots=True, eq=False)
class DraftPasses:
    """Computes passes over pages of their own, and learns their seconds from each.

    `compute` returns the most probable token [S] after each sequence of a pass.
    """

    compute: Callable[[StepInputs], Tensor]
    pages: PagePool
    clock: Callable[[], float] = time.perf_counter  # seconds
    most_tokens: int | None = None  # of a sequence; None: any number
    most_context: float = NO_LIMIT  # tokens that a row attends to, where an indexer chooses them
    shares_choice: bool = False  # further drafts attend to the tokens that the first one chose, and score none
    _first: StepCostFit = field(init=False)
    _further: StepCostFit = field(init=False)  # its passes have another work, and may score no token
    _mean_context: float = 0.0  # tokens before each part of the last pass

    def __post_init__(self) -> None:
        sweep = self._sweep()
        self._first = StepCostFit(sweep, most_context=self.most_context)
        self._further = StepCostFit(sweep, most_context=self.most_context)

    def seconds(self, num_streams: int, num_tokens: int, first: StepWork | None = None) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`.

        `first`: work of the first draft of a stream, in the mean; None: the two newest tokens, after as many as in the
        last pass. Each further draft computes the draft before it.
        """
        if num_tokens <= 0:
            return 0.0
        if first is None:
            first = StepWork.of([(round(self._mean_context), 2)])
        context = first.context + first.chunk_context
        further = self._as_computed(StepWork(decodes=num_streams, context=num_streams * context))
        seconds = self._first.cost.seconds(StepWork(*(num_streams * each for each in first)))
        return seconds + (num_tokens - 1) * self._further.cost.seconds(further)

    def make_room(self, request: Request, num_tokens: int, others: Iterable[Request]) -> bool:
        """Give a stream pages for `num_tokens`, and return whether there are enough.

        Missing pages are taken from `others`, from the first ones first. These have to be computed again.
        """
        num_missing = -(-num_tokens // self.pages.page_size) - len(self.pages.pages_of(request.id))
        if num_missing <= 0:
            return True
        if num_missing > self.pages.block_pool.num_available:
            for other in others:
                if self.pages.release(other.id):
                    other.num_computed_tokens = 0
                    if num_missing <= self.pages.block_pool.num_available:
                        break
            else:
                return False
        self.pages.allocate(request.id, num_missing)
        return True

    def part(self, request: Request, num_tokens: int, *, samples: bool = True) -> Scheduled:
        """Return a stream's part of a pass: its next `num_tokens`."""
        start = request.num_computed_tokens
        return Scheduled(request, start, num_tokens, self.pages.pages_of(request.id), samples)

    def run(self, parts: Sequence[Scheduled], *, is_further: bool = False) -> list[int]:
        """Compute one pass, and return the most probable token after each part that samples.

        `is_further`: the parts are drafts of the pass before.
        """
        tokens, work, seconds = self._timed(parts)
        if is_further:
            self._further.observe(self._as_computed(work), seconds)
        else:
            self._first.observe(work, seconds)
        self._mean_context = (work.context + work.chunk_context) / len(parts)
        return tokens

    def _as_computed(self, further: StepWork) -> StepWork:
        """Return the work of a pass of further drafts, without the tokens that these do not score."""
        if not self.shares_choice:
            return further
        return further._replace(context=min(further.context, self.most_context * further.decodes))

    def _timed(self, parts: Sequence[Scheduled]) -> tuple[list[int], StepWork, float]:
        """Compute one pass. Return the most probable token after each part, the work and the seconds."""
        batch = Batch(parts, sum(part.num_tokens == 1 for part in parts))
        started = self.clock()
        tokens: list[int] = self.compute(StepInputs.of(batch, self.pages.page_size)[0]).tolist()  # waits for the device
        return tokens, batch.work, self.clock() - started

    def _sweep(self) -> list[tuple[StepWork, float]]:
        """Return the work and the seconds of one pass of each size that the pool holds."""
        sweep = list[tuple[StepWork, float]]()
        for num_streams, context, num_tokens in _SWEEP:
            longest = context + num_tokens
            num_pages = -(-longest // self.pages.page_size)
            is_short = self.most_tokens is None or longest <= self.most_tokens
            if not is_short or not self.pages.block_pool.can_allocate(num_streams * num_pages):
                continue
            requests = [new_stream(f"sweep {number}", [0] * longest, context) for number in range(num_streams)]
            for request in requests:
                self.pages.allocate(request.id, num_pages)
            timed = [self._timed([self.part(one, num_tokens) for one in requests]) for _ in range(_REPEATS)]
            _, work, seconds = min(timed, key=lambda timing: timing[2])
            sweep.append((work, seconds))
            for request in requests:
                self.pages.release(request.id)
        return sweep
