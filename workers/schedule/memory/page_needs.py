"""How many pages requests need: in each group of layers for all tokens, or for what a window and a chunk span; and for
the state of recurrent layers."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from crossdock.workers.schedule.memory.prefix_index import PrefixHit, Window, first_visible_page, most_visible


@dataclass(frozen=True)
class PageNeeds:
    """Counts the pages of requests. A chunk has at most `chunk` tokens."""

    page_size: int  # tokens
    windows: Sequence[Window]  # of each group
    chunk: int  # tokens
    state_pages: int = 0  # of one request's state
    num_drafts: int = 0  # of a stream in a step at most, with the tokens that are computed again

    @cached_property
    def most(self) -> Sequence[int | None]:
        """Return how many pages each group holds of one request at most; None: as many as there are tokens.

        A chunk needs pages for itself and for the window of its first token.
        """
        return [
            None if window is None else self.spanned(most_visible(window) - 1 + self.chunk) for window in self.windows
        ]

    @cached_property
    def most_decoding(self) -> Sequence[int | None]:
        """Return how many pages each group holds of one stream at most; a page goes one step after the window."""
        beyond = 1 + self.num_drafts
        return [None if window is None else self.spanned(most_visible(window) + beyond) for window in self.windows]

    def spanned(self, num_tokens: int) -> int:
        """Return the most pages on which `num_tokens` consecutive tokens can lie."""
        return (num_tokens + self.page_size - 2) // self.page_size + 1

    def pages(self, num_tokens: int) -> int:
        """Return on how many pages the first `num_tokens` tokens lie."""
        return -(-num_tokens // self.page_size)

    def at_once(self, num_tokens: int, num_cached: int = 0) -> int:
        """Return the pages that a prompt must get to start after `num_cached` pages of its prefix."""
        missing = self.pages(num_tokens) - num_cached
        return self.state_pages + sum(missing if most is None else min(missing, most) for most in self.most)

    def at_most(self, num_tokens: int) -> int:
        """Return the pages without which a request of `num_tokens` tokens may never start, with the snapshot at its
        begin."""
        return self.at_once(num_tokens) + self.state_pages

    def longest_request(self, num_pages: int, most: int) -> int:
        """Return the tokens, up to `most`, of the longest request that may start in a pool of `num_pages` pages."""
        return bisect_right(range(1, most + 1), num_pages, key=self.at_most)

    def held(self, num_tokens: int) -> int:
        """Return the pages that a stream of `num_tokens` tokens holds at most."""
        pages = self.pages(num_tokens)
        return self.state_pages + sum(pages if most is None else min(pages, most) for most in self.most_decoding)

    @cached_property
    def num_full_groups(self) -> int:
        """Return how many groups keep all their pages."""
        return sum(window is None for window in self.windows)

    @cached_property
    def window_pages(self) -> int:
        """Return how many pages the groups with windows hold of one request at most."""
        return sum(most for most in self.most if most is not None)

    def longest_prompt(self, num_pages: float) -> float:
        """Return the tokens of the longest prompt that can start with `num_pages` pages, about."""
        num_pages = max(num_pages - self.state_pages, 0)
        longest = num_pages / len(self.windows)
        if num_pages >= self.window_pages:
            longest = max(
                longest, (num_pages - self.window_pages) / self.num_full_groups if self.num_full_groups else inf
            )
        return longest * self.page_size

    def to_receive(self, num_tokens: int, hit: PrefixHit) -> list[int]:
        """Return, per layer group, the pages to reserve for a prompt that another replica computes.

        Cached pages of the prompt are left out. In a group with a window, tokens after the prompt see these pages.
        """
        firsts = (first_visible_page(window, num_tokens, self.page_size) for window in self.windows)
        return [self.pages(num_tokens) - max(first, hit.num_pages) for first in firsts]

    def to_start(self, num_tokens: int, hit: PrefixHit) -> list[int]:
        """Return, per layer group, the pages to reserve before a prompt starts, without its cached pages."""
        missing = self.pages(num_tokens) - hit.num_pages
        if not any(self.windows):
            return [missing] * len(self.windows)
        end = hit.num_pages * self.page_size
        shared = (hit.num_pages - first_visible_page(window, end, self.page_size) for window in self.windows)
        return [
            missing if most is None else min(missing, most - num_shared)
            for most, num_shared in zip(self.most, shared, strict=True)
        ]

    def num_to_start(self, num_tokens: int, hit: PrefixHit) -> int:
        """Return the pages to reserve before a prompt starts, of all groups and its state, without its cached pages."""
        return sum(self.to_start(num_tokens, hit)) + self.state_pages
