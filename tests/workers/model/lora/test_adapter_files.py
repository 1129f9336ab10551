"""Files of adapters are looked at before a library reads them: what is not served is refused by its name."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from crossdock.workers.model.lora.adapter_files import read_adapter
from tests.workers.architectures import build
from tests.workers.lora_oracle import peft, tuned


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "one"
    tuned(build("llama", {}), folder, 1)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_scales_and_ranks_are_those_of_peft(tmp_path: Path) -> None:
    config = {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        "alpha_pattern": {r".*\.0\.self_attn\.v_proj": 20, "q_proj": 3},
        "use_rslora": True,
    }
    theirs = tuned(build("llama", {}), tmp_path, 1, **config).model
    ours = read_adapter(tmp_path, 64)
    layers = {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in theirs.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }
    assert {name: (a.rows, ours.scales[name]) for name, (a, _) in ours.factors.items()} == layers


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_parameters": ["experts.up"]}, "target_parameters is"),
        ({"something_new": 3}, "something_new is 3"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "1"}, "lora_alpha is '1'"),
        ({"r": 5}, "its r is 5"),
        ({"r": 65}, "this server takes at most 64"),
        ({"target_modules": ["q_proj"]}, "which is none of target_modules"),
        ({"target_modules": "((a+)+)+b"}, "which is none of target_modules"),
        ({"target_modules": "(a"}, "the pattern (a is none"),
        ({"rank_pattern": {r"(q)\1": 4}}, "has a part that is not read: groupref"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern has -1"),
        ({"target_modules": 7}, "target_modules is 7"),
    ],
)
def test_field_that_is_not_served_is_refused_by_name(folder: Path, fields: dict[str, Any], reason: str) -> None:
    change(folder, **fields)
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_adapter(folder, 64)


def test_tensor_that_is_not_served_is_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"base_model.model.lm_head.lora_embedding_A": torch.zeros(2, 2)}))
    with pytest.raises(ValueError, match=r"has the tensor base_model.model.lm_head.lora_embedding_A"):
        read_adapter(folder, 64)


def test_module_with_one_tensor_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"))
    with pytest.raises(ValueError, match=r"one of the two tensors of model.layers.0.self_attn.q_proj"):
        read_adapter(folder, 64)


def test_files_of_strangers_end_in_a_value_error(folder: Path) -> None:
    """Each length and offset of the header may be wrong: nothing is read beyond the file, and no other error comes."""
    weights = folder / "adapter_model.safetensors"
    good = weights.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    entries: list[Any] = [
        None,
        [],
        {"dtype": "F32"},
        {"dtype": "I64", "shape": [4, 48], "data_offsets": [0, 1536]},
        {"dtype": ["F32"], "shape": [4, 48], "data_offsets": [0, 768]},
        {"dtype": "F32", "shape": [4, 48], "data_offsets": [0, 769]},
        {"dtype": "F32", "shape": [4, 1 << 60], "data_offsets": [0, 1 << 64]},
        {"dtype": "F32", "shape": [-4, -48], "data_offsets": [0, 768]},
        {"dtype": "F32", "shape": [4, 48, 1], "data_offsets": [0, 768]},
        {"dtype": "F32", "shape": [True, 192], "data_offsets": [0, 768]},
        {"dtype": "F32", "shape": [4, 48], "data_offsets": [len(good), len(good) + 768]},
    ]
    heads = [json.dumps(header | {name: entry}).encode() for entry in entries]
    files = [struct.pack("<Q", len(head)) + head + good[8 + length :] for head in heads]
    files += [
        b"",
        good[:7],
        good[:40],
        struct.pack("<Q", 1 << 62) + good[8:],
        struct.pack("<Q", 4) + b"[[]]",
        b"\0" * 99,
    ]
    for file in files:
        weights.write_bytes(file)
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
            read_adapter(folder, 64)


def test_fingerprint_follows_every_byte(folder: Path) -> None:

    def fingerprint() -> str:
        return read_adapter(folder, 64).adapter("one").fingerprint

    first = fingerprint()
    change(folder, lora_alpha=7)
    second = fingerprint()
    rewrite(folder, lambda tensors: next(iter(tensors.values())).view(-1)[0].add_(1))
    assert len({first, second, fingerprint()}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_adapter_whose_numbers_are_not_finite_is_refused_by_module(
    folder: Path, dtype: torch.dtype, number: float
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
            tensors[name].view(-1)[0] = torch.finfo(dtype).max
        tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"][3, 1] = broken

    broken = 1.0
    rewrite(folder, edit)
    read_adapter(folder, 64).adapter("one")
    broken = number
    rewrite(folder, edit)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj has NaN or infinity"):
        read_adapter(folder, 64).adapter("one")


def test_file_that_is_a_hole_is_refused_before_it_is_read(folder: Path) -> None:
    """A matrix of 2^29 columns, of which the disk has no block."""
    columns = 1 << 29
    name, size = "base_model.model.model.layers.0.self_attn.q_proj.lora_", 4 * columns
    shapes = {"A": ([1, columns], 0, size), "B": ([8, 1], size, size + 32)}
    entries = {
        f"{name}{matrix}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        for matrix, (shape, start, end) in shapes.items()
    }
    head = json.dumps(entries).encode()
    change(folder, r=1)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(weights, 8 + len(head) + size + 32)
    with pytest.raises(ValueError, match="536870912 rows or columns; at most 262144 are read"):
        read_adapter(folder, 64)


def test_file_that_grows_between_its_header_and_its_numbers_is_refused(folder: Path) -> None:
    files = read_adapter(folder, 64)
    os.truncate(folder / "adapter_model.safetensors", 1 << 40)
    with pytest.raises(ValueError, match="has changed while it was read"):
        files.adapter("one")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_file_that_is_a_link_out_of_the_folder_is_refused(folder: Path, name: str, saved: Path) -> None:
    read_adapter(folder, 64)
    (folder / name).unlink()
    (folder / name).symlink_to(saved / name)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is a link out of its folder"):
        read_adapter(folder, 64)


def test_links_of_a_hub_cache_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    repository = tmp_path_factory.mktemp("hub") / "models--someone--adapter"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (folder / name).rename(repository / "blobs" / f"{number}")
        (snapshot / name).symlink_to(Path("..", "..", "blobs", f"{number}"))
    read_adapter(snapshot, 64).adapter("one")
    (snapshot / "adapter_config.json").unlink()
    (snapshot / "adapter_config.json").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        read_adapter(snapshot, 64)
