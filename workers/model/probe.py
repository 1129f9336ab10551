"""Refuse models that would produce wrong tokens: by their configuration, and by a forward pass beside transformers'.

Models that keep state outside KV pages, or never call the attention interface, would produce fluent nonsense in
silence.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from crossdock.kernels.options import CpuKernels, KVCacheDtype, Quantization
from crossdock.workers.model.forward_context import (
    AttentionCall,
    ForwardContext,
    page_size_for,
)
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.layer_kinds import (
    RECURRENT_TYPES,
    STATELESS_TYPES,
    attention_layers,
    layer_kinds,
    recurrent_layers,
)
from crossdock.workers.model.layers.latent import has_latents
from crossdock.workers.model.layers.replaced_parts import (
    cache_latents_if_equal,
    fuse_layers_if_equal,
    join_projections_if_equal,
    may_fuse,
    use_triton_layers_if_equal,
    why_not_quantised,
)
from crossdock.workers.model.layers.triton_layers import may_use_triton_steps
from crossdock.workers.model.logits_check import PROBE_LENGTHS, LogitsCheck, ProbeBatch, UnsupportedModelError
from crossdock.workers.model.model import PagedModel, text_config
from crossdock.workers.model.pictures.vision import attention_names
from crossdock.workers.model.recurrent.recurrent_layers import NotRecurrentError, keep_states_in_pages
from crossdock.workers.model.weights.fp8_scales import example_text, in_float32, scale_for
from crossdock.workers.schedule.batch import Batch, Scheduled, StatePages

__all__ = ["UnsupportedModelError", "probe", "refuse_by_config"]

logger = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"} | RECURRENT_TYPES | STATELESS_TYPES
_BLOCKS = "keys are compressed by blocks of tokens, and KV pages hold a row for each token"
_INDEXER = "an indexer chooses the tokens that are read; KV pages do not hold its keys, and attention reads all tokens"
_WHY_NOT = {
    "indexed_attention": _INDEXER,
    "minimax_m3_sparse": _INDEXER,
    "compressed_sparse_attention": _BLOCKS,
    "heavily_compressed_attention": _BLOCKS,
}
"""Why layers of transformers' other types are refused. docs/models.md names the first step towards each."""


def refuse_by_config(config: PretrainedConfig) -> None:
    """Check that all state of the model lies in KV pages, as far as its configuration shows.

    Raises:
        UnsupportedModelError: layers keep other state.
    """
    kinds = set(layer_kinds(text_config(config)))
    if unknown := kinds - _LAYER_TYPES:
        reasons = dict.fromkeys(_WHY_NOT.get(kind, "their state does not lie in KV pages") for kind in sorted(unknown))
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}: {'; '.join(reasons)}. Served are "
            f"{', '.join(sorted(_LAYER_TYPES))}"
        )


@torch.inference_mode()
def probe(
    model: PagedModel,
    kv_cache_dtype: KVCacheDtype,
    cpu_kernels: CpuKernels = "auto",
    kv_bytes: int | None = None,
    quantization: Quantization | None = None,
) -> None:
    """Prove a model: two sequences in one flat batch must give the logits of the model's own eager attention.

    Sets `model.layers`, `model.windows` and `model.scales`, and fuses layers if that gives the same logits again.
    `kv_bytes` of memory must stay free for pages. Collective: every rank of a gang must call it.

    Raises:
        UnsupportedModelError: the logits differ, or a layer did not reach our attention exactly once.
        ValueError: `quantization` cannot be applied to this model on this device.
    """
    if quantization is not None and (reason := why_not_quantised(model, cpu_kernels)):
        raise ValueError(f"quantization {quantization}: {reason}")
    if recurrent_layers(text_config(model.config)):
        _keep_states(model, quantization)
    sequences = ProbeBatch.for_model(model)
    context = ForwardContext(model.attention, probe_lengths=PROBE_LENGTHS)
    ours = sequences.run(model, context)
    calls = _one_call_per_layer(model, context.probe_calls)
    check = LogitsCheck.of(model, sequences)
    if not check.passes(ours):
        raise UnsupportedModelError(
            f"{model.config.model_type}: logits through paged attention differ from the model's own by "
            f"{check.error(ours):.1%} in norm"
        )
    if has_latents(text_config(model.config)):
        calls = _one_call_per_layer(model, cache_latents_if_equal(model, calls, check))
    model.layers, model.windows = [call.shape for call in calls], [call.window for call in calls]
    if model.states is not None:
        model.places = {call.layer: place for place, call in enumerate(calls)}
        _check_states(model, check)
    if kv_cache_dtype == "fp8":
        model.scales = _find_scales(model)  # by transformers' own layers, before any of them is replaced
    if model.states is not None:
        logger.info("decoder layers run in transformers' own code: some keep a recurrent state")
        return
    on_triton = may_use_triton_steps(model)
    if model.device.type == "cuda" or on_triton:
        join_projections_if_equal(model, check)
    if on_triton:
        use_triton_layers_if_equal(model, calls, check)
    if may_fuse(model, cpu_kernels):
        fuse_layers_if_equal(model, model.windows, check, cpu_kernels, kv_bytes, quantization)


def _keep_states(model: PagedModel, quantization: Quantization | None) -> None:
    """Let the recurrent layers keep their states in pages.

    Raises:
        UnsupportedModelError: they cannot.
        ValueError: `quantization` is for fused layers.
    """
    name, decoder = model.config.model_type, text_config(model.config)
    if quantization is not None:
        raise ValueError(f"quantization {quantization}: {name} has recurrent layers, which are not fused")
    if not attention_layers(decoder):
        raise UnsupportedModelError(f"{name} has no layers with attention, and so no KV pages to keep its states in")
    module: Any = model.module
    # Two tokens: one would take the path of decodes, which may keep its states in another dtype.
    token_ids = torch.tensor([3, 4], device=model.device)

    def compute(cache: DynamicCache) -> Tensor:
        return model.logits(token_ids, past_key_values=cache, use_cache=True)

    module.set_attn_implementation(attention_names(model.config, "eager"))
    try:
        model.states = keep_states_in_pages(module, decoder, model.part.held_layers, compute)
    except NotRecurrentError as reason:
        raise UnsupportedModelError(f"{name} has recurrent layers that are not served: {reason}") from reason
    finally:
        module.set_attn_implementation(attention_names(model.config))
    if model.part.why_states_are_whole:
        logger.info("every rank keeps the whole state of recurrent layers: %s", model.part.why_states_are_whole)


def _check_states(model: PagedModel, check: LogitsCheck) -> None:
    """Check that chunks which continue a state in pages give the logits of one pass.

    Raises:
        UnsupportedModelError: they do not: the kernels of some layers ignore an earlier state.
    """
    short, long = PROBE_LENGTHS
    size = page_size_for(PROBE_LENGTHS, model.attention.page_multiple)
    scales, model.scales = model.scales, []  # e4m3 would change the logits, by transformers' own layers as well
    try:
        width = model.state_pages(size)
        model.allocate_pool(2 + 2 * width, size)
        first, second = range(2, 2 + width), range(2 + width, 2 + 2 * width)
        cut = long // 3
        steps = [
            [(0, 0, short, StatePages((), first)), (1, 0, cut, StatePages((), second))],
            [(1, cut, cut + 1, StatePages(second, second))],
            [(1, cut + 1, long, StatePages(second, second))],
        ]
        ours = []
        for step in steps:
            parts = [
                Scheduled(check.sequences.request(number), start, stop - start, [number], samples=True, state=state)
                for number, start, stop, state in step
            ]
            ours.append(StepInputs.of(Batch(parts, 0), size)[0].run(model))
    finally:
        model.scales = scales
        model.free_pool()
    if not check.passes(torch.cat(ours)):
        raise UnsupportedModelError(
            f"{model.config.model_type}: chunks of a prompt give logits that differ from those of one pass by "
            f"{check.error(torch.cat(ours)):.1%} in norm: the kernels of its recurrent layers ignore the state of "
            f"earlier tokens"
        )


def _one_call_per_layer(model: PagedModel, calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Return the calls in the order of layers."""
    calls = sorted(calls, key=lambda call: call.layer)
    layers, part = [call.layer for call in calls], model.part
    expected = list(part.held_layers)
    if model.states is not None:
        expected = [layer for layer in attention_layers(text_config(model.config)) if layer in part.held_layers]
    if layers != expected:
        missing = sorted(set(expected) - set(layers))
        raise UnsupportedModelError(
            f"{model.config.model_type}: layers {missing or layers} of {len(expected)} did not reach the attention "
            f"interface exactly once; they keep state elsewhere or bring attention code of their own"
        )
    return calls


@torch.inference_mode(False)  # parameters change their dtype for a while
@torch.no_grad()
def _find_scales(model: PagedModel) -> list[tuple[Tensor, Tensor]]:
    """Return the scales of every layer here, of keys and of values. Collective: every rank must call it."""
    token_ids = example_text(model.max_model_len, model.vocab_size).to(model.device)
    positions = torch.arange(len(token_ids), device=model.device)
    context = ForwardContext(model.attention, probe_lengths=[len(token_ids)])
    with in_float32(model.module):
        model.run(context, token_ids, positions, positions[:1], torch.float32)
    calls = sorted(context.probe_calls, key=lambda call: call.layer)
    return [(scale_for(keys), scale_for(values)) for keys, values in (call.largest for call in calls)]
