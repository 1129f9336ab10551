"""How much memory a rank's KV pages get: what was asked for, or on a GPU what the largest steps leave of its share."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from crossdock.workers.model.graphs import DecodeGraphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.memory_budget import MemoryBudget
from crossdock.workers.model.memory_fit import size_of
from crossdock.workers.model.model import PagedModel
from crossdock.workers.model.sampler import SampleRow, sample
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.request import Request, SamplingParams

logger = logging.getLogger(__name__)

MARGIN = 512 << 20  # bytes for what CUDA records graphs in and for gaps between allocations; an estimate


class PageBudget(NamedTuple):
    """What a rank has memory for."""

    num_pages: int
    page_bytes: int


def room_for_pages(model: PagedModel, budget: MemoryBudget, page_size: int) -> PageBudget:
    """Of a rank that has no pool yet. Where it is measured, all ranks of a gang must come here at once."""
    known = budget.known(model.device.type)
    page_bytes = model.layout(page_size).page_bytes
    return PageBudget((_measured(model, budget, page_size) if known is None else known) // page_bytes, page_bytes)


def _measured(model: PagedModel, budget: MemoryBudget, page_size: int) -> int:
    """Bytes that are left on a GPU by the largest step there can be: `max_num_batched_tokens` tokens through scratch
    pages, with every token's logits, as logprobs of a prompt want them, and `max_num_seqs` rows sampled in the way that
    takes most; and by as many decodes."""
    step = largest_step(budget.max_num_batched_tokens, model.max_model_len, page_size)
    model.allocate_pool(int(step.page_table.max()) + 1, page_size)

    def prefill() -> None:
        logits = step.run(model)
        if model.part.place.is_driver:
            row = SampleRow(SamplingParams(top_p=0.9), [0], 1)  # of equal logits no head is enough
            sample(logits.new_zeros(budget.max_num_seqs, logits.shape[1]), [row] * budget.max_num_seqs)

    def decode() -> None:
        DecodeGraphs(model, page_size, budget.max_num_seqs, lambda _: lambda: None)  # runs it once

    transient = _peak(prefill) + _peak(decode)  # a graph keeps what it needs, and a step may be both
    model.free_pool()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    found = share(budget.gpu_memory_utilization, total, free, model.used_by_others, transient)
    logger.info(
        "%s for KV pages: %g of %s, less %s held, %s for the largest steps and a margin of %s",
        *(size_of(found), budget.gpu_memory_utilization, size_of(total)),
        *(size_of(total - free - model.used_by_others), size_of(transient), size_of(MARGIN)),
    )
    return found


def share(utilization: float, total: int, free: int, used_by_others: int, transient: int) -> int:
    """Bytes for KV pages on a GPU of `total` bytes, `free` of which nobody uses: what is left of this process's share,
    `utilization`, after what it holds (weights, and what is not torch's) and what steps take for a while, `transient`.
    `used_by_others`: what was used when this process began."""
    held = total - free - used_by_others
    return max(0, int(min(utilization * total - held, free)) - transient - MARGIN)


def largest_step(num_tokens: int, max_model_len: int, page_size: int) -> StepInputs:
    """Whole prompts of so many tokens in all, the logits of every one wanted, in pages from 0 on."""
    parts: list[Scheduled] = []
    num_pages = 0
    for start in range(0, num_tokens, max_model_len):
        length = min(max_model_len, num_tokens - start)
        request = Request(f"largest-{start}", [0] * length, SamplingParams(prompt_logprobs=0))
        pages = range(num_pages, num_pages := num_pages + -(-length // page_size))
        parts.append(Scheduled(request, 0, length, pages, samples=True))
    return StepInputs.of(Batch(parts, 0), page_size)[0]


def _peak(run: Callable[[], object]) -> int:
    """The most bytes that torch allocates meanwhile, beyond what it has."""
    run()  # kernels compile, libraries allocate what they keep
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before
