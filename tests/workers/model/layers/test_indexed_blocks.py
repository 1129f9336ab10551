"""MiniMax-M3: where the keys of its indexers lie, the files in which it is published, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from crossdock.kvtransfer.layout import LayerShape
from crossdock.workers.model.forward.indexed_blocks import BlockIndexerCall
from crossdock.workers.model.graphs import recording
from crossdock.workers.model.load import load_model, wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model_spec import ModelSpec
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts
from tests.workers.multimodal import IMAGE, VIDEO
from tests.workers.quantised import CASES, save
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engine.test_engine import assert_tokens
from tests.workers.replica.engines import generated
from tests.workers.worker_groups import engine_of_ranks

NAME = "minimax_m3_vl_text"
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
PUBLISHED = {
    "hidden_act": "swigluoai",
    "moe_layer_freq": [0, 1, 1, 1],
    "n_shared_experts": 1,
    "num_mtp_modules": 0,
    "qk_norm_type": "per_head",
    "rope_theta": 5000000.0,
    "scoring_func": "sigmoid",
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 1, 1, 1],
        "sparse_block_size": 8,
        "sparse_disable_index_value": [0, 1, 1, 1],
        "sparse_index_dim": 20,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_num_index_heads": 2,
        "sparse_score_type": "max",
        "sparse_topk_blocks": 2,
    },
}
"""The fields of the text part in the published file, where transformers writes others."""


def chosen(**options: Any) -> Any:
    return build(NAME, SERVED[NAME] | options)


def published(folder: Path) -> Any:
    """Write a tiny checkpoint with the tensors and fields of the published one, and return transformers' model."""
    torch.manual_seed(0)
    text = chosen().config.to_dict()
    config = AutoConfig.for_model(
        "minimax_m3_vl",
        text_config=text,
        vision_config=VISION,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        projector_hidden_size=48,
        eos_token_id=2,
    )
    module: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    for layer in module.model.language_model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    saved(module, folder)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    own = {name: value for name, value in fields["text_config"].items() if not name.startswith(("index_", "mlp_layer"))}
    own = {name: value for name, value in own.items() if name not in ("layer_types", "rope_parameters")}
    fields["text_config"] = own | PUBLISHED | {"partial_rotary_factor": 0.5}
    file.write_text(json.dumps(fields))
    return module.eval()


def test_indexers_keep_a_key_behind_each_value_of_a_kv_head() -> None:
    assert wrap_module(chosen()).layers == [LayerShape(2, 12, 12), *[LayerShape(2, 12, 32)] * 3]


def test_text_part_of_a_published_checkpoint_gives_transformers_logits(tmp_path: Path) -> None:
    module = published(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), "float32"))
    assert model.why_text_alone == f"pictures of minimax_m3_vl are not supported; {SUPPORTED}"
    prompts = random_prompts(5, 23, 40, 57, 8)
    assert_near(in_random_steps(model, prompts, seed=7), [monolithic(module, prompt) for prompt in prompts])


SUPPORTED = (
    "supported are gemma3, idefics3, internvl, llava, mistral3, qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe, smolvlm"
)


def test_packed_text_part_of_a_published_checkpoint_gives_the_dequantised_logits(tmp_path: Path) -> None:
    """Gates and ups of MLPs and of experts, which transformers joins, are packed matrices of their own in files."""
    case = CASES["fp8 uneven blocks"]
    for name in ("plain", "packed"):
        published(tmp_path / name)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(plain)
    matrices = [key for key in plain if key.startswith("language_model.model.layers.") and plain[key].dim() == 2]
    for key in (key for key in matrices if not key.endswith(".gate.weight")):
        made = case.make(*plain[key].shape)
        plain[key] = case.weight_of(made)
        packed |= {f"{key.removesuffix('.weight')}{suffix}": each for suffix, each in made.items()}
    save(tmp_path / "plain", plain, None)
    save(tmp_path / "packed", packed, case.config)
    module = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    model = load_model(ModelSpec(str(tmp_path / "packed"), "float32"))
    assert model.kernels, "products read the codes"
    prompts = random_prompts(5, 23, 40)
    assert_near(in_random_steps(model, prompts, seed=7), [monolithic(module, prompt) for prompt in prompts])


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_ranks_of_a_published_checkpoint_give_transformers_tokens(
    ranks: Ranks, tmp_path: Path, tensor_size: int, num_stages: int
) -> None:
    module = published(tmp_path)
    prompts = [prompt.tolist() for prompt in random_prompts(3, 40, 70)]
    with engine_of_ranks(ranks, tmp_path, tensor_size, num_stages) as engine:
        assert_tokens(engine, prompts, generated(module, prompts))


@pytest.mark.parametrize(
    "changes",
    [
        {"index_local_blocks": 2},
        {"index_block_size": 3, "index_topk_blocks": 4},
        {"index_n_heads": 4, "num_key_value_heads": 4},
        {"layer_types": ["minimax_m3_sparse"] * 4, "mlp_layer_types": ["sparse"] * 4},
    ],
    ids=["own block and one more", "blocks of no number of pages", "heads without groups", "indexers everywhere"],
)
def test_logits_of_other_forms_equal_transformers(changes: dict[str, Any]) -> None:
    module = chosen(**changes)
    prompts = random_prompts(40, 57)
    expected = [monolithic(module, prompt) for prompt in prompts]
    assert_near(in_random_steps(wrap_module(module), prompts, seed=3), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (LoadOptions(kv_cache_dtype="fp8"), f"kv_cache_dtype fp8: indexers of {NAME} choose tokens by keys"),
        (LoadOptions(batch_invariant=True), f"batch_invariant: indexers of {NAME} score tokens by sums"),
        (LoadOptions(quantization="int8"), r"quantization int8: "),
    ],
)
def test_setting_that_does_not_fit_indexers_is_refused(options: LoadOptions, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wrap_module(chosen(), options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index_n_heads": 4}, "index_n_heads is 4, .* one head for each of the 2 KV heads"),
        ({"index_local_blocks": 0}, r"index_local_blocks is 0; served is 1 to index_topk_blocks \(2\)"),
        ({"index_local_blocks": 3}, "index_local_blocks is 3"),
    ],
)
def test_form_of_indexer_that_is_not_served_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wrap_module(chosen(**changes))


def test_indexer_that_would_choose_other_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the other sign: the check of choices sees this where two short texts do not."""
    own = BlockIndexerCall._indexer

    def wrong(call: BlockIndexerCall, hidden: torch.Tensor, cos_sin: Any) -> Any:
        call._module.k_norm.weight.data.fill_(-3.0)  # of keys, whose norm adds one
        return own(call, hidden, cos_sin)

    monkeypatch.setattr(BlockIndexerCall, "_indexer", wrong)
    with pytest.raises(ValueError, match=r"of the tokens that the indexer of layer 1 chooses, .* \d+%"):
        wrap_module(chosen(index_block_size=64))


def test_layers_of_another_model_that_choose_blocks_are_refused(tmp_path: Path) -> None:
    config: Any = AutoConfig.for_model("llama", layer_types=["minimax_m3_sparse"], num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"llama: its indexer .* served are minimax_m3_vl, minimax_m3_vl_text"):
        load_model(ModelSpec(str(tmp_path)))


def test_steps_that_choose_blocks_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_has_graphs", lambda _device: True)
    assert recording.why_not(wrap_module(chosen())) == "indexers choose tokens in numbers that the host reads"
