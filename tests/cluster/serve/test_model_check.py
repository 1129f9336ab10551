"""Mistakes that files can show are refused before Ray starts, and no model that a replica would serve is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.numpy import save_file
from transformers import AutoConfig

from crossdock.cluster.config_file import load
from crossdock.cluster.serve import lifetime, model_check
from crossdock.cluster.serve.model_check import check_model
from crossdock.workers.model.context_length import longest_request
from tests.cluster.ports import free_port
from tests.cluster.watch.terminal import run
from tests.workers.architectures import SERVED, build

Change = Callable[[Path], list[str]]
"""Spoils a copy of a model, and returns the flags of the command."""


def flags(*given: str) -> Change:
    return lambda folder: [str(folder), *given]


def configured(**fields: Any) -> Change:
    """Change fields of config.json."""

    def change(folder: Path) -> list[str]:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return [str(folder)]

    return change


def cut_off(folder: Path) -> list[str]:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    return [str(folder)]


def without_weights(folder: Path) -> list[str]:
    (folder / "model.safetensors").unlink()
    return [str(folder)]


def without_a_part(folder: Path) -> list[str]:
    parts = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (folder / "model.safetensors").rename(folder / parts["a"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    return [str(folder)]


def adapter(module: str = "model.layers.0.self_attn.q_proj", rows: int = 256, rank: int = 4, **fields: Any) -> Change:
    """Name an adapter of one module whose matrices are [rank, 256] and [rows, rank]."""

    def change(folder: Path) -> list[str]:
        own = folder.parent / "adapter"
        own.mkdir()
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}
        (own / "adapter_config.json").write_text(json.dumps(config))
        pair = {"A": np.zeros((rank, 256), np.float32), "B": np.zeros((rows, rank), np.float32)}
        tensors = {f"base_model.model.{module}.lora_{name}.weight": value for name, value in pair.items()}
        save_file(tensors, own / "adapter_model.safetensors")
        return [str(folder), "--enable-lora", "--lora-modules", f"own={own}"]

    return change


@dataclass(frozen=True, slots=True)
class Mistake:
    """A start that must be refused, and a part of the message."""

    change: Change
    message: str


MISTAKES = {
    "no architecture": Mistake(configured(model_type="nonsense"), "model_type 'nonsense', which transformers "),
    "speech model": Mistake(configured(model_type="hubert"), "model_type 'hubert', for which transformers "),
    "layers of another type": Mistake(configured(layer_types=["minimax_m3_sparse"] * 4), "served are minimax_m3_vl"),
    "context": Mistake(flags("--max-model-len", "5000"), "max_model_len (5000) is more than the model's own 4096"),
    "weights missing": Mistake(without_weights, "has no weights in safetensors"),
    "weights cut off": Mistake(cut_off, "model.safetensors cannot be read"),
    "part missing": Mistake(without_a_part, "weight_map names model-2-of-2.safetensors, which is not there"),
    "too few layers": Mistake(configured(num_hidden_layers=6), "no tensor of layer 4"),
    "no tokenizer": Mistake(lambda folder: remove(folder, "token*"), "has no tokenizer.json"),
    "adapter of another size": Mistake(adapter(rows=512), "[512, 256], and of the model [256, 256]"),
    "adapter of a deeper model": Mistake(adapter("model.layers.7.self_attn.q_proj"), "the model has 4 layers"),
    "adapter of a high rank": Mistake(adapter(rank=64), "this server takes at most 16 (--max-lora-rank)"),
    "adapter of another kind": Mistake(adapter(use_dora=True), "use_dora"),
    "adapter that is not there": Mistake(
        flags("--enable-lora", "--lora-modules", "own=/absent"), "/absent has no file"
    ),
    "backend of GPUs": Mistake(flags("--attention-backend", "flashinfer"), "attention_backend flashinfer"),
    "GPUs": Mistake(flags("--pools", "mixed=2", "--set", "pools.mixed.num_gpus=1"), "this machine has 0"),
    "memory": Mistake(flags("--kv-cache-memory", "1MB"), "engine.kv_cache_memory (976.6KiB) is too small"),
    "pages of one pool": Mistake(
        flags("--pools", "prefill=1,decode=1", "--set", "pools.decode.engine.kv_cache_memory=1MB"),
        "pools.decode.engine.kv_cache_memory",
    ),
    "role": Mistake(flags("--pools", "prefill=1,decode=1", "--set", "pools.decode.role=wrong"), "pools.decode.role"),
}


def remove(folder: Path, pattern: str) -> list[str]:
    for file in folder.glob(pattern):
        file.unlink()
    return [str(folder)]


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where Ray would start."""
    monkeypatch.setattr(lifetime, "serve_forever", lambda *_: pytest.fail("Ray would have started"))
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_that_files_show_is_refused_before_ray_starts(
    small_model_dir: Path, tmp_path: Path, no_ray: None, mistake: Mistake
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model_dir, folder)
    result = run("serve", *mistake.change(folder), "--port", str(free_port()))
    assert result.exit_code == 2, result.output
    assert mistake.message in result.stderr
    assert not ray.is_initialized()


@pytest.mark.parametrize("name", SERVED)
def test_model_that_a_replica_serves_passes(tmp_path: Path, name: str) -> None:
    build(name, SERVED[name]).save_pretrained(tmp_path)
    check_model(load(None, {"model.path": str(tmp_path)}), tmp_path, has_gpus=False)


SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
    "new name": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
}


def refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("asked", [2048, 2049, 4096, 4097, 8192, 8193])
def test_context_is_refused_in_the_words_of_a_replica(tmp_path: Path, scaling: dict[str, Any], asked: int) -> None:
    """A replica reads the configuration by transformers."""
    fields = {"model_type": "llama", "max_position_embeddings": 2048, "rope_theta": 1e4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields | scaling))
    save_file({"model.layers.0.norm": np.zeros(1)}, tmp_path / "model.safetensors")
    settings = load(None, {"model.path": str(tmp_path), "model.max_model_len": asked})
    config = AutoConfig.from_pretrained(tmp_path)
    assert refusal(lambda: check_model(settings, tmp_path, has_gpus=False)) == refusal(
        lambda: longest_request(config, asked)
    )


@pytest.mark.parametrize("windows", [{}, {"sliding_window": 64}, {"layer_types": ["sliding_attention"] * 4}])
def test_pages_are_not_counted_where_layers_have_windows(tmp_path: Path, windows: dict[str, Any]) -> None:
    """A request then needs fewer pages than tokens; only the replica knows how many."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 256, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **windows}))
    save_file({"model.layers.0.norm": np.zeros(1)}, tmp_path / "model.safetensors")
    settings = load(None, {"model.path": str(tmp_path), "engine.kv_cache_memory": "1MiB"})
    found = refusal(lambda: check_model(settings, tmp_path, has_gpus=False))
    assert (found is None) == bool(windows)


@pytest.mark.parametrize(
    ("setting", "value", "package"),
    [
        ("engine.kv_events_config", {"publisher": "zmq"}, "pyzmq"),
        ("engine.kv_cache_files", "s3://bucket/kv,1GiB", "obstore"),
    ],
)
def test_setting_whose_package_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, package: str
) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    settings = load(None, {"model.path": str(tmp_path), setting: value})
    monkeypatch.setattr(model_check, "has_package", lambda _: True)
    check_model(settings, tmp_path, has_gpus=False)
    monkeypatch.setattr(model_check, "has_package", lambda _: False)
    found = refusal(lambda: check_model(settings, tmp_path, has_gpus=False))
    assert found is not None
    assert f"need {package}" in found.replace("needs", "need")
    assert found.startswith(setting.removeprefix("engine."))
