"""Figures of models from their configurations, against the modules that transformers makes of these."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from crossdock.workers.model.weights.scheme import E4M3_AT_LOAD
from crossdock.workers.report.model_figures import BF16, StoredNumber, figures_of
from crossdock.workers.report.presets import estimate, preset
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
KINDS = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "mixtral", "gpt_oss", "glm4_moe", "qwen2_moe")
KINDS += ("llama4_text", "ernie4_5_moe", "gemma3_text", "gpt_neox", "phi", "qwen2")


def _plain(_: str) -> StoredNumber:
    return BF16


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_module_that_transformers_makes(kind: str) -> None:
    """Norms and biases are not counted: they are a thousandth."""
    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    fields = config.to_dict() | {"tie_word_embeddings": config.tie_word_embeddings}
    found = figures_of(fields, _plain)
    assert found.held_bytes == pytest.approx(2 * sum(each.numel() for each in module.parameters()), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "billions", "active_billions"),
    [(LLAMA_8B, 8.03, 8.03), (QWEN_30B_A3B, 30.5, 3.3), (DEEPSEEK_V3, 671, 37)],
)
def test_sizes_are_those_that_the_makers_publish(
    fields: dict[str, Any], billions: float, active_billions: float
) -> None:
    found = figures_of(fields, _plain)
    assert found.held_bytes / 2e9 == pytest.approx(billions, rel=2e-3)
    assert found.parameters / 1e9 == pytest.approx(active_billions, rel=2e-2)


def test_preset_is_what_its_models_configuration_gives(tmp_path: Path) -> None:
    ours = estimate("h200", _folder(tmp_path / "8b", LLAMA_8B))
    published = preset("h200-8b")
    assert ours.num_pages == pytest.approx(published.num_pages, rel=1e-3)
    assert (ours.page_bytes, ours.max_model_len) == (published.page_bytes, published.max_model_len)
    for work in (StepWork.of([(0, 8192)]), StepWork.of([], [1024] * 64), StepWork.of([(122_880, 512)], [1024] * 64)):
        assert ours.cost.seconds(work) == pytest.approx(published.cost.seconds(work), rel=1e-3)


def test_weights_in_fp8_are_half_as_many_bytes_and_twice_as_fast_where_a_gpu_has_fp8(tmp_path: Path) -> None:
    plain = _folder(tmp_path / "plain", LLAMA_8B)
    packed = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}
    fp8 = _folder(tmp_path / "fp8", LLAMA_8B | packed)
    embeddings = 2 * 128256 * 4096
    bandwidth = 0.8 * 4.8e12
    saved = estimate("h200", plain).cost.base - estimate("h200", fp8).cost.base
    assert saved == pytest.approx((8.03e9 - embeddings) / bandwidth, rel=1e-3)
    slower, faster = (estimate("h200", folder).cost.per_prefill_token for folder in (plain, fp8))
    expected = 2 * ((8.03e9 - embeddings) / 1979e12 + embeddings / 989e12) / 0.6
    assert faster == pytest.approx(expected, rel=1e-3)
    assert faster < 0.6 * slower
    a100 = [estimate("a100", folder).cost.per_prefill_token for folder in (plain, fp8)]
    assert a100[0] == pytest.approx(a100[1])


@pytest.mark.parametrize("fields", [LLAMA_8B, QWEN_30B_A3B])
def test_plain_weights_that_fp8_rounds_cost_what_a_checkpoint_of_such_weights_costs(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    plain = _folder(tmp_path / "plain", fields)
    packed = _folder(tmp_path / "packed", fields | {"quantization_config": E4M3_AT_LOAD})
    rounded, stored = estimate("h200", plain, "fp8"), estimate("h200", packed)
    assert rounded.cost == stored.cost != estimate("h200", plain).cost
    assert rounded.num_pages == stored.num_pages
    assert estimate("h200", packed, "compressed-tensors").cost == stored.cost
    with pytest.raises(ValueError, match=r"quantization fp8 is for .* quantised with compressed-tensors"):
        estimate("h200", packed, "fp8")


def test_step_reads_the_experts_of_its_tokens_and_at_most_all_of_them(tmp_path: Path) -> None:
    """Each token is sent to 8 of 128 experts: a stream reads a sixteenth of them, many streams read all."""
    cost = estimate("h200", _folder(tmp_path / "moe", QWEN_30B_A3B)).cost
    found = figures_of(QWEN_30B_A3B, _plain)
    bandwidth = 0.8 * 4.8e12
    assert found.experts is not None
    one = (found.weight_bytes + found.experts.num_bytes / 16) / bandwidth + 1e-3
    assert cost.base == pytest.approx(one)
    every = (found.weight_bytes + found.experts.num_bytes) / bandwidth + 1e-3
    assert cost.fixed_seconds(0) == pytest.approx(every)
    for rows in (1, 16, 256):
        read = 1 - (15 / 16) ** rows
        assert cost.base + cost.early_seconds(rows) == pytest.approx(one + (every - one) * read, abs=0.2 * every)


def test_layers_with_windows_hold_and_read_no_more_than_their_windows(tmp_path: Path) -> None:
    """Take a Gemma 3 of 12 layers, of which ten see 1,024 tokens."""
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12, sliding_window=1024)
    profile = estimate("h100", _folder(tmp_path / "gemma", config.to_dict()))
    assert profile.windows.count(None) == 1
    assert set(profile.windows) == {None, 1024}
    layer = 2 * 2 * config.num_key_value_heads * config.head_dim
    bandwidth = 0.8 * 3.35e12
    assert profile.cost.per_context == pytest.approx(2 * layer / bandwidth)
    windows_s = 10 * 1024 * layer / bandwidth
    attention_s = 10 * 1024 * 4 * config.num_attention_heads * config.head_dim / (0.4 * 989e12)
    added = profile.cost.per_decode - profile.cost.per_prefill_token
    assert added == pytest.approx(5e-6 + windows_s - attention_s)
    assert profile.page_bytes == 16 * 2 * layer
    chunked = figures_of(AutoConfig.for_model("llama4_text").to_dict(), _plain)
    assert AttentionChunk(8192) in chunked.windows


def test_latents_are_the_keys_and_values_of_deepseek() -> None:
    assert figures_of(DEEPSEEK_V3, _plain).token_bytes == 61 * 2 * (512 + 64)


DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}


def test_decode_of_a_model_with_indexers_reads_its_chosen_latents_and_the_keys_of_all_tokens(tmp_path: Path) -> None:
    """However long the context is, 2,048 latents of each layer. So a token of context takes a quarter of the time."""
    bare = {key: value for key, value in DEEPSEEK_V32.items() if key != "quantization_config"}
    folder = _folder(tmp_path / "deepseek", bare | {"num_hidden_layers": 4, "quantization_config": None})
    profile = estimate("h200-tp1", folder)
    bandwidth = 0.8 * 4.8e12
    assert profile.cost.per_context == pytest.approx(4 * 2 * 128 / bandwidth)
    chosen_s = 4 * 2048 * 2 * 576 / bandwidth
    attention_s = 4 * 2048 * 2 * 128 * (192 + 128) / (0.4 * 989e12)
    added = profile.cost.per_decode - profile.cost.per_prefill_token
    assert added == pytest.approx(5e-6 + chosen_s - attention_s)
    assert profile.page_bytes == 16 * 4 * 2 * (576 + 128)
    assert profile.cost.per_attended == pytest.approx(4 * 2 * 64 * 128 / (0.4 * 989e12))


@pytest.mark.parametrize("fields", [DEEPSEEK_V3, DEEPSEEK_V32])
def test_every_gpu_keeps_and_reads_all_latents(fields: dict[str, Any], tmp_path: Path) -> None:
    """So more GPUs leave room for more tokens by the weights alone that each of them need not hold."""
    plain = fields | {"num_hidden_layers": 4, "quantization_config": None}
    folder = _folder(tmp_path / "deepseek", plain)
    held = figures_of(plain, lambda _: BF16).held_bytes
    one, four = estimate("h200-tp1", folder), estimate("h200-tp4", folder)
    assert one.cost.per_context == four.cost.per_context > 0
    assert four.page_bytes == 4 * one.page_bytes
    room = (0.9 * 141e9 - held / 4) / (0.9 * 141e9 - held)
    assert four.num_pages / one.num_pages == pytest.approx(room, rel=0.01)
    is_scored_whole = fields is DEEPSEEK_V32  # by an indexer, on each GPU
    assert one.cost.per_attended / four.cost.per_attended == pytest.approx(1 if is_scored_whole else 4)


def test_gpus_that_share_a_kv_head_keep_and_read_it_each(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "moe", QWEN_30B_A3B)  # 4 KV heads
    one, four, eight = (estimate(f"h200-tp{number}", folder) for number in (1, 4, 8))
    assert four.page_bytes == one.page_bytes
    assert eight.page_bytes == 2 * one.page_bytes
    assert one.cost.per_context == pytest.approx(4 * four.cost.per_context)
    assert eight.cost.per_context == four.cost.per_context


def test_layers_that_share_a_choice_have_no_indexer() -> None:
    alone = figures_of(DEEPSEEK_V32, _plain)
    shared = figures_of(DEEPSEEK_V32 | {"index_topk_freq": 4, "index_skip_topk_offset": 2}, _plain)
    assert alone.token_bytes == 61 * 2 * 128
    assert shared.token_bytes == 16 * 2 * 128
    assert alone.parameters - shared.parameters == 45 * (1536 * 64 * 128 + 7168 * (128 + 64))
    named = DEEPSEEK_V32 | {"indexer_types": ["full"] * 16 + ["shared"] * 45}
    assert figures_of(named, _plain).token_bytes == shared.token_bytes


MINIMAX_M3 = {
    "model_type": "minimax_m3_vl_text",
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "vocab_size": 200064,
    "max_position_embeddings": 524288,
    "tie_word_embeddings": False,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
}


def test_layers_that_choose_blocks_read_these_and_the_keys_of_an_indexer() -> None:
    """Three layers read all tokens. The other 57 read 2,048 of each KV head, and score a key that each head has."""
    found = figures_of(MINIMAX_M3, _plain)
    layer = 2 * 2 * 4 * 128
    assert found.token_bytes == 3 * layer + 57 * 4 * 2 * 128
    assert found.window_bytes == 57 * 2048 * layer
    assert found.page_bytes == 16 * (60 * layer + 57 * 4 * 2 * 128)
    assert found.pair_flops == 3 * 4 * 64 * 128 + 57 * 2 * 4 * 128
    assert (found.kv_parts, found.pair_parts) == (4, 64)


def test_published_fields_of_minimax_mean_those_that_transformers_writes() -> None:
    config = AutoConfig.for_model(**MINIMAX_M3)
    published = figures_of(MINIMAX_M3, _plain)
    assert figures_of(config.to_dict() | {"tie_word_embeddings": False}, _plain) == published
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert published.held_bytes == pytest.approx(2 * sum(each.numel() for each in module.parameters()), rel=1e-3)


def test_deepseek_in_fp8_fits_eight_gpus_of_141_gb(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "deepseek", DEEPSEEK_V3)
    assert estimate("h200", folder).tensor_parallel_size == 8
    with pytest.raises(ValueError, match="do not fit 8 x 80 GB"):
        estimate("h100", folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_attention_heads": "32"}, "num_attention_heads is '32'"),
        ({"mamba_d_state": 16}, "mamba_d_state: recurrent layers have no estimate"),
        ({"quantization_config": {"quant_method": "odd"}}, "quant_method 'odd', which is not read"),
    ],
)
def test_what_a_configuration_does_not_say_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        estimate("h100", _folder(tmp_path / "model", LLAMA_8B | changes))


def _folder(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    return folder
