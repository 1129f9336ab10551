"""The head of EAGLE-3: one decoder layer over the hidden states of three of the target's layers.

The row of position p reads the target's states at p and the token at p + 1, and its token is a draft of that at p + 2.
The row of a further draft reads the head's own state in the place of the target's. (Li et al., arXiv 2503.01840.)
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from crossdock.workers.draft.eagle_config import NUM_STATES, EagleConfig
from crossdock.workers.model.weights.untrusted import check_links, naming

_UNREAD = ("t2d", "verifier_", "rotary_emb")  # beginnings of tensors that a head may bring, and does not compute with


class _HeadLayer(nn.Module):
    """The weights of the head's decoder layer. Its attention reads a token's embedding and its states side by side."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_key_value_heads * config.head_dim
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)  # of embeddings
        self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)  # of states
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * width, heads, bias=config.attention_bias),
                "k_proj": nn.Linear(2 * width, kv_heads, bias=config.attention_bias),
                "v_proj": nn.Linear(2 * width, kv_heads, bias=config.attention_bias),
                "o_proj": nn.Linear(heads, width, bias=config.attention_bias),
            }
        )
        self.mlp = LlamaMLP(config)


class EagleHead(nn.Module):
    """A head's weights, and its forward pass over pages of its own."""

    def __init__(self, config: EagleConfig, *, embeds: bool = False) -> None:
        """`embeds`: the head has an embedding of its own, and does not read the target's."""
        super().__init__()
        layer = config.layer
        self.config = config
        self.fc = nn.Linear(NUM_STATES * config.target_hidden_size, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList([_HeadLayer(layer)])
        self.norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size) if embeds else None
        self.d2t: Tensor  # [draft_vocab_size]: how far the target's token is from the head's own
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = LlamaRotaryEmbedding(layer)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> "EagleHead":
        """Load a head. ValueError: its files are not of a head that is computed here; the message says what differs."""
        config = EagleConfig.read(folder)
        tensors = _read_tensors(folder)
        if "d2t" not in tensors and config.draft_vocab_size == config.layer.vocab_size:
            tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        head = cls(config, embeds="embed_tokens.weight" in tensors)
        own = head.state_dict()
        if missing := own.keys() ^ tensors.keys():
            here = sorted(missing & own.keys())
            text = f"lacks {', '.join(here)}" if here else f"has {', '.join(sorted(missing))}, which no such head has"
            raise ValueError(f"model: {folder} {text:.500}")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                expected = list(own[name].shape)
                raise ValueError(f"model: {folder}: {name} is {list(tensor.shape)}; config.json asks for {expected}")
        head.load_state_dict(tensors)
        targets = torch.arange(config.draft_vocab_size) + head.d2t
        if targets.min() < 0 or targets.max() >= config.layer.vocab_size:
            raise ValueError(f"model: {folder}: d2t leads out of the vocabulary of {config.layer.vocab_size} tokens")
        rotary = head.rotary
        head = head.to(device=device, dtype=dtype).eval().requires_grad_(False)
        head.rotary = rotary.to(device)  # its frequencies stay in float32
        return head

    @property
    def width(self) -> int:
        """Return the numbers of a state, H."""
        width: int = self.config.layer.hidden_size
        return width

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of weights, states and pages."""
        dtype: torch.dtype = self.norm.weight.dtype
        return dtype

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Return the number of heads with keys and values, and the numbers of each."""
        return self.config.layer.num_key_value_heads, self.config.layer.head_dim

    @property
    def scale(self) -> float:
        """Return the scale of attention's scores."""
        head_dim: int = self.config.layer.head_dim
        return 1 / math.sqrt(head_dim)

    def tokens_of(self, draft_ids: Tensor) -> Tensor:
        """Return the target's tokens of the head's own ones, [N]."""
        return draft_ids + self.d2t[draft_ids]

    def combined(self, states: Tensor) -> Tensor:
        """Combine the target's states [T, 3 E] to those that rows read, [T, H]."""
        combined: Tensor = self.fc(states)
        return combined

    def forward(
        self,
        states: Tensor,  # [T, H]: combined ones of the target, or the head's own
        embeddings: Tensor,  # [T, H], of the tokens after those of the states
        positions: Tensor,  # [T]
        attend: Callable[[Tensor, Tensor, Tensor], Tensor | None],
        rows: Tensor,  # [N], of the T
    ) -> tuple[Tensor, Tensor]:
        """Return logits [N, draft_vocab_size] of some rows, and the head's states [N, H] there.

        `attend` stores keys and values [T, Hkv, D] and returns what queries [T, Hq, D] see, as [T, Hq, D]; None: the
        keys and values alone are wanted.
        """
        layer: Any = self.layers[0]
        attention = layer.self_attn
        normed = layer.hidden_norm(states)
        entering = normed if self.config.norm_before_residual else states
        both = torch.cat([layer.input_layernorm(embeddings), normed], -1)
        head_dim = self.config.layer.head_dim
        q, k, v = (attention[f"{name}_proj"](both).unflatten(-1, (-1, head_dim)) for name in "qkv")
        cos, sin = self.rotary(both[None], positions[None])
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
        seen = attend(q[0], k[0], v)
        if seen is None:
            return states.new_zeros(0, self.config.draft_vocab_size), states[:0]
        hidden = entering[rows] + attention["o_proj"](seen[rows].flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.lm_head(self.norm(hidden)), hidden


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a head by its own names. ValueError: there are none in safetensors."""
    check_links(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: {folder} has no *.safetensors; a head in pytorch_model.bin must be converted")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with naming(file), safe_open(file, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118  # the reader is no mapping
                name = key.removeprefix("model.").replace("midlayer.", "layers.0.")
                if not name.startswith(_UNREAD):
                    tensors[name] = reader.get_tensor(key)
    return tensors
