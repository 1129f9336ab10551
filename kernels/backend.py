"""Choose the implementation of paged attention for a device, once, and log the reason."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from crossdock.kernels import attention, packages
from crossdock.kernels.cpu.cpu_attention import CpuAttention
from crossdock.kernels.options import AttentionBackend, CpuKernels, KVCacheDtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attention:
    """One implementation of what `reference_store_kv` and `reference_paged_attention` specify."""

    name: str
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    page_multiple: int = 1  # tokens; page sizes must be a multiple
    takes_fp8: bool = True  # pages of e4m3, with `k_scale` and `v_scale`
    takes_key_end: bool = True  # steps whose rows see later keys, as within the pictures of some models
    takes_attention_chunks: bool = True  # layers whose rows see the keys of their own chunk of the sequence alone
    is_beside_triton: bool = False  # its tensors are where kernels of Triton run, see triton_layers.py


CPP = Attention("cpp", attention.store_kv, CpuAttention("native").paged_attention, takes_fp8=False)
"""attention.cpp for chunks and decodes alike."""
TORCH = Attention("torch", attention.reference_store_kv, attention.reference_paged_attention)


def choose_attention(
    backend: AttentionBackend,
    device: torch.device,
    kv_cache_dtype: KVCacheDtype = "auto",
    cpu_kernels: CpuKernels = "auto",
) -> Attention:
    """Return the implementation that `backend` names for `device`, over pages of `kv_cache_dtype`.

    `cpu_kernels` chooses between the kernels of a CPU, see `CpuAttention`.

    Raises:
        ValueError: the backend cannot run on the device, or does not take such pages; the message gives the reason.
    """
    if backend != "auto":
        chosen = _NAMED[backend](device)
        reason = "attention_backend names it"
    elif device.type == "cpu" and kv_cache_dtype == "fp8":
        logger.warning("attention runs in plain torch, several times slower: our C++ takes no fp8 pages")
        return TORCH
    elif device.type == "cpu":
        chosen = replace(CPP, paged_attention=CpuAttention(cpu_kernels).paged_attention)
        reason = "the device is a CPU"
    elif not packages.has_package("triton"):
        logger.warning("attention runs in plain torch, many times slower: triton is not installed")
        return TORCH
    else:
        chosen = _triton(device)
        reason = f"the device is {device}"
    if kv_cache_dtype == "fp8":
        _require_fp8(chosen, device)
    logger.info("attention runs in %s: %s", chosen.name, reason)
    return chosen


def with_long_chunks(
    attention: Attention,
    backend: AttentionBackend,
    device: torch.device,
    kv_cache_dtype: KVCacheDtype = "auto",
    gather: Callable[[str], Sequence[str]] = lambda text: [text],
) -> Attention:
    """Return attention whose long chunks run in a package that is installed and measured to be faster than Triton.

    So where `backend` leaves the choice, and pages have the model's dtype. Takes memory of the GPU, and gives it back.
    Collective where a worker group has several ranks: `gather` returns the texts of all ranks, by rank.
    """
    if backend != "auto" or attention.name != "triton" or device.type != "cuda" or kv_cache_dtype == "fp8":
        return attention
    from crossdock.kernels.gpu import long_chunks

    found = long_chunks.installed(torch.cuda.get_device_capability(device))
    own = long_chunks.times_of(found, device, partial(long_chunks.seconds_on, device))
    if found:
        torch.cuda.empty_cache()
    chosen = long_chunks.chosen(found, [json.loads(text) for text in gather(json.dumps(own))])
    if chosen is None:
        return attention
    return replace(attention, paged_attention=partial(long_chunks.paged_attention, chosen))


def in_fixed_order(attention: Attention) -> Attention:
    """Return attention whose rows have the same bits in any batch. ValueError: this implementation has none."""
    if attention.name == "cpp":
        return attention
    if attention.name != "triton":
        raise ValueError(
            f"batch_invariant: attention runs in {attention.name}; our C++ on CPUs, over pages of the model's dtype, "
            f"and Triton on GPUs add in one order"
        )
    return replace(attention, paged_attention=partial(attention.paged_attention, in_fixed_order=True))


def require_working(attention: Attention, device: torch.device) -> None:
    """Compile and run a trivial kernel where `attention` is Triton's on a GPU: a fresh machine may lack a compiler.

    Raises:
        ValueError: the kernel does not run; the message names what to install.
    """
    if attention.name not in ("triton", "flashinfer") or device.type != "cuda":
        return
    from crossdock.kernels.gpu.triton_probe import why_no_triton

    if (reason := why_no_triton(device)) is not None:
        raise ValueError(
            f"attention_backend triton cannot run on this machine. {reason}. Without Triton, attention_backend torch "
            f"runs, many times slower"
        )


def _triton(device: torch.device) -> Attention:
    packages.require_backend("triton", is_on_cpu=device.type == "cpu")
    from crossdock.kernels.gpu.triton_attention import paged_attention, store_kv

    return Attention("triton", store_kv, paged_attention, is_beside_triton=True)


def _flash_attn(device: torch.device) -> Attention:
    packages.require_backend("flash_attn", is_on_cpu=device.type == "cpu")
    from crossdock.kernels.gpu.flash_attention import PAGE_MULTIPLE, paged_attention

    return _of_flash_attn("flash_attn", device, paged_attention, PAGE_MULTIPLE)


def _flash_attn_3(device: torch.device) -> Attention:
    packages.require_backend("flash_attn_3", is_on_cpu=device.type == "cpu")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        raise ValueError("attention_backend flash_attn_3 needs a Hopper GPU; this GPU is not one. Use auto or triton")
    from crossdock.kernels.gpu.flash_attention_3 import paged_attention

    return _of_flash_attn("flash_attn_3", device, paged_attention)


def _flashinfer(device: torch.device) -> Attention:
    packages.require_backend("flashinfer", is_on_cpu=device.type == "cpu")
    from crossdock.kernels.gpu.flashinfer_attention import paged_attention

    return _of_flash_attn("flashinfer", device, paged_attention)


def _of_flash_attn(
    name: str, device: torch.device, paged_attention: Callable[..., Tensor], page_multiple: int = 1
) -> Attention:
    store_kv = _triton(device).store_kv if packages.has_package("triton") else attention.reference_store_kv
    return Attention(
        name,
        store_kv,
        paged_attention,
        page_multiple,
        takes_fp8=False,
        takes_key_end=False,
        takes_attention_chunks=False,
        is_beside_triton=True,
    )


_NAMED: dict[str, Callable[[torch.device], Attention]] = {
    "triton": _triton,
    "flash_attn": _flash_attn,
    "flash_attn_3": _flash_attn_3,
    "flashinfer": _flashinfer,
    "torch": lambda _: TORCH,
}


def _require_fp8(chosen: Attention, device: torch.device) -> None:
    if not chosen.takes_fp8:
        raise ValueError(f"kv_cache_dtype fp8: attention_backend {chosen.name} takes no such pages; triton does")
    if chosen.name == "triton" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            "kv_cache_dtype fp8: Triton has e4m3 on GPUs of compute capability 8.9 (Ada, Hopper) and later, and "
            "this one is older; kv_cache_dtype auto runs there"
        )
