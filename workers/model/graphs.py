"""Steps in which every sequence decodes, recorded as CUDA graphs: one call launches what was a thousand.

A graph has fixed shapes and addresses. So there is a graph for each of some batch sizes. A step takes the next larger
one, with padding rows that read one token and write nowhere, and its inputs are copied to where the graph reads.
"""

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.inputs import StepInputs, StepTensors
from crossdock.workers.model.model import PagedModel

logger = logging.getLogger(__name__)

_Integer = TypeVar("_Integer", np.int32, np.int64)
Record: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Records a function over tensors at fixed addresses; returns a function that does the same again."""


def batch_sizes(most: int) -> list[int]:
    """Return the numbers of sequences for which there are graphs, up to `most`.

    Small batches are padded by few rows; memory-bound steps hardly take longer for padding.
    """
    return sorted({size for size in (1, 2, 4, *range(8, 128, 8), *range(128, most, 32), most) if size <= most})


def padded(inputs: StepInputs, num_rows: int) -> StepInputs:
    """Return the same decodes with padding rows, `num_rows` in all.

    A padding row is a sequence of one token. It reads page 0, which always exists, and writes to no slot.
    """

    def more(array: NDArray[_Integer], value: int = 0) -> NDArray[_Integer]:
        longer = np.full((num_rows, *array.shape[1:]), value, array.dtype)
        longer[: len(array)] = array
        return longer

    return StepInputs(
        token_ids=more(inputs.token_ids),
        positions=more(inputs.positions),
        slots=more(inputs.slots, -1),
        wanted=np.arange(num_rows, dtype=np.int64),
        query_start=np.arange(num_rows + 1, dtype=np.int32),
        kv_len=more(inputs.kv_len, 1),
        page_table=more(inputs.page_table),
    )


class DecodeGraphs:
    """Decode steps of one model, recorded for up to `max_num_seqs` sequences. The model's pool must be allocated."""

    def __init__(self, model: PagedModel, page_size: int, max_num_seqs: int, record: Record) -> None:
        """Record a graph of every size. Raises whatever `record` raises."""
        width = -(-model.max_model_len // page_size)
        none, none32 = np.zeros(0, np.int64), np.zeros(0, np.int32)
        nothing = StepInputs(none, none, none, none, np.zeros(1, np.int32), none32, np.zeros((0, width), np.int32))
        self._model, self.record = model, record
        self._inputs = padded(nothing, max_num_seqs).on(model.device)
        self._logits = torch.empty_like(self._forward(max_num_seqs))  # one for all graphs
        self._sizes = batch_sizes(max_num_seqs)
        self._graphs = {size: record(partial(self._compute, size)) for size in reversed(self._sizes)}

    def covers(self, inputs: StepInputs) -> bool:
        """Return whether the step is one decode of each of few enough sequences, all of whose logits are wanted."""
        return inputs.max_query_len == 1 and len(inputs.wanted) == len(inputs.token_ids) <= self._sizes[-1]

    @torch.inference_mode()
    def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
        """Return logits [N, vocab], which the next run overwrites. `previous_tokens`: see `StepInputs.on`."""
        num_rows, width = inputs.page_table.shape
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        given, recorded = padded(inputs, size).on(self._model.device, previous_tokens), self._inputs
        for name in ("token_ids", "positions", "slots", "kv_len"):  # the others are the same in every step
            getattr(recorded, name)[:size].copy_(getattr(given, name))
        recorded.page_table[:size, :width].copy_(given.page_table)  # entries beyond `width` are not read
        self._graphs[size]()
        return self._logits[:num_rows]

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        self._logits[:size].copy_(self._forward(size))

    def _forward(self, size: int) -> Tensor:
        first = StepTensors(*(tensor[:size] for tensor in self._inputs))
        first = first._replace(query_start=self._inputs.query_start[: size + 1])
        return first.run(self._model, 1, self._model.max_model_len)


def decode_graphs(model: PagedModel, page_size: int, max_num_seqs: int) -> DecodeGraphs | None:
    """Record the decode steps of a whole model on a GPU. The model's pool must be allocated.

    Returns None where decode steps run kernel by kernel: on a CPU, on ranks of a gang, and for a model that cannot be
    recorded, for which the reason is logged.
    """
    if model.device.type != "cuda" or model.part.position.size > 1:
        return None
    started = time.monotonic()
    try:
        graphs = DecodeGraphs(model, page_size, max_num_seqs, _recorder())
    except Exception as error:  # a model's own code may raise anything where it may not wait for the GPU
        logger.warning("decode steps run without CUDA graphs: %s: %s", type(error).__name__, error)
        model.graphs = f"none: {type(error).__name__}: {error}"
        return None
    model.graphs = "decodes"
    logger.info("recorded CUDA graphs of decode steps in %.1f s", time.monotonic() - started)
    return graphs


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise where the host waits for the GPU. A capture would raise too, but leaves torch's allocator in disorder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _recorder() -> Record:
    """Return a `Record` by stream capture. All graphs share one memory pool, since only one runs at a time."""
    memory = torch.cuda.graph_pool_handle()
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # left also where a capture fails, which `torch.cuda.graph` would not do
            with _refusing_to_wait():
                run()  # compiles kernels, allocates the libraries' workspaces
            with torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local"):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    return record
