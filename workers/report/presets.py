"""Estimated profiles of GPUs that were not measured here, computed from published specifications.

W are the bytes of the weights, P is their number, t the GPUs of a replica (tensor parallel), BW and FLOPS a GPU's
published memory bandwidth and dense bf16 rate. With the achieved shares below:

    base                = W / (t · BW · bandwidth share) + LAUNCH_S + 2 · layers · ALL_REDUCE_S where t > 1
    per_prefill_token   = 2 · P / (t · FLOPS · GEMM share) + all-reduced bytes / (link · bandwidth share)
    per_attended        = 4 · layers · heads · head_dim / (t · FLOPS · attention share)
    per_decode          = per_prefill_token + SAMPLE_S
    per_context, per_chunk_context  = KV bytes of a token / (t · BW · bandwidth share)

An all-reduce moves 2 · (t - 1) / t of a token's hidden state over each GPU's link, twice per layer. The times of
reading weights and of multiplying by them are added, where a real step hides the shorter of the two: estimates are a
little high for balanced steps. No breakpoint and no bound by launching kernels is assumed, which only a measurement
shows. KV pages get the memory that the weights and a reserve of a tenth leave.

An encoder of pictures with P parameters, `layers` of width `hidden` and p patches for each row of its output has

    base        = W / (BW · bandwidth share) + LAUNCH_S
    per_embedding_token     = 2 · P · p / (FLOPS · GEMM share)
    per_square  = 4 · layers · hidden · p² / (FLOPS · attention share)

on one GPU.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from crossdock.workers.report.profile import SchedulingProfile, TierSize
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures of one GPU: dense bf16 FLOP/s, bytes/s of memory and of its link (one direction), bytes."""

    flops: float
    bandwidth: float
    memory: float
    link: float


# NVIDIA's data sheets. Where these give FLOP/s with sparsity, half of it.
GPUS = {
    "a100": Gpu(312e12, 2.039e12, 80e9, 300e9),  # 80 GB SXM; NVLink 600 GB/s, both directions
    "h100": Gpu(989e12, 3.35e12, 80e9, 450e9),  # SXM5
    "h200": Gpu(989e12, 4.8e12, 141e9, 450e9),  # SXM
    "b200": Gpu(2250e12, 8.0e12, 180e9, 900e9),  # HGX
    "l4": Gpu(121e12, 0.3e12, 24e9, 32e9),  # PCIe 4.0 x16
}


@dataclass(frozen=True, slots=True)
class PictureModel:
    """An encoder of pictures in bf16."""

    parameters: float
    layers: int
    hidden: int
    patches: int  # for each row of its output
    row_bytes: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer in bf16."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int  # tokens
    vocab_size: int = 128_256
    encoder: PictureModel | None = None  # None: prompts are text alone

    @property
    def weight_bytes(self) -> float:
        """Return the bytes that every step reads: those of the decoder."""
        return 2 * self.parameters

    @property
    def held_bytes(self) -> float:
        """Return the bytes of all weights."""
        return self.weight_bytes + (self.encoder.weight_bytes if self.encoder is not None else 0)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token's keys and values, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


MODELS = {
    "8b": Model(8.03e9, 32, 32, 8, 128, 131_072),  # the configurations of Llama 3.1
    "70b": Model(70.6e9, 80, 64, 8, 128, 131_072),
    "vl7b": Model(  # the configuration of Qwen2-VL-7B
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
_RESERVE = 0.1  # of the memory, for activations and graphs
_HOST = 25e9  # bytes per second from pinned memory of the host: half of what PCIe 5.0 x16 can, since pages are small
_NETWORK = 25e9  # bytes per second at which a GPU's KV pages travel: 200 Gbit/s of RDMA

_ROWS_CACHE = 256 << 20  # bytes of embeddings that a replica keeps: the default of --mm-encoder-cache

_PAGE_SIZE = 16
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
    """Return a profile: a JSON file of `crossdock tune --profile` in `folder`, or a preset. That of `NAME*N` takes N
    times as long for everything.

    Raises:
        ValueError: there is no such profile, or it cannot be read.
    """
    scale = time_scale(name)
    name = name.partition("*")[0]
    if scale != 1:
        return stored_profile(name, folder).slowed(scale)
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


def preset(name: str) -> SchedulingProfile:
    """Return the estimated profile of a replica, e.g. `h100-8b` or `a100-70b-tp4`. Without `-tpN` the replica
    has the least power of two of GPUs that leaves a third of their memory to KV pages.

    Raises:
        ValueError: there is no such GPU or model, or it does not fit.
    """
    gpu_name, _, rest = name.partition("-")
    model_name, _, tp_text = rest.partition("-tp")
    if gpu_name not in GPUS or model_name not in MODELS or (tp_text and tp_text not in ("1", "2", "4", "8")):
        raise ValueError(
            f"profile: {name!r} is neither a file nor GPU-MODEL[-tpN] with a GPU of {', '.join(GPUS)}, a model of "
            f"{', '.join(MODELS)} and N of 1, 2, 4, 8"
        )
    gpu = GPUS[gpu_name]
    model = MODELS[model_name]
    sizes = [int(tp_text)] if tp_text else [1, 2, 4, 8]
    wanted = _RESERVE if tp_text else _RESERVE + 1 / 3
    tp = next((tp for tp in sizes if tp * gpu.memory * (1 - wanted) >= model.held_bytes), None)
    if tp is None:
        raise ValueError(
            f"profile: {name}: weights of {model.held_bytes / 1e9:.0f} GB do not fit {sizes[-1]} x "
            f"{gpu.memory / 1e9:.0f} GB; give it more GPUs with -tpN"
        )
    return SchedulingProfile(
        max_model_len=min(model.max_model_len, _kv_tokens(gpu, model, tp)),
        vocab_size=model.vocab_size,
        page_size=_PAGE_SIZE,
        num_pages=_kv_tokens(gpu, model, tp) // _PAGE_SIZE,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=_MAX_NUM_SEQS,
        slo_classes=DEFAULT_CLASSES,
        compatibility=model_name,
        weights=model_name,
        page_bytes=model.token_bytes * _PAGE_SIZE,
        bytes_per_second=_NETWORK * tp,
        tiers=(TierSize(name="host", num_bytes=0, bytes_per_second=_HOST * tp),),
        tensor_parallel_size=tp,
        runs_ahead=True,
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


def _kv_tokens(gpu: Gpu, model: Model, tp: int) -> int:
    tokens = int((tp * gpu.memory * (1 - _RESERVE) - model.held_bytes) / model.token_bytes)
    return tokens - tokens % _PAGE_SIZE


def _cost(gpu: Gpu, model: Model, tp: int) -> StepCost:
    bandwidth = tp * gpu.bandwidth * _BANDWIDTH_SHARE
    flops = tp * gpu.flops
    reduced = 2 * model.layers * 2 * (tp - 1) / tp * 2 * model.heads * model.head_dim  # bytes over each GPU's link
    per_token = 2 * model.parameters / (flops * _GEMM_SHARE) + reduced / (gpu.link * _BANDWIDTH_SHARE)
    return StepCost(
        base=model.weight_bytes / bandwidth + _LAUNCH_S + (2 * model.layers * _ALL_REDUCE_S if tp > 1 else 0),
        per_prefill_token=per_token,
        per_attended=4 * model.layers * model.heads * model.head_dim / (flops * _ATTENTION_SHARE),
        per_decode=per_token + _SAMPLE_S,
        per_context=model.token_bytes / bandwidth,
    )
