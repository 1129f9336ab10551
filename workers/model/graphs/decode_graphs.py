"""Steps of streams alone, recorded as CUDA graphs: one call launches what was a thousand.

Each stream has one row, or verifies drafts in a few: every row has logits.

A graph has fixed shapes and addresses. So there is a graph for each of some batch sizes. A step takes the next larger
one, with padding rows that read one token and write nowhere, and its inputs are copied to where the graph reads.
Where the model takes adapters, there is a second graph of each size, which computes them: steps without adapters have
no launches for them.
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

from crossdock.workers.model.forward.row_adapters import RowAdapters
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
    """Pad a step whose rows all have logits to `num_rows` rows, in as many sequences.

    A padding row is a sequence of one token. It reads page 0, which always exists, and writes to no slot. The other
    sequences have no row.
    """
    num_sequences = len(inputs.kv_len)
    after = len(inputs.token_ids)  # where padding begins

    def more(array: NDArray[_Integer], value: int = 0) -> NDArray[_Integer]:
        longer = np.full((num_rows, *array.shape[1:]), value, array.dtype)
        longer[: len(array)] = array
        return longer

    query_start = np.full(num_rows + 1, num_rows, np.int32)
    query_start[: num_sequences + 1] = inputs.query_start
    query_start[num_sequences : num_sequences + num_rows - after + 1] = np.arange(after, num_rows + 1)
    return StepInputs(
        token_ids=more(inputs.token_ids),
        positions=more(inputs.positions),
        slots=more(inputs.slots, -1),
        wanted=np.arange(num_rows, dtype=np.int64),
        query_start=query_start,
        kv_len=more(inputs.kv_len, 1),
        pages=inputs.pages.with_padding(num_sequences, [1] * (num_rows - num_sequences)),
    )


VERIFY_ROWS = (8, 16, 32, 64, 96, 128, 192, 256)
"""Rows of recorded steps that verify drafts. Beyond about 206 rows each row takes an H200 time, and few drafts pay."""

_OF_DECODES = ("token_ids", "positions", "slots", "kv_len")  # all other inputs of decodes are the same in every step


class DecodeGraphs:
    """Steps of streams of one model, recorded. The model's pool must be allocated."""

    def __init__(
        self, model: LoadedModel, page_size: int, max_num_seqs: int, record: Record, *, most_drafts: int = 0
    ) -> None:
        """Record a graph of every size. Raises whatever `record` raises.

        `most_drafts`: 0: a graph has one row for each of up to `max_num_seqs` streams. Else it has up to 256 rows, in
        which any number of streams verify up to so many drafts each.
        """
        width = -(-model.max_model_len // page_size)
        self._model = model
        self.record = record
        self._most_drafts = most_drafts
        most = max_num_seqs * (1 + most_drafts)
        self._sizes = sorted({min(size, most) for size in VERIFY_ROWS}) if most_drafts else batch_sizes(most)
        most = self._sizes[-1]
        largest = padded(StepInputs.empty(len(model.held_groups)), most)
        self._inputs = largest.on(model.device).with_width(width)
        self._adapters = None if model.adapters is None else model.adapters.room(most)
        with model.tap.opened():
            with model.part.alone():  # only the shape is wanted
                self._logits = torch.empty_like(self._forward(most))  # one for all graphs
            self._hidden = torch.empty_like(model.tap.hidden) if model.tap.hidden is not None else None
            sizes = self._sizes[::-1]
            self._graphs = {size: record(partial(self._compute, size)) for size in sizes}
            self._adapted: dict[int, Callable[[], None]] = {}
            if (room := self._adapters) is not None:
                self._adapted = {size: record(partial(self._compute, size, room.first(size))) for size in sizes}

    @property
    def has_adapters(self) -> bool:
        """Return whether steps with adapters are recorded, too."""
        return self._adapters is not None

    def covers(self, inputs: StepInputs) -> bool:
        """Return whether a graph fits: few enough rows of each sequence and of all, and all logits wanted."""
        has_room = len(inputs.wanted) == len(inputs.token_ids) <= self._sizes[-1]
        return has_room and inputs.max_query_len <= 1 + self._most_drafts

    @property
    def verifies(self) -> bool:
        """Return whether streams verify drafts in these steps."""
        return self._most_drafts > 0

    @property
    def most_rows(self) -> int:
        """Return how many rows the largest graph has."""
        return self._sizes[-1]

    def misses(self, inputs: StepInputs) -> bool:
        """Return False: a step with more sequences has no graph, or a graph for steps with chunks."""
        return False

    @torch.inference_mode()
    def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
        """Return logits [N, vocab], which the next run overwrites. `previous_tokens`: see `StepInputs.on`."""
        num_rows = len(inputs.token_ids)
        width = inputs.pages.width
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        given = padded(inputs, size).for_rank(self._model, previous_tokens)
        recorded = self._inputs
        for name in _OF_DECODES:
            getattr(recorded, name)[:size].copy_(getattr(given, name))
        if self._most_drafts:
            recorded.query_start[: size + 1].copy_(given.query_start)
        recorded.page_table[:size, ..., :width].copy_(given.page_table)  # entries beyond `width` are not read
        graphs = self._graphs
        if inputs.adapters and self._model.adapters is not None and self._adapters is not None:
            self._model.adapters.enter(self._adapters, inputs.adapters, inputs.query_start)
            graphs = self._adapted
        graphs[size]()
        return self._logits[:num_rows]

    def replay_of(self, num_rows: int) -> Callable[[], None]:
        """Return the graph that computes steps of so many sequences, over the inputs of the newest one."""
        return self._graphs[self._sizes[bisect_left(self._sizes, num_rows)]]

    def hidden(self, inputs: StepInputs) -> Tensor | None:
        """Return the last hidden states [T, E] of the newest step, which the next run overwrites."""
        return None if self._hidden is None else self._hidden[: len(inputs.token_ids)]

    @torch.inference_mode()
    def _compute(self, size: int, adapters: RowAdapters | None = None) -> None:
        self._logits[:size].copy_(self._forward(size, adapters))
        if self._hidden is not None and self._model.tap.hidden is not None:
            self._hidden[:size].copy_(self._model.tap.hidden)

    def _forward(self, size: int, adapters: RowAdapters | None = None) -> Tensor:
        first = StepTensors(*(tensor[:size] for tensor in self._inputs))
        first = first._replace(query_start=self._inputs.query_start[: size + 1])
        num_decodes = 0 if self._most_drafts else size  # with drafts, a sequence's place says nothing of its rows
        longest = 1 + self._most_drafts, self._model.max_model_len
        return first.run(self._model, *longest, num_decodes, adapters=adapters)


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


def verify_graphs(
    model: LoadedModel, page_size: int, max_num_seqs: int, most_drafts: int, decodes: DecodeGraphs
) -> tuple[DecodeGraphs | None, str]:
    """Record the steps that verify drafts of a model whose decodes are recorded, in the same memory.

    Collective: every rank of a worker group must call it. Returns what is recorded, as text too. It is None on all
    ranks where these steps cannot be recorded: the reason is logged, and streams then draft beside chunks alone.
    """
    sizes = model, page_size, max_num_seqs, decodes.record
    graphs, reason = attempt(model, lambda: DecodeGraphs(*sizes, most_drafts=most_drafts))
    if graphs is None:
        logger.warning("streams draft beside chunks alone: steps that verify drafts cannot be CUDA graphs: %s", reason)
        return None, f"; steps that verify drafts are not: {reason}"
    return graphs, f", steps that verify drafts in up to {graphs.most_rows} rows"
