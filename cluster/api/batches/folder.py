"""Files and batches on disk, each tenant's apart. Every change is whole: a new file is renamed into its place.

`<folder>/<tenant>/files/<id>/` has `meta.json` and `data`. `<folder>/<tenant>/batches/<id>/` has `batch.json`, the
results so far, and a lock that the ingress which runs the batch holds: it ends with that ingress's process.
"""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from crossdock.cluster.api.errors import ApiError, shown

INPUT, OUTPUT, ERRORS = "input.jsonl", "output.jsonl", "errors.jsonl"
TERMINAL = ("completed", "failed", "expired", "cancelled")
_NAMES = {"file": re.compile(r"file-[0-9a-f]{32}"), "batch": re.compile(r"batch_[0-9a-f]{32}")}
_OPEN = "all"  # folder of all clients, where no keys are in use
_BEGUN_S = 3600  # no process takes as long to put a file or a batch into its place
_MOST_OBJECTS = 1000  # files, and likewise batches, of one tenant
_CANCEL, _LOCK, _STATE = "cancel", "lock", "batch.json"


class Owner(NamedTuple):
    """The sender of a batch."""

    tenant: str  # that has the API key; empty: no keys are in use
    payer: str = ""  # that a gateway's header named, see `Payers`


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """A folder that all ingresses share, on a file system whose `flock` holds between them."""

    root: Path

    def check(self) -> None:
        """Raise ValueError if the folder cannot be written to, or has no locks."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _locked(self.root / f".{uuid.uuid4().hex}") as probe:
                Path(probe.name).unlink()
        except OSError as error:
            reason = f"{self.root} must be a folder in which files can be written and locked: {error.strerror}"
            raise ValueError(f"http.batch_folder: {reason}") from None
        for left in self.root.glob("*/*/.*"):  # what a process that was killed had begun
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _BEGUN_S:
                    shutil.rmtree(left)

    # -- files -------------------------------------------------------------------------------------------------------

    def create_file(self, tenant: str, source: IO[bytes], filename: str, purpose: str, file_id: str = "") -> Any:
        """Copy a file into the folder, and return its object. A file that is there already stays as it is."""
        folder = self._kind(tenant, "files")
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        place, new = folder / file_id, folder / f".{uuid.uuid4().hex}"
        if not place.exists():
            if purpose != "batch_output":  # results of a batch are kept in any case
                _check_room(folder, "files")
            new.mkdir()
            try:
                with (new / "data").open("wb") as data:
                    shutil.copyfileobj(source, data, 1 << 20)
                    _sync(data)
                meta = {
                    "id": file_id,
                    "object": "file",
                    "bytes": (new / "data").stat().st_size,
                    "created_at": int(time.time()),
                    "filename": shown(filename),
                    "purpose": purpose,
                    "status": "processed",
                }
                _write(new / "meta.json", meta)
                with suppress(OSError):  # another ingress has put it there meanwhile
                    new.rename(place)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        return self.file(tenant, file_id)

    def file(self, tenant: str, file_id: str) -> Any:
        """Return the object of a file. ApiError 404: the tenant has no such file."""
        return _read(self._place(tenant, "file", file_id) / "meta.json", "file", file_id)

    def content(self, tenant: str, file_id: str) -> Path:
        """Return where the content of a file is. ApiError 404: the tenant has no such file."""
        self.file(tenant, file_id)
        return self._place(tenant, "file", file_id) / "data"

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Batches have their own links to what they read. ApiError 404: there is no such file."""
        self.file(tenant, file_id)
        place = self._place(tenant, "file", file_id)
        gone = place.with_name(f".{uuid.uuid4().hex}")
        with suppress(OSError):  # else another client deletes it as well
            place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def files(self, tenant: str) -> list[Any]:
        """Return the objects of a tenant's files, the newest first."""
        return _newest_first(self._kind(tenant, "files"), "meta.json")

    # -- batches -----------------------------------------------------------------------------------------------------

    def create_batch(self, owner: Owner, fields: dict[str, Any], lifetime_s: int) -> Any:
        """Create a batch that waits to be run, and return its object. ApiError 404: there is no such input file."""
        data = self.content(owner.tenant, fields["input_file_id"])
        folder = self._kind(owner.tenant, "batches")
        _make_room(folder)
        name, now = f"batch_{uuid.uuid4().hex}", int(time.time())
        new = folder / f".{uuid.uuid4().hex}"
        new.mkdir()
        (new / INPUT).hardlink_to(data)
        batch = {
            "id": name,
            "object": "batch",
            "errors": None,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + lifetime_s,
            **dict.fromkeys(f"{state}_at" for state in ("in_progress", "finalizing", "cancelling", *TERMINAL)),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            **fields,
            "payer": owner.payer,
        }
        _write(new / _STATE, batch)
        new.rename(folder / name)
        return _with_cancel(batch, folder / name)

    def batch(self, tenant: str, batch_id: str) -> Any:
        """Return the object of a batch. ApiError 404: the tenant has no such batch."""
        place = self._place(tenant, "batch", batch_id)
        return _with_cancel(_read(place / _STATE, "batch", batch_id), place)

    def batches(self, tenant: str) -> list[Any]:
        """Return the objects of a tenant's batches, the newest first."""
        folder = self._kind(tenant, "batches")
        return [_with_cancel(batch, folder / batch["id"]) for batch in _newest_first(folder, _STATE)]

    def cancel(self, tenant: str, batch_id: str) -> Any:
        """Ask the ingress that runs a batch to end it, and return the batch's object."""
        batch = self.batch(tenant, batch_id)
        if batch["status"] in TERMINAL:
            reason = f"The batch is {batch['status']} already."
            raise ApiError(reason, status=409, param="batch_id", code="invalid_batch_state")
        (self._place(tenant, "batch", batch_id) / _CANCEL).touch()
        return self.batch(tenant, batch_id)

    def waiting(self) -> Iterator[tuple[str, Path]]:
        """Yield each batch that has not ended, by tenant and place, the oldest of a tenant first."""
        for folder in sorted(self.root.glob("*/batches")):
            tenant = "" if folder.parent.name == _OPEN else folder.parent.name
            for batch in reversed(_newest_first(folder, _STATE)):
                if batch["status"] not in TERMINAL:
                    yield tenant, folder / batch["id"]

    @contextmanager
    def owned(self, place: Path) -> Iterator["OwnedBatch | None"]:
        """Return a batch that this process alone may change until the context ends; None: another process has it."""
        try:
            with _locked(place / _LOCK):
                yield OwnedBatch(place, json.loads((place / _STATE).read_bytes()))
        except BlockingIOError:
            yield None

    def _kind(self, tenant: str, kind: str) -> Path:
        folder = self.root / (tenant or _OPEN) / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _place(self, tenant: str, kind: str, name: str) -> Path:
        """Return the folder of an object. ApiError 404: `name` is no id, but may be a path."""
        if _NAMES[kind].fullmatch(name) is None:
            raise _absent(kind, name)
        return self._kind(tenant, "files" if kind == "file" else "batches") / name


@dataclass(slots=True)
class OwnedBatch:
    """A batch whose lock this process holds."""

    place: Path
    state: dict[str, Any]

    @property
    def is_cancelled(self) -> bool:
        return (self.place / _CANCEL).exists()

    def enter(self, status: str, **fields: Any) -> None:
        """Change the status, note the time, and write the batch's object."""
        self.state |= {"status": status, f"{status}_at": int(time.time()), **fields}
        self.write()

    def write(self) -> None:
        _write(self.place / _STATE, self.state)

    def file_id(self, name: str) -> str:
        """Return the id that the file of these results has: the same after every restart."""
        text = f"{self.state['id']} {name}"
        return f"file-{blake2b(text.encode(), digest_size=16).hexdigest()}"

    def clear(self) -> None:
        """Delete all that an ended batch no longer needs."""
        for name in (INPUT, OUTPUT, ERRORS, _CANCEL):
            (self.place / name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of a file. BlockingIOError: another process holds it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def _check_room(folder: Path, kind: str) -> None:
    if sum(1 for _ in folder.iterdir()) >= _MOST_OBJECTS:
        advice = "delete some" if kind == "files" else "wait for one to end"
        reason = f"There are {_MOST_OBJECTS} {kind}, the most that are kept: {advice}"
        raise ApiError(f"{reason}.", status=409, code=f"too_many_{kind}")


def _make_room(folder: Path) -> None:
    """Forget the oldest ended batch where there are too many: no client can delete one. ApiError 409: all run."""
    if sum(1 for _ in folder.iterdir()) >= _MOST_OBJECTS:
        ended = [each["id"] for each in _newest_first(folder, _STATE) if each["status"] in TERMINAL]
        for name in ended[-1:]:
            shutil.rmtree(folder / name, ignore_errors=True)
    _check_room(folder, "batches")


def _newest_first(folder: Path, name: str) -> list[Any]:
    found = []
    for place in folder.glob("[!.]*"):
        with suppress(OSError, ValueError):  # deleted meanwhile
            found.append(json.loads((place / name).read_bytes()))
    return sorted(found, key=lambda each: (each["created_at"], each["id"]), reverse=True)


def _with_cancel(batch: Any, place: Path) -> Any:
    """Return the object of a batch as clients see it. An ingress may not have noticed yet that it is cancelled."""
    for name in ("ends_as", "payer"):
        batch.pop(name, None)
    if batch["status"] in TERMINAL or not (place / _CANCEL).exists():
        return batch
    return {**batch, "status": "cancelling", "cancelling_at": int((place / _CANCEL).stat().st_mtime)}


def _read(path: Path, kind: str, name: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _absent(kind, name) from None


def _absent(kind: str, name: str) -> ApiError:
    return ApiError(f"There is no {kind} '{shown(name)}'.", status=404, param=f"{kind}_id", code="not_found")


def _write(path: Path, value: Any) -> None:
    """Write a file as JSON: a reader finds the old content or the new one."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with new.open("w") as file:
        json.dump(value, file)
        _sync(file)
    new.rename(path)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
