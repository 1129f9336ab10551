"""Estimated profiles of GPUs that were not measured here, computed from published specifications.

W are the bytes of the weights, P is the number that a token is multiplied by, t the GPUs of a replica (tensor
parallel), BW and FLOPS a GPU's published memory bandwidth and dense rate. With the achieved shares below:

    base                = W / (t · BW · bandwidth share) + LAUNCH_S + 2 · layers · ALL_REDUCE_S where t > 1
    per_prefill_token   = 2 · P / (t · FLOPS · GEMM share) + all-reduced bytes / (link · bandwidth share)
    per_attended        = 4 · layers · heads · head_dim / (t · FLOPS · attention share)
    per_decode          = per_prefill_token + SAMPLE_S
    per_context, per_chunk_context  = KV bytes of a token that each GPU keeps / (BW · bandwidth share)

An all-reduce moves 2 · (t - 1) / t of a token's hidden state over each GPU's link, twice per layer. The times of
reading weights and of multiplying by them are added, where a real step hides the shorter of the two: estimates are a
little high for balanced steps. No bound by launching kernels is assumed, which only a measurement shows. KV pages get
the memory that the weights and a reserve of a tenth leave. GPUs divide keys and values by KV heads: more GPUs than
heads keep copies. All heads share latents, and the keys of an indexer for these, so that each GPU keeps all of them.
Each scores all keys too: per_attended of such an indexer is not divided. One that chooses for each KV head has a copy
of its keys for each, and is divided by them.

Weights in FP8 take the FP8 rate of a GPU that has one, and attention the bf16 rate. Of E experts a token is sent to k:
`base` reads those of one token. With n tokens a step reads E · (1 - (1 - k/E)^n) of them, which is taken as a straight
line to all experts at 2 · E/k rows (`per_early_row`, `breakpoint_rows`): at half of these rows the line has 0.5 and the
curve 0.63, at the end 1 and 0.86. Layers with a window cost each token as much as a full window.

An encoder of pictures with P parameters, `layers` of width `hidden` and p patches for each row of its output has

    base        = W / (BW · bandwidth share) + LAUNCH_S
    per_embedding_token     = 2 · P · p / (FLOPS · GEMM share)
    per_square  = 4 · layers · hidden · p² / (FLOPS · attention share)

on one GPU.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from crossdock.workers.model.architecture import decoder_fields
from crossdock.workers.model.weights.scheme import loaded_scheme, scheme_at
from crossdock.workers.model.weights.untrusted import read_config_file
from crossdock.workers.report.expert_division import ProductRates
from crossdock.workers.report.model_figures import (
    BF16,
    PAGE_SIZE,
    ModelFigures,
    PictureModel,
    StoredNumber,
    figures_of,
    plain_figures,
)
from crossdock.workers.report.profile import SchedulingProfile, TierSize
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES

HOW_FAR_OFF = (
    "step seconds are estimated from data sheets: for an 8B model in bf16 on one H200, the only GPU that was measured, "
    "0.80 to 1.28 times those measured; FP8, experts and several GPUs were not measured"
)
"""benchmarks/records/gpu.md has these figures."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of one GPU: dense bf16 and FP8 FLOP/s, bytes/s of memory and of its link (one direction),
    bytes of memory."""

    flops: float
    fp8_flops: float  # as in bf16 where it has no FP8
    bandwidth: float
    memory: float
    link: float


# The makers' data sheets. Where these give FLOP/s with sparsity, half of it.
GPUS = {
    "a100": Gpu(312e12, 312e12, 2.039e12, 80e9, 300e9),  # 80 GB SXM; NVLink 600 GB/s, both directions
    "h100": Gpu(989e12, 1979e12, 3.35e12, 80e9, 450e9),  # SXM5
    "h200": Gpu(989e12, 1979e12, 4.8e12, 141e9, 450e9),  # SXM
    "b200": Gpu(2250e12, 4500e12, 8.0e12, 180e9, 900e9),  # HGX
    "l4": Gpu(121e12, 242e12, 0.3e12, 24e9, 32e9),  # PCIe 4.0 x16
    "l40s": Gpu(362e12, 733e12, 0.864e12, 48e9, 32e9),  # PCIe 4.0 x16
    "mi300x": Gpu(1307e12, 2615e12, 5.3e12, 192e9, 448e9),  # seven links of 128 GB/s, both directions
}

MODELS = {
    "8b": plain_figures(8.03e9, 32, 32, 8, 128, 131_072, 128_256),  # the configurations of Llama 3.1
    "70b": plain_figures(70.6e9, 80, 64, 8, 128, 131_072, 128_256),
    "vl7b": plain_figures(  # the configuration of Qwen2-VL-7B
        7.62e9, 28, 28, 4, 128, 32_768, 152_064, PictureModel(0.675e9, 32, 1280, patches=4, row_bytes=2 * 3584)
    ),
}

# Assumptions, not measurements: the shares of the published peaks that well-tuned servers reach.
_BANDWIDTH_SHARE = 0.8
_GEMM_SHARE = 0.6
_ATTENTION_SHARE = 0.4
_LAUNCH_S = 1e-3  # of a step, in addition to its kernels
_ALL_REDUCE_S = 10e-6  # each, in addition to the time of its bytes
_SAMPLE_S = 5e-6  # per stream
_TILE = 64  # inner features of experts that our Triton kernel computes at once: half of 128 outputs, or 64 inputs
_RESERVE = 0.1  # of the memory, for activations and graphs
_HOST = 25e9  # bytes per second from pinned memory of the host: half of what PCIe 5.0 x16 can, since pages are small
_NETWORK = 25e9  # bytes per second at which a GPU's KV pages travel: 200 Gbit/s of RDMA

_ROWS_CACHE = 256 << 20  # bytes of embeddings that a replica keeps: the default of --mm-encoder-cache

_TP = (1, 2, 4, 8)
_BYTES = {"int4": 0.5, "nf4": 0.5, "e2m1": 0.5, "int8": 1.0, "e4m3": 1.0}  # of a number in these codes
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 8192


def time_scale(name: str) -> float:
    """Return how many times as slow as its profile a device is: N of `PROFILE*N`, else 1. ValueError: N is wrong."""
    _, star, text = name.partition("*")
    try:
        scale = float(text) if star else 1.0
    except ValueError:
        scale = 0.0
    if not 0.01 <= scale <= 1000:
        raise ValueError(f"{name!r} must be a profile, or PROFILE*N with N of 0.01 to 1000")
    return scale


def stored_profile(name: str, folder: Path = Path()) -> SchedulingProfile:
    """Return a profile: a JSON file of `crossdock tune --profile` in `folder`, a preset, or an estimate for
    `GPU:DIRECTORY`. That of `NAME*N` takes N times as long for everything.

    Raises:
        ValueError: there is no such profile, or it cannot be read.
    """
    scale = time_scale(name)
    name = name.partition("*")[0]
    if scale != 1:
        return stored_profile(name, folder).slowed(scale)
    gpu, colon, model = name.partition(":")
    if colon and is_gpu(gpu):
        return estimate(gpu, folder / Path(model).expanduser())
    path = folder / name
    if not name.endswith(".json"):
        return preset(name)
    try:
        return SchedulingProfile.model_validate_json(path.read_text())
    except OSError as error:
        raise ValueError(f"profile: {path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in detail["loc"])
        raise ValueError(f"profile: {path}: {where}{detail['msg']}") from None
    except ValueError as error:
        raise ValueError(f"profile: {path}: not JSON: {error}") from None


def is_gpu(name: str) -> bool:
    """Return whether `name`, without `*N`, is a GPU of a data sheet and how many of them: `h100`, `h100-tp4`."""
    gpu, dash, num_gpus = name.partition("*")[0].partition("-tp")
    return gpu in GPUS and (num_gpus in map(str, _TP) if dash else True)


def product_rates(device_name: str) -> ProductRates | None:
    """Return how fast a GPU computes products, by its name as its driver gives it; None: no data sheet is here."""
    words = re.split(r"[^a-z0-9]+", device_name.lower())
    gpu = next((GPUS[word] for word in words if word in GPUS), None)
    if gpu is None:
        return None
    return ProductRates(gpu.bandwidth * _BANDWIDTH_SHARE, gpu.flops * _GEMM_SHARE, tile=_TILE)


def estimate(gpu: str, folder: Path, quantization: str | None = None) -> SchedulingProfile:
    """Return the estimated profile of the model in `folder` on `GPU[-tpN]`, by its config.json alone. `quantization`:
    the setting; with fp8, plain weights count as they are once they are loaded.

    Pictures have no estimate: prompts are text alone.

    Raises:
        ValueError: config.json cannot be read, does not say what a step's cost follows from, or weights do not fit.
    """
    name = f"{gpu}:{folder}"
    try:
        fields = read_config_file(folder)
        scheme = loaded_scheme(quantization, scheme_at(folder))

        def stored(matrix: str) -> StoredNumber:
            form = scheme.form_of(matrix)
            if form is None or matrix in ("model.embed_tokens", "router"):
                return BF16
            shared = (form.group or 1 << 20) * (form.block_rows or 1 << 20)
            return StoredNumber(_BYTES[form.kind] + form.scale_bytes / shared, form.kind == "e4m3")

        model = figures_of(decoder_fields(fields), stored)
    except OSError as error:
        raise ValueError(f"profile: {name}: config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"profile: {name}: {error}") from None
    gpu_name, _, num_gpus = gpu.partition("-tp")
    return _profile(name, GPUS[gpu_name], model, num_gpus, folder.name)


def preset(name: str) -> SchedulingProfile:
    """Return the estimated profile of a replica, e.g. `h100-8b` or `a100-70b-tp4`. Without `-tpN` the replica
    has the least power of two of GPUs that leaves a third of their memory to KV pages, or 8.

    Raises:
        ValueError: there is no such GPU or model, or it does not fit.
    """
    gpu_name, _, rest = name.partition("-")
    model_name, _, num_gpus = rest.partition("-tp")
    if gpu_name not in GPUS or model_name not in MODELS or (num_gpus and num_gpus not in map(str, _TP)):
        raise ValueError(
            f"profile: {name!r} is neither a file nor GPU-MODEL[-tpN] or GPU[-tpN]:DIRECTORY with a GPU of "
            f"{', '.join(GPUS)}, a model of {', '.join(MODELS)} and N of 1, 2, 4, 8"
        )
    return _profile(name, GPUS[gpu_name], MODELS[model_name], num_gpus, model_name)


def _profile(name: str, gpu: Gpu, model: ModelFigures, num_gpus: str, model_name: str) -> SchedulingProfile:
    """Return the estimate of a model on `num_gpus` GPUs; empty: on as many as it needs."""
    enough = (tp for tp in _TP if tp * gpu.memory * (1 - _RESERVE - 1 / 3) >= model.held_bytes)
    tp = int(num_gpus) if num_gpus else next(enough, _TP[-1])
    if tp * gpu.memory * (1 - _RESERVE) < model.held_bytes:
        more = "; give it more GPUs with -tpN" if tp < _TP[-1] else ""
        raise ValueError(
            f"profile: {name}: weights of {model.held_bytes / 1e9:.0f} GB do not fit {tp} x {gpu.memory / 1e9:.0f} GB"
            f"{more}"
        )
    page_bytes = model.page_bytes * model.kv_share(tp)  # of one GPU
    num_pages = int((gpu.memory * (1 - _RESERVE) - model.held_bytes / tp) / page_bytes)
    longest = int(PageNeeds(PAGE_SIZE, model.windows, _MAX_NUM_BATCHED_TOKENS).longest_prompt(num_pages))
    return SchedulingProfile(
        max_model_len=min(model.max_model_len, longest),
        vocab_size=model.vocab_size,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        windows=model.windows,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=_MAX_NUM_SEQS,
        slo_classes=DEFAULT_CLASSES,
        compatibility=model_name,
        weights=model_name,
        page_bytes=int(page_bytes * tp),
        bytes_per_second=_NETWORK * tp,
        tiers=(TierSize(name="host", num_bytes=0, bytes_per_second=_HOST * tp),),
        tensor_parallel_size=tp,
        runs_ahead=True,
        is_estimate=True,
        cost=_cost(gpu, model, tp),
        encoder_cost=_encoder_cost(gpu, model.encoder) if model.encoder is not None else None,
        encoder_tokens=_ROWS_CACHE // model.encoder.row_bytes if model.encoder is not None else 0,
    )


def _encoder_cost(gpu: Gpu, encoder: PictureModel) -> EncoderCost:
    """Return the seconds of pictures on one GPU; they are not divided between GPUs."""
    attended = 4 * encoder.layers * encoder.hidden * encoder.patches**2
    return EncoderCost(
        base=encoder.weight_bytes / (gpu.bandwidth * _BANDWIDTH_SHARE) + _LAUNCH_S,
        per_embedding_token=2 * encoder.parameters * encoder.patches / (gpu.flops * _GEMM_SHARE),
        per_square=attended / (gpu.flops * _ATTENTION_SHARE),
    )


def _cost(gpu: Gpu, model: ModelFigures, tp: int) -> StepCost:
    bandwidth = tp * gpu.bandwidth * _BANDWIDTH_SHARE
    kv_bandwidth = gpu.bandwidth * _BANDWIDTH_SHARE / model.kv_share(tp)
    attention = gpu.flops * _ATTENTION_SHARE
    products = 2 * (model.parameters - model.fp8_parameters) / (tp * gpu.flops * _GEMM_SHARE)
    products += 2 * model.fp8_parameters / (tp * gpu.fp8_flops * _GEMM_SHARE)
    reduced = 2 * model.layers * 2 * (tp - 1) / tp * 2 * model.hidden  # bytes over each GPU's link
    per_token = products + reduced / (gpu.link * _BANDWIDTH_SHARE)
    read = model.weight_bytes
    rest = every = 0.0
    if (experts := model.experts) is not None:
        read += experts.num_bytes * experts.chosen / experts.in_layer
        rest = experts.num_bytes * (1 - experts.chosen / experts.in_layer)
        every = 2 * experts.in_layer / experts.chosen
    return StepCost(
        base=read / bandwidth + _LAUNCH_S + (2 * model.layers * _ALL_REDUCE_S if tp > 1 else 0),
        per_prefill_token=per_token + model.window_flops / (tp * attention),
        per_attended=model.pair_flops / (min(tp, model.pair_parts) * attention),
        per_decode=per_token + _SAMPLE_S + model.window_bytes / kv_bandwidth,
        per_context=model.token_bytes / kv_bandwidth,
        breakpoint_rows=every,
        per_early_row=rest / bandwidth / every if every else 0.0,
    )
