"""Say whose fault it is that a request ends with an error: the request's own, the model's, or the server's."""

from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField

NOT_FINITE = "the model computed NaN or infinity: its weights are damaged, or its dtype cannot hold its numbers"


class NotFinite(RuntimeError):
    """The model computed NaN or infinity for the request: its weights, or the sizes of its numbers, are not right.

    The same request gives the same again, so that a client must not repeat it.
    """


def failure_of(delta: TokenDelta) -> Exception:
    """Return the error of a request whose last delta is `delta`, with FinishReason.ERROR.

    InvalidField: the request itself is at fault, such as the adapter or the grammar that it names. NotFinite: the
    model. Any other error is the server's, and clients do not see its reason.
    """
    reason = delta.error or "the engine gave no reason"
    if delta.error_field:
        return InvalidField(reason, delta.error_field)
    return NotFinite(reason) if delta.is_not_finite else RuntimeError(reason)
