"""A field of config.json that no code reads is harmless, or the model is refused by the name of the field."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.config_fields import COMPUTED, unread
from crossdock.workers.model.weights.weights import read_config
from tests.workers.architectures import SERVED, build


@pytest.mark.parametrize("name", sorted({name.partition(" ")[0] for name in SERVED} & set(CONFIG_MAPPING)))
def test_fields_that_transformers_writes_are_read_or_harmless(name: str) -> None:
    config = AutoConfig.for_model(name)
    assert list(unread(json.loads(config.to_json_string(use_diff=False)), config)) == []


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "_name_or_path": "meta-llama/Llama-3.2-1B",
        "auto_map": {"AutoConfig": "own.Config"},
        "is_llama_config": True,
        "max_sequence_length": 2048,
        "model_max_length": 4096,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "tokenizer_class": "LlamaTokenizer",
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": "float16"},
        "unsloth_version": "2024.9",
        "use_cache": True,
        "use_flash_attn": True,
    },
    "qwen3_moe": {"max_window_layers": 48, "router_aux_loss_coef": 0.001, "output_router_logits": True},
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "embd_pdrop": 0.1},
    "deepseek_v3": {"aux_loss_alpha": 0.001, "ep_size": 8, "moe_layer_freq": 1, "seq_aux": True},
    "gpt_oss": {"initial_context_length": 4096, "experts_per_token": 4, "router_aux_loss_coef": 0.9},
    "gpt2": {"n_ctx": 1024, "task_specific_params": {"text-generation": {"max_length": 50}}},
    "opt": {"prefix": "</s>", "_remove_final_layer_norm": False, "welcome": "## Hello", "antemplate": "[Genre: <|>]"},
    "minimax_m2": {"use_mtp": True, "num_mtp_modules": 3, "rotary_dim": 64, "attn_type_list": [1, 1, 1]},
    "minimax_m3_vl_text": {
        "num_mtp_modules": 3,
        "n_shared_experts": 1,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_disable_index_value": [0, 1],
        },
    },
    "falcon_h1": {"mlp_expansion_factor": 8, "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_rank": "auto"},
    "exaone_moe": {"is_moe_layer": [False, True], "first_k_dense_replace": 1, "sliding_window_pattern": "LLLG"},
    "afmoe": {"load_balance_coeff": 1e-3, "use_grouped_mm": True, "mup_enabled": True, "num_dense_layers": 2},
    "ernie4_5_moe": {"moe_capacity": [64, 64, 64], "moe_use_aux_free": True},
    "hunyuan_v1_moe": {"moe_intermediate_size": [3072] * 2, "num_shared_expert": [1, 1], "im_start_id": 5},
    "nemotron_h": {"rescale_prenorm_residual": True, "time_step_rank": 512, "mtp_hybrid_override_pattern": "*E"},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1, "full_attention_interval": 4},
    "kimi_k25": {"ignore_index": -100},
    "lfm2_moe": {"block_ff_dim": 7168, "conv_dim": 2048},
    "distilbert": {
        "activation": "gelu",
        "finetuning_task": "sst-2",
        "seq_classif_dropout": 0.2,
        "sinusoidal_pos_embds": False,
    },
    "electra": {"summary_activation": "gelu", "summary_last_dropout": 0.1, "embedding_size": 768},
    "mpnet": {"_name_or_path": "microsoft/mpnet-base", "relative_attention_num_buckets": 32},
    "gemma3_text": {"rope_local_base_freq": 1e4, "use_bidirectional_attention": True, "_sliding_window_pattern": 6},
    "gpt_bigcode": {"summary_type": "cls_index", "summary_use_proj": True, "inference_runner": 0},
}
PUBLISHED |= {
    kind: {**{name: value for name, value in values.items() if "." not in name}, **PUBLISHED.get(kind, {})}
    for kind, values in COMPUTED.items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_checkpoints_are_read_or_harmless(name: str) -> None:
    assert list(unread(PUBLISHED[name], AutoConfig.for_model(name))) == []


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "logit_scale", 0.5),
        ("llama", "final_logit_softcapping", 30.0),
        ("llama", "sliding_window", 16),
        ("llama", "use_qk_norm", True),
        ("llama", "embedding_multiplier", 12.0),
        ("llama", "something_new", {"a": 2}),
        ("qwen3", "attention_multiplier", 0.02),
        ("cohere2", "layer_switch", 3),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m3_vl_text", "n_shared_experts", 2),
        ("minimax_m3_vl_text", "sparse_attention_config.sparse_init_block", 1),
        ("minimax_m3_vl_text", "sparse_attention_config.sparse_score_type", "mean"),
        ("qwen3_5_text", "mamba_ssm_dtype", "bfloat16"),
        ("phi", "rotary_dim", 64),
        ("llama", "image_size", 224),
    ],
)
def test_field_that_no_code_reads_is_refused_by_name(name: str, field: str, value: Any, tmp_path: Path) -> None:
    config = AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    read_config(tmp_path)
    outer, _, own = field.rpartition(".")
    change = {outer: {own: value}} if outer else {field: value}
    found = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=rf"config\.json: {field} is .* code of {name} does not read this field"):
        read_config(tmp_path)


def test_refusal_comes_before_weights_are_read(tmp_path: Path) -> None:
    build("llama", {}).save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text()) | {"logits_scaling": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(found))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"logits_scaling is 8\.0"):
        load_model(ModelSpec(str(tmp_path)))


def test_field_of_a_text_part_is_refused_and_of_an_encoder_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.for_model("llava")
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    found = json.loads(config.to_json_string(use_diff=False))
    found["vision_config"]["something_new"] = 7
    found["image_something"] = 8
    file.write_text(json.dumps(found))
    with caplog.at_level(logging.WARNING):
        read_config(tmp_path)
    assert "vision_config.something_new is 7" in caplog.text
    assert "image_something is 8" in caplog.text
    found["text_config"]["something_new"] = 7
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"text_config\.something_new is 7"):
        read_config(tmp_path)
