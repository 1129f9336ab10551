"""Suspects take turns, and however many there are, the last one does not wait for minutes."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.turn_queue import MOST_WAIT_S, TurnQueue, turn_seconds


def test_turns_of_any_number_of_suspects_end_within_the_longest_wait() -> None:
    for number in (2, 5, 20, 64):
        waited = sum_of = 0.0
        for num_waiting in range(number - 1, 0, -1):
            sum_of += turn_seconds(3.0, num_waiting, waited)
            waited = sum_of
        assert sum_of <= MOST_WAIT_S + 1e-9, number


def test_few_suspects_have_whole_turns_and_many_late_ones_short_turns() -> None:
    assert turn_seconds(3.0, 0, 0.0) == 3.0
    assert turn_seconds(3.0, 2, 1.0) == 3.0
    assert turn_seconds(3.0, 100, 30.0) == 0.1


def test_turn_ends_when_its_holder_leaves_or_when_its_seconds_are_over() -> None:
    turns = TurnQueue(3.0)
    for name in "abc":
        turns.enter(name, 0.0)
    assert turns.begin(1.0) == "a"
    assert turns.begin(2.0) is None, "a's turn goes on"
    assert not turns.leave("b"), "b only waited"
    assert turns.leave("a")
    assert turns.begin(2.0) == "c"
    assert turns.ends_at == 5.0
    turns.enter("d", 4.0)
    assert turns.begin(4.0) is None
    assert turns.begin(5.0) == "d"
    assert not turns.leave("c"), "its turn had ended"
    assert turns.begin(9.0) is None
    assert (turns.holder, turns.ends_at) == (None, inf)


@given(st.lists(st.tuples(st.sampled_from("eelb"), st.integers(0, 6), st.floats(0.0, 4.0))))
def test_turns_come_in_order_of_entry_one_at_a_time(moves: list[tuple[str, int, float]]) -> None:
    """Against a list of those who wait: `e` enters, `l` leaves, `b` lets time pass. The driver looks after each."""
    turns, now = TurnQueue(3.0), 0.0
    waiting, holder, ends_at = list[str](), "", inf
    for number, (move, which, seconds) in enumerate(moves):
        if move == "e":
            turns.enter(f"{number}", now)
            waiting.append(f"{number}")
        elif move == "l":
            names = [*waiting, holder] if holder else waiting
            if names:
                name = names[which % len(names)]
                assert turns.leave(name) == (name == holder)
                waiting = [each for each in waiting if each != name]
                holder = "" if name == holder else holder
        else:
            now += seconds
        if not holder or now >= ends_at:
            holder = waiting.pop(0) if waiting else ""
            assert turns.begin(now) == (holder or None)
            ends_at = turns.ends_at
            assert not holder or now + 0.1 <= ends_at <= now + 3.0
        else:
            assert turns.begin(now) is None
        assert turns.holder == (holder or None)
