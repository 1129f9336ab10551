"""The life of one request: where it is placed, which token comes next, where it goes on after a loss, when it ends.

Sans-IO: answers of replicas, tokens, losses and the time go in; submissions, aborts and tokens for the client come out.
The dispatcher drives this with real replicas, the simulator with simulated ones.

A request is tried in attempts, each with a number of its own. An attempt goes to one replica, or to two: a prefill
replica computes the prompt and the first token, a decode replica receives the KV pages and makes the other tokens. The
client gets the first token once the decode replica has pages for the request: a wait for pages counts as a wait for the
first token, not as a gap between tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from msgspec import structs

from crossdock.router.actions import (
    DEFAULT_TIMEOUTS,
    Accepted,
    Action,
    Ask,
    Detach,
    Fail,
    PlaceAgain,
    ReplicaBroken,
    ReplicaLost,
    SuspectRequest,
    Timeouts,
)
from crossdock.router.fleet import Fleet
from crossdock.router.legs import choose_replicas, query_of, submits_of
from crossdock.router.placement import Placement
from crossdock.router.query import Query
from crossdock.workers.schedule.request.failures import failure_of
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Overloaded, Submission

MOST_PLACEMENTS = 4  # of one request, refusals and returns apart; the last two on one replica alone, whatever the pools
MOST_DEATHS = 2  # of replicas that had the request and had made no token of the attempt


Numbers = Sequence[int | str]
"""How far a replica is with a request: numbers of any kind, of which one differs whenever the request has moved."""


@dataclass(slots=True)
class ProgressWatch:
    """The answers of the replicas of one attempt."""

    asked: list[str] = field(default_factory=list)  # replicas whose answer is awaited
    unchanged_since: float = inf  # seconds; infinity before the first answer
    _numbers: dict[str, Numbers | None] = field(default_factory=dict)  # by replica: the last answer

    def take_asked(self) -> list[str]:
        """Return the replicas that have not answered, and await none of them any more."""
        asked = self.asked
        self.asked = []
        return asked

    def forget(self, replica: str) -> None:
        """Await no answer of a replica any more."""
        if replica in self.asked:
            self.asked.remove(replica)

    def answered(self, replica: str, numbers: Numbers | None, now: float) -> bool:
        """Take in an answer; None: the replica does not have the request. Return whether None came twice in a row."""
        self.asked.remove(replica)
        is_first = replica not in self._numbers
        if not is_first and self._numbers[replica] == numbers:
            return numbers is None
        self._numbers[replica] = numbers
        if not is_first or self.unchanged_since == inf:
            self.unchanged_since = now
        return False


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
        self.query: Query | None = None  # of the last attempt; None: what is left of the request has changed since
        self.is_accepted = False  # once: from then on no replica may refuse it
        self.is_over = False
        self._fleet = fleet
        self._timeouts = timeouts
        self._most_placements = most_placements
        self._began = now
        self._num_losses = 0
        self._num_breaks = 0  # losses that were broken connections
        self._num_deaths = 0  # broken connections since the last token: they count against the request
        self._lost: set[str] = set()  # replicas that the request was lost at: they are chosen last
        self._refusals: dict[str, Exception] = {}  # by replica, since the last loss
        self._working: list[str] = []  # replicas of this attempt that are not detached, the decode replica first
        self._unanswered: list[str] = []  # replicas of this attempt that have neither taken nor refused their leg
        self._prefill: str | None = None  # the prefill replica of this attempt, until it has shipped or is lost
        self._early: list[tuple[str, TokenDelta]] = []  # by sender; each came before what must go before it
        self._is_granted = True  # else the decode replica of a pair has no pages yet: no token of the other is shown
        self._travels_late = False  # the first token came before the grant: all pages travel behind it
        self._shipped_s = 0.0  # seconds that prefill replicas charged
        self._has_token = False  # in this attempt, from either replica
        self._is_computed = False  # the prompt, in this attempt
        self._watch = ProgressWatch()  # of this attempt
        self._patience = 0.0  # seconds until the next token, before progress is asked for
        self.deadline = now + self._timeouts.taken_s

    @property
    def is_suspect(self) -> bool:
        """Return whether a replica died of this request or beside it: the next attempt shows which."""
        return self._num_deaths > 0

    @property
    def weights(self) -> str:
        """The weights with which alone the request may go on; empty: with any, as before its first token."""
        return self.placement.weights if self.output and self.placement is not None else ""

    # -- attempts ----------------------------------------------------------------------------------------------------

    def place(self, now: float) -> list[Action]:
        """Choose the replicas of the next attempt, book the request there, and submit. Fails where none is left."""
        if self.is_over:
            return []
        if (newest := self._fleet.table.newest.id) != self.submission.weights:
            self.submission = replace(self.submission, weights=newest)
            self.query = None
            self._refusals = {}
        if self.query is None:
            self.query = query_of(
                self.submission,
                self.output,
                self._fleet.page_size,
                may_ship=self._num_losses < self._most_placements - 2,
                may_refuse=self.submission.is_promised and not self.is_accepted,
                weights=self.weights,
            )
        try:
            others = self._refusals, self._lost
            placement = choose_replicas(self._fleet, self.query, now, *others, is_accepted=self.is_accepted)
        except (Overloaded, ReplicaLost) as error:
            return self._fail(error)
        self._fleet.book(self.query, placement)
        self.placement = placement
        self.attempt = self.attempt + 1
        self._has_token, self._is_computed, self._watch = False, False, ProgressWatch()
        self._is_granted, self._travels_late = placement.prefill is None, False
        self._patience = max(self._timeouts.patience_s, 2 * placement.predicted_ttft)
        self.deadline = now + self._timeouts.taken_s
        waited_s = now - self._began
        submission = _continued(self.submission, self.attempt, self.output, waited_s, is_accepted=self.is_accepted)
        self._prefill = placement.prefill
        submits = submits_of(placement, submission)
        self._working = [submit.replica for submit in submits]
        self._unanswered = [*self._working]
        return [*submits]

    def taken(self, replica: str, attempt: int, sequence: int, now: float) -> list[Action]:
        """A replica has taken its leg; its live profiles after number `sequence` include the request."""
        if attempt != self.attempt or replica not in self._working:
            return []
        self._fleet.taken(self.submission.id, replica, sequence)
        if replica not in self._unanswered:
            return []
        self._unanswered.remove(replica)
        self._watch.forget(replica)
        return self._accept(now) if not self._unanswered else []

    def refused(
        self, replica: str, attempt: int, error: Overloaded | ValueError | ReplicaLost, now: float
    ) -> list[Action]:
        """A replica has not taken its leg. Overloaded: another may; ValueError: none would; ReplicaLost: no answer.

        After the first acceptance any refusal only sends the request to another replica.
        """
        if attempt != self.attempt or replica not in self._unanswered:
            return []
        if isinstance(error, ValueError) and not self.is_accepted:
            return self._fail(error, replica)
        self._refusals[replica] = error
        return self._place_again(None, now, replica if isinstance(error, Overloaded | ValueError) else None)

    def lost(self, replica: str, attempt: int, error: ReplicaLost, now: float) -> list[Action]:
        """A replica does not answer any more. Without its prefill replica an attempt goes on: the decode replica has
        the pages, or computes those that have not arrived.

        Where the connection broke before the attempt had a token, the request may be the reason: the attempt ends, and
        after `MOST_DEATHS` the request does.
        """
        if attempt != self.attempt or replica not in self._working:
            return []
        is_suspicious = isinstance(error, ReplicaBroken) and not self._has_token
        if is_suspicious:
            self._num_deaths += 1
            if self._num_deaths == MOST_DEATHS:
                return self._fail(SuspectRequest.after(MOST_DEATHS))
        if replica in self._unanswered:
            return self.refused(replica, attempt, error, now)
        if replica == self._prefill and not is_suspicious:
            return self._end_prefill(True, now)
        return self._lose(error, now, replica)

    def shipped(self, replica: str, attempt: int, now: float) -> list[Action]:
        """Note that the prefill replica has sent all pages, or need not any more: its leg is over."""
        return self._end_prefill(False, now) if attempt == self.attempt and replica == self._prefill else []

    def close(self) -> list[Action]:
        """The client is gone. Does nothing where the request has ended."""
        return self._end(None)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def streamed(self, token_ids: Sequence[int], now: float) -> None:
        """Take in tokens of steps that were alike, the last of which ended at `now`: the client gets all of them."""
        self.output += token_ids
        self.deadline = now + self._patience

    def takes(self, replica: str, delta: TokenDelta, now: float) -> bool:
        """Take in a delta that the client gets unchanged, as nearly every delta; False: it is left for `tokens`."""
        if not self._is_computed or delta.first != len(self.output) or delta.finish_reason or self._early:
            return False
        if delta.epoch != self.attempt or replica not in self._working:
            return False
        self.deadline = now + self._patience
        if self._watch.asked:
            self._watch.asked.clear()
        self.output += delta.token_ids
        return True

    def tokens(self, replica: str, delta: TokenDelta, now: float) -> list[Action]:
        """A replica has sent tokens, the end of its leg, or an empty delta: a decode replica has pages for the request.

        Returns the tokens that the client does not have and may have, in order.
        """
        if self.takes(replica, delta, now):
            return [delta]
        if delta.epoch != self.attempt or replica not in self._working:
            return []
        if delta.token_ids:
            self._has_token, self._num_deaths = True, 0
        if self._unanswered:
            self._early.append((replica, delta))
            return []
        if delta.finish_reason is FinishReason.SHIPPED:
            self._shipped_s += delta.charged_s
            return self.shipped(replica, delta.epoch, now)
        if delta.finish_reason is FinishReason.RETURNED:
            self._refusals.clear()
            return self._place_again(None, now, replica)
        self._watch.asked.clear()
        self.deadline = now + self._patience
        if replica != self._prefill:
            self._note_grant(delta)
        if not delta.token_ids and delta.finish_reason is None:
            return self._check_gap(now)
        if not self._is_computed:
            assert self.placement is not None
            self._is_computed = True
            self._patience = max(self._timeouts.patience_s, 20 * self.placement.predicted_gap)
            self._fleet.first_token(self.submission.id)
        self.deadline = now + self._patience
        if delta.first > len(self.output) or (delta.finish_reason is None and not self._is_granted):
            self._early.append((replica, delta))
            return self._check_gap(now)
        return [*self._emit(replica, delta, now), *self._check_gap(now)]

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Act where `deadline` has passed. Between two attempts this does nothing: the driver has to call `place`."""
        if now < self.deadline or not self._working:
            return []
        decode = self._working[0]
        silent = self._watch.take_asked()
        if silent and self._unanswered:
            self._refusals.update({each: _not_taken(each) for each in silent})
            return self._place_again(None, now)
        if decode in silent:
            why = f"replica {decode} does not answer about {self.submission.id}"
            return self._lose(ReplicaLost(why), now, decode)
        if silent:
            self.deadline = now + self._patience
            return self._end_prefill(True, now) if self._prefill in silent else []
        self._watch.asked.extend(self._unanswered or self._working)
        self.deadline = now + self._timeouts.stuck_s  # a replica that answers nothing is silent, and lost long before
        return [Ask(replica, self.attempt) for replica in self._watch.asked]

    def progress(self, replica: str, attempt: int, numbers: Numbers | None, now: float) -> list[Action]:
        """Take in how far a replica is with the request; None: the replica does not have the request.

        The numbers of one replica of a pair need not change while those of the other do.
        """
        if attempt != self.attempt or replica not in self._watch.asked:
            return []
        actions: list[Action] = []
        is_missing = self._watch.answered(replica, numbers, now)
        if is_missing and replica in self._unanswered:
            return self.refused(replica, attempt, _not_taken(replica), now)
        if is_missing and replica != self._prefill:
            why = f"replica {replica} does not have {self.submission.id} any more"
            return self._lose(ReplicaLost(why), now, replica)
        if is_missing:
            actions += self._end_prefill(True, now)
        elif numbers is None:  # its last message may be on the way
            self._patience = self._timeouts.patience_s
        if self._watch.asked or not self._working:
            return actions
        unchanged_s = now - self._watch.unchanged_since
        if unchanged_s > self._timeouts.stuck_s:
            why = f"the request has not moved at replica {' and '.join(self._working)} for {unchanged_s:.0f} s"
            return [*actions, *self._lose(ReplicaLost(why), now, *self._working)]
        self.deadline = now + self._patience
        return actions

    # -- steps -------------------------------------------------------------------------------------------------------

    def _accept(self, now: float) -> list[Action]:
        """Begin to stream: every replica has taken its leg."""
        self.is_accepted = True
        self._watch = ProgressWatch()
        self.deadline = now + self._patience
        actions: list[Action] = [Accepted()]
        waiting, self._early = self._early, []
        for sender, delta in waiting:
            actions += self.tokens(sender, delta, now)
        return actions

    def _emit(self, replica: str, delta: TokenDelta, now: float) -> list[Action]:
        """Give the client what a delta adds to the output, and end the request where the delta does.

        A delta may begin with tokens that the client has from the other replica. Where they differ, the later ones
        follow from a token that the client never got.
        """
        if delta.finish_reason is FinishReason.ERROR:
            return self._fail(failure_of(delta), replica)
        num_seen = min(len(self.output) - delta.first, len(delta.token_ids))
        if delta.token_ids[:num_seen] != self.output[delta.first : delta.first + num_seen]:
            if replica == self._prefill:
                return self._end_prefill(True, now)  # the client goes on with what the decode replica computed itself
            return self._lose(ReplicaLost(f"replica {replica} goes on from a token that the client does not have"), now)
        fresh = _without(delta, num_seen)
        fresh.charged_s += self._shipped_s if delta.finish_reason is not None else 0.0
        self.output += fresh.token_ids
        return [fresh] if fresh.finish_reason is None else [*self._end(replica), fresh]

    def _note_grant(self, delta: TokenDelta) -> None:
        """Note that the decode replica has pages. A first token that waited for them waits until they have come."""
        if not self._is_granted:
            self._is_granted, self._travels_late = True, bool(self._early)
            if delta.token_ids:  # it has computed the prompt itself
                self._early.clear()
        self._travels_late &= not delta.token_ids

    def _check_gap(self, now: float) -> list[Action]:
        """Give the client the early tokens that are next, once there are pages for more. Where the token before them
        went with the prefill replica, the attempt is lost too."""
        if self._unanswered or not self._is_granted or (self._travels_late and self._prefill is not None):
            return []
        actions: list[Action] = []
        while self._early and self._early[0][1].first <= len(self.output):
            actions += self._emit(*self._early.pop(0), now)
        if self._early and self._prefill is None:
            actions += self._lose(ReplicaLost("the first token was lost with the replica that had computed it"), now)
        return actions

    def _end_prefill(self, is_running: bool, now: float) -> list[Action]:
        assert self._prefill is not None
        prefill, self._prefill = self._prefill, None
        return [self._detach(prefill, is_running), *self._check_gap(now)]

    def _detach(self, replica: str, is_running: bool) -> Detach:
        self._working.remove(replica)
        self._watch.forget(replica)
        return Detach(replica, self.attempt, is_running)

    def _lose(self, error: ReplicaLost, now: float, *blamed: str) -> list[Action]:
        """Place the request again, to go on after the tokens that the client has, elsewhere than at `blamed` if
        possible. None of the tokens is repeated or changed: each depends on the seed and its position alone."""
        self._num_losses += 1
        self._num_breaks += isinstance(error, ReplicaBroken)
        if self._num_losses == self._most_placements:
            return self._fail(SuspectRequest.after(self._num_breaks) if self._num_breaks == self._num_losses else error)
        self._lost.update(blamed)
        self._refusals.clear()
        return self._place_again(error, now)

    def _place_again(self, loss: ReplicaLost | None, now: float, ended: str | None = None) -> list[Action]:
        """End the attempt, and begin the next; the replica that has `ended` this one needs no abort."""
        detached = self._give_up(ended)
        self.query = None if self.is_accepted else self.query  # it has changed: the output, or that none may refuse
        self.deadline = now + self._timeouts.answer_s
        return [*detached, PlaceAgain(loss)]

    def _fail(self, error: Exception, ended: str | None = None) -> list[Action]:
        return [*self._end(ended), Fail(error)]

    def _end(self, ended: str | None) -> list[Action]:
        self.is_over = True
        self.deadline = inf
        return self._give_up(ended)

    def _give_up(self, ended: str | None = None) -> list[Action]:
        """End the attempt, if there is one, at all of its replicas; the one that has `ended` it needs no abort."""
        if not self._working:
            return []
        self._fleet.settle(self.submission.id)
        detached: list[Action] = [Detach(replica, self.attempt, replica != ended) for replica in self._working]
        self._working = []
        self._unanswered = []
        self._early = []
        self._prefill = None
        self._watch.asked.clear()
        return detached


def _without(delta: TokenDelta, num_seen: int) -> TokenDelta:
    """Return the delta without its first `num_seen` tokens."""
    if not num_seen:
        return delta
    logprobs = delta.logprobs[num_seen:] if delta.logprobs is not None else None
    return structs.replace(delta, token_ids=delta.token_ids[num_seen:], first=delta.first + num_seen, logprobs=logprobs)


def _continued(
    submission: Submission, attempt: int, output: Sequence[int], waited_s: float, *, is_accepted: bool
) -> Submission:
    """Return the submission of an attempt. A further one goes on after the tokens that the client has."""
    if not attempt:
        return submission
    further = replace(submission, epoch=attempt, output_token_ids=tuple(output), waited_s=waited_s)
    return replace(further, may_refuse=not is_accepted)


def _not_taken(replica: str) -> ReplicaLost:
    return ReplicaLost(f"replica {replica} did not take the request, and does not have it")
