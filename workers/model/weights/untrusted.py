"""Look at a checkpoint's files before a library reads them: a file of an attacker costs little time and memory."""

import json
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

MOST_LAYERS = 4096
_MOST_JSON_BYTES = 32 << 20  # the index of a model of 700 billion parameters has 9 MB
_MOST_ELEMENTS = 1 << 22  # of all arrays in a GGUF file; a vocabulary of 262,144 tokens and its merges have 1.3 million
_MOST_TENSORS = 1 << 17
_MOST_DIMENSIONS = 4
_MOST_FILES = 1 << 14  # in a stranger's folder
# GGUF's numbers of types.
_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. ValueError: it is too large, not JSON, or no object."""
    with file.open("rb") as opened:
        return json_of(opened, file)


def read_json_if_any(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file as `read_json` does; empty: there is no such file."""
    return read_json(file) if file.is_file() else {}


def json_of(opened: BinaryIO, file: Path) -> dict[str, Any]:
    """Return the object in an open JSON file. ValueError: it is too large, not JSON, or no object."""
    content = opened.read(_MOST_JSON_BYTES + 1)
    if len(content) > _MOST_JSON_BYTES:
        raise ValueError(f"{file} has more than {_MOST_JSON_BYTES} bytes, which is too much for JSON")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not JSON of an object")
    return found


def open_own(file: Path) -> BufferedReader:
    """Open a file of a stranger's folder. The file that is open is looked at, not a name that may change.

    Raises:
        ValueError: the file is a link out of its folder. Links of a hub cache lead to its `blobs`, and are followed.
        OSError: the file cannot be opened.
    """
    # Else an open of a pipe would wait for its writer.
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise ValueError(f"{file} is no file, but a folder, a pipe or a device")
        _check_inside(Path(os.readlink(f"/proc/self/fd/{number}")), file)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def check_links(folder: Path) -> None:
    """Check the files of a stranger's folder, for a library that opens them by name. ValueError: one leads out."""
    for number, file in enumerate(folder.iterdir()):
        if number >= _MOST_FILES:
            raise ValueError(f"{folder} has more than {_MOST_FILES} files")
        _check_inside(file.resolve(), file)


def _check_inside(found: Path, file: Path) -> None:
    """Check where a file really is. ValueError: neither in its folder, nor in the blobs of a hub cache around that."""
    folder = file.parent.resolve()
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(found.is_relative_to(each) for each in (folder, *blobs)):
        raise ValueError(f"{file} is a link out of its folder, which is not followed: copy the file")


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return config.json. ValueError: it is no object, or says that the model has more layers than are made."""
    file = folder / "config.json"
    found = read_json(file)
    parts: list[Any] = [found]
    while parts:
        part = parts.pop()
        values = part.items() if isinstance(part, dict) else [("", each) for each in part]
        for name, value in values:
            if isinstance(value, dict | list):
                parts.append(value)
            elif isinstance(value, int | float) and ("layer" in name or "depth" in name) and value > MOST_LAYERS:
                raise ValueError(f"{file}: {name} is {value:g}; at most {MOST_LAYERS} are read")
    return found


def check_index(folder: Path) -> None:
    """Check the list of a checkpoint's files. ValueError: it is none, or names files outside the folder."""
    file = folder / "model.safetensors.index.json"
    if not file.is_file():
        return
    index = read_json(file)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata", {}), dict):
        raise ValueError(f"{file} has no weight_map, which names the file of each tensor, or metadata of another kind")
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{file}: weight_map names {name!r:.200}; expected is a *.safetensors beside it")
        if not (folder / name).is_file():
            raise ValueError(f"{file}: weight_map names {name:.200}, which is not there")


@contextmanager
def naming(file: Path, *, kept: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn each error of a library that reads `file` into a ValueError that names it, but for those `kept`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, kept) or (isinstance(error, ValueError | OSError) and str(file) in str(error)):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {reason:.500}") from error


def check_gguf(file: Path) -> None:
    """Check that the counts and lengths in the head of a GGUF file fit its bytes. ValueError: they do not."""
    with file.open("rb") as opened:
        if file.stat().st_size < 24:
            raise ValueError(f"model {file} is a file that cannot be read as GGUF: it has fewer than 24 bytes")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                _Head(content).check()
            except (ValueError, struct.error) as error:
                raise ValueError(f"model {file} is a file that cannot be read as GGUF: {error}") from None


class _Head:
    """Walks through the head of a GGUF file. ValueError or struct.error: it goes on beyond its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._num_elements = 0

    def check(self) -> None:
        magic, version, num_tensors, num_fields = self._next("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}; GGUF of version 2 or 3 is read")
        if num_tensors > _MOST_TENSORS or num_fields > _MOST_TENSORS:
            raise ValueError(f"{num_tensors} tensors and {num_fields} fields; at most {_MOST_TENSORS} of each are read")
        for _ in range(num_fields):
            name = self._text()
            value = self._value(self._next("I")[0])
            if name.endswith(b"block_count") and isinstance(value, int) and value > MOST_LAYERS:
                raise ValueError(f"{value} layers; at most {MOST_LAYERS} are read")
        for _ in range(num_tensors):
            self._text()
            (num_dimensions,) = self._next("I")
            if num_dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor of {num_dimensions} dimensions; at most {_MOST_DIMENSIONS} are read")
            *sizes, _, offset = self._next(f"{num_dimensions}QIQ")
            if max(*sizes, offset, 0) > len(self._content) * 8:  # of the smallest type, two bits
                raise ValueError("a tensor is larger than the file, or begins after its end")

    def _value(self, kind: int) -> Any:
        """Pass the value of a field. Returns it where it is one number."""
        if kind in _SCALARS:
            return self._next(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"a field is of type {kind}, which does not exist")
        of, count = self._next("IQ")
        self._num_elements += count
        if self._num_elements > _MOST_ELEMENTS:
            raise ValueError(f"arrays of {self._num_elements} values; at most {_MOST_ELEMENTS} are read")
        if of in _SCALARS:
            self._pass(count * struct.calcsize(_SCALARS[of]))
        elif of == _STRING:
            for _ in range(count):
                self._text()
        else:
            raise ValueError(f"an array of type {of}; numbers and texts are read")
        return None

    def _text(self) -> bytes:
        (length,) = self._next("Q")
        start = self._at
        self._pass(length)
        return self._content[max(start, self._at - 100) : self._at]

    def _next(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _pass(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._content):
            raise ValueError("a text or an array goes on beyond the end of the file")
