"""The settings that follow from a sweep and a target."""

from dataclasses import dataclass

from crossdock.cluster.tune.curves import Curves
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.policies.chunking import SLACK_SHARE


@dataclass(frozen=True, slots=True)
class Attainable:
    """The target that a number of streams can meet while a prompt prefills in the same steps."""

    decodes: int  # in a step
    alone_s: float | None  # seconds of a step without a chunk; None: not measured
    tpot_s: float  # seconds: the tightest target that leaves room for the smallest chunk in every step
    chunk: int  # tokens of the largest chunk inside the target asked for; 0: the target is not attainable
    rate: float  # prompt tokens per second with that chunk


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended settings and the reasons for them."""

    max_num_batched_tokens: int
    min_chunk_tokens: int  # 0: needs no setting, since no stream runs beside chunks
    streams: int  # in a step, for which min_chunk_tokens is sized
    is_attainable: bool  # the target, for that many streams
    fixed_tokens: int  # with `chunk_policy: fixed`: the budget whose steps stay inside the target; 0: none does
    ceiling_chunk: int  # tokens: larger chunks gain less than 10 %
    ceiling_decodes: int  # streams beside which the ceiling was measured
    attainable: tuple[Attainable, ...]


def advise(
    curves: Curves, tpot_s: float, streams: int | None, page_size: int, max_num_seqs: int, role: Role = "mixed"
) -> Advice:
    """Return settings for streams that must have a token every `tpot_s` seconds.

    max_num_batched_tokens (the ceiling): the smallest chunk that is within 10 % of the best tokens/s beside the most
    streams measured, and one token for each of `max_num_seqs` streams. A larger chunk gains little, and requests that
    arrive during its step wait longer.

    min_chunk_tokens (the floor): the largest chunk that can be in every step while `streams` streams meet the target.
    `streams` None: the most streams measured that can meet it. Their contexts are the longest measured.

    A step may fill the share SLACK_SHARE of the target, as in the scheduler. No stream runs on a replica of the role
    `prefill`: its ceiling is that of chunks alone, and it needs no floor.

    Raises:
        ValueError: no chunk was measured beside streams, or none beside that many.
    """
    if role == "prefill":
        ceiling = _ceiling_chunk(curves, 0, page_size)
        return Advice(ceiling + max_num_seqs, 0, 0, True, 0, ceiling, 0, ())
    rows = [_attainable(curves, decodes, tpot_s, page_size) for decodes in curves.decodes if decodes]
    if not rows:
        raise ValueError("no chunk was measured beside streams: measure at least one")
    if streams is None:
        streams = max((row.decodes for row in rows if row.chunk), default=rows[0].decodes)
    chosen = next((row for row in rows if row.decodes == streams), None)
    if chosen is None:
        known = ", ".join(str(row.decodes) for row in rows)
        raise ValueError(f"streams ({streams}) must be one of those measured beside chunks: {known}")
    most = curves.decodes[-1]
    ceiling_chunk = _ceiling_chunk(curves, most, page_size)
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


def _ceiling_chunk(curves: Curves, decodes: int, page_size: int) -> int:
    """Return the tokens of the smallest chunk that is near the best beside so many streams, rounded up to pages."""
    return -(-curves.knee(decodes) // page_size) * page_size


def _attainable(curves: Curves, decodes: int, tpot_s: float, page_size: int) -> Attainable:
    chunk = curves.chunk_within(SLACK_SHARE * tpot_s, decodes, page_size)
    smallest = next(stall for size in curves.chunks if (stall := curves.stall(size, decodes)) is not None)
    return Attainable(
        decodes=decodes,
        alone_s=curves.stall(0, decodes),
        tpot_s=smallest / SLACK_SHARE,
        chunk=chunk,
        rate=curves.depth * chunk / (SLACK_SHARE * tpot_s),
    )
