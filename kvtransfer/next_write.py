"""Plans the next write of a delivery: its pages of each group of layers, bounded in bytes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from crossdock.kvtransfer.messages import Grant
from crossdock.kvtransfer.plan import PageCopies
from crossdock.kvtransfer.records import GroupPages


class WrongGrant(Exception):
    """The granted pages are not those that the source has to write."""


@dataclass(frozen=True, slots=True)
class TargetRank:
    """A rank that takes `page_bytes` of each page; `num_sources` source ranks write to it.

    `page_bytes`: for each group of layers; of models with recurrent layers also of each page of the state."""

    num_pages: int  # of its pool
    page_bytes: tuple[int, ...]
    num_sources: int
    has_state: bool = False  # the last of `page_bytes` is that of the recurrent state

    @property
    def num_groups(self) -> int:
        return len(self.page_bytes) - self.has_state

    def may_grant(self, grant: Grant) -> bool:
        """Return whether a grant names different pages of this rank's pool, for each group of layers."""
        pages = [page for group in grant.groups for page in group.pages] + [*grant.state_pages]
        is_in_pool = len(set(pages)) == len(pages) and all(page < self.num_pages for page in pages)
        is_after = all(group.first >= grant.first_page for group in grant.groups)
        has_all = len(grant.groups) == self.num_groups and bool(grant.state_pages) == self.has_state
        return has_all and is_in_pool and is_after


@dataclass(frozen=True, slots=True)
class ReadyPages:
    """The pages of a request that a source rank has so far."""

    groups: tuple[GroupPages, ...]
    num_pages: int  # pages that can be written: all are full, unless `is_finished`
    is_finished: bool  # the whole prompt is here
    state_pages: tuple[int, ...] = ()  # of the recurrent state, once it is final


@dataclass(frozen=True, slots=True)
class NextWrite:
    """The next write of one delivery."""

    copies: tuple[PageCopies, ...]
    end: int  # number after the last page that it has of the prompt
    state_end: int  # likewise of the state
    is_last: bool
    num_bytes: int

    @property
    def num_pages(self) -> int:
        """Return how many pages it writes, in all groups."""
        return sum(len(copy.target_pages) for copy in self.copies)


def next_write(
    ready: ReadyPages, grant: Grant, target: TargetRank, first: int, state_first: int, max_bytes: int
) -> NextWrite | None:
    """Return the next write after the first `first` pages, and `state_first` pages of the state; None: there is none.

    A write has at most `max_bytes`, but at least one page. The last tokens go with the last part of the state, so that
    a target with all tokens has the state too. The part of a state that does not fit into that write goes before.

    Raises:
        WrongGrant: the grant ends before, or names pages that are not here.
    """
    end, num_bytes = _end_of_write(ready, grant, target, first, max_bytes)
    is_last = ready.is_finished and end >= ready.num_pages
    state_end = state_first
    if is_last and target.has_state and (size := target.page_bytes[-1]):  # 0: another rank writes the state
        if len(ready.state_pages) != len(grant.state_pages):
            raise WrongGrant(f"{len(grant.state_pages)} pages of state, {len(ready.state_pages)} are needed")
        num_left = len(ready.state_pages) - state_first
        state_end += num_left
        if num_left and num_bytes + num_left * size > max_bytes:
            end = first
            is_last = False
            num_bytes = 0
            state_end = state_first + min(num_left, max(1, max_bytes // size))
        num_bytes += (state_end - state_first) * size
    if end == first and state_end == state_first and not is_last:
        return None
    copies = _copies(ready.groups, grant, target, range(first, end))
    if state_end > state_first:
        part = slice(state_first, state_end)
        copies.append(PageCopies(target.num_groups, ready.state_pages[part], grant.state_pages[part]))
    return NextWrite(tuple(copies), end, state_end, is_last, num_bytes)


def _end_of_write(ready: ReadyPages, grant: Grant, target: TargetRank, first: int, max_bytes: int) -> tuple[int, int]:
    """Return the end of the next write's pages, and their bytes: at least one of the ready pages that is written in
    some group, and no more than `max_bytes`."""
    end = first
    num_bytes = 0
    while end < ready.num_pages:
        sizes = zip(target.page_bytes, grant.groups, strict=False)  # without the state
        size = sum([size for size, group in sizes if group.first <= end])
        if num_bytes and num_bytes + size > max_bytes:
            break
        end = end + 1
        num_bytes = num_bytes + size
    return end, num_bytes


def _copies(groups: Sequence[GroupPages], grant: Grant, target: TargetRank, numbers: range) -> list[PageCopies]:
    """Return the granted pages among page numbers `numbers`, by group of layers: the pages to write.

    `groups`: the pages here.
    """
    copies = []
    for number, (here, there) in enumerate(zip(groups, grant.groups, strict=True)):
        first = max(numbers.start, there.first)
        if numbers.stop > there.end or (first < numbers.stop and not here.first <= first <= numbers.stop <= here.end):
            raise WrongGrant(f"pages up to {grant.end}, {numbers.stop} are needed, or other ones than are here")
        if first < numbers.stop and target.page_bytes[number]:
            source = here.pages[first - here.first : numbers.stop - here.first]
            copies.append(PageCopies(number, source, there.pages[first - there.first : numbers.stop - there.first]))
    return copies
