"""Batches of one key leave room to those of other keys: places of batches, places of lines, and memory."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from crossdock.cluster.api.batches import run as run_module
from crossdock.cluster.api.batches import worker as worker_module
from crossdock.cluster.api.batches.folder import BatchFolder, Owner
from crossdock.cluster.api.batches.lines import Line
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.turns import TURN_S, BatchTurns, Running
from crossdock.cluster.api.batches.worker import BatchWorker
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.shares import Shares
from tests.cluster.api.batches.scripted_batches import NoSource, created, ended, lines
from tests.waiting import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchFolder:
    monkeypatch.setattr(worker_module, "LOOK_S", 0.002)
    monkeypatch.setattr(run_module, "LOOK_S", 0.002)
    folder = BatchFolder(tmp_path / "batches")
    folder.check()
    return folder


class Keys:
    """Answers lines by their key: at once, never, or never in time."""

    def __init__(self, *, endless: frozenset[str] = frozenset(), limited: frozenset[str] = frozenset()) -> None:
        self.endless = endless
        self.limited = limited
        self.num_refused = 0
        self.waiting: set[str] = set()

    async def __call__(self, line: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        if owner.name in self.limited:
            self.num_refused += 1
            raise ApiError("at its limit", status=429, headers={"Retry-After": "600"})
        if owner.name in self.endless:
            self.waiting.add(f"{owner.name} {line.custom_id}")
            await asyncio.get_running_loop().create_future()
        return 200, b"{}"


async def test_key_at_its_limit_holds_no_place_while_its_lines_wait(folder: BatchFolder) -> None:
    """One replica has four places for lines without a token. Twenty refused lines leave all of them."""
    answer = Keys(limited=frozenset({"limited"}))
    pace = Pace(NoSource(), lambda: 1)
    worker = BatchWorker(folder, answer, pace)
    worker.start()
    held = created(folder, lines(20), "limited")
    await until(lambda: answer.num_refused > 0)
    await until(lambda: pace.num_entered == 0)
    assert (await ended(folder, created(folder, lines(20), "other"), "other"))["status"] == "completed"
    assert folder.batch("limited", held)["status"] == "in_progress"
    assert answer.num_refused <= 4  # the lines of one moment; the rest of the batch is not tried meanwhile
    folder.cancel("limited", held)
    batch = await ended(folder, held, "limited")
    assert batch["request_counts"] == {"total": 20, "completed": 0, "failed": 20}
    await worker.close()


async def test_long_batches_of_one_key_leave_places_to_batches_of_other_keys(folder: BatchFolder) -> None:
    answer = Keys(endless=frozenset({"0long"}))
    worker = BatchWorker(folder, answer, Pace(NoSource(), lambda: 64))
    names = [created(folder, lines(2), "0long") for _ in range(8)]
    worker.start()
    await until(lambda: len(answer.waiting) == 2)
    await until(lambda: sum(folder.batch("0long", name)["status"] == "in_progress" for name in names) == 4)
    for owner in ("1other", "2other", "3other", "4other"):
        assert (await ended(folder, created(folder, lines(2), owner), owner))["status"] == "completed"
    await worker.close()


async def test_batch_whose_turn_is_over_goes_on_after_those_that_waited(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place, and two keys: both batches end, and no line is asked twice."""
    monkeypatch.setattr(worker_module, "_MOST_RUNNING", 1)
    monkeypatch.setattr("crossdock.cluster.api.batches.turns.TURN_S", 0.0)
    asked = list[str]()

    async def answer(line: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        asked.append(owner.name)
        await asyncio.sleep(0.002)
        return 200, b"{}"

    worker = BatchWorker(folder, answer, Pace(NoSource(), lambda: 1))
    names = {owner: created(folder, lines(30), owner) for owner in ("a", "b")}
    worker.start()
    for owner, name in names.items():
        assert (await ended(folder, name, owner))["request_counts"]["completed"] == 30
    assert len(asked) == 60
    turns = sum(before != after for before, after in pairwise(asked))
    assert turns > 2
    await worker.close()


def chosen(turns: BatchTurns, due: dict[str, list[Path]], running: dict[Path, Running]) -> Iterator[str]:
    for owner, place in list(turns.next(due, running)):
        due[owner].remove(place)
        running[place] = Running(owner, 0.0)
        yield owner


def test_places_go_to_the_key_with_the_fewest_and_then_by_turns() -> None:
    turns = BatchTurns(8)
    due = {owner: [Path(f"{owner}{number}") for number in range(20)] for owner in "ab"}
    running: dict[Path, Running] = {}
    assert "".join(chosen(turns, due, running)) == "ababa"  # the rest is left for a later key
    due["c"] = [Path("c0")]
    assert list(chosen(turns, due, running)) == ["c"]
    for place in ("a0", "a1", "b0", "c0"):
        del running[Path(place)]
    assert "".join(chosen(turns, due, running)) == "bab"  # each has one: the turn of b was before that of a


def test_batch_that_has_run_longest_gives_way_to_a_key_without_a_place() -> None:
    turns = BatchTurns(4)
    running = {Path("a0"): Running("a", 1.0), Path("a1"): Running("a", 0.0)}
    running |= {Path("b0"): Running("b", -5.0), Path("c0"): Running("c", 0.0)}
    waiting = {"d": [Path("d0")]}
    assert turns.gives_way(waiting, running, TURN_S - 6) is None
    assert turns.gives_way(waiting, running, TURN_S) == Path("a1")
    assert turns.gives_way({"a": [Path("a2")]}, running, TURN_S) is None
    del running[Path("c0")]
    assert turns.gives_way(waiting, running, TURN_S) is None


async def test_lines_of_keys_begin_in_turns_and_none_has_all_places() -> None:
    pace = Pace(NoSource(), lambda: 1)
    begun = list[str]()

    async def begin(owner: str, name: str) -> None:
        await pace.enter(owner, name)
        begun.append(name)

    tasks = [asyncio.create_task(begin("a", f"a{number}")) for number in range(8)]
    await until(lambda: len(begun) == 4)
    tasks += [asyncio.create_task(begin("b", f"b{number}")) for number in range(8)]
    await asyncio.sleep(0)
    for number in range(4):
        pace.leave(f"a{number}")
    await until(lambda: len(begun) == 8)
    assert sorted(begun[4:]) == ["a4", "a5", "b0", "b1"]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for name in begun[4:]:
        pace.leave(name)
    assert pace.num_entered == 0


async def test_line_that_is_cancelled_as_it_may_begin_holds_no_place() -> None:
    pace = Pace(NoSource(), lambda: 1)
    for name in "abcd":
        await pace.enter("", name)
    waiting = asyncio.create_task(pace.enter("", "e"))
    await asyncio.sleep(0)
    pace.leave("a")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert pace.num_entered == 3


def test_part_of_shares_counts_in_the_whole() -> None:
    whole = Shares(100)
    part = Shares(50, within=whole)
    part.take("a", 20)
    assert (whole.num_used, part.room("a"), part.room("b"), whole.room("b")) == (20, 5, 30, 80)
    whole.take("b", 70)
    assert part.room("c") == 10
    part.release("a", 20)
    whole.release("b", 70)
    assert part.is_unused
