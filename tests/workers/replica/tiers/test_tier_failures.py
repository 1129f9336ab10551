"""Whatever a file call of a tier answers, pages come back, no load hangs, and the next prompt is right."""

import errno
import itertools
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.tiers import page_thread
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.prefixes.tier_pages import PageKey
from crossdock.workers.schedule.request.submission import Submission
from tests.sweeps import rest_in_soak
from tests.waiting import until
from tests.workers.replica.engine.test_tiers import (
    MAX_MODEL_LEN,
    PROMPTS,
    answers,
    engine_on,
    model_of,
    settings_of,
    settle,
)
from tests.workers.replica.engines import greedy, run, tokens_of
from tests.workers.replica.tiers.failing_calls import FailingCalls
from tests.workers.replica.tiers.test_file_tier import CONTENT, key_of, opened, read, stored

ERRNOS = [
    *(errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.ENOMEM, errno.EINTR, errno.ETIMEDOUT, errno.ELOOP),
]
# A tier looks at the classes of the first and the third one. Of all others it sees that they are an OSError.
USUAL = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EINTR, errno.ESTALE, errno.ENOSPC)
MOST_BYTES = 2 * (len(CONTENT) + 100)
KEYS = [key_of(256 * number) for number in range(4)]  # in one folder


def some_work(tier: FileTier) -> None:
    """Make every file call that a tier makes: the third page makes room, and the folder is new."""
    for key in KEYS[:3]:
        with suppress(OSError):
            stored(tier, key)
    tier.changes()
    for key in KEYS[:3]:
        assert read(tier, key) in (None, CONTENT)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".writable"]


@pytest.mark.parametrize("number", rest_in_soak(ERRNOS, *USUAL), ids=lambda number: errno.errorcode[number])
def test_tier_goes_on_after_any_file_call_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = opened(tmp_path / "first", MOST_BYTES)
    calls = FailingCalls(monkeypatch)
    some_work(tier)
    names = {"open", "readv", "write", "close", "utime", "unlink", "rename", "mkdir", "scandir", "DirEntry.stat"}
    assert names <= set(calls.seen)
    for after in range(len(calls.seen)):
        folder = tmp_path / f"{after}"
        tier = opened(folder, MOST_BYTES)
        calls.fail("", number, after)
        some_work(tier)
        calls.forget()
        tier._seen.clear()  # what was told before counts again
        known, _ = tier.changes()
        assert {path.name for path in files_of(folder)} == {f"00{key.page_hash.hex()}" for key in known}
        stored(tier, KEYS[3])
        assert read(tier, KEYS[3]) == CONTENT
        is_believed = number in (errno.ENOENT, errno.ENOTDIR)  # a folder that is no more has no files to count
        assert is_believed or sum(path.stat().st_size for path in files_of(folder)) <= MOST_BYTES


def test_look_tells_the_difference_to_the_last_one_after_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, other = opened(tmp_path), opened(tmp_path)
    calls = FailingCalls(monkeypatch)
    for number in range(3):
        stored(other, key_of(number))
    tier.changes()
    calls.seen.clear()
    tier._seen = {name: (0, pages) for name, (_, pages) in tier._seen.items()}
    tier.changes()
    for after in range(len(calls.seen)):
        known = {key_of(number) for number in range(3)}
        tier._seen = {name: (0, pages) for name, (_, pages) in tier._seen.items()}
        calls.fail("", errno.EIO, after)
        for _ in range(2):
            came, gone = tier.changes()
            known = (known - gone) | came
        assert known == {key_of(number) for number in range(3)}


def test_folder_that_stays_unreadable_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, calls = opened(tmp_path), FailingCalls(monkeypatch)
    for _ in range(3):
        calls.fail("scandir", errno.EIO)
        tier.changes()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_folder_that_is_emptied_has_no_pages_and_takes_new_ones(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    stored(tier, key_of(1))
    assert tier.changes() == ({key_of(1)}, set())
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    assert tier.changes() == (set(), {key_of(1)})
    stored(tier, key_of(2))
    assert tier.changes() == ({key_of(2)}, set())
    assert tier._own.stat().st_mode & 0o777 == 0o700


def test_folder_is_emptied_during_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the look finds, in turn, that the folder has gone since the call before it."""
    tier = opened(tmp_path)
    calls = FailingCalls(monkeypatch)
    stored(tier, key_of(1))
    tier.changes()
    for name in ("scandir", "DirEntry.stat"):
        for after in range(2):
            tier._seen.clear()
            calls.fail(name, errno.ENOENT, after)
            tier.changes()
    tier._seen.clear()
    assert tier.changes() == ({key_of(1)}, set())


def is_tier_thread() -> bool:
    return threading.current_thread().name == "tiers"


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine_on(model_of("llama"), 20) as plain:
        return answers(plain, PROMPTS)[0]


def assert_serves(engine: Engine, expected: list[list[int]], number: int) -> None:
    """Let the engine answer one prompt, and check that it answers right and gives all pages back."""
    assert answers(engine, [PROMPTS[number % 3]])[0] == [expected[number % 3]]
    counts = engine.pages.counts()
    assert counts.owned == counts.quarantined == 0
    assert engine.tiers is not None
    assert engine.tiers.is_alive


WRITES = ("write", "rename", "mkdir")
NAMES = ("open", "readv", "close", "utime", "scandir", *WRITES)


@pytest.mark.parametrize(("name", "numbers"), [(name, USUAL[first % 3 :: 3]) for first, name in enumerate(NAMES)])
def test_engine_answers_right_after_a_file_call_of_its_tier_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, numbers: tuple[int, ...], expected: list[list[int]]
) -> None:
    """Three prompts in a pool for one: each evicts the others, is stored, and is loaded again. A look follows each."""
    monkeypatch.setattr(page_thread, "_CHANGES_S", 0.0)
    with engine_on(model_of("llama"), 20, **settings_of("kv_cache_files", tmp_path)) as engine:
        answers(engine, PROMPTS[:3])
        calls = FailingCalls(monkeypatch, is_tier_thread)
        turns = itertools.count()
        for number in numbers:
            if name in WRITES:
                shutil.rmtree(tmp_path / next(tmp_path.iterdir()).name)  # else all pages are stored already
            calls.fail(name, number, after=1)
            while calls.is_due:
                assert_serves(engine, expected, turn := next(turns))
                assert turn < 100, f"{name} is never called"
        before = loads_of(engine)
        for _ in range(6):
            assert_serves(engine, expected, next(turns))
        assert loads_of(engine) > before, "pages are loaded again"


def loads_of(engine: Engine) -> int:
    return engine.scheduler.loading.tiers.tiers[0].num_loads


@pytest.mark.parametrize("what", ["read", "write", "changes"])
def test_error_of_any_kind_in_the_thread_of_the_tiers_is_a_miss(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(page_thread, "_CHANGES_S", 0.0)
    with engine_on(model_of("llama"), 20, **settings_of("kv_cache_files", tmp_path)) as engine:
        answers(engine, PROMPTS[:3])

        def fail(*_: object) -> None:
            raise RuntimeError(f"{what} fails")

        monkeypatch.setattr(FileTier, what, fail)
        for turn in range(6):
            assert_serves(engine, expected, turn)
    told = [record for record in caplog.records if f"{what} fails" in record.getMessage()]
    assert len(told) == 1


class Hanging:
    """A volume that answers so many reads, and no further one until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.is_asked = threading.Event()
        self.num_answered = 0  # before it hangs
        read_file = FileTier.read

        def read_later(tier: FileTier, key: PageKey, into: memoryview) -> bool:
            if self.num_answered:
                self.num_answered -= 1
            elif not self.answers.is_set():
                self.is_asked.set()
                assert self.answers.wait(240)
            return read_file(tier, key, into)

        monkeypatch.setattr(FileTier, "read", read_later)

    def hang(self, after: int) -> None:
        self.num_answered = after
        self.answers.clear()


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging(monkeypatch)
    yield hanging
    hanging.answers.set()


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("after", [0, 3])
def test_prompts_are_computed_while_a_volume_hangs_and_loaded_once_it_answers(
    tmp_path: Path, volume: Hanging, after: int, meets: bool, expected: list[list[int]]
) -> None:
    """One page is in quarantine as long as the volume may fill it. `meets`: the prompt is computed beside the load."""
    settings = settings_of("kv_cache_files", tmp_path) | ({} if meets else {"enable_chunked_prefill": False})
    with engine_on(model_of("llama"), 20, **settings, max_num_batched_tokens=MAX_MODEL_LEN) as engine:
        answers(engine, PROMPTS[:3])
        engine.scheduler.learn(StepCost(base=0.0, per_prefill_token=5e-3), 1.0)
        engine.scheduler.loading.tiers.tiers[0].load_s = 1e-6
        volume.hang(after)
        for number in (0, 1, 2):
            engine.add(Submission("a", PROMPTS[number], greedy(5)))
            if not volume.is_asked.is_set():
                assert not engine.step().deltas, "the prompt waits for the load"
                assert volume.is_asked.wait(240), "a further step could compute what the thread has not begun to load"
            assert tokens_of(run(engine)["a"]) == expected[number]
            counts = engine.pages.counts()
            assert (counts.owned, counts.quarantined) == (0, 1)
        volume.answers.set()
        settle(engine)
        assert engine.pages.counts().quarantined == 0
        before = loads_of(engine)
        for turn in range(3):
            assert_serves(engine, expected, turn)
        assert loads_of(engine) > before


async def test_idle_engine_gets_pages_back_without_a_further_step(
    tmp_path: Path, volume: Hanging, expected: list[list[int]]
) -> None:
    """The request is aborted, and the volume answers when nothing is left to compute."""
    with engine_on(model_of("llama"), 20, **settings_of("kv_cache_files", tmp_path)) as engine:
        answers(engine, PROMPTS[:3])
        thread = EngineThread(engine)
        thread.channel("test")
        volume.hang(2)
        await thread.submit("test", Submission("a", PROMPTS[0], greedy(5)))
        await until(volume.is_asked.is_set)
        await thread.abort([("a", 0)])
        await until(lambda: engine.scheduler.table.get("a") is None)
        await until(lambda: engine.pages.counts().quarantined == 1)
        assert engine.pages.counts().owned == 0
        volume.answers.set()
        await until(lambda: engine.pages.counts().quarantined == 0)
        await thread.close()


async def test_replica_whose_tiers_have_no_thread_is_not_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(model_of("llama"), 20, **settings_of("kv_cache_files", tmp_path)) as engine:
        thread = EngineThread(engine)
        assert thread.is_alive
        assert engine.tiers is not None
        engine.tiers.close()
        assert not thread.is_alive
        await thread.close()
