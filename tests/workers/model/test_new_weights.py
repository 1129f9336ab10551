"""Weights that are replaced: afterwards the model computes what a fresh load of the same weights computes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from crossdock.kernels.cpu.linear import rounds_rows
from crossdock.workers.model.checksums import checksum, checksums_in
from crossdock.workers.model.layers.fused_projections import join_projections
from crossdock.workers.model.layers.fusion import fused_tensors
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.memory.host_memory import bytes_of
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.new_weights import NewWeights, held_checksums
from crossdock.workers.replica.engine.weight_update import WeightUpdate
from crossdock.workers.schedule.request.submission import Submission
from tests.workers.architectures import SERVED, build
from tests.workers.replica.engines import engine_on, greedy, run

PROMPT = [3 + i * 7 % 100 for i in range(40)]
FUSED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
TIED = FUSED | {"tie_word_embeddings": True}


def saved(folder: Path, seed: int, name: str = "llama", **settings: Any) -> Path:
    """Save a random model, whose weights differ by seed."""
    module = build(name, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    module.save_pretrained(folder)
    return folder


def logprobs(model: LoadedModel) -> list[float]:
    """Return the log-probabilities of the tokens of a prompt."""
    engine = engine_on(model)
    engine.add(Submission("a", PROMPT, greedy(1, prompt_logprobs=0)))
    [delta] = run(engine)["a"]
    found = [each.logprob for each in delta.prompt_logprobs or () if each is not None]
    assert len(found) == len(PROMPT) - 1
    return found


def spec(path: Path, **settings: Any) -> ModelSpec:
    return ModelSpec(str(path), **({"dtype": "float32"} | settings))


CASES: list[Any] = [
    ("llama", {}, {}),
    ("llama", FUSED, {"dtype": "bfloat16"}),
    ("llama", TIED, {"dtype": "bfloat16"}),
    ("llama", TIED, {"dtype": "bfloat16", "quantization": "int8"}),
    ("llama", FUSED, {"dtype": "bfloat16", "cpu_kernels": "torch"}),
    ("qwen2", FUSED, {"dtype": "bfloat16"}),
    ("gemma2", {}, {}),
    pytest.param("qwen3_moe", {}, {}, marks=pytest.mark.soak),
    pytest.param("deepseek_v3", SERVED["deepseek_v3"], {}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("name", "settings", "use"), CASES)
def test_replaced_weights_compute_what_a_fresh_load_of_them_computes(
    tmp_path: Path, name: str, settings: dict[str, Any], use: dict[str, Any]
) -> None:
    if use.get("quantization") and not rounds_rows():
        pytest.skip("needs a CPU with AVX512-VNNI, or with AVX2 alone")
    old, new = (saved(tmp_path / f"{seed}", seed, name, **settings) for seed in (1, 2))
    model, fresh = load_model(spec(old, **use)), load_model(spec(new, **use))
    before, wanted = logprobs(model), logprobs(fresh)
    assert before != pytest.approx(wanted, abs=0.05)
    weights = NewWeights(model)
    weights.read(new)
    assert logprobs(model) == before, "what is read changes nothing yet"
    weights.put()
    assert logprobs(model) == pytest.approx(wanted, abs=1e-3)
    assert model.kernels == fresh.kernels
    assert held_checksums(model.module) == held_checksums(fresh.module), "all memory that steps read is a fresh load's"
    assert weights.check() == checksums_in(new)
    tensors = dict(load_model(spec(old)).module.state_dict()) if not model.kernels else None
    if tensors is not None:
        weights.read_tensors(tensors, {})
        weights.put()
        assert logprobs(model) == pytest.approx(before, abs=1e-3)


def test_joined_projections_compute_with_replaced_weights_and_biases(tmp_path: Path) -> None:
    """As GPUs have them: the weights that steps read are views of larger ones."""
    new = saved(tmp_path / "new", 2, "qwen2")
    model = wrap_module(build("qwen2", {}))
    join_projections(model.module)
    weights = NewWeights(model)
    weights.read(new)
    weights.put()
    assert logprobs(model) == pytest.approx(logprobs(load_model(spec(new))), abs=1e-4)


def test_received_tensors_are_put_in_place_without_another_copy(tmp_path: Path) -> None:
    """The layers of this model are not fused: nothing is packed again."""
    options = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "vocab_size": 8200}
    model = load_model(spec(saved(tmp_path, 1, num_hidden_layers=3, **options)))
    assert not model.kernels
    weights = NewWeights(model)
    received = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    size = sum(tensor.nbytes for tensor in received.values())
    status = Path("/proc/self/status")
    peak = 0
    for _ in range(2):  # libraries take memory once
        for tensor in received.values():
            tensor *= 1.5
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = bytes_of(status, "VmRSS")
        weights.read_tensors(received, {})
        weights.put()
        peak = bytes_of(status, "VmHWM") - before
        assert weights.check() == {name: checksum(tensor) for name, tensor in received.items()}
    assert size > 50e6
    assert peak < 0.3 * size, "but for one tensor at a time"


def test_arrays_that_are_pushed_replace_the_weights_of_one_rank(tmp_path: Path) -> None:
    old, new = (saved(tmp_path / f"{seed}", seed, **FUSED) for seed in (1, 2))
    model = load_model(spec(old))
    update = WeightUpdate(NewWeights(model), None)
    tensors = load_file(new / "model.safetensors")
    arrays = {
        name: ("float32", tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy(), checksum(tensor))
        for name, tensor in tensors.items()
    }
    update.read_arrays(arrays)
    update.put()
    assert logprobs(model) == pytest.approx(logprobs(load_model(spec(new))), abs=1e-4)
    assert update.checksums == checksums_in(new)
    name = "model.norm.weight"
    with pytest.raises(ValueError, match=rf"other bytes were received than were sent of {name}$"):
        update.read_arrays(arrays | {name: (*arrays[name][:3], "0")})
    with pytest.raises(ValueError, match=r"is of torch\.complex64, which a checkpoint does not have"):
        update.read_arrays(arrays | {name: ("complex64", (32,), *arrays[name][2:])})
    assert not update.is_read


def test_tensor_with_one_wrong_bit_is_refused_by_name(tmp_path: Path) -> None:
    old, new = (saved(tmp_path / f"{seed}", seed, **FUSED) for seed in (1, 2))
    model, sent = load_model(spec(old)), checksums_in(new)
    before, weights = logprobs(model), NewWeights(model)
    with pytest.raises(ValueError, match="no update has replaced"):
        weights.check()
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(new / "model.safetensors")
    tensors[name].view(torch.int32)[3, 5] ^= 1
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"other bytes were received than were sent of {name}$"):
        weights.read(new, sent)
    assert not weights.is_read
    assert logprobs(model) == before
    with pytest.raises(ValueError, match=r"sent of absent\.weight$"):
        weights.read(new, {"absent.weight": sent[name]})
    weights.read(new, {name: checksum(tensors[name])})
    weights.put()
    assert weights.check() == sent | {name: checksum(tensors[name])}


@pytest.mark.parametrize("use", [{}, {"dtype": "bfloat16"}])
def test_memory_that_changes_after_an_update_is_found(tmp_path: Path, use: dict[str, Any]) -> None:
    old, new = (saved(tmp_path / f"{seed}", seed, **FUSED) for seed in (1, 2))
    model = load_model(spec(old, **use))
    weights = NewWeights(model)
    weights.read(new)
    weights.put()
    assert weights.check() == checksums_in(new)
    for name, tensor in (dict(model.module.named_parameters()) | fused_tensors(model.module)).items():
        if not tensor.is_mkldnn:
            number = tensor.data.view(-1).view(torch.int16)[-1:]
            number ^= 1
            with pytest.raises(ValueError, match=rf"since the update, of .*{re.escape(name)}"):
                weights.check()
            number ^= 1
    weights.check()


def test_float32_weights_that_kernels_would_round_are_refused(tmp_path: Path) -> None:
    """A float32 model whose weights bfloat16 holds is computed from these; a trainer's next ones are not so."""
    old = saved(tmp_path / "old", 1, **FUSED)
    module = AutoModelForCausalLM.from_pretrained(old)
    module.bfloat16().float().save_pretrained(old)
    model, new = load_model(spec(old, cpu_kernels="native")), saved(tmp_path / "new", 2, **FUSED)
    before, weights = logprobs(model), NewWeights(model)
    with pytest.raises(ValueError, match="start with --cpu-kernels torch"):
        weights.read(new)
    assert logprobs(model) == before
    exact = load_model(spec(old, cpu_kernels="torch"))
    weights = NewWeights(exact)
    weights.read(new)
    weights.put()
    assert logprobs(exact) == pytest.approx(logprobs(load_model(spec(new, cpu_kernels="torch"))), abs=1e-5)


def test_files_of_another_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = load_model(spec(saved(tmp_path / "old", 1)))
    before, weights = logprobs(model), NewWeights(model)
    with pytest.raises(ValueError, match="of another shape"):
        weights.read(saved(tmp_path / "wide", 2, intermediate_size=80))
    deep = saved(tmp_path / "deep", 2, num_hidden_layers=3)
    with pytest.raises(ValueError, match="missing"):
        weights.read(deep)
    with pytest.raises(AssertionError, match="no weights have been read"):
        weights.put()
    assert logprobs(model) == before
