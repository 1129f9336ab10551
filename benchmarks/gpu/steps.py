"""Time forward passes of a whole model, kernel by kernel and as a CUDA graph; its kernels by time, and its products."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu.attention import batch_of, random_pages
from gpu.cases import Bench, Case, Once, Section
from gpu.models import Weights, paged, random_module
from gpu.rows import Figures
from gpu.sizes import Lengths
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from crossdock.kernels.packed import PackedMatrix, scaled_product

_PROFILED = 5  # passes


def steps(bench: Bench) -> Iterator[Case]:
    """Yield steps of the first model with random weights, without a scheduler and without sampling."""

    def load() -> Any:
        module = random_module(bench, next(iter(bench.sizes.models)))
        weights = Weights.of(module)  # before our layers take them from the module
        model = paged(bench, module)
        model.allocate_pool(bench.sizes.step_pages, bench.sizes.page_size)
        return model, weights

    loaded = Once(load)
    for name, lengths in bench.sizes.steps.items():
        yield Case(name, partial(_step, bench, loaded, lengths))
        yield Case(f"{name}, kernels in us", partial(_kernels, bench, loaded, lengths))
    for rows in bench.sizes.products:
        yield Case(f"products of a layer, {rows} rows, in us", partial(_products, bench, rows))


def _forward(bench: Bench, model: Any, lengths: Lengths) -> tuple[Callable[[], Tensor], int, int]:
    """Return the pass of a step as a function, and how many rows it has, and how many with logits."""
    sizes, device = bench.sizes, bench.device
    pages = random_pages(lengths, sizes.page_size, sizes.step_pages)
    batch, positions = batch_of(lengths, pages, sizes.page_size, device.name)
    ids = torch.randint(0, min(model.vocab_size, 30_000), (len(positions),), device=device.name)
    rows = batch.query_start[1:].long() - 1

    @torch.inference_mode()
    def run() -> Tensor:
        return model.forward(ids, positions, batch, rows).argmax(-1)

    return run, len(ids), len(rows)


def _kernels(bench: Bench, loaded: Once, lengths: Lengths) -> Figures:
    """Return the seconds of the 20 kernels that take longest in a pass, all their launches together."""
    run, *_ = _forward(bench, loaded()[0], lengths)
    run()
    kind = "self_cpu_time_total" if bench.sizes.is_dry else "self_device_time_total"
    activity = ProfilerActivity.CPU if bench.sizes.is_dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiled:
        for _ in range(_PROFILED):
            run()
        bench.device.wait()
    longest = sorted(profiled.key_averages(), key=lambda event: -getattr(event, kind))[:20]
    return {event.key[:60]: getattr(event, kind) / _PROFILED for event in longest}


def _products(bench: Bench, rows: int) -> Figures:
    """Return the microseconds of each product of the first model's layer, and its share of the peak."""
    shape, found = next(iter(bench.sizes.models.values())), dict[str, Any]()
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    width = heads * shape["num_attention_heads"]
    sizes = {"qkv": (hidden, width + 2 * heads * shape["num_key_value_heads"]), "o": (width, hidden)}
    for name, (inputs, outputs) in (sizes | {"gate and up": (hidden, 2 * inner), "down": (inner, hidden)}).items():
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=bench.device.name)
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device=bench.device.name) for _ in range(4)]
        seconds = bench.device.replayed(*(partial(F.linear, x, weight) for weight in weights))
        found |= {f"{name}": seconds * 1e6, f"{name}_of_peak": 2 * rows * inputs * outputs / seconds / bench.peak}
        coded = [partial(scaled_product, x, _e4m3(weight)) for weight in weights]
        found[f"{name}_in_e4m3"] = bench.device.replayed(*coded) * 1e6
    return found


def _e4m3(weight: Tensor) -> PackedMatrix:
    scales = weight.abs().amax(1, keepdim=True).float() / 448
    return PackedMatrix("e4m3", (weight / scales).to(torch.float8_e4m3fn), scales, None, weight.shape[1])


def _step(bench: Bench, loaded: Once, lengths: Lengths) -> Figures:
    model, weights = loaded()
    sizes, device = bench.sizes, bench.device
    run, num_rows, num_logits = _forward(bench, model, lengths)
    kv_bytes = sum(kv for _, kv in lengths) * model.layout(sizes.page_size).token_bytes
    least = max((weights.read(num_rows) + kv_bytes) / bench.bandwidth, weights.flop(num_rows, num_logits) / bench.peak)
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
