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

_ALIGNMENT = 16  # bytes: Triton compiles a kernel again for pointers that are less aligned


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that a rank needs to compute a step: integers, sent in one message."""

    token_ids: NDArray[np.int64]  # [T]; `~i`: the token that the previous step draws in its row i
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    wanted: NDArray[np.int64]  # [N], the rows whose logits are wanted
    query_start: NDArray[np.int32]  # [S+1]
    kv_len: NDArray[np.int32]  # [S]
    page_table: NDArray[np.int32]  # [S, P]

    @classmethod
    def of(cls, batch: Batch, page_size: int) -> "tuple[StepInputs, list[range]]":
        """Return the step, and for each part of the batch its rows of the N rows of logits.

        A part that samples has its last token's row. A part whose request wants prompt logprobs has every token's.
        """
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

    @property
    def num_decodes(self) -> int:
        """Return how many sequences at the front of the step have one row."""
        has_more = np.diff(self.query_start) != 1
        return int(has_more.argmax()) if has_more.any() else len(has_more)

    def on(self, device: torch.device, previous_tokens: Tensor | None = None) -> "StepTensors":
        """Copy the step to `device`. To a GPU it is one copy, for which the host does not wait.

        `previous_tokens` [N], on `device`, are those that the previous step has drawn, if this step begins with some of
        them. A token below 0 counts as 0.
        """
        arrays = [getattr(self, name) for name in self.__slots__]
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        spans = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=False)]
        for span, array in zip(spans, arrays, strict=True):
            staged.numpy()[span] = array.reshape(-1).view(np.uint8)
        copied = staged.to(device, non_blocking=True)
        tensors = StepTensors(
            *(
                copied[span].view(getattr(torch, array.dtype.name)).view(array.shape)
                for span, array in zip(spans, arrays, strict=True)
            )
        )
        if previous_tokens is None or self.token_ids.min() >= 0:
            return tensors
        ids = tensors.token_ids
        known = torch.where(ids < 0, previous_tokens[(~ids).clamp(min=0)].clamp(min=0), ids)
        return tensors._replace(token_ids=known)

    def run(self, model: PagedModel, previous_tokens: Tensor | None = None) -> Tensor:
        """Compute this rank's part of the step; return logits [N, vocab] on the last stage. See `on`."""
        longest = self.max_query_len, int(self.kv_len.max())
        return self.on(model.device, previous_tokens).run(model, *longest, self.num_decodes)


class StepTensors(NamedTuple):
    """`StepInputs` on a device, in the same order."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    query_start: Tensor
    kv_len: Tensor
    page_table: Tensor

    def run(self, model: PagedModel, max_query_len: int, max_kv_len: int, num_decodes: int = 0) -> Tensor:
        batch = AttentionBatch(
            *(self.query_start, self.kv_len, self.page_table, self.slots, max_query_len, max_kv_len, num_decodes)
        )
        return model.forward(self.token_ids, self.positions, batch, self.wanted)


def _slots(part: Scheduled, page_size: int) -> list[int]:
    return [
        part.pages[position // page_size] * page_size + position % page_size
        for position in range(part.start, part.start + part.num_tokens)
    ]


def _page_table(parts: Sequence[Scheduled], page_size: int) -> NDArray[np.int32]:
    """Return the pages of every part, [S, P]: as many as this step's tokens reach, short rows filled with page 0."""
    reach = [-(-(part.start + part.num_tokens) // page_size) for part in parts]
    table = np.zeros((len(parts), max(reach)), np.int32)
    for row, part, num_pages in zip(table, parts, reach, strict=True):
        row[:num_pages] = part.pages[:num_pages]
    return table


def _num_rows(part: Scheduled) -> int:
    """Return how many rows of logits a part needs: all for a prompt's logprobs, the last to sample, else none."""
    if part.request.sampling.prompt_logprobs is not None and part.start < part.request.num_prompt_tokens:
        return part.num_tokens
    return int(part.samples)
