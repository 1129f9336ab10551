"""GGUF files written as llama.cpp's converter writes them, beside transformers' model of the same configuration."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES, GGUFWriter, get_tensor_name_map
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights import gguf_tokenizer
from crossdock.workers.model.weights.checkpoint import resolve_model, resolve_tokenizer
from crossdock.workers.model.weights.gguf_checkpoint import pack_gguf
from crossdock.workers.model.weights.gguf_config import ARCHITECTURES
from crossdock.workers.model.weights.gguf_keys import KEYS, TENSORS, pattern_of, verdict_of
from tests.workers.architectures import build
from tests.workers.model.paged import assert_near, monolithic, random_prompts, through_pages
from tests.workers.model.weights.test_gguf import finish

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_theta": 10000.0}
Fields = Mapping[str, Any]


class Case(NamedTuple):
    """A model of transformers, and what its GGUF file has beside its sizes."""

    architecture: str
    model_type: str
    options: dict[str, Any] = {}  # noqa: RUF012  # of transformers' configuration
    keys: Fields = {}  # noqa: RUF012  # of the file, without the architecture
    tensors: Mapping[str, list[float]] = {}


def llama3_factors(width: int, base: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """Return the divisors of frequencies as llama.cpp's converter computes them from a `llama3` scaling."""
    factors = []
    for pair in range(width // 2):
        wavelength = 2 * math.pi * base ** (2 * pair / width)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_SHORT, _LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.0, 2.0, 4.0, 9.0, 17.0, 30.0]
_LONGROPE = {"short_factor": _SHORT, "long_factor": _LONG, "original_max_position_embeddings": 32}
_MAX = 256  # positions of the models of `build`


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **_ROPE, **parameters}}


_ATTENTION = math.sqrt(1 + math.log(_MAX / 32) / math.log(32))  # of longrope, as the converter writes it
CASES = {
    "llama": Case("llama", "llama"),
    "llama with biases": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama as Llama 3.1": Case(
        *("llama", "llama", scaled("llama3", **_LLAMA3), {}),
        {"rope_freqs.weight": llama3_factors(12, 10000.0, 8.0, 1.0, 4.0, 64)},
    ),
    "llama linear": Case(
        *("llama", "llama", scaled("linear", factor=4.0)),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama linear by an old key": Case("llama", "llama", scaled("linear", factor=4.0), {"rope.scale_linear": 4.0}),
    "llama none beside a factor": Case("llama", "llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "llama longrope": Case(
        *("llama", "llama", scaled("longrope", **_LONGROPE, attention_factor=_ATTENTION)),
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": _ATTENTION,
        },
        {"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
    ),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2 yarn": Case(
        *("qwen2", "qwen2", scaled("yarn", **_YARN)),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.finetuned": True,
        },
    ),
    "qwen3": Case("qwen3", "qwen3"),
    "qwen3 yarn with all numbers": Case(
        *("qwen3", "qwen3", scaled("yarn", **_YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3)),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_attn_factor": 1.3,
            "rope.scaling.yarn_ext_factor": 1.0,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
    ),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", {**_MOE, "norm_topk_prob": True}),
    "qwen2moe": Case("qwen2moe", "qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 40}),
    "phi3": Case("phi3", "phi3", {"sliding_window": 16}, {"attention.sliding_window": 16}),
    "phi3 longrope": Case(
        "phi3",
        "phi3",
        {**scaled("longrope", **_LONGROPE, partial_rotary_factor=1.0), "original_max_position_embeddings": 32},
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": _ATTENTION,
        },
        {"rope_factors_short.weight": _SHORT, "rope_factors_long.weight": _LONG},
    ),
    "phi3 partial": Case("phi3", "phi3", scaled("default", partial_rotary_factor=0.5), {"rope.dimension_count": 6}),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        {"attention.sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3_text",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1000000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "starcoder2": Case("starcoder2", "starcoder2"),
    "stablelm": Case(
        "stablelm",
        "stablelm",
        {"use_qkv_bias": True, **scaled("default", partial_rotary_factor=0.5)},
        {"rope.dimension_count": 6, "use_parallel_residual": False},
    ),
    "nemotron": Case(
        "nemotron",
        "nemotron",
        {"norm_eps": 1e-5, **scaled("default", partial_rotary_factor=0.5)},
        {"rope.dimension_count": 6},
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3, "rope.freq_base": 1000000.0},
    ),
}
_EPS = {"starcoder2": ("layer_norm", "norm_epsilon"), "stablelm": ("layer_norm", "layer_norm_eps")}
_EPS |= {"nemotron": ("layer_norm", "norm_eps"), "lfm2": ("layer_norm_rms", "norm_eps")}
_GEMMAS = ("gemma2", "gemma3")


def as_llama_cpp(case: Case, config: Any, name: str, values: Tensor) -> Tensor:
    """Return a tensor as llama.cpp's converter stores it."""
    if case.architecture == "llama" and re.search(r"[qk]_proj", name):  # pairs of a head stand side by side there
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return (
            values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        )
    if case.architecture in (*_GEMMAS, "nemotron") and name.endswith("norm.weight"):
        return values + 1
    return values.squeeze()


def parts_of(case: Case, names: Any, name: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of a tensor of transformers in the file."""
    if ".experts." in name:
        kinds = ("down",) if name.endswith("down_proj") else ("gate", "up")
        for kind, part in zip(kinds, values.chunk(len(kinds), 1), strict=True):
            yield f"blk.{name.split('.')[2]}.ffn_{kind}_exps.weight", part
        return
    path, _, suffix = name.rpartition(".")
    stored = names.get_name(path)
    assert stored is not None, name
    yield f"{stored}.{suffix}", values


def write(file: Path, case: Case, **also: Any) -> PreTrainedModel:
    """Write a file of a case and return transformers' model. `also`: further keys, in full."""
    module = build(case.model_type, case.options)
    config: Any = module.config
    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    norm, field = _EPS.get(case.architecture, ("layer_norm_rms", "rms_norm_eps"))
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        f"attention.{norm}_epsilon": float(getattr(config, field)),
        "rope.freq_base": 10000.0,
        "vocab_size": config.vocab_size,
    }
    if case.model_type in ("qwen2_moe", "qwen3_moe"):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
    if case.model_type == "qwen2_moe":
        keys |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    writer = GGUFWriter(file, case.architecture)
    for key, value in {f"{case.architecture}.{key}": value for key, value in (keys | dict(case.keys)).items()}.items():
        add(writer, key, value)
    for key, value in also.items():
        add(writer, key, value)
    for name, values in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for stored, part in parts_of(case, names, name, as_llama_cpp(case, config, name, values)):
            writer.add_tensor(stored, part.contiguous().numpy())
    for stored, factors in case.tensors.items():
        writer.add_tensor(stored, np.array(factors, np.float32))
    finish(writer)
    return module


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp's converter gives it."""
    kinds: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_file_equal_those_of_transformers_with_the_same_configuration(name: str, tmp_path: Path) -> None:
    module = write(tmp_path / "model.gguf", CASES[name])
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    model = load_model(ModelSpec(str(tmp_path / "packed"), "float32"))
    (prompt,) = random_prompts(100)
    found = through_pages(model, [prompt], [[(0, 0, 41)], [(0, 41, 100)]])
    assert_near(found, [monolithic(module.eval(), prompt)])
    assert model.max_model_len >= _MAX


def test_every_architecture_that_is_read_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES)


# -- what is known of keys and tensors -------------------------------------------------------------------------------


def texts_of(found: type) -> Iterator[str]:
    for name, value in vars(found).items():
        if isinstance(value, str) and not name.startswith("_"):
            yield value
        elif isinstance(value, type) and not name.startswith("_"):
            yield from texts_of(value)


def test_each_key_of_the_library_is_read_harmless_or_refused() -> None:
    """A new release of gguf brings new keys: each needs a verdict."""
    examples = {"{arch}": "llama", "{id}": "3", "{name}": "tool_use", "{dense}": "dense_2"}
    keys = list(texts_of(gguf.Keys))
    assert len(keys) > 200
    for name, example in examples.items():
        keys = [key.replace(name, example) for key in keys]
    assert [key for key in keys if verdict_of(key, "llama") is None] == []


@pytest.mark.parametrize("name", [name for name in CASES if name in ARCHITECTURES])
def test_each_tensor_of_the_library_is_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """All tensors that gguf lists for an architecture, beside those that the file of a case has."""
    case = CASES[name]
    write(tmp_path / "model.gguf", case)
    had = {each.name for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    architecture = next(each for each, known in MODEL_ARCH_NAMES.items() if known == case.architecture)
    others = {f"{TENSOR_NAMES[each].format(bid=0, xid=0)}.weight" for each in MODEL_TENSORS[architecture]} - had
    for number, other in enumerate(sorted(others - {"output.weight"})):
        if pattern_of(TENSORS, other) is not None:
            continue
        file = tmp_path / f"{number}.gguf"
        write(file, case._replace(tensors={other: [1.0] * 6}))
        with pytest.raises(ValueError, match=re.escape(other)):
            load_packed(file, tmp_path / f"packed {number}")


def load_packed(file: Path, target: Path) -> None:
    pack_gguf(file, target)
    load_model(ModelSpec(str(target), "float32"))


REFUSED: dict[str, Any] = {
    "llama.something_new": 1,
    "something.else": "x",
    "llama.attention.causal": False,
    "llama.attention.scale": 0.5,
    "llama.attention.max_alibi_bias": 8.0,
    "llama.attention.clamp_kqv": 4.0,
    "llama.attention.sliding_window": 16,
    "llama.attention.value_length": 6,
    "llama.logit_scale": 0.5,
    "llama.residual_scale": 0.5,
    "llama.embedding_scale": 12.0,
    "llama.final_logit_softcapping": 30.0,
    "llama.attn_logit_softcapping": 30.0,
    "llama.rope.dimension_count": 6,
    "llama.rope.scaling.type": "dynamic",
    "llama.rope.scaling.attn_factor": 1.2,
    "llama.rope.scaling.alpha": 1000.0,
    "llama.rope.scaling.yarn_ext_factor": 0.5,
    "llama.expert_count": 8,
    "llama.nextn_predict_layers": 1,
    "llama.pooling_type": 1,
    "llama.vocab_size": 99,
    "llama.classifier.output_labels": ["a", "b"],
    "general.type": "adapter",
    "general.quantization_version": 1,
    "tokenizer.ggml.something_new": True,
    "adapter.type": "lora",
}


@pytest.mark.parametrize("key", REFUSED)
def test_key_that_changes_the_model_and_is_not_read_is_refused_by_name(key: str, tmp_path: Path) -> None:
    case, others = CASES["llama"], {key: REFUSED[key]}
    if key.startswith("llama."):  # a key that the file has may not be added again
        case, others = case._replace(keys={key.removeprefix("llama."): REFUSED[key]}), {}
    write(tmp_path / "model.gguf", case, **others)
    with pytest.raises(ValueError, match=re.escape(key)):
        pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_keys_without_effect_are_passed_over(tmp_path: Path) -> None:
    harmless = {
        "general.name": "mistral",
        "general.finetune": "Instruct",
        "general.base_model.0.organization": "HuggingFaceTB",
        "general.type": "model",
        "general.quantization_version": 2,
        "general.file_type": 1,
        "quantize.imatrix.file": "x.dat",
        "quantize.imatrix.entries_count": 7,
        "llama.attention.causal": True,
        "llama.logit_scale": 1.0,
        "llama.attention.sliding_window": _MAX,
        "llama.rope.scaling.finetuned": False,
        "tokenizer.ggml.fim_pre_token_id": 5,
    }
    module = write(tmp_path / "model.gguf", CASES["llama"], **harmless)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    model = load_model(ModelSpec(str(tmp_path / "packed"), "float32"))
    (prompt,) = random_prompts(30)
    assert_near(through_pages(model, [prompt], [[(0, 0, 30)]]), [monolithic(module.eval(), prompt)])


@pytest.mark.parametrize("factors", [[1.0] * 5, [1.0] * 5 + [0.0], [1.0] * 5 + [math.nan]])
def test_divisors_of_frequencies_that_are_none_are_refused(factors: list[float], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", CASES["llama"]._replace(tensors={"rope_freqs.weight": factors}))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")


def test_architecture_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.add_tensor("output.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    with pytest.raises(ValueError, match=r"general\.architecture is 'falcon'; expected one of llama, qwen2"):
        pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_that_end_a_text_a_turn_and_a_message_end_an_answer(tmp_path: Path) -> None:
    ends = {"eos": 2, "eot": 5, "eom": 7}
    write(
        tmp_path / "model.gguf",
        CASES["llama"],
        **{f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ends.items()},
    )
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    assert load_model(ModelSpec(str(tmp_path / "packed"), "float32")).eos_token_ids == {2, 5, 7}


def vocabulary(pre: str, **also: Any) -> dict[str, Any]:
    """Return the keys of a byte-level vocabulary of 128 tokens, of which no merges make 'abc'."""
    tokens = ["<s>", "</s>", "abc", "ab", *(chr(code) for code in range(33, 127))]
    tokens += [f"unused{number}" for number in range(128 - len(tokens))]
    kinds = [3, 3] + [1] * 126
    found = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": ["a b"], **also}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()} | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def tokens_of(tmp_path: Path, text: str, keys: dict[str, Any]) -> list[str]:
    write(tmp_path / "model.gguf", CASES["llama"], **keys)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    tokenizer = AutoTokenizer.from_pretrained(resolve_tokenizer(None, tmp_path / "packed"))
    return list(tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]))


def test_words_of_llama_3_that_are_tokens_stay_whole_and_prompts_begin_with_a_token(tmp_path: Path) -> None:
    assert tokens_of(tmp_path, "abc", vocabulary("llama-bpe")) == ["<s>", "abc"]


def test_key_that_adds_no_token_wins_over_the_name_of_the_vocabulary(tmp_path: Path) -> None:
    keys = vocabulary("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}
    assert tokens_of(tmp_path, "abc", keys) == ["abc"]


def test_digits_of_smollm_stand_alone(tmp_path: Path) -> None:
    keys = vocabulary("smollm", merges=["1 2"], tokens=[*vocabulary("smollm")["tokenizer.ggml.tokens"][:-1], "12"])
    assert tokens_of(tmp_path, "12", keys) == ["1", "2"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (vocabulary("a-new-one"), "tokenizer.ggml.pre is 'a-new-one', which is not read; read are llama3"),
        (vocabulary("default"), "tokenizer.ggml.pre is 'default'"),
        (vocabulary("", model="rwkv"), "tokenizer.ggml.model is 'rwkv'"),
        (vocabulary("", model="llama", add_space_prefix=False), "tokenizer.ggml.add_space_prefix is False"),
        ({}, "the file has no tokenizer"),
    ],
)
def test_tokenizer_that_would_give_other_tokens_is_refused_and_the_model_kept(
    keys: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write(file, CASES["llama"], **keys)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        resolve_tokenizer(None, resolve_model(str(file)))
    assert "--tokenizer" in str(refused.value)
    assert load_model(ModelSpec(str(resolve_model(str(file))), "float32"))


def test_divisions_of_text_that_are_left_to_transformers_are_there() -> None:
    """transformers takes GPT-2's for a name that it does not know."""
    assert set(gguf_tokenizer._SPLIT) <= set(GGUF_PRE_TOKENIZER_SPLITS)


def test_named_chat_templates_are_kept(tmp_path: Path) -> None:
    keys = vocabulary("gpt-2") | {
        "tokenizer.chat_template": "default of {{ messages }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    write(tmp_path / "model.gguf", CASES["llama"], **keys)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    templates = AutoTokenizer.from_pretrained(tmp_path / "packed").chat_template
    assert templates == {"default": "default of {{ messages }}", "tool_use": "with tools"}


def test_sampling_that_a_file_recommends_is_that_of_requests(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 0}
    write(tmp_path / "model.gguf", CASES["llama"], **keys)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    assert GenerationDefaults.read(tmp_path / "packed").sampling == {"temperature": 0.6, "top_k": 20}


def test_every_pattern_of_keys_has_one_word_of_the_three() -> None:
    assert {each.verdict for each in (*KEYS.values(), *TENSORS.values())} == {"read", "harmless", "refused"}
