"""The pages of a step's sequences, one list after the other.

A table of them has a row for each sequence, as wide as the longest. Beside one stream of 128k tokens the table of 256
streams has 2M entries, of which 1 % are pages. So the host keeps lists, and the device makes the table.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.schedule.memory.prefix_index import HOLE
from crossdock.workers.schedule.request.batch import Scheduled


class PageLists:
    """The pages of S sequences. Of G groups of layers, each sequence has G lists of equal length."""

    def __init__(self, entries: NDArray[np.int32], counts: NDArray[np.int64], num_groups: int = 1) -> None:
        """`entries` are all pages; `counts` [S * G] says how many each list has, at least one."""
        self.entries = entries
        self.counts = counts
        self.num_groups = num_groups

    @classmethod
    def of(cls, parts: Sequence[Scheduled], num_pages: NDArray[np.int64]) -> "PageLists":
        """Return the pages of every part, as many as this step's tokens reach: `num_pages` [S].

        The pool keeps pages as C integers, so that a list is one copy of memory. Kernels may read a page before a
        window, with a weight of 0. So the first page after a hole fills it: another request's page could contain NaN.
        """
        num_groups = 1 + len(parts[0].further_pages)
        counts = np.repeat(num_pages, num_groups)
        lists = [part.pages for part in parts]
        if num_groups > 1:
            lists = [pages for part in parts for pages in (part.pages, *part.further_pages)]
        entries = array("i")
        for pages, count in zip(lists, counts.tolist(), strict=True):
            reached = pages if len(pages) == count else pages[:count]
            entries.extend(reached if reached[0] != HOLE else _filled(reached))
        return cls(np.frombuffer(entries, np.int32), counts, num_groups)

    @property
    def width(self) -> int:
        """Return the length of the longest list."""
        return int(self.counts.max())

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the table, [S, P], or [S, G, P]."""
        groups = (self.num_groups,) if self.num_groups > 1 else ()
        return len(self.counts) // self.num_groups, *groups, self.width

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The entry with which each list begins."""
        starts: NDArray[np.int64] = self.counts.cumsum() - self.counts
        return starts

    def places(self, rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return the place of every entry in a flat table of `width` columns, whose `rows` have the lists."""
        places: NDArray[np.int64] = np.arange(len(self.entries)) + np.repeat(rows * width - self.starts, self.counts)
        return places

    def pages_at(self, sequences: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the pages with these numbers in the lists of these sequences, [T], or [T, G]."""
        at = self.starts.reshape(-1, self.num_groups)[sequences] + numbers[:, None]
        pages: NDArray[np.int32] = self.entries[at if self.num_groups > 1 else at[:, 0]]
        return pages

    def with_padding(self, at: int, counts: Sequence[int]) -> "PageLists":
        """Return the lists with those of further sequences before sequence `at`, of `counts` pages 0 in each group."""
        before = at * self.num_groups
        more = np.repeat(np.array(counts, np.int64), self.num_groups)
        cut = int(self.counts[:before].sum())
        entries = np.concatenate([self.entries[:cut], np.zeros(more.sum(), np.int32), self.entries[cut:]])
        return PageLists(entries, np.concatenate([self.counts[:before], more, self.counts[before:]]), self.num_groups)


def table_of(shape: Sequence[int], entries: Tensor, places: Tensor) -> Tensor:
    """Make the table on the device of its entries; those past the end of a list are page 0."""
    rows = torch.zeros(int(np.prod(shape)), dtype=torch.int32, device=entries.device)
    return rows.index_copy_(0, places, entries).view(*shape)


def _filled(pages: Sequence[int]) -> list[int]:
    """Return a list whose holes, which are at its beginning, have the number of the first page after them."""
    filled = list(pages)
    first = filled.count(HOLE)
    return [filled[first]] * first + filled[first:]
