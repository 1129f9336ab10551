"""The recurrent states of requests: which pages each part of a step reads and writes, and where it leaves a snapshot.

A request's state is in its own pages, which every part reads and writes. Three parts differ: the first one after a
prefix hit reads the hit's snapshot, one that makes a snapshot writes new pages, which the next part reads, and one
with drafts writes other pages than it reads.

If all drafts are accepted, the pages that they were written to become the request's own. If not, the request returns to
the state before the part: accepted tokens are known, and the next part computes them again.
"""

from dataclasses import dataclass

from msgspec import structs

from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.preemption import keep_state
from crossdock.workers.schedule.recurrent.snapshots import (
    FOLLOW_UP_CHANCE,
    PASSING_CHANCE,
    SHARED_CHANCE,
    further_step_seconds,
    is_worth_its_pages,
)
from crossdock.workers.schedule.request.batch import Batch, Scheduled, StatePages
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.table import RequestTable


@dataclass(slots=True)
class RecurrentStates:
    """Names the pages of states in each step, and makes snapshots."""

    table: RequestTable
    forecast: Forecast

    def chunk_within(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens from `start` on a chunk computes.

        A chunk ends at the end of a prefix that others share, or of the prompt's full pages, if a snapshot there is
        worth one more step.
        """
        if not self.table.config.enable_chunked_prefill:
            return num_tokens
        end = start + num_tokens
        for position in sorted({self._shared_end(request), self._prompt_end(request)}):
            if start < position < end and not self._has_snapshot(request, position):
                step_seconds = further_step_seconds(position, end, self.forecast.cost)
                if self._is_worth_its_pages(request, position, step_seconds):
                    return position - start
        return num_tokens

    def with_tokens_again(self, decodes: list[Scheduled]) -> list[Scheduled]:
        """Return decodes with the accepted tokens that they compute again, those of several tokens at the end."""
        decodes = [structs.replace(part, num_tokens=1 + part.request.num_verified_tokens) for part in decodes]
        return sorted(decodes, key=lambda part: part.num_tokens > 1)

    def with_states(self, batch: Batch) -> Batch:
        """Return the step with the pages of its states. A snapshot is made where pages for it are left."""
        return structs.replace(batch, scheduled=[self.with_state(part) for part in batch.scheduled])

    def with_state(self, part: Scheduled) -> Scheduled:
        """Return a part with the pages of its state. A part may have them already."""
        return part if part.state.write else structs.replace(part, state=self._next(part))

    def end(self, part: Scheduled, end: int) -> int:
        """Note that a part has ended, whose tokens before position `end` count. Return the end of the computed tokens.

        A snapshot that the part has written can be found from now on. Where drafts were rejected, the part's state
        includes them: then none of its tokens counts as computed.
        """
        pages = self.table.pages
        request = part.request
        if end < part.start + part.num_tokens:
            is_undone = pages.states.undo(request.owner, part.state.read, part.state.write)
            assert is_undone, "a part with drafts leaves the state that it reads as it is"
            request.num_verified_tokens = end - part.start
            return part.start
        request.num_verified_tokens = 0
        if part.state.is_snapshot:
            pages.states.index(request.owner, part.state.write, request.prefix_hashes(end, pages.page_size))
        elif part.state.write is not pages.states.by_owner[request.owner].own:
            pages.states.adopt(request.owner, part.state.write)
        pages.states.end_read(request.owner, part.state.read)
        return end

    def undo(self, part: Scheduled) -> None:
        """Return to the state before a part that began with a wrong token; no later part has been scheduled.

        Where the part has overwritten that state, the request is preempted.
        """
        if not self.table.pages.states.undo(part.request.owner, part.state.read, part.state.write):
            self.table.preempt(part.request)

    def keep_last(self, request: Request) -> None:
        """Make the state of a request that is about to end a snapshot, if that is worth the pages."""
        if self._is_worth_its_pages(request, request.num_computed_tokens):
            keep_state(self.table, request)

    def _next(self, part: Scheduled) -> StatePages:
        request = part.request
        pages = self.table.pages
        end = part.start + part.num_tokens
        makes_snapshot = (
            end % pages.page_size == 0
            and pages.block_pool.num_available - pages.state_pages >= self.table.room_for_outputs()
            and self._is_worth_its_pages(request, end)
            and not self._has_snapshot(request, end)
        )
        snapshot = end // pages.page_size if makes_snapshot else 0
        return StatePages(*pages.states.next(request.owner, snapshot, bool(part.drafts)), makes_snapshot)

    def _is_worth_its_pages(self, request: Request, position: int, step_seconds: float = 0.0) -> bool:
        pages = self.table.pages
        if not pages.enable_prefix_caching:
            return False
        last = pages.states.by_owner[request.owner].last * pages.page_size
        state_tokens = self._state_tokens
        chance = self._chance(request, position)
        evicted = pages.state_pages * pages.block_pool.cached.price()
        return is_worth_its_pages(last, position, chance, state_tokens, self.forecast.cost, evicted, step_seconds)

    def _chance(self, request: Request, position: int) -> float:
        """Return the chance that a later request continues from a position of this one."""
        if position == self._shared_end(request):
            return SHARED_CHANCE
        is_end = position == self._prompt_end(request) or position > request.num_prompt_tokens
        return FOLLOW_UP_CHANCE if is_end else PASSING_CHANCE

    def _has_snapshot(self, request: Request, position: int) -> bool:
        """Return whether another request has left a snapshot there. An output's tokens may not be known yet."""
        if position > request.num_prompt_tokens:
            return False
        pages = self.table.pages
        return request.prefix_hashes(position, pages.page_size)[-1] in pages.prefixes.snapshots

    def _shared_end(self, request: Request) -> int:
        """Return the end of the prefix whose pages were found when the request started, with or without a state."""
        return self.table.pages.states.by_owner[request.owner].num_indexed * self.table.pages.page_size

    def _prompt_end(self, request: Request) -> int:
        """Return the end of the prompt's full pages, from which a next turn continues."""
        return request.num_prompt_tokens - request.num_prompt_tokens % self.table.pages.page_size

    @property
    def _state_tokens(self) -> int:
        """Return the tokens whose KV pages equal one state in number."""
        pages = self.table.pages
        return pages.state_pages * pages.page_size // pages.num_groups
