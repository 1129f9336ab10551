"""Checkpoints with a random MTP head, and what it drafts in transformers' own layers: whole texts, no pages."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from tests.workers.architectures import SERVED, WINDOW, build
from tests.workers.ranks import saved
from tests.workers.replica.speculating import MAX_MODEL_LEN, VOCAB_SIZE

logging.disable_progress_bar()

_NUMBERED = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3")
"""Models whose head is one more layer of `layers`."""
_QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
_NEMOTRON = {each: f"layers.0.{each}" for each in ("enorm", "hnorm", "eh_proj")}
_NEMOTRON |= {"post_norm": "layers.1.final_layernorm", "mtp_block": "layers"}
_ONE_INDEXED = {"num_hidden_layers": 1, "layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"]}
_ALONE: dict[str, dict[str, Any]] = {
    "deepseek_v32": _ONE_INDEXED,
    "glm_moe_dsa": _ONE_INDEXED | {"indexer_types": ["full"]},
    "exaone_moe": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["dense"]},
    "hy_v3": {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    "nemotron_h": {"layer_types": ["full_attention", "moe"]},
}
"""Fields of the decoder that has a head's layers alone, for models whose layers `MtpModel` does not call right."""
_WINDOWS: dict[str, dict[str, Any]] = {
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
}
"""Models whose head has a window, and layers with windows before it."""
_PUBLISHED: dict[str, dict[str, Any]] = {
    "exaone_moe": {"mtp_layer_types": ["full_attention"]},
    "glm_moe_dsa": {"index_share_for_mtp_iteration": True},
}
"""Fields of published config.json files that describe heads, by model type. The number of heads is not among them."""


def target_of(name: str) -> PreTrainedModel:
    """Return a tiny random model, the same for each call."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    return build(name, SERVED[name] | _WINDOWS.get(name, {}) | sizes)


@cache
def plain(name: str) -> "MtpReference":
    """Return the model of `target_of` with a random head, in transformers alone."""
    shares_choice: bool = _PUBLISHED.get(name, {}).get("index_share_for_mtp_iteration", False)
    return MtpReference(target_of(name), shares_choice=shares_choice)


class LayersAlone(nn.Module):
    """A head in the place of `MtpModel`: the model's own decoder in transformers, with the head's layers alone."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config.update(_ALONE[config.model_type])
        decoder: Any = type(target)(config).eval().get_decoder()
        layers = decoder.layers
        norm = decoder.norm_f if config.model_type == "nemotron_h" else decoder.norm
        parts = {"enorm": copy.deepcopy(norm), "hnorm": copy.deepcopy(norm), "post_norm": norm}
        parts |= {"eh_proj": nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)}
        self.layers = nn.ModuleList([nn.ModuleDict(parts | {"mtp_block": layers if len(layers) > 1 else layers[0]})])
        self._computed = (target.get_input_embeddings(), decoder)  # no parts of this module

    def forward_layer(
        self, layer: int, states: Tensor, positions: Tensor, _cache: None, *, input_ids: Tensor
    ) -> Tensor:
        """Compute all rows. Arguments are those of `MtpModel`."""
        parts: Any = self.layers[layer]
        embedding, decoder = self._computed
        both = torch.cat([parts["enorm"](embedding(input_ids)), parts["hnorm"](states)], -1)
        entering = parts["eh_proj"](both)
        computed: Tensor = decoder(inputs_embeds=entering, position_ids=positions, use_cache=False).last_hidden_state
        return computed


class MtpReference:
    """A model with a random head, whose attention is its own.

    `shares_choice`: rows of further drafts read the tokens that the indexer has chosen for the first draft's row.
    """

    def __init__(self, target: PreTrainedModel, *, shares_choice: bool = False) -> None:
        self.target: Any = target
        self.head: Any = LayersAlone(target) if target.config.model_type in _ALONE else _mtp_model(target)
        draw = torch.Generator().manual_seed(7)
        for name, parameter in self.head.layers.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.data = parameter.data + 0.2 * noise if "norm" in name else 0.2 * noise
        self._chosen: Tensor | None = None  # [1, T, K]: what the rows of the first pass read; None: it is to come
        if shares_choice:
            indexer = self.head.layers[0].mtp_block.self_attn.indexer
            indexer.register_forward_pre_hook(self._begin)
            indexer.register_forward_hook(self._share_choice)

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int, first: int = 0) -> list[int]:
        """Return so many drafts after `tokens`. `first`: position of the first state that the head sees."""
        text = torch.tensor(tokens)
        states = self.target.model(text[None], use_cache=False).last_hidden_state[:, first:-1]
        nexts, drafts = text[None, first + 1 :], list[int]()
        self._chosen = None
        for _ in range(count):
            positions = torch.arange(nexts.shape[1])[None]
            own = self.head.forward_layer(0, states, positions, None, input_ids=nexts)
            drafts.append(int(self.target.lm_head(own[0, -1]).argmax()))
            states, nexts = torch.cat([states, own[:, -1:]], 1), torch.cat([nexts, torch.tensor([drafts[-1:]])], 1)
        return drafts

    def _begin(self, indexer: Any, _inputs: Any) -> None:
        """Have the rows of further drafts read all tokens where the first draft's row has."""
        top_k: int = self.target.config.index_topk
        indexer.index_topk = top_k if self._chosen is None or self._chosen.shape[1] > top_k else MAX_MODEL_LEN

    def _share_choice(self, indexer: Any, _inputs: Any, chosen: Tensor) -> Tensor:
        """Return the tokens of all rows, [1, T, K]; rows of further drafts read those of the first draft's row."""
        if self._chosen is None:
            self._chosen = chosen
        elif (num_rows := self._chosen.shape[1]) > indexer.index_topk:
            chosen[:, num_rows:] = self._chosen[:, -1:]
        return chosen

    def put(self, name: str, weight: Tensor) -> None:
        """Replace a matrix of the head, called `name` in a checkpoint with numbered layers and single experts."""
        path = re.sub(r"^model\.layers\.\d+\.", "", name)
        own: Any = self.head.layers[0]
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", path)
        if expert is None:
            is_before = path.startswith("eh_proj")
            (own if is_before else own.mtp_block).get_parameter(path).data = weight
            return
        experts = own.mtp_block.get_submodule(expert[1])
        merged = experts.down_proj if expert[3] == "down" else experts.gate_up_proj
        rows = merged.data[int(expert[2])]
        parts = rows.chunk(2) if expert[3] != "down" else [rows]
        parts[expert[3] == "up"].copy_(weight)

    def tensors(self, *, is_stacked: bool = False) -> dict[str, Tensor]:
        """Return the head's tensors as checkpoints name them. `is_stacked`: experts are one tensor."""
        config = self.target.config
        numbered = config.model_type in _NUMBERED
        found = dict[str, Tensor]()
        for name, tensor in _per_expert(self.head.layers[0].state_dict(), is_stacked):
            part, _, rest = name.partition(".")
            if numbered:
                last = "final_layernorm.weight" if config.model_type == "hy_v3" else "shared_head.norm.weight"
                own = last if part == "post_norm" else name.removeprefix("mtp_block.")
                found[f"model.layers.{config.num_hidden_layers}.{own}"] = tensor.clone()
            elif config.model_type == "nemotron_h":
                found[f"mtp.{_NEMOTRON[part]}.{rest}"] = tensor.clone()
            else:
                own = f"layers.0.{rest}" if part == "mtp_block" else f"{_QWEN[part]}.{rest}"
                found[f"mtp.{own}"] = tensor.clone()
        if numbered:
            for each in ("embed_tokens", "shared_head.head"):
                found[f"model.layers.{config.num_hidden_layers}.{each}.weight"] = torch.zeros(VOCAB_SIZE, 48)
        return found


def _mtp_model(target: Any) -> MtpModel:
    """Return the `MtpModel` of one layer of a model."""
    decoder: Any = target.config.get_text_config(decoder=True)
    decoder.num_mtp_layers = 1
    if getattr(decoder, "layer_types", None):
        decoder.mtp_layer_types = ["sliding_attention" if decoder.model_type == "mellum" else "full_attention"]
    if getattr(decoder, "mlp_layer_types", None):
        decoder.mtp_mlp_layer_types = ["sparse"]
    return MtpModel(target, 1)


def _per_expert(tensors: dict[str, Tensor], is_stacked: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name, those of experts one by one."""
    for name, tensor in tensors.items():
        merged = re.fullmatch(r"(.+\.experts)\.(gate_up|up|down)_proj", name)
        if merged is None or is_stacked:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            parts = ("gate", "up") if merged[2] == "gate_up" else (merged[2],)
            for part, each in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{merged[1]}.{number}.{part}_proj.weight", each


def write_checkpoint(folder: Path, name: str, *, is_stacked: bool = False) -> Path:
    """Write the model of `target_of` with its head."""
    saved(target_of(name), folder)
    if name in _ALONE or name == "mellum":  # whose models here have no head, and do not write what those with one say
        file = folder / "config.json"
        published = {"num_nextn_predict_layers": 1} | _PUBLISHED.get(name, {})
        file.write_text(json.dumps(json.loads(file.read_text()) | published))
    add_tensors(folder, plain(name).tensors(is_stacked=is_stacked))
    return folder


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write further tensors into a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
