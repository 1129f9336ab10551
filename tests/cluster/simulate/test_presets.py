"""Estimated profiles of GPUs, against their published specifications."""

import pytest

from crossdock.cluster.simulate.fleet import SimulatedFleet
from crossdock.workers.report.presets import GPUS, MODELS, preset


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_preset_reaches_the_limits_of_its_hardware_and_no_more(gpu: str, model: str) -> None:
    """A stream reads all weights for a token; a prompt multiplies by each of them."""
    tp = 8 if (gpu, model) == ("l4", "70b") else None
    if tp:
        with pytest.raises(ValueError, match="do not fit"):
            preset(f"{gpu}-{model}-tp4")
    estimate = preset(f"{gpu}-{model}" + (f"-tp{tp}" if tp else ""))
    weights = 2 * MODELS[model].parameters
    held = estimate.num_pages * estimate.page_bytes
    num_gpus = next(n for n in (1, 2, 4, 8) if weights + held <= n * GPUS[gpu].memory)
    assert weights / (num_gpus * GPUS[gpu].bandwidth) < estimate.cost.base
    assert estimate.cost.base < 2 * weights / (num_gpus * GPUS[gpu].bandwidth) + 0.01
    assert estimate.cost.per_prefill_token > weights / (num_gpus * GPUS[gpu].flops)
    assert estimate.max_model_len <= estimate.num_pages * estimate.page_size
    SimulatedFleet.model_validate({"pools": [{"name": "a", "profile": estimate}]})


def test_preset_of_h100_with_8b_equals_manual_computation() -> None:
    """16.06 GB over 0.8 x 3.35 TB/s and 1 ms; 16.06 GFLOP a token over 0.6 x 989 TFLOP/s; 128 KiB of KV a token."""
    estimate = preset("h100-8b")
    assert estimate.cost.base == pytest.approx(5.9925e-3 + 1e-3, rel=1e-3)
    assert estimate.cost.per_prefill_token == pytest.approx(2.7065e-5, rel=1e-3)
    assert estimate.cost.per_context == pytest.approx(131072 / 2.68e12, rel=1e-6)
    assert estimate.page_bytes == 16 * 131072
    assert estimate.num_pages * estimate.page_bytes == pytest.approx(72e9 - 16.06e9, rel=1e-3)
    two = preset("h100-8b-tp2").cost
    assert two.base == pytest.approx(5.9925e-3 / 2 + 1e-3 + 64 * 10e-6, rel=1e-3)


def test_preset_of_an_encoder_equals_manual_computation() -> None:
    """1.35 GB over 0.8 x 3.35 TB/s and 1 ms; 4 patches a row, each 1.35 GFLOP, over 0.6 x 989 TFLOP/s."""
    whole = preset("h100-vl7b")
    assert whole.encoder_cost is not None
    assert whole.encoder_cost.base == pytest.approx(0.5037e-3 + 1e-3, rel=1e-3)
    assert whole.encoder_cost.per_embedding_token == pytest.approx(4 * 1.35e9 / 593.4e12, rel=1e-3)
    assert whole.encoder_cost.added_seconds(37**2) == pytest.approx(12.46e-3 + 12.42e-3, rel=1e-2)
    assert whole.encoder_tokens == (256 << 20) // 7168
