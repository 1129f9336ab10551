"""Tiny random configurations of the decoder architectures that are served."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from crossdock.workers.model.weights.config_fields import unread

WINDOW = 16
# Scaled to as many positions as the other models have.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_YARN |= {"truncate": False, "rope_theta": 150000.0}
_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_ROUTED: dict[str, Any] = {
    **_MOE,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,  # chunks of more than 26 tokens are cheaper with keys and values expanded
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_INDEXED: dict[str, Any] = {**_MLA, "index_topk": 13, "index_head_dim": 20, "index_n_heads": 16}
"""So many heads that hardly any score is zero: of equal scores transformers chooses any."""
_BLOCKS: dict[str, Any] = {
    **_MOE,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "index_n_heads": 2,
    "index_head_dim": 20,
    "index_block_size": 8,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
}
"""Blocks are pages of tests of logits, and half of one elsewhere."""

_PLAIN = (
    "aria_text biogpt bitnet cohere2_moe cwm flex_olmo gpt_bigcode granitemoeshared hunyuan_v1_moe hyperclovax jais2 "
    "jetmoe ministral ministral3 nanochat olmo persimmon phimoe vaultgemma"
)
_EXPERTS = "afmoe beam ernie4_5_moe exaone_moe flint hy_v3 laguna mellum minimax_m2 solar_open"
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2 sliding": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {**_SLIDING, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_SLIDING, "query_pre_attn_scalar": 12},
    "gemma4_text": {**_SLIDING, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "phi3": {"sliding_window": WINDOW},
    "phi": {"partial_rotary_factor": 0.5},
    "gpt_neox": {},
    "gpt2": {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},
    "mixtral": _MOE,
    "qwen2_moe": _MOE,
    "qwen3_moe": _MOE,
    "olmoe": _MOE,
    "olmo2": {},
    "olmo3": _SLIDING,
    "smollm3": {},
    "granite": {},
    "granitemoe": _MOE,
    "cohere": {},
    "cohere2": _SLIDING,
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**_MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "exaone4": _SLIDING,
    "helium": {},
    "ernie4_5": {},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    **dict.fromkeys(("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), _MLA),
    **dict.fromkeys(("axk2", "deepseek_v32"), _INDEXED),
    "glm_moe_dsa": {**_INDEXED, "indexer_types": ["full", "shared", "full", "full"]},
    "gpt_oss": {**_MOE, **_SLIDING, "rope_parameters": _YARN},
    "minimax_m3_vl_text": _BLOCKS,
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "arcee": {},
    "apertus": {},
    "dots1": {**_ROUTED, **_SLIDING},
    "nemotron": {},
    "lfm2": {"layer_types": ["full_attention"] * 4, "full_attn_idxs": [0, 1, 2, 3]},
    "lfm2_moe": {**_ROUTED, "layer_types": ["full_attention"] * 4},
}
SERVED["llama4_text"] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,  # as Maverick
    "intermediate_size_mlp": 96,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": WINDOW,
    "floor_scale": 8,  # queries grow every 8 tokens
    "attn_scale": 0.5,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
_KIMI: dict[str, Any] = {**_MLA, "linear_num_heads": 4, "linear_head_dim": 8, "num_local_experts": 4}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_MOE, **_DELTA, **_LINEAR, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**_DELTA, **_LINEAR},
    "qwen3_5_moe_text": {**_MOE, **_DELTA, **_LINEAR, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**_DELTA, **_LINEAR, "linear_num_key_heads": 4},
    "kimi_linear": {**_KIMI, **_LINEAR},
    "bailing_hybrid": {**_KIMI, **_LINEAR},
    "lfm2 conv": _SHORT_CONVOLUTIONS,
    "lfm2_moe conv": {**_ROUTED, **_SHORT_CONVOLUTIONS},
    "lfm3 conv": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"], "sliding_window": WINDOW},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 96},
    "granitemoehybrid": {**_MOE, **_MAMBA2, **_LINEAR, "shared_intermediate_size": 32},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "nemotron_h": {
        **_ROUTED,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "full_attention"],
        "num_hidden_layers": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
    },
}
"""Models with recurrent layers: some of their layers have attention, or all have it beside the recurrent part."""
SERVED |= RECURRENT
DIVISIBLE: dict[str, dict[str, Any]] = {"olmo_hybrid": {"linear_value_head_dim": 8}}
"""What models need so that their saved files can be divided: transformers saves a convolution over queries, keys and
values as thirds, which is only right where all are as wide."""
SERVED |= {name: {} for name in _PLAIN.split()} | dict.fromkeys(_EXPERTS.split(), _ROUTED)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 4, "n_head": 4}, "attention"),
    "mpt": ({"d_model": 48, "n_layers": 4, "n_heads": 4, "expansion_ratio": 2}, "attention"),
    "gptj": ({"n_embd": 48, "n_layer": 4, "n_head": 4, "rotary_dim": 8}, "attention"),
    "falcon": ({"head_dim": None}, "attention"),
    "minimax": ({**_MOE, **_LINEAR}, "recurrent layers that are not served: .*cache does not hold its states"),
    "mamba2": (
        {"num_heads": 8, "head_dim": 12, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        "no layers with attention, and so no KV pages",
    ),
    "jamba": ({**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1}, "chunks of a prompt"),
    "zamba2": (
        {
            "mamba_headdim": 12,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 8,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
        },
        "layers",
    ),
    "hy_v4": (_INDEXED, "its indexer chooses the tokens that are read, and was not compared"),
}


def build(name: str, options: dict[str, Any]) -> PreTrainedModel:
    """Return a random fp32 model whose weights are large enough for attention to matter."""
    torch.manual_seed(0)
    values = {key: value for key, value in (_BASE | options).items() if value is not None}
    config = AutoConfig.for_model(name.split()[0], **values)
    for key, _ in list(unread(values, config)):  # a size that this architecture has by another name
        delattr(config, key)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()
