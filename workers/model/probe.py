"""Refuse models that would produce wrong tokens: by their configuration, and by a forward pass beside transformers'.

Models that keep state outside KV pages, or never call the attention interface, would produce fluent nonsense in
silence.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.kernels.linear import usable_kernels, why_not_int8
from crossdock.kernels.options import CpuKernels, KVCacheDtype, Quantization
from crossdock.workers.model.forward_context import (
    AttentionCall,
    ForwardContext,
    batch_of_one_page_each,
    current_pages,
    page_size_for,
)
from crossdock.workers.model.fp8_scales import example_text, in_float32, scale_for
from crossdock.workers.model.fused_projections import join_projections
from crossdock.workers.model.fusion import NotFusableError, fuse
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.latent import NoLatentsError, cache_latents, has_latents
from crossdock.workers.model.memory_fit import free_memory
from crossdock.workers.model.model import PagedModel, text_config
from crossdock.workers.model.recurrent import (
    RECURRENT_TYPES,
    STATELESS_TYPES,
    NotRecurrentError,
    has_recurrent_layers,
    keep_states_in_pages,
    layer_kinds,
)
from crossdock.workers.model.triton_layers import may_use_triton_steps, use_triton_layers
from crossdock.workers.model.vision import attention_names, num_deep_layers
from crossdock.workers.schedule.batch import Batch, Scheduled, StatePages
from crossdock.workers.schedule.request import Request, SamplingParams

logger = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention"} | RECURRENT_TYPES | STATELESS_TYPES
_CHUNKS = "a token attends within a fixed chunk of the context, and paged attention has windows alone"
_BLOCKS = "keys are compressed by blocks of tokens, and KV pages hold a row for each token"
_INDEXER = "an indexer chooses the tokens that are read; KV pages do not hold its keys, and attention reads all tokens"
_WHY_NOT = {
    "chunked_attention": _CHUNKS,
    "indexed_attention": _INDEXER,
    "minimax_m3_sparse": _INDEXER,
    "compressed_sparse_attention": _BLOCKS,
    "heavily_compressed_attention": _BLOCKS,
}
"""Why layers of transformers' other types are refused. docs/serving.md names the first step towards each."""
_WITHOUT_ATTENTION = {"linear_attention", "conv"} | STATELESS_TYPES
_LENGTHS = [5, 24]  # tokens of the two sequences that a probe computes
_QUANTISED_TOLERANCE = 0.2  # relative error of logits, in norm


class UnsupportedModelError(ValueError):
    """The model would produce wrong tokens here; the message gives the reason."""


def refuse_by_config(config: PretrainedConfig, num_ranks: int = 1) -> None:
    """Check that all state of the model lies in KV pages of every rank, as far as its configuration shows.

    Raises:
        UnsupportedModelError: layers keep other state, attend within fixed chunks, or are not divided among ranks.
    """
    kinds = set(getattr(text_config(config), "layer_types", None) or ())
    if unknown := kinds - _LAYER_TYPES:
        reasons = dict.fromkeys(_WHY_NOT.get(kind, "their state does not lie in KV pages") for kind in sorted(unknown))
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}: {'; '.join(reasons)}. Served are "
            f"{', '.join(sorted(_LAYER_TYPES))}"
        )
    if getattr(text_config(config), "attention_chunk_size", None) and not kinds:
        raise UnsupportedModelError(f"{config.model_type}: {_CHUNKS}")
    if num_ranks > 1 and has_recurrent_layers(text_config(config)):
        raise UnsupportedModelError(
            f"{config.model_type} has recurrent layers, whose states are not divided among ranks: set "
            f"tensor_parallel_size and pipeline_parallel_size to 1"
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
    if quantization is not None and (reason := _why_not_quantised(model, cpu_kernels)):
        raise ValueError(f"quantization {quantization}: {reason}")
    if has_recurrent_layers(text_config(model.config)):
        _keep_states(model, quantization)
    sequences = _ProbeBatch.for_model(model)
    context = ForwardContext(model.attention, probe_lengths=_LENGTHS)
    ours = sequences.run(model, context)
    calls = _one_call_per_layer(model, context.probe_calls)
    module: Any = model.module
    module.set_attn_implementation(attention_names(model.config, "eager"))
    try:
        theirs = torch.cat([model.logits(sequence) for sequence in torch.split(sequences.token_ids, _LENGTHS)])
    finally:
        module.set_attn_implementation(attention_names(model.config))
    tolerance = 2e-3 if model.dtype is torch.float32 else 0.1
    if not (error := _relative_error(ours, theirs)) <= tolerance:
        raise UnsupportedModelError(
            f"{model.config.model_type}: logits through paged attention differ from the model's own by {error:.1%} "
            f"in norm"
        )
    if has_latents(text_config(model.config)):
        calls = _cache_latents_if_equal(model, calls, sequences, theirs, tolerance)
    model.layers, model.windows = [call.shape for call in calls], [call.window for call in calls]
    if model.states is not None:
        model.places = {call.layer: place for place, call in enumerate(calls)}
        _check_states(model, sequences, theirs, tolerance)
    if kv_cache_dtype == "fp8":
        model.scales = _find_scales(model)  # by transformers' own layers, before any of them is replaced
    if model.states is not None:
        logger.info("decoder layers run in transformers' own code: some keep a recurrent state")
        return
    on_triton = may_use_triton_steps(model)
    if model.device.type == "cuda" or on_triton:
        _join_projections_if_equal(model, sequences, theirs, tolerance)
    if on_triton:
        _use_triton_layers_if_equal(model, calls, sequences, theirs, tolerance)
    if _may_fuse(model, cpu_kernels):
        _fuse_layers_if_equal(
            model, [call.window for call in calls], sequences, theirs, tolerance, cpu_kernels, kv_bytes, quantization
        )


@dataclass(frozen=True, slots=True)
class _ProbeBatch:
    """The flat batch of a probe: two sequences of random tokens, every token's logits wanted."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    rows: Tensor  # [T]

    @classmethod
    def for_model(cls, model: PagedModel) -> "_ProbeBatch":
        generator = torch.Generator().manual_seed(0)
        num_tokens, device = sum(_LENGTHS), model.device
        ids = torch.randint(0, min(model.vocab_size, 1000), (num_tokens,), generator=generator).to(device)
        positions = torch.cat([torch.arange(n) for n in _LENGTHS]).to(device)
        return cls(ids, positions, torch.arange(num_tokens, device=device))

    def request(self, number: int) -> Request:
        """Return a request of one of the sequences, every token's logits wanted."""
        token_ids = torch.split(self.token_ids, _LENGTHS)[number].tolist()
        return Request(f"probe-{number}", token_ids, SamplingParams(prompt_logprobs=0))

    def run(self, model: PagedModel, context: ForwardContext) -> Tensor:
        return model.run(context, self.token_ids, self.positions, self.rows)


def _keep_states(model: PagedModel, quantization: Quantization | None) -> None:
    """Let the recurrent layers keep their states in pages.

    Raises:
        UnsupportedModelError: they cannot.
        ValueError: `quantization` is for fused layers.
    """
    name, decoder = model.config.model_type, text_config(model.config)
    if quantization is not None:
        raise ValueError(f"quantization {quantization}: {name} has recurrent layers, which are not fused")
    if set(layer_kinds(decoder)) <= _WITHOUT_ATTENTION:
        raise UnsupportedModelError(f"{name} has no layers with attention, and so no KV pages to keep its states in")
    module: Any = model.module
    module.set_attn_implementation(attention_names(model.config, "eager"))
    try:
        model.states = keep_states_in_pages(module, decoder)
    except NotRecurrentError as reason:
        raise UnsupportedModelError(f"{name} has recurrent layers that are not served: {reason}") from reason
    finally:
        module.set_attn_implementation(attention_names(model.config))


def _check_states(model: PagedModel, sequences: "_ProbeBatch", theirs: Tensor, tolerance: float) -> None:
    """Check that chunks which continue a state in pages give the logits of one pass.

    Raises:
        UnsupportedModelError: they do not: the kernels of some layers ignore an earlier state.
    """
    short, long = _LENGTHS
    size = page_size_for(_LENGTHS, model.attention.page_multiple)
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
                Scheduled(sequences.request(number), start, stop - start, [number], samples=True, state=state)
                for number, start, stop, state in step
            ]
            ours.append(StepInputs.of(Batch(parts, 0), size)[0].run(model))
    finally:
        model.scales = scales
        model.free_pool()
    if not (error := _relative_error(torch.cat(ours), theirs)) <= tolerance:
        raise UnsupportedModelError(
            f"{model.config.model_type}: chunks of a prompt give logits that differ from those of one pass by "
            f"{error:.1%} in norm: the kernels of its recurrent layers ignore the state of earlier tokens"
        )


def _one_call_per_layer(model: PagedModel, calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Return the calls in the order of layers."""
    calls = sorted(calls, key=lambda call: call.layer)
    layers, part = [call.layer for call in calls], model.part
    expected = list(range(part.first_layer, part.first_layer + part.num_layers))
    if model.states is not None:
        kinds = layer_kinds(text_config(model.config))
        expected = [layer for layer, kind in enumerate(kinds) if kind not in _WITHOUT_ATTENTION]
    if layers != expected:
        missing = sorted(set(expected) - set(layers))
        raise UnsupportedModelError(
            f"{model.config.model_type}: layers {missing or layers} of {len(expected)} did not reach the attention "
            f"interface exactly once; they keep state elsewhere or bring attention code of their own"
        )
    return calls


def _cache_latents_if_equal(
    model: PagedModel,
    calls: list[AttentionCall],
    sequences: _ProbeBatch,
    theirs: Tensor,
    tolerance: float,
) -> list[AttentionCall]:
    """Let the layers cache latents if that gives the same logits on every rank. Returns the layers' calls as they are.

    Collective: every rank of a gang must call it.
    """
    context, undo, refusal = ForwardContext(model.attention, probe_lengths=_LENGTHS), None, ""
    try:
        if not all(call.is_plain and call.window is None for call in calls):
            raise NoLatentsError("attention has a window, a softcap or sinks")
        undo = cache_latents(model.module, [call.layer for call in calls])
    except NoLatentsError as reason:
        refusal = str(reason)
    if not (error := _relative_error(sequences.run(model, context), theirs)) <= tolerance:
        refusal = refusal or f"from latents, logits differ by {error:.1%}"
    if model.part.collectives is not None:  # only the last stage has logits, and pages are the same everywhere
        refusal = next(filter(None, model.part.collectives.gather_texts(refusal)), "")
    if refusal:
        logger.warning("every head's keys and values are cached, not the latents they come from: %s", refusal)
        if undo is not None:
            undo()
        return calls
    if model.part.position.tensor_size > 1:
        model.part.heads = {call.layer: (0, 1, 1) for call in calls}  # every rank has all latents
    calls = _one_call_per_layer(model, context.probe_calls)
    logger.info("latents are cached, of %d elements a token and layer", calls[0].shape.key_dim)
    return calls


def _join_projections_if_equal(model: PagedModel, sequences: _ProbeBatch, theirs: Tensor, tolerance: float) -> None:
    undo = join_projections(model.module)
    joined = sequences.run(model, ForwardContext(model.attention, probe_lengths=_LENGTHS))
    if not (error := _relative_error(joined, theirs)) <= tolerance:
        logger.info("projections are computed one by one: joined, their logits differ by %.1f %%", 100 * error)
        undo()


def _use_triton_layers_if_equal(
    model: PagedModel,
    calls: Sequence[AttentionCall],
    sequences: _ProbeBatch,
    theirs: Tensor,
    tolerance: float,
) -> None:
    """Replace the decoder layers if that gives the same logits. Collective: every rank of a gang must call it."""

    def forward() -> Tensor:
        page_multiple = model.attention.page_multiple
        batch = batch_of_one_page_each(_LENGTHS, model.device, page_multiple)
        scales, model.scales = model.scales, []  # e4m3 would change the logits, by transformers' own layers as well
        try:
            model.allocate_pool(len(_LENGTHS), page_size_for(_LENGTHS, page_multiple))
            return model.forward(sequences.token_ids, sequences.positions, batch, sequences.rows)
        finally:
            model.scales = scales
            model.free_pool()

    undo, refusal = None, ""
    try:
        if not all(call.is_plain for call in calls):
            raise NotFusableError("attention has a softcap or sinks")
        undo = use_triton_layers(model, [call.window for call in calls])
    except NotFusableError as difference:
        refusal = str(difference)
    # A rank that keeps its own layers takes part in the check: others of its gang wait for its share of the sums.
    if undo is not None or model.part.position.size > 1:
        try:
            if not (error := _relative_error(forward(), theirs)) <= tolerance:
                refusal = refusal or f"fused, their logits differ by {error:.1%}"
        except NotFusableError as difference:
            refusal = str(difference)
        except Exception as failure:  # a compiler may raise anything
            if undo is None:
                raise
            refusal = f"fused, they fail: {type(failure).__name__}: {' '.join(str(failure).split())}"
    if refusal:
        logger.info("decoder layers run in transformers' own code: %s", refusal)
        if undo is not None:
            undo()
        return
    model.kernels = "triton steps"
    logger.info("decoder layers are fused: steps between their products run in Triton")


def _may_fuse(model: PagedModel, cpu_kernels: CpuKernels) -> bool:
    """Return whether all layers may be one stack of a CPU: only where attention runs in C++.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run here.
    """
    if model.device.type != "cpu" or model.attention.name != "cpp" or num_deep_layers(model.config):
        return False
    usable_kernels(model.dtype, cpu_kernels)
    return model.dtype in (torch.bfloat16, torch.float32)


def _why_not_quantised(model: PagedModel, cpu_kernels: CpuKernels) -> str | None:
    if model.device.type != "cpu":
        return f"it is for CPUs, and the model runs on {model.device.type}"
    if model.part.position.size > 1:
        return "it is for replicas of one rank"
    if model.attention.name != "cpp":
        return f"it needs the attention that runs in C++, and attention runs in {model.attention.name}"
    return why_not_int8(model.dtype, cpu_kernels)


def _fuse_layers_if_equal(
    model: PagedModel,
    windows: Sequence[int | None],
    sequences: _ProbeBatch,
    theirs: Tensor,
    tolerance: float,
    cpu_kernels: CpuKernels,
    kv_bytes: int | None,
    quantization: Quantization | None,
) -> None:
    try:
        if model.part.position.size > 1:
            raise NotFusableError("each rank has only a part of them")
        free = None if kv_bytes is None else free_memory() - kv_bytes
        fusion = fuse(
            model.module, windows, current_pages, model.attention.paged_attention, cpu_kernels, free, quantization
        )
    except NotFusableError as reason:
        if quantization is not None:
            raise UnsupportedModelError(f"quantization {quantization}: {reason}") from reason
        logger.info("decoder layers run in transformers' own code: %s", reason)
        return
    model.allocate_pool(len(_LENGTHS), max(_LENGTHS))
    batch = batch_of_one_page_each(_LENGTHS, model.device)
    fused = model.forward(sequences.token_ids, sequences.positions, batch, sequences.rows)
    error = _relative_error(fused, theirs)
    if quantization is not None:
        tolerance = _QUANTISED_TOLERANCE
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"quantization {quantization}: logits differ from those of the given weights by {error:.1%} in norm"
            )
    if not error <= tolerance:
        logger.info("decoder layers run in transformers' own code: fused, their logits differ by %.1f %%", 100 * error)
        fusion.undo()
        return
    model.kernels = str(fusion)
    logger.info("decoder layers are fused; products by %s", fusion)
    _leave_file(model.module)


@torch.inference_mode(False)  # weights are used in other modes too
def _leave_file(module: nn.Module) -> None:
    """Copy the weights that fused layers left in use, so that the mapped file of all weights can be freed.

    Parameters that share their memory go on sharing.
    """
    copies: dict[int, Tensor] = {}
    for parameter in module.parameters():
        pointer = parameter.data_ptr()
        parameter.data = copies.setdefault(pointer, parameter.data.clone())


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


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-6)
    return float(error)
