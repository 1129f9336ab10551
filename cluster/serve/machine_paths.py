"""Settings that are paths: on a Ray cluster a relative one means another folder on each machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from crossdock.cluster.config import ClusterConfig
from crossdock.workers.model.loaders.objects import is_object_url
from crossdock.workers.model.weights.checkpoint import DEFAULT_NAMES
from crossdock.workers.replica.tiers.object_tier import is_store

FORMATS = ("path", "model", "profile")
"""What a setting's `format` says of its text. `model`: a path, or a model's hub name or URL. `profile`: a file that is
read where the application is built, whose content travels."""
_WORDS = {"model.generation_config": ("auto", "vllm")}  # values of a setting that are no path


def require_absolute_paths(config: ClusterConfig) -> None:
    """Refuse relative paths, `~` too. Raises ValueError; the message has a line for each of them."""
    wrong = [
        f"{name}: {value!r} is relative, and means another place on each machine of the Ray cluster; give an absolute "
        f"path that all of them have{', or a hub name' * (form == 'model')}"
        for name, form, value in path_settings(config)
        if _is_relative(name, form, value)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def path_settings(model: BaseModel, above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the dotted name, the format and the value of each setting below `model` that is a path and is given."""
    for name, field in type(model).model_fields.items():
        where = f"{above}{name}"
        value = getattr(model, name)
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("format") in FORMATS:
            yield from ((key, str(extra["format"]), text) for key, text in _texts(where, value))
        elif isinstance(value, BaseModel):
            yield from path_settings(value, f"{where}.")
        elif isinstance(value, tuple):
            for member in value:
                if isinstance(member, BaseModel):
                    yield from path_settings(member, f"{where}.{getattr(member, 'name', '')}.")


def _texts(where: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        yield from ((f"{where}.{key}", text) for key, text in value.items())
    elif value is not None:
        yield where, value


def _is_relative(name: str, form: str, text: str) -> bool:
    """Return whether a setting's text is a path that begins at the folder, or at the home, of a process."""
    if form == "profile" or text.startswith("/") or text in _words(name) or is_store(text):
        return False
    if form == "path":
        return not any(character in text for character in "{}\n")  # a chat template in one line is no path
    if text in DEFAULT_NAMES or is_object_url(text):
        return False
    return text.startswith((".", "~")) or text.count("/") > 1 or text.endswith(".gguf") or Path(text).exists()


def _words(name: str) -> tuple[str, ...]:
    return next((words for setting, words in _WORDS.items() if name.endswith(setting)), ())
