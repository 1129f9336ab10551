"""Fused layers give what transformers' own layers give, and rows that do not depend on the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.backend import choose_attention
from crossdock.kernels.cpu import decoder, linear, packed_linear
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.choice import KernelChoice
from crossdock.kernels.cpu.linear import interleave
from crossdock.kernels.options import CpuKernels
from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.layers import fusion
from crossdock.workers.model.layers.fusion import FusedLayers, PackedEmbedding
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.packed_layers import PackedLinear, put_linear
from crossdock.workers.replica.config import EngineConfig
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts, through_pages

has_own = "avx512_bf16" in cpu_flags()
needs_native = pytest.mark.skipif(not has_own, reason="needs a CPU with AVX512-BF16")
needs_onednn = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU on which oneDNN has bfloat16"
)
KERNELS = [pytest.param("native", marks=needs_native), pytest.param("onednn", marks=needs_onednn), "torch"]

PROMPTS = random_prompts(5, 23, 100, 57, 8, 200, seed=3)
WIDE = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
FUSED: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "llama groups of 3": {
        **WIDE,
        "hidden_size": 144,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "llama one group": {**WIDE, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 96},
    "qwen2 biases": WIDE,
    "qwen3 norms": {**WIDE, "head_dim": 128},
    "mistral window": {**WIDE, "sliding_window": 16},
}
NOT_FUSED: dict[str, dict[str, Any]] = {
    "llama head_dim": {},  # 12 is no multiple of 32
    "granite": {**WIDE, "attention_multiplier": 0.5, "residual_multiplier": 0.3},  # same parts, other arithmetic
    "llama gelu": {**WIDE, "hidden_act": "gelu"},
    "gemma": WIDE,  # other norms
    "gemma2": {**WIDE, "query_pre_attn_scalar": 32},
    "phi3": WIDE,
    "olmo2": WIDE,
    "qwen3_moe": {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def bf16(name: str, options: dict[str, Any]) -> Any:
    return build(name, options).to(torch.bfloat16)


def is_fused(model: LoadedModel) -> bool:
    layers: Any = model.module.model.layers
    return isinstance(layers[0], FusedLayers)


def one_by_one(model: LoadedModel) -> list[Tensor]:
    """Return every token's logits, each prompt computed alone and in one chunk."""
    return [through_pages(model, [prompt], [[(0, 0, len(prompt))]])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", rest_in_soak(FUSED, "llama groups of 3", "qwen3 norms"))
def test_fused_logits_equal_transformers(name: str, kernel: CpuKernels) -> None:
    module = bf16(name, FUSED[name])
    exact = build(name, FUSED[name])  # the same weights in float32 show how much of a difference is rounding
    expected = [monolithic(module, prompt).float() for prompt in PROMPTS]
    truth = [monolithic(exact, prompt) for prompt in PROMPTS]
    model = wrap_module(module, LoadOptions(cpu_kernels=kernel))
    assert is_fused(model)
    assert model.kernels == kernel
    got = in_random_steps(model, PROMPTS, seed=5)
    for ours, theirs, true in zip(got, expected, truth, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - true).norm() <= 1.5 * (theirs - true).norm()  # no less exact than transformers in bfloat16


@pytest.mark.parametrize("kernel", ["onednn", "torch"])
@pytest.mark.parametrize("name", rest_in_soak(FUSED, "llama groups of 3", "qwen3 norms"))
def test_fused_float32_logits_equal_transformers(name: str, kernel: CpuKernels) -> None:
    module = build(name, FUSED[name])
    expected = [monolithic(module, prompt) for prompt in PROMPTS]
    model = wrap_module(module, LoadOptions(cpu_kernels=kernel))
    assert is_fused(model)
    got = in_random_steps(model, PROMPTS, seed=6)
    assert_near(got, expected, 1e-4)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@needs_native
def test_kernel_changes_with_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows by our products and many by oneDNN's, over one KV pool."""
    monkeypatch.setattr(fusion, "of_plain_weights", lambda _: KernelChoice("native", "onednn", 8))
    module = bf16("llama", WIDE)
    expected = [monolithic(module, prompt).float() for prompt in PROMPTS]
    model = wrap_module(module)
    assert model.kernels == "native below 8 rows, onednn from there"
    got = in_random_steps(model, PROMPTS, seed=7)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.parametrize("kernel", KERNELS)
def test_fused_model_has_one_copy_of_its_weights(kernel: CpuKernels, tmp_path: Path) -> None:
    """The mapped file would stay in memory next to the packed weights."""
    bf16("llama", WIDE).save_pretrained(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), dtype="bfloat16", cpu_kernels=kernel))
    assert is_fused(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@needs_native
def test_weight_that_embedding_and_head_share_is_in_memory_once() -> None:
    tied = wrap_module(bf16("llama", {**WIDE, "tie_word_embeddings": True}), LoadOptions(cpu_kernels="native"))
    module: Any = tied.module
    assert is_fused(tied)
    assert isinstance(module.model.embed_tokens, PackedEmbedding)
    assert max(parameter.numel() for parameter in module.parameters()) == WIDE["hidden_size"], "norms alone are left"
    untied: Any = wrap_module(
        bf16("llama", {**WIDE, "tie_word_embeddings": False}), LoadOptions(cpu_kernels="native")
    ).module
    assert isinstance(untied.model.embed_tokens, torch.nn.Embedding)


def test_kernel_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_kernels native: it keeps weights in bfloat16, which does not hold"):
        wrap_module(build("llama", WIDE), LoadOptions(cpu_kernels="native"))


@pytest.mark.parametrize("name", NOT_FUSED)
def test_layers_of_other_shapes_or_arithmetic_are_not_fused(name: str) -> None:
    assert not is_fused(wrap_module(bf16(name, NOT_FUSED[name])))


def test_float32_weights_wait_in_bfloat16_and_come_back_where_layers_are_not_fused_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, refused = bf16("llama", WIDE).float(), bf16("granite", NOT_FUSED["granite"]).float()
    copied: Any = list(fused.model.layers)
    joined: list[torch.dtype] = []
    monkeypatch.setattr(decoder, "interleave", lambda *parts: [joined.append(parts[0].dtype), interleave(*parts)][1])
    assert is_fused(wrap_module(fused, LoadOptions(cpu_kernels="native")))
    assert set(joined) == {torch.bfloat16}, "copies of a layer take half of the memory"
    assert copied[0].mlp.up_proj.weight.dtype is torch.bfloat16
    before = {name: each.clone() for name, each in refused.state_dict().items()}
    assert not is_fused(wrap_module(refused, LoadOptions(cpu_kernels="native")))
    after = refused.state_dict()
    assert all(after[name].dtype is each.dtype and torch.equal(after[name], each) for name, each in before.items())


@needs_native
def test_fused_rows_depend_on_no_batch_and_no_chunks() -> None:
    """Bit for bit the same: alone in one chunk, token by token, and in ragged batches."""
    model = wrap_module(bf16("llama", WIDE), LoadOptions(cpu_kernels="native"))
    alone = one_by_one(model)
    for seed in range(3):
        mixed = in_random_steps(model, PROMPTS, seed)
        for ours, theirs in zip(mixed, alone, strict=True):
            assert torch.equal(ours, theirs)


def test_float16_model_is_not_fused() -> None:
    assert not is_fused(wrap_module(build("llama", WIDE).to(torch.float16)))


needs_rounding = pytest.mark.skipif(not linear.rounds_rows(), reason="needs a CPU with AVX512-VNNI, or AVX2 alone")


def quantised(x: Tensor, group: int) -> Tensor:
    """Round the last dimension to 8 bits, with one scale for each `group` numbers."""
    groups = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scales).round() * scales).flatten(-2)[..., : x.shape[-1]]


@needs_rounding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", rest_in_soak(FUSED, "llama groups of 3", "qwen3 norms"))
def test_int8_logits_are_those_of_rounded_numbers_and_rows_are_independent(name: str, dtype: torch.dtype) -> None:
    """The oracle is transformers in float32 over rounded weights, with each product's input rounded too."""
    module, oracle = bf16(name, FUSED[name]), build(name, FUSED[name])
    plain = [monolithic(oracle, prompt) for prompt in PROMPTS]
    oracle.load_state_dict(module.state_dict())
    for part in oracle.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight = torch.nn.Parameter(quantised(part.weight, part.in_features), requires_grad=False)
            part.register_forward_pre_hook(lambda _, inputs: (quantised(inputs[0], 64),))
    expected = [monolithic(oracle, prompt) for prompt in PROMPTS]
    in_bf16 = [monolithic(module, prompt).float() for prompt in PROMPTS]
    model = wrap_module(module.to(dtype), LoadOptions(quantization="int8"))
    assert is_fused(model)
    assert model.kernels == "int8"
    alone = one_by_one(model)
    mixed = in_random_steps(model, PROMPTS, seed=8)
    for ours, batched, theirs, rounded, true in zip(alone, mixed, expected, in_bf16, plain, strict=True):
        assert torch.equal(ours, batched)
        # Numbers that bfloat16 moves across the boundary of a step of int8 add to the rounding of bfloat16.
        assert (ours - theirs).norm() <= 4 * (rounded - true).norm()


def packed(weight: Tensor, kind: str) -> PackedMatrix:
    """Round a weight to codes of `kind`, with a scale for 16 columns."""
    groups = weight.float().unflatten(1, (-1, 16))
    least, most = groups.amin(-1), groups.abs().amax(-1)
    if kind == "e4m3":
        codes = (groups / (most / 448)[..., None]).flatten(1).to(torch.float8_e4m3fn)
        return PackedMatrix("e4m3", codes, most / 448, None, 16)
    scales = (groups.amax(-1) - least) / 15
    numbers = ((groups - least[..., None]) / scales[..., None]).round().flatten(1).to(torch.uint8)
    return PackedMatrix("int4", numbers[:, ::2] | numbers[:, 1::2] << 4, scales, least, 16)


def packed_and_plain(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a model with packed linears, and the same model in float32 with dequantised weights."""
    module, oracle = build("llama", FUSED["llama groups of 3"]).to(dtype), build("llama", FUSED["llama groups of 3"])
    oracle.load_state_dict(module.state_dict())
    for ours, plain in zip(module.modules(), oracle.modules(), strict=True):
        if type(plain) is torch.nn.Linear:
            matrix = packed(plain.weight, kind)
            put_linear(ours, matrix)
            plain.weight = torch.nn.Parameter(matrix.dequantise(torch.float32), requires_grad=False)
    return module, oracle


@pytest.mark.parametrize("kernel", ["native", "torch", pytest.param("int8", marks=needs_rounding)])
@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_packed_logits_are_those_of_dequantised_weights(kind: str, kernel: CpuKernels) -> None:
    module, oracle = packed_and_plain(kind, torch.bfloat16)
    expected = [monolithic(oracle, prompt) for prompt in PROMPTS]
    in_bf16 = [monolithic(oracle.to(torch.bfloat16), prompt).float() for prompt in PROMPTS]
    model = wrap_module(module, LoadOptions(cpu_kernels=kernel))
    assert is_fused(model)
    assert model.kernels == kernel
    alone = one_by_one(model)
    mixed = in_random_steps(model, PROMPTS, seed=9)
    for ours, batched, true, rounded in zip(alone, mixed, expected, in_bf16, strict=True):
        assert torch.equal(ours, batched) or kernel == "torch" or not has_own
        # Rows of int8 have an error of 2^-8 of their largest number, each number of bfloat16 one of 2^-9 of itself.
        assert (ours - true).norm() <= (5 if kernel == "int8" else 1.5) * (rounded - true).norm()


@pytest.mark.parametrize("kernel", ["native", "torch", pytest.param("int8", marks=needs_rounding)])
@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_packed_logits_in_float32_equal_those_of_dequantised_weights(kind: str, kernel: CpuKernels) -> None:
    module, oracle = packed_and_plain(kind, torch.float32)
    model = wrap_module(module, LoadOptions(cpu_kernels=kernel))
    assert is_fused(model)
    got = in_random_steps(model, PROMPTS, seed=10)
    assert not any(isinstance(each, PackedLinear) and hasattr(each, "packed") for each in module.modules())
    for ours, prompt in zip(got, PROMPTS, strict=True):
        true = monolithic(oracle, prompt)
        if kernel == "int8" and kind == "int4":  # rows of int8 have an error of 2^-8 of their largest number
            assert 1e-4 * true.norm() < (ours - true).norm() < 0.1 * true.norm()
        else:
            assert_near([ours], [true], 1e-4)


@pytest.mark.parametrize("kernel", ["native", pytest.param("int8", marks=needs_rounding)])
def test_wrong_kernel_ends_the_load_of_packed_weights(kernel: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel swaps each output with its neighbour, as a kernel may on a CPU on which it has never run."""
    module, _ = packed_and_plain("int4", torch.float32)
    pack = packed_linear._pack_codes

    def wrong(matrix: PackedMatrix, panels: Tensor, frees: bool) -> None:
        pack(matrix, panels, frees)
        panels.copy_(panels.roll(1, 2))

    monkeypatch.setattr(packed_linear, "_pack_codes", wrong)
    with pytest.raises(ValueError, match="packed weights: fused, logits differ from the model's own by"):
        wrap_module(module, LoadOptions(cpu_kernels=kernel))


def test_packed_projections_of_unlike_forms_are_not_fused() -> None:
    module, _ = packed_and_plain("int4", torch.float32)
    attention = module.model.layers[0].self_attn
    put_linear(attention.k_proj, packed(attention.k_proj.packed.dequantise(torch.float32), "e4m3"))
    assert not is_fused(wrap_module(module))


def test_rows_are_rounded_for_packed_weights_alone() -> None:
    with pytest.raises(ValueError, match="cpu_kernels int8: the weights are plain; quantization int8 rounds them too"):
        wrap_module(bf16("llama", WIDE), LoadOptions(cpu_kernels="int8"))


@pytest.mark.parametrize(
    ("dtype", "kernels", "rounds", "reason"),
    [
        ("float16", "auto", True, "activations must be bfloat16 or float32, and the model is float16"),
        ("bfloat16", "onednn", True, "it is computed by native kernels, and cpu_kernels is onednn"),
        ("bfloat16", "auto", False, "rows are rounded to int8 on CPUs with AVX512-VNNI, or AVX2 and no AVX-512"),
        ("float32", "native", False, "rows are rounded to int8 on CPUs with AVX512-VNNI, or AVX2 and no AVX-512"),
    ],
)
def test_int8_that_cannot_run_is_refused(
    dtype: str, kernels: CpuKernels, rounds: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "rounds_rows", lambda: rounds)
    module = build("llama", WIDE).to(getattr(torch, dtype))
    with pytest.raises(ValueError, match=f"quantization int8: {reason}"):
        wrap_module(module, LoadOptions(cpu_kernels=kernels, quantization="int8"))


def test_int8_of_several_ranks_or_other_attention_is_refused() -> None:
    part = ModelPart(RankPosition(0, 2, 1), num_layers=2)
    with pytest.raises(ValueError, match="quantization int8: it is for replicas of one rank"):
        wrap_module(bf16("llama", WIDE), LoadOptions(part=part, quantization="int8"))
    attention = choose_attention("torch", torch.device("cpu"), "auto", "auto")
    with pytest.raises(ValueError, match="quantization int8: it needs the attention that runs in C"):
        wrap_module(bf16("llama", WIDE), LoadOptions(attention=attention, quantization="int8"))


@needs_rounding
@pytest.mark.parametrize("name", ["llama head_dim", "gemma"])
def test_int8_of_layers_that_are_not_fused_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="quantization int8: "):
        wrap_module(bf16(name, NOT_FUSED[name]), LoadOptions(quantization="int8"))


@needs_rounding
def test_int8_model_is_loaded_by_its_spec(tmp_path: Path) -> None:
    bf16("llama", WIDE).save_pretrained(tmp_path)
    spec = EngineConfig(quantization="int8").model_spec(str(tmp_path), dtype="bfloat16")
    assert load_model(spec).kernels == "int8"
