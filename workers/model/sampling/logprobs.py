"""Log-probabilities or logits of sampled and of prompt tokens: as the model gave them, or as tokens are drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.workers.model.sampling.heads import kept_scores
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.schedule.request import TokenLogprobs
from crossdock.workers.schedule.submission import LogprobsMode

LOGITS_AT_ONCE = 1 << 22  # logits held as float32 at once while a prompt is scored: 16 MiB


def logprobs_of(
    logits: Tensor,
    token_ids: Sequence[int] | Tensor,
    top_n: int,
    listed_ids: Sequence[int] = (),
    *,
    as_logits: bool = False,
) -> list[TokenLogprobs]:
    """Return, per row of `logits` [N, V], the log-probability and rank of its token, and the `top_n` likeliest tokens.

    With `listed_ids`, these tokens in their order take the place of the likeliest ones. `as_logits`: logits take the
    place of log-probabilities.
    Works through a few rows at a time: a long prompt's logits as float32 would not fit beside the model.
    """
    num_rows, vocab_size = logits.shape
    chosen_ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    answer: list[TokenLogprobs] = []
    step = max(1, LOGITS_AT_ONCE // vocab_size)
    for start in range(0, num_rows, step):
        logprobs = logits[start : start + step].float()
        logprobs = logprobs if as_logits else logprobs.log_softmax(-1)
        ids = chosen_ids[start : start + step]
        chosen = logprobs.gather(-1, ids)
        ranks = (logprobs > chosen).sum(-1) + 1
        if listed_ids:
            top_ids = torch.tensor(listed_ids, device=logits.device).expand(len(logprobs), -1)
            tops = logprobs.gather(-1, top_ids)
        else:
            top_ids, tops = _likeliest(logprobs, min(top_n, vocab_size))
        answer += [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(row_ids, row_tops, strict=True)))
            for token_id, logprob, rank, row_ids, row_tops in zip(
                ids.squeeze(-1).tolist(),
                chosen.squeeze(-1).tolist(),
                ranks.tolist(),
                top_ids.tolist(),
                tops.tolist(),
                strict=True,
            )
        ]
    return answer


def sampled_logprobs(logits: Tensor, token_ids: Sequence[int], rows: Sequence[SampleRow]) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows that asked for them, by row index.

    Rows that want the same alternatives are computed together, so that no other row decides which of several equally
    likely alternatives a row lists.
    """
    by_wish: dict[tuple[LogprobsMode, int, tuple[int, ...]], list[int]] = {}
    for i, row in enumerate(rows):
        params = row.params
        if params.logprobs is not None:
            by_wish.setdefault((params.logprobs_mode, params.logprobs, params.logprob_token_ids), []).append(i)
    answer: dict[int, TokenLogprobs] = {}
    at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    for (mode, top_n, listed_ids), group in by_wish.items():
        for some in (group[start : start + at_once] for start in range(0, len(group), at_once)):
            scores = logits[some]
            if mode.startswith("processed"):
                scores = kept_scores(scores, [rows[i] for i in some])
            chosen = [token_ids[i] for i in some]
            found = logprobs_of(scores, chosen, top_n, listed_ids, as_logits=mode.endswith("logits"))
            answer.update(zip(some, found, strict=True))
    return answer


def _likeliest(logprobs: Tensor, top_n: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [N, top_n] of the likeliest tokens; among equal ones the lower id comes first.

    Torch orders them: for a long prompt with 20 alternatives, Python took as long as half of the forward pass.
    """
    tops, top_ids = logprobs.topk(top_n)
    top_ids, by_id = top_ids.sort(dim=-1)
    tops, by_value = tops.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return top_ids.gather(-1, by_value), tops
