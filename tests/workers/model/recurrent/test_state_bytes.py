"""Bytes of one request's recurrent state, counted from transformers' configurations without weights."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from crossdock.workers.model.architecture import text_config
from crossdock.workers.model.recurrent.recurrent_layers import keep_states_in_pages


@pytest.mark.parametrize(
    ("name", "options", "num_bytes"),
    [
        # 36 layers: 32 heads of 128 x 128 float32, and 4 inputs of 8192 channels
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2}, 36 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)),
        # LFM2-1.2B: 10 of 16 layers, 3 inputs of 2048 channels
        (
            "lfm2",
            {"hidden_size": 2048, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
            10 * 2048 * 3 * 2,
        ),
        # Granite-4.0-H-Tiny: 36 of 40 layers, 48 heads of 64 x 128 float32, and 4 inputs of 3328 channels
        (
            "granitemoehybrid",
            {
                "hidden_size": 1536,
                "num_hidden_layers": 40,
                "layer_types": (["linear_attention"] * 9 + ["full_attention"]) * 4,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "num_local_experts": 4,
                "mamba_n_heads": 48,
                "mamba_d_head": 64,
                "mamba_d_state": 128,
            },
            36 * (48 * 64 * 128 * 4 + 3328 * 4 * 2),
        ),
    ],
)
def test_state_of_a_model_has_as_many_bytes_as_its_configuration_says(
    name: str, options: dict[str, Any], num_bytes: int
) -> None:
    config = AutoConfig.for_model(name, **options)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")

    def compute(cache: DynamicCache) -> None:
        module(input_ids=torch.tensor([[3, 4]], device="meta"), past_key_values=cache, use_cache=True)

    layers = range(config.num_hidden_layers)
    states = keep_states_in_pages(module.eval(), text_config(config), layers, compute)
    assert states.num_bytes == num_bytes
