"""Settings that are paths: all of them are known as such, and a joined cluster takes none that is relative."""

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.machine_paths import FORMATS, path_settings, require_absolute_paths

PATHS = {
    "model.path": "./model",
    "model.tokenizer": "~/tokenizer",
    "model.chat_template": "chat.jinja",
    "model.generation_config": "sampling",
    "model.lora_modules.sql": "adapters/sql",
    "engine.speculative_config.model": "../draft",
    "engine.kv_cache_files": "kv,1GiB",
    "pools.mixed.checkpoint": "models/of/mine",
    "http.api_keys_file": "keys.yaml",
    "http.batch_folder": "batches",
}
NO_PATHS = {  # what the same settings may hold that is no path of a machine, or an absolute one
    "model.path": ["org/name", "org/name@main", "smollm2", "s3://bucket/model", "/models/llama", "name"],
    "model.chat_template": ["{{ messages }}", "/templates/chat.jinja"],
    "model.generation_config": ["auto", "vllm", "/sampling"],
    "engine.kv_cache_files": ["/kv,1GiB", "s3://bucket/kv,1GiB"],
}
ABSOLUTE = ("lora_folder", "weights_folder", "allowed_local_media_path")  # are checked wherever they are given


def of(settings: dict[str, Any]) -> ClusterConfig:
    needed = {"engine.speculative_config": {"method": "draft_model", "model": "org/draft"}, "engine.enable_lora": True}
    return load(None, {**needed, "model.lora_modules": {}, **settings})


def test_each_relative_path_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(ValueError, match="is relative, and means another place on each machine") as refusal:
        require_absolute_paths(of(PATHS))
    named = {line.partition(": ")[0] for line in str(refusal.value).splitlines()}
    assert named >= PATHS.keys(), "each has a line of its own"


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_PATHS.items() for value in values])
def test_names_urls_and_absolute_paths_are_taken(name: str, value: str) -> None:
    require_absolute_paths(of({name: value}))


def test_hub_name_that_is_a_folder_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path: 'org/name' is relative, .* or a hub name"):
        require_absolute_paths(load(None, {"model.path": "org/name"}))


def test_paths_of_several_models_are_named_by_their_models() -> None:
    models = [{"name": "small", "model": {"path": "./small"}}, {"name": "big", "pools": [{"checkpoint": "~/big"}]}]
    with pytest.raises(ValueError, match=r"models\.small\.model\.path: .*\nmodels\.big\.pools\.mixed\.checkpoint: "):
        require_absolute_paths(load(None, {"models": models}))


def texts(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield each setting below `model` that may hold a text: its name, its description, whether it is a path."""
    for name, field in model.model_fields.items():
        kinds = list(_kinds(field.annotation))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from texts(kind, f"{above}{name}.")
        if str in kinds:
            extra = field.json_schema_extra
            is_path = isinstance(extra, dict) and extra.get("format") in FORMATS
            yield f"{above}{name}", field.description or "", is_path


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (typing.Union, types.UnionType, tuple, dict, typing.Annotated):
        for inner in get_args(annotation):
            yield from _kinds(inner)
    else:
        yield annotation


def test_every_setting_that_speaks_of_a_file_or_a_folder_is_known_as_a_path() -> None:
    words = ("file", "folder", "director")
    found = {
        name: is_path for name, text, is_path in texts(ClusterConfig) if any(word in text.lower() for word in words)
    }
    others = {"http.tenant_weights", "http.media_io_kwargs"}
    assert {name for name, is_path in found.items() if not is_path} <= others
    last = {name.rpartition(".")[2] for name, is_path in found.items() if is_path}
    assert {name.rpartition(".")[2] for name in PATHS if not name.endswith(".sql")} | {
        *ABSOLUTE,
        "emulated",
    } <= last | {"model"}


def test_paths_that_are_given_are_found_with_their_formats() -> None:
    config = load(None, {"model.path": "/m", "http.api_keys_file": "/k", "pools.mixed.emulated": "h100-8b"})
    found = {name: form for name, form, _ in path_settings(config)}
    assert {
        "model.path": "model",
        "http.api_keys_file": "path",
        "pools.mixed.emulated": "profile",
    }.items() <= found.items()
