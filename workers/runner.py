"""A batch as tensors: one flat forward pass over any mix of chunks and decodes, on this rank and on all others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.workers.model import PagedModel
from crossdock.workers.scheduler import Batch, Scheduled


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that a rank must know to compute a step: integers, in one message."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    wanted: NDArray[np.int64]  # [N], which rows' logits
    query_start: NDArray[np.int32]  # [S+1]
    kv_len: NDArray[np.int32]  # [S]
    page_table: NDArray[np.int32]  # [S, P]

    @classmethod
    def of(cls, batch: Batch, page_size: int) -> "tuple[StepInputs, list[range]]":
        """The step, and for each part of the batch which of the N rows of logits are its own: the last token's where
        it samples, every token's where prompt logprobs are wanted, else none."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        rows: list[range] = []
        for part in batch.scheduled:
            end = part.start + part.num_tokens
            first = len(token_ids)
            token_ids += part.request.token_ids[part.start : end]
            positions += range(part.start, end)
            slots += _slots(part, page_size)
            rows.append(range(len(wanted), len(wanted) + _num_rows(part)))
            wanted += range(first + part.num_tokens - _num_rows(part), first + part.num_tokens)
        inputs = cls(
            token_ids=np.array(token_ids, np.int64),
            positions=np.array(positions, np.int64),
            slots=np.array(slots, np.int64),
            wanted=np.array(wanted, np.int64),
            query_start=np.array([0, *accumulate(part.num_tokens for part in batch.scheduled)], np.int32),
            kv_len=np.array([part.start + part.num_tokens for part in batch.scheduled], np.int32),
            page_table=_page_table(batch.scheduled, page_size),
        )
        return inputs, rows

    def pack(self) -> bytes:
        arrays = [getattr(self, name) for name in self.__slots__]
        data: bytes = msgpack.packb([array.tobytes() for array in arrays])
        return data

    @classmethod
    def unpack(cls, data: bytes) -> "StepInputs":
        arrays = msgpack.unpackb(data)
        token_ids, positions, slots, wanted = (np.frombuffer(array, np.int64) for array in arrays[:4])
        query_start, kv_len, page_table = (np.frombuffer(array, np.int32) for array in arrays[4:])
        return cls(token_ids, positions, slots, wanted, query_start, kv_len, page_table.reshape(len(kv_len), -1))

    def run(self, model: PagedModel) -> Tensor:
        """This rank's part of the step: logits [N, vocab] on the last stage."""
        device = model.device

        def tensor(array: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
            return torch.tensor(array, device=device)  # a copy: a received message is read-only

        attention = AttentionBatch(
            query_start=tensor(self.query_start),
            kv_len=tensor(self.kv_len),
            page_table=tensor(self.page_table),
            slots=tensor(self.slots),
            max_query_len=int(np.diff(self.query_start).max()),
            max_kv_len=int(self.kv_len.max()),
        )
        return model.forward(tensor(self.token_ids), tensor(self.positions), attention, tensor(self.wanted))


@dataclass(frozen=True, slots=True)
class Runner:
    """Executes batches on one model; `tell` gives each to the other ranks, where there are any."""

    model: PagedModel
    page_size: int
    tell: Callable[[bytes], None] | None = None

    def begin(self, batch: Batch) -> tuple[StepInputs, list[range]]:
        """The other ranks may compute it from now on."""
        step = StepInputs.of(batch, self.page_size)
        if self.tell is not None:
            self.tell(step[0].pack())
        return step

    def finish(self, step: tuple[StepInputs, list[range]]) -> tuple[Tensor, list[range]]:
        """Logits [N, vocab], and for each part of the batch its rows. Batches are finished in the order they began."""
        inputs, rows = step
        return inputs.run(self.model), rows


def _slots(part: Scheduled, page_size: int) -> list[int]:
    return [
        part.pages[position // page_size] * page_size + position % page_size
        for position in range(part.start, part.start + part.num_tokens)
    ]


def _page_table(parts: Sequence[Scheduled], page_size: int) -> NDArray[np.int32]:
    """[S, P], with as many pages as this step's tokens reach, short rows filled with page 0."""
    reach = [-(-(part.start + part.num_tokens) // page_size) for part in parts]
    table = np.zeros((len(parts), max(reach)), np.int32)
    for row, part, num_pages in zip(table, parts, reach, strict=True):
        row[:num_pages] = part.pages[:num_pages]
    return table


def _num_rows(part: Scheduled) -> int:
    """A prompt's logprobs need the logits of every token; sampling needs the last one's."""
    if part.request.sampling.prompt_logprobs is not None and part.start < part.request.num_prompt_tokens:
        return part.num_tokens
    return int(part.samples)
