"""Every file call of a batch fails once, with each errno: the batch ends all the same, and holds nothing afterwards."""

import asyncio
import errno
import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.api.batches import run as run_module
from crossdock.cluster.api.batches import space as space_module
from crossdock.cluster.api.batches import worker as worker_module
from crossdock.cluster.api.batches.folder import TERMINAL, BatchFolder
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.worker import BatchWorker
from crossdock.workers.schedule.shares import Shares
from tests.cluster.api.batches.failing_files import FailingFiles
from tests.cluster.api.batches.scripted_batches import NoSource, Scripted, created, lines, records
from tests.waiting import until

ERRNOS = (errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES, errno.ENOENT)
NUM_LINES = 5
ENDS = ("completed", "cancelled", "failed")


class Case:
    """One batch in a folder of its own, and all that a process has for it."""

    def __init__(self, root: Path, end: str) -> None:
        self.end = end
        self.folder = BatchFolder(root)
        self.folder.check()
        self.memory = Shares(1 << 30)
        self.pace = Pace(NoSource(), lambda: 2)
        self.answer = Scripted(seconds=600.0 if end == "cancelled" else 0.0)
        content = lines(NUM_LINES) + (b"{\n" if end == "failed" else b"")
        self.name = created(self.folder, content)
        self.place = root / "all" / "batches" / self.name

    def state(self) -> Any:
        return json.loads((self.place / "batch.json").read_bytes())

    async def run(self, files: FailingFiles) -> None:
        """Run the batch to its end, and check that nothing is left."""
        worker = BatchWorker(self.folder, self.answer, self.pace, self.memory)
        worker.start()

        def holds(status: tuple[str, ...]) -> bool:
            with files.never():
                return self.state()["status"] in status

        if self.end == "cancelled":
            await until(lambda: len(self.answer.asked) == NUM_LINES)
            with files.never():
                self.folder.cancel("", self.name)
        await until(lambda: holds(TERMINAL))
        await until(lambda: not worker._tasks)
        with files.never():
            self.check()
            await until(lambda: {each.name for each in self.place.iterdir()} == {"batch.json", "lock"})
            with self.folder.owned(self.place) as owned:
                assert owned is not None
        await worker.close()
        assert self.pace.num_entered == 0
        assert self.memory.is_unused

    def check(self) -> None:
        batch = self.state()
        assert batch["status"] == self.end
        found = Counter(each["custom_id"] for each in records(self.folder, batch))
        assert found == ({} if self.end == "failed" else Counter(f"c{i}" for i in range(NUM_LINES)))
        assert bool(batch["errors"]) == (self.end == "failed")
        assert not list(self.folder.root.glob("*/*/.*"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingFiles:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "disabled", True)  # a traceback for each failure
    monkeypatch.setattr(worker_module, "LOOK_S", 0.002)
    monkeypatch.setattr(run_module, "LOOK_S", 0.002)
    monkeypatch.setattr(space_module, "_MEASURE_S", 0.0)  # at each question, so that no clock decides what is called
    monkeypatch.setattr(worker_module, "_FAILED_S", (0.001, 0.001))
    return FailingFiles(tmp_path, monkeypatch)


@pytest.mark.parametrize("end", ENDS)
async def test_batch_ends_and_holds_nothing_after_one_file_call_fails(
    files: FailingFiles, tmp_path: Path, end: str
) -> None:
    files.fail("", 0, 0)
    with files.never():
        first = Case(tmp_path / "first", end)
    await first.run(files)
    calls = {name.replace("/first", "", 1): count for name, count in files.seen.items()}
    assert {name.partition(" ")[0] for name in calls} >= {"open", "fsync", "rename", "flock", "pread", "unlink", "stat"}
    failed = Counter[str]()
    number = 0
    codes = itertools.cycle((each, errno.ENOSPC) for each in ERRNOS)
    for name, count in sorted(calls.items()):
        function, _, path = name.partition(" ")
        for nth in range(min(count, 2)):
            for code in next(codes)[nth:]:
                if function == "unlink" and code == errno.ENOENT:  # that says that the file is gone
                    continue
                number += 1
                with files.never():
                    case = Case(tmp_path / f"case{number}", end)
                files.fail(f"{function} /case{number}{path}", nth, code)
                try:
                    async with asyncio.timeout(240):
                        await case.run(files)
                except (AssertionError, TimeoutError) as error:
                    with files.never():
                        left = [str(each.relative_to(case.folder.root)) for each in case.folder.root.rglob("*")]
                        raise AssertionError(
                            f"call {nth} of {name}, {errno.errorcode[code]}: {case.state()}, {left}"
                        ) from error
                failed[name] += files.has_failed
    assert not {name for name in calls if not failed[name]}
