"""What became of each request on this replica: when it waited, each chunk, its first token, its gaps, how it ended.

Times are seconds on the engine's clock. The engine's thread writes; other threads may read at any moment: what they
copy they copy in one operation, and what has finished never changes again.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from crossdock.kvtransfer.events import Figures
from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.request import FinishReason, Leg, Request, Status, Submission, TokenDelta
from crossdock.workers.schedule.slo import SloClass

KEEP_FINISHED = 512  # requests; 27 MiB if every one had KEEP_CHUNKS chunks (tracemalloc), else far less
KEEP_CHUNKS = 128  # of one request, the newest
_PROMPT_LENGTHS = (128, 512, 2048, 8192, 32768)  # tokens


def prompt_length_bucket(num_tokens: int) -> str:
    """The upper end, in tokens, of the range of prompt lengths that metrics count together."""
    return next((str(limit) for limit in _PROMPT_LENGTHS if num_tokens <= limit), "inf")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk and the step that carried it."""

    start: int  # tokens of context before it
    num_tokens: int
    started: float
    waited_s: float  # since the request arrived, or since its previous chunk or token
    step_s: float
    predicted_s: float  # of the step; 0 before the engine is warm
    num_decodes: int  # streams that shared the step
    reason: str  # why this request was in it
    limit: str  # why the step's chunks were not larger


class Counts(NamedTuple):
    """How far a request has come, in tokens."""

    cached: int
    computed: int
    output: int
    preemptions: int


class Gaps(NamedTuple):
    """The gaps between a stream's tokens, in seconds."""

    number: int = 0
    p50: float = 0.0
    longest: float = 0.0


_NO_COUNTS, _NO_GAPS = Counts(0, 0, 0, 0), Gaps()


@dataclass(slots=True, eq=False)
class Timeline:
    """One request, from arrival to end."""

    number: int  # on this replica, from 1
    id: str
    request_id: str  # the client's name for all that its HTTP request led to
    tenant: str
    leg: Leg  # the part of the request that this replica was given
    epoch: int  # of that placement
    slo: SloClass
    num_prompt_tokens: int
    arrived: float
    arrived_unix: float  # seconds since 1970
    ttft_deadline: float  # seconds after arrival
    predicted_ttft: float | None  # seconds
    request: Request | None  # while it lives: a finished one's tokens are not kept
    transfers: list[dict[str, Any]] = field(default_factory=list)  # as JSON; one, unless it was placed here twice
    chunks: deque[Chunk] = field(default_factory=lambda: deque(maxlen=KEEP_CHUNKS))
    num_chunks: int = 0
    first_chunk: float | None = None
    last_chunk: float = 0.0  # the end of its step
    begun: float | None = None  # when the first token that was made here came
    first_token: float | None = None  # likewise, if that was the first of all: else another replica has made it
    last_token: float = 0.0
    gap: float | None = None  # before the newest token; None while that is the first here
    is_gap_shared: bool = False  # a chunk was computed between the two tokens
    gaps: "array[float]" = field(default_factory=lambda: array("f"))  # all of them, while the request lives
    shared_gaps: tuple[int, float] = (0, 0.0)  # how many, and their sum in seconds
    finish_reason: FinishReason | None = None
    ended: float = 0.0
    freed_bytes: int | None = None  # of KV pages, by an abort
    _final_counts: Counts = _NO_COUNTS
    _final_gaps: Gaps = _NO_GAPS

    def token(self, now: float, last_chunks: float) -> None:
        """A token came at `now`; `last_chunks`: when the newest step that carried any chunk ended."""
        if self.begun is None:
            self.begun = now
            if self.request is not None and self.request.num_output_tokens == 1:
                self.first_token = now
        else:
            self.gap = gap = now - self.last_token
            self.gaps.append(gap)
            self.is_gap_shared = shared = last_chunks > self.last_token
            if shared:
                count, seconds = self.shared_gaps
                self.shared_gaps = count + 1, seconds + gap
        self.last_token = now

    def finish(self, reason: FinishReason, now: float) -> None:
        """Nothing changes any more."""
        self._final_counts, self._final_gaps = self.counts(), self.gap_summary()
        self.ended = now
        self.finish_reason = reason
        self.request = None
        self.gaps = array("f")

    def counts(self) -> Counts:
        request = self.request
        if request is None:
            return self._final_counts
        return Counts(
            request.num_cached_tokens, request.num_computed_tokens, request.num_output_tokens, request.num_preemptions
        )

    @property
    def state(self) -> str:
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
        """When it last got a chunk or a token; before that, when it arrived."""
        return max(self.arrived, self.last_chunk, self.last_token)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    def gap_summary(self) -> Gaps:
        gaps = self.gaps[:]
        return Gaps(len(gaps), median(gaps), max(gaps)) if gaps else self._final_gaps

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first that was made here; None before the second."""
        count = len(self.gaps) or self._final_gaps.number
        return None if self.begun is None or not count else (self.last_token - self.begun) / count

    def tpot_by_sharing(self) -> dict[bool, float]:
        """Mean gap in seconds, apart for those in which a chunk was computed (True) and the others, of a finished
        request."""
        count, num_shared, shared = self._final_gaps.number, *self.shared_gaps
        alone = max((self.tpot or 0.0) * count - shared, 0.0)
        means = {True: shared / num_shared} if num_shared else {}
        return means | ({False: alone / (count - num_shared)} if count > num_shared else {})

    def ttft_met(self, now: float) -> bool | None:
        """Whether the first token came in time; None while that is open, and where another replica makes it."""
        if self.ttft is not None:
            return self.ttft <= self.ttft_deadline
        if self.begun is not None or self.leg is Leg.RECEIVE:
            return None  # it is told where the first token was made
        return False if now - self.arrived > self.ttft_deadline else None

    def tpot_met(self) -> bool | None:
        """Whether the tokens after the first came, on average, as fast as promised; None without any."""
        return None if self.tpot is None else self.tpot <= self.slo.tpot_s

    def summary(self, now: float) -> dict[str, Any]:
        """As JSON, without the single chunks. Times are seconds after arrival."""
        counts, gaps = self.counts(), self.gap_summary()
        is_live = self.finish_reason is None
        end = now if is_live else self.ended
        queued = (end if self.first_chunk is None else self.first_chunk) - self.arrived
        return {
            "id": self.id,
            "request_id": self.request_id,
            "slo_class": self.slo.name,
            "leg": self.leg.value,
            "epoch": self.epoch,
            "state": self.state,
            "arrived": round(self.arrived_unix, 3),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": counts.cached,
            "num_computed_tokens": counts.computed,
            "num_output_tokens": counts.output,
            "queued_s": _rounded(queued),
            "waiting_s": _rounded(now - self.progressed) if is_live else None,
            "num_chunks": self.num_chunks,
            "num_preemptions": counts.preemptions,
            "predicted_first_token_s": _rounded(self.predicted_ttft),
            "first_token_s": _rounded(self.ttft),
            "num_decode_steps": gaps.number,
            "num_shared_decode_steps": self.shared_gaps[0],
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

    def whole(self, now: float) -> dict[str, Any]:
        """As JSON, with what is known of its chunks: the newest `KEEP_CHUNKS` of `num_chunks`."""
        chunks = [self._chunk(chunk) for chunk in list(self.chunks)]
        return self.summary(now) | {"chunks": chunks}

    def _chunk(self, chunk: Chunk) -> dict[str, Any]:
        return {
            "started_s": _rounded(chunk.started - self.arrived),
            "waited_s": _rounded(chunk.waited_s),
            "start": chunk.start,
            "num_tokens": chunk.num_tokens,
            "step_s": _rounded(chunk.step_s),
            "predicted_s": _rounded(chunk.predicted_s),
            "num_decodes": chunk.num_decodes,
            "reason": chunk.reason,
            "limit": chunk.limit,
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step did to the requests in it."""

    chunks: Sequence[tuple[Timeline, Chunk]]
    tokens: Sequence[Timeline]  # that got a token
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
        """`arrived`: when the replica heard of it, which may be a step before the scheduler did. `seconds_alone`: what
        its first token takes on an idle replica."""
        slo = self._classes[submission.slo_class]
        self._num_added += 1
        self._live[submission.id] = Timeline(
            number=self._num_added,
            id=submission.id,
            request_id=submission.request_id,
            tenant=submission.tenant,
            leg=submission.leg,
            epoch=submission.epoch,
            slo=slo,
            num_prompt_tokens=request.num_prompt_tokens,
            arrived=arrived,
            arrived_unix=self._unix_at_zero + arrived,
            ttft_deadline=slo.ttft_deadline(seconds_alone),
            predicted_ttft=request.predicted_ttft,
            request=request,
        )

    def stepped(
        self, batch: Batch, deltas: Sequence[TokenDelta], started: float, seconds: float, predicted: float
    ) -> Progress:
        """Takes in a step that began at `started`."""
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
        tokens, finished = [], []
        for delta in deltas:
            timeline = self._live[delta.request_id]
            if delta.token_ids:
                timeline.token(ended, self._last_chunks)
                tokens.append(timeline)
            if delta.finish_reason is not None:
                self._finish(timeline, delta.finish_reason, ended)
                finished.append(timeline)
        return Progress(chunks, tokens, finished)

    def transferred(self, request_id: str, is_sent: bool, figures: Figures, outcome: str, now: float) -> None:
        """A transfer of its pages has ended."""
        timeline = self._live.get(request_id)
        if timeline is None:
            return
        timeline.transfers.append(
            {
                "direction": "sent" if is_sent else "received",
                "outcome": outcome,
                "ended_s": _rounded(now - timeline.arrived),
                "total_s": _rounded(figures.total_seconds),
                "handshake_s": _rounded(figures.handshake_seconds),
                "grant_wait_s": _rounded(figures.grant_wait_seconds),
                "num_bytes": figures.num_bytes,
                "num_pages": figures.num_pages,
                "num_writes": figures.num_writes,
                "write_s": _rounded(figures.write_seconds) if is_sent else None,
                "overlap": round(figures.overlap, 4) if is_sent else None,
            }
        )

    def ended(self, deltas: Sequence[TokenDelta], now: float) -> Progress:
        """These end outside a step: it raised, or their pages have been shipped."""
        return self.stepped(Batch((), 0), deltas, now, 0.0, 0.0)

    def aborted(self, request_id: str, now: float, freed_bytes: int) -> Timeline:
        timeline = self._live[request_id]
        timeline.freed_bytes = freed_bytes
        self._finish(timeline, FinishReason.ABORT, now)
        return timeline

    def _finish(self, timeline: Timeline, reason: FinishReason, now: float) -> None:
        timeline.finish(reason, now)
        self._finished.append(timeline)  # before it leaves the live: a reader finds it in one place at least
        del self._live[timeline.id]

    # -- read by any thread --------------------------------------------------------------------------------------------

    def find(self, request_id: str, tenant: str | None, now: float) -> list[dict[str, Any]]:
        """All that the client's request `request_id` led to here, oldest first, as JSON. `tenant`: only what is its;
        None sees all."""
        known = dict.fromkeys([*list(self._live.values()), *list(self._finished)])  # one may just have moved
        found = [it for it in known if it.request_id == request_id and tenant in (None, it.tenant)]
        return [timeline.whole(now) for timeline in sorted(found, key=lambda it: it.arrived)]

    def live(self, tenant: str | None, now: float) -> list[dict[str, Any]]:
        """The requests in flight, oldest first, without their chunks."""
        found = [it for it in list(self._live.values()) if tenant in (None, it.tenant)]
        return [timeline.summary(now) for timeline in found]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
