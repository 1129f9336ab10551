"""Time forward passes of a whole model, launched kernel by kernel and as a CUDA graph: the price of launches."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu.attention import batch_of, random_pages
from gpu.cases import Bench, Case, Once, Section
from gpu.models import Weights, paged, random_module
from gpu.rows import Figures
from gpu.sizes import Lengths
from torch import Tensor


def steps(bench: Bench) -> Iterator[Case]:
    """Yield steps of the first model with random weights, without a scheduler and without sampling."""

    def load() -> Any:
        module = random_module(bench, next(iter(bench.sizes.models)))
        model = paged(bench, module)
        model.allocate_pool(bench.sizes.step_pages, bench.sizes.page_size)
        return model, Weights.of(module)

    loaded = Once(load)
    for name, lengths in bench.sizes.steps.items():
        yield Case(name, partial(_step, bench, loaded, lengths))


def _step(bench: Bench, loaded: Once, lengths: Lengths) -> Figures:
    model, weights = loaded()
    sizes, device = bench.sizes, bench.device
    pages = random_pages(lengths, sizes.page_size, sizes.step_pages)
    batch, positions = batch_of(lengths, pages, sizes.page_size, device.name)
    ids = torch.randint(0, min(model.vocab_size, 30_000), (len(positions),), device=device.name)
    rows = batch.query_start[1:].long() - 1

    @torch.inference_mode()
    def run() -> Tensor:
        return model.forward(ids, positions, batch, rows).argmax(-1)

    kv_bytes = sum(kv for _, kv in lengths) * model.layout(sizes.page_size).token_bytes
    least = max((weights.read(len(ids)) + kv_bytes) / bench.bandwidth, weights.flop(len(ids), len(rows)) / bench.peak)
    eager = device.timed(run, 5)
    found: Figures = {"least_ms": least * 1e3, "eager_ms": eager * 1e3}
    try:
        graph = device.replayed(run, repeats=5)
    except RuntimeError as error:
        found["graph"] = str(error).splitlines()[0]
        device.wait()
    else:
        found |= {"graph_ms": graph * 1e3, "graph_over_least": graph / least, "launches_ms": (eager - graph) * 1e3}
    return found


SECTIONS = [Section("steps", 150.0, steps)]
