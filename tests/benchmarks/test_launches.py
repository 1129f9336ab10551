"""A layer with Triton steps launches few kernels, and experts make the host wait for no GPU."""

from types import ModuleType

import pytest
import torch

from crossdock.kernels.packages import triton_is_interpreted
from tests.benchmarks.scripts import script

pytestmark = pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton: pip install triton")


launches = script("models/launches")


def test_layer_with_triton_steps_launches_ten_kernels(launches: ModuleType) -> None:
    """Count one family, which has norms of queries and keys as well."""
    fused = launches.per_layer("qwen3", is_fused=True)
    assert fused.total() <= 10, fused
    assert launches.per_layer("qwen3", is_fused=False).total() >= 30


@pytest.mark.parametrize(
    ("name", "lengths", "is_fused", "product"),
    [
        ("qwen3_moe", [1, 1, 1], True, "_grouped_mm"),
        ("qwen3_moe", [9, 4], False, "_experts_kernel"),
        ("mixtral", [9, 4], True, "_experts_kernel"),
    ],
)
def test_experts_run_through_two_grouped_products_without_waiting(
    launches: ModuleType, name: str, lengths: list[int], is_fused: bool, product: str
) -> None:
    seen = launches.trace(launches.tiny(name, 1, is_fused, product == "_experts_kernel"), lengths)
    assert not seen.waits
    assert seen.counts[product] == 2
    assert seen.counts.keys().isdisjoint({"_grouped_mm", "_experts_kernel"} - {product})


@pytest.mark.filterwarnings("ignore")  # of torch, about the operators that are called
def test_operators_that_wait_are_counted(launches: ModuleType) -> None:
    """A sum is none of them; each of the others is a mutation that the check above must detect."""
    x = torch.tensor([1, 0, 2])
    with torch.no_grad(), launches.Launches() as seen:
        x.sum()
        x.nonzero()
        x[x > 0]
        x.repeat_interleave(x)
        x.sum().item()
        torch.bincount(x)
        x.tolist()
    assert set(seen.waits) == {"nonzero", "index", "repeat_interleave", "_local_scalar_dense", "bincount"}
