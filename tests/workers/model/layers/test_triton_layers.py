"""Layers with Triton steps give what transformers' own layers give; interpreted on CPUs."""

import dataclasses
import logging
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossdock.kernels import packed
from crossdock.kernels.attention import reference_paged_attention, reference_store_kv
from crossdock.kernels.backend import Attention, choose_attention
from crossdock.kernels.packages import triton_is_interpreted
from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model import load
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.layers import replaced_parts, triton_layers
from crossdock.workers.model.layers.llama_layers import NotFusableError
from crossdock.workers.model.layers.triton_layers import TritonLayers, use_triton_layers
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.packed_layers import put_linear
from tests.benchmarks.scripts import script
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts, through_pages
from tests.workers.multimodal import paged_multimodal
from tests.workers.ranks import UNHURRIED_S, Ranks, saved

pytestmark = pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton: pip install triton")

launches = script("models/launches")
PROMPTS = random_prompts(5, 23, 30)
TWO: dict[str, Any] = {"num_hidden_layers": 2}
FUSED: dict[str, dict[str, Any]] = {
    "llama": TWO,
    "llama gelu": TWO | {"hidden_act": "gelu"},  # its mlp stays as it is
    "qwen2 biases": TWO,
    "qwen2 sliding": SERVED["qwen2 sliding"] | TWO | {"max_window_layers": 1},
    "qwen3": TWO | {"head_dim": 16},
    "mistral": SERVED["mistral"] | TWO,
    "qwen3_moe": SERVED["qwen3_moe"] | TWO,
    "mixtral": SERVED["mixtral"] | TWO,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma": ({}, "its norms are not Llama's RMS norm"),
    "phi3": ({}, "the attention differs in"),
    "gpt_oss": (SERVED["gpt_oss"] | {"layer_types": ["full_attention"] * 2}, "softcap or sinks"),
    "granite": ({"residual_multiplier": 0.3}, "their logits differ by"),
    "glm4_moe": (SERVED["glm4_moe"], "only a part of each head is rotated"),
    "smollm3": ({"no_rope_layers": [1, 0]}, "rotates no heads"),
}
REASON = "decoder layers run in transformers' own code: "


def attention(kv_cache_dtype: Any = "auto") -> Attention:
    """Return the choice for a GPU, with attention in torch: Triton's interpreter takes seconds for that alone."""
    chosen = choose_attention("triton", torch.device("cpu"), kv_cache_dtype)
    return dataclasses.replace(chosen, store_kv=reference_store_kv, paged_attention=reference_paged_attention)


def is_fused(model: LoadedModel) -> bool:
    layers: Any = model.module.model.layers
    return isinstance(layers[0], TritonLayers)


def with_biases(name: str, options: dict[str, Any]) -> Any:
    """Return a random model whose biases and norms are random too."""
    module = build(name, options)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach()[0]), std=0.2)
    return module


@pytest.mark.parametrize("name", rest_in_soak(FUSED, "qwen2 biases", "qwen3"))
def test_logits_in_float32_equal_transformers_in_any_chunks(name: str) -> None:
    module = with_biases(name, FUSED[name])
    expected = [monolithic(module, prompt) for prompt in PROMPTS]
    model = wrap_module(module, LoadOptions(attention=attention()))
    assert is_fused(model)
    assert model.kernels == "triton steps"
    assert_near(in_random_steps(model, PROMPTS, seed=3), expected, 1e-4)


def test_logits_in_float16_are_as_exact_as_transformers() -> None:
    module, exact = with_biases("llama", TWO).half(), with_biases("llama", TWO)
    expected = [monolithic(module, prompt).float() for prompt in PROMPTS]
    truth = [monolithic(exact, prompt) for prompt in PROMPTS]
    model = wrap_module(module, LoadOptions(attention=attention()))
    assert is_fused(model)
    got = in_random_steps(model, PROMPTS, seed=4)
    ours, theirs, true = (torch.cat(logits) for logits in (got, expected, truth))
    assert (ours - true).norm() <= 1.5 * (theirs - true).norm()


def test_chunk_behind_pages_of_a_prefix_and_decode_equal_transformers() -> None:
    """Triton attention as well: every kernel of a layer as a GPU runs them."""
    module, prompt = build("llama", TWO), PROMPTS[1]
    expected = monolithic(module, prompt)
    model = wrap_module(module, LoadOptions(attention=choose_attention("triton", torch.device("cpu"))))
    assert is_fused(model)
    got = through_pages(model, [prompt], [[(0, 0, 16)], [(0, 16, 22)], [(0, 22, 23)]])
    assert_near(got, [expected], 1e-4)


def test_scales_of_e4m3_pages_reach_each_layers_store_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are tested with the step: Triton's interpreter rounds to e4m3 wrongly where rounding carries."""
    from crossdock.kernels.gpu import triton_layer_steps

    model = wrap_module(build("qwen3", FUSED["qwen3"]), LoadOptions(attention=attention("fp8"), kv_cache_dtype="fp8"))
    assert is_fused(model)
    given: list[tuple[Tensor, Tensor]] = []

    def recorded(function: Any) -> Any:
        def call(*args: Any, k_scale: Tensor, v_scale: Tensor, **options: Any) -> Tensor:
            given.append((k_scale, v_scale))
            out: Tensor = function(*args, k_scale=k_scale, v_scale=v_scale, **options)
            return out

        return call

    monkeypatch.setattr(triton_layer_steps, "finish_heads", recorded(triton_layer_steps.finish_heads))
    seen = dataclasses.replace(model.attention, paged_attention=recorded(reference_paged_attention))
    model = dataclasses.replace(model, attention=seen)
    through_pages(model, PROMPTS[:1], [[(0, 0, 5)]])
    assert model.pool.tensor.dtype is torch.float8_e4m3fn
    assert given == [model.scales[0], model.scales[0], model.scales[1], model.scales[1]]


@pytest.mark.parametrize("name", REFUSED)
def test_layers_of_another_shape_or_arithmetic_are_refused_with_reason(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, reason = REFUSED[name]
    with caplog.at_level(logging.INFO, replaced_parts.__name__):
        model = wrap_module(build(name, options | TWO), LoadOptions(attention=attention()))
    assert not is_fused(model)
    assert not model.kernels
    messages = [message for message in caplog.messages if message.startswith(REASON)]
    assert len(messages) == 1
    assert reason in messages[0]


def test_step_that_fails_leaves_transformers_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from crossdock.kernels.gpu import triton_layer_steps

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_layer_steps, "add_and_norm", fail)
    with caplog.at_level(logging.INFO, replaced_parts.__name__):
        model = wrap_module(build("llama", TWO), LoadOptions(attention=attention()))
    assert not is_fused(model)
    assert f"{REASON}fused, they fail: RuntimeError: no such instruction" in caplog.messages
    assert not len(model.pool.tensor)


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int) -> tuple[str, bool, list[Tensor]]:
    """On one rank: return what computes its layers, whether projections are joined, and every token's logits."""
    choose = load.choose_attention
    load.choose_attention = lambda *_: attention()
    try:
        links = Collectives(RankPosition(rank, tensor_size, num_stages), UNHURRIED_S)
        model = load.load_model(ModelSpec(str(path), "float32"), links=links)
    finally:
        load.choose_attention = choose
    torch.manual_seed(0)  # the same pages everywhere
    linears = [module for module in model.module.modules() if isinstance(module, torch.nn.Linear)]
    is_joined = any("forward" in vars(linear) for linear in linears)
    return model.kernels, is_joined, through_pages(model, PROMPTS[:2], [[(0, 0, 5), (1, 0, 20)], [(1, 20, 23)]])


@pytest.mark.parametrize(
    ("has_biases", "division", "kernels"),
    [
        pytest.param(False, (2, 1), ["triton steps", "triton steps"], marks=pytest.mark.soak),
        (True, (2, 1), ["", "triton steps"]),  # the first rank alone has the bias of the output projection
        (False, (1, 2), ["", ""]),
    ],
)
def test_ranks_of_a_worker_group_give_logits_of_the_whole(
    ranks: Ranks, tmp_path: Path, has_biases: bool, division: tuple[int, int], kernels: list[str]
) -> None:
    module = with_biases("llama", TWO | {"attention_bias": has_biases})
    expected = [monolithic(module, prompt) for prompt in PROMPTS[:2]]
    answers = ranks.run(2, part_logits, saved(module, tmp_path), *division)
    assert [answer[0] for answer in answers] == kernels
    assert kernels[0] or all(is_joined for _, is_joined, _ in answers[:1])
    assert_near(answers[RankPosition(0, *division).driver][2], expected)


def test_layers_between_which_embeddings_of_pictures_are_added_stay_apart() -> None:
    model = paged_multimodal("qwen3_vl")
    with pytest.raises(NotFusableError, match="added between layers"):
        use_triton_layers(model, [None] * 3)


def with_codes(name: str, columns: int | None = None, **changes: Any) -> Any:
    """Return a random model whose linears of layers are codes of e4m3, with a scale for each row, or of `columns`."""
    module = with_biases(name, FUSED[name] | changes)
    for linear in module.model.layers.modules():
        if isinstance(linear, nn.Linear):
            weight, group = linear.weight.detach(), columns or linear.in_features
            parts = weight.view(len(weight), -1, group)
            scales = parts.abs().amax(2) / 448
            codes = (parts / scales[..., None]).to(torch.float8_e4m3fn).view(weight.shape)
            put_linear(linear, PackedMatrix("e4m3", codes, scales, None, group))
    return module


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this CPU multiply e4m3, as GPUs do."""

    def is_multiplied(matrix: PackedMatrix, _dtype: torch.dtype, _device: torch.device) -> bool:
        return matrix.scales.shape == (matrix.shape[0], 1)

    for module in (packed, triton_layers):
        monkeypatch.setattr(module, "multiplies_e4m3", is_multiplied)
    monkeypatch.setattr(triton_layers, "require_e4m3_products", lambda _: None)


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("name", ["llama", "qwen2 biases", "qwen3"])
def test_packed_projections_of_one_input_are_one_product_over_the_same_codes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = with_codes(name)
    expected = [monolithic(module, prompt) for prompt in PROMPTS]
    layers = module.model.layers
    model = wrap_module(module, LoadOptions(attention=attention()))
    assert is_fused(model)
    attn = layers[0].self_attn
    q, k = attn.q_proj.packed, attn.k_proj.packed
    assert k.codes.data_ptr() == q.codes.data_ptr() + q.codes.nbytes, "memory holds the codes once"
    products: list[tuple[int, ...]] = []
    counted = torch._scaled_mm

    def count(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Tensor:
        products.append(tuple(weight.shape))
        return counted(x, weight, *given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", count)
    got = through_pages(model, PROMPTS, [[(number, 0, len(prompt)) for number, prompt in enumerate(PROMPTS)]])
    assert len(products) == 4 * len(layers), "of seven linears in a layer"
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm(), "inputs near the middle of two codes may round otherwise"


@pytest.mark.usefixtures("multiplied")
def test_layers_with_codes_of_another_form_stay_in_transformers_code() -> None:
    model = wrap_module(with_codes("llama", columns=16), LoadOptions(attention=attention()))
    assert not is_fused(model)


@pytest.mark.usefixtures("multiplied")
def test_packed_layer_launches_at_most_twelve_kernels(launches: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are rounded by the kernel before each product; those of attention by a kernel of their own."""
    monkeypatch.setattr(packed, "_has_kernels", lambda _: True)  # as a GPU has; the interpreter runs them
    counts: list[Counter[str]] = []
    for num_layers in (1, 2):
        module = with_codes("llama", num_hidden_layers=num_layers)
        model = wrap_module(module, LoadOptions(attention=attention()))
        assert is_fused(model)
        triton = choose_attention("triton", torch.device("cpu"))
        counts.append(launches.trace(dataclasses.replace(model, attention=triton), [1, 1, 1]).counts)
    layer = counts[1] - counts[0]
    assert layer["quantise_kernel"] == 1
    assert layer["_scaled_mm"] == 4
    assert layer.total() <= 12, layer
