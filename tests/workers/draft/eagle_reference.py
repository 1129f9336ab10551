"""Drafting heads with random weights, and what such a head drafts, in plain torch: no pages, whole texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel
from transformers.utils import logging

from crossdock.workers.model.weights.untrusted import read_json

logging.disable_progress_bar()
LAYERS = (0, 1, 3)  # of the target's four
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 16, 96
"""Sizes of heads, whose width is the target's."""


def write_head(folder: Path, target: PreTrainedModel, *, draft_vocab: int | None = None, **changed: Any) -> Path:
    """Write a random head of `target` in the form of speculators. `changed`: fields of config.json."""
    config: Any = target.config
    width, vocab = config.hidden_size, config.vocab_size
    draft_vocab = draft_vocab or vocab
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
    }
    whole = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    }
    shapes = {
        "fc.weight": [width, 3 * width],
        "embed_tokens.weight": [vocab, width],
        "layers.0.self_attn.q_proj.weight": [HEADS * HEAD_DIM, 2 * width],
        "layers.0.self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, 2 * width],
        "layers.0.self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, 2 * width],
        "layers.0.self_attn.o_proj.weight": [width, HEADS * HEAD_DIM],
        "layers.0.mlp.gate_proj.weight": [INTERMEDIATE, width],
        "layers.0.mlp.up_proj.weight": [INTERMEDIATE, width],
        "layers.0.mlp.down_proj.weight": [width, INTERMEDIATE],
        "lm_head.weight": [draft_vocab, width],
    }
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm")
    draw = torch.Generator().manual_seed(7)
    tensors = {name: 0.15 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.2 * torch.randn(width, generator=draw) for name in norms}
    kept = torch.randperm(vocab, generator=draw)[:draft_vocab].sort().values
    tensors |= {"d2t": kept - torch.arange(draft_vocab), "t2d": torch.isin(torch.arange(vocab), kept)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    write_config(folder, whole | changed)
    return folder


def write_config(folder: Path, content: dict[str, Any]) -> None:
    """Write config.json."""
    (folder / "config.json").write_text(json.dumps(content))


class EagleReference:
    """Drafts after a text of `target` as the head in a folder should."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        self._target: Any = target
        self._weights = {
            name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        found = read_json(folder / "config.json")
        self._norm_before_residual = bool(found.get("norm_before_residual"))
        embedding = self._weights.get("embed_tokens.weight")
        self._embedding = target.get_input_embeddings().weight if embedding is None else embedding

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int, first: int = 0) -> list[int]:
        """Return so many drafts after `tokens`. `first`: position of the first state that the head sees."""
        text = torch.tensor(tokens)
        found = self._target(text[None], output_hidden_states=True, use_cache=False).hidden_states
        states = linear(torch.cat([found[layer][0] for layer in LAYERS], -1), self._weights["fc.weight"])
        states, nexts, drafts = states[first:-1], text[first + 1 :], list[int]()
        for _ in range(count):
            logits, own = self._rows(states, self._embedding[nexts])
            draft = int(logits[-1].argmax())
            drafts.append(draft + int(self._weights["d2t"][draft]))
            states, nexts = torch.cat([states, own[-1:]]), torch.cat([nexts, torch.tensor(drafts[-1:])])
        return drafts

    def _rows(self, states: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and own states of all rows."""
        normed = self._norm("layers.0.hidden_norm", states)
        both = torch.cat([self._norm("layers.0.input_layernorm", embeddings), normed], -1)
        q, k, v = (self._linear(f"self_attn.{name}_proj", both).view(len(both), -1, HEAD_DIM) for name in "qkv")
        q, k = _rotated(q), _rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        later = torch.ones(len(both), len(both), dtype=torch.bool).triu(1)
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        hidden = (normed if self._norm_before_residual else states) + self._linear("self_attn.o_proj", seen.flatten(1))
        x = self._norm("layers.0.post_attention_layernorm", hidden)
        activated = silu(self._linear("mlp.gate_proj", x)) * self._linear("mlp.up_proj", x)
        hidden = hidden + self._linear("mlp.down_proj", activated)
        return linear(self._norm("norm", hidden), self._weights["lm_head.weight"]), hidden

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._weights[f"layers.0.{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self._weights[f"{name}.weight"]


def _rotated(x: Tensor) -> Tensor:
    """Rotate [T, H, D] by position: number i of the first half with number i of the second."""
    angles = torch.arange(len(x))[:, None] / 5000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
