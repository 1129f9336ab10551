"""The life of each request on this replica: waiting, chunks, first token, gaps between tokens, end.

Times are seconds on the engine's clock. The engine's thread writes; other threads may read at any time. Readers copy in
one operation, and a finished timeline never changes again.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from crossdock.kvtransfer.events import Figures
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import FinishReason, Request, Status, TokenDelta
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Leg, Submission

KEEP_FINISHED = 512  # requests; 27 MiB if every one had KEEP_CHUNKS chunks (tracemalloc), else far less
KEEP_CHUNKS = 128  # of one request, the newest
_PROMPT_LENGTHS = (128, 512, 2048, 8192, 32768)  # tokens


def prompt_length_bucket(num_tokens: int) -> str:
    """Return the upper end, in tokens, of the range of prompt lengths that metrics count together."""
    return next((str(limit) for limit in _PROMPT_LENGTHS if num_tokens <= limit), "inf")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk and the step that computed it."""

    start: int  # tokens of context before it
    num_tokens: int
    started: float
    waited_s: float  # since the request arrived, or since its previous chunk or token
    step_s: float
    predicted_s: float  # for the step; 0 before the engine is warm
    num_decodes: int  # streams that shared the step
    reason: str  # why this request was in it
    limit: str  # why the step's chunks were not larger


class Counts(NamedTuple):
    """How far a request has come, in tokens."""

    cached: int
    computed: int
    output: int
    preemptions: int
    drafted: int = 0
    accepted: int = 0  # of the drafted ones
    charged_s: float = 0.0  # predicted seconds that count for its tenant; 0 where tenants are not told apart


class Gaps(NamedTuple):
    """The gaps between a stream's tokens, in seconds."""

    number: int = 0
    p50: float = 0.0
    longest: float = 0.0


_NO_COUNTS = Counts(0, 0, 0, 0)
_NO_GAPS = Gaps()


@dataclass(slots=True, eq=False)
class Timeline:
    """One request, from arrival to end."""

    number: int  # on this replica, from 1
    id: str
    request_id: str  # the client's name for all that its HTTP request led to
    owner: str
    leg: Leg  # the part of the request that this replica was given
    epoch: int  # of that placement
    slo: SloClass
    num_prompt_tokens: int
    arrived: float
    arrived_unix: float  # seconds since 1970
    ttft_deadline: float  # seconds after arrival
    predicted_ttft: float | None  # seconds
    request: Request | None  # None once finished: its tokens are not stored
    adapter: str = ""  # name of the LoRA adapter; empty: none
    weights: list[str] = field(default_factory=list)  # names of the updates whose weights made its tokens, in order
    start_s: float = 0.0  # seconds that it waited for its model to start, before it arrived here
    alternatives: Mapping[str, float] = field(default_factory=dict)  # of the router: see `Submission`
    transfers: list[dict[str, Any]] = field(default_factory=list)  # as JSON; several if it was placed here again
    chunks: deque[Chunk] = field(default_factory=lambda: deque(maxlen=KEEP_CHUNKS))
    num_chunks: int = 0
    first_chunk: float | None = None
    last_chunk: float = 0.0  # the end of its step
    begun: float | None = None  # time of the first token made here
    first_token: float | None = None  # likewise, if that is the request's first: else another replica made it
    last_token: float = 0.0
    gap: float | None = None  # before the newest token; None while that is the first made here
    is_gap_shared: bool = False  # a chunk was computed between these two tokens
    gaps: "array[float]" = field(default_factory=lambda: array("f"))  # all gaps in seconds, until the request ends
    num_shared_gaps: int = 0
    num_later_tokens: int = 0  # after all gaps: with drafts, several may follow one
    finish_reason: FinishReason | None = None
    ended: float = 0.0
    freed_bytes: int | None = None  # of KV pages, by an abort
    _final_counts: Counts = _NO_COUNTS
    _final_gaps: Gaps = _NO_GAPS

    def tokens(self, count: int, now: float, last_chunks: float) -> None:
        """Record `count` tokens of one step at `now`. `last_chunks`: when the newest step with a chunk ended."""
        if self.begun is None:
            self.begun = now
            if self.request is not None and self.request.num_output_tokens == 1:
                self.first_token = now
        else:
            self.gap = gap = now - self.last_token
            self.gaps.append(gap)
            self.num_later_tokens += count
            self.is_gap_shared = shared = last_chunks > self.last_token
            if shared:
                self.num_shared_gaps += 1
        self.last_token = now

    def finish(self, reason: FinishReason, now: float) -> None:
        """End the timeline: nothing changes after this."""
        self._final_counts, self._final_gaps = self.counts(), self.gap_summary()
        self.ended = now
        self.finish_reason = reason
        self.request = None
        self.gaps = array("f")

    def counts(self) -> Counts:
        """Return how far the request has come."""
        request = self.request
        if request is None:
            return self._final_counts
        made = request.num_cached_tokens, request.num_computed_tokens, request.num_output_tokens
        return Counts(*made, request.num_preemptions, *request.drafts, request.charged_s)

    @property
    def state(self) -> str:
        """Return the state in one word: waiting, prefilling, decoding, sending, receiving, or finished."""
        request = self.request
        if request is None or self.finish_reason is not None:
            return "finished"
        if request.status is Status.WAITING:
            return "waiting"
        if request.status is Status.HELD:
            return "sending" if request.leg is Leg.SEND else "receiving"
        return "decoding" if request.is_decoding else "prefilling"

    @property
    def progressed(self) -> float:
        """Return the time of the request's last chunk or token; before the first, of its arrival."""
        return max(self.arrived, self.last_chunk, self.last_token)

    @property
    def ttft(self) -> float | None:
        """Return the seconds from arrival to the first token; None: no first token yet, or another replica made it."""
        return None if self.first_token is None else self.first_token - self.arrived

    def gap_summary(self) -> Gaps:
        """Return number, median and longest of the gaps."""
        gaps = self.gaps[:]
        return Gaps(len(gaps), median(gaps), max(gaps)) if gaps else self._final_gaps

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds per token after the first made here; None before the second."""
        count = self.num_later_tokens
        return (self.last_token - self.begun) / count if self.begun is not None and count else None

    def ttft_met(self, now: float) -> bool | None:
        """Return whether the first token was in time; None: not known yet, or another replica makes that token."""
        if self.ttft is not None:
            return self.ttft <= self.ttft_deadline
        if self.begun is not None or self.leg is Leg.RECEIVE:
            return None  # the replica that makes the first token reports it
        return False if now - self.arrived > self.ttft_deadline else None

    def tpot_met(self) -> bool | None:
        """Return whether tokens after the first were as fast as promised, on average; None without any."""
        return None if self.tpot is None else self.tpot <= self.slo.tpot_s

    def summary(self, now: float, *, sees_all: bool = True) -> dict[str, Any]:
        """Return the timeline as JSON without single chunks. Times are seconds after arrival.

        `sees_all`: whether the reader may see the requests of others. If not, counts of their work are None.
        """
        counts = self.counts()
        gaps = self.gap_summary()
        is_live = self.finish_reason is None
        end = now if is_live else self.ended
        queued = (end if self.first_chunk is None else self.first_chunk) - self.arrived
        return {
            "id": self.id,
            "request_id": self.request_id,
            "slo_class": self.slo.name,
            "adapter": self.adapter or None,
            "weight_versions": list(self.weights),
            "leg": self.leg.value,
            "epoch": self.epoch,
            "state": self.state,
            "arrived": round(self.arrived_unix, 3),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": counts.cached,
            "num_computed_tokens": counts.computed,
            "num_output_tokens": counts.output,
            "model_start_s": _rounded(self.start_s),
            "queued_s": _rounded(queued),
            "waiting_s": _rounded(now - self.progressed) if is_live else None,
            "num_chunks": self.num_chunks,
            "num_preemptions": counts.preemptions,
            "num_drafted_tokens": counts.drafted,
            "num_accepted_tokens": counts.accepted,
            "charged_s": _rounded(counts.charged_s) if sees_all else None,  # streams of all share what a step takes
            "predicted_first_token_s": _rounded(self.predicted_ttft),
            "first_token_s": _rounded(self.ttft),
            "alternatives_s": dict(self.alternatives),
            "num_decode_steps": gaps.number,
            "num_shared_decode_steps": self.num_shared_gaps if sees_all else None,
            "tpot_s": _rounded(self.tpot),
            "gap_p50_s": _rounded(gaps.p50) if gaps.number else None,
            "gap_max_s": _rounded(gaps.longest) if gaps.number else None,
            "ttft_met": self.ttft_met(end),
            "tpot_met": self.tpot_met(),
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
            "ended_s": None if is_live else _rounded(end - self.arrived),
            "freed_bytes": self.freed_bytes,
            "transfers": list(self.transfers),
        }

    def whole(self, now: float, *, sees_all: bool = True) -> dict[str, Any]:
        """Return `summary` with the newest `KEEP_CHUNKS` of its `num_chunks` chunks."""
        chunks = [self._chunk(chunk, sees_all) for chunk in list(self.chunks)]
        return self.summary(now, sees_all=sees_all) | {"chunks": chunks}

    def _chunk(self, chunk: Chunk, sees_all: bool) -> dict[str, Any]:
        return {
            "started_s": _rounded(chunk.started - self.arrived),
            "waited_s": _rounded(chunk.waited_s),
            "start": chunk.start,
            "num_tokens": chunk.num_tokens,
            "step_s": _rounded(chunk.step_s),
            "predicted_s": _rounded(chunk.predicted_s) if sees_all else None,
            "num_decodes": chunk.num_decodes if sees_all else None,
            "reason": chunk.reason,
            "limit": chunk.limit if sees_all else None,  # it names the number of streams
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """The timelines that one step changed, and how."""

    chunks: Sequence[tuple[Timeline, Chunk]]
    tokens: Sequence[Timeline]  # timelines of requests that got tokens
    num_tokens: int
    finished: Sequence[Timeline]


class Timelines:
    """The timelines of all live requests and of the last `KEEP_FINISHED`."""

    def __init__(self, classes: Sequence[SloClass], unix_at_zero: float, keep_finished: int = KEEP_FINISHED) -> None:
        """`unix_at_zero`: the Unix time at which the engine's clock read 0."""
        self._classes = {slo.name: slo for slo in classes}
        self._unix_at_zero = unix_at_zero
        self._live: dict[str, Timeline] = {}
        self._finished: deque[Timeline] = deque(maxlen=keep_finished)
        self._num_added = 0
        self._last_chunks = float("-inf")  # when the newest step with chunks ended

    # -- written by the engine's thread --------------------------------------------------------------------------------

    def add(self, submission: Submission, request: Request, arrived: float, seconds_alone: float) -> None:
        """Start the timeline of a request.

        Args:
            submission: what the ingress sent.
            request: the scheduler's request.
            arrived: when the replica received the submission, which may be a step before the scheduler did.
            seconds_alone: predicted seconds to the first token on an idle replica.
        """
        slo = self._classes[submission.slo_class]
        self._num_added += 1
        self._live[submission.id] = Timeline(
            number=self._num_added,
            id=submission.id,
            request_id=submission.request_id,
            owner=submission.key_owner,
            adapter="" if submission.adapter is None else submission.adapter.name,
            leg=submission.leg,
            epoch=submission.epoch,
            slo=slo,
            num_prompt_tokens=request.num_prompt_tokens,
            arrived=arrived,
            arrived_unix=self._unix_at_zero + arrived,
            ttft_deadline=slo.ttft_deadline(seconds_alone),
            predicted_ttft=request.predicted_ttft,
            request=request,
            start_s=submission.start_s,
            alternatives=dict(submission.alternatives),
        )

    def stepped(
        self, batch: Batch, deltas: Sequence[TokenDelta], started: float, seconds: float, predicted: float
    ) -> Progress:
        """Record a step that began at `started` and took `seconds`, of `predicted`."""
        ended = started + seconds
        chunks = []
        for part in batch.scheduled[batch.num_decodes :]:
            timeline = self._live[part.request.id]
            chunk = Chunk(
                start=part.start,
                num_tokens=part.num_tokens,
                started=started,
                waited_s=max(started - timeline.progressed, 0.0),
                step_s=seconds,
                predicted_s=predicted,
                num_decodes=batch.num_decodes,
                reason=part.reason,
                limit=batch.limit,
            )
            timeline.chunks.append(chunk)
            timeline.num_chunks += 1
            timeline.last_chunk = ended
            if timeline.first_chunk is None:
                timeline.first_chunk = started
            chunks.append((timeline, chunk))
        if chunks:
            self._last_chunks = ended
        tokens = []
        finished = []
        for delta in deltas:
            timeline = self._live[delta.request_id]
            if delta.token_ids:
                if delta.weights and timeline.weights[-1:] != [delta.weights]:
                    timeline.weights.append(delta.weights)
                timeline.tokens(len(delta.token_ids), ended, self._last_chunks)
                tokens.append(timeline)
            if delta.finish_reason is not None:
                self._finish(timeline, delta.finish_reason, ended)
                finished.append(timeline)
        return Progress(chunks, tokens, sum([len(delta.token_ids) for delta in deltas]), finished)

    def transferred(self, request_id: str, direction: str, figures: Figures, outcome: str, now: float) -> None:
        """Record a transfer of the request's pages that ended at `now`: `sent`, `received`, or a `fetched` prefix.

        The last message of a transfer may come after the request's own end: all pages were there before.
        """
        timeline = self._live.get(request_id)
        if timeline is None:
            timeline = next((each for each in reversed(self._finished) if each.id == request_id), None)
        if timeline is None:
            return
        timeline.transfers.append(
            {
                "direction": direction,
                "outcome": outcome,
                "ended_s": _rounded(now - timeline.arrived),
                "total_s": _rounded(figures.total_seconds),
                "handshake_s": _rounded(figures.handshake_seconds),
                "grant_wait_s": _rounded(figures.grant_wait_seconds),
                "num_bytes": figures.num_bytes,
                "num_pages": figures.num_pages,
                "num_writes": figures.num_writes,
                "write_s": _rounded(figures.write_seconds) if direction == "sent" else None,
                "overlap": round(figures.overlap, 4) if direction == "sent" else None,
            }
        )

    def ended(self, deltas: Sequence[TokenDelta], now: float) -> Progress:
        """Record requests that ended outside a step: the step raised, or their pages have been shipped."""
        return self.stepped(Batch((), 0), deltas, now, 0.0, 0.0)

    def aborted(self, request_id: str, now: float, freed_bytes: int) -> Timeline:
        """Record an abort, which freed so many bytes of KV pages."""
        timeline = self._live[request_id]
        timeline.freed_bytes = freed_bytes
        self._finish(timeline, FinishReason.ABORT, now)
        return timeline

    def _finish(self, timeline: Timeline, reason: FinishReason, now: float) -> None:
        timeline.finish(reason, now)
        self._finished.append(timeline)  # before it leaves `_live`: a reader finds it in one of them at least
        del self._live[timeline.id]

    # -- read by any thread --------------------------------------------------------------------------------------------

    def find(self, request_id: str, owner: str | None, now: float) -> list[dict[str, Any]]:
        """Return the timelines of a client's HTTP request on this replica as JSON, oldest first.

        `owner`: whose timelines are shown; None: all.
        """
        known = dict.fromkeys(
            [*list(self._live.values()), *list(self._finished)]
        )  # one may just have moved from the first to the second
        found = [each for each in known if each.request_id == request_id and owner in (None, each.owner)]
        found.sort(key=lambda timeline: timeline.arrived)
        return [timeline.whole(now, sees_all=owner is None) for timeline in found]

    def ids(self, owner: str) -> set[str]:
        """Return the ids of an owner's unfinished requests."""
        return {timeline.id for timeline in list(self._live.values()) if timeline.owner == owner}

    def live(self, owner: str | None, now: float) -> list[dict[str, Any]]:
        """Return the timelines of unfinished requests as JSON, oldest first, without their chunks."""
        found = [timeline for timeline in list(self._live.values()) if owner in (None, timeline.owner)]
        return [timeline.summary(now, sees_all=owner is None) for timeline in found]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
