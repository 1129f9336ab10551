"""The configuration that the metadata of a GGUF file describes, field by field.

transformers' own reader leaves out rotary scaling, partial rotations, windows and more, and says nothing. So what each
architecture needs stands here, and what is left over is harmless or refused (`gguf_keys`).
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig, PretrainedConfig

from crossdock.workers.model.weights.gguf_keys import Metadata

_RMS = "{arch}.attention.layer_norm_rms_epsilon"
_NORM = "{arch}.attention.layer_norm_epsilon"
_GEMMA3_PATTERN = 6  # one layer of six sees all tokens
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by another width than that of their heads, as llama.cpp does."""
_ROPE = "{arch}.rope.scaling."
_KINDS = {"gemma3": ("default", "linear"), "phi3": ("default", "longrope")}
"""The scaling that transformers computes for these models. Others take each kind."""


class Architecture(NamedTuple):
    """A `general.architecture` that is read, as transformers' model."""

    model_type: str
    eps: str = "rms_norm_eps"
    eps_key: str = _RMS
    turns_part: bool = False  # rope.dimension_count may be less than a head's width
    has_window: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama"),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe"),
    "phi3": Architecture("phi3", turns_part=True, has_window=True),
    "gemma2": Architecture("gemma2", has_window=True),
    "gemma3": Architecture("gemma3_text", has_window=True),
    "starcoder2": Architecture("starcoder2", "norm_epsilon", _NORM),
    "stablelm": Architecture("stablelm", "layer_norm_eps", _NORM, turns_part=True),
    "nemotron": Architecture("nemotron", "norm_eps", _NORM, turns_part=True),
    "lfm2": Architecture("lfm2", "norm_eps"),
}
"""Architectures that are read: `tests/workers/model/weights/test_gguf_config.py` compares each with transformers."""


def config_of(metadata: Metadata, tensors: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration of the model in a file. `tensors`: gguf's, by name.

    Raises:
        ValueError: a key or a value is not read; the message names the key.
    """
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise metadata.refuse("general.architecture", metadata.architecture, f"one of {', '.join(ARCHITECTURES)}")
    values = _sizes(metadata, tensors) | _tokens(metadata)
    if not isinstance(eps := metadata.take(architecture.eps_key), float):
        raise metadata.refuse(architecture.eps_key, eps, "a number")
    values[architecture.eps] = as_written(eps)
    values |= _of_architecture(metadata, tensors)
    values |= _windows(metadata, architecture, values)
    values["rope_parameters"] = _rotary(metadata, architecture, tensors, values)
    values["tie_word_embeddings"] = "output.weight" not in tensors
    return AutoConfig.for_model(architecture.model_type, **values)


def _sizes(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that all architectures have."""
    heads = _same(metadata, "{arch}.attention.head_count")
    hidden = _needed(metadata, "{arch}.embedding_length")
    values = {
        "max_position_embeddings": _needed(metadata, "{arch}.context_length"),
        "hidden_size": hidden,
        "num_hidden_layers": _needed(metadata, "{arch}.block_count"),
        "intermediate_size": _same(metadata, "{arch}.feed_forward_length"),
        "num_attention_heads": heads,
        "vocab_size": _rows(metadata, tensors),
    }
    width = hidden // heads
    values["head_dim"] = metadata.take("{arch}.attention.key_length", width)
    if (value := metadata.take("{arch}.attention.value_length", width)) != values["head_dim"]:
        raise metadata.refuse("{arch}.attention.value_length", value, f"the width of keys, {values['head_dim']}")
    if metadata.architecture != "lfm2":
        values["num_key_value_heads"] = _same(metadata, "{arch}.attention.head_count_kv", heads)
    return values


def _rows(metadata: Metadata, tensors: Mapping[str, Any]) -> int:
    if "token_embd.weight" not in tensors:
        raise metadata.refuse("tensors", "without token_embd.weight", "a model with its embeddings")
    rows = int(tensors["token_embd.weight"].shape[1])
    if (size := metadata.take("{arch}.vocab_size", rows)) != rows:
        raise metadata.refuse("{arch}.vocab_size", size, f"the rows of token_embd.weight, {rows}")
    return rows


def _tokens(metadata: Metadata) -> dict[str, Any]:
    """Return special tokens. All that end a text or a turn end an answer."""
    ends = [metadata.take(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += metadata.take("tokenizer.ggml.eos_token_ids", [])
    known = list(dict.fromkeys(token for token in ends if token is not None))
    return {
        "eos_token_id": (known[0] if len(known) == 1 else known) if known else None,
        "bos_token_id": metadata.take("tokenizer.ggml.bos_token_id"),
        "pad_token_id": metadata.take("tokenizer.ggml.padding_token_id"),
    }


def _of_architecture(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that one architecture alone has."""
    name = metadata.architecture
    if name == "llama":
        return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if name in ("qwen2moe", "qwen3moe"):
        return _experts(metadata, is_normed=name == "qwen3moe")
    if name in _LARGEST_GEMMAS:
        caps = {"final_logit_softcapping": metadata.take("{arch}.final_logit_softcapping")}
        if name == "gemma2":
            caps["attn_logit_softcapping"] = metadata.take("{arch}.attn_logit_softcapping")
        return caps | {"query_pre_attn_scalar": _width_of_scores(metadata)}
    if name == "stablelm":
        is_parallel = metadata.take("{arch}.use_parallel_residual", False)
        return {"use_qkv_bias": "blk.0.attn_q.bias" in tensors, "use_parallel_residual": is_parallel}
    if name == "lfm2":
        return _short_convolutions(metadata, tensors)
    return {}


def _experts(metadata: Metadata, *, is_normed: bool) -> dict[str, Any]:
    if metadata.take("{arch}.expert_weights_norm", is_normed) != is_normed:
        raise metadata.refuse("{arch}.expert_weights_norm", not is_normed, f"{is_normed}, as llama.cpp computes it")
    values = {
        "num_experts": _needed(metadata, "{arch}.expert_count"),
        "num_experts_per_tok": _needed(metadata, "{arch}.expert_used_count"),
        "norm_topk_prob": is_normed,
    }
    for key, field in (
        ("{arch}.expert_feed_forward_length", "moe_intermediate_size"),
        ("{arch}.expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if (size := metadata.take(key)) is not None:
            values[field] = size
    return values


def _width_of_scores(metadata: Metadata) -> int:
    hidden = metadata.take("{arch}.embedding_length")
    heads = metadata.take("{arch}.attention.head_count")
    is_largest = metadata.take("{arch}.block_count") == _LARGEST_GEMMAS[metadata.architecture]
    return int(hidden // heads if is_largest else metadata.take("{arch}.attention.key_length", hidden // heads))


def _short_convolutions(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers of LFM2 have attention: those with heads of keys."""
    counts = metadata.take("{arch}.attention.head_count_kv")
    if not isinstance(counts, list) or len({count for count in counts if count}) != 1:
        raise metadata.refuse("{arch}.attention.head_count_kv", counts, "a number for each layer, all equal or 0")
    return {
        "num_key_value_heads": max(counts),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": _needed(metadata, "{arch}.shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in tensors),
    }


def _windows(metadata: Metadata, architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of attention, and which layers have it."""
    key = "{arch}.attention.sliding_window"
    window = metadata.take(key)
    if not architecture.has_window:
        if window and window < values["max_position_embeddings"]:
            raise metadata.refuse(key, window, f"none: {metadata.architecture} sees all tokens")
        return {}
    if metadata.architecture == "phi3":
        original = metadata.take(f"{_ROPE}original_context_length", values["max_position_embeddings"])
        return {"sliding_window": window or None, "original_max_position_embeddings": original}
    if not window:
        raise metadata.refuse(key, window, "the length of the window")
    found = {"sliding_window": window}
    if metadata.architecture == "gemma3":
        kinds = _pattern(metadata, values["num_hidden_layers"])
        found["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    return found


def _pattern(metadata: Metadata, num_layers: int) -> list[bool]:
    """Return which layers have a window."""
    key = "{arch}.attention.sliding_window_pattern"
    pattern = metadata.take(key, _GEMMA3_PATTERN)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if isinstance(pattern, list) and len(pattern) == num_layers:
        return [bool(each) for each in pattern]
    raise metadata.refuse(key, pattern, f"a number, or whether each of {num_layers} layers has a window")


def _rotary(
    metadata: Metadata, architecture: Architecture, tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `rope_parameters`: base, the part of a head that turns, and scaling."""
    width = values["head_dim"]
    key = "{arch}.rope.dimension_count"
    turned = metadata.take(key, width)
    if turned != width and not architecture.turns_part:
        raise metadata.refuse(key, turned, f"the width of a head, {width}")
    parameters: dict[str, Any] = {"rope_theta": as_written(metadata.take("{arch}.rope.freq_base", 10000.0))}
    if architecture.turns_part:
        parameters["partial_rotary_factor"] = turned / width
    scaling = _scaling(metadata, _factors(metadata, tensors, turned // 2), values["max_position_embeddings"])
    kinds = _KINDS.get(metadata.architecture)
    if kinds is not None and scaling["rope_type"] not in kinds:
        raise metadata.refuse(f"{_ROPE}type", scaling["rope_type"], " or ".join(kinds))
    if metadata.architecture != "gemma3":
        return parameters | scaling
    local = {"rope_type": "default", "rope_theta": as_written(metadata.take("{arch}.rope.freq_base_swa", 10000.0))}
    return {"full_attention": parameters | scaling, "sliding_attention": local}


def _factors(metadata: Metadata, tensors: Mapping[str, Any], count: int) -> dict[str, list[float]]:
    """Return the divisors of frequencies that stand in tensors, by name of the tensor."""
    found = {}
    for name in ("rope_freqs", "rope_factors_short", "rope_factors_long"):
        if (tensor := tensors.get(f"{name}.weight")) is None:
            continue
        factors = np.asarray(tensor.data)
        if tensor.tensor_type.name != "F32" or factors.shape != (count,):
            raise metadata.refuse(
                f"tensor {name}.weight", f"{tensor.tensor_type.name} {factors.shape}", f"F32 ({count},)"
            )
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise metadata.refuse(f"tensor {name}.weight", factors.tolist(), "numbers above 0")
        found[name] = [float(each) for each in factors]
    if len(found) not in (0, 1 if "rope_freqs" in found else 2):
        raise metadata.refuse("tensors", sorted(found), "rope_freqs, or rope_factors_short and rope_factors_long")
    return found


def _scaling(metadata: Metadata, factors: Mapping[str, list[float]], context: int) -> dict[str, Any]:
    """Return rotary scaling. A file without a type scales as linear does, and not at all without a factor."""
    kind = metadata.take(f"{_ROPE}type", "linear")
    scale = metadata.take(f"{_ROPE}factor", metadata.take("{arch}.rope.scale_linear", 0.0))
    factor = 1.0 if kind == "none" or not scale else as_written(scale)
    original = metadata.take(f"{_ROPE}original_context_length", context)
    attention = as_written(metadata.take(f"{_ROPE}attn_factor", 1.0))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.refuse(f"{_ROPE}type", kind, "none, linear, yarn or longrope")
    if not (math.isfinite(factor) and factor > 0 and math.isfinite(attention) and attention > 0):
        raise metadata.refuse(f"{_ROPE}factor", (factor, attention), "numbers above 0")
    if factors:
        if factor != 1.0 or kind == "yarn":
            raise metadata.refuse(f"{_ROPE}factor", factor, f"none beside the tensor {next(iter(factors))}.weight")
        return _divided(factors, attention, original, context)
    if kind == "longrope":
        raise metadata.refuse(f"{_ROPE}type", kind, "the tensors rope_factors_short and rope_factors_long with it")
    if kind == "yarn" and scale:
        return _yarn(metadata, factor, original, attention)
    if attention != 1.0:
        raise metadata.refuse(f"{_ROPE}attn_factor", attention, f"1 beside the type {kind}")
    return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _divided(factors: Mapping[str, list[float]], attention: float, original: int, context: int) -> dict[str, Any]:
    """Return divisors of frequencies as longrope's. One set for all lengths is both of its sets."""
    short = factors.get("rope_factors_short", factors.get("rope_freqs"))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": factors.get("rope_factors_long", short),
        "factor": 1.0,  # used for the attention factor alone, which is given
        "attention_factor": attention,
        "original_max_position_embeddings": context if "rope_freqs" in factors else original,
    }


def _yarn(metadata: Metadata, factor: float, original: int, attention: float) -> dict[str, Any]:
    """Return yarn's parameters. `yarn_attn_factor` is the original model's attention factor, as converters write it."""
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    own = metadata.take(f"{_ROPE}yarn_attn_factor")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention * (usual if own is None else as_written(own)),
        "beta_fast": as_written(metadata.take(f"{_ROPE}yarn_beta_fast", 32.0)),
        "beta_slow": as_written(metadata.take(f"{_ROPE}yarn_beta_slow", 1.0)),
    }


def _needed(metadata: Metadata, key: str) -> int:
    value = metadata.take(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise metadata.refuse(key, value, "a number above 0")
    return value


def _same(metadata: Metadata, key: str, default: int | None = None) -> int:
    """Return a number that a file may give for each layer, and is the same for all."""
    value = metadata.take(key, default)
    numbers: Collection[Any] = set(value) if isinstance(value, list) else {value}
    number = next(iter(numbers), None)
    if len(numbers) != 1 or not isinstance(number, int) or number < 1:
        raise metadata.refuse(key, value, "one number above 0 for all layers")
    return number


def as_written(value: float) -> float:
    """Return a float32 of a file as the number that was written: 1e-05, not 9.999999747e-06."""
    return float(f"{value:.7g}")
