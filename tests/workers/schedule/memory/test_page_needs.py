"""PageNeeds: no group ever needs more pages than are counted, and the longest prompt is the one that fits."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window, first_visible_page

PAGE_SIZE = 16
WINDOWS: list[Window] = [None, 8, 64, AttentionChunk(64)]


def test_prompt_holds_the_window_and_a_chunk_in_each_group() -> None:
    needs = PageNeeds(PAGE_SIZE, (None, 1024), chunk=2048)
    assert needs.at_once(32_768) == 32_768 // PAGE_SIZE + (1024 + 2048) // PAGE_SIZE + 1


@given(st.booleans(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
def test_window_and_chunk_need_no_more_pages_than_counted(
    slides: bool, tokens: int, chunk: int, size: int, start: int
) -> None:
    window = tokens if slides else AttentionChunk(tokens)
    needs = PageNeeds(size, (window,), chunk)
    first, last = first_visible_page(window, start, size), (start + chunk - 1) // size
    assert needs.most[0] is not None
    assert last - first + 1 <= needs.most[0] <= (tokens + chunk) // size + 2


@given(
    st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=5),
    st.integers(0, 300),
    st.integers(1, 64),
    st.integers(0, 9),
)
def test_longest_prompt_needs_the_pages_that_there_are(
    windows: list[Window], num_pages: int, chunk: int, state_pages: int
) -> None:
    needs = PageNeeds(PAGE_SIZE, windows, chunk, state_pages)
    longest = needs.longest_prompt(num_pages)
    assert needs.at_once(int(min(longest, 1e6)) // PAGE_SIZE * PAGE_SIZE) <= max(num_pages, state_pages)
    if len({window for window in windows if window is not None}) < 2 and longest < inf:  # else it is a lower bound
        assert needs.at_once(int(longest) + PAGE_SIZE) > num_pages


@given(
    st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=5),
    st.integers(0, 300),
    st.integers(1, 64),
    st.integers(0, 9),
    st.integers(1, 3000),
)
def test_longest_request_fits_and_one_token_more_does_not(
    windows: list[Window], num_pages: int, chunk: int, state_pages: int, most: int
) -> None:
    needs = PageNeeds(PAGE_SIZE, windows, chunk, state_pages)
    longest = needs.longest_request(num_pages, most)
    assert longest <= most
    assert not longest or needs.at_most(longest) <= num_pages
    assert longest == most or needs.at_most(longest + 1) > num_pages


def test_router_counts_pages_as_the_replica_does() -> None:
    """The router's formula for many replicas at once is `at_once` of the same prompt, where windows are alike."""
    kinds: list[tuple[list[Window], int]] = [([None], 0), ([None, 64, 64], 0), ([64], 0), ([None, None, 8], 0)]
    for windows, state in (*kinds, ([None, 64], 7), ([None, AttentionChunk(64)], 0)):
        needs = PageNeeds(PAGE_SIZE, windows, 32, state)
        for num_pages in range(1, 60):
            full = needs.num_full_groups * num_pages
            counted = min(len(windows) * num_pages, full + needs.window_pages) + needs.state_pages
            assert counted == needs.at_once(num_pages * PAGE_SIZE)
