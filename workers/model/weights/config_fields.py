"""Fields of config.json: read by transformers' code of the model or by ours, harmless, or a reason to refuse the model.

transformers keeps every field of a configuration, and only code that reads a field gives it an effect. A field for code
that comes with a model (another scale, another activation) would be passed over in silence.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from inspect import getfile
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from crossdock.workers.model.architecture import DECODERS, text_config
from crossdock.workers.model.weights.scheme import KEYS

logger = logging.getLogger(__name__)

READ_HERE = (
    *KEYS,
    *("architectures", "model_type", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id"),
    *("layer_types", "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor"),
    *("original_max_position_embeddings", "per_layer_config", "num_nextn_predict_layers", "num_labels"),
    *("sentence_transformers", "sbert_ce_default_activation_function"),
)
"""Fields that all models may have, read by our code or by transformers' code for all models."""

HARMLESS: Mapping[str, str] = {
    "_*": "private to the program that wrote the file",
    "transformers_version": "which program wrote the file",
    "*_version": "which program wrote the file",
    "transformers.js_config": "settings of another program",
    "unsloth_*": "settings of another program",
    "welcome": "settings of another program",
    "antemplate": "settings of another program",
    "newlinemode": "settings of another program",
    "nobreakmodel": "settings of another program",
    "badwordsids": "settings of another program",
    "formatoptns": "settings of another program",
    "auto_map": "code that comes with the model, which is not run",
    "custom_pipelines": "code that comes with the model, which is not run",
    "license*": "a description",
    "language*": "a description",
    "tags": "a description",
    "datasets": "a description",
    "finetuned_from": "a description",
    "is_llama_config": "a description",
    "name_or_path": "a description",
    "model_name": "a description",
    "tokenizer_class": "the tokenizer's files say that",
    "processor_class": "the processor's files say that",
    "tokenizer": "the tokenizer's files say that",
    "prefix": "a text before prompts, of pipelines",
    "task_specific_params": "settings of pipelines",
    "finetuning_task": "settings of pipelines",
    "problem_type": "settings of pipelines",
    "id2label": "names of classes",
    "label2id": "names of classes",
    "*_token_id": "the tokenizer adds tokens; those that end answers are read",
    "*_token_index": "the place of pictures and sound in prompts, which the processor makes",
    "*_token_ids": "the tokenizer adds tokens; those that end answers are read",
    "use_cache": "keys are kept in pages",
    "cache_implementation": "keys are kept in pages",
    "return_dict*": "what transformers returns in Python",
    "output_*": "what transformers returns in Python",
    "use_return_dict": "what transformers returns in Python",
    "torchscript": "what transformers returns in Python",
    "attn_implementation": "attention is chosen here",
    "attention_implementation": "attention is chosen here",
    "*flash_attn*": "attention is chosen here",
    "*flash_attention*": "attention is chosen here",
    "use_sdpa": "attention is chosen here",
    "bf16": "the type of weights is in dtype",
    "fp16": "the type of weights is in dtype",
    "fp32": "the type of weights is in dtype",
    "use_bfloat16": "the type of weights is in dtype",
    "params_dtype": "the type of weights is in dtype",
    "pretraining_tp": "how training divided the model; the result is the same",
    "ep_size": "how training divided the model; the result is the same",
    "tp_size": "how training divided the model; the result is the same",
    "*parallel_size": "how training divided the model; the result is the same",
    "sequence_parallel": "how training divided the model; the result is the same",
    "*dropout*": "training alone",
    "*_pdrop": "training alone",
    "*initializer*": "training alone",
    "init_*": "training alone",
    "*init_std*": "training alone",
    "*_init_method*": "training alone",
    "*loss*": "training alone",
    "*_aux_*": "training alone",
    "seq_aux": "training alone",
    "router_jitter_noise": "training alone",
    "input_jitter_noise": "training alone",
    "*checkpointing*": "training alone",
    "*freeze*": "training alone",
    "train*": "training alone",
    "pretrain*": "training alone",
    "learning_rate": "training alone",
    "weight_decay": "training alone",
    "z_*": "training alone",
    "ignore_index": "training alone",
    "load_balance*": "training alone",
    "time_step_floor": "training alone",
    "time_step_max": "training alone",
    "time_step_min": "training alone",
    "time_step_rank": "training alone",
    "*mtp*": "layers that guess further tokens, which method mtp alone reads",
    "max_window_layers": "which layers have a window, where sliding_window is read",
    "initial_context_length": "a length of the original training, which rope_parameters has",
    "n_ctx": "a length; n_positions counts",
    "max_sequence_length": "a length for the tokenizer; max_position_embeddings counts",
    "model_max_length": "a length for the tokenizer; max_position_embeddings counts",
    "max_seq_len*": "a length for the tokenizer; max_position_embeddings counts",
    "seq_length": "a length for the tokenizer; max_position_embeddings counts",
    "seq_len": "a length for the tokenizer; max_position_embeddings counts",
    "max_length": "settings of generation, read from generation_config.json",
    "chunk_size_feed_forward": "how much is computed at once",
    "*_kernel*": "how it is computed",
    "use_fused_*": "how it is computed",
    "use_grouped_mm": "how it is computed",
    "fused_*": "how it is computed",
    "fuse_*": "how it is computed",
    "is_decoder": "each model here is one",
    "is_encoder_decoder": "others are refused by their type",
    "add_cross_attention": "encoders are refused by their type",
    "cross_attention_hidden_size": "encoders are refused by their type",
    "tie_encoder_decoder": "encoders are refused by their type",
    "summary_*": "a head for another task",
    "pruned_heads": "tensors have the shapes of config.json, or the model is refused",
    "tf_legacy_loss": "another framework",
    "use_jax*": "another framework",
    "onnx*": "another framework",
    "neuron*": "another device",
}
"""Fields without effect on what a model computes, by pattern."""

_NEW_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_ERNIE = {"use_rmsnorm": True, "weight_share_add_bias": True}
_GATED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
_HUNYUAN = {"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms"}
_ABSOLUTE = {"position_embedding_type": "absolute"}
_NOMIC = {
    "activation_function": "swiglu",
    "dense_seq_output": True,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "scale_attn_weights": True,
    "use_xentropy": True,
}
_LFM2 = {"block_use_swiglu": True, "block_norm_eps": 1e-5, "use_pos_enc": True, "theta": 1000000.0}
COMPUTED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "apertus": {"qk_norm": True},
    "bamba": {"attn_rotary_emb": 64},
    "bert": _ABSOLUTE,
    "cohere2": {
        "position_embedding_type": "rope_gptj",
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "order_of_interleaved_layers": "local_attn_first",
        "layer_switch": 4,
    },
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v3": _NEW_ROUTER,
    "deepseek_v32": _NEW_ROUTER,
    "distilbert": {"tie_weights_": True, "output_past": True},
    "dots1": _NEW_ROUTER,
    "electra": _ABSOLUTE,
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": {**_ERNIE, "moe_capacity": 64, "moe_gate": "topk", "moe_gate_act": "softmax"},
    "exaone_moe": _NEW_ROUTER,
    "falcon_h1": {"mamba_use_mlp": True},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "glm4_moe": _NEW_ROUTER,
    "glm4_moe_lite": _NEW_ROUTER,
    "glm_moe_dsa": {
        **_NEW_ROUTER,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "moe_router_dtype": "float32",
    },
    "gpt_bigcode": {"pad_key_length": True, "validate_runner_input": True},
    "gpt_oss": {"experts_per_token": 4, "swiglu_limit": 7.0},
    "granite": {"normalization_function": "rmsnorm", "position_embedding_type": "rope"},
    "granitemoehybrid": {"normalization_function": "rmsnorm"},
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": {**_HUNYUAN, "use_mixed_mlp_moe": True, "norm_topk_prob": True, "num_shared_expert": 1},
    "kimi_k25": {"use_unified_vision_chunk": True},
    "kimi_linear": {
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "mla_use_nope": True,
    },
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama": {"rotary_type": "normal-rotary"},
    "longcat_flash": {"zero_expert_type": "identity", "attention_method": "MLA"},
    "minimax_m2": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": 1,
    },
    "minimax_m3_vl_text": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "sparse_attention_config.use_sparse_attention": True,
        "sparse_attention_config.sparse_score_type": "max",
        "sparse_attention_config.sparse_init_block": 0,
    },
    "modernbert": {**_ABSOLUTE, "layer_norm_eps": 1e-5, "sparse_pred_ignore_index": -100},
    "nemotron": {"normalization_type": "layernorm1p", "rope_percent": 0.5},
    "nemotron_h": {"norm_eps": 1e-5, "rms_norm_eps": 1e-5, "attention_head_dim": 128},
    "nomic_bert": _NOMIC,
    "phi": {"rotary_dim": 32},
    "qwen3_5_moe_text": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_moe": {"use_qk_norm": True},
    "qwen3_next": _GATED,
    "roberta": _ABSOLUTE,
    "stablelm": {"rope_pct": 0.25, "norm_eps": 1e-5},
    "starcoder2": {
        "norm_type": "layer_norm",
        "mlp_type": "default",
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
    "step3p7": {"scoring_func": "sigmoid", "use_moe_router_bias": True, "first_k_dense_replace": 3},
    "xlm-roberta": _ABSOLUTE,
}
"""Fields that transformers' code of a model type does not read, and the value that this code computes anyway.

A list, with an item for each layer, may hold this value alone. A name with a point is of a field within another, all
of whose fields are then checked.
"""

_OLDER_HUNYUAN = (
    "attention_head_dim",
    "cla_share_factor",
    "dense_list",
    "org_vocab_size",
    "*_id",
    "pool_type",
    "enable_lm_head_fp32",
)
_OLDER_LFM2 = ("block_dim", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_use_xavier_init", "num_heads")
OF_OLDER_CODE: Mapping[str, tuple[str, ...]] = {
    "exaone_moe": ("is_moe_layer",),
    "falcon_h1": ("mlp_expansion_factor",),
    "hunyuan_v1_dense": _OLDER_HUNYUAN,
    "hunyuan_v1_moe": (*_OLDER_HUNYUAN, "moe_intermediate_size", "qk_rope_head_dim"),
    "lfm2": _OLDER_LFM2,
    "lfm2_moe": (*_OLDER_LFM2, "block_ff_dim"),
    "minimax_m3_vl_text": ("sparse_attention_config.sparse_disable_index_value",),
    "nemotron": ("kv_channels",),
    "starcoder2": ("sigma_init",),
}
"""Fields without effect in the published checkpoints of a model type: copies of sizes that other fields have, and
parts that would have tensors of their own."""

OF_ENCODERS = ("*image*", "*img*", "*vision*", "*video*", "*audio*", "*projector*", "mm_*")
"""Fields beside the language model's part, of the encoders of pictures and sound: named in the log."""

_NOTHING: tuple[Any, ...] = (None, False, "", [], {}, 0, 1, 0.0, 1.0)
"""Values that ask for nothing: a factor of 1, a bound or a number of 0, what is off."""


def check_fields(file: Path, found: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Check the fields of config.json, which `found` has.

    Fields of encoders of pictures and sound are only logged: their code has changed names often, and answers of text
    do not depend on them.

    Raises:
        ValueError: a field of the language model is neither read nor harmless; the message names the field.
    """
    has_encoder = text_config(config) is not config
    for name, value in unread(found, config):
        reason = f"{file}: {name} is {value!r:.100}: transformers' code of {config.model_type} does not read this field"
        part, _, own = name.rpartition(".")
        if _has_checked_fields(part.rpartition(".")[2], text_config(config).model_type):
            part = part.rpartition(".")[0]
        if part and part not in (*DECODERS, "thinker_config.text_config"):
            logger.warning("%s", reason)
            continue
        if not part and has_encoder and any(fnmatchcase(own, pattern) for pattern in OF_ENCODERS):
            logger.warning("%s", reason)
            continue
        nothing: Any = None
        for part in reversed(name.split(".")):
            nothing = {part: nothing}
        raise ValueError(
            f"{reason}, so the model may be computed wrongly. If the field changes nothing, serve the model with "
            f"--hf-overrides '{json.dumps(nothing)}', which leaves it out"
        )


def unread(
    found: Mapping[str, Any], config: PretrainedConfig, path: str = "", outer: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are neither read nor harmless. `outer`: the words in code of the model around this part."""
    known = outer | _names_in_code(type(config))  # type: ignore[arg-type]  # mypy: a class that compares has no hash
    for name, value in found.items():
        part = getattr(config, name, None) if isinstance(value, Mapping) else None
        if isinstance(part, PretrainedConfig):
            yield from unread(value, part, f"{path}{name}.", known)
        elif isinstance(value, Mapping) and _has_checked_fields(name, config.model_type):
            for inner, of_inner in value.items():
                full = f"{name}.{inner}"
                if inner not in known and not _is_harmless(full, of_inner, config.model_type, nothing=()):
                    yield f"{path}{full}", of_inner
        elif not (name in known or name in READ_HERE or _is_harmless(name, value, config.model_type)):
            yield f"{path}{name}", value


def _has_checked_fields(name: str, model_type: str) -> bool:
    """Return whether the fields within a field are checked one by one."""
    return any(field.startswith(f"{name}.") for field in COMPUTED.get(model_type, {}))


def _is_harmless(name: str, value: Any, model_type: str, nothing: tuple[Any, ...] = _NOTHING) -> bool:
    """Return whether a field that is not read changes nothing with this value. `nothing`: values that ask for that."""
    if any(value == each and type(value) is type(each) for each in nothing):
        return True
    computed = COMPUTED.get(model_type, {})
    if name in computed and all(each == computed[name] for each in (value if isinstance(value, list) else [value])):
        return True
    return any(fnmatchcase(name, pattern) for pattern in (*HARMLESS, *OF_OLDER_CODE.get(model_type, ())))


@cache
def _names_in_code(config_class: type[PretrainedConfig]) -> frozenset[str]:
    """Return the words in transformers' code of a model: in the folders of its configuration and its bases."""
    models = [each for each in config_class.__mro__ if each.__module__.startswith("transformers.models.")]
    folders = sorted({Path(getfile(each)).parent for each in models})
    texts = (file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("*.py")))
    words = frozenset(word for text in texts for word in re.findall(r"\w+", text))
    return words | frozenset(config_class.attribute_map)
