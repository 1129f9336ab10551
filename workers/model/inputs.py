"""A batch as integers, in one message for all ranks, and as tensors, in one copy to each device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgpack
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.workers.model.model import PagedModel
from crossdock.workers.schedule.batch import Batch, Scheduled


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that a rank must know to compute a step: integers, in one message."""

    token_ids: NDArray[np.int64]  # [T]; `~i`: what the step before finds in its row i
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

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start).max())

    def on(self, device: torch.device, found: Tensor | None = None) -> "StepTensors":
        """The same there. To a GPU it is one copy, which the host does not wait for. `found`: the tokens [N] of the
        step before, on `device`, where this one begins with some of them; what is below 0 there counts as 0."""
        arrays = [getattr(self, name) for name in self.__slots__]
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        places = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=False)]
        for place, array in zip(places, arrays, strict=True):
            staged.numpy()[place] = array.reshape(-1).view(np.uint8)
        there = staged.to(device, non_blocking=True)
        tensors = StepTensors(
            *(
                there[place].view(getattr(torch, array.dtype.name)).view(array.shape)
                for place, array in zip(places, arrays, strict=True)
            )
        )
        if found is None or self.token_ids.min() >= 0:
            return tensors
        ids = tensors.token_ids
        known = torch.where(ids < 0, found[(~ids).clamp(min=0)].clamp(min=0), ids)
        return tensors._replace(token_ids=known)

    def run(self, model: PagedModel, found: Tensor | None = None) -> Tensor:
        """This rank's part of the step: logits [N, vocab] on the last stage. `found`: see `on`."""
        return self.on(model.device, found).run(model, self.max_query_len, int(self.kv_len.max()))


_ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for pointers that are less aligned


class StepTensors(NamedTuple):
    """`StepInputs` on a device, in the same order."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    query_start: Tensor
    kv_len: Tensor
    page_table: Tensor

    def run(self, model: PagedModel, max_query_len: int, max_kv_len: int) -> Tensor:
        batch = AttentionBatch(self.query_start, self.kv_len, self.page_table, self.slots, max_query_len, max_kv_len)
        return model.forward(self.token_ids, self.positions, batch, self.wanted)


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
