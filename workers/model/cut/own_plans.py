"""Tensor-parallel plans of modules that transformers' own plans leave whole, in transformers' names for styles."""

from transformers import CONFIG_MAPPING

_LIKE = {"qwen3_vl_text": "qwen3"}
"""Decoders without a plan of their own, and those with the same modules whose plan they follow."""

OF_LATENTS = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "g_proj": "colwise",  # a gate for each head
    "o_proj": "rowwise",
}
"""The linears of latent attention whose heads are divided."""

_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.g_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.out_proj": "rowwise",
}
_GATED_MLP = {
    "layers.*.feed_forward.gate_proj": "colwise",
    "layers.*.feed_forward.up_proj": "colwise",
    "layers.*.feed_forward.down_proj": "rowwise",
}
_LFM = _ATTENTION | {
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
}
_OWN_PLANS = {
    "bamba": _ATTENTION | _GATED_MLP,
    "falcon_h1": _ATTENTION | _GATED_MLP,
    "gpt_oss": _ATTENTION
    | {  # experts are [E, inputs, outputs], and a gate's output lies beside its up's
        "embed_tokens": "embedding_rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
    },
    "granitemoehybrid": _ATTENTION
    | {"layers.*.shared_mlp.input_linear": "packed_colwise", "layers.*.shared_mlp.output_linear": "rowwise"},
    "lfm2": _LFM,
    "lfm2_moe": _LFM,
    "lfm3": _LFM,
    "minimax_m3_vl_text": _ATTENTION
    | {
        "embed_tokens": "embedding_rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp.shared_experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.shared_experts.down_proj": "rowwise",
    },
    "nemotron_h": {
        "layers.*.mixer.q_proj": "colwise",
        "layers.*.mixer.k_proj": "colwise",
        "layers.*.mixer.v_proj": "colwise",
        "layers.*.mixer.o_proj": "rowwise",
        "layers.*.mixer.up_proj": "colwise",
        "layers.*.mixer.down_proj": "rowwise",
        "layers.*.mixer.shared_experts.up_proj": "colwise",
        "layers.*.mixer.shared_experts.down_proj": "rowwise",
    },
}
"""The attention and the MLPs of models with recurrent layers, which `mixers.py` divides, of gpt-oss and MiniMax-M3."""


def own_plan(model_type: str) -> dict[str, str]:
    """Return, by pattern, the style of each module of a decoder that transformers' own plan lacks."""
    if model_type in _LIKE:
        return dict(CONFIG_MAPPING[_LIKE[model_type]].base_model_tp_plan)
    return _OWN_PLANS.get(model_type, {})
