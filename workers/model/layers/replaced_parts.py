"""Faster parts in place of a model's own, each only where the logits stay the same."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.linear import usable_kernels, why_not_int8
from crossdock.kernels.options import CpuKernels, Quantization
from crossdock.workers.model.forward_context import (
    AttentionCall,
    ForwardContext,
    batch_of_one_page_each,
    current_pages,
    page_size_for,
)
from crossdock.workers.model.layers.fused_projections import join_projections
from crossdock.workers.model.layers.fusion import NotFusableError, fuse
from crossdock.workers.model.layers.latent import NoLatentsError, cache_latents
from crossdock.workers.model.layers.triton_layers import use_triton_layers
from crossdock.workers.model.logits_check import PROBE_LENGTHS, LogitsCheck, UnsupportedModelError
from crossdock.workers.model.memory.memory_fit import free_memory
from crossdock.workers.model.model import PagedModel
from crossdock.workers.model.pictures.vision import num_deep_layers
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window

logger = logging.getLogger(__name__)

_QUANTISED_TOLERANCE = 0.2  # relative error of logits, in norm


def cache_latents_if_equal(
    model: PagedModel,
    calls: list[AttentionCall],
    check: LogitsCheck,
) -> list[AttentionCall]:
    """Let the layers cache latents if that gives the same logits on every rank. Returns the layers' calls as they are.

    Collective: every rank of a gang must call it.
    """
    context, undo, refusal = ForwardContext(model.attention, probe_lengths=PROBE_LENGTHS), None, ""
    try:
        if not all(call.is_plain and call.window is None for call in calls):
            raise NoLatentsError("attention has a window, a softcap or sinks")
        undo = cache_latents(model.module, [call.layer for call in calls])
    except NoLatentsError as reason:
        refusal = str(reason)
    if not (error := check.error(check.sequences.run(model, context))) <= check.tolerance:
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
    logger.info("latents are cached, of %d elements a token and layer", context.probe_calls[0].shape.key_dim)
    return context.probe_calls


def join_projections_if_equal(model: PagedModel, check: LogitsCheck) -> None:
    """Compute projections of the same input as one product, if that gives the same logits."""
    undo = join_projections(model.module)
    joined = check.sequences.run(model, ForwardContext(model.attention, probe_lengths=PROBE_LENGTHS))
    if not (error := check.error(joined)) <= check.tolerance:
        logger.info("projections are computed one by one: joined, their logits differ by %.1f %%", 100 * error)
        undo()


def use_triton_layers_if_equal(
    model: PagedModel,
    calls: Sequence[AttentionCall],
    check: LogitsCheck,
) -> None:
    """Replace the decoder layers if that gives the same logits. Collective: every rank of a gang must call it."""

    def forward() -> Tensor:
        page_multiple = model.attention.page_multiple
        batch = batch_of_one_page_each(PROBE_LENGTHS, model.device, page_multiple)
        scales, model.scales = model.scales, []  # e4m3 would change the logits, by transformers' own layers as well
        try:
            model.allocate_pool(len(PROBE_LENGTHS), page_size_for(PROBE_LENGTHS, page_multiple))
            return model.forward(check.sequences.token_ids, check.sequences.positions, batch, check.sequences.rows)
        finally:
            model.scales = scales
            model.free_pool()

    undo, refusal = None, ""
    try:
        if not all(call.is_plain for call in calls):
            raise NotFusableError("attention has a softcap or sinks")
        undo = use_triton_layers(model, _sliding([call.window for call in calls]))
    except NotFusableError as difference:
        refusal = str(difference)
    # A rank that keeps its own layers takes part in the check: others of its gang wait for its share of the sums.
    if undo is not None or model.part.position.size > 1:
        try:
            if not (error := check.error(forward())) <= check.tolerance:
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


def may_fuse(model: PagedModel, cpu_kernels: CpuKernels) -> bool:
    """Return whether all layers may be one stack of a CPU: only where attention runs in C++.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run here.
    """
    if model.device.type != "cpu" or model.attention.name != "cpp" or num_deep_layers(model.config):
        return False
    usable_kernels(model.dtype, cpu_kernels)
    return model.dtype in (torch.bfloat16, torch.float32)


def why_not_quantised(model: PagedModel, cpu_kernels: CpuKernels) -> str | None:
    """Return why a model's weights cannot be 8-bit integers here; None: they can."""
    if model.device.type != "cpu":
        return f"it is for CPUs, and the model runs on {model.device.type}"
    if model.part.position.size > 1:
        return "it is for replicas of one rank"
    if model.attention.name != "cpp":
        return f"it needs the attention that runs in C++, and attention runs in {model.attention.name}"
    return why_not_int8(model.dtype, cpu_kernels)


def fuse_layers_if_equal(
    model: PagedModel,
    windows: Sequence[Window],
    check: LogitsCheck,
    cpu_kernels: CpuKernels,
    kv_bytes: int | None,
    quantization: Quantization | None,
) -> None:
    """Compute all decoder layers in one call on a CPU, if that gives the same logits. Weights of int8 may differ more.

    Raises:
        UnsupportedModelError: `quantization` is wanted, and the layers cannot be fused, or logits differ too much.
    """
    try:
        if model.part.position.size > 1:
            raise NotFusableError("each rank has only a part of them")
        free = None if kv_bytes is None else free_memory() - kv_bytes
        sliding = _sliding(windows)
        fusion = fuse(
            model.module, sliding, current_pages, model.attention.paged_attention, cpu_kernels, free, quantization
        )
    except NotFusableError as reason:
        if quantization is not None:
            raise UnsupportedModelError(f"quantization {quantization}: {reason}") from reason
        logger.info("decoder layers run in transformers' own code: %s", reason)
        return
    model.allocate_pool(len(PROBE_LENGTHS), max(PROBE_LENGTHS))
    batch = batch_of_one_page_each(PROBE_LENGTHS, model.device)
    fused = model.forward(check.sequences.token_ids, check.sequences.positions, batch, check.sequences.rows)
    error = check.error(fused)
    if not error <= (check.tolerance if quantization is None else _QUANTISED_TOLERANCE):
        if quantization is not None:
            raise UnsupportedModelError(
                f"quantization {quantization}: logits differ from those of the given weights by {error:.1%} in norm"
            )
        logger.info("decoder layers run in transformers' own code: fused, their logits differ by %.1f %%", 100 * error)
        fusion.undo()
        return
    model.kernels = str(fusion)
    logger.info("decoder layers are fused; products by %s", fusion)
    _leave_file(model.module)


def _sliding(windows: Sequence[Window]) -> list[int | None]:
    """Return windows that all slide, or raise `NotFusableError`."""
    sliding = [window for window in windows if not isinstance(window, AttentionChunk)]
    if len(sliding) < len(windows):
        raise NotFusableError("some layers attend within chunks of the sequence")
    return sliding


@torch.inference_mode(False)  # weights are used in other modes too
def _leave_file(module: nn.Module) -> None:
    """Copy the weights that fused layers left in use, so that the mapped file of all weights can be freed.

    Parameters that share their memory go on sharing.
    """
    copies: dict[int, Tensor] = {}
    for parameter in module.parameters():
        pointer = parameter.data_ptr()
        parameter.data = copies.setdefault(pointer, parameter.data.clone())
