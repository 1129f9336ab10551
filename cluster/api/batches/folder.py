"""Files and batches on disk, each owner's apart. Every change is whole: a new file is renamed into its place.

`<folder>/<owner>/files/<id>/` has `meta.json` and `data`. `<folder>/<owner>/batches/<id>/` has `batch.json`, the
results so far, and a lock that the ingress which runs the batch holds: it ends with that ingress's process.
"""

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from crossdock.cluster.api.batches.space import Space
from crossdock.cluster.api.batches.unended import ERRORS, INPUT, OUTPUT, STATE, Unended, age_key, ids
from crossdock.cluster.api.errors import ApiError, shown

TERMINAL = ("completed", "failed", "expired", "cancelled")
_NAMES = {"file": re.compile(r"file-[0-9a-f]{32}"), "batch": re.compile(r"batch_[0-9a-f]{32}")}
_OPEN = "all"  # folder of all clients, where no keys are in use
_BEGUN_S = 3600  # no process takes as long to put a file or a batch into its place
_MOST_OBJECTS = 1000  # files, and likewise batches, of one owner
_WITH_RESULTS = 3  # times as many files: each batch has two results at most
_FIELDS = {"status": str, "endpoint": str, "request_counts": dict, "created_at": int, "expires_at": int}  # of a batch
_CANCEL = "cancel"
_LOCK = "lock"


class Owner(NamedTuple):
    """The sender of a batch."""

    name: str  # of the owner of the API key; empty: no keys are in use
    tenant: str = ""  # the tenant that a gateway's header named, see `TenantReader`


@dataclass(frozen=True, slots=True)
class BatchFolder:
    """A folder that all ingresses share, on a file system whose `flock` holds between them."""

    root: Path
    most_bytes: int = 64 << 30
    unended: Unended = field(init=False, compare=False, repr=False)
    space: Space = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unended", Unended(_batch_at, _has_ended))
        object.__setattr__(self, "space", Space(self.root, self.most_bytes, self.unended))

    def check(self) -> None:
        """Raise ValueError if the folder cannot be written to, or has no locks."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _locked(self.root / f".{uuid.uuid4().hex}") as probe:
                Path(probe.name).unlink()
        except OSError as error:
            reason = f"{self.root} must be a folder in which files can be written and locked: {error.strerror}"
            raise ValueError(f"http.batch_folder: {reason}") from None
        self.sweep()

    def sweep(self) -> None:
        """Delete what a process that was killed had begun."""
        for left in self.root.glob("*/*/.*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _BEGUN_S:
                    shutil.rmtree(left)

    # -- files -------------------------------------------------------------------------------------------------------

    def create_file(self, owner: str, source: IO[bytes], filename: str, purpose: str) -> Any:
        """Copy a file into the folder, and return its object.

        Raises ApiError 409 if the owner has too many files or bytes, and 507 if the disk is full.
        """
        num_bytes = source.seek(0, os.SEEK_END)
        source.seek(0)
        self.space.check(owner, num_bytes)
        folder = self._kind(owner, "files")
        _check_room(folder, "files")
        file_id = f"file-{_new_id()}"

        def copy(data: Path) -> None:
            with data.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
                _sync(file)

        self._put_file(folder / file_id, copy, filename, purpose)
        self.space.add(owner, num_bytes)
        return self.file(owner, file_id)

    def keep_results(self, owner: str, path: Path, filename: str, file_id: str) -> None:
        """Make a file of the results of a batch, which takes no further space. A file that is there stays as it is."""
        place = self._kind(owner, "files") / file_id
        if not place.exists():
            self._put_file(place, lambda data: data.hardlink_to(path), filename, "batch_output")

    def _put_file(self, place: Path, make: Callable[[Path], None], filename: str, purpose: str) -> None:
        """Put a file into its place once it is whole. `make`: writes the content to a path."""
        with _whole(place) as new:
            make(new / "data")
            meta = {
                "id": place.name,
                "object": "file",
                "bytes": (new / "data").stat().st_size,
                "created_at": int(time.time()),
                "filename": shown(filename),
                "purpose": purpose,
                "status": "processed",
            }
            _write(new / "meta.json", meta)

    def file(self, owner: str, file_id: str) -> Any:
        """Return the object of a file. ApiError 404: the owner has no such file."""
        return _read(self._place(owner, "file", file_id) / "meta.json", "file", file_id)

    def content(self, owner: str, file_id: str) -> Path:
        """Return where the content of a file is. ApiError 404: the owner has no such file."""
        self.file(owner, file_id)
        return self._place(owner, "file", file_id) / "data"

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. Batches have their own links to what they read. ApiError 404: there is no such file."""
        self.file(owner, file_id)
        place = self._place(owner, "file", file_id)
        gone = place.with_name(f".{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):  # another client deletes it as well
            place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        self.space.forget()

    def files(self, owner: str) -> list[Any]:
        """Return the objects of an owner's files, the newest first."""
        return list(self.each_file(owner))

    def each_file(self, owner: str) -> Iterator[Any]:
        """Yield the objects of an owner's files, the newest first. Each is read when it is asked for."""
        return self._listed(owner, "files", "meta.json")

    def open_content(self, owner: str, file_id: str) -> IO[bytes]:
        """Open the content of a file, which can be read even after the file is deleted. ApiError 404 as `content`."""
        try:
            return self.content(owner, file_id).open("rb")
        except FileNotFoundError:  # deleted since
            raise _absent("file", file_id) from None

    # -- batches -----------------------------------------------------------------------------------------------------

    def create_batch(self, owner: Owner, fields: dict[str, Any], lifetime_s: int) -> Any:
        """Create a batch that waits to be run, and return its object. ApiError 404: there is no such input file."""
        data = self.content(owner.name, fields["input_file_id"])
        folder = self._kind(owner.name, "batches")
        self.space.check(owner.name)
        num_results = 2 * (len(self.unended.places(folder)) + 1)
        _check_room(self._kind(owner.name, "files"), "files", num_results, _WITH_RESULTS * _MOST_OBJECTS)
        _make_room(folder)
        name = f"batch_{_new_id()}"
        now = int(time.time())
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
            "tenant": owner.tenant,
        }
        with _whole(folder / name) as new:
            try:
                (new / INPUT).hardlink_to(data)
            except FileNotFoundError:  # the file has been deleted since
                raise _absent("file", fields["input_file_id"]) from None
            _write(new / STATE, batch)
        return _with_cancel(batch, folder / name)

    def batch(self, owner: str, batch_id: str) -> Any:
        """Return the object of a batch. ApiError 404: the owner has no such batch."""
        place = self._place(owner, "batch", batch_id)
        return _with_cancel(_read(place / STATE, "batch", batch_id), place)

    def batches(self, owner: str) -> list[Any]:
        """Return the objects of an owner's batches, the newest first."""
        return list(self.each_batch(owner))

    def each_batch(self, owner: str) -> Iterator[Any]:
        """Yield the objects of an owner's batches, the newest first. Each is read when it is asked for."""
        for batch in self._listed(owner, "batches", STATE):
            yield _with_cancel(batch, self.root / (owner or _OPEN) / "batches" / batch["id"])

    def cancel(self, owner: str, batch_id: str) -> Any:
        """Ask the ingress that runs a batch to end it, and return the batch's object."""
        batch = self.batch(owner, batch_id)
        if batch["status"] in TERMINAL:
            reason = f"The batch is {batch['status']} already."
            raise ApiError(reason, status=409, param="batch_id", code="invalid_batch_state")
        try:
            (self._place(owner, "batch", batch_id) / _CANCEL).touch()
        except FileNotFoundError:  # forgotten since
            raise _absent("batch", batch_id) from None
        return self.batch(owner, batch_id)

    def waiting(self) -> Iterator[tuple[str, Path]]:
        """Yield each batch that has not ended, by owner and place, the oldest of an owner first."""
        for folder in sorted(self.root.glob("*/batches")):
            owner = "" if folder.parent.name == _OPEN else folder.parent.name
            for place in self.unended.places(folder):
                yield owner, place

    @contextmanager
    def owned(self, place: Path) -> Iterator["OwnedBatch | None"]:
        """Return a batch that this process alone may change until the context ends; None: another process has it."""
        try:
            with _locked(place / _LOCK):
                yield OwnedBatch(place, _batch_at(place))
        except BlockingIOError:
            yield None

    def _listed(self, owner: str, kind: str, name: str) -> Iterator[Any]:
        folder = self.root / (owner or _OPEN) / kind
        try:
            names = sorted(ids(folder), key=age_key, reverse=True)
        except FileNotFoundError:  # the owner has none yet
            return
        for each in names:
            with suppress(FileNotFoundError, ValueError):  # deleted meanwhile, or damaged
                yield _object_at(folder / each / name)

    def _kind(self, owner: str, kind: str) -> Path:
        """Return the folder of an owner's files or batches, which is made if there is none."""
        folder = self.root / (owner or _OPEN) / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _place(self, owner: str, kind: str, name: str) -> Path:
        """Return the folder of an object. ApiError 404: `name` is no id, but may be a path."""
        if _NAMES[kind].fullmatch(name) is None:
            raise _absent(kind, name)
        return self.root / (owner or _OPEN) / ("files" if kind == "file" else "batches") / name


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
        _write(self.place / STATE, self.state)

    def file_id(self, name: str) -> str:
        """Return the id that the file of these results has: the same after every restart."""
        text = f"{self.state['id']} {name}"
        milliseconds = 1000 * (self.state["finalizing_at"] or 0)
        return f"file-{milliseconds:012x}{blake2b(text.encode(), digest_size=10).hexdigest()}"

    def clear(self) -> None:
        """Delete all that an ended batch no longer needs."""
        for name in (OUTPUT, ERRORS, _CANCEL, INPUT):  # the input last: where it is gone, all are
            (self.place / name).unlink(missing_ok=True)


@contextmanager
def _whole(place: Path) -> Iterator[Path]:
    """Yield a new folder, which takes its place when the context ends without an error, and is deleted otherwise.

    Another ingress may have put the same folder there meanwhile: that one stays.
    """
    new = place.with_name(f".{uuid.uuid4().hex}")
    try:
        new.mkdir()
        yield new
        try:
            new.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of a file. BlockingIOError: another process holds it."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def _check_room(folder: Path, kind: str, num_more: int = 1, most: int | None = None) -> None:
    """Raise ApiError 409 if there is no room for more objects."""
    most = _MOST_OBJECTS if most is None else most
    if len(ids(folder)) + num_more > most:
        advice = "delete some" if kind == "files" else "wait for one to end"
        reason = f"There are {most} {kind}, the most that are kept (results of batches that run are counted, too)"
        headers = {"x-should-retry": "false"}
        raise ApiError(f"{reason}: {advice}.", status=409, code=f"too_many_{kind}", headers=headers)


def _make_room(folder: Path) -> None:
    """Forget the oldest ended batch where there are too many: no client can delete one. ApiError 409: all run."""
    names = sorted(ids(folder), key=age_key)
    if len(names) < _MOST_OBJECTS:
        return
    for name in names:
        with suppress(FileNotFoundError, ValueError):
            if _batch_at(folder / name)["status"] in TERMINAL:
                shutil.rmtree(folder / name, ignore_errors=True)
                break
    _check_room(folder, "batches")


def _object_at(path: Path) -> Any:
    """Return the object of a file or a batch. FileNotFoundError: there is none; ValueError: it has another form."""
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict) or found.get("id") != path.parent.name:
        raise ValueError(f"{path.name} is not the object of {path.parent.name}")
    return found


def _batch_at(place: Path) -> Any:
    """Do the same for a batch."""
    found = _object_at(place / STATE)
    missing = [name for name, kind in _FIELDS.items() if not isinstance(found.get(name), kind)]
    if missing:
        raise ValueError(f"{STATE} lacks a proper {missing[0]!r}")
    return found


def _has_ended(place: Path, batch: Any) -> bool:
    """Return whether a batch has ended. What the process that ended it could not delete is deleted then."""
    if batch["status"] not in TERMINAL:
        return False
    if (place / INPUT).exists():
        OwnedBatch(place, batch).clear()
    return True


def _with_cancel(batch: Any, place: Path) -> Any:
    """Return the object of a batch as clients see it. An ingress may not have noticed yet that it is cancelled."""
    batch = {name: value for name, value in batch.items() if name not in ("ends_as", "tenant")}
    if batch["status"] in TERMINAL:
        return batch
    try:
        cancelled_at = int((place / _CANCEL).stat().st_mtime)
    except FileNotFoundError:
        return batch
    return {**batch, "status": "cancelling", "cancelling_at": cancelled_at}


def _read(path: Path, kind: str, name: str) -> Any:
    try:
        return _object_at(path)
    except FileNotFoundError:
        raise _absent(kind, name) from None
    except ValueError:
        reason = f"The record of {kind} '{shown(name)}' is damaged on the server's disk."
        raise ApiError(reason, status=500, code="damaged_record", headers={"x-should-retry": "false"}) from None


def _new_id() -> str:
    """Return an id that begins with the time, so that names of objects are in order."""
    return f"{time.time_ns() // 10**6:012x}{uuid.uuid4().hex[12:]}"


def _absent(kind: str, name: str) -> ApiError:
    return ApiError(f"There is no {kind} '{shown(name)}'.", status=404, param=f"{kind}_id", code="not_found")


def _write(path: Path, value: Any) -> None:
    """Write a file as JSON: a reader finds the old content or the new one."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with new.open("w") as file:
            json.dump(value, file)
            _sync(file)
        new.rename(path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
