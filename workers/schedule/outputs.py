"""Append sampled tokens to a request's output, and find the token that ends the request."""

from collections.abc import Collection

from crossdock.workers.schedule.request.batch import SampledToken
from crossdock.workers.schedule.request.failures import NOT_FINITE
from crossdock.workers.schedule.request.request import FinishReason, Request, TokenDelta
from crossdock.workers.schedule.table import RequestTable


def append_sampled(
    table: RequestTable, request: Request, sampled: SampledToken, eos_token_ids: Collection[int]
) -> tuple[TokenDelta, FinishReason | None]:
    """Append accepted drafts and the token after them, up to one that ends the request.

    Returns the delta, and why the request has to end now; None: the request goes on.
    """
    delta = new_delta(request)
    reason = None
    for token in (*sampled.accepted, sampled) if sampled.accepted else (sampled,):
        if token.is_not_finite:
            delta.error = NOT_FINITE
            delta.is_not_finite = True
            reason = FinishReason.ERROR
            break
        token_id = token.token_id
        request.token_ids.append(token_id)
        delta.token_ids.append(token_id)
        if token.logprobs is not None:
            delta.logprobs = [*(delta.logprobs or ()), token.logprobs]
        if (token_id in eos_token_ids or token_id in request.stop_token_ids) and _is_stop(request, token_id):
            delta.stop_token_id = token_id
            reason = FinishReason.STOP
        elif token.ends:
            reason = FinishReason.STOP
        elif table.is_full(request):
            reason = FinishReason.LENGTH
        if token.error is not None:
            delta.error = token.error
            delta.error_field = "grammar"
            reason = FinishReason.ERROR
        if reason is not None:
            break
    return delta, reason


def new_delta(request: Request) -> TokenDelta:
    """Return a delta without tokens, after all that the request has."""
    first = len(request.token_ids) - request.num_prompt_tokens
    return TokenDelta(request.id, [], first, request.epoch, num_cached_tokens=request.num_cached_tokens)


def _is_stop(request: Request, token_id: int) -> bool:
    """Return whether the newest token of a request, an EOS or a stop token, ends it."""
    params = request.sampling
    is_heeded = not params.ignore_eos or token_id in request.stop_token_ids
    return is_heeded and request.num_output_tokens > params.min_tokens
