"""The open files of a checkpoint: tensors by name, whichever loader reads their bytes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib.util import find_spec
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from crossdock.kernels.options import LoadFormat
from crossdock.workers.model.loaders.file_slice import DTYPES, FileSlice, OpenFile
from crossdock.workers.model.loaders.objects import origin_of
from crossdock.workers.model.loaders.part import Loader, TensorPart, Tensors
from crossdock.workers.model.loaders.run_ai import streamer

_PACKAGES: Mapping[str, str] = {"runai_streamer": "runai-model-streamer", "fastsafetensors": "fastsafetensors"}


class Files:
    """The open files of a checkpoint. Closed at the end of a `with`. Bytes are read when they are asked for."""

    def __init__(self) -> None:
        self._readers: dict[str, OpenFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def slice_of(self, file: str, key: str) -> Any:
        """Return a tensor of a file. Stands in for a slice of safetensors."""
        return self.place_of(file, key)

    def place_of(self, file: str, key: str) -> FileSlice:
        """Return where a tensor is in its file."""
        if file not in self._readers:
            self._readers[file] = self._stack.enter_context(closing(OpenFile(Path(file))))
        return self._readers[file].slice_of(key)

    def expect(self, read: Callable[[], object]) -> None:
        """Prepare for the reads of `read`, which are a rehearsal. Nothing is to be prepared here."""


class LoadedFiles(Files):
    """Files that a loader reads: it is told beforehand what will be asked for, and reads ahead."""

    def __init__(self, load: Loader, device: str) -> None:
        super().__init__()
        self._load, self._device, self._lock = load, device, Lock()
        self._rehearsed: list[TensorPart] | None = None  # None: reads are no rehearsal
        self._parts: list[TensorPart] = []
        self._left: Counter[TensorPart] = Counter()  # how often each will be asked for
        self._arrived: dict[TensorPart, Tensor] = {}
        self._coming: Tensors | None = None
        self._failure = "the loader of weights has ended before all tensors had come"  # or the first one

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._coming is not None:
                self._coming.close()
        super().__exit__()

    def slice_of(self, file: str, key: str) -> "LoadedSlice":
        return LoadedSlice(self, file, key, self.place_of(file, key))

    def expect(self, read: Callable[[], object]) -> None:
        """Prepare for the reads of `read`: in a rehearsal, tensors without bytes are read."""
        asked: list[TensorPart] = []
        self._rehearsed = asked
        read()
        self._rehearsed = None
        self._left, self._parts, self._arrived = Counter(asked), list(dict.fromkeys(asked)), {}
        with self._lock:
            if self._coming is not None:
                self._coming.close()
            self._coming = self._load(self._parts, self._device) if asked else None

    def take(self, part: TensorPart) -> Tensor:
        """Return a part, once it has come. Any thread may ask. ValueError: the loader cannot read it."""
        if self._rehearsed is not None:
            self._rehearsed.append(part)
            return torch.empty(part.shape, dtype=part.dtype, device="meta")
        with self._lock:
            if not self._left[part]:
                with closing(self._load([part], self._device)) as alone:
                    return self._next(alone)[1]
            while part not in self._arrived:
                number, tensor = self._next(self._coming)
                self._arrived[self._parts[number]] = tensor
            self._left[part] -= 1
            return self._arrived[part] if self._left[part] else self._arrived.pop(part)

    def _next(self, coming: Tensors | None) -> tuple[int, Tensor]:
        try:
            if coming is not None and (found := next(coming, None)) is not None:
                return found
        except Exception as error:  # the packages raise all kinds
            self._failure = f"weights cannot be loaded: {type(error).__name__}: {error}"
            raise ValueError(self._failure) from error
        raise ValueError(self._failure)


class LoadedSlice:
    """A tensor that a loader reads. Stands in for a slice of safetensors."""

    def __init__(self, files: LoadedFiles, file: str, key: str, place: FileSlice) -> None:
        self._files = files
        self._file = file
        self._key = key
        self._place = place

    def __getitem__(self, key: Any) -> Tensor:
        """Return the elements of `key`: `...`, or slices of step 1. Rows alone are read where it names rows."""
        shape = self._place.get_shape()
        dtype = DTYPES[self._place.get_dtype()]
        rows, *others = key if isinstance(key, tuple) else (key,)
        whole = TensorPart(self._file, self._key, dtype, tuple(shape), 0, self._place.start)
        if rows is ... or others:
            return self._files.take(whole)[key].contiguous()
        start, stop, _ = rows.indices(shape[0])
        first = start * prod(shape[1:])
        offset = whole.offset + first * dtype.itemsize
        return self._files.take(whole._replace(shape=(stop - start, *shape[1:]), first=first, offset=offset))

    def get_dtype(self) -> str:
        return self._place.get_dtype()

    def get_shape(self) -> list[int]:
        return self._place.get_shape()


def open_files(folder: Path, load_format: LoadFormat = "auto", device: str = "cpu") -> Files:
    """Return the files of a checkpoint, whose tensors come to the host, or to `device` where a loader reads them.

    Raises:
        ValueError: the package of `load_format` is not installed, or it does not read from an object store.
    """
    require_loader(load_format)
    if (origin := origin_of(folder)) is not None:
        if load_format not in ("auto", "runai_streamer"):
            raise ValueError(f"load_format {load_format}: {origin} is an object store; auto and runai_streamer read it")
        return LoadedFiles(streamer(origin), device)
    if load_format == "runai_streamer":
        return LoadedFiles(streamer(None), device)
    return LoadedFiles(load_fast, device) if load_format == "fastsafetensors" else Files()


def require_loader(load_format: LoadFormat) -> None:
    """Raise ValueError if the package of a load format is not installed on this machine."""
    package = _PACKAGES.get(load_format)
    if package is not None and find_spec(package.replace("-", "_")) is None:
        raise ValueError(
            f"load_format {load_format}: the package {package} is not installed here: "
            f"pip install 'crossdock[streamer]'; auto needs no package"
        )


def load_fast(parts: Sequence[TensorPart], device: str) -> Tensors:
    """Yield (number of a part, its tensor), file after file. The device holds one file's buffer at a time."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    numbers: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        numbers.setdefault(part.file, []).append(number)
    for file, found in numbers.items():
        loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=device == "cpu")
        keys = {parts[number].key for number in found}
        loader.set_tensor_filter(keys.__contains__)
        loader.add_filenames({0: [file]})
        content = loader.copy_files_to_device()
        try:
            for number in found:
                part = parts[number]
                elements = content.get_tensor(part.key).reshape(-1)
                yield number, elements[part.first : part.first + prod(part.shape)].clone().reshape(part.shape)
        finally:
            content.close()
            loader.close()
