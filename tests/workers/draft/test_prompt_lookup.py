"""Lookup finds the longest match that a search of the whole text finds, whatever the text and however it grows."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.draft.prompt_lookup import MAX_CANDIDATES, PromptLookup
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig


def lookup(shortest: int = 2, longest: int = 5) -> PromptLookup:
    return PromptLookup(SpeculativeConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest))


def match_length(text: Sequence[int], position: int, most: int) -> int:
    """Return how many tokens before `position` equal the last ones of `text`."""
    length = 0
    while length < min(most, position) and text[position - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def longest_match(text: Sequence[int], shortest: int, longest: int) -> int:
    """Return the length of the longest match by comparing every position."""
    length = max((match_length(text, position, longest) for position in range(1, len(text))), default=0)
    return length if length >= shortest else 0


TEXTS = st.lists(st.integers(0, 5), max_size=40)


@given(TEXTS, st.lists(TEXTS, max_size=8), st.integers(1, 4), st.integers(0, 4))
def test_match_is_the_longest_of_the_text(start: list[int], more: list[list[int]], shortest: int, extra: int) -> None:
    drafting, text = lookup(shortest, shortest + extra), list(start)
    drafting.add("a", text)
    for tokens in [[], *more]:
        text += tokens
        counts = sum(text[i : i + shortest] == text[-shortest:] for i in range(len(text)))
        if counts <= MAX_CANDIDATES:  # beyond that, only the latest are compared
            assert drafting.match_length("a") == longest_match(text, shortest, shortest + extra)


@given(TEXTS, st.lists(TEXTS, max_size=5), st.integers(1, 9))
def test_drafts_are_what_followed_a_longest_match(start: list[int], more: list[list[int]], most: int) -> None:
    drafting, text = lookup(), list(start)
    drafting.add("a", text)
    for tokens in [[], *more]:
        text += tokens
        length, drafts = drafting.match_length("a"), drafting.propose({"a": most}).get("a", [])
        assert len(drafts) == (most if length else 0)
        ends = [position for position in range(1, len(text)) if match_length(text, position, 5) >= length]
        copies = [(text + drafts)[position : position + most] for position in ends]
        assert not drafts or drafts in copies


@given(TEXTS, st.lists(TEXTS, max_size=5), TEXTS, st.integers(1, 4), st.integers(0, 4), st.integers(1, 9))
def test_match_of_a_text_with_forced_tokens_is_the_longest_that_the_text_itself_continues(
    start: list[int], more: list[list[int]], forced: list[int], shortest: int, extra: int, most: int
) -> None:
    drafting, text, longest = lookup(shortest, shortest + extra), list(start), shortest + extra
    drafting.add("a", text)
    for tokens in more:
        text += tokens
        num_forced = min(len(forced), len(tokens))  # each time some tokens fewer are forced
        whole = text + forced[:num_forced]
        drafting.remove("a")
        drafting.add("a", text)
        lengths = [match_length(whole, position, longest) for position in range(1, len(text))]
        best = max(lengths, default=0) if len(text) > shortest else 0
        if sum(length >= shortest for length in lengths) > MAX_CANDIDATES:
            continue
        best = best if best >= shortest else 0
        assert drafting.match_length("a", forced[:num_forced]) == best
        drafts = drafting.propose({"a": most}, {"a": forced[:num_forced]}).get("a", [])
        ends = [position for position, length in enumerate(lengths, 1) if length >= best]
        assert not best or drafts in [(whole + drafts)[position : position + most] for position in ends]


def test_search_after_forced_tokens_leaves_the_index_of_the_text_right() -> None:
    drafting, text = lookup(1, 4), [1, 2, 3, 4, 1]
    drafting.add("a", text)
    assert drafting.propose({"a": 2}, {"a": [2, 3]}) == {"a": [4, 1]}
    text += [2]  # a step verified the first of the forced tokens alone
    assert drafting.propose({"a": 2}) == {"a": [3, 4]}
    assert drafting.propose({"a": 2}, {"a": [3]}) == {"a": [4, 1]}
    text += [3, 4, 9]
    assert drafting.propose({"a": 2}) == {}
    assert drafting.propose({"a": 3}, {"a": [4]}) == {"a": [9, 4, 9]}


def test_latest_of_equal_matches_is_taken() -> None:
    drafting = lookup()
    drafting.add("a", [1, 2, 7, 0, 1, 2, 8, 0, 5, 1, 2])
    assert drafting.propose({"a": 1}) == {"a": [8]}


def test_longer_match_goes_before_a_later_one() -> None:
    drafting = lookup()
    drafting.add("a", [9, 1, 2, 7, 0, 1, 2, 8, 0, 9, 1, 2])
    assert drafting.propose({"a": 1}) == {"a": [7]}


def test_period_goes_on_past_the_end_of_the_text() -> None:
    drafting = lookup()
    drafting.add("a", [5, 1, 2, 3, 1, 2, 3])
    assert drafting.propose({"a": 8}) == {"a": [1, 2, 3, 1, 2, 3, 1, 2]}


def test_new_text_has_no_drafts() -> None:
    drafting = lookup()
    drafting.add("a", list(range(50)))
    drafting.add("b", [])
    assert drafting.propose({"a": 4, "b": 4}) == {}


def test_removed_request_is_forgotten_and_its_name_free() -> None:
    drafting = lookup()
    drafting.add("a", [1, 2, 3, 1, 2])
    drafting.remove("a")
    drafting.remove("never added")
    drafting.add("a", [4, 5, 6])
    assert drafting.match_length("a") == 0


@pytest.mark.parametrize("start", [0, 300])
def test_text_that_outgrows_its_table_is_still_found(start: int) -> None:
    drafting, text = lookup(), [10_000 + token for token in range(start)]
    drafting.add("a", text)
    for number in range(3000):
        text.append(number)
        assert drafting.match_length("a") == 0
    text += [40, 41, 42]
    assert drafting.propose({"a": 3}) == {"a": [43, 44, 45]}
