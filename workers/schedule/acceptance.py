"""How probable it is that a draft is accepted: learnt from every draft of every request. Pure."""

from dataclasses import dataclass, field

_LENGTHS = 17  # matches of this many tokens and longer ones are alike
_PRIOR_WEIGHT = 2.0  # drafts that a prior counts as
_KEPT_PER_STEP = 0.995  # of what all requests have taught: after 140 steps without news, half is forgotten
_KEPT_PER_DRAFT = 0.8  # of what a request's own drafts have taught
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 256  # steps for which a stream is left alone after drafts that did not pay
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
    failed: float = 0.0  # rejected drafts, and how many were expected
    expected: float = 0.0
    pause: int = 0  # steps that its last pause had; 0: its last drafts paid
    paused_until: int = 0  # step
    factor: float = 1.0  # failures / expected ones


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

    def may_reach(self, request_id: str, needed: float) -> bool:
        """Return whether a draft of the request may be accepted with probability `needed`, whatever its match.

        False while it pauses. A pause that is over makes the request's own record that of a new one.
        """
        record = self._records.get(request_id)
        if record is None:
            return True
        if record.paused_until > self.step:
            return False
        if record.paused_until:
            record.failed = record.expected = record.paused_until = 0
            record.factor = 1.0
        return 1 - (1 - _MOST) * record.factor >= needed

    def is_worth(self, request_id: str, match: int, needed: float) -> bool:
        """Return whether the first draft after a match is accepted with probability `needed`; if not, begin a pause.

        The first pause is short and each further one twice as long, until drafts are accepted again.
        """
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = _Record()
        record.match = match
        if self.probability(request_id, match) >= needed:
            return True
        if record.factor > 1:
            record.pause = min(max(2 * record.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            record.paused_until = self.step + record.pause
        return False

    def probability(self, request_id: str, match: int) -> float:
        """Return the probability that the first draft after a match of `match` tokens is accepted."""
        record = self._records.get(request_id)
        failure = (1 - self._by_length(match)) * (record.factor if record is not None else 1.0)
        return min(max(1 - failure, _LEAST), _MOST)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from one draft of a request: so many of its tokens were accepted."""
        self._recent.accepted = self._recent.accepted * _KEPT_PER_STEP + num_accepted
        self._recent.reached = self._recent.reached * _KEPT_PER_STEP + num_drafted
        record = self._records.get(request_id)
        if record is None:
            return
        record.failed *= _KEPT_PER_DRAFT
        record.expected *= _KEPT_PER_DRAFT
        for position in range(min(num_accepted + 1, num_drafted)):
            is_accepted = position < num_accepted
            share = self._decayed(record.match + position)
            record.failed += not is_accepted
            record.expected += 1 - self._by_length(record.match + position)
            share.accepted += is_accepted
            share.reached += 1
        record.factor = (record.failed + 1) / (record.expected + 1)
        if 2 * num_accepted >= num_drafted:
            record.pause = 0

    def forget(self, request_id: str) -> None:
        """Drop what is known of one request."""
        self._records.pop(request_id, None)

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


def _prior(match: int) -> float:
    """Return the probability to begin with: more than is usual, so that drafts are tried."""
    return 0.9 if match > 4 else 0.7
