"""Logits with adapters, in any mix of rows and by every kernel, beside PEFT's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from crossdock.kernels.backend import choose_attention
from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.layers import fusion
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.lora.adapter_files import WEIGHTS, read_adapter
from crossdock.workers.model.model import LoadedModel
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.lora_oracle import Tuned, tuned
from tests.workers.model.layers.test_fusion import FUSED, KERNELS, PROMPTS, is_fused, needs_rounding, packed_and_plain
from tests.workers.model.paged import monolithic, random_steps, through_pages

needs_triton = pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton, interpreted: pip install triton")

CONFIGS: list[dict[str, Any]] = [
    {"r": 5, "lora_alpha": 5, "dtype": torch.bfloat16},
    {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj", "down_proj"]},
    {
        "r": 3,
        "use_rslora": True,
        "target_modules": ["k_proj", "v_proj", "o_proj", "gate_proj"],
        "dtype": torch.bfloat16,
    },
]


def adapters_of(module: Any, folder: Path) -> list[Tuned]:
    return [tuned(module, folder / f"{n}", n, size=0.1, **config) for n, config in enumerate(CONFIGS)]


def with_adapters(module: Any, adapters: list[Tuned], **options: Any) -> LoadedModel:
    model = wrap_module(module, LoadOptions(max_lora_rank=16, **options))
    assert model.adapters is not None
    for one in adapters:
        model.adapters.load(one.adapter)
    return model


def mixed(model: LoadedModel, adapters: list[Tuned]) -> list[Tensor]:
    """Return the logits of all prompts in one batch: the first and the fifth have no adapter."""
    steps = random_steps([len(prompt) for prompt in PROMPTS], seed=5)
    return through_pages(model, PROMPTS, steps, ["", *(one.adapter.fingerprint for one in adapters)] * 2)


def by_peft(module: Any, adapters: list[Tuned]) -> list[Tensor]:
    models = [module, *(one.model for one in adapters)] * 2
    return [monolithic(model, prompt).float() for model, prompt in zip(models, PROMPTS, strict=False)]


@pytest.mark.parametrize(
    "name", rest_in_soak(["llama groups of 3", "qwen2 biases", "gemma2", "qwen3_moe"], "llama groups of 3", "qwen3_moe")
)
def test_logits_in_float32_equal_pefts(name: str, tmp_path: Path) -> None:
    options = FUSED.get(name) or {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    module = build(name, options if name != "gemma2" else {"query_pre_attn_scalar": 32})
    attention = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    adapters = adapters_of(module, tmp_path) if "moe" not in name else [tuned(module, tmp_path, 1, **attention)] * 3
    expected = by_peft(module, adapters)
    found = mixed(with_adapters(module, adapters), adapters)
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@needs_triton
def test_triton_computes_logits_of_peft(tmp_path: Path) -> None:
    module = build("gemma2", {"query_pre_attn_scalar": 32, "num_hidden_layers": 2})
    adapters = adapters_of(module, tmp_path)
    expected = by_peft(module, adapters)
    model = with_adapters(module, adapters)
    assert model.adapters is not None
    model.adapters.in_triton = True
    whole = [(number, 0, len(prompt)) for number, prompt in enumerate(PROMPTS)]
    names = ["", *(one.adapter.fingerprint for one in adapters)] * 2
    for ours, theirs in zip(through_pages(model, PROMPTS, [whole], names), expected, strict=False):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@needs_triton
def test_triton_layers_add_what_adapters_change_in_joined_projections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values are one product, and so are gates and ups: each is two launches for adapters, and so are
    the other two projections. Not each adapter changes all of them.
    """
    from crossdock.kernels.gpu.triton_low_rank import LowRankRows  # Triton is not installed everywhere

    module = build("llama", {**FUSED["llama groups of 3"], "num_hidden_layers": 1})
    adapters = adapters_of(module, tmp_path)
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[1][:9], PROMPTS[2][:7]]  # few rows: the interpreter computes them
    models = [module, *(one.model for one in adapters)]
    expected = [monolithic(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    model = with_adapters(module, adapters, attention=choose_attention("triton", torch.device("cpu")))
    assert model.kernels == "triton steps"
    assert model.adapters is not None
    assert model.adapters.in_triton
    whole = [(number, 0, len(prompt)) for number, prompt in enumerate(prompts)]
    names = ["", *(one.adapter.fingerprint for one in adapters)]
    num_added, add = 0, LowRankRows.add

    def counted(self: LowRankRows, *args: Any) -> None:
        nonlocal num_added
        num_added += 1
        add(self, *args)

    monkeypatch.setattr(LowRankRows, "add", counted)
    for ours, theirs in zip(through_pages(model, prompts, [whole], names), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    assert num_added == 4 * model.num_hidden_layers


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", rest_in_soak(["llama groups of 3", "qwen2 biases"], "qwen2 biases"))
def test_logits_in_bfloat16_are_as_exact_as_pefts(name: str, kernel: Any, tmp_path: Path) -> None:
    """The same weights in float32 show how much of a difference is rounding."""
    module = build(name, FUSED[name])
    adapters = adapters_of(module, tmp_path)
    exact, plain = by_peft(module, adapters), monolithic(module, PROMPTS[1])
    rounded = [one._replace(model=copy.deepcopy(one.model).to(torch.bfloat16)) for one in adapters]
    theirs = by_peft(copy.deepcopy(module).to(torch.bfloat16), rounded)
    model = with_adapters(module.to(torch.bfloat16), adapters, cpu_kernels=kernel)
    assert is_fused(model)
    for ours, other, true in zip(mixed(model, adapters), theirs, exact, strict=False):
        assert (ours - true).norm() <= 1.5 * (other - true).norm()
    assert (exact[1] - plain).norm() > 10 * (theirs[1] - exact[1]).norm(), "the adapter changes more than rounding does"


@pytest.mark.parametrize("kernel", ["native", "torch", pytest.param("int8", marks=needs_rounding)])
def test_packed_weights_take_adapters(kernel: Any, tmp_path: Path) -> None:
    module, oracle = packed_and_plain("int4", torch.bfloat16)
    adapters = adapters_of(oracle, tmp_path)
    exact = by_peft(oracle, adapters)
    rounded = [one._replace(model=copy.deepcopy(one.model).to(torch.bfloat16)) for one in adapters]
    theirs = by_peft(copy.deepcopy(oracle).to(torch.bfloat16), rounded)
    model = with_adapters(module, adapters, cpu_kernels=kernel)
    assert is_fused(model)
    for ours, other, true in zip(mixed(model, adapters), theirs, exact, strict=False):
        assert (ours - true).norm() <= (5 if kernel == "int8" else 1.5) * (other - true).norm()


def test_rows_do_not_depend_on_the_adapters_of_others(tmp_path: Path) -> None:
    module = build("llama", FUSED["llama groups of 3"])
    adapters = adapters_of(module, tmp_path)
    model = with_adapters(module.to(torch.bfloat16), adapters)
    whole = [[(number, 0, len(prompt))] for number, prompt in enumerate(PROMPTS)]
    names = ["", *(one.adapter.fingerprint for one in adapters)] * 2
    alone = through_pages(model, PROMPTS, whole, names)
    together = through_pages(model, PROMPTS, [[part for [part] in whole]], names)
    for one, other in zip(alone, together, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm(), (
            "products of other shapes round otherwise, by less than this"
        )


def test_adapter_is_compared_with_the_model_before_its_numbers_are_read(tmp_path: Path) -> None:
    """All shapes of a misfit, each beside an adapter that fits."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    attention = {"target_modules": ["q_proj", "o_proj"]}
    cases = [
        ({}, {"num_hidden_layers": 5}, {}, r"model\.layers\.\d\.\S+ is no linear of this model"),
        ({}, {"hidden_size": 96}, {}, "this model's has 64 and 48|this model's has 48 and 64"),
        ({}, {}, {"r": 17}, "r of .* is 17; this server takes at most 16"),
        ({"moe": experts}, {}, attention | {"target_modules": ["gate_proj"]}, r"gate_proj is no linear of this model"),
    ]
    for number, (ours, theirs, config, reason) in enumerate(cases):
        served = build("qwen3_moe" if ours else "llama", ours.get("moe", {}))
        adapters = with_adapters(served, []).adapters
        assert adapters is not None
        fits = tuned(
            build("qwen3_moe" if ours else "llama", ours.get("moe", {})), tmp_path / f"{number}", 1, **attention
        )
        adapters.check(read_adapter(Path(fits.adapter.path), 16))
        other = tuned(build("llama", theirs), tmp_path / f"other {number}", 1, **config)
        with pytest.raises(ValueError, match=reason):
            adapters.check(read_adapter(Path(other.adapter.path), 16))
        file = tmp_path / f"{number}" / WEIGHTS
        prefix = "base_model.model.model."
        renamed = {name.replace(prefix, f"{prefix}language_model."): each for name, each in load_file(file).items()}
        save_file(renamed, file)
        with pytest.raises(ValueError, match=r"model\.language_model\.\S+ is no linear of this model"):
            adapters.check(read_adapter(Path(fits.adapter.path), 16))


def test_module_that_the_model_lacks_is_refused_by_name(tmp_path: Path) -> None:
    module = build("llama", {})
    one = tuned(build("llama", {"num_hidden_layers": 5}), tmp_path, 1)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.\S+ is no linear of this model"):
        with_adapters(copy.deepcopy(module), [one])
    other = tuned(build("llama", {"hidden_size": 96}), tmp_path / "other", 1)
    with pytest.raises(ValueError, match="this model's has 64 and 48"):
        with_adapters(module, [other])


@pytest.mark.parametrize("is_even", [True, False])
def test_matrices_of_a_file_are_loaded_wherever_they_lie(is_even: bool, tmp_path: Path) -> None:
    """In the uneven file, layer 1 has a module that others lack: layers are not equally far apart."""
    module = build("llama", {"num_hidden_layers": 4})
    targets = r".*\.(q|k)_proj" if is_even else r".*\.q_proj|.*\.1\.mlp\.down_proj"
    one = tuned(module, tmp_path / "one", 1, target_modules=targets)
    model, stored = with_adapters(module, [one]), load_file(tmp_path / "one" / WEIGHTS)
    assert model.adapters is not None
    pairs = model.adapters.loaded[one.adapter.fingerprint].pairs
    assert len(pairs) == (8 if is_even else 5)
    assert sum(a.numel() + b.numel() for a, b in pairs.values()) == one.adapter.num_weights
    for name, (a, b) in pairs.items():
        of_a, of_b = (stored[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        assert torch.equal(a, of_a)
        assert torch.equal(b, of_b * 1.5)


def test_matrices_of_a_bfloat16_file_stay_as_they_are_where_the_scale_rounds_nothing(tmp_path: Path) -> None:
    """Else they have the type of the model, here float32: an odd scale is in there, or layers are not fused."""
    for name, expected in (("llama groups of 3", [torch.bfloat16, torch.float32]), ("gemma2", [torch.float32] * 2)):
        module = build(name, FUSED.get(name) or {"query_pre_attn_scalar": 32})
        folders = {alpha: tmp_path / f"{name} {alpha}" for alpha in (8, 6)}
        adapters = [
            tuned(module, folder, 1, dtype=torch.bfloat16, lora_alpha=alpha) for alpha, folder in folders.items()
        ]
        loaded = with_adapters(module, adapters).adapters
        assert loaded is not None
        for (alpha, folder), one, dtype in zip(folders.items(), adapters, expected, strict=True):
            pairs, stored = loaded.loaded[one.adapter.fingerprint].pairs, load_file(folder / WEIGHTS)
            for path, (a, b) in pairs.items():
                assert a.dtype == b.dtype == dtype
                assert torch.equal(a.float(), stored[f"base_model.model.{path}.lora_A.weight"].float())
                assert torch.equal(b.float(), stored[f"base_model.model.{path}.lora_B.weight"].float() * alpha / 4)


def test_steps_find_a_loaded_adapter_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = build("llama groups of 3", FUSED["llama groups of 3"])
    adapters = adapters_of(module, tmp_path)
    model = with_adapters(module, adapters)
    assert is_fused(model)
    monkeypatch.setattr(fusion, "StackDeltas", None)
    mixed(model, adapters)
