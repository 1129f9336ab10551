"""Ask the router about a request, and give each of its replicas a leg."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from crossdock.router.actions import ReplicaLost, Submit
from crossdock.router.fleet import Fleet
from crossdock.router.placement import Placement
from crossdock.router.query import Query
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.page_hashes import PageHash, hash_pages
from crossdock.workers.schedule.request.submission import Leg, Overloaded, Submission

_NO_EQUAL = (
    "no replica is left with the weights that made the tokens so far; others would change what follows "
    "(router.unlike_weights: mixed lets them)"
)


def query_of(
    submission: Submission,
    output: Sequence[int],
    page_size: int,
    *,
    may_ship: bool,
    may_refuse: bool,
    weights: str = "",
) -> Query:
    """Describe to the router what is left of a request after the `output` that its client has.

    `weights`: see `Query`.
    """
    token_ids = [*submission.prompt_token_ids, *output] if output else submission.prompt_token_ids
    hashes: Sequence[PageHash] = ()
    if not submission.sampling.needs_whole_prompt:
        hashes = hash_pages(token_ids, page_size, submission.page_salt, items=submission.items)
    return Query(
        submission.id,
        len(token_ids),
        hashes,
        submission.slo_class,
        max(submission.sampling.max_tokens - len(output), 0),
        submission.tenant,
        submission.weight,
        may_ship=may_ship,
        may_refuse=may_refuse,
        is_prompt_alone=submission.sampling.pooling is not None,
        weights=weights,
        adapter="" if submission.adapter is None else submission.adapter.fingerprint,
        adapter_weights=0 if submission.adapter is None else submission.adapter.num_weights,
        items=_items_of(submission.items),
    )


def choose_replicas(
    fleet: Fleet,
    query: Query,
    now: float,
    refusals: Mapping[str, Exception],
    lost: Collection[str],
    *,
    is_accepted: bool,
) -> Placement:
    """Return the best placement on replicas that have not refused. Replicas where the request was `lost` come last.

    Raises:
        Overloaded: no replica would keep the promise. Has the shortest wait of all refusals. Not raised for a request
            that was accepted.
        ReplicaLost: no replica is left.
    """
    overloaded = [refusal for refusal in refusals.values() if isinstance(refusal, Overloaded)]
    try:
        try:
            return fleet.choose(query, now, {*refusals, *lost})
        except LookupError:
            return fleet.choose(query, now, {*refusals})
    except Overloaded as refusal:
        overloaded.append(refusal)
    except LookupError:
        if not refusals:
            is_alone = query.weights and len(fleet)
            raise ReplicaLost(_NO_EQUAL if is_alone else "no replica is up; the model may still be loading") from None
    if overloaded and not is_accepted:
        raise min(overloaded, key=lambda refusal: refusal.retry_after) from None
    losses = (refusal for refusal in refusals.values() if isinstance(refusal, ReplicaLost))
    why = _NO_EQUAL if query.weights else "no replica takes the rest of the request"
    raise next(losses, ReplicaLost(why)) from None


def submits_of(placement: Placement, submission: Submission) -> list[Submit]:
    """Return the legs of one attempt. Legs that receive come before the legs that send to them."""
    decode = placement.decode
    prefill = placement.prefill
    computing = submission
    if placement.alternatives:
        ways = tuple(placement.alternatives.items())
        computing = replace(submission, source_tokens=placement.source_tokens, alternatives=ways)
    if prefill is None:
        return [Submit(decode, computing, source=placement.source)]
    receive = replace(submission, leg=Leg.RECEIVE)
    send = replace(computing, leg=Leg.SEND)
    return [Submit(decode, receive, prefill), Submit(prefill, send, decode, placement.source)]


def _items_of(items: Sequence[Item]) -> list[tuple[int, int, int]]:
    """Return (end, rows, parts) of the last one of all equal items: a replica without its pages encodes it once."""
    return sorted({item.content_hash: (item.end, item.num_embedding_tokens, item.num_parts) for item in items}.values())
