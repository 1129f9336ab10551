"""Matches names with regular expressions from files of strangers, in a number of steps that is bounded.

Python's `re` goes back and tries again: `(a|.)(a|.)…b` doubles its time with each group, and nothing can stop it. Here
all places of a name that a part of an expression can end at are one set, the bits of an integer. So each part is tried
once for all places together, and no choice is tried twice. Steps are counted all the same: repeats in repeats may need
many.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from re import _constants as constants  # type: ignore[attr-defined]  # the syntax is Python's own, to the last rule
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST_CHARS = 4096  # of an expression
_MOST_STEPS = 1 << 22  # of all matches that share them: about two seconds
_MOST_DEPTH = 32  # of groups in groups
_Node = tuple[Any, Any]


class TooManySteps(ValueError):
    """The matches of a file's patterns take too long."""


class Steps:
    """The steps that the matches of one file's patterns may take, all together."""

    def __init__(self, most: int = _MOST_STEPS) -> None:
        self._most = self._left = most

    @property
    def taken(self) -> int:
        """Return how many steps the matches have taken."""
        return self._most - self._left

    def take(self, pattern: str, count: int) -> None:
        """Count steps. TooManySteps: there have been too many."""
        self._left -= count
        if self._left < 0:
            raise TooManySteps(f"the pattern {pattern:.200} takes too long: more than {self._most} steps")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A regular expression in Python's syntax, but for back references, atomic groups and most flags."""

    source: str
    steps: Steps = field(default_factory=Steps, compare=False, repr=False)
    _nodes: Sequence[_Node] = field(init=False, compare=False, repr=False)
    _ignores_case: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Read the expression. ValueError: it is none, or has a part that is not read."""
        tree = _parsed(self.source)
        object.__setattr__(self, "_nodes", list(tree))
        object.__setattr__(self, "_ignores_case", bool(tree.state.flags & re.IGNORECASE))

    def fits(self, name: str) -> bool:
        """Return whether the expression matches the whole name, as `re.fullmatch`."""
        return bool(self._ends(name) >> len(name))

    def begins(self, name: str) -> bool:
        """Return whether the expression matches a beginning of the name, as `re.match`."""
        return bool(self._ends(name))

    def _ends(self, name: str) -> int:
        return _Walk(name, self).through(self._nodes, 1)


class _Walk:
    """One match of one name. Sets of places are integers: bit p is the place before character p."""

    def __init__(self, name: str, pattern: NamePattern) -> None:
        self._name = name
        self._pattern = pattern
        self._ignores_case = pattern._ignores_case
        self._takers: dict[int, int] = {}  # by the identity of a node: the places before characters that it takes
        self._places: dict[str, int] = {}  # of each character
        for place, char in enumerate(name):
            self._places[char] = self._places.get(char, 0) | 1 << place

    def through(self, nodes: Sequence[_Node], places: int) -> int:
        """Return the places at which nodes, one after the other, can end that begin at one of `places`."""
        for node in nodes:
            if not places:
                break
            self._pattern.steps.take(self._pattern.source, 1)
            kind, value = node
            if kind is constants.LITERAL and not self._ignores_case:
                places = (places & self._places.get(chr(value), 0)) << 1
            elif kind in _TAKE_ONE:
                places = (places & self._taken(node)) << 1
            else:
                places = _RULES[kind](self, value, places)
        return places

    def _taken(self, node: _Node) -> int:
        """Return the places before the characters that a node takes."""
        found = self._takers.get(id(node))
        if found is None:
            self._pattern.steps.take(self._pattern.source, len(self._places))
            takes = _TAKE_ONE[node[0]]
            found = 0
            for char, places in self._places.items():
                chars = {char, char.lower(), char.upper()} if self._ignores_case else {char}
                found |= places if takes(node[1], chars) else 0
            self._takers[id(node)] = found
        return found

    def branch(self, value: Any, places: int) -> int:
        found = 0
        for nodes in value[1]:
            found |= self.through(list(nodes), places)
        return found

    def group(self, value: Any, places: int) -> int:
        return self.through(list(value[3]), places)

    def repeat(self, value: Any, places: int) -> int:
        """Return the places after the least to the most repeats: each place is a beginning once."""
        least = value[0]
        most = value[1]
        nodes = list(value[2])
        for _ in range(least):
            before = places
            places = self.through(nodes, places)
            if places in (0, before):  # no further repeat changes anything
                break
        found = places
        fresh = places
        number = least
        is_endless = most is constants.MAXREPEAT
        if is_endless and len(nodes) == 1 and nodes[0][0] in _TAKE_ONE:
            # The sum carries a bit through each run of characters that are taken, to the place behind the run.
            taken = self._taken(nodes[0])
            return places | ((places & taken) + taken ^ taken)
        while fresh and (is_endless or number < most):
            fresh = self.through(nodes, fresh) & ~found
            found |= fresh
            number += 1
        return found

    def look(self, value: Any, places: int) -> int:
        """Return the places at which an expression matches ahead, or behind."""
        direction = value[0]
        nodes = list(value[1])
        width = 0 if direction > 0 else value[1].getwidth()[0]
        found = 0
        for place in range(len(self._name) + 1):
            if places >> place & 1 and place >= width:
                ends = self.through(nodes, 1 << (place - width))
                found |= bool(ends if direction > 0 else ends >> place & 1) << place
        return found

    def look_not(self, value: Any, places: int) -> int:
        return places & ~self.look(value, places)

    def at(self, value: Any, places: int) -> int:
        name = self._name
        end = len(self._name)
        match value:
            case constants.AT_BEGINNING | constants.AT_BEGINNING_STRING:
                return places & 1
            case constants.AT_END_STRING:
                return places & 1 << end
            case constants.AT_END:
                before_newline = 1 << (end - 1) if name.endswith("\n") else 0
                return places & (1 << end | before_newline)
        words = [char.isalnum() or char == "_" for char in name]
        edges = zip([False, *words], [*words, False], strict=True)
        bounds = sum((one is not other) << place for place, (one, other) in enumerate(edges))
        return places & (bounds if value is constants.AT_BOUNDARY else ~bounds)

    def nothing(self, value: Any, places: int) -> int:
        return 0


def _takes_one_of(value: Any, chars: set[str]) -> bool:
    is_negated = bool(value) and value[0][0] is constants.NEGATE
    found = any(_TAKE_ONE[kind](each, chars) for kind, each in value if kind is not constants.NEGATE)
    return found is not is_negated


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    constants.CATEGORY_DIGIT: str.isdecimal,
    constants.CATEGORY_SPACE: str.isspace,
    constants.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
    constants.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    constants.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    constants.CATEGORY_NOT_WORD: lambda char: not (char.isalnum() or char == "_"),
}
_TAKE_ONE: dict[Any, Callable[[Any, set[str]], bool]] = {
    constants.LITERAL: lambda value, chars: chr(value) in chars,
    constants.NOT_LITERAL: lambda value, chars: chr(value) not in chars,
    constants.ANY: lambda _, chars: "\n" not in chars,
    constants.RANGE: lambda value, chars: any(value[0] <= ord(char) <= value[1] for char in chars if len(char) == 1),
    constants.CATEGORY: lambda value, chars: any(_CATEGORIES[value](char) for char in chars if len(char) == 1),
    constants.IN: _takes_one_of,
}
"""The nodes that take one character, and whether they take one of its cases."""

_RULES: dict[Any, Callable[[_Walk, Any, int], int]] = {
    constants.AT: _Walk.at,
    constants.ASSERT: _Walk.look,
    constants.ASSERT_NOT: _Walk.look_not,
    constants.BRANCH: _Walk.branch,
    constants.FAILURE: _Walk.nothing,
    constants.MAX_REPEAT: _Walk.repeat,
    constants.MIN_REPEAT: _Walk.repeat,
    constants.SUBPATTERN: _Walk.group,
}


def _parsed(source: str) -> Any:
    """Return the tree of an expression by Python's parser. ValueError: it is none, or has a part that is not read."""
    if len(source) > MOST_CHARS:
        raise ValueError(f"a pattern has {len(source)} characters; at most {MOST_CHARS} are read")
    try:
        tree = parser.parse(source)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise ValueError(f"the pattern {source:.200} is none: {error}") from None
    flags = tree.state.flags & ~(re.UNICODE | re.IGNORECASE)
    if flags:
        raise ValueError(f"the pattern {source:.200} has the flags {re.RegexFlag(flags)!r}, which are not read")
    _check(source, tree, 0)
    return tree


def _check(source: str, tree: Any, depth: int) -> None:
    """Check that each part of an expression is read. ValueError: one is not, or groups are too deep."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"the pattern {source:.200} has groups in more than {_MOST_DEPTH} groups")
    for kind, value in tree:
        if kind not in _TAKE_ONE and kind not in _RULES:
            raise ValueError(f"the pattern {source:.200} has a part that is not read: {str(kind).lower()}")
        if kind is constants.SUBPATTERN and (value[1] or value[2]):
            raise ValueError(f"the pattern {source:.200} has flags of a group, which are not read")
        if kind in (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.SUBPATTERN):
            _check(source, value[-1], depth + 1)
        elif kind in (constants.ASSERT, constants.ASSERT_NOT):
            _check(source, value[1], depth + 1)
        elif kind is constants.BRANCH:
            for each in value[1]:
                _check(source, each, depth + 1)
