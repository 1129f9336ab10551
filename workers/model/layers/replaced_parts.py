"""Faster parts in place of a model's own, each only where the logits stay the same."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.linear import usable_kernels, usable_packed_kernels
from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.architecture import num_deep_layers
from crossdock.workers.model.forward.forward_context import (
    AttentionCall,
    ForwardContext,
    batch_of_one_page_each,
    page_size_for,
)
from crossdock.workers.model.forward.latent import NoLatentsError, cache_latents
from crossdock.workers.model.layers.coded_products import compute_by_humming, compute_from_codes
from crossdock.workers.model.layers.fixed_order import fix_order
from crossdock.workers.model.layers.fused_projections import join_projections
from crossdock.workers.model.layers.fusion import fuse
from crossdock.workers.model.layers.grouped_experts import needs_own_experts, use_own_experts
from crossdock.workers.model.layers.llama_layers import NotFusableError, is_packed
from crossdock.workers.model.layers.triton_layers import use_triton_layers
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.logits_check import PROBE_LENGTHS, LogitsCheck
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.network import Network
from crossdock.workers.model.weights.formats import Int8Weights
from crossdock.workers.model.weights.scheme import quantisation
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window

logger = logging.getLogger(__name__)


def cache_latents_if_equal(
    network: Network, calls: list[AttentionCall], check: LogitsCheck
) -> tuple[Network, list[AttentionCall]]:
    """Let the layers cache latents if that gives the same logits on every rank; if so, return the layers' calls.

    Collective: every rank of a worker group must call it.
    """
    context = ForwardContext(network.attention, probe_lengths=PROBE_LENGTHS)
    undo = None
    refusal = ""
    try:
        if not all(call.is_plain and call.window is None for call in calls):
            raise NoLatentsError("attention has a window, a softcap or sinks")
        undo = cache_latents(network.module, [call.layer for call in calls])
    except NoLatentsError as reason:
        refusal = str(reason)
    if not (error := check.error(check.sequences.run(network, context))) <= check.tolerance:
        refusal = refusal or f"from latents, logits differ by {error:.1%}"
    if network.part.collectives is not None:  # only the last stage has logits, and pages are the same everywhere
        refusal = next(filter(None, network.part.collectives.gather_texts(refusal)), "")
    if refusal:
        logger.warning("every head's keys and values are cached, not the latents they come from: %s", refusal)
        if undo is not None:
            undo()
        return network, calls
    logger.info("latents are cached, of %d elements a token and layer", context.probe_calls[0].shape.key_dim)
    return _with_all_latents(network), context.probe_calls


def cache_latents_with_index(network: Network) -> Network:
    """Let the layers of a model with indexers cache latents, and return the network.

    Raises:
        ValueError: latents cannot be cached; attention over chosen tokens reads nothing else.
    """
    try:
        cache_latents(network.module, list(network.part.held_layers))
    except NoLatentsError as reason:
        raise ValueError(f"{network.config.model_type}: indexers need latents in the KV pages: {reason}") from reason
    return _with_all_latents(network)


def _with_all_latents(network: Network) -> Network:
    """Return a network whose ranks each hold all latents, which all heads share."""
    if network.part.position.tensor_size == 1:
        return network
    heads = dict.fromkeys(network.part.held_layers, (0, 1, 1))
    return replace(network, part=replace(network.part, heads=heads))


def use_own_experts_if_equal(model: Network, check: LogitsCheck) -> None:
    """Compute experts by our grouped products where torch's would wait for the router, if that gives the same logits.

    Collective: every rank of a worker group must call it.
    """
    if not needs_own_experts(model):
        return
    undo = use_own_experts(model)
    refusal = ""
    try:
        if not (error := check.error_of(model)) <= check.tolerance:
            refusal = f"in Triton, their logits differ by {error:.1%}"
    except Exception as failure:  # a compiler may raise anything
        refusal = f"in Triton, they fail: {type(failure).__name__}: {' '.join(str(failure).split())}"
    if refusal:
        logger.warning("experts are computed one by one, without CUDA graphs: %s", refusal)
        undo()


def join_projections_if_equal(model: Network, check: LogitsCheck) -> None:
    """Compute projections of the same input as one product, if that gives the same logits."""
    undo = join_projections(model.module)
    if not (error := check.error_of(model)) <= check.tolerance:
        logger.info("projections are computed one by one: joined, their logits differ by %.1f %%", 100 * error)
        undo()


def use_triton_layers_if_equal(
    model: LoadedModel, calls: Sequence[AttentionCall], check: LogitsCheck, *, in_fixed_order: bool
) -> str:
    """Replace the decoder layers if that gives the same logits. Returns what computes their steps, as text.

    Collective: every rank of a worker group must call it. `model` has no scales: e4m3 would change the logits, by
    transformers' own layers as well. `in_fixed_order`: products and the last norm are replaced too, see `fix_order`.

    Raises:
        ValueError: the layers must add in a fixed order, and cannot be replaced.
    """
    undo = None
    refusal = ""
    try:
        if not all(call.is_plain for call in calls):
            raise NotFusableError("attention has a softcap or sinks")
        if in_fixed_order:
            fix_order(model.module)
        undo = use_triton_layers(model, _sliding([call.window for call in calls]), in_fixed_order=in_fixed_order)
    except NotFusableError as difference:
        refusal = str(difference)
    # A rank whose own layers stay joins the check too: the other ranks wait for its share of the sums.
    if undo is not None or model.part.position.size > 1:
        try:
            if not (error := _error_in_pages(model, check)) <= check.tolerance:
                refusal = refusal or f"fused, their logits differ by {error:.1%}"
        except NotFusableError as difference:
            refusal = str(difference)
        except Exception as failure:  # a compiler may raise anything
            if undo is None:
                raise
            refusal = f"fused, they fail: {type(failure).__name__}: {' '.join(str(failure).split())}"
    if refusal and in_fixed_order:
        raise ValueError(f"batch_invariant: layers of this model are not computed in Triton alone: {refusal}")
    if refusal:
        logger.info("decoder layers run in transformers' own code: %s", refusal)
        if undo is not None:
            undo()
        return ""
    logger.info("decoder layers are fused: steps between their products run in Triton")
    return "triton steps and products" if in_fixed_order else "triton steps"


def may_fuse(model: Network, cpu_kernels: CpuKernels) -> bool:
    """Return whether all layers may be one stack of a CPU: only where attention runs in C++.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run here.
    """
    if model.device.type != "cpu" or model.attention.name != "cpp" or num_deep_layers(model.config):
        return False
    (usable_packed_kernels if is_packed(model.module) else usable_kernels)(model.dtype, cpu_kernels)
    return model.dtype in (torch.bfloat16, torch.float32)


def fuse_layers_if_equal(model: LoadedModel, check: LogitsCheck, options: LoadOptions) -> str:
    """Compute all decoder layers in one call on a CPU, if that gives the same logits. Returns the kernels, as text.

    Weights of another format may differ as much as that format says.

    Raises:
        ValueError: such weights, or `batch_invariant`, need fused layers, and these cannot be fused, or logits differ
            too much.
    """
    weights = options.weights
    needed_by = f"quantization {weights.name}" if weights.kernel is not None else ""
    needed_by = "batch_invariant" if options.batch_invariant else needed_by
    try:
        if model.part.position.size > 1:
            raise NotFusableError("each rank has only a part of them")
        sliding = _sliding(model.windows)
        attention = model.attention.paged_attention
        if num_deep_layers(model.config):
            raise NotFusableError("embeddings of pictures are added between layers")
        fusion = fuse(model.module, sliding, attention, options.cpu_kernels, weights.kernel)
        if options.batch_invariant and set(fusion.layers.kernels + fusion.head.kernels) - {"native", "int8"}:
            raise NotFusableError(f"products run by {fusion}; own adds in one order")
    except NotFusableError as reason:
        if needed_by:
            raise ValueError(f"{needed_by}: {reason}") from reason
        logger.info("decoder layers run in transformers' own code: %s", reason)
        return ""
    error = _error_in_pages(model, check)
    if not error <= (weights.tolerance or _tolerance(check, options.cpu_kernels)):
        needed_by = needed_by or ("packed weights" if fusion.undo is None else "")
        if needed_by or fusion.undo is None:
            raise ValueError(f"{needed_by}: fused, logits differ from the model's own by {error:.1%} in norm")
        logger.info("decoder layers run in transformers' own code: fused, their logits differ by %.1f %%", 100 * error)
        fusion.undo()
        return ""
    logger.info("decoder layers are fused; products by %s", fusion)
    _leave_file(model.module)
    return str(fusion)


def use_codes(model: Network, check: LogitsCheck, cpu_kernels: CpuKernels) -> str:
    """Compute packed weights that are not fused from their codes. Returns the kernels, as text; empty: no codes.

    Collective: every rank of a worker group must call it.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run here, or the logits differ.
    """
    if quantisation(model.config.to_dict()) is None:
        return ""
    if model.device.type == "cpu":
        kernels = compute_from_codes(model.module, model.dtype, cpu_kernels)
    else:
        kernels = compute_by_humming(model.module, model.dtype)
    if not (error := check.error_of(model)) <= _tolerance(check, cpu_kernels):
        raise ValueError(
            f"{model.config.model_type}: computed from codes by {kernels}, logits differ from those of the dequantised "
            f"weights by {error:.1%} in norm"
        )
    logger.info("packed weights are computed from their codes; products by %s", kernels or "dequantised weights")
    return kernels


def _error_in_pages(model: LoadedModel, check: LogitsCheck) -> float:
    """Compute a model's logits with keys and values in pages of a pool, and return their error."""
    page_multiple = model.attention.page_multiple
    given = check.sequences
    batch = batch_of_one_page_each(PROBE_LENGTHS, model.device, page_multiple)
    try:
        model.allocate_pool(len(PROBE_LENGTHS), page_size_for(PROBE_LENGTHS, page_multiple))
        return check.error(model.forward(given.token_ids, given.positions, batch, given.rows))
    finally:
        model.pool.free()


def _tolerance(check: LogitsCheck, setting: CpuKernels) -> float:
    """Return the error of logits that kernels may cause: where rows are rounded to int8, more than in float32."""
    return max(check.tolerance, Int8Weights.tolerance if setting == "int8" else 0.0)


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
