"""The name of a checkpoint is equal for copies, and differs where the weights or what is computed from them does."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.ranks.pool_layout import held_layers, pool_spec
from tests.sweeps import rest_in_soak
from tests.workers.model.test_longrope import ORIGINAL, longrope

MIB = 1 << 20


def tensors() -> dict[str, Tensor]:
    """Return a model's tensors, 24 MiB of them: some span several samples, and some are smaller than one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"layer.{n}.weight": (1 + n % 3, 512, 1024) for n in range(12)} | {
        f"norm.{n}": (n + 1,) for n in range(9)
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def save(path: Path, weights: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    names = sorted(weights)
    for number, part in enumerate((names[:10], names[10:])):
        save_file({name: weights[name] for name in part}, path / f"model-{number}.safetensors")
    return path


def test_copies_have_the_same_name(tmp_path: Path) -> None:
    one = save(tmp_path / "one", tensors())
    two = shutil.copytree(one, tmp_path / "elsewhere" / "two")
    (two / "README.md").write_text("not part of the model")
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.parametrize("name", rest_in_soak(tensors(), "layer.0.weight", "layer.11.weight", "norm.0"))
def test_checkpoint_that_differs_in_one_tensor_has_another_name(tmp_path: Path, name: str) -> None:
    weights = tensors()
    one = save(tmp_path / "one", weights)
    weights[name] = weights[name] * 1.01
    assert fingerprint(save(tmp_path / "two", weights)) != fingerprint(one)


def test_checkpoint_that_differs_in_one_mib_of_a_tensor_has_another_name(tmp_path: Path) -> None:
    weights = tensors()
    one = fingerprint(save(tmp_path / "one", weights))
    name = "layer.2.weight"
    flat = weights[name].view(-1)
    assert flat.nbytes == 3 * MIB
    for start in range(0, flat.nbytes - MIB + 1, MIB // 4):
        changed = flat.clone()
        changed[start // 2 : (start + MIB) // 2] += 1
        other = save(tmp_path / "two", weights | {name: changed.view_as(weights[name])})
        assert fingerprint(other) != one, start


def test_tensors_of_other_names_shapes_or_types_have_another_name(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8)}
    variants = [
        weights,
        {"a": torch.zeros(4, 8), "c": torch.zeros(4, 8)},
        {"a": torch.zeros(8, 4), "b": torch.zeros(4, 8)},
        {"a": torch.zeros(4, 8, dtype=torch.int32), "b": torch.zeros(4, 8)},
    ]
    names = {fingerprint(save(tmp_path / str(number), each)) for number, each in enumerate(variants)}
    assert len(names) == len(variants)


@pytest.mark.parametrize(
    "file", ["config.json", "adapter_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json"]
)
def test_other_configuration_has_another_name(tmp_path: Path, file: str) -> None:
    model = save(tmp_path, {"a": torch.zeros(4)})
    before = fingerprint(model)
    (model / file).write_text('{"bits": 4}')
    assert fingerprint(model) != before


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.gguf", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 5000, (200).to_bytes(8, "little") + b"{" * 5000])
def test_weights_in_other_formats_are_sampled_throughout(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(content + bytes(3 * MIB))
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    for at in range(len(content), 3 * MIB, MIB):
        changed = bytearray(content + bytes(3 * MIB))
        changed[at : at + MIB] = b"y" * MIB
        (tmp_path / file).write_bytes(changed)
        assert fingerprint(tmp_path) != before


def test_bytes_read_are_a_small_share(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    read = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal num_read
        data = read(descriptor, length, offset)
        num_read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    fingerprint(model_dir)
    size = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    assert size / 1000 < num_read < size / 100


def test_same_weights_with_other_factors_of_rope_exchange_no_pages() -> None:
    def compatibility(max_model_len: int) -> str:
        model = wrap_module(longrope("phi3"), LoadOptions(max_model_len))
        return pool_spec([held_layers(model)], 0, model, "m", 16, 8).compatibility

    assert compatibility(ORIGINAL) == compatibility(ORIGINAL - 8)
    assert compatibility(ORIGINAL + 1) == compatibility(256)
    assert compatibility(ORIGINAL) != compatibility(256)
