"""Verdicts on the metadata keys and tensors of a GGUF file: read, harmless, or refused.

A key that is in no list is refused by its name, and so is a tensor. transformers would pass over both in silence.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

Verdict = Literal["read", "harmless", "refused"]


class KeyVerdict(NamedTuple):
    """A verdict on a key or tensor, and what the key says. `allowed`: values that change nothing."""

    verdict: Verdict
    about: str
    allowed: Callable[[Any], bool] | None = None
    which: str = ""  # `allowed` in words


def _read(about: str) -> KeyVerdict:
    return KeyVerdict("read", about)


def _harmless(about: str) -> KeyVerdict:
    return KeyVerdict("harmless", about)


def _refused(about: str) -> KeyVerdict:
    return KeyVerdict("refused", about)


def _only(about: str, *values: Any) -> KeyVerdict:
    """Return a found that is refused but with one of `values`, which change nothing."""
    return KeyVerdict("refused", about, lambda value: value in values, " or ".join(map(str, values)))


_NO_EXPERTS = _only("experts in groups, or shared by others than Qwen2-MoE's", 0)
_RECURRENT = _refused("recurrent layers")
_LATENTS = _refused("attention with latents (MLA), or its indexer")
_OTHER_MODEL = _refused("a part of another kind of model")

KEYS: Mapping[str, KeyVerdict] = {
    # -- of all models: {arch} is the name in general.architecture
    "{arch}.vocab_size": _read("rows of the embedding"),
    "{arch}.context_length": _read("max_position_embeddings"),
    "{arch}.embedding_length": _read("hidden_size"),
    "{arch}.block_count": _read("num_hidden_layers"),
    "{arch}.feed_forward_length": _read("intermediate_size"),
    "{arch}.expert_count": _read("num_experts"),
    "{arch}.expert_used_count": _read("num_experts_per_tok"),
    "{arch}.expert_feed_forward_length": _read("moe_intermediate_size"),
    "{arch}.expert_shared_feed_forward_length": _read("shared_expert_intermediate_size"),
    "{arch}.expert_weights_norm": _read("norm_topk_prob; refused where llama.cpp computes the other value"),
    "{arch}.attn_logit_softcapping": _read("attn_logit_softcapping"),
    "{arch}.final_logit_softcapping": _read("final_logit_softcapping"),
    "{arch}.attention.head_count": _read("num_attention_heads"),
    "{arch}.attention.head_count_kv": _read("num_key_value_heads"),
    "{arch}.attention.key_length": _read("head_dim"),
    "{arch}.attention.value_length": _read("head_dim; refused where keys have another width"),
    "{arch}.attention.layer_norm_epsilon": _read("norm_epsilon"),
    "{arch}.attention.layer_norm_rms_epsilon": _read("rms_norm_eps"),
    "{arch}.attention.sliding_window": _read("sliding_window"),
    "{arch}.attention.sliding_window_pattern": _read("layer_types"),
    "{arch}.rope.dimension_count": _read("partial_rotary_factor, times head_dim"),
    "{arch}.rope.freq_base": _read("rope_theta"),
    "{arch}.rope.freq_base_swa": _read("rope_theta of layers with a window"),
    "{arch}.rope.scaling.type": _read("rope_type: none, linear, yarn or longrope"),
    "{arch}.rope.scaling.factor": _read("factor"),
    "{arch}.rope.scale_linear": _read("factor, in older files"),
    "{arch}.rope.scaling.original_context_length": _read("original_max_position_embeddings"),
    "{arch}.rope.scaling.attn_factor": _read("attention_factor"),
    "{arch}.rope.scaling.yarn_attn_factor": _read("attention_factor of yarn"),
    "{arch}.rope.scaling.yarn_beta_fast": _read("beta_fast"),
    "{arch}.rope.scaling.yarn_beta_slow": _read("beta_slow"),
    "{arch}.rope.scaling.yarn_ext_factor": _only("how much yarn extrapolates", 1.0, -1.0),
    "{arch}.rope.scaling.yarn_log_multiplier": _only("an attention factor of DeepSeek's yarn", 0.0),
    "{arch}.rope.scaling.alpha": _only("another base for longer contexts", 0.0),
    "{arch}.rope.scaling.finetuned": _harmless("whether the model was trained with its scaling"),
    "{arch}.rope.dimension_sections": _refused("sections of positions of pictures"),
    "{arch}.rope.dimension_count_swa": _refused("another rotation in layers with a window"),
    "{arch}.tensor_data_layout": _harmless("a note of the converter"),
    "{arch}.pooling_type": _only("how vectors of prompts are made: mean (1), first token (2), a rank (4)", 0, 3),
    "{arch}.logit_scale": _only("a factor of logits", 1.0),
    "{arch}.residual_scale": _only("a factor of each layer", 1.0),
    "{arch}.embedding_scale": _only("a factor of embeddings", 1.0),
    "{arch}.router_logit_softcapping": _only("a bound of the router's logits", 0.0),
    "{arch}.use_parallel_residual": _read("use_parallel_residual"),
    "{arch}.leading_dense_block_count": _only("first layers without experts", 0),
    "{arch}.nextn_predict_layers": _only("layers that guess further tokens", 0),
    "{arch}.moe_every_n_layers": _only("layers without experts in between", 0, 1),
    "{arch}.interleave_moe_layer_step": _only("layers without experts in between", 0, 1),
    "{arch}.n_deepstack_layers": _only("layers that take pictures", 0),
    "{arch}.expert_weights_scale": _only("a factor of experts", 0.0, 1.0),
    "{arch}.expert_gating_func": _only("how the router chooses", 1),
    "{arch}.expert_shared_count": _NO_EXPERTS,
    "{arch}.expert_group_count": _NO_EXPERTS,
    "{arch}.expert_group_used_count": _NO_EXPERTS,
    "{arch}.expert_group_scale": _NO_EXPERTS,
    "{arch}.experts_per_group": _NO_EXPERTS,
    "{arch}.expert_chunk_feed_forward_length": _NO_EXPERTS,
    "{arch}.moe_latent_size": _NO_EXPERTS,
    "{arch}.swiglu_clamp_exp": _refused("bounds of an expert's activations"),
    "{arch}.swiglu_clamp_shexp": _refused("bounds of an expert's activations"),
    "{arch}.attention.causal": _only("whether a token sees those after it", True),
    "{arch}.attention.max_alibi_bias": _only("a bias of attention by distance", 0.0),
    "{arch}.attention.clamp_kqv": _only("a bound of queries, keys and values", 0.0),
    "{arch}.attention.scale": _refused("a factor of attention's scores"),
    "{arch}.attention.output_scale": _refused("a factor of attention's result"),
    "{arch}.attention.temperature_length": _refused("a temperature of attention by position"),
    "{arch}.attention.temperature_scale": _refused("a temperature of attention by position"),
    "{arch}.attention.shared_kv_layers": _only("layers that use the keys of others", 0),
    "{arch}.attention.key_length_swa": _refused("other heads in layers with a window"),
    "{arch}.attention.value_length_swa": _refused("other heads in layers with a window"),
    "{arch}.attention.group_norm_epsilon": _refused("norms of groups"),
    "{arch}.attention.group_norm_groups": _refused("norms of groups"),
    "{arch}.attention.relative_buckets_count": _refused("a bias of attention by distance"),
    "{arch}.attention.q_lora_rank": _LATENTS,
    "{arch}.attention.kv_lora_rank": _LATENTS,
    "{arch}.attention.key_length_mla": _LATENTS,
    "{arch}.attention.value_length_mla": _LATENTS,
    "{arch}.attention.indexer.*": _LATENTS,
    "{arch}.attention.decay_lora_rank": _RECURRENT,
    "{arch}.attention.iclr_lora_rank": _RECURRENT,
    "{arch}.attention.value_residual_mix_lora_rank": _RECURRENT,
    "{arch}.attention.gate_lora_rank": _RECURRENT,
    "{arch}.ssm.*": _RECURRENT,
    "{arch}.kda.*": _RECURRENT,
    "{arch}.wkv.*": _RECURRENT,
    "{arch}.shortconv.l_cache": _read("conv_L_cache"),
    "{arch}.shortconv.*": _RECURRENT,
    "{arch}.full_attention_interval": _RECURRENT,
    "{arch}.rescale_every_n_layers": _RECURRENT,
    "{arch}.time_mix_extra_dim": _RECURRENT,
    "{arch}.time_decay_extra_dim": _RECURRENT,
    "{arch}.token_shift_count": _RECURRENT,
    "{arch}.embedding_length_out": _OTHER_MODEL,
    "{arch}.features_length": _OTHER_MODEL,
    "{arch}.decoder_start_token_id": _OTHER_MODEL,
    "{arch}.decoder_block_count": _OTHER_MODEL,
    "{arch}.swin_norm": _OTHER_MODEL,
    "{arch}.activation_sparsity_scale": _OTHER_MODEL,
    "{arch}.altup.*": _OTHER_MODEL,
    "{arch}.embedding_length_per_layer_input": _OTHER_MODEL,
    "{arch}.{name}_feat_in": _OTHER_MODEL,
    "{arch}.{name}_feat_out": _OTHER_MODEL,
    "{arch}.posnet.*": _OTHER_MODEL,
    "{arch}.convnext.*": _OTHER_MODEL,
    "{arch}.classifier.*": _refused("the labels of a classifier, whose output is not read"),
    # -- the tokenizer
    "tokenizer.ggml.model": _read("how tokens are made: gpt2 (bytes) or llama (SentencePiece)"),
    "tokenizer.ggml.pre": _read("how text is divided first; see the names below"),
    "tokenizer.ggml.tokens": _read("vocabulary"),
    "tokenizer.ggml.token_type": _read("which tokens are special"),
    "tokenizer.ggml.scores": _read("order of merges"),
    "tokenizer.ggml.merges": _read("merges"),
    "tokenizer.ggml.bos_token_id": _read("bos_token"),
    "tokenizer.ggml.eos_token_id": _read("eos_token; ends an answer"),
    "tokenizer.ggml.eot_token_id": _read("ends an answer"),
    "tokenizer.ggml.eom_token_id": _read("ends an answer"),
    "tokenizer.ggml.eos_token_ids": _read("end an answer"),
    "tokenizer.ggml.unknown_token_id": _read("unk_token"),
    "tokenizer.ggml.padding_token_id": _read("pad_token"),
    "tokenizer.ggml.add_bos_token": _read("whether prompts begin with bos_token"),
    "tokenizer.ggml.add_eos_token": _read("whether prompts end with eos_token"),
    "tokenizer.ggml.add_space_prefix": _read("whether text gets a space in front"),
    "tokenizer.ggml.remove_extra_whitespaces": _read("no tokenizer is made where it is true"),
    "tokenizer.ggml.precompiled_charsmap": _read("no tokenizer is made where it is there"),
    "tokenizer.ggml.add_sep_token": _only("whether prompts end with a separator", False),
    "tokenizer.chat_template": _read("chat template"),
    "tokenizer.chat_template.{name}": _read("chat template of that name"),
    "tokenizer.chat_templates": _read("names of the chat templates"),
    "tokenizer.huggingface.json": _harmless("a copy for other programs"),
    "tokenizer.rwkv.world": _refused("a vocabulary of RWKV"),
    "tokenizer.ggml.token_type_count": _refused("types of tokens of encoders"),
    "tokenizer.ggml.seperator_token_id": _harmless("a token that no answer needs"),
    "tokenizer.ggml.cls_token_id": _harmless("a token that no answer needs"),
    "tokenizer.ggml.mask_token_id": _harmless("a token that no answer needs"),
    "tokenizer.ggml.fim_{name}_token_id": _harmless("tokens of prompts that fill a gap"),
    "tokenizer.ggml.prefix_token_id": _harmless("tokens of prompts that fill a gap"),
    "tokenizer.ggml.suffix_token_id": _harmless("tokens of prompts that fill a gap"),
    "tokenizer.ggml.middle_token_id": _harmless("tokens of prompts that fill a gap"),
    # -- the file
    "general.architecture": _read("architecture"),
    "general.alignment": _read("where tensors begin"),
    "general.type": _only("the kind of file, such as an adapter or an encoder of pictures", "model"),
    "general.quantization_version": _only("the layout of blocks", 2),
    "general.sampling.temp": _read("temperature in generation_config.json"),
    "general.sampling.top_k": _read("top_k in generation_config.json"),
    "general.sampling.top_p": _read("top_p in generation_config.json"),
    "general.sampling.min_p": _read("min_p in generation_config.json"),
    "general.sampling.penalty_repeat": _read("repetition_penalty in generation_config.json"),
    "general.sampling.*": _harmless("a recommendation of samplers that are not here; the log names it"),
    "general.*": _harmless("a description of the file"),
    "split.no": _harmless("which of several files this is"),
    "split.count": _only("files of the model", 0, 1),
    "split.tensors.count": _harmless("how many tensors all files have"),
    "quantize.imatrix.*": _harmless("how the file was quantised"),
    "mradermacher.*": _harmless("how the file was quantised"),
    "adapter.*": _refused("an adapter"),
    "imatrix.*": _refused("an importance matrix"),
    "clip.*": _refused("an encoder of pictures or sound"),
    "diffusion.*": _refused("a diffusion model"),
    "xielu.*": _refused("another activation"),
}
"""The first pattern that fits counts. `{id}` is a number, `{name}` a word, `*` the rest."""

TENSORS: Mapping[str, KeyVerdict] = {
    "rope_freqs.weight": _read("divisors of rotary frequencies, as of Llama 3.1"),
    "rope_factors_short.weight": _read("short_factor of longrope"),
    "rope_factors_long.weight": _read("long_factor of longrope"),
    "blk.{id}.attn_rot_embd.weight": _harmless("rotary frequencies, which are computed"),
    "blk.{id}.attn_rot_embd": _harmless("rotary frequencies, which are computed"),
}
"""Tensors without a place in transformers' model of the architecture. All with a place are read."""


def pattern_of(names: Iterable[str], name: str, architecture: str = "") -> str | None:
    """Return the first of the patterns `names` that a key or tensor fits, or None."""
    return next((each for each in names if _expression(each, architecture).fullmatch(name)), None)


def verdict_of(key: str, architecture: str) -> KeyVerdict | None:
    """Return the verdict on a metadata key of a file of `architecture`, or None where no list has the key."""
    pattern = pattern_of(KEYS, key, architecture)
    return None if pattern is None else KEYS[pattern]


@cache
def _expression(pattern: str, architecture: str) -> re.Pattern[str]:
    parts = {"{arch}": re.escape(architecture), "{id}": r"\d+", "{name}": r"[\w-]+", "*": ".*"}
    found = re.split(r"(\{arch\}|\{id\}|\{name\}|\*)", pattern)
    return re.compile("".join(parts.get(part, re.escape(part)) for part in found))


class Metadata:
    """The metadata of a GGUF file, of which each key is taken, harmless, or a reason to refuse the file."""

    def __init__(self, file: Path, fields: Mapping[str, Any]) -> None:
        self._file = file
        self._fields = fields
        self._taken = {"general.architecture", "general.alignment"}
        if "general.architecture" not in fields:
            raise ValueError(f"model {file} has no general.architecture")
        self.architecture: str = fields["general.architecture"].contents()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that `KEYS` calls read, or `default`. `{arch}` stands for the architecture."""
        name = key.replace("{arch}", self.architecture)
        found = verdict_of(name, self.architecture)
        assert found is not None
        assert found.verdict == "read", key
        self._taken.add(name)
        return self._fields[name].contents() if name in self._fields else default

    def take_all(self, *patterns: str) -> dict[str, Any]:
        """Return the values of all keys that fit one of `patterns`, by key."""
        names = [name for name in self._fields if pattern_of(patterns, name, self.architecture)]
        return {name: self.take(name) for name in names}

    def names(self, *patterns: str) -> list[str]:
        """Return the keys that fit one of `patterns` and have not been taken."""
        fitting = (name for name in self._fields if pattern_of(patterns, name, self.architecture))
        return [name for name in fitting if name not in self._taken]

    def leave(self, *keys: str) -> None:
        """Note that others read these keys from the file themselves."""
        self._taken.update(keys)

    def refuse(self, key: str, value: Any, expected: str) -> ValueError:
        """Return the error that refuses the file for the value of a key."""
        name = key.replace("{arch}", self.architecture)
        return ValueError(f"model {self._file}: {name} is {value!r:.200}; expected {expected}")

    def check_rest(self) -> None:
        """Check that each key that was not taken is harmless. ValueError: a key is not; the message names the key."""
        for key, field in self._fields.items():
            if key in self._taken or key.startswith("GGUF."):  # the head of the file
                continue
            found = verdict_of(key, self.architecture)
            if found is None:
                raise ValueError(
                    f"model {self._file}: the metadata key {key} is not known, and may change what the model computes; "
                    f"serve a safetensors form of the model"
                )
            if found.verdict == "harmless" or (found.allowed and found.allowed(field.contents())):
                continue
            value = f"{field.contents()!r:.100}"
            if found.allowed:
                reason = f"{found.about}; {found.which} is served"
            elif found.verdict == "read":
                reason = f"which is not read for {self.architecture}"
            else:
                reason = f"{found.about}, which is not read"
            raise ValueError(f"model {self._file}: {key} is {value}: {reason}; serve a safetensors form of the model")
