"""The draft policy: drafts where they pay, by the step's predicted seconds, and learns whether they do."""

import itertools
import random
from collections.abc import Mapping
from math import inf, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.drafts.drafting import DraftPolicy, DraftRoom, FreeDrafts, Stream
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig

MOST = 4
FREE_ROWS = StepCost(base=0.01, per_prefill_token=0.001, per_decode=0.001, breakpoint_rows=16, per_early_row=-0.001)
DEAR_ROWS = StepCost(base=0.001, per_prefill_token=0.001, per_decode=0.001)

COSTS = st.builds(
    lambda base, row, breakpoint, early, launch: StepCost(
        base=base, per_prefill_token=row, per_decode=row, breakpoint_rows=breakpoint, per_early_row=early * row,
        least_with_chunk=launch,
    ),
    st.floats(0.001, 0.05), st.floats(1e-5, 0.003), st.sampled_from([0, 4, 8, 64]), st.floats(-1, 1),
    st.sampled_from([0.0, 0.005, 0.02]),
)  # fmt: skip


class Matches(FreeDrafts):
    """A source with matches of given lengths, and with a price for each position."""

    def __init__(self, lengths: Mapping[str, int], position_seconds: float = 0.0) -> None:
        self.lengths = lengths
        self.position_seconds = position_seconds

    def match_length(self, request_id: str) -> int:
        return self.lengths[request_id]

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        return self.position_seconds * num_tokens


def policy_of(source: FreeDrafts | None = None) -> DraftPolicy:
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=MOST)
    return DraftPolicy(config, source or FreeDrafts())


def streams_of(count: int, most: int = MOST) -> list[Stream]:
    return [Stream(str(number), 100, most) for number in range(count)]


def work_of(streams: list[Stream]) -> StepWork:
    return StepWork.of([], [stream.context for stream in streams])


def speculating(streams: list[Stream], lengths: dict[str, int]) -> StepWork:
    """Return the work of a step that verifies so many drafts of each stream."""
    work = work_of(streams)
    for stream in streams:
        work = work.plus_drafts(stream.context, lengths.get(stream.id, 0))
    return work


def probability(policy: DraftPolicy, request_id: str, match: int) -> float:
    """Return the policy's own probability that the first draft after a match of `match` tokens is accepted."""
    return policy._acceptance.after(match, policy._acceptance.factor(request_id))


def rate(policy: DraftPolicy, streams: list[Stream], lengths: dict[str, int], cost: StepCost) -> float:
    """Return the expected tokens per second of a step, by the policy's own probabilities."""
    tokens = float(len(streams))
    for request_id, length in lengths.items():
        match, forced = policy.source.match_length(request_id), min(streams[int(request_id)].forced, length)
        chain = [probability(policy, request_id, match + position) for position in range(length - forced)]
        tokens += forced + sum(prod(chain[: end + 1]) for end in range(length - forced))
    seconds = cost.seconds(speculating(streams, lengths)) + seconds_again(policy, streams, lengths, cost)
    found = [length - streams[int(request_id)].forced for request_id, length in lengths.items()]
    num_found, longest = sum(length > 0 for length in found), max(found, default=0)
    return tokens / (seconds + (policy.source.seconds(num_found, longest) if num_found else 0.0))


def seconds_again(policy: DraftPolicy, streams: list[Stream], lengths: dict[str, int], cost: StepCost) -> float:
    """Return the expected seconds of the tokens that next steps compute again, where all rows cost the same."""
    seconds = 0.0
    for request_id, length in lengths.items():
        stream = streams[int(request_id)]
        if stream.again is None:
            continue
        match, accepted = policy.source.match_length(request_id), 1.0
        for place in range(stream.forced, length):  # the first draft that is rejected
            chance = probability(policy, request_id, match + place - stream.forced)
            seconds += accepted * (1 - chance) * (stream.again + 1 + place) * cost.per_decode
            accepted *= chance
    return seconds


@given(
    COSTS,
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 1, 2, 5])), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.001, 0.003]),
)
def test_drafts_are_the_best_of_all_choices(
    cost: StepCost, kinds: list[tuple[int, int]], position_seconds: float
) -> None:
    """`kinds`: of each stream, the tokens of its match and how many its grammar dictates."""
    streams = [Stream(str(number), 100, 3, forced) for number, (_, forced) in enumerate(kinds)]
    policy = policy_of(Matches({str(number): match for number, (match, _) in enumerate(kinds)}, position_seconds))
    chosen = policy.lengths(streams, work_of(streams), cost)
    choices = itertools.product(*(range(4 if match else min(forced, 3) + 1) for match, forced in kinds))
    rates = [
        rate(policy, streams, {stream.id: n for stream, n in zip(streams, choice, strict=True) if n}, cost)
        for choice in choices
    ]
    assert rate(policy, streams, chosen, cost) >= max(rates) * (1 - 1e-9)


@given(st.floats(0.001, 0.05), st.floats(1e-5, 0.003), st.integers(0, 9), st.sampled_from([0, 2]), st.integers(0, 12))
def test_drafts_of_a_recurrent_model_are_the_best_choice_counting_what_is_computed_again(
    base: float, row: float, match: int, forced: int, again: int
) -> None:
    cost, stream = StepCost(base=base, per_prefill_token=row, per_decode=row), Stream("0", 100, MOST, forced, again)
    policy = policy_of(Matches({"0": match}))
    chosen = policy.lengths([stream], work_of([stream]), cost)
    rates = [rate(policy, [stream], {"0": length} if length else {}, cost) for length in range(MOST + 1)]
    possible = rates if match else rates[: forced + 1]
    if chosen or forced:
        assert rate(policy, [stream], chosen, cost) == pytest.approx(max(possible))
    elif not again:  # else one draft may be too dear where several would pay
        assert rates[0] >= max(possible[:2]) * (1 - 1e-9)


@pytest.mark.parametrize(("again", "expected"), [(None, {"0": 3}), (0, {"0": 2}), (3, {"0": 2}), (6, {})])
def test_more_tokens_to_compute_again_make_drafts_dearer(again: int | None, expected: dict[str, int]) -> None:
    cost, policy = StepCost(base=0.003, per_prefill_token=0.001, per_decode=0.001), policy_of(Matches({"0": 3}))
    stream = Stream("0", 100, MOST, again=again)
    assert policy.lengths([stream], work_of([stream]), cost) == expected


@given(COSTS, st.integers(1, 20), st.integers(0, 2**32), st.floats(1, 3))
def test_drafts_are_never_predicted_to_be_worse_than_none(cost: StepCost, count: int, seed: int, room: float) -> None:
    rng, streams = random.Random(seed), [Stream(str(n), n * 300, n % 6) for n in range(count)]
    policy = policy_of(Matches({stream.id: rng.randrange(12) for stream in streams}))
    for _ in range(12):
        within = cost.seconds(work_of(streams)) * room
        lengths = policy.lengths(streams, work_of(streams), cost, within)
        assert all(0 < lengths[stream.id] <= min(stream.most, MOST) for stream in streams if stream.id in lengths)
        assert not lengths or cost.seconds(speculating(streams, lengths)) <= within + 1e-12
        assert rate(policy, streams, lengths, cost) >= rate(policy, streams, {}, cost) * (1 - 1e-9)
        for request_id, length in lengths.items():
            policy.observe(request_id, length, rng.randint(0, length))


def test_cheap_rows_are_filled_and_dear_ones_are_not() -> None:
    streams = streams_of(1)
    assert policy_of().lengths(streams, work_of(streams), FREE_ROWS) == {"0": MOST}
    many = streams_of(64)
    assert policy_of().lengths(many, work_of(many), DEAR_ROWS) == {}


def test_long_match_is_drafted_where_a_short_one_does_not_pay() -> None:
    streams = streams_of(32)
    policy = policy_of(Matches({stream.id: 12 if stream.id == "7" else 1 for stream in streams}))
    cost = StepCost(base=0.01, per_prefill_token=0.001, per_decode=0.001)
    assert list(policy.lengths(streams, work_of(streams), cost)) == ["7"]


def test_fixed_lengths_without_a_cost_and_without_adaptive() -> None:
    streams = [Stream("a", 10, 9), Stream("b", 10, 2), Stream("c", 10, 0)]
    assert policy_of().lengths(streams, work_of(streams), None) == {"a": MOST, "b": 2}
    fixed = DraftPolicy(SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False))
    assert fixed.lengths(streams, work_of(streams), DEAR_ROWS, within=0.0) == {"a": 3, "b": 2}


def test_step_without_slack_has_no_drafts() -> None:
    streams = streams_of(2)
    assert policy_of().lengths(streams, work_of(streams), FREE_ROWS, within=0.001) == {}


def test_seconds_of_the_drafter_are_paid_for() -> None:
    streams = streams_of(1)
    matches = {"0": 3}
    assert policy_of(Matches(matches)).lengths(streams, work_of(streams), FREE_ROWS) == {"0": MOST}
    assert policy_of(Matches(matches, 0.05)).lengths(streams, work_of(streams), FREE_ROWS) == {}


COSTLY = StepCost(base=0.004, per_prefill_token=0.001, per_decode=0.004)  # a draft pays from 0.5 on for one stream


def drafts_over(policy: DraftPolicy, steps: int, accepted: bool) -> list[int]:
    """Return the drafts of one stream in each step, all of them accepted or none."""
    streams, counts = streams_of(1), []
    for _ in range(steps):
        length = policy.lengths(streams, work_of(streams), COSTLY).get("0", 0)
        counts.append(length)
        if length:
            policy.observe("0", length, length if accepted else 0)
    return counts


def test_stream_that_stops_profiting_stops_paying_and_tries_again_rarely() -> None:
    policy = policy_of(Matches({"0": 6}))
    assert all(drafts_over(policy, 20, accepted=True))
    failing = drafts_over(policy, 500, accepted=False)
    assert not any(failing[12:16])
    assert sum(map(bool, failing[16:])) < 30
    assert any(failing[100:])


def test_stream_whose_text_becomes_repetitive_drafts_again() -> None:
    policy = policy_of(Matches({"0": 6}))
    drafts_over(policy, 200, accepted=False)
    profiting = drafts_over(policy, 600, accepted=True)
    assert sum(map(bool, profiting[-100:])) == 100


def test_totals_count_what_was_drafted_accepted_and_wasted() -> None:
    policy = policy_of(Matches({"0": 6}))
    streams = streams_of(1)
    lengths = policy.lengths(streams, work_of(streams), COSTLY)
    policy.observe("0", lengths["0"], 1)
    assert (policy.drafted, policy.accepted) == (lengths["0"], 1)
    rows = COSTLY.seconds(speculating(streams, lengths)) - COSTLY.seconds(work_of(streams))
    assert abs(policy.wasted_s - rows * (lengths["0"] - 1) / lengths["0"]) < 1e-9


def test_forced_drafts_are_drafted_without_a_match_and_teach_nothing() -> None:
    policy = policy_of(Matches({"0": 0}))
    streams = [Stream("0", 100, MOST, 3)]
    for _ in range(50):
        assert policy.lengths(streams, work_of(streams), COSTLY) == {"0": 3}
        policy.observe("0", 3, 3)
    assert (policy.drafted, policy.accepted, policy.forced) == (150, 150, 150)
    assert probability(policy, "0", 6) == probability(policy_of(), "0", 6)


def test_stream_whose_drafts_fail_keeps_its_forced_ones() -> None:
    policy = policy_of(Matches({"0": 6}))
    drafts_over(policy, 100, accepted=False)
    streams = [Stream("0", 100, MOST, 2)]
    lengths = [policy.lengths(streams, work_of(streams), COSTLY)["0"] for _ in range(20)]
    assert 2 in lengths, "the drafter is left alone, the grammar is not"
    assert min(lengths) == 2


def test_drafts_after_forced_ones_are_learnt_from_alone() -> None:
    policy, other = policy_of(Matches({"0": 6})), policy_of(Matches({"0": 6}))
    streams, plain = [Stream("0", 100, MOST, 2)], streams_of(1)
    for _ in range(10):
        assert policy.lengths(streams, work_of(streams), FREE_ROWS) == {"0": MOST}
        policy.observe("0", MOST, 3)  # two forced, one found and one rejected
        assert other.lengths(plain, work_of(plain), FREE_ROWS) == {"0": MOST}
        other.observe("0", 2, 1)
    for match in range(12):
        assert probability(policy, "0", match) == probability(other, "0", match)


def test_forgotten_request_leaves_no_record() -> None:
    policy = policy_of()
    policy.lengths(streams_of(3), work_of(streams_of(3)), FREE_ROWS, inf)
    for stream in streams_of(3):
        policy.forget(stream.id)
    policy.forget("unknown")
    policy.lengths([Stream("0", 100, MOST, 2)], work_of(streams_of(1)), FREE_ROWS, inf)
    policy.forget("0")
    assert not policy._acceptance._records
    assert not policy._forced


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("room", [DraftRoom(39, 6, 39), DraftRoom(14, 6, 8), DraftRoom(64, 2, 64), DraftRoom(12, 2, 9)])
def test_drafts_stop_at_the_rows_that_are_recorded(room: DraftRoom, adaptive: bool) -> None:
    """A GPU launches any other step kernel by kernel, though its predicted seconds are those of a graph.

    Twelve streams take twelve rows without drafts, and the third and the fourth room leave them 52 and none.
    """
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=MOST, adaptive=adaptive)
    policy, streams = DraftPolicy(config, FreeDrafts()), streams_of(12)
    whole = policy.lengths(streams, work_of(streams), FREE_ROWS)
    assert len(whole) > 2
    policy.stop_at(room)
    lengths = policy.lengths(streams, work_of(streams), FREE_ROWS)
    assert sum(lengths.values()) == min(sum(whole.values()), room.rows - 12)
    assert all(length <= whole[request_id] for request_id, length in lengths.items())
    beside = policy.beside_chunk({request_id: [7] * length for request_id, length in whole.items()})
    assert 0 < len(beside) <= room.streams_beside_chunk
    assert sum(1 + len(tokens) for tokens in beside.values()) <= room.rows_beside_chunk
    assert all(len(tokens) <= whole[request_id] for request_id, tokens in beside.items())
    policy.stop_at(None)
    assert policy.lengths(streams, work_of(streams), FREE_ROWS) == whole
    drafts = {"0": [3, 4]}
    assert policy.beside_chunk(drafts) is drafts
