"""Bytes on the disk have bounds, and a disk that is full or fails is told as such; ended batches cost no look."""

import asyncio
import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.batches import folder as folder_module
from crossdock.cluster.api.batches import run as run_module
from crossdock.cluster.api.batches import space as space_module
from crossdock.cluster.api.batches import worker as worker_module
from crossdock.cluster.api.batches.folder import BatchFolder, Owner
from crossdock.cluster.api.batches.space import Uploads
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.batches.failing_files import FailingFiles
from tests.cluster.api.batches.scripted_batches import CHATS, Scripted, created, ended, lines, worker
from tests.cluster.api.batches.test_batch_routes import serving
from tests.waiting import until

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES, errno.ENOENT)
FILE = {"file": ("in.jsonl", lines(2))}
FIELDS = {"endpoint": CHATS, "completion_window": "24h"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LOOK_S", 0.002)
    monkeypatch.setattr(run_module, "LOOK_S", 0.002)
    monkeypatch.setattr(space_module, "_MEASURE_S", 0.0)


def left_over(root: Path) -> list[Path]:
    return list(root.glob("*/*/.*"))


async def test_requests_name_the_fault_of_the_disk_and_leave_nothing(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file call of each request fails once with each errno. The same request is then served."""
    async with serving(tokenizer, tmp_path) as api:
        await api.app.state.batches.close()
        files = FailingFiles(tmp_path, monkeypatch)
        monkeypatch.setattr(folder_module, "_BEGUN_S", 0)

        async def ask(name: str) -> httpx.Response:
            with files.never():
                shutil.rmtree(tmp_path / "all", ignore_errors=True)
                made = api.app.state.batches.folder.create_file("", io.BytesIO(lines(2)), "in", "batch")["id"]
                batch = api.app.state.batches.folder.create_batch(Owner(""), {"input_file_id": made, **FIELDS}, 60)
                batch_id = batch["id"]
            files.seen.clear()
            method, path, given = {
                "upload": ("POST", "/v1/files", {"files": FILE, "data": {"purpose": "batch"}}),
                "files": ("GET", "/v1/files", {}),
                "file": ("GET", f"/v1/files/{made}", {}),
                "content": ("GET", f"/v1/files/{made}/content", {}),
                "delete": ("DELETE", f"/v1/files/{made}", {}),
                "create": ("POST", "/v1/batches", {"json": {"input_file_id": made, **FIELDS}}),
                "batches": ("GET", "/v1/batches", {}),
                "batch": ("GET", f"/v1/batches/{batch_id}", {}),
                "cancel": ("POST", f"/v1/batches/{batch_id}/cancel", {}),
            }[name]
            return await api.http.request(method, path, **given)  # type: ignore[arg-type]

        statuses = dict[tuple[str, int], set[int]]()
        for name in ("upload", "files", "file", "content", "delete", "create", "batches", "batch", "cancel"):
            files.fail("", 0, 0)
            assert (await ask(name)).status_code == 200
            for number, call in enumerate(sorted(files.seen)):
                for code in (errno.ENOSPC, ERRNOS[number % len(ERRNOS)]):
                    files.fail(call, 0, code)
                    answer = await ask(name)
                    with files.never():
                        was_left = left_over(tmp_path)
                    assert answer.status_code in (200, 404, 503, 507), (name, call, code, answer.text)
                    with files.never():
                        api.app.state.batches.folder.sweep()
                        assert not left_over(tmp_path), (name, call)
                        if name != "delete":
                            assert not was_left, (name, call)
                    if answer.status_code != 200:
                        assert answer.json()["error"]["message"]
                    statuses.setdefault((name, code), set()).add(answer.status_code)
                    files.fail("", 0, 0)
                    assert (await ask(name)).status_code == 200
        assert 507 in statuses["upload", errno.ENOSPC] & statuses["create", errno.ENOSPC]


async def test_file_that_is_deleted_while_a_batch_is_made_of_it_is_a_404(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BatchFolder(tmp_path)
    file = folder.create_file("", io.BytesIO(lines(1)), "in", "batch")["id"]
    content = BatchFolder.content

    def deleted(self: BatchFolder, owner: str, file_id: str) -> Path:
        found = content(self, owner, file_id)
        self.delete_file(owner, file_id)
        return found

    monkeypatch.setattr(BatchFolder, "content", deleted)
    with pytest.raises(ApiError, match="There is no file") as error:
        folder.create_batch(Owner(""), {"input_file_id": file, **FIELDS}, 60)
    assert error.value.status == 404
    assert not left_over(tmp_path)


async def test_content_that_is_deleted_while_it_is_sent_is_whole(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    async with serving(tokenizer, tmp_path) as api:
        folder = api.app.state.batches.folder
        made = folder.create_file("", io.BytesIO(b"x" * 300_000), "in", "batch")["id"]
        num_open = len(os.listdir("/proc/self/fd"))
        sent = list[Any]()

        async def send(message: Any) -> None:
            if not sent:
                folder.delete_file("", made)
            sent.append(message)

        parts = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.get_running_loop().create_future()

        headers = [(b"host", b"localhost")]
        scope = {"type": "http", "method": "GET", "path": f"/v1/files/{made}/content", "headers": headers}
        await api.app({**scope, "query_string": b"", "root_path": "", "asgi": {"spec_version": "2.4"}}, receive, send)
        assert sent[0]["status"] == 200
        assert b"".join(each.get("body", b"") for each in sent[1:]) == b"x" * 300_000
        assert len(os.listdir("/proc/self/fd")) <= num_open


def test_bytes_of_files_are_bounded_for_each_key_and_for_all(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, most_bytes=1000)
    first = folder.create_file("a", io.BytesIO(b"x" * 400), "in", "batch")["id"]
    with pytest.raises(ApiError, match=r"http\.batch_bytes") as error:
        folder.create_file("a", io.BytesIO(b"x" * 200), "in", "batch")
    assert error.value.status == 409
    folder.create_file("b", io.BytesIO(b"x" * 250), "in", "batch")
    folder.create_file("c", io.BytesIO(b"x" * 300), "in", "batch")
    with pytest.raises(ApiError, match="of all clients fill") as error:
        folder.create_file("d", io.BytesIO(b"x" * 100), "in", "batch")
    assert error.value.status == 507
    folder.delete_file("a", first)
    folder.create_file("d", io.BytesIO(b"x" * 100), "in", "batch")
    assert not left_over(tmp_path)


async def test_batch_whose_results_have_no_room_waits_and_says_so(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, most_bytes=20_000)
    answer = Scripted(0.001)
    other = folder.create_file("", io.BytesIO(b"x" * 5000), "in", "batch")["id"]
    name = created(folder, lines(60, text="x" * 100))
    serving_ = worker(folder, answer)
    serving_.start()
    await until(lambda: bool(folder.batch("", name)["errors"]))
    batch = folder.batch("", name)
    assert batch["status"] == "in_progress"
    assert batch["errors"]["data"][0]["code"] == "insufficient_storage"
    assert sum(answer.asked.values()) < 60
    with pytest.raises(ApiError):
        folder.create_batch(Owner(""), {"input_file_id": other, **FIELDS}, 60)
    object.__setattr__(folder.space, "_most", 60_000)
    batch = await ended(folder, name)
    assert (batch["status"], batch["errors"], batch["request_counts"]["completed"]) == ("completed", None, 60)
    assert sum(answer.asked.values()) == 60
    await serving_.close()


async def test_results_of_batches_count_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_MOST_OBJECTS", 2)
    folder = BatchFolder(tmp_path)
    folder.check()
    file = folder.create_file("", io.BytesIO(lines(2)), "in", "batch")["id"]
    serving_ = worker(folder, Scripted())
    serving_.start()
    made = 0
    refusal: ApiError | None = None
    while made < 10:
        try:
            name = folder.create_batch(Owner(""), {"input_file_id": file, **FIELDS}, 60)["id"]
        except ApiError as error:
            refusal = error
            break
        await ended(folder, name)
        made += 1
    assert 0 < len(folder.files("")) <= 6
    assert refusal is not None
    assert (refusal.status, refusal.code) == (409, "too_many_files")
    await serving_.close()


def test_uploads_on_their_way_have_a_bound_and_leave_room_to_other_keys() -> None:
    uploads = Uploads(1000)
    first, second = uploads.of("a"), uploads.of("b")
    first._take(500)
    with pytest.raises(ApiError, match="uploads are on their way") as error:
        uploads.of("a")._take(1)
    assert error.value.status == 429
    second._take(250)
    first.end()
    uploads.of("a")._take(300)


async def test_disk_that_is_nearly_full_refuses_uploads_before_they_are_read(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tokenizer, tmp_path) as api:
        monkeypatch.setattr(space_module, "_FREE_BYTES", 1 << 60)
        monkeypatch.setattr(space_module, "_FREE_PART", 1)
        answer = await api.http.post("/v1/files", files=FILE, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
        assert "must stay free" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert not list(tmp_path.glob("*/files/*"))


async def test_looks_and_pages_read_no_ended_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BatchFolder(tmp_path / "batches")
    folder.check()
    serving_ = worker(folder, Scripted())
    serving_.start()
    names = [created(folder, b"{\n") for _ in range(12)]
    for name in names:
        await ended(folder, name)
    await serving_.close()
    list(folder.waiting())
    files = FailingFiles(folder.root, monkeypatch)
    for _ in range(5):
        assert list(folder.waiting()) == []
    assert not [name for name in files.seen if "batch.json" in name]
    assert [next(folder.each_batch(""))["id"], files.seen["open /all/batches/batch_*/batch.json"]] == [names[-1], 1]


async def test_failed_batch_names_no_more_problems_than_a_look_should_read(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    wrong = json.dumps({"custom_id": "1", "method": "POST", "url": "/\U0001f600" * 100 + "z" * 300, "body": {}})
    serving_ = worker(folder, Scripted())
    serving_.start()
    batch = await ended(folder, created(folder, f"{wrong}\n".encode() * 100))
    await serving_.close()
    assert 1 < len(batch["errors"]["data"]) <= 100
    assert (tmp_path / "all" / "batches" / batch["id"] / "batch.json").stat().st_size < 1 << 16


@pytest.mark.parametrize("content", [b"[]", b"{}", b"null", b"7", b"", b'{"id": "x"}', b'{"status": 5}', b"\xff", b"{"])
async def test_damaged_object_of_a_batch_stops_no_other_batch(tmp_path: Path, content: bytes) -> None:
    folder = BatchFolder(tmp_path)
    broken = created(folder, lines(1))
    (tmp_path / "all" / "batches" / broken / "batch.json").write_bytes(content)
    serving_ = worker(folder, Scripted())
    serving_.start()
    for _ in range(2):
        assert (await ended(folder, created(folder, lines(2))))["status"] == "completed"
    with pytest.raises(ApiError, match="damaged"):
        folder.batch("", broken)
    assert len(folder.batches("")) == 2
    await serving_.close()
