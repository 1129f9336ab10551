"""Log-probabilities or logits of sampled and of prompt tokens: as the model gave them, or as tokens are drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.workers.model.sampling.devices import HostCopy, copy_to, log_softmax
from crossdock.workers.model.sampling.heads import kept_scores
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.schedule.request.request import TokenLogprobs
from crossdock.workers.schedule.request.submission import LogprobsMode

LOGITS_AT_ONCE = 1 << 22  # logits held as float32 at once while a prompt is scored: 16 MiB


class PendingLogprobs:
    """Log-probabilities of tokens, computed on the device while the host does other work.

    Works through a few rows at a time: a long prompt's logits as float32 would not fit beside the model.
    """

    def __init__(
        self,
        logits: Tensor,
        token_ids: Sequence[int] | Tensor,
        top_n: int,
        listed_ids: Sequence[int] = (),
        *,
        as_logits: bool = False,
    ) -> None:
        """Begin with the log-probability and rank of each row's token, and its `top_n` likeliest tokens.

        `logits`: [N, V]. With `listed_ids`, these tokens in their order take the place of the likeliest ones.
        `as_logits`: logits take the place of log-probabilities.
        """
        num_rows, vocab_size = logits.shape
        known = token_ids if isinstance(token_ids, Tensor) else torch.tensor(token_ids, dtype=torch.int64)
        chosen_ids = copy_to(logits.device, known)[:, None]
        listed = copy_to(logits.device, torch.tensor(listed_ids)) if listed_ids else None
        self._blocks: list[HostCopy] = []
        step = max(1, LOGITS_AT_ONCE // vocab_size)
        for start in range(0, num_rows, step):
            logprobs = logits[start : start + step].float()
            logprobs = logprobs if as_logits else log_softmax(logprobs)
            ids = chosen_ids[start : start + step]
            chosen = logprobs.gather(-1, ids)
            ranks = (logprobs > chosen).sum(-1) + 1
            if listed is not None:
                top_ids = listed.expand(len(logprobs), -1)
                tops = logprobs.gather(-1, top_ids)
            else:
                top_ids, tops = _likeliest(logprobs, min(top_n, vocab_size))
            self._blocks.append(HostCopy(ids.squeeze(-1), chosen.squeeze(-1), ranks, top_ids, tops))

    def read(self) -> list[TokenLogprobs]:
        """Wait for the device; return the answer of each row."""
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(row_ids, row_tops, strict=True)))
            for block in self._blocks
            for token_id, logprob, rank, row_ids, row_tops in zip(*block.read(), strict=True)
        ]


class SampledLogprobs:
    """The log-probabilities of the rows that ask for them, computed on the device while the host does other work.

    Rows that want the same alternatives are computed together, so that no other row decides which of several equally
    likely alternatives a row lists.
    """

    def __init__(
        self, logits: Tensor, token_ids: Tensor, rows: Sequence[SampleRow], previous_tokens: Tensor | None = None
    ) -> None:
        """Begin. `logits`: [N, V]; `token_ids`: [N], below 0 where a token is not known yet."""
        self._rows = rows
        self._asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        self._groups: list[tuple[list[int], PendingLogprobs]] = []
        if self._asking:
            at = copy_to(logits.device, torch.tensor(self._asking))
            self._logits = logits[at]
            self._groups = self._begin(copy_to(logits.device, token_ids)[at].clamp(min=0), previous_tokens)

    def read(self, token_ids: Sequence[int] | None = None) -> dict[int, TokenLogprobs]:
        """Wait for the device; return the answers by row. `token_ids` [N]: the tokens, if some were not known."""
        if token_ids is not None and self._asking:
            self._groups = self._begin(torch.tensor([max(token_ids[i], 0) for i in self._asking]), None)
        return {i: answer for group, found in self._groups for i, answer in zip(group, found.read(), strict=True)}

    def _begin(self, token_ids: Tensor, previous_tokens: Tensor | None) -> list[tuple[list[int], PendingLogprobs]]:
        """Begin with the tokens of the rows that ask, alike ones together, some rows at a time."""
        by_wish: dict[tuple[LogprobsMode, int, tuple[int, ...]], list[int]] = {}
        for place, i in enumerate(self._asking):
            params = self._rows[i].params
            wish = params.logprobs_mode, params.logprobs or 0, params.logprob_token_ids
            by_wish.setdefault(wish, []).append(place)
        begun = []
        at_once = max(1, LOGITS_AT_ONCE // self._logits.shape[-1])
        for (mode, top_n, listed_ids), group in by_wish.items():
            for some in (group[start : start + at_once] for start in range(0, len(group), at_once)):
                at = torch.tensor(some)
                scores = self._logits[copy_to(self._logits.device, at)]
                own = [self._asking[place] for place in some]
                if mode.startswith("processed"):
                    scores = kept_scores(scores, [self._rows[i] for i in own], previous_tokens)
                chosen = token_ids[copy_to(token_ids.device, at)]
                found = PendingLogprobs(scores, chosen, top_n, listed_ids, as_logits=mode.endswith("logits"))
                begun.append((own, found))
        return begun


def _likeliest(logprobs: Tensor, top_n: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [N, top_n] of the likeliest tokens; among equal ones the lower id comes first.

    Torch orders them: for a long prompt with 20 alternatives, Python took as long as half of the forward pass.
    """
    tops, top_ids = logprobs.topk(top_n)
    top_ids, by_id = top_ids.sort(dim=-1)
    tops, by_value = tops.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return top_ids.gather(-1, by_value), tops
