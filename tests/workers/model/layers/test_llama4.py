"""Llama 4's layers: attention chunks where requests can leave them, and the backends and kernels that refuse them."""

import dataclasses
from typing import Any

import pytest
import torch

from crossdock.kernels.backend import TORCH, choose_attention
from crossdock.workers.model.layers.routed_experts import skip_idle_experts
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk
from tests.workers.architectures import SERVED, WINDOW, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic

LAYERS = SERVED["llama4_text"]
CAUSAL = dataclasses.replace(TORCH, name="flash_attn", takes_attention_chunks=False)


def test_layers_with_rope_have_attention_chunks_and_every_other_sees_all() -> None:
    model = wrap_module(build("llama4_text", LAYERS))
    assert model.windows == [AttentionChunk(WINDOW), None] * 2


@pytest.mark.parametrize("changes", [{"use_qk_norm": False}, {"attn_temperature_tuning": False}, {"moe_layers": []}])
def test_logits_of_variants_equal_transformers(changes: dict[str, Any]) -> None:
    """Maverick has no norm of queries and keys, and the names of its layers are its own."""
    module, prompt = build("llama4_text", LAYERS | changes), torch.arange(3, 60)
    expected = [monolithic(module, prompt)]
    assert_near(in_random_steps(wrap_module(module), [prompt], seed=3), expected)


def test_attention_chunk_that_no_request_leaves_needs_no_backend_of_its_own() -> None:
    size = 32  # more than the tokens of the check at load
    module, prompt = build("llama4_text", LAYERS | {"attention_chunk_size": size}), torch.arange(3, 3 + size)
    expected = [monolithic(module, prompt)]
    model = wrap_module(module, LoadOptions(max_model_len=size, attention=CAUSAL))
    assert model.windows == [None] * 4
    assert_near(in_random_steps(model, [prompt], seed=3), expected)


def test_backend_without_attention_chunks_refuses_longer_requests_with_the_reason() -> None:
    with pytest.raises(ValueError, match=f"flash_attn has no attention chunks.* max_model_len {WINDOW} or"):
        wrap_module(build("llama4_text", LAYERS), LoadOptions(max_model_len=WINDOW + 1, attention=CAUSAL))


def test_own_backends_take_attention_chunks() -> None:
    cpu = torch.device("cpu")
    assert choose_attention("auto", cpu).takes_attention_chunks
    assert choose_attention("torch", cpu).takes_attention_chunks


@pytest.mark.parametrize("num_routed", [1, 2])
def test_experts_compute_the_rows_that_are_routed_to_them_and_give_transformers_outputs(num_routed: int) -> None:
    module: Any = build("llama4_text", LAYERS | {"num_experts_per_tok": num_routed})
    layer, hidden = module.model.layers[1].feed_forward, torch.randn(9, 48)
    expected, _ = layer(hidden)
    skip_idle_experts(module)
    products, outputs = list[int](), list[torch.Size]()
    layer.experts.act_fn.register_forward_hook(lambda _module, _inputs, gate: products.append(len(gate)))
    layer.experts.register_forward_hook(lambda _module, _inputs, out: outputs.append(out.shape))
    found, _ = layer(hidden)
    torch.testing.assert_close(found, expected)
    assert sum(products) == 9 * num_routed
    assert outputs == [(9 * num_routed, 48)], "ranks sum no more than the routed rows"


def test_layers_with_attention_chunks_are_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert not wrap_module(build("llama4_text", LAYERS)).kernels
    assert "own code: some layers attend within chunks" in caplog.text
