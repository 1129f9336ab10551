"""The settings that a sweep speaks for, given a target."""

from dataclasses import dataclass

from crossdock.cluster.tune.curves import Curves
from crossdock.workers.schedule.chunking import SLACK_SHARE


@dataclass(frozen=True, slots=True)
class Attainable:
    """What streams can be promised while a prompt prefills beside them. Seconds, tokens, tokens per second."""

    decodes: int
    alone_s: float | None  # a step without a chunk; None: not measured
    tpot_s: float  # the tightest target that leaves room for the smallest chunk in every step
    chunk: int  # the largest chunk inside the target asked for; 0: it is not attainable
    rate: float  # prompt tokens per second with it


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set, and what it was set for."""

    max_num_batched_tokens: int
    min_chunk_tokens: int
    streams: int  # how many running at once the floor is sized for
    is_attainable: bool  # for so many
    fixed_tokens: int  # with `chunk_policy: fixed`: the budget whose steps stay inside the target; 0: none does
    ceiling_chunk: int
    ceiling_decodes: int  # beside how many it is within 10 % of the best
    attainable: tuple[Attainable, ...]


def advise(curves: Curves, tpot_s: float, streams: int | None, page_size: int, max_num_seqs: int) -> Advice:
    """Settings for streams that must have a token every `tpot_s` seconds.

    The ceiling is the smallest chunk that even beside the most streams measured is within 10 % of the best tokens/s,
    and a token for each of `max_num_seqs` streams: a larger one gains little, and makes whoever comes meanwhile wait.
    The floor is the largest chunk that can be in every step without breaking the promise to `streams` streams (None:
    as many of those measured as the target allows), whose contexts are as deep as any measured. Both are filled to
    the same share of the target that the scheduler fills.
    """
    rows = [_attainable(curves, decodes, tpot_s, page_size) for decodes in curves.decodes if decodes]
    if not rows:
        raise ValueError("no chunk was measured beside streams: there must be one to size it for them")
    if streams is None:
        streams = max((row.decodes for row in rows if row.chunk), default=rows[0].decodes)
    chosen = next((row for row in rows if row.decodes == streams), None)
    if chosen is None:
        known = ", ".join(str(row.decodes) for row in rows)
        raise ValueError(f"streams ({streams}) must be one of those measured beside chunks: {known}")
    most = curves.decodes[-1]
    knee = curves.knee(most)
    ceiling_chunk = -(-knee // page_size) * page_size
    return Advice(
        max_num_batched_tokens=ceiling_chunk + max_num_seqs,
        min_chunk_tokens=min(max(chosen.chunk - chosen.chunk % page_size, page_size), ceiling_chunk),
        streams=streams,
        is_attainable=chosen.chunk > 0,
        fixed_tokens=chosen.chunk + streams if chosen.chunk else 0,
        ceiling_chunk=ceiling_chunk,
        ceiling_decodes=most,
        attainable=tuple(rows),
    )


def _attainable(curves: Curves, decodes: int, tpot_s: float, page_size: int) -> Attainable:
    chunk = curves.chunk_within(SLACK_SHARE * tpot_s, decodes, page_size)
    smallest = next(stall for size in curves.chunks if (stall := curves.stall(size, decodes)) is not None)
    return Attainable(
        decodes=decodes,
        alone_s=curves.stall(0, decodes),
        tpot_s=smallest / SLACK_SHARE,
        chunk=chunk,
        rate=chunk / (SLACK_SHARE * tpot_s),
    )
