"""Load a Hugging Face directory as a `LoadedModel`, or refuse it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from crossdock.kernels.backend import choose_attention, in_fixed_order, require_working, with_long_chunks
from crossdock.kernels.packages import has_package
from crossdock.workers.model.architecture import attention_names, is_multimodal, recurrent_layers, text_config
from crossdock.workers.model.context_length import longest_request
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.layers.fusion import FusedLayers
from crossdock.workers.model.layers.llama4 import attention_chunks, scale_by_position
from crossdock.workers.model.layers.routed_experts import skip_idle_experts
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.loaders.files import require_loader
from crossdock.workers.model.lora.adapters import Adapters, Site, hook_adapters, sites_of
from crossdock.workers.model.memory.memory_fit import check_fits, used_by_all_but_torch
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.network import Network
from crossdock.workers.model.pictures.vision import PictureEncoder, why_text_alone
from crossdock.workers.model.pooling import HiddenTap
from crossdock.workers.model.probe import probe, refuse_by_config
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.model.weights.finite import check_finite, weights_of
from crossdock.workers.model.weights.formats import format_of
from crossdock.workers.model.weights.scheme import check_asked, scheme_of
from crossdock.workers.model.weights.weights import read_config

logger = logging.getLogger(__name__)

# Published generation_config.json have values that transformers' own generation would ignore, and names at each load.
logging.getLogger("transformers.generation.configuration_utils").addFilter(
    lambda record: "generation flags are not valid" not in record.getMessage()
)


def load_model(
    spec: ModelSpec,
    device: str = "cpu",
    links: Collectives | None = None,
    kv_bytes: int | None = None,
    loaded: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Load a Hugging Face directory. Collective: every rank of a worker group must call it.

    `links` connect to the other ranks of a worker group, of which this one loads its part. `kv_bytes` must fit into
    memory beside the weights; None checks nothing. `loaded` is called when the weights are in memory, before the logits
    are checked.

    Raises:
        CannotCut: the model cannot be divided among so many ranks.
        ValueError: the architecture would not be computed right through our attention, or there is not enough memory.
            Or `max_model_len` is more than the model was made for, or `attention_backend` cannot run on `device` with
            pages of `kv_cache_dtype`, or `cpu_kernels` with the model's dtype on this CPU; or `quantization` cannot be
            applied to this model here, or the model cannot be `batch_invariant`; or the package of `load_format` is
            not installed; or a weight is NaN or infinite.
    """
    path = spec.folder()
    attention = choose_attention(spec.attention_backend, torch.device(device), spec.kv_cache_dtype, spec.cpu_kernels)
    used_by_others = used_by_all_but_torch() if device != "cpu" else 0
    require_working(attention, torch.device(device))  # takes memory of the GPU, so it comes second
    if not spec.batch_invariant:
        among_ranks = {} if links is None else {"gather": links.gather_texts}
        attention = with_long_chunks(
            attention, spec.attention_backend, torch.device(device), spec.kv_cache_dtype, **among_ranks
        )
    require_loader(spec.load_format)
    config = read_config(path)
    refuse_by_config(config)
    scheme = scheme_of(config.to_dict())
    check_asked(spec.quantization, scheme)
    dtype = dtype_of(spec, config, device)
    weights = format_of(spec.quantization, scheme)
    if kv_bytes is not None:
        position = RankPosition()
        num_sharing = 1
        if links is not None:
            position = links.position
            num_sharing = links.ranks_on_this_host()
        check_fits(config, position, dtype, kv_bytes, device, num_sharing, weight_format=weights)
    module, part = weights.read(config, path, dtype, links, device, spec.load_format)
    try:
        generation: GenerationConfig | None = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    module = module.to(device)
    check_finite(weights_of(module), f"model {path}")
    loaded()
    checkpoint = fingerprint(path) if links is None else ""
    options = LoadOptions(
        max_model_len=spec.max_model_len,
        generation=generation,
        part=part,
        attention=attention,
        kv_cache_dtype=spec.kv_cache_dtype,
        cpu_kernels=spec.cpu_kernels,
        batch_invariant=spec.batch_invariant,
        quantization=spec.quantization,
        used_by_others=used_by_others,
        max_lora_rank=spec.max_lora_rank,
        max_loras=spec.max_loras,
        checkpoint=f"{checkpoint} {spec.quantization}" if device == "cpu" and checkpoint else "",
    )
    return replace(wrap_module(module, options), checkpoint=checkpoint)


_DEFAULTS = LoadOptions()


def wrap_module(module: Any, options: LoadOptions = _DEFAULTS) -> LoadedModel:
    """Put a transformers causal LM, or the part that `cut_model` left of it, behind our attention, or refuse it.

    Raises:
        ValueError: the module would not be computed right through our attention, or `max_model_len` is more than the
            model was made for, or `quantization` cannot be applied.
    """
    config: PretrainedConfig = module.config
    refuse_by_config(config)
    module.eval().requires_grad_(False)
    module.set_attn_implementation(attention_names(config))
    decoder = text_config(config)
    max_model_len = longest_request(config, options.max_model_len)
    variant = _fix_rope_to(module, max_model_len)
    device = next(module.parameters()).device
    kv_cache_dtype = options.kv_cache_dtype
    attention = options.attention or choose_attention("auto", device, kv_cache_dtype, options.cpu_kernels)
    if options.batch_invariant:
        attention = in_fixed_order(attention)
    part = options.part or ModelPart(RankPosition(), num_layers=decoder.num_hidden_layers)
    if part.why_experts_are_sliced:
        logger.warning("enable_expert_parallel changes nothing: %s", part.why_experts_are_sliced)
    chunks = attention_chunks(decoder, max_model_len, attention)
    tap = HiddenTap(module)
    network = Network(module, config, max_model_len, part, attention, chunks, tap)
    scale_by_position(module)
    skip_idle_experts(module)
    sites = _hooked_sites(network) if options.max_lora_rank else {}
    with tap.opened(), part.checking():
        model = probe(network, options, _eos_token_ids(config, options.generation))
        tap.check()
    reason = why_text_alone(config, attention)
    if reason and is_multimodal(config):
        logger.warning("prompts are text alone: %s", reason)
    encoder = None if reason else PictureEncoder(module, config)
    if encoder is not None and options.batch_invariant:
        raise ValueError(
            f"batch_invariant: {config.model_type} reads pictures, and those of a step are encoded together"
        )
    return replace(
        model,
        variant=variant,
        encoder=encoder,
        why_text_alone=reason,
        used_by_others=options.used_by_others,
        adapters=_adapters(network, sites, options) if options.max_lora_rank else None,
    )


def _hooked_sites(network: Network) -> Mapping[str, Site]:
    """Let the linears of a network take adapters. Returns them by name. ValueError: this model takes none."""
    if recurrent_layers(text_config(network.config)):
        raise ValueError(
            f"enable_lora: {network.config.model_type} has recurrent layers, which compute sequence by sequence; "
            f"adapters are for models whose layers all have attention or an mlp"
        )
    sites = sites_of(network.module, network.part)
    hook_adapters(network.module, sites)
    return sites


def _adapters(network: Network, sites: Mapping[str, Site], options: LoadOptions) -> Adapters:
    """Return the room for adapters of a network, whose layers may be fused by now."""
    return Adapters(
        sites,
        network.part.held_layers,
        text_config(network.config).num_hidden_layers,
        network.device,
        network.dtype,
        options.max_lora_rank,
        options.max_loras,
        in_triton=network.attention.is_beside_triton and has_package("triton"),
        stacks=[layers for layers in network.module.modules() if isinstance(layers, FusedLayers)],
    )


def _eos_token_ids(config: PretrainedConfig, generation: GenerationConfig | None) -> frozenset[int]:
    sources = [source for source in (config, text_config(config), generation) if source is not None]
    values = [value for source in sources if (value := getattr(source, "eos_token_id", None)) is not None]
    return frozenset(token for value in values for token in (value if type(value) is list else [value]))


def dtype_of(spec: ModelSpec, config: PretrainedConfig, device: str) -> torch.dtype:
    """Return the dtype of weights and activations on `device`."""
    if spec.dtype != "auto":
        chosen: torch.dtype = getattr(torch, spec.dtype)
        return chosen
    stored = getattr(config, "dtype", None) or torch.float32
    if device != "cpu":
        return torch.bfloat16 if stored is torch.float32 else stored
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def _fix_rope_to(module: nn.Module, max_model_len: int) -> str:
    """Fix rotary embeddings for `max_model_len`. Returns the name of the chosen ones, where there was a choice.

    Embeddings that change with the longest position *of the batch* would let one request change another's tokens.
    """
    variant = ""
    rotary: Any
    for rotary in module.modules():
        kind = getattr(rotary, "rope_type", None)
        if not isinstance(kind, str):  # none, or one per layer type, which no model combines with the two below
            continue
        if kind == "dynamic":
            variant = _fix_dynamic(rotary, max_model_len)
        elif kind == "longrope":
            variant = _fix_longrope(rotary, max_model_len)
    return variant


def _fix_dynamic(rotary: Any, max_model_len: int) -> str:
    """Fix the rotary base of dynamic scaling, which grows with a sequence past max_position_embeddings.

    Keys in pages cannot change with the sequence. So a server for longer requests has one base for all of them: that of
    a sequence of `max_model_len` tokens. The name keeps its pages apart from those of another `max_model_len`.
    """
    rotary.rope_type = "default"
    positions = rotary.config.max_position_embeddings
    if max_model_len <= positions:
        return ""
    logger.warning(
        "max_model_len (%d) is more than the model's %d positions: every request has the rotary base that dynamic "
        "scaling gives a sequence of %d tokens; shorter requests lose some quality, and max_model_len %d avoids that",
        max_model_len,
        positions,
        max_model_len,
        positions,
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](rotary.config, rotary.inv_freq.device, seq_len=max_model_len)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    return f"dynamic rope of {max_model_len}"


def _fix_longrope(rotary: Any, max_model_len: int) -> str:
    """Choose the short factors or the long ones for every request.

    transformers takes the short ones as long as a sequence is no longer than the model's original length. Keys in pages
    cannot change when a stream grows past that. vLLM chooses by `max_model_len` as well.
    """
    parameters = rotary.config.rope_parameters
    original = parameters["original_max_position_embeddings"]
    is_long = max_model_len > original
    if is_long:
        logger.warning(
            "max_model_len (%d) is more than the %d positions of the model's original training: also shorter requests "
            "use the long factors of longrope, which costs them some quality; max_model_len %d avoids that",
            max_model_len,
            original,
            original,
        )
        device = rotary.inv_freq.device
        frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, device, seq_len=max_model_len)
        rotary.register_buffer("inv_freq", frequencies, persistent=False)
    chosen = "long" if is_long else "short"
    if "long_mscale" in parameters:  # of PhiMoE, whose forward chooses between the two by the batch
        parameters["short_mscale"] = parameters["long_mscale"] = parameters[f"{chosen}_mscale"]
    rotary.rope_type = "default"
    return f"{chosen} rope"
