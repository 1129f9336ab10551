"""The limit engine: a forward pass with nothing beside its work, so that each figure has its ratio on the same card.

Joined weights, `F.rms_norm`, rotation, `F.linear`, and SDPA over a static contiguous cache of exact length; one CUDA
graph a shape. No scheduler, no pages, no sampling. Its products alone and its attention alone have graphs too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu.cases import Bench, Case, Once, Section, UnavailableError
from gpu.models import random_module
from gpu.rows import Figures
from torch import Tensor


class LimitEngine:
    """Llama-shaped layers of a transformers module, over a cache [L, 2, B, Hkv, S, D] that no page table divides."""

    def __init__(self, module: Any) -> None:
        self.config, self.head, self.embedding = module.config, module.lm_head.weight, module.model.embed_tokens.weight
        self._rotary, self._norm = module.model.rotary_emb, module.model.norm.weight
        self.layers = []
        for layer in module.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            joined = [
                torch.cat([part.weight for part in parts])
                for parts in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
            ]
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            self.layers.append((joined[0], attention.o_proj.weight, joined[1], mlp.down_proj.weight, *norms))
        self.cache = self.head.new_empty(0)

    def open(self, streams: int, context: int) -> None:
        """Give each stream a cache of so many tokens, with random content."""
        self.cache = self.head.new_empty(0)  # the one before is free first
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        shape = (len(self.layers), 2, streams, heads, context, dim)
        self.cache = torch.randn(shape, dtype=self.head.dtype, device=self.head.device)

    @torch.inference_mode()
    def step(self, ids: Tensor, start: int) -> Tensor:
        """Return the logits [B, V] of the last of `ids` [B, T], at positions from `start` on; the cache holds those."""
        num_tokens, eps, dim = ids.shape[1], self.config.rms_norm_eps, self.config.head_dim
        x = F.embedding(ids, self.embedding)
        positions = torch.arange(start, start + num_tokens, device=ids.device)[None]
        cos, sin = (part[:, None] for part in self._rotary(x, positions))
        for number, (qkv, out, gate_up, down, norm, post_norm) in enumerate(self.layers):
            heads = F.linear(F.rms_norm(x, norm.shape, norm, eps), qkv).unflatten(-1, (-1, dim)).transpose(1, 2)
            num_kv = self.config.num_key_value_heads
            q, k, v = heads.split([self.config.num_attention_heads, num_kv, num_kv], 1)  # [B, H, T, D]
            self.cache[number, 0, :, :, start : start + num_tokens] = _rotated(k, cos, sin)
            self.cache[number, 1, :, :, start : start + num_tokens] = v
            x = x + F.linear(self.attend(number, _rotated(q, cos, sin), start).transpose(1, 2).flatten(2), out)
            gate, up = F.linear(F.rms_norm(x, post_norm.shape, post_norm, eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        last = x[:, -1]
        return F.linear(F.rms_norm(last, self._norm.shape, self._norm, eps), self.head)

    def attend(self, layer: int, q: Tensor, start: int) -> Tensor:
        """Return the attention of rows [B, H, T, D] over the cache: of one token each, or of a whole prompt."""
        keys, values = self.cache[layer, :, :, :, : start + q.shape[2]]
        return F.scaled_dot_product_attention(q, keys, values, is_causal=q.shape[2] > 1, enable_gqa=True)

    @torch.inference_mode()
    def products(self, rows: dict[int, Tensor], num_logits: int) -> None:
        """Compute the products of a step alone. `rows`: those that each width of input has."""
        for weights in self.layers:
            for weight in weights[:4]:
                F.linear(rows[weight.shape[1]], weight)
        F.linear(rows[self.head.shape[1]][:num_logits], self.head)

    @torch.inference_mode()
    def attention(self, q: Tensor, start: int) -> None:
        """Compute the attention of a step alone."""
        for layer in range(len(self.layers)):
            self.attend(layer, q, start)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


def limits(bench: Bench) -> Iterator[Case]:
    """Yield the limit engine's steps of the first model, beside what our engine took in this rows file."""
    sizes, name = bench.sizes, next(iter(bench.sizes.models))
    engine = Once(lambda: LimitEngine(random_module(bench, name)))
    for streams, context in sizes.decodes:
        ours = f"{name}: decode {streams} x {context}", "ahead_ms"
        yield Case(f"decode {streams} x {context}", partial(_limit, bench, engine, streams, 1, context, ours))
    ours = f"{name}: prefill {sizes.prompt}", "ms"
    yield Case(f"prefill {sizes.prompt}", partial(_limit, bench, engine, 1, sizes.prompt, sizes.prompt, ours))
    engine.free()


def _limit(bench: Bench, loaded: Once, streams: int, tokens: int, context: int, ours: tuple[str, str]) -> Figures:
    """Return the milliseconds of a step of `tokens` of each stream, of its products and of its attention alone."""
    engine: Any = loaded()
    try:
        engine.open(streams, context)
        ids = torch.randint(0, engine.config.vocab_size, (streams, tokens), device=bench.device.name)
        widths = {weight.shape[1] for weights in engine.layers for weight in weights[:4]}
        rows = {width: torch.randn(ids.numel(), width, dtype=engine.head.dtype, device=ids.device) for width in widths}
        shape = (streams, engine.config.num_attention_heads, tokens, engine.config.head_dim)
        q, start = torch.randn(shape, dtype=engine.head.dtype, device=ids.device), context - tokens
        parts: dict[str, Callable[[], object]] = {
            "ms": partial(engine.step, ids, start),
            "products_ms": partial(engine.products, rows, streams),
            "attention_ms": partial(engine.attention, q, start),
        }
        found: Figures = {part: bench.device.replayed(run, repeats=7) * 1e3 for part, run in parts.items()}
    except torch.OutOfMemoryError as error:
        raise UnavailableError(f"the memory does not hold {streams} streams of {context} tokens") from error
    our_ms = bench.rows.figures("engine", ours[0]).get(ours[1], float("nan"))
    return found | {"ours_over_limit": our_ms / found["ms"]}


SECTIONS = [Section("limit", 60.0, limits)]
