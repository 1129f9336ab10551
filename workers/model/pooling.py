"""Vectors of prompts: the last hidden states of their tokens, pooled while the chunks of a prompt are computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.workers.schedule.request.batch import Batch, Scheduled


class HiddenTap:
    """Takes the last hidden states out of a model's own forward: after the final norm, before the output projection.

    transformers calls these states `last_hidden_state`. Only the last stage of a pipeline has them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.is_open = False  # whether the next forwards keep their hidden states
        self.hidden: Tensor | None = None  # [T, E] of the newest of these, in the model's dtype
        find = getattr(module, "get_decoder", None)
        decoder: Any = module if find is None else find()
        if hasattr(decoder, "lm_head") and hasattr(decoder, "model"):  # Llama 4's names the part with the projection
            decoder = decoder.model
        self.is_possible = decoder not in (None, module)  # else no part ends before the output projection
        if self.is_possible:
            decoder.register_forward_hook(self._take)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Return a context in which forwards keep their hidden states; none are kept after it."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            self.hidden = None

    def check(self) -> None:
        """Note whether the forwards since the tap was opened gave hidden states."""
        self.is_possible = self.hidden is not None

    def _take(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self.is_open:
            self.hidden = output[0][0]


@dataclass(slots=True)
class _Pooled:
    """The sum `vector` [E], in float32, of the first `num_tokens` hidden states of a prompt."""

    vector: Tensor
    num_tokens: int


class Pooler:
    """The pooled hidden states of the prompts that want a vector, on the device of the model."""

    def __init__(self) -> None:
        self._pooled: dict[str, _Pooled] = {}  # by request

    def add(self, batch: Batch, hidden: Tensor) -> None:
        """Pool the hidden states [T, E] of a step. Call in the order in which steps began."""
        start = 0
        for part in batch.scheduled:
            if part.request.sampling.pooling is not None:
                self._add(part, hidden[start : start + part.num_tokens])
            start += part.num_tokens

    @property
    def has_any(self) -> bool:
        """Return whether a request has pooled hidden states."""
        return bool(self._pooled)

    def is_finite(self, request_id: str) -> bool:
        """Return whether a request has no vector, or one without NaN and infinity. Waits for the device."""
        pooled = self._pooled.get(request_id)
        return pooled is None or bool(pooled.vector.isfinite().all())

    def take(self, request_id: str) -> bytes | None:
        """Return and drop the vector of a request, [E] float32; None: no vector is wanted. Waits for the device."""
        pooled = self._pooled.pop(request_id, None)
        if pooled is None:
            return None
        return (pooled.vector / pooled.num_tokens).cpu().numpy().astype("<f4").tobytes()

    def remove(self, request_id: str) -> None:
        self._pooled.pop(request_id, None)

    def _add(self, part: Scheduled, hidden: Tensor) -> None:
        """Pool the hidden states [N, E] of one part. After a preemption, tokens come that were pooled before."""
        request = part.request
        if request.sampling.pooling == "last":
            if part.samples:
                self._pooled[request.id] = _Pooled(hidden[-1].to(torch.float32, copy=True), 1)
            return
        pooled = self._pooled.get(request.id)
        num_before = 0 if pooled is None else pooled.num_tokens
        if part.start > num_before:  # some tokens were not computed here: no mean is better than a wrong one
            return
        added = hidden[num_before - part.start :].sum(0, dtype=torch.float32)
        vector = added if pooled is None else pooled.vector + added
        self._pooled[request.id] = _Pooled(vector, max(num_before, part.start + part.num_tokens))
