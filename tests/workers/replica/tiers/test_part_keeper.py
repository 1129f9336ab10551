"""A follower's files: what the driver asks is done in order with its other messages, and always answered."""

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crossdock.workers.replica.ranks.rank_messages import FileCall, FilesCalled, LoadPart, LookForParts, WritePart
from crossdock.workers.replica.tiers import part_keeper
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.page_files import PageFiles
from crossdock.workers.replica.tiers.page_format import name_of
from crossdock.workers.replica.tiers.part_keeper import PartKeeper
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

PAGE_BYTES = 64


def page(number: int) -> bytes:
    return name_of(PageKey(0, number.to_bytes(16)))


class Follower:
    """A rank with a pool of four pages and as many slots, whose messages the test handles."""

    def __init__(self, folder: Path) -> None:
        self.answers = queue.SimpleQueue[FilesCalled]()
        self.pool = torch.zeros((4, PAGE_BYTES), dtype=torch.uint8)
        self.copies = PoolCopies(self.pool, 4)
        self.keeper = PartKeeper("rank 1", self.answers.put)
        self.num_handled = 0
        self.num_waits = 0
        self._files = PageFiles(FileTier(folder, 1 << 20, bytes(16)), self.copies)

    def open(self) -> None:
        self.keeper.open(self._files, self._wait)

    def _wait(self) -> None:
        self.num_waits += 1
        assert self.num_handled, "no message is handled yet"

    def handle(self) -> None:
        self.num_handled += 1
        self.keeper.handled()

    def ask(self, call: FileCall) -> FilesCalled:
        self.keeper.call(call)
        return self.answers.get(timeout=240)


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    follower = Follower(tmp_path)
    yield follower
    follower.keeper.close()


DONE = FilesCalled("", True, (), ())


def test_part_is_written_once_the_copy_to_its_slots_is_handled(follower: Follower) -> None:
    follower.open()
    follower.keeper.call(WritePart(page(1), (0, 1), 2))
    follower.handle()
    follower.copies.slots[:2] = 7
    follower.handle()
    assert follower.answers.get(timeout=240) == DONE
    assert follower.ask(LoadPart(page(1), (2, 3), (3, 0), 2)) == DONE
    assert follower.pool.tolist() == [[7] * PAGE_BYTES, [0] * PAGE_BYTES, [0] * PAGE_BYTES, [7] * PAGE_BYTES]


def test_part_is_loaded_once_the_steps_before_it_are_handled_and_their_device_is_waited_for_once(
    follower: Follower,
) -> None:
    follower.open()
    follower.handle()
    for number in (1, 2):
        follower.copies.slots[0] = number
        assert follower.ask(WritePart(page(number), (0,), 1)) == DONE
    follower.keeper.call(LoadPart(page(1), (2,), (1,), 2))
    follower.pool[1] = 9  # as the step that is handled now does
    follower.handle()
    assert follower.answers.get(timeout=240) == DONE
    assert follower.ask(LoadPart(page(2), (2,), (2,), 2)) == DONE
    assert follower.pool[:, 0].tolist() == [0, 1, 2, 0]
    assert follower.num_waits == 2, "for the first part that was written, and for the first that was loaded"


def test_calls_that_come_before_the_files_are_open_are_answered(follower: Follower) -> None:
    follower.keeper.call(LookForParts())
    follower.keeper.call(LoadPart(page(1), (0,), (0,), 0))
    follower.open()
    assert follower.answers.get(timeout=240) == DONE
    assert follower.answers.get(timeout=240) == FilesCalled("", False, (), ()), "the part is not there"


def test_error_of_any_kind_is_an_answer_and_the_next_call_is_done(follower: Follower) -> None:
    follower.open()
    failed = follower.ask(WritePart(page(1), (4,), 0))
    assert failed.failure.startswith("rank 1: IndexError: ")
    assert not failed.is_done
    assert follower.ask(WritePart(page(1), (3,), 0)) == DONE


def test_parts_that_are_too_many_for_one_answer_come_with_the_next(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_keeper, "_MOST_TOLD", 2)
    follower.open()
    for number in range(5):
        follower.ask(WritePart(page(number), (0,), 0))
    answers = [follower.ask(LookForParts()) for _ in range(4)]
    assert [len(answer.came) for answer in answers] == [2, 2, 1, 0]
    assert {name for answer in answers for name in answer.came} == {page(number) for number in range(5)}
    assert not any(answer.gone for answer in answers)
