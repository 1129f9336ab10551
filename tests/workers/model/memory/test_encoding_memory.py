"""The memory of a GPU that pictures take: the arithmetic, and which calls of the encoder are measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.memory.kv_memory import bytes_for_pictures, largest_calls
from crossdock.workers.model.memory.memory_budget import MemoryBudget
from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.schedule.request.items import Item
from tests.sweeps import rest_in_soak
from tests.workers.multimodal import FAMILIES, paged_multimodal, picture


@pytest.mark.parametrize("family", rest_in_soak(FAMILIES, "qwen3_vl", "llava"))
def test_largest_calls_are_as_large_as_the_scheduler_allows(family: str) -> None:
    """No example has more rows than fit into the cache, and the next size would, unless the model has one size."""
    model = paged_multimodal(family)
    encoder = model.encoder
    assert encoder is not None
    cached = 40
    budget = MemoryBudget(max_num_batched_tokens=70, mm_encoder_cache=cached * encoder.embedding_token_bytes)
    large, small = largest_calls(model, encoder, budget)
    assert [item.num_embedding_tokens <= cached for item in large] == [True]
    if family.startswith("qwen"):
        assert large[0].num_embedding_tokens == 36
    assert len({item.content_hash for item in small}) == len(small)
    rows = sum(item.num_embedding_tokens for item in small)
    assert len(small) == 1 if "image_sizes" in small[0].tensors else 70 - small[0].num_embedding_tokens < rows <= 70
    assert encoder.measure(large) > 0
    assert encoder.measure(small) > 0


def test_pictures_take_the_cache_the_largest_call_and_the_rows_of_a_step() -> None:
    model, peaks = paged_multimodal("qwen3_vl"), iter([5 << 20, 9 << 20])
    assert model.encoder is not None
    budget = MemoryBudget(max_num_batched_tokens=100, mm_encoder_cache=1 << 20)

    def peak(run: Callable[[], object]) -> int:
        run()
        return next(peaks)

    row = model.encoder.embedding_token_bytes
    assert row == (1 + 2) * 128 * 4, "the input, and what is added after two layers, in float32"
    assert bytes_for_pictures(model, budget, peak) == (1 << 20) + (9 << 20) + 2 * 100 * row
    assert next(peaks, None) is None
    receiver = replace(model, part=ModelPart(RankPosition(1, 2)))
    assert bytes_for_pictures(receiver, budget, peak) == 2 * 100 * row, "a rank that receives rows"
    assert bytes_for_pictures(replace(model, encoder=None), budget, peak) == 0


def test_budget_has_the_memory_of_the_cache() -> None:
    assert EngineConfig.model_validate({"mm_encoder_cache": "7MiB"}).budget.mm_encoder_cache == 7 << 20


@pytest.mark.parametrize("family", rest_in_soak(FAMILIES, "qwen3_vl", "llava"))
def test_calls_of_bounded_rows_give_the_same_embeddings(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = paged_multimodal(family).encoder
    assert encoder is not None
    items = [picture(family, seed, size)[1] for seed, size in enumerate([(2, 2), (1, 2), (2, 2), (3, 4), (2, 2)])]
    encoder.encode(items)
    expected = [encoder.embeddings_of(item) for item in items]
    calls, features = list[int](), PictureEncoder.features

    def counted(self: PictureEncoder, batch: list[Item], **options: Any) -> Tensor:
        calls.append(sum(item.num_embedding_tokens for item in batch))
        assert calls[-1] <= 40 or len(batch) == 1
        return features(self, batch, **options)

    monkeypatch.setattr(PictureEncoder, "features", counted)
    encoder.clear()
    encoder.limit_calls(40)
    encoder.encode(items)
    assert sum(calls) == sum(item.num_embedding_tokens for item in items)
    for item, before in zip(items, expected, strict=True):
        torch.testing.assert_close(encoder.embeddings_of(item), before, rtol=1e-4, atol=1e-5)
