"""Experts by our grouped products give what transformers' own give, and the host waits for no GPU."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from crossdock.kernels.backend import choose_attention
from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.cut import whole_experts
from crossdock.workers.model.layers import grouped_experts
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.weights.packed_layers import PackedExperts
from tests.benchmarks.scripts import script
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.layers.test_triton_layers import PROMPTS, TWO, attention
from tests.workers.model.paged import assert_near, in_random_steps, monolithic
from tests.workers.model.weights.test_packed_checkpoints import read, write_experts, write_gpt_oss
from tests.workers.quantised import CASES

pytestmark = pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton: pip install triton")

# gates of their own, biases and transposed weights; gelu; shared experts beside
NAMES = ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "aria_text"]

launches = script("models/launches")


@pytest.fixture(autouse=True)
def _older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts wait, as on a GPU before Hopper; few rows are computed at once."""
    monkeypatch.setattr(grouped_experts, "_waits_for_none", lambda *_: False)
    monkeypatch.setattr(grouped_experts, "_ROWS_AT_ONCE", 16)


def tiny(name: str) -> Any:
    layer_types = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gpt_oss" else {}
    return build(name, SERVED.get(name, {}) | TWO | layer_types)


@pytest.mark.parametrize("name", rest_in_soak(NAMES, "gpt_oss", "qwen3_moe"))
def test_logits_equal_transformers_in_any_chunks(name: str) -> None:
    module, prompts = tiny(name), PROMPTS[:2]
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module, LoadOptions(attention=attention()))
    assert module.config._experts_implementation == "crossdock"
    assert_near(in_random_steps(model, prompts, seed=3), expected, 1e-4)


@pytest.mark.parametrize("failure", ["wrong", "raises"])
def test_experts_that_fail_leave_transformers_own(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def some(_: Any, hidden: torch.Tensor, *__: Any) -> torch.Tensor:
        if failure == "raises":
            raise RuntimeError("no such instruction")
        return torch.ones_like(hidden)

    monkeypatch.setattr(grouped_experts, "_some", some)
    module = tiny("qwen3_moe")
    wrap_module(module, LoadOptions(attention=attention()))
    assert module.config._experts_implementation == "grouped_mm"
    assert ("logits differ" if failure == "wrong" else "no such instruction") in caplog.text


@pytest.mark.parametrize("name", ["mxfp4 of gpt-oss", "awq"])
def test_packed_experts_are_multiplied_by_their_codes_without_waiting(
    name: str, launches: ModuleType, tmp_path: Path
) -> None:
    """Check logits, launches, and memory after a move. Gate and up of AWQ are matrices of their own, with offsets."""
    is_of_gpt_oss = name not in CASES
    module = write_gpt_oss(tmp_path / "packed") if is_of_gpt_oss else write_experts(tmp_path, CASES[name])
    packed = read(tmp_path / "packed")[0].eval()
    model = wrap_module(packed, LoadOptions(attention=attention()))
    assert packed.config._experts_implementation == "crossdock"
    found = in_random_steps(model, PROMPTS[:1], seed=3)
    assert_near(found, [monolithic(module.eval(), PROMPTS[0])], 1e-4)
    model.pool.free()
    with_triton = replace(model, attention=choose_attention("triton", model.device))
    seen = launches.trace(with_triton, [1, 1, 1])
    assert not seen.waits
    assert seen.counts["_experts_kernel"] == 2 * packed.config.num_hidden_layers
    packed.to(torch.device("cpu"))  # moves what the kernel reads too
    moved = [each for each in packed.modules() if isinstance(each, PackedExperts)]
    assert all(each.stacked.codes[1].data_ptr() == each.experts[1][0].codes.data_ptr() for each in moved)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_outputs_of_whole_experts_on_ranks_add_up_without_counting_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank gets all rows, and leaves out those of others' experts. No row goes to the last rank's."""
    monkeypatch.setattr(whole_experts, "_may_count_rows", lambda *_: False)
    ALL_EXPERTS_FUNCTIONS.register("crossdock", grouped_experts._forward)
    hidden, shares = torch.randn(40, 48), torch.rand(40, 2)
    chosen = torch.stack([torch.arange(40) % 3, (torch.arange(40) + 1) % 3], 1)
    expected = experts_of(tiny(name))(hidden, chosen, shares)
    total = torch.zeros_like(expected)
    for first, end in ((0, 1), (1, 3), (3, 4)):
        module = tiny(name)
        own = experts_of(module)
        for key, parameter in list(own.named_parameters()):
            setattr(own, key, torch.nn.Parameter(parameter[first:end].clone(), requires_grad=False))
        module.set_experts_implementation("crossdock")
        whole_experts.compute_own_experts(own, first, end)
        part = own(hidden, chosen, shares)
        assert part.isfinite().all()
        total += part
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


def experts_of(module: Any) -> Any:
    return next(each for each in module.modules() if hasattr(each, "is_transposed"))


def test_codes_that_the_kernel_cannot_read_are_dequantised_one_expert_at_a_time(tmp_path: Path) -> None:
    write_experts(tmp_path, CASES["fp8 blocks"])
    packed = read(tmp_path / "packed")[0].eval()
    wrap_module(packed, LoadOptions(attention=attention()))
    assert packed.config._experts_implementation == "eager"
