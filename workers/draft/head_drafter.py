"""Draft with a head that reads the target's hidden states: one pass for all streams, and one for each further draft.

A step hands over the states of its rows. The head has keys and values for the last run of positions whose states are
known here: a prefix found in pages brings no states, and the run begins after the prefix. A prompt that another replica
has computed brings the states of its last tokens, and the run begins with these. Positions are counted from the
beginning of the run.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from crossdock.workers.draft.passes import MATCH, DraftPasses, draft_pages, new_stream
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request

logger = logging.getLogger(__name__)

_MOST_PENDING = 32
"""Rows of a stream from which on the step itself computes their keys and values: chunks of prompts, and streams that
have not drafted for as many steps."""

MOST_KEPT = 16
"""Newest states of a stream that stay: the head begins with them where its rows are lost, or at another replica."""

_MOST_HANDED_BYTES = 512 << 10  # of the states that travel with a prompt's pages, in a message of at most 1 MiB
_NAME_BYTES = 16


@dataclass(slots=True, eq=False)
class _HeadStream:
    """One stream: its tokens, the rows that the head has, and the states of the rows to come.

    The row of position p reads the token at p + 1. So `seen`, as a request, has the tokens from `first` + 1 on.
    """

    tokens: Sequence[int]  # the request's own list
    seen: Request
    states: Tensor  # [n, H], of positions from `base` on; after a draft was rejected, the last ones are wrong
    first: int = 0  # position of the head's first row
    base: int = 0

    def append(self, start: int, states: Tensor) -> None:
        """Take the states of positions from `start` on, which a step has computed."""
        end = self.base + len(self.states)
        if not self.first <= start <= end:  # states in between, or before the first row, are missing
            self.first = self.base = start
            self.states = states
            self.seen.num_computed_tokens = 0
        elif start >= self.base:
            self.states = torch.cat([self.states[: start - self.base], states]) if start > self.base else states
        elif start + len(states) > self.base:  # computed again, after a preemption
            self.states = states[self.base - start :]

    def num_due(self) -> int:
        """Return how many rows the head has to compute: their states and the tokens after them are known."""
        if self.first + self.seen.num_computed_tokens < self.base:  # the stream has lost its pages
            self.first = self.base
            self.seen.num_computed_tokens = 0
        end = min(self.base + len(self.states), len(self.tokens) - 1)
        return max(end - self.first - self.seen.num_computed_tokens, 0)

    def rows_due(self) -> tuple[int, int]:
        """Return the first row of the next pass and how many there are: at least one, to draft from."""
        num_due = self.num_due()
        return self.seen.num_computed_tokens - (num_due == 0), max(num_due, 1)

    @property
    def can_draft(self) -> bool:
        """Return whether the states before the newest token are here."""
        return self.base <= len(self.tokens) - 2 < self.base + len(self.states)

    def begin(self, num_rows: int) -> Tensor:
        """Prepare the next rows of `seen`, and return their states [num_rows, H]."""
        start = self.seen.num_computed_tokens
        offset = self.first + start
        self.seen.token_ids[start:] = self.tokens[offset + 1 : offset + 1 + num_rows]
        return self.states[offset - self.base : offset - self.base + num_rows]

    def begin_again(self) -> None:
        """Give up all rows but the last one that has come."""
        self.first = self.base = self.base + len(self.states) - 1
        self.states = self.states[-1:].clone()
        self.seen.num_computed_tokens = 0

    def step_back(self, num_rows: int) -> None:
        """Have the last rows computed again, or written over."""
        self.seen.num_computed_tokens -= num_rows

    def end(self, num_rows: int) -> None:
        """Note that rows of known tokens are computed. The states of the last ones stay: see `MOST_KEPT`."""
        self.seen.num_computed_tokens += num_rows
        kept = max(self.first + self.seen.num_computed_tokens - MOST_KEPT, self.base)
        self.states = self.states[kept - self.base :].clone()
        self.base = kept


class DraftingHead(Protocol):
    """Computes rows: from a state of the target, and the token after it, the token after that."""

    @property
    def width(self) -> int:
        """Return the numbers of a state, H."""

    @property
    def fingerprint(self) -> bytes:
        """Return bytes that differ where states mean something else."""

    @property
    def most_context(self) -> float:
        """Return the most tokens that a row attends to."""

    @property
    def shares_choice(self) -> bool:
        """Return whether rows of further drafts attend to the tokens that the first draft's row chose."""

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of so many tokens."""

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate the pages that `compute` reads and writes."""

    @property
    def reads_last_states(self) -> bool:
        """Return whether `states_of` needs the target's last hidden states."""

    def states_of(self, hidden: Tensor | None) -> Tensor:
        """Return the states [T, H] of the target's newest step, as rows read them.

        hidden: the target's last hidden states [T, E], valid until its next step; None: they were not asked for.
        """

    def compute(
        self, inputs: StepInputs, states: Tensor, follows: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute one pass over rows with `states` [T, H], in the target's dtype.

        `follows`: of a pass of further drafts, with one row for each stream: for each row, which of the wanted rows of
        the pass before it comes after. None: the rows have known tokens.

        Returns the most probable token [N] after each wanted row, and the head's own states [N, H] there, which rows of
        further drafts read.
        """


@dataclass(slots=True, eq=False)
class HeadDrafter:
    """Drafts with one head, whose rows are in pages of its own."""

    head: DraftingHead
    target: LoadedModel
    pages: PagePool
    clock: Callable[[], float] = time.perf_counter  # seconds
    _streams: dict[str, _HeadStream] = field(default_factory=dict)  # by request; those that drafted last come last
    _passes: DraftPasses = field(init=False)
    _name: bytes = field(init=False)  # differs where states mean something else
    _has_warned: bool = False
    _states: Tensor | None = None  # [T, H] that the next pass reads; None: zeros, to measure its seconds
    _follows: Sequence[int] | None = None  # of the next pass: see `DraftingHead.compute`
    _next: StepWork | None = None  # see `_mean_due`; None: a step has changed it
    _own_states: Tensor = field(init=False)  # [N, H] of the newest pass

    def __post_init__(self) -> None:
        self.head.allocate(self.pages.num_pages, self.pages.page_size)
        longest = self.target.max_model_len
        bounds = self.head.most_context, self.head.shares_choice
        self._passes = DraftPasses(self._compute, self.pages, self.clock, longest, *bounds)
        self._name = hashlib.blake2b(self.head.fingerprint, digest_size=_NAME_BYTES).digest()

    @classmethod
    def of(cls, head: DraftingHead, target: LoadedModel, memory: int) -> Self:
        """Return a drafter whose pages take at most so many bytes. ValueError: these hold no page."""
        return cls(head, target, draft_pages(memory, target.attention.page_multiple, head.page_bytes))

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request. `token_ids` is its own list, prompt and output, which grows with each accepted token."""
        self.remove(request_id)
        nothing = torch.empty(0, self.head.width, dtype=self.target.dtype, device=self.target.device)
        self._streams[request_id] = _HeadStream(token_ids, new_stream(request_id), nothing)

    def remove(self, request_id: str) -> None:
        """Forget a request; one that was never added is ignored."""
        if self._streams.pop(request_id, None) is not None:
            self.pages.release(request_id)

    def hand_over(self, request_id: str) -> bytes:
        """Return the states before a request's newest token, from which the same head drafts at another replica.

        Empty: they are not here.
        """
        stream = self._streams[request_id]
        if not stream.can_draft:
            return b""
        end = len(stream.tokens) - 1 - stream.base
        num_rows = max(min(MOST_KEPT, _MOST_HANDED_BYTES // self._row_bytes), 1)
        rows = stream.states[max(end - num_rows, 0) : end].cpu().contiguous()
        return self._name + rows.view(torch.uint8).numpy().tobytes()

    def take_over(self, request_id: str, handed: bytes) -> None:
        """Take what another replica's `hand_over` returned of a request with the same tokens.

        States of another head, and bytes that are none, are left out: drafts then begin with the second step.
        """
        stream = self._streams[request_id]
        self._next = None
        num_rows, rest = divmod(len(handed) - _NAME_BYTES, self._row_bytes)
        start = len(stream.tokens) - 1 - num_rows
        if not handed.startswith(self._name) or rest or not 0 < num_rows <= MOST_KEPT or start < 0:
            if not self._has_warned:
                logger.warning(
                    "a replica that computes prompts has sent states of another head: streams draft from their second "
                    "step on. Set the same speculative_config for both pools"
                )
            self._has_warned = True
            return
        rows = torch.frombuffer(bytearray(handed[_NAME_BYTES:]), dtype=self.target.dtype).view(num_rows, -1)
        stream.append(start, rows.to(self.target.device))

    @property
    def reads_last_states(self) -> bool:
        """Return whether `observe` needs the target's last hidden states."""
        return self.head.reads_last_states

    @property
    def _row_bytes(self) -> int:
        return self.head.width * self.target.dtype.itemsize

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        """Return a match length: one constant for requests whose states are here, 0 for others, and after `forced`."""
        return MATCH if not forced and self._streams[request_id].can_draft else 0

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`.

        The rows that streams have due since the newest step are counted, and divided evenly among them.
        """
        if self._next is None:
            self._next = self._mean_due()
        return self._passes.seconds(num_streams, num_tokens, self._next)

    def _mean_due(self) -> StepWork:
        """Return the work of the rows that a stream has due, in the mean; of two rows where no stream can draft."""
        rows = [stream.rows_due() for stream in self._streams.values() if stream.can_draft]
        if not rows:
            return StepWork.of([(0, 2)])
        work = StepWork.of([part for part in rows if part[1] > 1], [start for start, count in rows if count == 1])
        return StepWork(*(each / len(rows) for each in work))

    @torch.inference_mode()
    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Take the states of a computed step. The head's share of a chunk counts in the step's seconds.

        `hidden`: see `DraftingHead.states_of`.
        """
        states = self.head.states_of(hidden)
        self._next = None
        start = 0
        due = dict[str, int]()
        for part in batch.scheduled:
            stream = self._streams.get(part.request.id)
            if stream is not None:
                stream.append(part.start, states[start : start + part.num_tokens])
                num_due = stream.num_due()
                if num_due >= _MOST_PENDING:
                    due[part.request.id] = num_due
            start += part.num_tokens
        self._catch_up(due)

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        """Return at most so many drafts for each request; none after its `forced` tokens, whose states are not known.

        Requests that drafted least recently lose their pages first.
        """
        streams = dict[str, _HeadStream]()
        for request_id in wanted:
            stream = self._streams[request_id]
            if stream.can_draft and not forced.get(request_id):
                self._streams[request_id] = streams[request_id] = self._streams.pop(request_id)  # the latest to draft
        parts, states = self._beginning(streams, wanted)
        follows: list[int] | None = None
        drafts: dict[str, list[int]] = {part.request.id: [] for part in parts}
        while parts:
            tokens, states = self._run(parts, states, follows)
            for part, token in zip(parts, tokens, strict=True):
                name = part.request.id
                if drafts[name]:
                    part.request.num_computed_tokens += 1
                else:
                    streams[name].end(part.num_tokens)
                drafts[name].append(token)
                part.request.token_ids.append(token)
            names = [part.request.id for part in parts]
            follows = [number for number, name in enumerate(names) if len(drafts[name]) < wanted[name]]
            states = states[follows]
            parts = [self._passes.part(parts[number].request, 1) for number in follows]
        for request_id, found in drafts.items():  # rows of drafts have the head's own states: they are computed again
            streams[request_id].step_back(len(found) - 1)
        return drafts

    def _beginning(
        self, streams: Mapping[str, _HeadStream], wanted: Mapping[str, int]
    ) -> tuple[list[Scheduled], Tensor]:
        """Return the parts of the first pass, those of one row first, and their states."""
        found = list[tuple[Scheduled, Tensor]]()
        for request_id, stream in streams.items():
            num_due = stream.num_due()
            if not num_due:  # the last row again
                stream.step_back(1)
                num_due = 1
            num_tokens = stream.seen.num_computed_tokens + num_due + wanted[request_id] - 1
            if self._passes.make_room(stream.seen, num_tokens, self._others(streams)):
                states = stream.begin(num_due)
                found.append((self._passes.part(stream.seen, num_due), states))
        found.sort(key=lambda each: each[0].num_tokens)
        return [part for part, _ in found], torch.cat([states for _, states in found] or [torch.empty(0)])

    def _catch_up(self, due: Mapping[str, int]) -> None:
        """Compute keys and values of rows whose tokens are known. Streams without room begin again with the next rows.

        `due`: numbers of rows, by request.
        """
        parts = list[Scheduled]()
        states = list[Tensor]()
        for request_id, num_rows in due.items():
            stream = self._streams[request_id]
            num_tokens = stream.seen.num_computed_tokens + num_rows
            if self._passes.make_room(stream.seen, num_tokens, self._others(due)):
                states.append(stream.begin(num_rows))
                parts.append(self._passes.part(stream.seen, num_rows, samples=False))
                stream.end(num_rows)
            else:
                stream.begin_again()
        if parts:
            self._states = torch.cat(states)
            self._compute(StepInputs.of(Batch(parts, 0), self.pages.page_size)[0])

    def _others(self, kept: Container[str]) -> Iterator[Request]:
        """Yield the rows of streams that may lose their pages, the least recent first."""
        return (stream.seen for name, stream in self._streams.items() if name not in kept)

    def _run(
        self, parts: Sequence[Scheduled], states: Tensor, follows: Sequence[int] | None
    ) -> tuple[list[int], Tensor]:
        """Compute one pass over `states` [T, H]. Return the token and the head's own states [N, H] after each part.

        `follows`: see `DraftingHead.compute`.
        """
        self._states = states
        self._follows = follows
        return self._passes.run(parts, is_further=follows is not None), self._own_states

    @torch.inference_mode()
    def _compute(self, inputs: StepInputs) -> Tensor:
        """Return the token [N] of each wanted row."""
        states, follows = self._states, self._follows
        self._states = self._follows = None
        if states is None:
            shape = len(inputs.token_ids), self.head.width
            states = torch.zeros(shape, dtype=self.target.dtype, device=self.target.device)
        tokens, self._own_states = self.head.compute(inputs, states, follows)
        return tokens
