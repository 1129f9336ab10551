"""A model in an object store: a local folder has its small files, and the heads of its weights, which list tensors.

The bytes of weights are never written to a disk: a loader reads them from the store. A file that ends after its head is
refused by all other readers.
"""

import hashlib
import json
import struct
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGES = {"s3": "runai-model-streamer-s3", "gs": "runai-model-streamer-gcs"}  # by what begins a URL
_SMALL_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]
_ORIGIN = "origin.json"  # in the local folder: where the bytes of weights are, and how many
_MOST_HEAD_BYTES = 100 << 20  # safetensors allows no more
_SAMPLE = 4096  # bytes


def is_object_url(name: str) -> bool:
    """Report whether the name of a model is a folder in an object store."""
    return has_scheme(name, _PACKAGES)


def has_scheme(name: str, schemes: Collection[str]) -> bool:
    """Return whether a name is a URL of one of the schemes."""
    scheme, separator, _ = name.partition("://")
    return bool(separator) and scheme in schemes


def origin_of(folder: Path) -> str | None:
    """Return the URL of the object store that has the weights of a local folder; None: the folder has them."""
    found = _origin(folder)
    return None if found is None else str(found["url"])


def bytes_of_weights(folder: Path) -> int:
    """Return the bytes of the weights of a local folder, as files or objects have them."""
    found = _origin(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if found is None else int(found["bytes"])


def _origin(folder: Path) -> dict[str, Any] | None:
    file = folder / _ORIGIN
    return json.loads(file.read_bytes()) if file.is_file() else None


def list_objects(url: str) -> dict[str, int]:
    """Return the files of a model in an object store, with their bytes. ValueError: there is no model, or no access."""
    package = _PACKAGES[url.partition("://")[0]]
    for needed in ("runai-model-streamer", package):
        if find_spec(needed.replace("-", "_")) is None:
            raise ValueError(f"model {url}: the package {needed} is not installed here: pip install {package}")
    from runai_model_streamer import FileStreamer

    try:
        found = FileStreamer().list_files(f"{url}/", is_recursive=False)
    except Exception as error:  # the package raises all kinds
        raise ValueError(f"model {url} cannot be listed: {error}") from error
    files = {path.rpartition("/")[2]: size for path, size in found}
    if "config.json" not in files:
        raise ValueError(f"model {url} has no config.json; a Hugging Face checkpoint has one")
    return files


def pull(url: str, files: dict[str, int], folder: Path) -> None:
    """Fill a folder with the small files of a model, and with the heads of its weights.

    Raises:
        ValueError: a file cannot be had, or is not safetensors.
    """
    from runai_model_streamer import pull_files

    folder.mkdir()
    weights = {name: size for name, size in files.items() if name.endswith(".safetensors")}
    try:
        pull_files(f"{url}/", str(folder), allow_pattern=_SMALL_FILES)
        for name, size in weights.items():
            _pull_head(f"{url}/{name}", size, folder / name)
    except Exception as error:  # the packages raise all kinds
        raise ValueError(f"model {url} cannot be fetched: {type(error).__name__}: {error}") from error
    (folder / _ORIGIN).write_text(json.dumps({"url": url, "bytes": sum(weights.values())}))


def _pull_head(url: str, size: int, file: Path) -> None:
    from safetensors import safe_open

    from crossdock.workers.model.loaders.run_ai import stream

    ((_, length),) = ((number, bytes(content.numpy())) for number, content in stream([(url, 0, 8)]))
    num_bytes = 8 + struct.unpack("<Q", length)[0]
    if num_bytes > min(size, _MOST_HEAD_BYTES):
        raise ValueError(f"{url} is not safetensors")
    for _, content in stream([(url, 0, num_bytes)]):
        file.write_bytes(bytes(content.numpy()))
    with file.open("r+b") as head:
        head.truncate(size)  # a hole in the place of the bytes, for safetensors' checks of the head
        with safe_open(file, framework="pt"):
            head.truncate(num_bytes)


def sample(folder: Path) -> str:
    """Return a hash of the first 4 KiB of each tensor, which are read from the object store, and of the heads."""
    from crossdock.workers.model.loaders.file_slice import OpenFile
    from crossdock.workers.model.loaders.run_ai import stream

    files = sorted(folder.glob("*.safetensors"))
    spans = [
        (f"{origin_of(folder)}/{file.name}", start, min(_SAMPLE, stop - start))
        for file in files
        for start, stop in OpenFile(file).spans()
    ]
    found = {number: hashlib.blake2b(bytes(content.numpy())).digest() for number, content in stream(spans)}
    digest = hashlib.blake2b(digest_size=16)
    for each in (*(file.read_bytes() for file in files), *(found[number] for number in range(len(spans)))):
        digest.update(each)
    return digest.hexdigest()
