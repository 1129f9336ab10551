"""Attention of long chunks by a package that is measured to be faster, and of all else by Triton's kernels.

Triton's decodes are at the limit of memory, and its kernels can be recorded in CUDA graphs. Steps with more than `LONG`
tokens of chunks are not recorded: there a package that is written for one generation of GPUs may be faster.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor

from crossdock.kernels import packages
from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu import triton_attention

logger = logging.getLogger(__name__)

LONG = 512
FASTER = 1.3  # times as fast as Triton, for the prompt below: less is not worth another package's faults
_TOKENS, _HEADS, _KV_HEADS, _DIM, _PAGE, _LAYERS = 8192, 32, 8, 128, 16, 4  # Llama-3.1-8B, in pages of four layers
_ERROR = 0.02  # in norm; bfloat16 rounds to 0.4 %


@dataclass(frozen=True, slots=True)
class Package:
    """A package of attention, and what it takes."""

    name: str
    paged_attention: Callable[..., Tensor]
    head_sizes: Collection[int]
    takes_softcap: bool = True

    def takes(self, q: Tensor, v_pages: Tensor, batch: AttentionBatch, softcap: float | None = None) -> bool:
        """Return whether it computes the chunks of a layer over pages of the model's dtype."""
        if softcap and not self.takes_softcap:
            return False
        if v_pages.stride(2) != v_pages.shape[3]:  # an indexer's keys lie between values
            return False
        is_of_16_bits = q.dtype == v_pages.dtype and q.dtype in (torch.bfloat16, torch.float16)
        return is_of_16_bits and q.shape[2] == v_pages.shape[3] in self.head_sizes and batch.key_end is None


_MULTIPLES_OF_8 = range(8, 257, 8)
_ON_BLACKWELL = (*range(8, 129, 8), 256)
_FOR_FLASHINFER = (64, 128, 256)


def installed(capability: tuple[int, int]) -> list[Package]:
    """Return the packages that are installed here and run on GPUs of a compute capability."""
    hopper, blackwell = capability[0] == 9, capability[0] == 10
    candidates: list[tuple[str, str, Collection[int]]] = []
    if hopper:
        candidates.append(("flash_attn_3", "flash_attention_3", _MULTIPLES_OF_8))
    if hopper or blackwell:
        candidates.append(("flash_attn_4", "flash_attention_4", _MULTIPLES_OF_8 if hopper else _ON_BLACKWELL))
    if packages.has_package("flashinfer_jit_cache"):
        candidates.append(("flashinfer", "flashinfer_attention", _FOR_FLASHINFER))
    elif packages.has_package("flashinfer"):
        logger.info(
            "attention of long chunks: flashinfer is not timed: without flashinfer-jit-cache, which has its compiled "
            "modules, the start would compile for minutes"
        )
    found = []
    for name, module, head_sizes in candidates:
        if all(map(packages.has_package, packages.PACKAGES[name])):
            try:
                attend = import_module(f"crossdock.kernels.gpu.{module}").paged_attention
            except Exception as error:  # of a package that lacks another, or is of another version
                logger.warning("attention of long chunks: %s cannot be imported: %s", name, error)
                continue
            found.append(
                Package(name, attend, head_sizes, takes_softcap=name != "flashinfer")
            )  # compiled ones have none
    return found


def paged_attention(
    package: Package,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> Tensor:
    """`reference_paged_attention` on one GPU. `others`: of layers and steps that run in Triton alone."""
    D = batch.num_decodes
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    is_long = batch.on_host is not None and len(q) - D > LONG
    is_plain = all(each is None or each is False for each in others.values())
    if not (is_long and is_plain and package.takes(q, v_pages, batch, softcap)):
        return triton_attention.paged_attention(q, k_pages, v_pages, batch, **options, **others)
    chunks = package.paged_attention(q[D:], k_pages, v_pages, batch.chunks(), **options)
    if not D:
        return chunks
    decodes = triton_attention.paged_attention(q[:D], k_pages, v_pages, batch.decodes(), **options)
    return torch.cat((decodes, chunks))


def times_of(
    found: Sequence[Package], device: torch.device, seconds_of: Callable[[Callable[[], Tensor]], float]
) -> dict[str, float]:
    """Return how many times as fast as Triton each package computes a prompt of 8,192 tokens, by its name.

    Logs each that fails or is wrong, and leaves it out. `seconds_of` measures a function that computes on `device`.
    """
    if not found:
        return {}
    prompt = _prompt(device)
    expected = triton_attention.paged_attention(*prompt, scale=_DIM**-0.5)
    own = seconds_of(partial(triton_attention.paged_attention, *prompt, scale=_DIM**-0.5))
    measured = dict[str, float]()
    for package in found:
        run = partial(package.paged_attention, *prompt, scale=_DIM**-0.5)
        try:
            error = float((run() - expected).norm() / expected.norm())
            times = own / seconds_of(run)
        except Exception as failure:  # a compiler's, or the device's
            logger.warning("attention of long chunks: %s fails: %s: %s", package.name, type(failure).__name__, failure)
            continue
        if not error < _ERROR:
            logger.warning("attention of long chunks: %s differs from triton by %.1f %%", package.name, 100 * error)
            continue
        logger.info("attention of long chunks: %s is %.2f times as fast as triton", package.name, times)
        measured[package.name] = times
    return measured


def chosen(found: Sequence[Package], times: Sequence[Mapping[str, float]]) -> Package | None:
    """Return the package that is fastest by the times of the first rank, if it is `FASTER` there, and right on all.

    `times`: of each rank, from `times_of`. Ranks of one replica have one choice: with unlike ones, one would wait for
    the other in each step, and the same request would get other bits on another rank.
    """
    if not found and not any(times):
        return None
    on_all = [package for package in found if all(package.name in each for each in times)]
    fastest = max(on_all, key=lambda package: times[0][package.name], default=None)
    taken = fastest if fastest is not None and times[0][fastest.name] > FASTER else None
    name = "triton" if taken is None else taken.name
    logger.info("attention of steps with more than %d tokens of chunks runs in %s", LONG, name)
    return taken


def _prompt(device: torch.device) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    """Return a random prompt that is computed in one step: queries, keys and values in pages, and the batch."""
    num_pages = _TOKENS // _PAGE
    pool = torch.randn(num_pages, _LAYERS, 2, _KV_HEADS, _PAGE, _DIM, dtype=torch.bfloat16, device=device)
    q = torch.randn(_TOKENS, _HEADS, _DIM, dtype=torch.bfloat16, device=device)
    on_host = torch.tensor([0, _TOKENS], dtype=torch.int32), torch.tensor([_TOKENS], dtype=torch.int32)
    starts, lengths = (each.to(device) for each in on_host)
    table = torch.randperm(num_pages, dtype=torch.int32)[None].to(device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)  # nothing is stored
    batch = AttentionBatch(starts, lengths, table, slots, _TOKENS, _TOKENS, 0, on_host=on_host)
    return q, pool[:, 0, 0], pool[:, 0, 1], batch


def seconds_on(device: torch.device, run: Callable[[], Tensor]) -> float:
    """Return the seconds that a GPU takes for `run`: the median of seven, after a first one."""
    run()
    taken = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(torch.cuda.current_stream(device))
        run()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return float(median(taken)) / 1e3
