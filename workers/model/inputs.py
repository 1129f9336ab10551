"""A batch as integers, and as tensors, in one copy to each device. step_messages.py sends it to other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.workers.model.forward.row_adapters import RowAdapters
from crossdock.workers.model.forward.step_pictures import PictureRows, StepPictures
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.page_lists import PageLists, table_of
from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.model.shared_rows import rows_of
from crossdock.workers.schedule.request.batch import Batch, Scheduled

_NO_STATES = np.zeros((0, 0), np.int32)
_ALIGNMENT = 16  # bytes: Triton compiles a kernel again for pointers that are less aligned


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that a rank needs to compute a step, as integers."""

    token_ids: NDArray[np.int64]  # [T]; `~i`: the token that the previous step draws in its row i
    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]; of G groups of layers, more than one, [T, G]
    wanted: NDArray[np.int64]  # [N], the rows whose logits are wanted
    query_start: NDArray[np.int32]  # [S+1]
    kv_len: NDArray[np.int32]  # [S]
    pages: PageLists
    state_read: NDArray[np.int32] = field(default_factory=lambda: _NO_STATES)  # [S, n] pages; rows of -1: zeros
    state_write: NDArray[np.int32] = field(default_factory=lambda: _NO_STATES)  # [S, n]; see `StatePages`
    pictures: StepPictures | None = None  # None: all rows are tokens
    adapters: Sequence[str] = ()  # the fingerprint of each sequence's, or an empty text; (): none has one

    @classmethod
    def of(cls, batch: Batch, page_size: int) -> "tuple[StepInputs, list[range]]":
        """Return the step, and for each part of the batch its own rows among the N rows of logits.

        A part that samples has its last token's row, and the row of each draft. A part whose request wants prompt
        logprobs has every token's.
        """
        num_single = sum([part.num_tokens == 1 for part in batch.scheduled[: batch.num_decodes]])  # they come first
        token_ids = [part.request.token_ids[part.start] for part in batch.scheduled[:num_single]]
        wanted = list(range(num_single))
        rows = list(_single_rows(num_single))
        for part in batch.scheduled[num_single:]:
            token_ids += part.request.token_ids[part.start : part.start + part.num_tokens]
            token_ids += part.drafts
            num_rows = _num_rows(part)
            rows.append(range(len(wanted), len(wanted) + num_rows))
            wanted += range(len(token_ids) - num_rows, len(token_ids))
        starts = np.array([part.start for part in batch.scheduled], np.int64)
        lengths = np.array([part.num_tokens for part in batch.scheduled], np.int64)
        query_start = np.concatenate([[0], lengths.cumsum()])
        kv_len = starts + lengths
        state_read, state_write = _states(batch)
        lists = PageLists.of(batch.scheduled, -(-kv_len // page_size))
        positions = np.arange(len(token_ids)) + np.repeat(starts - query_start[:-1], lengths)
        pages = lists.pages_at(np.repeat(np.arange(len(lengths)), lengths), positions // page_size)
        inputs = cls(
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            slots=(pages.T.astype(np.int64) * page_size + positions % page_size).T,
            wanted=np.array(wanted, np.int64),
            query_start=query_start.astype(np.int32),
            kv_len=kv_len.astype(np.int32),
            pages=lists,
            state_read=state_read,
            state_write=state_write,
            adapters=_adapters(batch),
        )
        return inputs, rows

    @classmethod
    def empty(cls, num_groups: int) -> "StepInputs":
        """Return a step without sequences, of a model with so many groups of layers."""
        none = np.zeros(0, np.int64)
        none32 = np.zeros(0, np.int32)
        slots = none if num_groups == 1 else np.zeros((0, num_groups), np.int64)
        pages = PageLists(none32, none, num_groups)
        return cls(none, none, slots, none, np.zeros(1, np.int32), none32, pages)

    def with_pictures(self, batch: Batch, encoder: PictureEncoder) -> "StepInputs":
        """Return the step of `batch` with its pictures, and with the positions that prompts with pictures have."""
        positions, pictures = encoder.of_step(batch, self.positions)
        return replace(self, positions=positions, pictures=pictures)

    @property
    def reads_pictures(self) -> bool:
        """Return whether the forward pass reads pictures, or positions in three axes, beside tokens."""
        return self.pictures is not None and self.pictures.is_read

    def written_pages(self, page_size: int) -> Sequence[int]:
        """Return the pages that the step writes to."""
        written: list[int] = np.unique(
            np.concatenate([self.slots.ravel() // page_size, self.state_write.ravel()])
        ).tolist()
        return written[written[:1] == [-1] :]  # -1: of a padding row, or in the place of a state

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

        `previous_tokens` [N], on `device`, are the tokens that the previous step has drawn, if this step begins with
        some of them. A token below 0 counts as 0.
        """
        lists = self.pages
        arrays = [getattr(self, name) for name in _COPIED]
        arrays += [lists.entries, lists.places(np.arange(len(lists.counts)), lists.width)]
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
        spans = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=False)]
        for span, array in zip(spans, arrays, strict=True):
            staged.numpy()[span] = array.reshape(-1).view(np.uint8)
        copied = staged.to(device, non_blocking=True)
        *others, entries, places = (
            copied[span].view(getattr(torch, array.dtype.name)).view(array.shape)
            for span, array in zip(spans, arrays, strict=True)
        )
        named = dict(zip(_COPIED, others, strict=True))
        tensors = StepTensors(**named, page_table=table_of(lists.shape, entries, places))
        if previous_tokens is None or self.token_ids.min() >= 0:
            return tensors
        ids = tensors.token_ids
        known = torch.where(ids < 0, previous_tokens[(~ids).clamp(min=0)].clamp(min=0), ids)
        return tensors._replace(token_ids=known)

    def run(self, model: LoadedModel, previous_tokens: Tensor | None = None) -> Tensor:
        """Compute this rank's part of the step; return logits [N, vocab] on the last stage. See `on`."""
        longest = (self.max_query_len, int(self.kv_len.max()))
        decodes = self.num_decodes
        pictures = rows_of(model, self.pictures) if self.pictures is not None else None
        chunks = int(self.kv_len[decodes:].max(initial=0))
        adapters = None if model.adapters is None else model.adapters.rows(self.adapters, self.query_start)
        on_host = torch.from_numpy(self.query_start), torch.from_numpy(self.kv_len)
        tensors = self.for_rank(model, previous_tokens)
        return tensors.run(model, *longest, decodes, pictures, chunks, adapters, on_host)

    def attention(self, tensors: "StepTensors") -> AttentionBatch:
        """Return where the rows of this step are, for attention. `tensors`: the step on a device."""
        decodes = self.num_decodes
        chunks = int(self.kv_len[decodes:].max(initial=0))
        on_host = torch.from_numpy(self.query_start), torch.from_numpy(self.kv_len)
        return tensors.attention(self.max_query_len, int(self.kv_len.max()), decodes, chunks, on_host)

    def for_rank(self, model: LoadedModel, previous_tokens: Tensor | None = None) -> "StepTensors":
        """Copy the step to the device of this rank's part of `model`; see `on`.

        Collective in a step that begins with tokens of the previous step: only the driver has `previous_tokens`, and
        the other ranks receive from it the token ids of this step.
        """
        tensors = self.on(model.device, previous_tokens)
        if self.token_ids.min() >= 0:
            return tensors
        return tensors._replace(token_ids=model.part.from_driver(tensors.token_ids))


class StepTensors(NamedTuple):
    """`StepInputs` on a device."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    query_start: Tensor
    kv_len: Tensor
    page_table: Tensor  # [S, P], or [S, G, P]
    state_read: Tensor
    state_write: Tensor

    def with_width(self, width: int) -> "StepTensors":
        """Return the tensors with a page table of zeros, `width` pages for each list."""
        return self._replace(page_table=self.page_table.new_zeros(*self.page_table.shape[:-1], width))

    def run(
        self,
        model: LoadedModel,
        max_query_len: int,
        max_kv_len: int,
        num_decodes: int,
        pictures: PictureRows | None = None,
        max_chunk_kv_len: int | None = None,
        adapters: RowAdapters | None = None,
        on_host: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        batch = self.attention(max_query_len, max_kv_len, num_decodes, max_chunk_kv_len, on_host)
        states = (self.state_read, self.state_write) if self.state_write.shape[1] else None
        return model.forward(self.token_ids, self.positions, batch, self.wanted, pictures, states, adapters)

    def attention(
        self,
        max_query_len: int,
        max_kv_len: int,
        num_decodes: int,
        max_chunk_kv_len: int | None,
        on_host: tuple[Tensor, Tensor] | None,
    ) -> AttentionBatch:
        """Return where the rows of the step are, for attention. See `AttentionBatch`."""
        return AttentionBatch(
            self.query_start,
            self.kv_len,
            self.page_table,
            self.slots,
            max_query_len,
            max_kv_len,
            num_decodes,
            on_host=on_host,
            max_chunk_kv_len=max_chunk_kv_len,
        )


_COPIED = tuple(name for name in StepTensors._fields if name != "page_table")


def _states(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the pages of every part's state before and after the step, [S, n] each; rows of -1 where there is none."""
    width = len(batch.scheduled[0].state.write)
    read, write = (np.full((len(batch.scheduled), width), -1, np.int32) for _ in range(2))
    for number, part in enumerate(batch.scheduled if width else ()):
        for table, pages in ((read, part.state.read), (write, part.state.write)):
            if len(pages):
                table[number] = pages
    return read, write


def _adapters(batch: Batch) -> Sequence[str]:
    adapters = [part.request.adapter for part in batch.scheduled]
    if not any(adapters):
        return ()
    return ["" if adapter is None else adapter.fingerprint for adapter in adapters]


@lru_cache(maxsize=16)
def _single_rows(count: int) -> Sequence[range]:
    """Return the rows of so many parts that have one each. Most steps have as many as the step before."""
    return [range(row, row + 1) for row in range(count)]


def _num_rows(part: Scheduled) -> int:
    """Return how many rows of logits a part needs: all for a prompt's logprobs; to sample, the last row and the drafts'
    rows; else 0."""
    if part.request.sampling.prompt_logprobs is not None and part.start < part.request.num_prompt_tokens:
        return part.num_tokens
    return part.samples + len(part.drafts)
