"""The life of one request: where it is placed, which token comes next, where it goes on after a loss, when it ends.

Sans-IO: answers of replicas, tokens, losses and the time go in; submissions, aborts and tokens for the client come out.
The dispatcher drives this with real replicas, the simulator with simulated ones.

A request is tried in attempts, each with a number of its own. An attempt goes to one replica, or to two: a prefill
replica computes the prompt and the first token, a decode replica receives the KV pages and makes the other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias

from crossdock.router.fleet import Fleet
from crossdock.router.placement import Placement, Query
from crossdock.workers.schedule.pages import PageHash, hash_pages
from crossdock.workers.schedule.request import FinishReason, Leg, Overloaded, Submission, TokenDelta

MOST_PLACEMENTS = 4  # of one request, refusals apart; the last two on one replica alone, whatever the pools


class ReplicaLost(RuntimeError):
    """A replica does not answer any more, or none is up."""


class SuspectRequest(RuntimeError):
    """The processes of several replicas ended while they worked on the request: it is not tried again.

    The client must not repeat it either: it may be what ended them."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long replicas are waited for, in seconds."""

    silence_s: float = 10.0  # for the answer to a submission; and for a message, even an empty one, of a live replica
    answer_s: float = 5.0  # for the answer to anything else: a scrape must not wait for a replica that hangs
    patience_s: float = 5.0  # for a token, at least, before the replica is asked for progress
    stuck_s: float = 120.0  # for a step, while the replica answers that it has the request: a step may take a minute
    rejoin_s: float = 1.0  # until a lost replica that is still a member is tried again


DEFAULT_TIMEOUTS = Timeouts()


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit one leg of an attempt to `replica`. `submission.epoch` is the number of the attempt."""

    replica: str
    submission: Submission
    peer: str | None = None  # the replica of the other leg


@dataclass(frozen=True, slots=True)
class Accepted:
    """Every replica of the attempt has taken its leg."""


@dataclass(frozen=True, slots=True)
class Detach:
    """`replica` has nothing more to do for this attempt. Comes once for each leg that was submitted."""

    replica: str
    attempt: int
    is_running: bool  # it may hold the request: abort it


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """Call `place` once all aborts before this are answered: an abort names no attempt, so that one that came late
    would end the next attempt."""

    loss: ReplicaLost | None  # that made it necessary; None: a replica refused


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask `replica` whether it has the request, and pass its answer to `progress`."""

    replica: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request has ended with this error."""

    error: Exception


Action: TypeAlias = Submit | Accepted | Detach | PlaceAgain | Ask | Fail | TokenDelta
"""A `TokenDelta` is for the client; with a finish reason it is the last action."""


class RequestLife:
    """One request from its arrival to its end, with all of its bookkeeping in the router's `Fleet`.

    The driver calls `place` first and carries out what each call returns, in order. It calls `tick` at `deadline`, and
    `close` when the client is gone. Events of older attempts change nothing. All times are seconds on one clock.
    """

    def __init__(
        self,
        submission: Submission,
        fleet: Fleet,
        now: float,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        most_placements: int = MOST_PLACEMENTS,
    ) -> None:
        self.submission = submission
        self.output: list[int] = []  # the tokens that the client was given
        self.attempt = -1  # the number of the last attempt
        self.placement: Placement | None = None  # of the last attempt
        self.query: Query | None = None  # of the last attempt; None: the output has changed since
        self.is_over = False
        self._fleet = fleet
        self._timeouts = timeouts
        self._most_placements = most_placements
        self._num_losses = 0
        self._lost: set[str] = set()  # decode replicas that the request was lost at: they are chosen last
        self._refusals: dict[str, Overloaded | ReplicaLost] = {}  # by replica, since the last loss
        self._working: list[str] = []  # replicas of this attempt that are not detached, the decode replica first
        self._unanswered: list[str] = []  # those of them that have neither taken nor refused their leg
        self._prefill: str | None = None  # the prefill replica of this attempt, until it has shipped or is lost
        self._early: list[tuple[str, TokenDelta]] = []  # by sender; each came before a token that goes before it
        self._is_computed = False  # the prompt, in this attempt
        self._is_asked = False  # for progress
        self._turns: tuple[int | None, float] | None = None  # the last answer about progress, and when first given
        self._patience = 0.0  # seconds until the next token, before progress is asked for
        self.deadline = now + self._timeouts.silence_s

    # -- attempts ----------------------------------------------------------------------------------------------------

    def place(self, now: float) -> list[Action]:
        """Choose the replicas of the next attempt, book the request there, and submit. Fails where none is left."""
        if self.is_over:
            return []
        if self.query is None:
            self.query = self._make_query()
        try:
            placement = self.placement = self._choose(self.query, now)
        except (Overloaded, ReplicaLost) as error:
            return self._fail(error)
        self._fleet.book(self.query, placement, now)
        self.attempt += 1
        self._is_computed, self._is_asked, self._turns = False, False, None
        self._patience = max(self._timeouts.patience_s, 2 * placement.predicted_ttft)
        self.deadline = now + self._timeouts.silence_s
        submission = self.submission
        if self.attempt:
            output = tuple(self.output)
            submission = replace(submission, epoch=self.attempt, output_token_ids=output, may_refuse=not output)
        decode, prefill = placement.decode, placement.prefill
        self._prefill = prefill
        self._working = [decode] if prefill is None else [decode, prefill]
        self._unanswered = [*self._working]
        if prefill is None:
            return [Submit(decode, submission)]
        receive, send = replace(submission, leg=Leg.RECEIVE), replace(submission, leg=Leg.SEND)
        return [Submit(decode, receive, prefill), Submit(prefill, send, decode)]

    def taken(self, replica: str, attempt: int, sequence: int, now: float) -> list[Action]:
        """A replica has taken its leg; its live profiles after number `sequence` include the request."""
        if attempt != self.attempt or replica not in self._working:
            return []
        self._fleet.taken(self.submission.id, replica, sequence)
        return self._answered(replica, now)

    def refused(
        self, replica: str, attempt: int, error: Overloaded | ValueError | ReplicaLost, now: float
    ) -> list[Action]:
        """A replica has not taken its leg. Overloaded: another may; ValueError: none would; ReplicaLost: no answer."""
        if attempt != self.attempt or replica not in self._working:
            return []
        if isinstance(error, ValueError):
            return self._fail(error, replica)
        if self._unanswered:
            self._refusals[replica] = error
        return self._answered(replica, now)

    def lost(self, replica: str, attempt: int, error: ReplicaLost, now: float) -> list[Action]:
        """A replica does not answer any more. Without its prefill replica an attempt goes on: the decode replica has
        the pages, or computes those that have not arrived."""
        if attempt != self.attempt or replica not in self._working:
            return []
        if self._unanswered:
            return self.refused(replica, attempt, error, now)
        if replica == self._prefill:
            return self._end_prefill(True, now)
        return self._lose(error, now)

    def shipped(self, replica: str, attempt: int, now: float) -> list[Action]:
        """The prefill replica has sent all pages, or need not any more: nothing else comes from it."""
        if attempt != self.attempt or replica != self._prefill:
            return []
        return self._end_prefill(False, now)

    def close(self) -> list[Action]:
        """The client is gone. Does nothing where the request has ended."""
        return self._end(None)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def tokens(self, replica: str, delta: TokenDelta, now: float) -> list[Action]:
        """A replica has sent tokens, or the end of its leg. Returns those that the client does not have, in order."""
        if delta.epoch != self.attempt or replica not in self._working:
            return []
        if self._is_computed and delta.first == len(self.output) and not delta.finish_reason and not self._early:
            self._is_asked, self.deadline = False, now + self._patience  # nearly every token: short for its sake
            self.output += delta.token_ids
            return [delta]
        if self._unanswered:
            self._early.append((replica, delta))
            return []
        if delta.finish_reason is FinishReason.SHIPPED:
            return self.shipped(replica, delta.epoch, now)
        if not self._is_computed:
            assert self.placement is not None
            self._is_computed = True
            self._patience = max(self._timeouts.patience_s, 20 * self.placement.predicted_gap)
            self._fleet.first_token(self.submission.id, now)
        self._is_asked, self.deadline = False, now + self._patience
        if delta.first > len(self.output):
            self._early.append((replica, delta))
            return self._check_gap(now)
        return [*self._emit(replica, delta), *self._check_gap(now)]

    def advance(self, token_ids: Sequence[int]) -> None:
        """Add tokens of a running stream, none its first or last: the same as `tokens` for each. For the simulator,
        which takes many steps at once."""
        self.output += token_ids

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Act where `deadline` has passed. Between two attempts this does nothing: the driver has to call `place`."""
        if now < self.deadline or not self._working:
            return []
        if self._unanswered:
            actions: list[Action] = []
            for replica in [*self._unanswered]:
                why = f"replica {replica} did not take the request within {self._timeouts.silence_s:.3g} s"
                actions += self.refused(replica, self.attempt, ReplicaLost(why), now)
            return actions
        decode = self._working[0]
        if self._is_asked:
            return self._lose(ReplicaLost(f"replica {decode} does not answer about {self.submission.id}"), now)
        self._is_asked = True
        self.deadline = now + self._timeouts.answer_s
        return [Ask(decode)]

    def progress(self, attempt: int, turns: int | None, now: float) -> list[Action]:
        """The replica that was asked has looked for work `turns` times; None: it does not have the request."""
        if attempt != self.attempt or not self._is_asked:
            return []
        self._is_asked = False
        decode, request_id = self._working[0], self.submission.id
        if self._turns is None or self._turns[0] != turns:
            self._turns = turns, now
            if turns is None:  # its last message may be on the way
                self._patience = self._timeouts.patience_s
        elif turns is None:
            return self._lose(ReplicaLost(f"replica {decode} does not have {request_id} any more"), now)
        elif now - self._turns[1] > self._timeouts.stuck_s:
            why = f"replica {decode} has made no step for {now - self._turns[1]:.0f} s"
            return self._lose(ReplicaLost(why), now)
        self.deadline = now + self._patience
        return []

    # -- steps -------------------------------------------------------------------------------------------------------

    def _make_query(self) -> Query:
        """Describe to the router what is left of the request."""
        submission, output = self.submission, self.output
        token_ids = [*submission.prompt_token_ids, *output] if output else submission.prompt_token_ids
        hashes: Sequence[PageHash] = ()
        if submission.sampling.prompt_logprobs is None:  # else cached pages are of no use: all logits are wanted
            hashes = hash_pages(token_ids, self._fleet.page_size, submission.cache_salt)
        return Query(
            submission.id,
            len(token_ids),
            hashes,
            submission.slo_class,
            max(submission.sampling.max_tokens - len(output), 0),
            may_ship=self._num_losses < self._most_placements - 2,
            may_refuse=not output,
        )

    def _choose(self, query: Query, now: float) -> Placement:
        """Return the best placement on replicas that have not refused.

        Raises:
            Overloaded: no replica would keep the promise; of all refusals, the one with the shortest wait.
            ReplicaLost: no replica is left.
        """
        overloaded = [refusal for refusal in self._refusals.values() if isinstance(refusal, Overloaded)]
        try:
            try:
                return self._fleet.choose(query, now, {*self._refusals, *self._lost})
            except LookupError:
                return self._fleet.choose(query, now, self._refusals)
        except Overloaded as refusal:
            overloaded.append(refusal)
        except LookupError:
            if not self._refusals:
                raise ReplicaLost("no replica is up; the model may still be loading") from None
        if overloaded:
            raise min(overloaded, key=lambda refusal: refusal.retry_after) from None
        raise next(iter(self._refusals.values())) from None

    def _answered(self, replica: str, now: float) -> list[Action]:
        """Begin to stream where every replica has taken its leg; place again where one has not."""
        if replica not in self._unanswered:
            return []  # it has answered before
        self._unanswered.remove(replica)
        if self._unanswered:
            return []
        if not self._refusals.keys().isdisjoint(self._working):
            self.deadline = now + self._timeouts.answer_s
            return [*self._give_up(), PlaceAgain(None)]
        self.deadline = now + self._patience
        actions: list[Action] = [Accepted()]
        waiting, self._early = self._early, []
        for sender, delta in waiting:
            actions += self.tokens(sender, delta, now)
        return actions

    def _emit(self, replica: str, delta: TokenDelta) -> list[Action]:
        """Give the client what a delta adds to the output, and end the request where the delta does."""
        if delta.finish_reason is FinishReason.ERROR:
            return self._fail(RuntimeError(delta.error), replica)
        fresh = _unseen(delta, len(self.output))
        self.output += fresh.token_ids
        return [fresh] if fresh.finish_reason is None else [*self._end(replica), fresh]

    def _check_gap(self, now: float) -> list[Action]:
        """Give the client the early tokens that are next. Where the token before them went with the prefill replica,
        the attempt is lost too."""
        actions: list[Action] = []
        while self._early and self._early[0][1].first <= len(self.output):
            actions += self._emit(*self._early.pop(0))
        if self._early and self._prefill is None:
            why = "the first token was lost with the replica that had computed it"
            actions += self._lose(ReplicaLost(why), now)
        return actions

    def _end_prefill(self, is_running: bool, now: float) -> list[Action]:
        assert self._prefill is not None
        prefill, self._prefill = self._prefill, None
        self._working.remove(prefill)
        return [Detach(prefill, self.attempt, is_running), *self._check_gap(now)]

    def _lose(self, error: ReplicaLost, now: float) -> list[Action]:
        """Place the request again, to go on after the tokens that the client has. None of these is repeated or changed:
        each depends on the seed and its position alone."""
        assert self.placement is not None
        self._num_losses += 1
        if self._num_losses == self._most_placements:
            return self._fail(error)
        self._lost.add(self.placement.decode)
        detached = self._give_up()
        self._refusals.clear()
        self.query = None
        self.deadline = now + self._timeouts.answer_s
        return [*detached, PlaceAgain(error)]

    def _fail(self, error: Exception, ended: str | None = None) -> list[Action]:
        return [*self._end(ended), Fail(error)]

    def _end(self, ended: str | None) -> list[Action]:
        self.is_over, self.deadline = True, inf
        return self._give_up(ended)

    def _give_up(self, ended: str | None = None) -> list[Action]:
        """End the attempt, if there is one, at all of its replicas; the one that has `ended` it needs no abort."""
        if not self._working:
            return []
        self._fleet.settle(self.submission.id)
        detached: list[Action] = []
        for replica in self._working:
            has_ended = replica == ended or isinstance(self._refusals.get(replica), Overloaded)
            detached.append(Detach(replica, self.attempt, is_running=not has_ended))
        self._working, self._unanswered, self._early, self._prefill, self._is_asked = [], [], [], None, False
        return detached


def _unseen(delta: TokenDelta, num_seen: int) -> TokenDelta:
    """Return the delta without tokens that are among the first `num_seen` of the output."""
    seen = min(num_seen - delta.first, len(delta.token_ids))
    if not seen:
        return delta
    logprobs = delta.logprobs[seen:] if delta.logprobs is not None else None
    return replace(delta, token_ids=delta.token_ids[seen:], first=delta.first + seen, logprobs=logprobs)
