"""Packages that read weights: the same tensors as our own reader's, the parts of a rank alone, and clear refusals."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from crossdock.kernels.options import LoadFormat
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.model.loaders import files
from crossdock.workers.model.loaders.files import Files, LoadedFiles, open_files
from crossdock.workers.model.loaders.objects import bytes_of_weights
from crossdock.workers.model.loaders.part import TensorPart, Tensors
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights import weight_probe, weights
from crossdock.workers.model.weights.checkpoint import model_name, resolve_model
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear
from tests.workers.architectures import build
from tests.workers.model.loaders.object_store import bucket_of
from tests.workers.quantised import CASES, SIZES, write


def needs(package: str) -> pytest.MarkDecorator:
    name = package.replace("-", "_")
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs the package {package}: pip install '.[streamer]'")


LOADERS = [
    pytest.param("runai_streamer", marks=needs("runai-model-streamer")),
    pytest.param("fastsafetensors", marks=needs("fastsafetensors")),
]
ONE_OF_TWO = RankPosition(1, 2)


def read(path: Path, load_format: LoadFormat, position: RankPosition | None = None, dtype: Any = None) -> Any:
    """Read a checkpoint as a replica's rank does."""
    links: Any = None if position is None else SimpleNamespace(position=position)
    config = AutoConfig.from_pretrained(path)
    return PlainWeights().read(config, path, dtype or torch.float32, links, "cpu", load_format)[0]


def tensors_of(module: Any) -> dict[str, torch.Tensor]:
    """Return all that a module holds, packed matrices as floats."""
    found = dict(module.state_dict())
    for name, each in module.named_modules():
        if isinstance(each, PackedLinear):
            found[name] = each.packed.dequantise(torch.float32)
        elif isinstance(each, PackedExperts):
            matrices = (matrix for expert in each.experts for matrix in expert)
            found |= {f"{name} {n}": matrix.dequantise(torch.float32) for n, matrix in enumerate(matrices)}
    return found


def assert_equal(found: Any, expected: Any) -> None:
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("load_format", LOADERS)
@pytest.mark.parametrize("position", [None, ONE_OF_TWO, RankPosition(1, 1, 2)], ids=["whole", "tensor", "stage"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("phi3", {}),  # a rank takes several pieces of a tensor
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("gpt2", {}),  # transposed matrices
    ],
)
def test_loader_gives_a_rank_the_tensors_of_our_own_reader(
    name: str, options: dict[str, Any], position: RankPosition | None, load_format: LoadFormat, tmp_path: Path
) -> None:
    build(name, options).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in (torch.bfloat16, torch.float32):
        assert_equal(read(tmp_path, load_format, position, dtype), read(tmp_path, "auto", position, dtype))


@pytest.mark.parametrize("load_format", LOADERS)
@pytest.mark.parametrize("position", [None, ONE_OF_TWO])
@pytest.mark.parametrize("name", ["fp8 blocks", "compressed-tensors w4a16 zeros", "awq"])
def test_packed_matrices_of_a_loader_equal_those_of_our_own_reader(
    name: str, position: RankPosition | None, load_format: LoadFormat, tmp_path: Path
) -> None:
    write(tmp_path, CASES[name], sizes=SIZES | {"intermediate_size": 128})
    assert_equal(read(tmp_path, load_format, position), read(tmp_path, "auto", position))


def test_rank_asks_a_loader_for_its_own_rows_and_once_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[TensorPart]] = []

    def load(parts: Any, _device: str) -> Tensors:
        calls.append(parts)
        for number, part in reversed(list(enumerate(parts))):  # a loader may yield in any order
            with Files() as plain:
                whole = plain.slice_of(part.file, part.key)[...].reshape(-1)
            count = int(torch.Size(part.shape).numel())
            yield number, whole[part.first : part.first + count].reshape(part.shape)

    build("llama", {"tie_word_embeddings": False}).save_pretrained(tmp_path / "plain")
    write(tmp_path / "packed", CASES["fp8 blocks"], sizes=SIZES | {"intermediate_size": 128})
    expected = {path: read(path, "auto", ONE_OF_TWO) for path in sorted(tmp_path.iterdir())}
    monkeypatch.setattr(weights, "open_files", lambda *_: LoadedFiles(load, "cpu"))
    monkeypatch.setattr(weight_probe, "open_files", lambda *_: LoadedFiles(load, "cpu"))
    for path, module in expected.items():
        assert_equal(read(path, "auto", ONE_OF_TWO), module)
    packed, codes, packed_probe, plain, plain_probe = calls  # none is asked for alone
    assert all(len(set(parts)) == len(parts) > 1 for parts in (packed, codes, packed_probe, plain, plain_probe))
    config = AutoConfig.from_pretrained(tmp_path / "plain")
    rows = {part.key: part.shape[0] for part in plain}
    assert rows["model.embed_tokens.weight"] == config.vocab_size // 2
    assert rows["model.layers.0.mlp.gate_proj.weight"] == config.intermediate_size // 2
    assert rows["model.layers.0.mlp.down_proj.weight"] == config.hidden_size  # of which columns are cut


@pytest.mark.parametrize("load_format", LOADERS)
def test_file_that_is_cut_short_while_it_is_read_is_refused(
    load_format: LoadFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    check = weights.check_tensors

    def cut_short(*args: Any, **options: Any) -> Any:
        found = check(*args, **options)
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 5000)
        return found

    monkeypatch.setattr(weights, "check_tensors", cut_short)
    with pytest.raises(ValueError, match="weights cannot be loaded: "):
        read(tmp_path, load_format)


@pytest.mark.parametrize("load_format", ["runai_streamer", "fastsafetensors"])
def test_loader_that_is_not_installed_is_refused_with_what_to_install(
    load_format: LoadFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    monkeypatch.setattr(files, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=rf"load_format {load_format}: .* pip install 'crossdock\[streamer\]'"):
        load_model(ModelSpec(str(tmp_path), load_format=load_format))


@needs("runai-model-streamer-s3")
def test_model_in_an_object_store_is_read_by_ranges_and_named_by_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build("llama", {"tie_word_embeddings": True})
    path = tmp_path / "objects" / "models" / "tiny"
    module.save_pretrained(path)
    with bucket_of(tmp_path / "objects") as (endpoint, sent):
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_UNSIGNED": "1",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "RUNAI_STREAMER_CONCURRENCY": "1",  # each is a client, whose threads take long to start
            "CROSSDOCK_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        url = "s3://b/models/tiny/"
        folder = resolve_model(url)
        assert (folder, model_name(url)) == (resolve_model(url), "tiny")
        size = (path / "model.safetensors").stat().st_size
        assert bytes_of_weights(folder) == size
        assert (folder / "model.safetensors").stat().st_size < size / 4
        for position in (None, ONE_OF_TWO):
            sent.clear()
            assert_equal(read(folder, "auto", position), read(path, "auto", position))
            assert sum(count for key, count in sent if key.endswith(".safetensors")) < 1.5 * size
        with pytest.raises(
            ValueError, match="load_format fastsafetensors: s3://b/models/tiny is an object store; auto"
        ):
            open_files(folder, "fastsafetensors")
        before = fingerprint(folder)
        assert fingerprint(resolve_model(url)) == before
        module.model.norm.weight.data += 1.0
        module.save_pretrained(path)
        assert fingerprint(resolve_model(url)) != before, "weights have changed, and no file's size has"
        with pytest.raises(ValueError, match=r"model s3://b/models has no config\.json"):
            resolve_model("s3://b/models")
