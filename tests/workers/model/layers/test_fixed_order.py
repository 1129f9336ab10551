"""`batch_invariant` in Triton, interpreted: a sequence has the same bits in any chunks, or a model is refused."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.attention import reference_paged_attention, reference_store_kv
from crossdock.kernels.backend import Attention, choose_attention
from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.layers.fixed_order import check_rows
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from tests.workers.architectures import SERVED, build
from tests.workers.model.layers.test_fusion import packed_and_plain
from tests.workers.model.paged import through_pages

pytestmark = [
    pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton: pip install triton"),
    pytest.mark.usefixtures("dots_by_row"),
]
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1}


def test_sequence_has_the_same_bits_in_any_chunks_and_a_variant_kernel_is_refused() -> None:
    attention = choose_attention("triton", torch.device("cpu"))
    model = wrap_module(build("qwen3", SMALL), LoadOptions(batch_invariant=True, attention=attention))
    assert model.kernels == "triton steps and products"
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)) for n in (20, 7)]
    whole = through_pages(model, prompts, [[(0, 0, 20)], [(1, 0, 7)]])
    decodes = [[(1, at, at + 1), (0, 13 + at, 14 + at)] for at in (5, 6)]
    steps = [[(0, 0, 11), (1, 0, 5)], [(0, 11, 18)], *decodes]
    for ours, theirs in zip(through_pages(model, prompts, steps), whole, strict=True):
        assert torch.equal(ours, theirs)

    def variant(x: Tensor) -> Tensor:
        wide = x if x.shape[-2] > 8 else x.double()
        return F.linear(wide, model.module.lm_head.weight.to(wide.dtype)).float()

    model.module.lm_head.forward = variant
    with pytest.raises(ValueError, match="rows have other bits in another batch"):
        check_rows(dataclasses.replace(model, max_model_len=16))


def attention_in_torch(name: str = "triton") -> Attention:
    """Return attention that stands in for Triton's, whose interpreter takes seconds."""

    def paged_attention(*tensors: Any, in_fixed_order: bool = False, **options: Any) -> Tensor:
        return reference_paged_attention(*tensors, **options)

    chosen = choose_attention("triton", torch.device("cpu"))
    chosen = dataclasses.replace(chosen, store_kv=reference_store_kv, paged_attention=paged_attention)
    return dataclasses.replace(chosen, name=name)


def test_model_that_triton_cannot_compute_in_one_order_is_refused_by_name() -> None:
    sinks = SERVED["gpt_oss"] | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (build("qwen3_moe", SERVED["qwen3_moe"]), {}, "the mlp differs in"),
        (build("gpt_oss", sinks), {}, "softcap or sinks"),
        (build("qwen3_5_text", {}), {}, "has recurrent layers"),
        (packed_and_plain("int4", torch.float32)[0], {}, "products of packed weights on GPUs"),
        (build("qwen3", SMALL), {"part": ModelPart(RankPosition(0, 2), num_layers=1)}, "one GPU has no such sums"),
        (build("qwen3", SMALL), {"attention": attention_in_torch("flashinfer")}, "attention runs in flashinfer"),
    ]
    for module, options, reason in cases:
        with pytest.raises(ValueError, match=f"batch_invariant: .*{reason}"):
            wrap_module(module, LoadOptions(batch_invariant=True, **{"attention": attention_in_torch(), **options}))
