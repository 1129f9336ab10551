"""Refuse models that would produce wrong tokens: by their configuration, and by a forward pass beside transformers'.

Models that keep state outside KV pages, or never call the attention interface, would produce fluent nonsense in
silence.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from crossdock.workers.model.architecture import (
    attention_layers,
    attention_names,
    has_layers_without_attention,
    is_indexed,
    layer_kinds,
    recurrent_layers,
    require_served_layers,
    text_config,
)
from crossdock.workers.model.forward.forward_context import (
    AttentionCall,
    ForwardContext,
    page_size_for,
)
from crossdock.workers.model.forward.indexed import give_indexers
from crossdock.workers.model.forward.latent import has_latents
from crossdock.workers.model.forward.state_pages import StateLayout
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.layers.fixed_order import check_rows
from crossdock.workers.model.layers.llama_layers import is_packed
from crossdock.workers.model.layers.replaced_parts import (
    cache_latents_if_equal,
    cache_latents_with_index,
    fuse_layers_if_equal,
    join_projections_if_equal,
    may_fuse,
    use_codes,
    use_own_experts_if_equal,
    use_triton_layers_if_equal,
)
from crossdock.workers.model.layers.triton_layers import may_use_triton_steps
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.logits_check import PROBE_LENGTHS, LogitsCheck, ProbeBatch
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.network import Network
from crossdock.workers.model.recurrent.recurrent_layers import NotRecurrentError, keep_states_in_pages
from crossdock.workers.model.weights.formats import WeightUse
from crossdock.workers.model.weights.fp8_scales import example_text, in_float32, scale_for
from crossdock.workers.schedule.request.batch import Batch, Scheduled, StatePages

logger = logging.getLogger(__name__)


def refuse_by_config(config: PretrainedConfig) -> None:
    """Check that all state of the model lies in KV pages, as far as its configuration shows.

    Raises:
        ValueError: layers keep other state.
    """
    require_served_layers(config.model_type, layer_kinds(text_config(config)))


@torch.inference_mode()
def probe(network: Network, options: LoadOptions, eos_token_ids: frozenset[int] = frozenset()) -> LoadedModel:
    """Prove a network: two sequences in one flat batch must give the logits of its own eager attention.

    Returns the model whose layers are now known, and fused if that gives the same logits again. Collective: every rank
    of a worker group must call it.

    Raises:
        ValueError: the logits differ, a layer did not reach our attention exactly once, or weights cannot be stored as
            `options` ask on this device.
    """
    _check_weights(network, options)
    if options.batch_invariant and (reason := _why_variant(network)):
        raise ValueError(f"batch_invariant: {reason}")
    states = _keep_states(network) if recurrent_layers(text_config(network.config)) else None
    has_index = is_indexed(text_config(network.config))
    if has_index:
        network = _keep_index_keys(network, options)
    sequences = ProbeBatch.for_model(network)
    context = ForwardContext(network.attention, probe_lengths=PROBE_LENGTHS)
    ours = sequences.run(network, context)
    calls = _one_call_per_layer(network, context.probe_calls)
    check = LogitsCheck.of(network, sequences, options.checkpoint)
    if options.checkpoint and not check.passes(ours):
        check = LogitsCheck.of(network, sequences)  # what an earlier start kept refuses no model
    if not check.passes(ours):
        raise ValueError(
            f"{network.config.model_type}: logits through paged attention differ from the model's own by "
            f"{check.error(ours):.1%} in norm"
        )
    if has_latents(text_config(network.config)) and not has_index:
        network, calls = cache_latents_if_equal(network, calls, check)
        calls = _one_call_per_layer(network, calls)
    model = LoadedModel(
        **vars(network),
        eos_token_ids=eos_token_ids,
        layers=[call.shape for call in calls],
        windows=[call.window for call in calls],
        places={call.layer: place for place, call in enumerate(calls)},
        states=states,
    )
    if states is not None:
        _check_states(model, check)
    # By transformers' own layers, before any of them is replaced.
    scales = _find_scales(network) if options.kv_cache_dtype == "fp8" else ()
    use_own_experts_if_equal(model, check)
    if states is not None:
        logger.info("decoder layers run in transformers' own code: some keep a recurrent state")
        return replace(model, scales=scales, kernels=use_codes(model, check, options.cpu_kernels))
    return _with_faster_layers(model, scales, calls, check, options)


def _why_variant(network: Network) -> str | None:
    """Return why the bits of a row depend on the batch, whatever computes the layers; None: they need not."""
    if network.attention.is_beside_triton and network.part.position.size > 1:
        return "GPUs add their parts of a row in an order that follows the message's size; one GPU has no such sums"
    if network.attention.is_beside_triton and is_packed(network.module):
        return "products of packed weights on GPUs add in an order that follows the number of rows; plain weights run"
    if recurrent_layers(text_config(network.config)):
        return f"{network.config.model_type} has recurrent layers, which compute a chunk in one piece"
    if network.part.slots:
        return "experts move between ranks (enable_eplb), whose sums then add in another order"
    if is_indexed(text_config(network.config)):
        return f"indexers of {network.config.model_type} score tokens by sums whose order follows the number of rows"
    return None


def _check_weights(network: Network, options: LoadOptions) -> None:
    """Check that weights can be stored as `options` ask. ValueError: weights cannot."""
    weights = options.weights
    use = WeightUse(
        network.device.type, network.dtype, network.part.position.size, network.attention.name, options.cpu_kernels
    )
    if reason := weights.why_not(use):
        raise ValueError(f"quantization {weights.name}: {reason}")
    if weights.kernel is not None and recurrent_layers(text_config(network.config)):
        reason = f"{network.config.model_type} has recurrent layers, which are not fused"
        raise ValueError(f"quantization {weights.name}: {reason}")


def _with_faster_layers(
    model: LoadedModel,
    scales: Sequence[tuple[Tensor, Tensor]],
    calls: list[AttentionCall],
    check: LogitsCheck,
    options: LoadOptions,
) -> LoadedModel:
    """Return the model with faster parts in place of its own where these give the same logits, and with `scales`."""
    on_triton = may_use_triton_steps(model)
    kernels = ""
    if model.device.type == "cuda" or on_triton:
        join_projections_if_equal(model, check)
    if on_triton:
        kernels = use_triton_layers_if_equal(model, calls, check, in_fixed_order=options.batch_invariant)
    scaled = replace(model, scales=scales)
    if on_triton and options.batch_invariant:
        check_rows(scaled)
    elif may_fuse(model, options.cpu_kernels) or options.batch_invariant:
        kernels = fuse_layers_if_equal(scaled, check, options)
    kernels = kernels or use_codes(model, check, options.cpu_kernels)
    return replace(scaled, kernels=kernels)


def _keep_index_keys(network: Network, options: LoadOptions) -> Network:
    """Let the layers cache the keys of indexers, and latents if they have some. Returns the network.

    Raises:
        ValueError: they cannot.
    """
    name = network.config.model_type
    if options.kv_cache_dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype {options.kv_cache_dtype}: indexers of {name} choose tokens by keys in the model's dtype; "
            f"rounded keys would choose others. Use auto"
        )
    give_indexers(network.module, network.part.held_layers, network.part.heads)
    return cache_latents_with_index(network) if has_latents(text_config(network.config)) else network


def _keep_states(network: Network) -> StateLayout:
    """Let the recurrent layers keep their states in pages, and return where. ValueError: they cannot."""
    name = network.config.model_type
    decoder = text_config(network.config)
    if not attention_layers(decoder):
        raise ValueError(f"{name} has no layers with attention, and so no KV pages to keep its states in")
    module = network.module
    # Two tokens: one would take the path of decodes, which may keep its states in another dtype.
    token_ids = torch.tensor([3, 4], device=network.device)

    def compute(cache: DynamicCache) -> Tensor:
        return network.logits(token_ids, past_key_values=cache, use_cache=True)

    module.set_attn_implementation(attention_names(network.config, "eager"))
    try:
        states = keep_states_in_pages(module, decoder, network.part.held_layers, compute)
    except NotRecurrentError as reason:
        raise ValueError(f"{name} has recurrent layers that are not served: {reason}") from reason
    finally:
        module.set_attn_implementation(attention_names(network.config))
    if network.part.why_states_are_whole:
        logger.info("every rank keeps the whole state of recurrent layers: %s", network.part.why_states_are_whole)
    return states


def _check_states(model: LoadedModel, check: LogitsCheck) -> None:
    """Check that chunks which continue a state in pages give the logits of one pass.

    Raises:
        ValueError: the logits differ: the kernels of some layers ignore an earlier state.
    """
    short, long = PROBE_LENGTHS
    size = page_size_for(PROBE_LENGTHS, model.attention.page_multiple)
    try:
        width = model.state_pages(size)
        model.allocate_pool(2 + 2 * width, size)
        first = range(2, 2 + width)
        second = range(2 + width, 2 + 2 * width)
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
        model.pool.free()
    if not check.passes(torch.cat(ours)):
        raise ValueError(
            f"{model.config.model_type}: chunks of a prompt give logits that differ from those of one pass by "
            f"{check.error(torch.cat(ours)):.1%} in norm: the kernels of its recurrent layers ignore the state of "
            f"earlier tokens"
        )


def _one_call_per_layer(network: Network, calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Return the calls in the order of layers."""
    calls = sorted(calls, key=lambda call: call.layer)
    layers = [call.layer for call in calls]
    part = network.part
    expected = list(part.held_layers)
    if has_layers_without_attention(text_config(network.config)):
        expected = [layer for layer in attention_layers(text_config(network.config)) if layer in part.held_layers]
    if layers != expected:
        missing = sorted(set(expected) - set(layers))
        raise ValueError(
            f"{network.config.model_type}: layers {missing or layers} of {len(expected)} did not reach the attention "
            f"interface exactly once; they keep state elsewhere or bring attention code of their own"
        )
    return calls


@torch.inference_mode(False)  # parameters change their dtype for a while
@torch.no_grad()
def _find_scales(network: Network) -> list[tuple[Tensor, Tensor]]:
    """Return the scales of every layer here, of keys and of values. Collective: every rank must call it."""
    token_ids = example_text(network.max_model_len, network.vocab_size).to(network.device)
    positions = torch.arange(len(token_ids), device=network.device)
    context = ForwardContext(network.attention, probe_lengths=[len(token_ids)])
    with in_float32(network.module):
        network.run(context, token_ids, positions, positions[:1], torch.float32)
    calls = sorted(context.probe_calls, key=lambda call: call.layer)
    return [(scale_for(keys), scale_for(values)) for keys, values in (call.largest for call in calls)]
