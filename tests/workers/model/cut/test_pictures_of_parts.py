"""Models with pictures divided among ranks: the logits of transformers' one pass, and the encoder on one rank alone."""

from typing import Any

import pytest
import torch

from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.weights.weights import model_on_meta, part_bytes
from tests.sweeps import rest_in_soak
from tests.workers.multimodal import (
    BOTH_WAYS,
    FAMILIES,
    build_multimodal,
)
from tests.workers.ranks import DIVISIONS


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("family", rest_in_soak([*FAMILIES, *BOTH_WAYS], "qwen3_vl", *BOTH_WAYS))
def test_driver_alone_holds_the_encoder_and_its_memory(family: str, division: tuple[int, int]) -> None:
    """The oracle is a walk over the whole model: what is neither the decoder's nor the output projection's."""
    module: Any = build_multimodal(family)
    text = {id(each) for part in (module.get_decoder(), module.get_output_embeddings()) for each in part.parameters()}
    encoder = {name: each.nbytes for name, each in module.named_parameters() if id(each) not in text}
    assert encoder
    for rank in range(division[0] * division[1]):
        position = RankPosition(rank, *division)
        with torch.device("meta"):
            part = type(module)(module.config)
            cut_model(part, position, None)
        held = {name: each.nbytes for name, each in part.named_parameters()}
        assert held.keys() & encoder.keys() == (encoder.keys() if position.is_driver else set()), position
        tied = set(part.all_tied_weights_keys)
        measured = sum(each.nbytes for name, each in part.state_dict().items() if name not in tied)
        assert part_bytes(model_on_meta(module.config, position, torch.float32)) == measured, position


def test_decoder_without_a_plan_of_its_own_is_divided_like_the_one_it_is_made_of() -> None:
    """transformers has none for Qwen3-VL's decoder: every rank would hold all of it."""
    config = build_multimodal("qwen3_vl").config
    with torch.device("meta"):
        part: Any = type(build_multimodal("qwen3_vl"))(config)
        cut_model(part, RankPosition(1, 2), None)
    layer = part.get_decoder().layers[0]
    assert layer.self_attn.q_proj.weight.shape == (64, 128)
    assert layer.self_attn.k_proj.weight.shape == (32, 128)
    assert layer.mlp.down_proj.weight.shape == (128, 32)
