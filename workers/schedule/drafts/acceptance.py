"""How probable it is that a draft is accepted: learnt from every draft of every request. Pure."""

from dataclasses import dataclass, field

_LENGTHS = 17  # matches of this many tokens and longer ones are alike
_PRIOR_WEIGHT = 4.0  # drafts that a prior counts as
_KEPT_PER_STEP = 0.98  # after 34 steps, half of what was learnt is forgotten
_KEPT_PER_DRAFT = 0.9  # of what a request's own drafts have taught, besides
# Steps for which a stream is left alone after drafts that did not pay.
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 64
# A probability is never certain.
_MOST = 0.995
_LEAST = 0.001

PRIORS = (0.0, 0.45, 0.5, 0.7, 0.75, 0.8, 0.8, 0.85, 0.93)  # by match length, in tokens; the last one of longer ones
"""The share of drafts that was accepted after matches of each length, by replay of greedy answers.

After one token it is 19 % (chat) to 84 % (JSON). A guess of 30 % is never tried beside several streams, and so never
corrected; with 45 % the predicted tokens per second are 1.1 % more, and 0.5 % more on prompts that were written later.
"""


@dataclass(slots=True)
class _Tally:
    """The numbers of accepted and of possible drafts. Both decay with the steps."""

    accepted: float = 0.0
    possible: float = 0.0
    step: int = 0  # of the last change

    def at(self, step: int) -> "_Tally":
        """Return the tally, decayed to `step`."""
        if self.step != step:
            kept = _KEPT_PER_STEP ** (step - self.step)
            self.accepted *= kept
            self.possible *= kept
            self.step = step
        return self

    def share(self, prior: float) -> float:
        """Return the accepted share, which is `prior` as long as there are few drafts."""
        return (self.accepted + _PRIOR_WEIGHT * prior) / (self.possible + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Record:
    """How a request's own drafts differ from other requests' drafts, and when the request may draft again."""

    match: int = 0  # of its newest drafts
    own: _Tally = field(default_factory=_Tally)  # possible: those that were expected after such matches
    pause: int = 0  # steps that its last pause had; 0: its last drafts paid
    paused_until: int = 0  # step

    @property
    def factor(self) -> float:
        """Return the ratio of accepted drafts of the request to the expected number."""
        return self.own.share(1.0)


@dataclass(slots=True)
class Acceptance:
    """Predicts whether drafts are accepted, from the length of the match that supports them and from the request.

    The match and the earlier drafts support a draft, which counts only if these are accepted. So the third draft after
    a match of 4 tokens is like the first after a match of 6.
    """

    step: int = 0
    _by_length: list[_Tally] = field(default_factory=lambda: [_Tally() for _ in range(_LENGTHS + 1)])
    _shares: dict[int, float] = field(default_factory=dict)  # by length, as far as known since the last change
    _records: dict[str, _Record] = field(default_factory=dict)  # by request

    def begin_step(self) -> None:
        """Advance the clock by which old drafts are forgotten and pauses end."""
        self.step += 1
        self._shares.clear()

    def shortest_match(self, needed: float) -> int:
        """Return the length from which on a match's first draft is accepted with probability `needed`."""
        return next((match for match in range(1, _LENGTHS) if self._after(match) >= needed), _LENGTHS)

    def is_paused(self, request_id: str) -> bool:
        """Return whether a request is not worth a look in this step."""
        record = self._records.get(request_id)
        return record is not None and record.paused_until > self.step

    def paused_next(self) -> set[str]:
        """Return the requests that are not worth a look in the next step."""
        step = self.step + 1
        return {request_id for request_id, record in self._records.items() if record.paused_until > step}

    def probability_if_worth(self, request_id: str, match: int, needed: float, shortest: int) -> float:
        """Return the probability that the first draft after a match is accepted if it is at least `needed`; if not,
        begin a pause and return 0.

        `shortest`: what `shortest_match` returns for `needed`. A match grows by one token a step, so a shorter one
        pauses until it can be as long. A request whose own drafts failed pauses for a few steps, then for twice as many
        each time, until drafts are accepted again. Meanwhile its failures are forgotten.
        """
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record()
        record.match = match
        if match >= shortest or (match and record.factor > 1):
            record.own.at(self.step)
            probability = self.after(match, record.factor)
            if probability >= needed:
                return probability
        if match >= shortest and record.factor < 1:
            record.pause = min(max(2 * record.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            record.paused_until = self.step + record.pause
        else:
            record.paused_until = self.step + max(shortest - match, 1)
        return 0.0

    def factor(self, request_id: str) -> float:
        """Return the factor by which a request's own drafts are accepted more often than other requests' drafts."""
        record = self._records.get(request_id)
        return record.factor if record is not None else 1.0

    def after(self, match: int, factor: float = 1.0) -> float:
        """Return the probability that a draft after a match of `match` tokens is accepted, with a request's factor."""
        expected = self._after(match)
        probability = expected * factor if factor <= 1 else 1 - (1 - expected) / factor
        return _LEAST if probability < _LEAST else min(probability, _MOST)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from the drafts of one request in a step: the first `num_accepted` of them were accepted."""
        record = self._records.get(request_id)
        if record is None:
            return
        own = record.own.at(self.step)
        own.accepted *= _KEPT_PER_DRAFT
        own.possible *= _KEPT_PER_DRAFT
        for position in range(min(num_accepted + 1, num_drafted)):  # drafts after the first rejected one teach nothing
            match = record.match + position
            is_accepted = position < num_accepted
            of_length = self._tally(match)
            own.accepted += is_accepted
            own.possible += of_length.share(self._prior(match))
            of_length.accepted += is_accepted
            of_length.possible += 1
        self._shares.clear()
        if 2 * num_accepted >= num_drafted:
            record.pause = 0

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)

    def _after(self, match: int) -> float:
        """Return the share of all requests' drafts that is accepted after a match of `match` tokens."""
        match = min(match, _LENGTHS)
        if (share := self._shares.get(match)) is None:
            share = self._shares[match] = self._tally(match).share(self._prior(match))
        return share

    def _prior(self, match: int) -> float:
        return PRIORS[min(match, len(PRIORS) - 1)]

    def _tally(self, match: int) -> _Tally:
        return self._by_length[min(match, _LENGTHS)].at(self.step)
