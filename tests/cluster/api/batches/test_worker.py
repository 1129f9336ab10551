"""Batches run to their end: every line has one result, also after kills, cancellations and long waits."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossdock.cluster.api.batches import folder as folder_module
from crossdock.cluster.api.batches import run as run_module
from crossdock.cluster.api.batches import worker as worker_module
from crossdock.cluster.api.batches.folder import BatchFolder, Owner
from crossdock.cluster.api.batches.lines import MOST_LINE_BYTES, Line
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.results import Results
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.batches.scripted_batches import (
    CHATS,
    NoSource,
    Scripted,
    created,
    ended,
    lines,
    records,
    worker,
)
from tests.waiting import eventually, until

ROOT = Path(__file__).parents[4]


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    folder = BatchFolder(tmp_path / "batches")
    folder.check()
    return folder


async def run(folder: BatchFolder, name: str, answer: Any = None) -> Any:
    """Run a batch to its end, and return its object."""
    serving = worker(folder, answer or Scripted())
    serving.start()
    try:
        return await ended(folder, name)
    finally:
        await serving.close()


def all_ids(found: list[Any]) -> Counter[str]:
    return Counter(each["custom_id"] for each in found)


async def test_finished_batch_has_one_record_for_each_line(folder: BatchFolder) -> None:
    content = lines(20) + lines(1, wrong=True).replace(b'"c0"', b'"wrong"')
    batch = await run(folder, created(folder, content))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    found = records(folder, batch)
    assert all_ids(found) == Counter([*(f"c{i}" for i in range(20)), "wrong"])
    assert found[-1]["response"] | {"request_id": ""} == {"status_code": 400, "request_id": "", "body": {"error": {}}}
    first = next(each for each in found if each["custom_id"] == "c0")
    assert (first["response"]["body"], first["error"]) == ({"i": 0}, None)
    assert batch["completed_at"] >= batch["finalizing_at"] >= batch["in_progress_at"] >= batch["created_at"]


def one(**changed: Any) -> bytes:
    fields = {"custom_id": "a", "method": "POST", "url": CHATS, "body": {}} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (one() + b"{not json}\n", "invalid_json_line", 2),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[" * 100_000 + b"\n", "invalid_json_line", 1),
        (one(body={"a": float("nan")}), "invalid_json_line", 1),
        (b"[1]\n", "invalid_json_line", 1),
        (one(custom_id=None), "missing_required_parameter", 1),
        (one(body="x"), "missing_required_parameter", 1),
        (one(custom_id=""), "invalid_value", 1),
        (one(custom_id="x" * 513), "invalid_value", 1),
        (one() + b"\n" + one(), "duplicate_custom_id", 3),
        (one(method="GET"), "invalid_method", 1),
        (one(url="/v1/files"), "invalid_url", 1),
        (one(url="/v1/embeddings"), "mismatched_endpoint", 1),
        (one(priority=3), "unknown_parameter", 1),
    ],
)
async def test_file_with_a_wrong_line_fails_with_the_line_named(
    folder: BatchFolder, content: bytes, code: str, line: int | None
) -> None:
    answer = Scripted()
    batch = await run(folder, created(folder, content), answer)
    assert batch["status"] == "failed"
    (problem,) = batch["errors"]["data"]
    assert (problem["code"], problem["line"]) == (code, line)
    assert not answer.asked


async def test_line_over_the_bound_fails_the_batch_without_being_read_whole(folder: BatchFolder) -> None:
    batch = await run(folder, created(folder, one() + b"x" * (MOST_LINE_BYTES + 5)))
    assert batch["errors"]["data"][0]["code"] == "line_too_large"


async def test_cancelled_batch_has_a_record_for_each_line_and_ends_what_runs(folder: BatchFolder) -> None:
    answer, name = Scripted(seconds=600.0), created(folder, lines(30))
    serving = worker(folder, answer)
    serving.start()
    await until(lambda: bool(answer.asked))
    assert folder.cancel("", name)["status"] == "cancelling"
    batch = await ended(folder, name)
    await serving.close()
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 30, "completed": 0, "failed": 30}
    found = records(folder, batch)
    assert all_ids(found) == Counter(f"c{i}" for i in range(30))
    assert {each["error"]["code"] for each in found} == {"batch_cancelled"}
    with pytest.raises(ApiError, match="cancelled already"):
        folder.cancel("", name)


async def test_expired_batch_keeps_what_is_done_and_names_the_rest(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, name = Scripted(seconds=600.0), created(folder, lines(30), lifetime_s=3600)
    serving = worker(folder, answer)
    serving.start()
    await until(lambda: bool(answer.asked))
    monkeypatch.setattr(run_module, "time", SimpleNamespace(time=lambda: time.time() + 3600))
    batch = await ended(folder, name)
    await serving.close()
    assert batch["status"] == "expired"
    found = records(folder, batch)
    assert all_ids(found) == Counter(f"c{i}" for i in range(30))
    assert {each["error"]["code"] for each in found} == {"batch_expired"}


async def test_batch_of_a_killed_process_goes_on_with_one_result_for_each_line(folder: BatchFolder) -> None:
    name = created(folder, lines(300))
    program = ROOT / "tests/cluster/api/batches/scripted_batches.py"
    output = folder.root / "all" / "batches" / name / "output.jsonl"
    with subprocess.Popen([sys.executable, program, folder.root], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}) as process:
        try:
            eventually(lambda: output.exists() and output.read_bytes().count(b"\n") >= 20)
            waiting = Scripted()
            other = worker(folder, waiting)
            other.start()
            assert folder.batch("", name)["status"] == "in_progress"
        finally:
            process.send_signal(signal.SIGKILL)
    batch = await ended(folder, name)
    await other.close()
    assert batch["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert all_ids(records(folder, batch)) == Counter(f"c{i}" for i in range(300))
    assert 0 < sum(waiting.asked.values()) <= 280


async def test_record_that_a_dead_process_began_is_made_again(folder: BatchFolder) -> None:
    answer, name = Scripted(seconds=600.0), created(folder, lines(3))
    serving = worker(folder, answer)
    serving.start()
    await until(lambda: len(answer.asked) == 3)
    await serving.close()
    key = name.removeprefix("batch_")
    whole = f'{{"id":"batch_req_{key}_2","custom_id":"c1","response":{{}},"error":null}}\n'
    torn = f'{{"id":"batch_req_{key}_3","custom_id":"c2","resp'
    (folder.root / "all" / "batches" / name / "output.jsonl").write_text(whole + torn)
    again = Scripted()
    batch = await run(folder, name, again)
    assert again.asked == Counter(["c0", "c2"])
    assert all_ids(records(folder, batch)) == Counter(["c0", "c1", "c2"])


async def test_batch_that_fails_is_not_run_again_at_once(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch created later runs meanwhile. The first one runs again when its time comes, or another process looks."""
    monkeypatch.setattr(worker_module, "LOOK_S", 0.001)
    monkeypatch.setattr(worker_module, "_FAILED_S", (600.0, 600.0))
    failing, places, is_full = created(folder, lines(2)), list[Path](), True

    class FullDisk(Results):
        def __init__(self, place: Path) -> None:
            if place.name == failing:
                places.append(place)
                if is_full:
                    raise OSError("no space left")
            super().__init__(place)

    monkeypatch.setattr(run_module, "Results", FullDisk)
    serving = worker(folder, Scripted())
    serving.start()
    await until(lambda: bool(places))
    other = await ended(folder, created(folder, lines(2)))
    assert (other["status"], len(places)) == ("completed", 1)
    await serving.close()
    is_full = False
    assert (await run(folder, failing))["status"] == "completed"
    assert len(places) == 2
    assert sum("is run again in" in record.msg for record in caplog.records) == 1


def test_what_a_killed_process_began_is_deleted_at_the_next_start(folder: BatchFolder) -> None:
    created(folder, lines(1), "one")
    old, new = (folder.root / "one" / "files" / f".{age}" for age in ("old", "new"))
    for place in (old, new):
        place.mkdir()
        (place / "data").write_bytes(b"part")
    os.utime(old, (0, 0))
    folder.check()
    assert not old.exists()
    assert new.exists()
    assert len(folder.files("one")) == 1


async def test_two_workers_of_one_folder_answer_each_line_once(folder: BatchFolder) -> None:
    names = [created(folder, lines(20)) for _ in range(3)]
    answers = [Scripted(0.001), Scripted(0.001)]
    serving = [worker(folder, answer) for answer in answers]
    for each in serving:
        each.start()
    found = [await ended(folder, name) for name in names]
    for each in serving:
        await each.close()
    assert [batch["status"] for batch in found] == ["completed"] * 3
    assert sum(answers[0].asked.values()) + sum(answers[1].asked.values()) == 60


async def test_line_that_the_server_cannot_take_now_is_tried_again(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_RETRY_S", (0.001, 0.01))
    asked = Counter[str]()

    async def answer(line: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        asked[line.custom_id] += 1
        if asked[line.custom_id] < 4:
            raise ApiError("later", status=503 if asked[line.custom_id] % 2 else 429, headers={"Retry-After": "1"})
        return 200, b"{}"

    batch = await run(folder, created(folder, lines(3)), answer)
    assert batch["request_counts"]["completed"] == 3
    assert set(asked.values()) == {4}


async def test_pace_lets_a_line_begin_when_one_before_it_gets_its_first_token() -> None:
    gates = {f"r{i}": asyncio.Event() for i in range(20)}

    class Source(NoSource):
        async def generate(self, submission: Submission, reader: object = None) -> Any:
            await gates[submission.request_id].wait()
            yield TokenDelta(submission.id, [1])

    pace, entered = Pace(Source(), lambda: 1), list[str]()

    async def line(name: str) -> None:
        await pace.enter("", name)
        entered.append(name)
        async for _ in pace.generate(Submission(name, [1], request_id=name)):
            pass
        pace.leave(name)

    tasks = [asyncio.create_task(line(name)) for name in gates]
    await until(lambda: len(entered) == 4)
    gates[entered[0]].set()
    await until(lambda: len(entered) == 5)
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*tasks)
    assert len(entered) == 20


def test_owners_have_their_own_objects_and_names_are_no_paths(folder: BatchFolder, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    file = folder.create_file("one", io.BytesIO(b"x"), "../../up", "batch")
    assert folder.files("one") == [file]
    assert folder.files("two") == []
    for owner, name in (
        ("two", file["id"]),
        ("one", "../../one/files/" + file["id"]),
        ("one", "../../../secret"),
        ("one", ""),
        ("one", file["id"] + "\n"),
    ):
        with pytest.raises(ApiError, match="There is no file") as error:
            folder.content(owner, name)
        assert error.value.status == 404
    assert folder.content("one", file["id"]).read_bytes() == b"x"


def test_oldest_ended_batch_makes_room_and_running_ones_stay(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_MOST_OBJECTS", 3)
    file = folder.create_file("", io.BytesIO(lines(1)), "in.jsonl", "batch")["id"]
    fields = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h", "metadata": None}
    names = [folder.create_batch(Owner(""), fields, 600)["id"] for _ in range(3)]
    [_, (_, place), _] = folder.waiting()
    with folder.owned(place) as owned:
        assert owned is not None
        owned.enter("completed")
    names.append(folder.create_batch(Owner(""), fields, 600)["id"])
    assert {each["id"] for each in folder.batches("")} == {*names} - {place.name}
    with pytest.raises(ApiError, match="wait for one to end"):
        folder.create_batch(Owner(""), fields, 600)


def test_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"http\.batch_folder"):
        BatchFolder(tmp_path / "file" / "below").check()
