"""How probable it is that a draft is accepted: learnt from every draft of every request. Pure."""

from dataclasses import dataclass, field

_LENGTHS = 17  # matches of this many tokens and longer ones are alike
_PRIOR_WEIGHT = 4.0  # drafts that a prior counts as
_KEPT_PER_STEP = 0.98  # of what all requests have taught: after 34 steps without news, half is forgotten
_KEPT_PER_DRAFT = 0.9  # of what a request's own drafts have taught
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 64  # steps for which a stream is left alone after drafts that did not pay
_MOST, _LEAST = 0.995, 0.001  # a probability is never certain


@dataclass(slots=True)
class _Share:
    """A decaying share: of so many drafts that were reached, so many were accepted."""

    accepted: float = 0.0
    reached: float = 0.0
    step: int = 0  # of the last change


@dataclass(slots=True)
class _Record:
    """How a request's own drafts differ from those of others, and when it may draft again."""

    match: int = 0  # of its newest drafts
    accepted: float = 0.0  # drafts, and how many were expected to be
    expected: float = 0.0
    pause: int = 0  # steps that its last pause had; 0: its last drafts paid
    paused_until: int = 0  # step
    step: int = 0  # of the last change
    factor: float = 1.0  # accepted / expected


@dataclass(slots=True)
class Acceptance:
    """Predicts whether drafts are accepted, from the length of the match that supports them and from the request.

    A draft is supported by the match and by the drafts before it, which have been accepted where it counts. So the
    third draft after a match of 4 tokens is like the first after a match of 6.
    """

    step: int = 0
    _shares: list[_Share] = field(default_factory=lambda: [_Share() for _ in range(_LENGTHS + 1)])  # by match length
    _records: dict[str, _Record] = field(default_factory=dict)  # by request
    _recent: _Share = field(default_factory=_Share)

    @property
    def share(self) -> float:
        """Return the share of recent drafts that were accepted; 0 before the first."""
        return self._recent.accepted / self._recent.reached if self._recent.reached else 0.0

    def begin_step(self) -> None:
        """Advance the clock by which old drafts are forgotten and pauses end."""
        self.step += 1

    def shortest_match(self, needed: float) -> int:
        """Return the length from which on a match's first draft is accepted with probability `needed`."""
        return next((match for match in range(1, _LENGTHS) if self._by_length(match) >= needed), _LENGTHS)

    def paused(self) -> set[str]:
        """Return the requests that are not worth a look in this step."""
        step = self.step
        return {request_id for request_id, record in self._records.items() if record.paused_until > step}

    def is_worth(self, request_id: str, match: int, needed: float, shortest: int) -> bool:
        """Return whether the first draft after a match is accepted with probability `needed`; if not, begin a pause.

        `shortest`: what `shortest_match` returns for `needed`. A match grows by one token a step, so a shorter one
        pauses until it can be as long. A request whose own drafts failed pauses for a few steps, then for twice as many
        each time, until drafts are accepted again. Meanwhile its failures are forgotten.
        """
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record()
        record.match = match
        if match >= shortest or (match and record.factor > 1):
            self._decay(record)
            if self.probability(request_id, match) >= needed:
                return True
        if match >= shortest and record.factor < 1:
            record.pause = min(max(2 * record.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            record.paused_until = self.step + record.pause
        else:
            record.paused_until = self.step + max(shortest - match, 1)
        return False

    def probability(self, request_id: str, match: int) -> float:
        """Return the probability that the first draft after a match of `match` tokens is accepted."""
        record, expected = self._records.get(request_id), self._by_length(match)
        factor = record.factor if record is not None else 1.0
        probability = expected * factor if factor <= 1 else 1 - (1 - expected) / factor
        return min(max(probability, _LEAST), _MOST)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from one draft of a request: so many of its tokens were accepted."""
        self._recent.accepted = self._recent.accepted * _KEPT_PER_STEP + num_accepted
        self._recent.reached = self._recent.reached * _KEPT_PER_STEP + num_drafted
        record = self._records.get(request_id)
        if record is None:
            return
        self._decay(record)
        record.accepted *= _KEPT_PER_DRAFT
        record.expected *= _KEPT_PER_DRAFT
        for position in range(min(num_accepted + 1, num_drafted)):
            is_accepted = position < num_accepted
            share = self._decayed(record.match + position)
            record.accepted += is_accepted
            record.expected += self._by_length(record.match + position)
            share.accepted += is_accepted
            share.reached += 1
        record.factor = _factor(record)
        if 2 * num_accepted >= num_drafted:
            record.pause = 0

    def forget(self, request_id: str) -> None:
        """Drop what is known of one request."""
        self._records.pop(request_id, None)

    def _decay(self, record: _Record) -> None:
        if record.step != self.step:
            kept = _KEPT_PER_STEP ** (self.step - record.step)
            record.accepted *= kept
            record.expected *= kept
            record.factor, record.step = _factor(record), self.step

    def _by_length(self, match: int) -> float:
        share = self._decayed(match)
        return (share.accepted + _PRIOR_WEIGHT * _prior(match)) / (share.reached + _PRIOR_WEIGHT)

    def _decayed(self, match: int) -> _Share:
        share = self._shares[min(match, _LENGTHS)]
        if share.step != self.step:
            kept = _KEPT_PER_STEP ** (self.step - share.step)
            share.accepted *= kept
            share.reached *= kept
            share.step = self.step
        return share


def _factor(record: _Record) -> float:
    return (record.accepted + _PRIOR_WEIGHT) / (record.expected + _PRIOR_WEIGHT)


_PRIORS = (0.0, 0.3, 0.5, 0.7, 0.75, 0.8, 0.8, 0.85)  # by match length
_LONG_PRIOR = 0.93


def _prior(match: int) -> float:
    """Return the probability to begin with, as measured: see `python benchmarks/speculation.py --offline`."""
    return _PRIORS[match] if match < len(_PRIORS) else _LONG_PRIOR
