"""Where the keys of indexers lie, and what is refused of models that have indexers."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from crossdock.kvtransfer.layout import LayerShape, PoolLayout
from crossdock.workers.model import architecture
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.graphs import recording
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.weights.weights import model_on_meta
from tests.workers.architectures import SERVED, build


def indexed(name: str = "deepseek_v32", **options: Any) -> Any:
    return build(name, SERVED[name] | options)


def test_layers_with_an_indexer_keep_one_more_row_for_each_token() -> None:
    """40 elements of the latent and 8 of the rotated key; 20 of the indexer's key, where values lie in other models."""
    layers = wrap_module(indexed("glm_moe_dsa")).layers
    assert layers == [LayerShape(1, 48, dim) for dim in (20, 0, 20, 20)]


def test_token_of_deepseek_v32_takes_a_fifth_more_than_its_latents() -> None:
    config: Any = AutoConfig.for_model("deepseek_v32")
    shape = LayerShape(1, config.kv_lora_rank + config.qk_rope_head_dim, config.index_head_dim)
    assert PoolLayout([shape] * config.num_hidden_layers, 16, 2).token_bytes == 61 * (576 + 128) * 2 == 85888


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (LoadOptions(kv_cache_dtype="fp8"), r"kv_cache_dtype fp8: indexers of deepseek_v32 choose tokens by keys"),
        (LoadOptions(batch_invariant=True), r"batch_invariant: indexers of deepseek_v32 score tokens by sums"),
        (LoadOptions(quantization="int8"), r"quantization int8: "),
    ],
)
def test_setting_that_does_not_fit_indexers_is_refused(options: LoadOptions, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        wrap_module(indexed(), options)


def test_indexers_without_latents_in_pages_are_refused() -> None:
    module = indexed()
    projection = module.model.layers[1].self_attn.kv_b_proj
    projection.__class__ = type("QuantisedLinear", (nn.Linear,), {})
    with pytest.raises(ValueError, match=r"indexers need latents in the KV pages: .* not a plain linear layer"):
        wrap_module(module)


def test_indexer_that_would_choose_other_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements rotated in other pairs: the check of choices sees this where two short texts do not."""
    monkeypatch.setitem(architecture.INDEXED_MODELS, "deepseek_v32", "pairs")
    with pytest.raises(ValueError, match=r"of the tokens that the indexer of layer 0 chooses, .* \d+%"):
        wrap_module(indexed(index_topk=64))


def test_stage_that_begins_with_a_shared_choice_is_refused() -> None:
    config = indexed("glm_moe_dsa", indexer_types=["full", "full", "shared", "shared"]).config
    with pytest.raises(CannotCut, match=r"layer 2 would begin a stage.* layers 0, 1\. Set another"):
        model_on_meta(config, RankPosition(1, 1, 2), torch.float32)


def test_steps_of_indexers_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_has_graphs", lambda _device: True)
    assert recording.why_not(wrap_module(indexed())) == "indexers choose tokens in numbers that the host reads"
