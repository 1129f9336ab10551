"""A device without a model: its pages hold tokens, and the states of recurrent layers as all tokens before them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdock.workers.schedule.memory.prefix_index import Window
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, TierPages
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.page_hashes import PageHash
from tests.workers.schedule.model_free_replica import first_seen

StatePair = tuple[list[int], list[int]]  # pages of a state that a part of a step reads and writes


@dataclass
class PagedDevice:
    """Knows only what is in its pages, so that a page given away too early is a wrong token."""

    page_size: int
    windows: Sequence[Window]  # of each group of layers
    memory: dict[tuple[int, int], int] = field(default_factory=dict)  # token by page and position in it
    states: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # by page: its place, and the tokens so far

    def write(self, pages: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for at, token in enumerate(token_ids, start):
            page = pages[at // self.page_size]
            self.memory[page, at % self.page_size] = token
            self.states.pop(page, None)

    def read(self, pages: Sequence[Sequence[int]], part: Scheduled) -> list[int]:
        """Return the tokens up to the end of a part, all of those that each group sees read from its pages."""
        size, end, tokens = self.page_size, part.start + part.num_tokens, part.request.token_ids[: part.start]
        for owned, window in zip(pages, self.windows, strict=True):
            first = first_seen(window, part.start)
            seen = [self.memory[owned[at // size], at % size] for at in range(first, end)]
            assert seen == tokens[first:] or len(tokens) == part.start, "groups of layers have unlike tokens"
            tokens[first:] = seen
        return tokens

    def read_state(self, pages: Sequence[int]) -> list[int]:
        """Return the tokens whose state these pages hold."""
        if not pages:
            return []
        parts = [self.states[page] for page in pages]
        assert [place for place, _ in parts] == list(range(len(pages)))
        assert all(tokens == parts[0][1] for _, tokens in parts)
        return parts[0][1]

    def write_state(self, pages: Sequence[int], tokens: list[int]) -> None:
        for place, page in enumerate(pages):
            self.states[page] = (place, list(tokens))
            for at in range(self.page_size):
                self.memory.pop((page, at), None)

    def spoil_states(self, pages: Sequence[int]) -> None:
        """Write half a state: no request may read it."""
        self.states.update(dict.fromkeys(pages, (-1, [])))

    def advance_states(
        self, parts: Sequence[Scheduled], known: Sequence[list[int]], pairs: Sequence[StatePair]
    ) -> None:
        """Read for every part the state of exactly the tokens before it; then write the states after all parts."""
        before = [self.read_state(read) for read, _ in pairs]
        for part, tokens in zip(parts, before, strict=True):
            assert tokens == part.request.token_ids[: part.start]
        for tokens, ids, (_, written) in zip(before, known, pairs, strict=True):
            self.write_state(written, tokens + ids)


@dataclass
class PagedTier:
    """A tier below the pages of a device: it has what these held when they were evicted."""

    device: PagedDevice
    tiers: TierPages
    content: dict[PageKey, list[tuple[dict[int, int], tuple[int, list[int]] | None]]] = field(default_factory=dict)

    def evicted(self, group: int, page_hash: PageHash, pages: Sequence[int], compute_s: float) -> None:
        key, size = PageKey(group, page_hash), self.device.page_size
        self.tiers.returns.evicted(page_hash)
        for tier in self.tiers.worth_storing(key, 0.0):  # every page
            memory = [
                {at: token for at in range(size) if (token := self.device.memory.get((page, at))) is not None}
                for page in pages
            ]
            self.content[key] = [(held, self.device.states.get(page)) for held, page in zip(memory, pages, strict=True)]
            tier.stored(key, 1e-4)

    def fill(self, key: PageKey, pages: Sequence[int]) -> None:
        for page, (memory, state) in zip(pages, self.content[key], strict=True):
            for at in range(self.device.page_size):
                self.device.memory.pop((page, at), None)
            self.device.memory.update({(page, at): token for at, token in memory.items()})
            self.device.states.pop(page, None)
            if state is not None:
                self.device.states[page] = state
