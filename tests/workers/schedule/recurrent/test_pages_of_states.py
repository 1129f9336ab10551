"""PagePool with recurrent states: any owners, steps, checkpoints and evictions, against a model of what is stored."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import PageHash, PrefixHit, Window, hash_pages

SIZE = 2
PREFIXES = ([1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 5, 5, 6, 6], [7, 7, 8, 8, 9, 9])


class AnyOwners(RuleBasedStateMachine):
    """Owners compute short prompts in a pool that evicts. Every page stores what it should hold."""

    @initialize(
        num_pages=st.integers(14, 40),
        state_pages=st.integers(1, 3),
        windows=st.sampled_from([(None,), (None, 3), (3,)]),
        caching=st.booleans(),
    )
    def start(self, num_pages: int, state_pages: int, windows: tuple[Window, ...], caching: bool) -> None:
        self.pool = PagePool(num_pages, SIZE, caching, windows, state_pages=state_pages)
        self.tokens: dict[str, list[int]] = {}  # by owner
        self.computed: dict[str, int] = {}  # tokens, by owner
        self.stored: dict[int, object] = {}  # by page
        self.count = 0

    @rule(prefix=st.sampled_from(PREFIXES))
    def begin(self, prefix: list[int]) -> None:
        pool, hashes = self.pool, hash_pages(prefix, SIZE)
        hit = pool.match_prefix(hashes)
        self.check_hit(prefix, hashes, hit)
        needed = (len(hashes) - hit.num_pages) * pool.num_groups + pool.state_pages
        if not pool.can_allocate(needed, shared=hit.pages):
            return
        owner = f"r{self.count}"
        self.count += 1
        pool.share(owner, hit)
        for group in range(pool.num_groups):
            for number, page in enumerate(pool.allocate(owner, len(hashes) - hit.num_pages, group)):
                self.stored[page] = (group, prefix[: (hit.num_pages + number + 1) * SIZE])
        pool.allocate_state(owner)
        self.tokens[owner], self.computed[owner] = prefix, hit.num_pages * SIZE

    def check_hit(self, prefix: list[int], hashes: list[PageHash], hit: PrefixHit) -> None:
        """The hit has what it should, and no longer one has a checkpoint."""
        assert hit.num_pages <= hit.num_indexed <= len(hashes)
        assert len(hit.checkpoint) == (self.pool.state_pages if hit.num_pages else 0)
        self.check_state(hit.checkpoint, prefix[: hit.num_pages * SIZE])
        for group, pages in enumerate(hit.by_group):
            for number, page in enumerate(pages):
                assert page < 0 or self.stored[page] == (group, prefix[: (number + 1) * SIZE])
        if self.pool.windows == (None,):
            longer = hashes[hit.num_pages : hit.num_indexed]
            assert not any(self.pool.has_checkpoint(page_hash) for page_hash in longer)

    def check_state(self, pages: Sequence[int], tokens: list[int]) -> None:
        assert [self.stored[page] for page in pages] == [(place, tokens) for place in range(len(pages))]

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), makes_checkpoint=st.booleans(), num_pages=st.integers(1, 2))
    def compute(self, data: st.DataObject, makes_checkpoint: bool, num_pages: int) -> None:
        """One part of a step: it reads the state of exactly what is computed, and writes the state after it."""
        pool, owner = self.pool, data.draw(st.sampled_from(self.unfinished()))
        tokens, start = self.tokens[owner], self.computed[owner]
        end = min(start + num_pages * SIZE, len(tokens))
        makes_checkpoint &= pool.num_available >= pool.state_pages
        read, written = pool.next_state(owner, end // SIZE if makes_checkpoint else 0)
        self.check_state(read, tokens[:start])
        for place, page in enumerate(written):
            self.stored[page] = (place, tokens[:end])
        hashes = hash_pages(tokens[:end], SIZE)
        pool.index(owner, hashes, start // SIZE)
        pool.slide(owner, end)
        if makes_checkpoint:
            pool.index_state(owner, written, hashes)
        pool.end_state(owner, read)
        self.computed[owner] = end
        assert pool.state_of(owner) is written

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data(), makes_checkpoint=st.booleans())
    def compute_in_vain(self, data: st.DataObject, makes_checkpoint: bool) -> None:
        """A part began with a wrong token: the state before it is there still, or the owner must begin again."""
        pool, owner = self.pool, data.draw(st.sampled_from(self.unfinished()))
        makes_checkpoint &= pool.num_available >= pool.state_pages
        read, written = pool.next_state(owner, self.computed[owner] // SIZE + 1 if makes_checkpoint else 0)
        self.stored.update(dict.fromkeys(written, "wrong"))
        if pool.undo_state(owner, read, written):
            self.check_state(pool.state_of(owner), self.tokens[owner][: self.computed[owner]])
        else:
            self.forget(owner)
            pool.release(owner)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        if keeps and self.computed[owner] and self.pool.enable_prefix_caching:
            self.pool.keep_state(owner, hash_pages(self.tokens[owner][: self.computed[owner]], SIZE))
        freed = self.pool.num_freed_by([owner])
        assert self.pool.release(owner) == freed
        self.forget(owner)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), ends=st.booleans())
    def lose_the_writer(self, data: st.DataObject, ends: bool) -> None:
        """A remote writer may still write to the state, which no hit may find."""
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        own = list(self.pool.own_state_of(owner))
        self.pool.quarantine(owner, self.computed[owner] // SIZE)
        self.stored.update(dict.fromkeys(own, "wrong"))
        self.forget(owner)
        if ends:
            self.pool.end_quarantine(owner)

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        assert not any(self.pool.match_prefix(hash_pages(prefix, SIZE)).num_indexed for prefix in PREFIXES)

    def unfinished(self) -> list[str]:
        return sorted(owner for owner, tokens in self.tokens.items() if self.computed[owner] < len(tokens))

    def forget(self, owner: str) -> None:
        del self.tokens[owner], self.computed[owner]

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts = self.pool.counts()
        assert counts.free + counts.owned + counts.cached + counts.quarantined == counts.total
        assert counts.owned == self.pool.num_freed_by(list(self.tokens))
        assert self.pool.num_available == counts.free + counts.cached

    @invariant()
    def states_of_owners_are_theirs(self) -> None:
        if hasattr(self, "pool"):
            for owner, tokens in self.tokens.items():
                if state := self.pool.state_of(owner):
                    self.check_state(state, tokens[: self.computed[owner]])


AnyOwners.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOwners = AnyOwners.TestCase


def test_checkpoint_is_evicted_as_a_whole_and_before_the_pages_in_front_of_it() -> None:
    pool = PagePool(14, SIZE, state_pages=3)
    hashes = hash_pages(list(range(8)), SIZE)
    pool.allocate("a", 4)
    pool.allocate_state("a")
    for end in (2, 4):
        read, written = pool.next_state("a", end)
        pool.index("a", hashes[:end], end - 2)
        pool.index_state("a", written, hashes[:end])
        pool.end_state("a", read)
    assert pool.release("a") == 4 + 3 + 3
    assert pool.counts().cached == 4 + 3 + 3
    found = []
    for _ in range(4):
        pool.allocate("other", 1 + pool.counts().free)
        found.append((pool.match_prefix(hashes).num_pages, pool.match_prefix(hashes).num_indexed))
    assert found == [(2, 4), (2, 3), (2, 2), (0, 2)]


@pytest.mark.parametrize("windows", [(None,), (None, 3)])
def test_hit_without_a_state_is_as_long_as_the_pages_reach(windows: tuple[Window, ...]) -> None:
    pool = PagePool(20, SIZE, windows=windows, state_pages=1)
    hashes = hash_pages(list(range(8)), SIZE)
    for group in range(pool.num_groups):
        pool.allocate("a", 4, group)
    pool.index("a", hashes, 0)
    assert pool.match_prefix(hashes).num_pages == 0
    assert pool.match_prefix(hashes).num_indexed == 4
    hit = pool.match_prefix(hashes, needs_state=False)
    assert (hit.num_pages, list(hit.checkpoint)) == (4, [])
