"""Models with pictures divided among ranks: the logits of transformers' one pass, and the encoder on one rank alone."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.runner import Runner
from crossdock.workers.model.step_messages import StepReceiver
from crossdock.workers.model.weights.weights import measure_part
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.pictures.encoding import NO_ENCODER_WORK, EncoderWork
from crossdock.workers.schedule.pictures.items import items_in
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import SamplingParams
from tests.sweeps import rest_in_soak
from tests.workers.model.pictures.test_vision import may_cut
from tests.workers.multimodal import (
    BOTH_WAYS,
    CONFIGS,
    FAMILIES,
    PicturePrompt,
    build_multimodal,
    one_pass,
    picture,
    video,
)
from tests.workers.ranks import DIVISIONS, Ranks, saved

PAGE_SIZE = 8
USUAL = [("qwen3_vl_moe", (2, 2)), (*BOTH_WAYS, (2, 1)), (*BOTH_WAYS, (1, 2))]


def cut_logits(
    rank: int, path: Path, division: tuple[int, int], prompt: PicturePrompt, cuts: Sequence[int]
) -> list[Tensor]:
    """On one rank: return the logits of `prompt` in two chunks, for every place in `cuts` where the second begins.

    The driver begins each step and broadcasts its message. Other ranks, of which some have logits, return none.
    """
    position = RankPosition(rank, *division)
    model = load_model(ModelSpec(str(path), "float32"), links=Collectives(position, 60.0))
    length = len(prompt.token_ids)
    pages = range(-(-length // PAGE_SIZE))
    model.allocate_pool(len(pages), PAGE_SIZE)
    receiver, message = StepReceiver(), [b""]

    def broadcast(data: bytes) -> None:
        message[0] = data
        dist.broadcast_object_list(message, position.driver)

    runner = Runner(model, PAGE_SIZE, broadcast)
    request = Request("a", prompt.token_ids, SamplingParams(prompt_logprobs=0))
    if position.is_driver:
        assert model.encoder is not None
        request.items = prompt.items
        model.encoder.add(request.id, model.encoder.locate(request))
    found = []
    for cut in cuts:
        logits, known = list[Tensor](), set[bytes]()
        for start, end in ((0, cut), (cut, length)):
            if not position.is_driver:
                dist.broadcast_object_list(message, position.driver)
                runner.compute(receiver.unpack(message[0]))
                continue
            new = {item.content_hash: item for item in items_in(prompt.items, start, end)}
            work = EncoderWork((), [item for content_hash, item in new.items() if content_hash not in known])
            known |= new.keys()
            work = work if work.items else NO_ENCODER_WORK
            step = runner.begin(Batch([Scheduled(request, start, end - start, pages, False)], 0, encoder=work))
            logits.append(runner.finish(step)[0].clone())
        found += [torch.cat(logits)] if logits else []
    return found


@pytest.mark.parametrize("case", rest_in_soak(product(CONFIGS, DIVISIONS), *USUAL))
def test_prompt_cut_at_every_boundary_equals_one_pass(
    ranks: Ranks, tmp_path: Path, case: tuple[str, tuple[int, int]]
) -> None:
    family, division = case
    module = build_multimodal(family)
    parts: list[Any] = [3, picture(family, 1), 2, picture(family, 2, (1, 2)), 3]
    if family in ("qwen2_vl", "qwen2_5_vl"):
        parts[3] = video(2, 2, (1, 2))
    prompt = PicturePrompt.of(*parts)
    expected = one_pass(module, prompt)
    cuts = [cut for cut in range(1, len(prompt.token_ids)) if may_cut(family, prompt, cut)]
    answers = ranks.run(division[0] * division[1], cut_logits, saved(module, tmp_path), division, prompt, cuts)
    driver = RankPosition(0, *division).driver
    assert [len(answer) for answer in answers] == [len(cuts) * (rank == driver) for rank in range(len(answers))]
    for logits in answers[driver]:
        torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)


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
        assert measure_part(module.config, position, torch.float32) == measured, position


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
