"""Which models cache latents, how many bytes these take, and that others cache keys and values as before."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from crossdock.kvtransfer.layout import LayerShape, PoolLayout
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.forward.latent import NoLatentsError, Unexpanded
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.model_spec import ModelSpec
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic
from tests.workers.ranks import UNHURRIED_S, Ranks, saved

EXPANDED = LayerShape(4, 24, 16)


def test_token_of_deepseek_v3_takes_70_kilobytes() -> None:
    """576 elements of 2 bytes in each of 61 layers. Its 128 heads' keys and values would take 5 MB."""
    config: Any = AutoConfig.for_model("deepseek_v3")
    with torch.device("meta"):
        attention = DeepseekV3Attention(config, 0)
        cached = torch.empty(1, 1, 3, config.kv_lora_rank), torch.empty(1, 1, 3, config.qk_rope_head_dim)

    def token_bytes() -> int:
        key, value = attention.expand_kv(*cached)
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return PoolLayout([shape] * config.num_hidden_layers, 16, 2).token_bytes

    assert token_bytes() == 61 * 128 * (192 + 128) * 2
    Unexpanded(attention)
    assert token_bytes() == 61 * 576 * 2 == 70272


def of_another_type(linear: nn.Linear) -> None:
    linear.__class__ = type("QuantisedLinear", (nn.Linear,), {})


def hooked(linear: nn.Linear) -> None:
    linear.register_forward_hook(lambda _module, _args, out: out * 1.5)


@pytest.mark.parametrize(
    ("change", "reason"), [(of_another_type, "not a plain linear layer"), (hooked, r"from latents, logits differ by")]
)
def test_model_whose_projections_cannot_be_absorbed_caches_keys_and_values(
    change: Callable[[nn.Linear], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = build("deepseek_v3", SERVED["deepseek_v3"])
    change(module.model.layers[1].self_attn.kv_b_proj)
    prompt = torch.arange(3, 40)
    expected = [monolithic(module, prompt)]
    with caplog.at_level(logging.WARNING):
        model = wrap_module(module)
    assert model.layers == [EXPANDED] * 4
    assert reason in caplog.text
    assert_near(in_random_steps(model, [prompt], seed=1), expected)


def shapes_if_one_rank_refuses(rank: int, path: Path, refusing: int) -> tuple[list[LayerShape], dict[int, Any]]:
    position = RankPosition(rank, 2, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == refusing:

            def refuse(_: Unexpanded, __: object) -> None:
                raise NoLatentsError("of this rank")

            patch.setattr(Unexpanded, "__init__", refuse)
        model = load_model(ModelSpec(str(path), "float32"), links=Collectives(position, UNHURRIED_S))
    return list(model.layers), model.part.heads


@pytest.mark.parametrize("refusing", [0, 3])
def test_ranks_of_a_worker_group_cache_alike(ranks: Ranks, tmp_path: Path, refusing: int) -> None:
    """One of four ranks refuses: none caches latents, for pages of all must fit together."""
    path = saved(build("deepseek_v3", SERVED["deepseek_v3"]), tmp_path)
    for rank, (layers, heads) in enumerate(ranks.run(4, shapes_if_one_rank_refuses, path, refusing)):
        assert layers == [LayerShape(2, 24, 16)] * 2
        assert set(heads.values()) == {(2 * (rank % 2), 2 * (rank % 2) + 2, 4)}
