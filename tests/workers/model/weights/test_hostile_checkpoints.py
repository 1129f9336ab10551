"""Files of a checkpoint that someone else wrote: each reader returns, or refuses the file by name, within bounds."""

import copy
import json
import re
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.serve.checkpoint_check import check_checkpoint
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.model.weights.gguf_checkpoint import pack_gguf
from crossdock.workers.model.weights.scheme import scheme_at, scheme_of
from crossdock.workers.model.weights.stored_tensors import stored_in
from crossdock.workers.model.weights.untrusted import check_gguf
from crossdock.workers.model.weights.weights import read_config
from tests.workers.model.weights.test_gguf import finish
from tests.workers.quantised import CASES, write

ROOM = 1 << 30  # bytes that a reader may take beside what the process has
INDEX = "model.safetensors.index.json"
VALUES: list[Any] = [None, -1, 0, 7, 10**9, 10**30, 1e308, True, "x" * 10_000, "../../secret.safetensors", [], {}, [[]]]
VALUES += ["re:(a+)+$", "re:[", "re:.*.*.*.*.*x", {"a": 1}, [1, "a", None]]


@contextmanager
def bounded() -> Iterator[None]:
    """Have the process fail to get much more memory than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read_all(folder: Path) -> int:
    """Call each reader of a Hugging Face directory. Returns how many refused it, each with the name of a file in it."""
    good = AutoConfig.from_pretrained(folder.with_name("good"))

    def tensors() -> None:
        scheme = scheme_at(folder)
        for name in stored_in(good, folder, scheme).tensors:
            scheme.form_of(name)

    readers: list[Callable[[], object]] = [
        lambda: check_checkpoint(folder, needs_tokenizer=False),
        lambda: read_config(folder),
        lambda: fingerprint(folder),
        tensors,
    ]
    return sum(refuses(reader, folder) for reader in readers)


def refuses(reader: Callable[[], object], path: Path) -> bool:
    refusal = ""
    try:
        with bounded():
            reader()
    except (ValueError, OSError) as error:
        refusal = str(error)
    assert not refusal or str(path) in refusal, "a refusal that names no file"
    return bool(refusal)


@pytest.fixture(scope="module", params=["awq", "bitsandbytes nf4"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A packed checkpoint with an index, and its copy, which tests change."""
    good = tmp_path_factory.mktemp("hostile") / "good"
    good.mkdir()
    write(good, CASES[request.param])
    (good / "model.safetensors").rename(good / "part.safetensors")
    stored = stored_names(good / "part.safetensors")
    (good / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(stored, "part.safetensors")}))
    return Path(shutil.copytree(good, good.with_name("hostile")))


def stored_names(file: Path) -> list[str]:
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return [name for name in json.loads(content[8 : 8 + length]) if name != "__metadata__"]


@contextmanager
def changed(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def broken(content: bytes, at: float, with_: bytes, cuts: bool) -> bytes:
    """Return bytes that are cut, or replaced, at a share of their first 8 KiB."""
    place = int(at * min(len(content), 8192))
    return content[:place] if cuts else content[:place] + with_ + content[place + len(with_) :]


damage = {
    "at": st.floats(0, 1),
    "with_": st.sampled_from([b"\xff" * 8, b"\0" * 4, b"[" * 5000]) | st.binary(min_size=1, max_size=8),
    "cuts": st.booleans(),
}


def test_whole_checkpoint_is_refused_by_no_reader(folder: Path) -> None:
    assert read_all(folder) == 0


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(["config.json", INDEX, "part.safetensors"]), **damage)
def test_bytes_cut_or_replaced_are_read_or_refused_by_name(
    folder: Path, name: str, at: float, with_: bytes, cuts: bool
) -> None:
    with changed(folder / name, broken((folder / name).read_bytes(), at, with_, cuts)):
        read_all(folder)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value of an object, the object's own last."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places_of(each, (*path, key))
    yield path


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(["config.json", "config.json", INDEX]), value=st.sampled_from(VALUES))
def test_fields_of_another_kind_or_size_are_read_or_refused_by_name(
    folder: Path, data: st.DataObject, name: str, value: Any
) -> None:
    found = json.loads((folder / name).read_text())
    place = data.draw(st.sampled_from(list(places_of(found))))
    if place:
        owner = found
        for key in place[:-1]:
            owner = owner[key]
        owner[place[-1]] = copy.deepcopy(value)
    with changed(folder / name, json.dumps(found if place else value).encode()):
        read_all(folder)


@pytest.mark.parametrize(
    ("quantisation", "reason"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "groups and blocks of 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 10**12}, "groups and blocks of 1000000000000"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": [r"re:(a)\1"]}, "not read: groupref"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": [5]}, "names of modules are texts"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:["]}, "is none"),
        ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "groups and blocks of -1"),
        ({"quant_method": "gguf", "forms": [1]}, "not as expected"),
    ],
)
def test_quantisation_with_hostile_values_is_refused(quantisation: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        scheme_of({"quantization_config": quantisation})


def test_zero_points_are_a_choice_and_no_number_of_texts() -> None:
    scheme = scheme_of({"quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": 10**9}})
    assert len(str(scheme)) < 100


@pytest.mark.parametrize(
    "pattern", [".*lm_head", r"^model\.layers\.\d+\.mlp\..*", ".*self_attn.(q|k|v)_proj$", "m[a-c]+"]
)
def test_patterns_of_published_checkpoints_are_read(pattern: str) -> None:
    quantisation = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": [f"re:{pattern}"]}
    scheme = scheme_of({"quantization_config": quantisation})
    for name in ("mac.head", "model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj"):
        assert (scheme.form_of(name) is None) is (re.match(pattern, name) is not None)


def test_layers_without_number_are_refused_before_any_is_made(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**12}
    with changed(folder / "config.json", json.dumps(config).encode()):
        assert read_all(folder) == 3, "all but the fingerprint"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "x" * 20_000,
        "5",
        "{}",
        *(
            f'{{"shape": {shape}}}'
            for shape in ("5", "[1, 2, 3]", '["a", 1]', "[-64, -64]", "[1e999, 1]", f"[{10**30}, 1]")
        ),
    ],
    ids=range(10),
)
def test_state_of_nf4_that_is_another_is_a_fault_of_that_matrix(text: str, tmp_path: Path) -> None:
    write(tmp_path, CASES["bitsandbytes nf4"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = min(key for key in tensors if "quant_state" in key)
    tensors[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    faults = stored_in(AutoConfig.from_pretrained(tmp_path), tmp_path, scheme_at(tmp_path)).faults
    assert len(faults) == 1
    assert "its state" in faults[0]


@pytest.mark.parametrize("content", ["[" * 5000, "5", "[5]", "{", '{"matryoshka_dimensions": 5}', "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "modules.json"])
def test_files_beside_the_weights_are_read_or_refused_by_name(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(content, "latin-1")
    for reader in (EmbeddingDefaults.read, GenerationDefaults.read):
        refuses(partial(reader, tmp_path), tmp_path)


# -- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file, which is read as far as its tokenizer, of which there is none."""
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(file, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_vocab_size, 16),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("general.numbers", [1, 2, 3])
    writer.add_array("general.texts", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    finish(writer)
    return file


@settings(max_examples=25, deadline=None)
@given(**damage)
def test_gguf_with_bytes_cut_or_replaced_is_read_or_refused_by_name(
    gguf: Path, tmp_path_factory: pytest.TempPathFactory, at: float, with_: bytes, cuts: bool
) -> None:
    target = tmp_path_factory.mktemp("made") / "model"
    with changed(gguf, broken(gguf.read_bytes(), at, with_, cuts)):
        refuses(lambda: pack_gguf(gguf, target), gguf)


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HUGE = 1 << 60
HEADS = {
    "tensors": struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0),
    "fields": struct.pack("<4sIQQ", b"GGUF", 3, 0, HUGE),
    "a name": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, HUGE),
    "numbers": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + field(b"a", 9, struct.pack("<IQ", 0, HUGE)),
    "more numbers than the file has": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    + field(b"a", 9, struct.pack("<IQ", 0, 10**6)),
    "texts": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + field(b"a", 9, struct.pack("<IQQ", 8, 2, HUGE)),
    "layers": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + field(b"llama.block_count", 4, struct.pack("<I", 10**9)),
    "dimensions": struct.pack("<4sIQQQ", b"GGUF", 3, 1, 0, 1) + b"t" + struct.pack("<I", 1 << 31),
    "a size": struct.pack("<4sIQQQ", b"GGUF", 3, 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, HUGE, 8, 0, 0),
}


@pytest.mark.parametrize("name", HEADS)
def test_gguf_with_a_huge_count_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(HEADS[name] + bytes(64))
    with pytest.raises(ValueError, match=r"a\.gguf"):
        check_gguf(file)
