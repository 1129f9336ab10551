"""Steps in which every sequence decodes, recorded as CUDA graphs: one call launches what was a thousand.

A graph has fixed shapes and addresses. So there is a graph for each of some batch sizes. A step takes the next larger
one, with padding rows that read one token and write nowhere, and its inputs are copied to where the graph reads.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.graphs.recording import Record, attempt, recorder_for, why_not
from crossdock.workers.model.inputs import StepInputs, StepTensors
from crossdock.workers.model.model import LoadedModel

logger = logging.getLogger(__name__)

_Integer = TypeVar("_Integer", np.int32, np.int64)


def batch_sizes(most: int) -> list[int]:
    """Return the numbers of sequences for which there are graphs, up to `most`.

    Small batches are padded by few rows. Padding hardly lengthens a memory-bound step.
    """
    return sorted({size for size in (1, 2, 4, *range(8, 128, 8), *range(128, most, 32), most) if size <= most})


def padded(inputs: StepInputs, num_rows: int) -> StepInputs:
    """Pad the decodes of a step to `num_rows` rows.

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
        pages=inputs.pages.with_padding(len(inputs.kv_len), [1] * (num_rows - len(inputs.kv_len))),
    )


class DecodeGraphs:
    """Decode steps of one model, recorded for up to `max_num_seqs` sequences. The model's pool must be allocated."""

    def __init__(self, model: LoadedModel, page_size: int, max_num_seqs: int, record: Record) -> None:
        """Record a graph of every size. Raises whatever `record` raises."""
        width = -(-model.max_model_len // page_size)
        self._model = model
        self.record = record
        largest = padded(StepInputs.empty(len(model.held_groups)), max_num_seqs)
        self._inputs = largest.on(model.device).with_width(width)
        self._sizes = batch_sizes(max_num_seqs)
        with model.tap.opened():
            with model.part.alone():  # only the shape is wanted
                self._logits = torch.empty_like(self._forward(max_num_seqs))  # one for all graphs
            self._hidden = torch.empty_like(model.tap.hidden) if model.tap.hidden is not None else None
            self._graphs = {size: record(partial(self._compute, size)) for size in reversed(self._sizes)}

    def covers(self, inputs: StepInputs) -> bool:
        """Return whether a graph fits: one decode for each sequence, few enough sequences, all logits wanted."""
        return inputs.max_query_len == 1 and len(inputs.wanted) == len(inputs.token_ids) <= self._sizes[-1]

    def misses(self, inputs: StepInputs) -> bool:
        """Return False: a step with more sequences has no graph, or a graph for steps with chunks."""
        return False

    @torch.inference_mode()
    def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
        """Return logits [N, vocab], which the next run overwrites. `previous_tokens`: see `StepInputs.on`."""
        num_rows = len(inputs.kv_len)
        width = inputs.pages.width
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        given = padded(inputs, size).for_rank(self._model, previous_tokens)
        recorded = self._inputs
        for name in ("token_ids", "positions", "slots", "kv_len"):  # all other inputs are the same in every step
            getattr(recorded, name)[:size].copy_(getattr(given, name))
        recorded.page_table[:size, ..., :width].copy_(given.page_table)  # entries beyond `width` are not read
        self._graphs[size]()
        return self._logits[:num_rows]

    def replay_of(self, num_rows: int) -> Callable[[], None]:
        """Return the graph that computes steps of so many sequences, over the inputs of the newest one."""
        return self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]

    def hidden(self, inputs: StepInputs) -> Tensor | None:
        """Return the last hidden states [T, E] of the newest step, which the next run overwrites."""
        return None if self._hidden is None else self._hidden[: len(inputs.token_ids)]

    @torch.inference_mode()
    def _compute(self, size: int) -> None:
        self._logits[:size].copy_(self._forward(size))
        if self._hidden is not None and self._model.tap.hidden is not None:
            self._hidden[:size].copy_(self._model.tap.hidden)

    def _forward(self, size: int) -> Tensor:
        first = StepTensors(*(tensor[:size] for tensor in self._inputs))
        first = first._replace(query_start=self._inputs.query_start[: size + 1])
        return first.run(self._model, 1, self._model.max_model_len, size)


def decode_graphs(model: LoadedModel, page_size: int, max_num_seqs: int) -> tuple[DecodeGraphs | None, str]:
    """Record the decode steps of a model, or of this rank's part of it, on a GPU. The pool must be allocated.

    Collective: every rank of a worker group must call it. Returns what is recorded, as text too. It is None on all
    ranks where decode steps run kernel by kernel: on a CPU, for the stages of a pipeline, and for a model that cannot
    be recorded on some rank. The text then says why.
    """
    started = time.monotonic()
    reason = why_not(model)
    graphs = None
    if reason is None:
        graphs, reason = attempt(model, lambda: DecodeGraphs(model, page_size, max_num_seqs, recorder_for(model)))
    if graphs is None:
        if reason:
            logger.warning("decode steps run without CUDA graphs: %s", reason)
        return None, f"none: {reason}" if reason else ""
    logger.info("recorded CUDA graphs of decode steps in %.1f s", time.monotonic() - started)
    return graphs, "decodes"
