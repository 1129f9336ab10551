"""The tokens of a step: logits in, one `SampledToken` per request out, under each request's sampling parameters and
grammar."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from crossdock.workers.model.grammar.state import GrammarState
from crossdock.workers.model.grammar.step_masks import StepMasks
from crossdock.workers.model.pooling import Pooler
from crossdock.workers.model.sampling.devices import copy_to
from crossdock.workers.model.sampling.logprobs import PendingLogprobs
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, sample
from crossdock.workers.schedule.request.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.request import Request, Status, TokenDelta, TokenLogprobs
from crossdock.workers.schedule.request.submission import SamplingParams

_ENDED = SampleRow(SamplingParams(temperature=0.0), (), 0)  # in place of a request that ended while it was computed


_PromptPart = tuple[Scheduled, PendingLogprobs]  # a part whose prompt's log-probabilities are wanted


class _DrawnStep(NamedTuple):
    """The tokens of a step, which the device has begun to draw."""

    parts: Sequence[Scheduled]  # the parts of the batch that sample
    tokens: PendingTokens
    prompts: Sequence[_PromptPart]
    grammars: Collection[str]  # requests that have one
    accept: Callable[[Scheduled, Sequence[SampledToken]], SampledToken]
    keep: Callable[[Sequence[_PromptPart]], None]
    without_broken: Callable[[dict[str, SampledToken]], dict[str, SampledToken]]

    @property
    def on_device(self) -> Tensor:
        """The token ids [N] on the device."""
        return self.tokens.on_device

    def read(self, void: Collection[str] = ()) -> tuple[dict[str, SampledToken], set[str]]:
        """Wait for the tokens, and advance the grammars of their requests. See `Drawn.read`."""
        tokens, late = self.tokens.read()
        self.keep(self.prompts)
        finished = Status.FINISHED
        sampled: dict[str, SampledToken] = {
            part.request.id: self.accept(part, [token]) if part.request.id in self.grammars else token
            for part, token in zip(self.parts, tokens, strict=True)
            if part.request.status is not finished and part.request.id not in void
        }
        return self.without_broken(sampled), {self.parts[i].request.id for i in late}


@dataclass(slots=True, eq=False)
class StepSampler:
    """The sampling state of every request of one engine: its row, its grammar, its prompt's logprobs so far."""

    eos_token_ids: tuple[int, ...]
    pooler: Pooler = field(default_factory=Pooler)
    _rows: dict[str, SampleRow] = field(default_factory=dict)  # by request
    _masks: StepMasks = field(default_factory=StepMasks)
    _reading: set[str] = field(default_factory=set)  # requests whose masks depend on the tokens before
    _grammars: dict[str, GrammarState] = field(default_factory=dict)
    _prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    _broken: set[str] = field(default_factory=set)  # requests with a prompt's log-probability that is not finite

    def add(self, request: Request, grammar: GrammarState | None = None) -> None:
        """Create the state of `request`; `grammar` has its output tokens already."""
        row = SampleRow(request.sampling, request.token_ids, request.num_prompt_tokens, self.eos_token_ids)
        self._rows[request.id] = row
        if row.reads_tokens:
            self._reading.add(request.id)
        if grammar is not None:
            self._grammars[request.id] = grammar

    def accept(self, request_id: str, token_id: int) -> None:
        """Advance the grammar of a request by a token that another replica sampled."""
        if (grammar := self._grammars.get(request_id)) is not None:
            grammar.accept(token_id)

    def remove(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self._reading.discard(request_id)
        self._grammars.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)
        self._broken.discard(request_id)
        self.pooler.remove(request_id)

    def complete(self, deltas: Sequence[TokenDelta]) -> None:
        """Add log-probabilities and vectors of prompts to the first delta after them, and drop them here."""
        if not (self._prompt_logprobs or self.pooler.has_any):
            return
        for delta in deltas:
            delta.prompt_logprobs = self._prompt_logprobs.pop(delta.request_id, None)
            delta.embedding = self.pooler.take(delta.request_id)

    def pool(self, batch: Batch, hidden: Tensor) -> None:
        """Pool the hidden states [T, E] of a step. Call in the order in which steps began."""
        self.pooler.add(batch, hidden)

    def draw(
        self, batch: Batch, logits: Tensor, rows: Sequence[range], previous_tokens: Tensor | None = None
    ) -> _DrawnStep:
        """Begin to draw the tokens of `batch` on the device, without waiting for them. See `sample`.

        `previous_tokens` [N'], on the device, are those of the step before, if it is in flight.
        Where `reads_tokens`, requests have their tokens of the step before. A request may have ended with it.
        """
        prompts = self._begin_prompts(batch, logits, rows)
        sampling = [(part, row) for part, row in zip(batch.scheduled, rows, strict=True) if part.samples]
        parts = [part for part, _ in sampling]
        if len(parts) < len(logits):
            last = torch.tensor([row.stop - 1 for _, row in sampling], dtype=torch.int64)
            logits = logits[copy_to(logits.device, last)]
        finished = Status.FINISHED
        masks = self._masks_of(part for part in parts if part.request.status is not finished)
        own = [_ENDED if part.request.status is finished else self._sample_rows(part, masks)[0] for part in parts]
        tokens = PendingTokens(logits, own, previous_tokens)
        return _DrawnStep(parts, tokens, prompts, self._grammars.keys(), self._accept, self._keep, self._without_broken)

    def reads_tokens(self, batch: Batch) -> bool:
        """Return whether masks of `batch` depend on tokens of the step before, which then must be on the host."""
        return bool(self._reading) and any(part.request.id in self._reading for part in batch.scheduled)

    def sample(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> dict[str, SampledToken]:
        """Return the sampled token of each request, by id, and collect the logprobs of prompts.

        `logits`: [N, vocab]; `rows`: for each part of `batch`, which of the N are its own.
        """
        self._keep(self._begin_prompts(batch, logits, rows))
        finished = Status.FINISHED  # by the step before
        parts = [
            (part, row.stop - 1)
            for part, row in zip(batch.scheduled, rows, strict=True)
            if part.samples and part.request.status is not finished
        ]
        if not parts:
            return {}
        if self._grammars or batch.has_drafts:
            return self._without_broken(self._sample_verified(parts, logits))
        ids = [part.request.id for part, _ in parts]
        tokens = sample(_rows_at([last for _, last in parts], logits), [self._rows[each] for each in ids])
        return self._without_broken(dict(zip(ids, tokens, strict=True)))

    def _sample_verified(self, parts: Sequence[tuple[Scheduled, int]], logits: Tensor) -> dict[str, SampledToken]:
        """Sample as `sample` does where rows have masks of grammars, or parts have several rows.

        `parts`: with the last of their rows of logits.
        """
        masks = self._masks_of(part for part, _ in parts)
        sample_rows = [self._sample_rows(part, masks) for part, _ in parts]
        wanted = [
            last - len(part.drafts) + number
            for (part, last), own in zip(parts, sample_rows, strict=True)
            for number in range(len(own))
        ]
        drawn = iter(sample(_rows_at(wanted, logits), list(chain.from_iterable(sample_rows))))
        return {
            part.request.id: self._accept(part, list(islice(drawn, len(own))))
            for (part, _), own in zip(parts, sample_rows, strict=True)
        }

    def forced(self, request_ids: Sequence[str]) -> dict[str, Sequence[int]]:
        """Return the next tokens of each request whose grammar allows no others; requests without any are left out."""
        if not self._grammars:
            return {}
        grammars = [(request_id, self._grammars.get(request_id)) for request_id in request_ids]
        forced = {request_id: grammar.forced() for request_id, grammar in grammars if grammar is not None}
        return {request_id: tokens for request_id, tokens in forced.items() if tokens}

    def vetted(self, request_id: str, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts up to the first that the request's grammar refuses."""
        grammar = self._grammars.get(request_id)
        return drafts if grammar is None else drafts[: grammar.num_allowed(drafts)]

    def _masks_of(self, parts: Iterable[Scheduled]) -> dict[str, Tensor]:
        """Return the masks of the grammars of parts without drafts, by request."""
        if not self._grammars:
            return {}
        found = [(part.request.id, self._grammars.get(part.request.id)) for part in parts if not part.drafts]
        states = {request_id: state for request_id, state in found if state is not None}
        return dict(zip(states, self._masks.of(list(states.values())), strict=True))

    def _sample_rows(self, part: Scheduled, masks: Mapping[str, Tensor]) -> list[SampleRow]:
        """Return the rows to sample: of the newest token, and of each draft that the grammar allows.

        `masks`: of requests whose parts have no drafts.
        """
        row = self._rows[part.request.id]
        grammar = self._grammars.get(part.request.id)
        if not part.drafts:
            if grammar is not None:
                row.allowed = masks[part.request.id]
            return [row]
        if grammar is None:
            return [row.after(part.drafts[:number], None) for number in range(len(part.drafts) + 1)]
        return [row.after(part.drafts[:number], mask) for number, mask in enumerate(grammar.masks(part.drafts))]

    def _accept(self, part: Scheduled, drawn: Sequence[SampledToken]) -> SampledToken:
        """Return the accepted drafts of a part, and the first token that is no draft.

        A row's token counts as long as all drafts before it were drawn. `drawn`: of the part's rows, in order.
        """
        grammar = self._grammars.get(part.request.id)
        accepted: list[SampledToken] = []
        newest = drawn[0]
        ends = False
        error = None
        for number, newest in enumerate(drawn, 1):
            if newest.is_not_finite:
                return SampledToken(0, is_not_finite=True, accepted=accepted)
            if grammar is not None:
                grammar.accept(newest.token_id)
                ends = grammar.finished
                error = grammar.error
            is_draft = number < len(drawn) and newest.token_id == part.drafts[number - 1]
            if not is_draft or ends or error is not None:
                break
            accepted.append(newest)
        return SampledToken(newest.token_id, newest.logprobs, ends, error, accepted=accepted)

    def _begin_prompts(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> list[_PromptPart]:
        """Begin to compute prompts' logprobs: of token i + 1 from the logits of token i. The first one has none."""
        begun = []
        for part, row in zip(batch.scheduled[batch.num_decodes :], rows[batch.num_decodes :], strict=True):
            top = part.request.sampling.prompt_logprobs
            request = part.request
            if top is None or part.start >= request.num_prompt_tokens or request.num_output_tokens:
                continue
            known = request.submission.prompt_token_ids[part.start + 1 : part.start + part.num_tokens + 1]
            own = logits[row.start : row.start + len(known)]
            mode = request.sampling.logprobs_mode
            begun.append((part, PendingLogprobs(own, known, top, as_logits=mode.endswith("logits"))))
        return begun

    def _keep(self, prompts: Sequence[_PromptPart]) -> None:
        """Wait for the logprobs of prompts. Those from before a preemption count; those of ended requests do not."""
        for part, pending in prompts:
            if part.request.id in self._rows and part.request.status is not Status.FINISHED:
                found = self._prompt_logprobs.setdefault(part.request.id, [None])
                if len(found) == part.start + 1:
                    found += (new := pending.read())
                    if not all(each.is_finite for each in new):
                        self._broken.add(part.request.id)

    def _without_broken(self, sampled: dict[str, SampledToken]) -> dict[str, SampledToken]:
        """Return sampled tokens by request, without the token where a vector or log-probability of the prompt is NaN or
        infinite. For the vectors, which are read next anyway, the host waits."""
        if self._broken or self.pooler.has_any:
            for request_id in sampled:
                if request_id in self._broken or not self.pooler.is_finite(request_id):
                    sampled[request_id] = SampledToken(0, is_not_finite=True)
        return sampled


def _rows_at(numbers: Sequence[int], logits: Tensor) -> Tensor:
    """Return the rows of `logits` with these numbers, in their order. As many as there are: all."""
    return logits if len(numbers) == len(logits) else logits[torch.tensor(numbers, device=logits.device)]
