"""Pages of a model whose layers are all in one group, as most tests have them."""

from collections.abc import Sequence

from crossdock.kvtransfer.plan import PageCopies
from crossdock.kvtransfer.records import GroupPages


def whole(pages: Sequence[int], first: int = 0) -> tuple[GroupPages, ...]:
    """Return a request's pages from number `first` on, in one group."""
    return (GroupPages(first, tuple(pages)),)


def copies(source_pages: Sequence[int], target_pages: Sequence[int]) -> tuple[PageCopies, ...]:
    """Return copies of pages of one group."""
    return (PageCopies(0, tuple(source_pages), tuple(target_pages)),)
