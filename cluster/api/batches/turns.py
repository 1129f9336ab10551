"""Which batch runs next: keys take turns, so that long batches of one key leave places to the batches of other keys."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from crossdock.workers.schedule.shares import Shares

TURN_S = 60.0  # seconds that a batch may run before it gives its place to a key that has none


class Running(NamedTuple):
    """A batch that runs. `since`: when it began, on the clock that `now` is read from."""

    owner: str
    since: float


class BatchTurns:
    """Gives out the places in which batches of this process run. Owners have shares of the places, see `Shares`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._order: dict[str, None] = {}  # owners by their newest turn, the earliest first

    def next(self, due: Mapping[str, Sequence[Path]], running: Mapping[Path, Running]) -> Iterator[tuple[str, Path]]:
        """Yield the batches that begin now, by owner and place.

        A place goes to the owner that has the fewest, of equal ones to the owner that has waited longest for a turn.

        Args:
            due: batches that may begin, for each owner in the order in which they do.
            running: batches that have places.
        """
        shares = Shares(self._most)
        count = Counter(run.owner for run in running.values())
        for owner, num_places in count.items():
            shares.take(owner, num_places)
        left = {owner: iter(places) for owner, places in due.items()}
        self._order = {owner: None for owner in self._order if owner in due or owner in count}
        while able := [owner for owner in left if shares.room(owner) > 0]:
            order = {owner: number for number, owner in enumerate(self._order, start=1)}
            owner = min(able, key=lambda owner: (count[owner], order.get(owner, 0)))
            place = next(left[owner], None)
            if place is None:
                del left[owner]
                continue
            shares.take(owner, 1)
            count[owner] += 1
            self._order.pop(owner, None)
            self._order[owner] = None
            yield owner, place

    def gives_way(self, due: Mapping[str, Sequence[Path]], running: Mapping[Path, Running], now: float) -> Path | None:
        """Return the batch that ends its turn, where an owner with no place waits and all places are taken.

        It is the longest-running batch of the owner with the most places.
        """
        count = Counter(run.owner for run in running.values())
        if len(running) < self._most or all(count[owner] for owner in due):
            return None
        over = [place for place, run in running.items() if now - run.since >= TURN_S]
        return max(over, key=lambda place: (count[running[place].owner], -running[place].since), default=None)
