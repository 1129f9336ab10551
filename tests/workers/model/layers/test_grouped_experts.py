"""Experts by our grouped products give what transformers' own give, and the host waits for no GPU."""

from typing import Any

import pytest
import torch

from crossdock.kernels.backend import triton_is_interpreted
from crossdock.workers.model.layers import grouped_experts
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.layers.test_triton_layers import TWO, attention, prompts
from tests.workers.model.paged import monolithic, random_steps, through_pages

pytestmark = pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton: pip install triton")

# gates of their own, biases and transposed weights; gelu; shared experts beside
NAMES = ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "aria_text"]


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
    module = tiny(name)
    expected = [monolithic(module, prompt) for prompt in prompts()]
    model = wrap_module(module, LoadOptions(attention=attention()))
    assert module.config._experts_implementation == "crossdock"
    got = through_pages(model, prompts(), random_steps([len(prompt) for prompt in prompts()], seed=3))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


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
