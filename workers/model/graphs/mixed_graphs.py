"""Steps with chunks, recorded as CUDA graphs: kernel by kernel, launching a step with a small chunk takes as long as
computing it, or longer.

There is a graph for each of some numbers of decodes and of chunk tokens. A step takes the next larger of both. Padding
decodes read one token, as in graphs.py. Padding tokens of chunks are one more chunk, on page 0. Neither writes.

As of decodes, there is a second graph of each size with adapters where the model takes them.

A stream that verifies drafts is a chunk whose tokens all have logits. So with speculation, graphs have more logits.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from crossdock.workers.model.forward.row_adapters import RowAdapters
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs
from crossdock.workers.model.graphs.recording import Record, attempt
from crossdock.workers.model.inputs import StepInputs, StepTensors
from crossdock.workers.model.model import LoadedModel

logger = logging.getLogger(__name__)

DECODES = (8, 32, 64, 96, 128, 192, 256)
"""Numbers of decodes, closer where padding costs time. Every graph holds memory.

An H100 or H200 waits for the weights below some 200 to 300 rows of decodes and chunks. Beyond, each row takes time."""

_CHUNK_TOKENS = (64, 128, 256, 512)  # with more, computing takes longer than launching
_CHUNKS = 8  # sequences for chunks in every graph, one of them for padding; few steps have more
_VERIFIED = 64  # most rows of logits for chunks and drafts: each takes memory beside those of decodes, for all graphs


class MixedGraphs:
    """Steps of one model with chunks, recorded. The model's pool must be allocated."""

    def __init__(
        self,
        model: LoadedModel,
        page_size: int,
        max_num_seqs: int,
        max_chunk_tokens: int,
        record: Record,
        *,
        most_drafts: int = 0,
    ) -> None:
        """Record a graph for every pair of sizes. Raises whatever `record` raises.

        `most_drafts`: that a step verifies for one stream; 0: there is no speculation.
        """
        self._model = model
        self._page_size = page_size
        width = -(-model.max_model_len // page_size)
        longest = min(max_chunk_tokens, model.max_model_len)
        self._chunk_logits = min(_CHUNKS * (1 + most_drafts), _VERIFIED)  # rows beside those of decodes
        self._decodes = sorted({min(size, max_num_seqs) for size in DECODES})
        self._chunk_tokens = sorted({min(size, longest) for size in _CHUNK_TOKENS})
        nothing = StepInputs.empty(len(model.held_groups))
        largest = self._decodes[-1], self._chunk_tokens[-1]
        padded = padded_with_chunks(nothing, *largest, page_size, self._chunk_logits)
        self._inputs = padded.on(model.device).with_width(width)
        self._adapters = None if model.adapters is None else model.adapters.room(sum(largest))
        with model.tap.opened():
            with model.part.alone():  # only the shape is wanted
                self._logits = torch.empty_like(self._forward(*largest))  # one for all graphs
            self._hidden = torch.empty_like(model.tap.hidden) if model.tap.hidden is not None else None
            self._graphs = self._record(nothing, record, None)
            self._adapted = {} if self._adapters is None else self._record(nothing, record, self._adapters)

    def _record(
        self, nothing: StepInputs, record: Record, room: RowAdapters | None
    ) -> dict[tuple[int, int], Callable[[], None]]:
        """Record a graph for every pair of sizes, and return them by it.

        `nothing`: a step without sequences; `room`: where the graphs read adapters, None: they compute none.
        """
        graphs = {}
        for tokens, decodes in product(reversed(self._chunk_tokens), reversed(self._decodes)):
            smaller = padded_with_chunks(nothing, decodes, tokens, self._page_size, self._chunk_logits)
            self._enter(smaller.on(self._model.device), decodes, tokens)  # else sequences would have too many rows
            adapters = None if room is None else room.first(decodes + tokens)
            graphs[decodes, tokens] = record(partial(self._compute, decodes, tokens, adapters))
        return graphs

    @property
    def most_tokens(self) -> int:
        """Return how many tokens the chunks of a recorded step have at most."""
        return self._chunk_tokens[-1]

    @property
    def verified(self) -> tuple[int, int]:
        """Return how many streams with drafts a step has at most beside one chunk, and their rows."""
        return _CHUNKS - 2, self._chunk_logits - 1

    @property
    def has_adapters(self) -> bool:
        """Return whether steps with adapters are recorded, too."""
        return self._adapters is not None

    def covers(self, inputs: StepInputs) -> bool:
        """Return whether some graph has room for the step."""
        num_decodes, num_chunks, num_tokens = _sizes(inputs)
        return (
            num_decodes <= self._decodes[-1]
            and num_chunks < _CHUNKS
            and num_tokens <= self._chunk_tokens[-1]
            and len(inputs.wanted) <= num_decodes + self._chunk_logits
        )

    def misses(self, inputs: StepInputs) -> bool:
        """Return whether a step is launched kernel by kernel though others with as many tokens are recorded."""
        return not self.covers(inputs) and _sizes(inputs)[2] <= self._chunk_tokens[-1]

    @torch.inference_mode()
    def run(self, inputs: StepInputs, previous_tokens: Tensor | None = None) -> Tensor:
        """Return logits [N, vocab], which the next run overwrites. `previous_tokens`: see `StepInputs.on`."""
        decodes, tokens = self._sizes_of_graph(inputs)
        padded = padded_with_chunks(inputs, decodes, tokens, self._page_size, self._chunk_logits)
        self._enter(padded.for_rank(self._model, previous_tokens), decodes, tokens)
        graphs = self._graphs
        if inputs.adapters and self._model.adapters is not None and self._adapters is not None:
            self._model.adapters.enter(self._adapters, padded.adapters, padded.query_start)
            graphs = self._adapted
        graphs[decodes, tokens]()
        return self._logits[: len(inputs.wanted)]

    def hidden(self, inputs: StepInputs) -> Tensor | None:
        """Return the last hidden states [T, E] of the newest step."""
        num_decodes, _, num_tokens = _sizes(inputs)
        decodes, _ = self._sizes_of_graph(inputs)
        if self._hidden is None:
            return None
        return torch.cat([self._hidden[:num_decodes], self._hidden[decodes : decodes + num_tokens]])

    def _sizes_of_graph(self, inputs: StepInputs) -> tuple[int, int]:
        """Return the numbers of decodes and of chunk tokens of the graph that has room for the step."""
        num_decodes, _, num_tokens = _sizes(inputs)
        decodes = self._decodes[bisect_left(self._decodes, num_decodes)]
        return decodes, self._chunk_tokens[bisect_left(self._chunk_tokens, num_tokens)]

    def _enter(self, given: StepTensors, decodes: int, tokens: int) -> None:
        """Copy a padded step to where the graph of these sizes reads."""
        recorded = self._prefixes(decodes, tokens)
        for name in StepTensors._fields:
            if name != "page_table":
                getattr(recorded, name).copy_(getattr(given, name))
        recorded.page_table[..., : given.page_table.shape[-1]].copy_(given.page_table)  # entries beyond are not read

    @torch.inference_mode()
    def _compute(self, decodes: int, tokens: int, adapters: RowAdapters | None) -> None:
        self._logits[: decodes + self._chunk_logits].copy_(self._forward(decodes, tokens, adapters))
        if self._hidden is not None and self._model.tap.hidden is not None:
            self._hidden[: decodes + tokens].copy_(self._model.tap.hidden)

    def _forward(self, decodes: int, tokens: int, adapters: RowAdapters | None = None) -> Tensor:
        recorded = self._prefixes(decodes, tokens)
        return recorded.run(self._model, tokens, self._model.max_model_len, decodes, adapters=adapters)

    def _prefixes(self, decodes: int, tokens: int) -> StepTensors:
        """Return the beginnings of the input tensors, where the graph of these sizes reads its step."""
        rows = decodes + tokens
        sequences = decodes + _CHUNKS
        lengths = (rows, rows, rows, decodes + self._chunk_logits, sequences + 1, sequences, sequences, 0, 0)
        return StepTensors(*(tensor[:length] for tensor, length in zip(self._inputs, lengths, strict=True)))


def padded_with_chunks(
    inputs: StepInputs, decodes: int, tokens: int, page_size: int, chunk_logits: int = _CHUNKS
) -> StepInputs:
    """Pad a step to `decodes` decodes and, in `_CHUNKS` sequences, `tokens` tokens of chunks.

    Logits are wanted for `decodes + chunk_logits` rows; the rows of the step come first.
    """
    num_decodes, num_chunks, num_tokens = _sizes(inputs)
    rows = decodes + tokens
    sequences = decodes + _CHUNKS
    num_padding = tokens - num_tokens
    new_rows = np.r_[:num_decodes, decodes : decodes + num_tokens]  # where the step's rows are in the graph
    new_sequences = np.r_[:num_decodes, decodes : decodes + num_chunks]
    token_ids = np.zeros(rows, np.int64)
    positions = np.zeros(rows, np.int64)
    slots = np.full((rows, *inputs.slots.shape[1:]), -1, np.int64)
    token_ids[new_rows] = inputs.token_ids
    positions[new_rows] = inputs.positions
    slots[new_rows] = inputs.slots
    positions[rows - num_padding :] = np.arange(num_padding)
    lengths = np.zeros(sequences, np.int32)
    kv_len = np.ones(sequences, np.int32)
    lengths[:decodes] = 1
    lengths[new_sequences] = np.diff(inputs.query_start)
    kv_len[new_sequences] = inputs.kv_len
    lengths[decodes + num_chunks], kv_len[decodes + num_chunks] = num_padding, max(num_padding, 1)
    unused = [max(-(-num_padding // page_size), 1)] + [1] * (_CHUNKS - num_chunks - 1)
    pages = inputs.pages.with_padding(len(inputs.kv_len), unused)
    pages = pages.with_padding(num_decodes, [1] * (decodes - num_decodes))
    wanted = np.zeros(decodes + chunk_logits, np.int64)
    wanted[: len(inputs.wanted)] = new_rows[inputs.wanted]
    query_start = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    adapters = [""] * sequences if inputs.adapters else []
    for sequence, adapter in zip(new_sequences.tolist(), inputs.adapters, strict=False):
        adapters[sequence] = adapter
    return StepInputs(token_ids, positions, slots, wanted, query_start, kv_len, pages, adapters=adapters)


def _sizes(inputs: StepInputs) -> tuple[int, int, int]:
    """Return how many decodes come first, how many chunks come after them, and the tokens of these chunks."""
    num_decodes = inputs.num_decodes
    return num_decodes, len(inputs.kv_len) - num_decodes, len(inputs.token_ids) - num_decodes


def mixed_graphs(
    model: LoadedModel,
    page_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decodes: DecodeGraphs,
    *,
    most_drafts: int = 0,
) -> tuple[MixedGraphs | None, str]:
    """Record the steps with chunks of a model whose decodes are recorded, in the same memory.

    Collective: every rank of a worker group must call it. Returns what is recorded, as text too. It is None on all
    ranks where chunks cannot be recorded, and run kernel by kernel: the reason is logged. `most_drafts`: see
    `MixedGraphs`.
    """
    started = time.monotonic()
    sizes = (page_size, max_num_seqs, max_num_batched_tokens)
    record = decodes.record
    graphs, reason = attempt(model, lambda: MixedGraphs(model, *sizes, record, most_drafts=most_drafts))
    if graphs is None:
        logger.warning("steps with chunks run without CUDA graphs: %s", reason)
        return None, f"; steps with chunks are not: {reason}"
    seconds = time.monotonic() - started
    logger.info("recorded CUDA graphs of chunks of up to %d tokens in %.1f s", graphs.most_tokens, seconds)
    return graphs, f", steps with chunks of up to {graphs.most_tokens} tokens"
