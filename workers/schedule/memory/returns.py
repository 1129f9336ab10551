"""When sessions return to their cached pages: learnt from those of this replica, and from the hints of clients.

Learnt is how long after their last use pages return. The chance that counts is the best ratio of chance to time over
all times for which a page could be kept (the Gittins index). So a page is kept through a tool's usual pause, and not
longer.
"""

from collections import Counter
from collections.abc import Sequence
from math import expm1, log2

_NUM_BINS = 16
_FIRST_BIN_S = 0.25  # ages up to this are in the first bin; each further bin is twice as wide: 0.25 s to 2.3 hours
_REMEMBERED = 512  # observations, after which all are halved: a load may change
_PRIOR = 4.0  # observations of a kind that all other kinds together count like
_MOST_LABELS = 64  # hints that are learnt apart; sessions with further ones count as without
_HINTED_PART = 4  # of all pages, that are kept by the hints of one tenant: a quarter


class Returns:
    """How long after its last use the end of a session's prefix was used again: hazards by age.

    A page that is evicted before its return counts for the time until then, and for no longer (Kaplan and Meier's
    estimate).
    """

    def __init__(self) -> None:
        self._returned = [0.0] * _NUM_BINS
        self._seconds = [0.0] * _NUM_BINS  # that pages were watched in each bin
        self._total = 0.0

    def observe(self, age: float, has_returned: bool) -> None:
        """Count a page whose last use was `age` seconds ago: it returns now, or is evicted."""
        for number in range(bin_of(age) + 1):
            start, end = _edges(number)
            self._seconds[number] += min(age, end) - start
        if has_returned:
            self._returned[bin_of(age)] += 1
        self._total += 1
        if self._total >= _REMEMBERED:
            self._returned = [count / 2 for count in self._returned]
            self._seconds = [seconds / 2 for seconds in self._seconds]
            self._total /= 2

    def hazards(self, expected: Sequence[float]) -> list[float]:
        """Return the chances per second of a return at each age, by bin.

        `expected`: those of all sessions. They count like `_PRIOR` observations.
        """
        hazards = []
        for number, (returned, seconds) in enumerate(zip(self._returned, self._seconds, strict=True)):
            start, end = _edges(number)
            prior = _PRIOR * (end - start)
            hazards.append((returned + prior * expected[number]) / (seconds + prior))
        return hazards


def chances(hazards: Sequence[float]) -> list[float]:
    """Return the best chance of a return per second of keeping a page, by the bin of its age."""
    passed = []
    for number, hazard in enumerate(hazards):
        start, end = _edges(number)
        chance = -expm1(-hazard * (end - start))
        passed.append((chance, chance / hazard))
    return [_best_ratio(passed[number:]) for number in range(_NUM_BINS)]


class Hints:
    """Numbers the hints of clients from 1 on, so that sessions are learnt apart by hint and tenant.

    0 stands for no hint, and for hints beyond a tenant's part of the pages.
    """

    def __init__(self, num_pages: int) -> None:
        self._most_pages = num_pages // _HINTED_PART
        self._labels: dict[tuple[str, int], int] = {}  # by tenant and bin
        self._kept: list[tuple[str, int]] = [("", 0)]  # by label
        self._num_pages = Counter[str]()  # that are cached by hints, by tenant

    def label(self, tenant: str, seconds: float, num_pages: int) -> int:
        """Return the label of `num_pages` pages that are cached with a tenant's hint of a return within `seconds`, and
        count them."""
        if seconds <= 0 or self._num_pages[tenant] + num_pages > self._most_pages:
            return 0
        key = tenant, bin_of(seconds)
        label = self._labels.get(key, 0)
        if not label:
            if len(self._labels) >= _MOST_LABELS:
                return 0
            label = self._labels[key] = len(self._kept)
            self._kept.append(key)
        self._num_pages[tenant] += num_pages
        return label

    def let_go(self, label: int) -> None:
        """Note that a page with a label is not cached any more."""
        if label:
            self._num_pages[self._kept[label][0]] -= 1

    def prior(self, label: int, hazards: Sequence[float]) -> list[float]:
        """Return the chances per second of a return, by bin, before a label's sessions are observed."""
        _, last = self._kept[label]
        return [max(hazard, UNSEEN[number]) if number <= last else hazard for number, hazard in enumerate(hazards)]


def bin_of(age: float) -> int:
    """Return the number of the bin of an age in seconds."""
    return min(int(age / _FIRST_BIN_S).bit_length(), _NUM_BINS - 1) if age > 0 else 0


def chance_at(by_bin: Sequence[float], age: float) -> float:
    """Return the chance at an age, between those of two bins: without steps, or all ages of a bin would be alike."""
    place = log2(age / _FIRST_BIN_S) + 0.5 if age > _FIRST_BIN_S / 2 else 0.0  # the middle of bin n is at n
    number = min(int(place), _NUM_BINS - 2)
    share = min(place - number, 1.0)
    return by_bin[number] * (1 - share) + by_bin[number + 1] * share


def _edges(number: int) -> tuple[float, float]:
    """Return the ages in seconds at which a bin begins and ends."""
    return (_FIRST_BIN_S * 2 ** (number - 1) if number else 0.0), _FIRST_BIN_S * 2**number


def _best_ratio(passed: Sequence[tuple[float, float]]) -> float:
    """Return the largest ratio of chance to seconds over all ends of `passed`: (chance, seconds) of bins in a row."""
    best = chance = seconds = 0.0
    left = 1.0  # the chance that no bin before had the return
    for in_bin, seconds_in_bin in passed:
        chance, seconds, left = chance + left * in_bin, seconds + left * seconds_in_bin, left * (1 - in_bin)
        best = max(best, chance / seconds)
    return best


# Without observations, the chance per second falls with one over the age: pages go in the order of their last uses.
UNSEEN = [2 / sum(_edges(number)) for number in range(_NUM_BINS)]
