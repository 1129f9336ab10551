"""A model in parts is the same model: logits of every division equal those of the whole, for every architecture."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from crossdock.workers.model import load_model, wrap_module
from crossdock.workers.parallel import Links, Place

from .architectures import SERVED, build
from .ranks import Ranks, saved
from .test_model import random_steps, through_pages

DIVISIONS = [(2, 1), (1, 2), (2, 2)]  # tensor ranks, stages
LENGTHS = [5, 23, 40]


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (n,), generator=generator) for n in LENGTHS]


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int) -> list[Tensor] | None:
    """On one rank: every token's logits, where this rank has them."""
    place = Place(rank, tensor_size, num_stages)
    model = load_model(path, torch.float32, links=Links(place, 60.0))
    torch.manual_seed(0)  # the same pages everywhere
    logits = through_pages(model, prompts(), random_steps(LENGTHS, seed=7))
    return logits if place.is_last_stage else None


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_the_whole_model(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """fp32; 2e-3 is what test_model allows between paged and eager attention of the whole."""
    module = build(name, SERVED[name])
    path = saved(module, tmp_path)
    whole = through_pages(wrap_module(module), prompts(), random_steps(LENGTHS, seed=7))
    for tensor_size, num_stages in DIVISIONS:
        found = ranks.run(tensor_size * num_stages, part_logits, path, tensor_size, num_stages)
        assert [logits is not None for logits in found] == [False] * (len(found) - tensor_size) + [True] * tensor_size
        for logits in found[-tensor_size:]:
            for ours, theirs in zip(logits, whole, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
                assert (ours.argmax(-1) == theirs.argmax(-1)).all()
