"""Gives an arriving prompt pages: in groups with a window those alone that tokens after the prompt see."""

import pytest

from crossdock.workers.schedule.memory.layer_groups import group_layers
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import HOLE, AttentionChunk, PrefixHit, Window
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.model_free_replica import ModelFreeReplica, new_scheduler

PROMPT = list(range(1, 31))  # 30 tokens: seven pages of four and a half one


def arriving(scheduler: Scheduler, name: str = "r", prompt: list[int] = PROMPT) -> str:
    """Let a prompt begin to arrive. Returns the owner of its pages."""
    request = ModelFreeReplica(scheduler).add(name, prompt, max_tokens=20, leg=Leg.RECEIVE)
    scheduler.handoff.offer(name)
    assert scheduler.handoff.grant(0.0) == [request]
    return request.owner


@pytest.mark.parametrize(
    ("window", "first"),
    [
        *((4, 6), (5, 6), (7, 6), (8, 5), (30, 0), (100, 0)),
        *((AttentionChunk(29), 7), (AttentionChunk(13), 6), (AttentionChunk(16), 4), (AttentionChunk(31), 0)),
    ],
)
def test_window_has_holes_before_the_first_page_that_the_next_token_sees(window: Window, first: int) -> None:
    """The token at position 30 sees tokens from 31 - window on, or those of its attention chunk."""
    scheduler = new_scheduler(windows=(None, window))
    owner = arriving(scheduler)
    full, last = scheduler.pages.live_pages_of(owner)
    assert (full[0], len(full[1])) == (0, 8)
    assert (last[0], len(last[1])) == (first, 8 - first)
    assert list(scheduler.pages.pages_of(owner, 1)[:first]) == [HOLE] * first
    assert scheduler.pages.counts().owned == 16 - first


def test_arrived_prompt_decodes_with_a_window_that_slides_on() -> None:
    replica = ModelFreeReplica(new_scheduler(windows=(None, 6)))
    owner = arriving(replica.scheduler)
    replica.scheduler.handoff.commit("r", 16)
    replica.scheduler.handoff.start_decoding("r", 7, 0.0)
    for _ in range(10):
        (part,) = replica.step().batch.scheduled
        first, held = replica.scheduler.pages.live_pages_of(owner)[1]
        assert first == max(part.start - 4, 0) // 4, "the first page that the token after this one sees"
        assert part.start // 4 == first + len(held) - 1
    replica.scheduler.abort("r")
    assert replica.scheduler.pages.counts().owned == 0


def test_prompt_whose_sender_is_lost_begins_where_all_groups_can() -> None:
    """Sixteen tokens have arrived, but no page of the window."""
    scheduler = new_scheduler(windows=(None, 6))
    owner = arriving(scheduler)
    scheduler.handoff.commit("r", 16)
    scheduler.handoff.take_over("r", 0.0)
    assert scheduler.pages.end_quarantine(owner) == 4 + 2, "the pages that the sender may have written to"
    batch = scheduler.schedule(0.0)
    assert [(part.start, part.num_tokens) for part in batch.scheduled] == [(0, 30)]


def found(pool: PagePool, position: int | None) -> list[tuple[int, ...]]:
    return [tuple(pages) for pages in pool.prefixes.match(hash_pages(PROMPT, 4), position=position).by_group]


def test_prefix_is_found_by_where_the_tokens_begin_that_are_computed_here() -> None:
    """A request has left seven pages, of which a group with a window has the last four."""
    pool = PagePool(64, 4, windows=(None, 6))
    pool.share("a", pool.prefixes.match(()))
    pool.leave_out("a", 20)
    for group, num_pages in ((0, 7), (1, 4)):
        pool.allocate("a", num_pages, group)
    pool.index("a", hash_pages(PROMPT, 4), 0)
    own = [tuple(pages) for pages in (pool.pages_of("a"), pool.pages_of("a", 1))]
    assert found(pool, None) == [own[0], (HOLE,) * 5 + own[1][5:]]
    assert found(pool, 16) == [own[0][:2], (HOLE,) * 2], "the token at 16 sees page 2, which the window lacks"
    assert found(pool, 24) == [own[0], (HOLE,) * 4 + own[1][4:]]
    assert found(pool, 40) == [own[0], (HOLE,) * 7], "all that the token at 40 sees of the window comes later"
    pool.share("b", pool.prefixes.match(hash_pages(PROMPT, 4), position=40))
    pool.leave_out("b", 40)
    pool.allocate("b", 2, 1)
    assert pool.live_pages_of("b")[1] == (8, pool.pages_of("b", 1)[8:])
    assert pool.num_held("b", 1) == 2
    pool.release("b")
    pool.release("a")
    assert pool.counts().owned == 0


@pytest.mark.parametrize(
    ("windows", "least", "most"),
    [
        ([128, None] * 18, 0.50, 0.51),  # gpt-oss-120b
        (([1024] * 5 + [None]) * 10 + [1024] * 2, 0.26, 0.27),  # Gemma-3-27B
        (([AttentionChunk(8192)] * 3 + [None]) * 12, 0.25, 0.25),  # Llama-4-Scout: the next token begins a chunk
        ([None] * 32, 1.0, 1.0),  # Llama-3-8B
    ],
)
def test_share_of_an_8k_prompt_that_travels_is_that_of_its_windows(
    windows: list[Window], least: float, most: float
) -> None:
    """In bytes, of layers that all have keys and values of the same size."""
    groups = group_layers(windows, [1] * len(windows), 32_768, 16)
    needs = PageNeeds(16, [group.window for group in groups], chunk=2048)
    numbers = needs.to_receive(8192, PrefixHit(0, tuple(() for _ in groups)))
    shipped = sum(number * len(group.layers) for number, group in zip(numbers, groups, strict=True))
    assert least <= shipped / (len(windows) * 512) <= most
