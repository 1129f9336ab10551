"""Stop strings in a text that grows token by token."""

from collections.abc import Iterable


class StopTable:
    """The stop strings of one request, prepared for the search. All outputs of the request share one table."""

    __slots__ = ("failures", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = list(stops)
        self.failures = [_failures(stop) for stop in self.stops]


class StopStrings:
    """Finds stop strings in one output's text, with one Knuth-Morris-Pratt automaton for each.

    `held`: how many characters at the end of the text are the beginning of some stop string.
    """

    __slots__ = ("_matched", "_table", "held")

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._matched = [0] * len(table.stops)
        self.held = 0

    def find(self, text: str, *, ignore: bool = False) -> tuple[int, str] | None:
        """Append `text`, and return the end in it of the first complete stop string, and that string.

        Where several end at the same character, the longest counts.
        """
        matched = self._matched
        all_failures = self._table.failures
        for position, char in enumerate(text, 1):
            hit = ""
            for k, stop in enumerate(self._table.stops):
                failures = all_failures[k]
                n = matched[k]
                while n and stop[n] != char:
                    n = failures[n - 1]
                n += stop[n] == char
                if n == len(stop):
                    hit = max(hit, stop, key=len)
                    n = failures[n - 1]
                matched[k] = n
            if hit and not ignore:
                return position, hit
        self.held = max(matched)
        return None


def _failures(stop: str) -> list[int]:
    """Return, for every prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = table[n - 1]
        n += stop[i] == stop[n]
        table[i] = n
    return table
