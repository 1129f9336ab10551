"""Whether weights and KV pages fit, with numbers, before anything is loaded."""

import pytest
import torch

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.memory_fit import DoesNotFit, check_fits
from crossdock.workers.model.weights import measure_part
from tests.workers.architectures import build


def test_model_that_does_not_fit_is_refused_with_missing_bytes_and_advice() -> None:
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
