"""Append sampled tokens to a request's output, and find the one that ends it."""

from collections.abc import Collection

from crossdock.workers.schedule.batch import SampledToken
from crossdock.workers.schedule.request import FinishReason, Request, TokenDelta
from crossdock.workers.schedule.table import RequestTable


def append_sampled(
    table: RequestTable, request: Request, sampled: SampledToken, eos_token_ids: Collection[int]
) -> tuple[TokenDelta, FinishReason | None]:
    """Append accepted drafts and the token after them, up to one that ends the request.

    Returns the delta, and why the request has to end now; None: it goes on.
    """
    delta = new_delta(request, [])
    reason = None
    for token in (*sampled.accepted, sampled):
        request.token_ids.append(token.token_id)
        delta.token_ids.append(token.token_id)
        if token.logprobs is not None:
            delta.logprobs = [*(delta.logprobs or ()), token.logprobs]
        is_stop = _is_stop(request, token.token_id, eos_token_ids)
        if is_stop:
            delta.stop_token_id = token.token_id
        if token.error is not None:
            reason, delta.error = FinishReason.ERROR, token.error
        elif is_stop or token.ends:
            reason = FinishReason.STOP
        elif table.is_full(request):
            reason = FinishReason.LENGTH
        if reason is not None:
            break
    return delta, reason


def new_delta(request: Request, token_ids: list[int]) -> TokenDelta:
    """Return the delta of a request whose newest tokens are `token_ids`."""
    first = request.num_output_tokens - len(token_ids)
    delta = TokenDelta(request.id, token_ids, first, request.epoch)
    delta.finish_reason, delta.num_cached_tokens = request.finish_reason, request.num_cached_tokens
    return delta


def _is_stop(request: Request, token_id: int, eos_token_ids: Collection[int]) -> bool:
    params = request.sampling
    is_eos = token_id in eos_token_ids and not params.ignore_eos
    return (is_eos or token_id in request.stop_token_ids) and request.num_output_tokens > params.min_tokens
