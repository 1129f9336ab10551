"""A batch as tensors: one flat forward pass over any mix of chunks and decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.workers.model import PagedModel
from crossdock.workers.scheduler import Batch, Scheduled


@dataclass(frozen=True, slots=True)
class Runner:
    """Executes batches on one model."""

    model: PagedModel
    page_size: int

    def execute(self, batch: Batch) -> tuple[Tensor, list[range]]:
        """Logits [N, vocab], and for each part of the batch which of the N rows are its own: the last token's where
        it samples, every token's where prompt logprobs are wanted, else none."""
        parts = batch.scheduled
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        rows: list[range] = []
        for part in parts:
            end = part.start + part.num_tokens
            first = len(token_ids)
            token_ids += part.request.token_ids[part.start : end]
            positions += range(part.start, end)
            slots += self._slots(part)
            rows.append(range(len(wanted), len(wanted) + _num_rows(part)))
            wanted += range(first + part.num_tokens - _num_rows(part), first + part.num_tokens)
        device = self.model.device
        attention = AttentionBatch(
            query_start=_int32(list(accumulate((part.num_tokens for part in parts), initial=0)), device),
            kv_len=_int32([part.start + part.num_tokens for part in parts], device),
            page_table=self._page_table(parts).to(device),
            slots=torch.tensor(slots, device=device),
            max_query_len=max(part.num_tokens for part in parts),
            max_kv_len=max(part.start + part.num_tokens for part in parts),
        )
        logits = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            attention,
            torch.tensor(wanted, dtype=torch.int64, device=device),
        )
        return logits, rows

    def _slots(self, part: Scheduled) -> list[int]:
        size, pages = self.page_size, part.pages
        return [
            pages[position // size] * size + position % size
            for position in range(part.start, part.start + part.num_tokens)
        ]

    def _page_table(self, parts: Sequence[Scheduled]) -> Tensor:
        """[S, P] int32, with as many pages as this step's tokens reach, short rows filled with page 0."""
        reach = [-(-(part.start + part.num_tokens) // self.page_size) for part in parts]
        width = max(reach)
        return torch.tensor(
            [list(part.pages[:n]) + [0] * (width - n) for part, n in zip(parts, reach, strict=True)], dtype=torch.int32
        )


def _num_rows(part: Scheduled) -> int:
    """A prompt's logprobs need the logits of every token; sampling needs the last one's."""
    if part.request.sampling.prompt_logprobs is not None and part.start < part.request.num_prompt_tokens:
        return part.num_tokens
    return int(part.samples)


def _int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
