"""Read parts of files and of objects with Run:ai's Model Streamer: several threads read ahead of who takes tensors."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from crossdock.workers.model.loaders.part import Loader, TensorPart, Tensors

_READ_AHEAD = 1 << 30  # bytes on the host; the package's own limit is 40 GB


def stream(spans: Sequence[tuple[str, int, int]]) -> Tensors:
    """Yield (number of a span, its bytes), the spans in any order. The next bytes overwrite those before.

    spans: (path or URL, first byte, number of bytes) of files that are all local, or all in one object store.
    """
    from runai_model_streamer import FileChunks, FileStreamer

    numbers: dict[str, list[int]] = {}
    for number, (path, _, _) in enumerate(spans):
        numbers.setdefault(path, []).append(number)
    chunks = [
        FileChunks(place, path, [spans[number][1] for number in found], [spans[number][2] for number in found])
        for place, (path, found) in enumerate(numbers.items())
    ]
    in_order = list(numbers.values())
    limit = max(_READ_AHEAD, *(size for _, _, size in spans))
    with FileStreamer() as streamer:
        streamer.stream_files(chunks, memory_limit=limit, owned=False)
        for place, index, content in streamer.get_chunks():
            yield in_order[place][index], content.view(-1)


def streamer(origin: str | None) -> Loader:
    """Return the loader of files, whose bytes are under the URL `origin`; None: in the files themselves."""
    return partial(_load, origin)


def _load(origin: str | None, parts: Sequence[TensorPart], device: str) -> Tensors:
    spans = [
        (part.file if origin is None else f"{origin}/{Path(part.file).name}", part.offset, part.num_bytes)
        for part in parts
    ]
    for number, content in stream(spans):
        own = content.to(device, copy=True)
        yield number, own.view(parts[number].dtype).reshape(parts[number].shape)
