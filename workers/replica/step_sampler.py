"""The tokens of a step: logits in, one `SampledToken` per request out, under each request's sampling parameters and
grammar."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossdock.workers.model.grammar.state import GrammarState
from crossdock.workers.model.sampling.logprobs import logprobs_of
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, sample
from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.request import Request, Status, TokenLogprobs


@dataclass(slots=True, eq=False)
class StepSampler:
    """The sampling state of every request of one engine: its row, its grammar, its prompt's logprobs so far."""

    eos_token_ids: tuple[int, ...]
    _rows: dict[str, SampleRow] = field(default_factory=dict)  # by request
    _grammars: dict[str, GrammarState] = field(default_factory=dict)
    _prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)

    def add(self, request: Request, grammar: GrammarState | None = None) -> None:
        """Create the state of `request`; `grammar` has its output tokens already."""
        self._rows[request.id] = SampleRow(
            request.sampling, request.token_ids, request.num_prompt_tokens, self.eos_token_ids
        )
        if grammar is not None:
            self._grammars[request.id] = grammar

    def accept(self, request_id: str, token_id: int) -> None:
        """Advance the grammar of a request by a token that another replica sampled."""
        if (grammar := self._grammars.get(request_id)) is not None:
            grammar.accept(token_id)

    def remove(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self._grammars.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def take_prompt_logprobs(self, request_id: str) -> list[TokenLogprobs | None] | None:
        """Return and drop the prompt logprobs of a request; None where it wants none or had them already."""
        return self._prompt_logprobs.pop(request_id, None)

    def draw(self, batch: Batch, logits: Tensor, previous_tokens: Tensor | None = None) -> PendingTokens | None:
        """Begin to draw the tokens of `batch` on the device, without waiting for them.

        `logits`: [N, vocab]. `previous_tokens` [N'], on the device, are those of the step before, if it is in flight.
        Returns None where the host has to sample: for logprobs, and for grammars and bad words of several tokens, for
        which it needs the token before.
        """
        rows = [self._rows[part.request.id] for part in batch.scheduled]
        if not all(row.is_plain for row in rows):
            return None
        sampling = [row for part, row in zip(batch.scheduled, rows, strict=True) if part.samples]
        return PendingTokens(logits, sampling, previous_tokens)

    def sample(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> dict[str, SampledToken]:
        """Return the sampled token of each request, by id, and collect the logprobs of prompts.

        `logits`: [N, vocab]; `rows`: for each part of `batch`, which of the N are its own.
        """
        self._collect_prompt_logprobs(batch, logits, rows)
        parts = [
            (part, row[-1])
            for part, row in zip(batch.scheduled, rows, strict=True)
            if part.samples and part.request.status is not Status.FINISHED  # FINISHED: by the step before
        ]
        if not parts:
            return {}
        if len(parts) < len(logits):
            logits = logits[torch.tensor([row for _, row in parts], device=logits.device)]
        sample_rows = [self._rows[part.request.id] for part, _ in parts]
        for part, _ in parts:
            if (grammar := self._grammars.get(part.request.id)) is not None:
                self._rows[part.request.id].allowed = grammar.mask()
        sampled = {}
        for (part, _), token in zip(parts, sample(logits, sample_rows), strict=True):
            state = self._grammars.get(part.request.id)
            if state is not None:
                state.accept(token.token_id)
            ends = state is not None and state.finished
            error = state.error if state is not None else None
            sampled[part.request.id] = SampledToken(token.token_id, token.logprobs, ends, error)
        return sampled

    def _collect_prompt_logprobs(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> None:
        """The logits of token i are the distribution of token i + 1; the prompt's first token has none."""
        for part, row in zip(batch.scheduled, rows, strict=True):
            top = part.request.sampling.prompt_logprobs
            if top is None or part.start >= part.request.num_prompt_tokens or part.request.num_output_tokens:
                continue
            found = self._prompt_logprobs.setdefault(part.request.id, [None])
            known = part.request.prompt_token_ids[part.start + 1 : part.start + part.num_tokens + 1]
            if known and len(found) == part.start + 1:  # else computed before a preemption
                found += logprobs_of(logits[row.start : row.start + len(known)], known, top)
