"""How a model is divided: its heads, its parameters, and the divisions that are refused.

That the parts give the whole model's logits for every architecture is in tests/workers/replica.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.weights import model_on_meta, part_bytes
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts
from tests.workers.ranks import DIVISIONS, UNHURRIED_S, Ranks, saved

PROMPTS = random_prompts(5, 23, 40)


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int) -> list[Tensor] | None:
    """On one rank: return every token's logits, or None where the rank has none."""
    position = RankPosition(rank, tensor_size, num_stages)
    model = load_model(ModelSpec(str(path), "float32"), links=Collectives(position, UNHURRIED_S))
    torch.manual_seed(0)  # the same pages everywhere
    logits = in_random_steps(model, PROMPTS, seed=7)
    return logits if position.is_last_stage else None


def assert_parts_equal_whole(ranks: Ranks, path: Path, divisions: Sequence[tuple[int, int]]) -> None:
    """In fp32, whose sums differ by their order: 2e-3 is what test_model allows between paged and eager attention.

    Of the ranks of the last stage only the first, the driver, gets logits. The others have zeros.
    """
    whole = in_random_steps(load_model(ModelSpec(str(path), "float32")), PROMPTS, seed=7)
    for tensor_size, num_stages in divisions:
        answers = ranks.run(tensor_size * num_stages, part_logits, path, tensor_size, num_stages)
        has_logits = [logits is not None for logits in answers]
        assert has_logits == [False] * (len(answers) - tensor_size) + [True] * tensor_size
        of_driver, *others = answers[-tensor_size:]
        assert not any(logits.any() for of_rank in others for logits in of_rank)
        assert_near(of_driver, whole)
        for ours, theirs in zip(of_driver, whole, strict=True):
            assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tensor_size"),
    [
        (4, 1, 2),  # one KV head, which both ranks hold
        pytest.param(4, 1, 4, marks=pytest.mark.soak),
        pytest.param(8, 2, 4, marks=pytest.mark.soak),  # each is held by two
        pytest.param(9, 3, 2, marks=pytest.mark.soak),  # one and two
        (9, 3, 4),  # two ranks hold the first: its three query heads are divided as one and two
        pytest.param(6, 3, 4, marks=pytest.mark.soak),
    ],
)
def test_parts_with_unevenly_divided_heads_equal_whole(
    ranks: Ranks, tmp_path: Path, num_heads: int, num_kv_heads: int, tensor_size: int
) -> None:
    options = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "num_hidden_layers": 2}
    options["hidden_size"] = 12 * num_heads
    assert_parts_equal_whole(ranks, saved(build("llama", options), tmp_path), [(tensor_size, 1)])


def test_parts_of_llama_4_beside_its_encoder_of_pictures_equal_whole(ranks: Ranks, tmp_path: Path) -> None:
    """As checkpoints of it are: the plan also names layers of the encoder, which text does not use."""
    module = build("llama4_text", SERVED["llama4_text"])
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    vision |= {"image_size": 28, "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48}
    config = AutoConfig.for_model("llama4", text_config=module.config.to_dict(), vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.language_model.load_state_dict(module.state_dict())
    path = saved(whole, tmp_path)
    found = in_random_steps(load_model(ModelSpec(str(path), "float32")), PROMPTS, seed=7)
    assert_near(found, [monolithic(module, prompt) for prompt in PROMPTS])
    assert_parts_equal_whole(ranks, path, DIVISIONS[-1:])


def test_division_among_too_many_ranks_is_refused_with_reason() -> None:
    config = build("llama", {"num_attention_heads": 2, "num_key_value_heads": 1}).config
    with pytest.raises(CannotCut, match=r"2 query heads over 1 KV heads .* 3 ranks: 3 of them .* at most 2"):
        model_on_meta(config, RankPosition(0, 3), torch.float32)
    with pytest.raises(CannotCut, match=r"4 layers cannot be divided among 5 stages"):
        model_on_meta(config, RankPosition(0, 1, 5), torch.float32)


def test_plan_with_an_unknown_style_is_refused_with_reason() -> None:
    with pytest.raises(CannotCut, match="unknown style 'local_params'"):
        model_on_meta(build("beam", SERVED["beam"]).config, RankPosition(0, 2), torch.float32)


def test_parts_of_any_division_add_up_to_whole() -> None:
    """Every weight is with some rank, and none but norms with two ranks of one stage."""
    module = build("llama", {})
    whole = sum(parameter.nbytes for parameter in module.parameters())
    norms = sum(parameter.nbytes for parameter in module.parameters() if parameter.dim() == 1)
    for tensor_size, num_stages in DIVISIONS:
        positions = [RankPosition(rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
        held = [part_bytes(model_on_meta(module.config, position, torch.float32)) for position in positions]
        assert whole <= sum(held) <= whole + norms * tensor_size * num_stages
