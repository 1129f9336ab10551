"""Whether weights and KV pages fit, with numbers, before anything is loaded."""

import pytest
import torch

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.memory.memory_fit import check_fits
from crossdock.workers.model.weights.formats import format_of
from tests.workers.architectures import build


def test_model_that_does_not_fit_is_refused_with_missing_bytes_and_advice() -> None:
    config = build("llama", {}).config
    weights = format_of(None).count_bytes(config, RankPosition(), torch.float32).held
    check_fits(config, RankPosition(), torch.float32, 1 << 20, "cuda", free_bytes=weights + (1 << 20))
    with pytest.raises(ValueError, match=r"0.3 MiB for weights and 1.0 MiB .* 1.1 MiB .* 0.2 MiB are missing") as first:
        check_fits(config, RankPosition(), torch.float32, 1 << 20, "cuda", free_bytes=(1 << 20) + weights // 3)
    assert "tensor_parallel_size 4 would fit" in str(first.value)
    with pytest.raises(ValueError, match="No tensor_parallel_size would fit"):
        check_fits(config, RankPosition(), torch.float32, 1 << 20, "cuda", free_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"this host's 1.3 MiB for 2 ranks"):
        check_fits(config, RankPosition(0, 2), torch.float32, 1 << 20, "cpu", 2, free_bytes=(1 << 20) + weights)


@pytest.mark.parametrize("is_tied", [False, True])
def test_int8_weights_are_counted_beside_pages_and_beside_converted_ones(is_tied: bool) -> None:
    """The oracle is a walk over a model in memory: one byte a weight of a product and four for each output."""
    module = build("llama", {"tie_word_embeddings": is_tied}).bfloat16()
    config, position, dtype = module.config, RankPosition(), torch.bfloat16
    products = [*module.model.layers.modules(), module.lm_head]
    int8 = sum(m.weight.numel() + 4 * len(m.weight) for m in products if isinstance(m, torch.nn.Linear))
    bfloat16 = sum(parameter.nbytes for parameter in module.parameters())  # a tied one once
    kept = bfloat16 - sum(
        m.weight.nbytes for m in products[: -1 if is_tied else None] if isinstance(m, torch.nn.Linear)
    )

    def check(kv_bytes: int, free: int, stored: torch.dtype = torch.float32) -> None:
        config.dtype = stored
        check_fits(config, position, dtype, kv_bytes, "cpu", free_bytes=free, weight_format=format_of("int8"))

    most = bfloat16 + int8  # while both are held
    pages = most - kept - int8  # as many as the other format leaves room for
    check(pages, most)
    with pytest.raises(ValueError, match=r"MiB are free on cpu: .* are missing. Lower kv_cache_memory"):
        check(pages + 1, most)
    with pytest.raises(
        ValueError, match=r"quantization int8 .* not in torch.bfloat16 needs .* while the model is loaded"
    ):
        check(0, most - 1)
    check(0, kept + int8, dtype)  # the checkpoint is mapped, and takes no memory
    with pytest.raises(ValueError, match="Lower kv_cache_memory"):
        check(1, kept + int8, dtype)
