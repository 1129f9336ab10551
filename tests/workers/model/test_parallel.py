"""How a model is divided: its heads, its memory, and what cannot be. That parts give the whole's logits for every
architecture is in test_gang.py."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from crossdock.workers.model.memory_fit import DoesNotFit, check_fits
from crossdock.workers.model.model import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.parallel import CannotCut, Links, RankPosition
from crossdock.workers.model.weights import load_part, measure_part
from tests.workers.architectures import build
from tests.workers.ranks import Ranks, saved

from .test_model import random_steps, through_pages

DIVISIONS = [(2, 1), (1, 2), (2, 2)]  # tensor ranks, stages
LENGTHS = [5, 23, 40]


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 120, (n,), generator=generator) for n in LENGTHS]


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int) -> list[Tensor] | None:
    """On one rank: every token's logits, where this rank has them."""
    place = RankPosition(rank, tensor_size, num_stages)
    model = load_model(ModelSpec(str(path), "float32"), links=Links(place, 60.0))
    torch.manual_seed(0)  # the same pages everywhere
    logits = through_pages(model, prompts(), random_steps(LENGTHS, seed=7))
    return logits if place.is_last_stage else None


def assert_equal_to_the_whole(ranks: Ranks, path: Path, divisions: Sequence[tuple[int, int]]) -> None:
    """In fp32, whose sums differ by their order: 2e-3 is what test_model allows between paged and eager attention."""
    whole = through_pages(load_model(ModelSpec(str(path), "float32")), prompts(), random_steps(LENGTHS, seed=7))
    for tensor_size, num_stages in divisions:
        found = ranks.run(tensor_size * num_stages, part_logits, path, tensor_size, num_stages)
        assert [logits is not None for logits in found] == [False] * (len(found) - tensor_size) + [True] * tensor_size
        for logits in found[-tensor_size:]:
            for ours, theirs in zip(logits, whole, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
                assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tensor_size"),
    [
        (4, 1, 2),  # one KV head, which both ranks hold
        (4, 1, 4),
        (8, 2, 4),  # each is held by two
        (9, 3, 2),  # one and two
        (9, 3, 4),  # two ranks hold the first: its three query heads are divided as one and two
        (6, 3, 4),
    ],
)
def test_heads_that_do_not_divide(
    ranks: Ranks, tmp_path: Path, num_heads: int, num_kv_heads: int, tensor_size: int
) -> None:
    options = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "num_hidden_layers": 2}
    options["hidden_size"] = 12 * num_heads
    assert_equal_to_the_whole(ranks, saved(build("llama", options), tmp_path), [(tensor_size, 1)])


def test_what_cannot_be_divided_is_refused_with_the_reason() -> None:
    config = build("llama", {"num_attention_heads": 2, "num_key_value_heads": 1}).config
    with pytest.raises(CannotCut, match=r"2 query heads over 1 KV heads .* 3 ranks: 3 of them .* at most 2"):
        measure_part(config, RankPosition(0, 3), torch.float32)
    with pytest.raises(CannotCut, match=r"4 layers cannot be divided among 5 stages"):
        measure_part(config, RankPosition(0, 1, 5), torch.float32)


def test_parts_add_up() -> None:
    """Every weight is with some rank, and none with two of one stage but norms."""
    module = build("llama", {})
    whole = sum(parameter.nbytes for parameter in module.parameters())
    norms = sum(parameter.nbytes for parameter in module.parameters() if parameter.dim() == 1)
    for tensor_size, num_stages in DIVISIONS:
        places = [RankPosition(rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
        held = [measure_part(module.config, place, torch.float32) for place in places]
        assert whole <= sum(held) <= whole + norms * tensor_size * num_stages


# -- memory ----------------------------------------------------------------------------------------------------------


def peak_of_loading(_: int, path: Path) -> tuple[int, int]:
    """On a rank of two: bytes that its memory grew by at most while it loaded, and bytes of what it then holds."""
    config = AutoConfig.from_pretrained(path)
    place = RankPosition(torch.distributed.get_rank(), 2)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _kib("VmRSS")
    module, _part = load_part(config, path, place, Links(place, 60.0), dtype=torch.float32)
    return _kib("VmHWM") - before, sum(parameter.nbytes for parameter in module.parameters())


def _kib(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def test_a_rank_never_holds_more_than_its_share(ranks: Ranks, tmp_path: Path) -> None:
    """Read slice by slice: the peak stays near what the rank holds in the end, half of 170 MiB."""
    options = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 16384}
    module = build("llama", options | {"num_hidden_layers": 6})
    whole = sum(parameter.nbytes for parameter in module.parameters())
    for peak, share in ranks.run(2, peak_of_loading, saved(module, tmp_path)):
        assert share < 0.51 * whole
        assert peak < 1.25 * share


def test_what_does_not_fit_says_how_much_is_missing_and_what_would() -> None:
    config = build("llama", {}).config
    weights = measure_part(config, RankPosition(), torch.float32)
    check_fits(config, RankPosition(), torch.float32, 1 << 20, "cuda", free_bytes=weights + (1 << 20))
    with pytest.raises(DoesNotFit, match=r"0.3 MiB for weights and 1.0 MiB .* 1.1 MiB .* 0.2 MiB are missing") as first:
        check_fits(config, RankPosition(), torch.float32, 1 << 20, "cuda", free_bytes=(1 << 20) + weights // 3)
    assert "tensor_parallel_size 4 would fit" in str(first.value)
    with pytest.raises(DoesNotFit, match="No tensor_parallel_size would fit"):
        check_fits(config, RankPosition(), torch.float32, 1 << 20, "cuda", free_bytes=1 << 20)
    with pytest.raises(DoesNotFit, match=r"this host's 1.3 MiB for 2 ranks"):
        check_fits(config, RankPosition(0, 2), torch.float32, 1 << 20, "cpu", 2, free_bytes=(1 << 20) + weights)
