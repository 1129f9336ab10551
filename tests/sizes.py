"""How many entries each container holds that an object keeps: to see which grow with the work that has been done."""

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from collections.abc import Set as AbstractSet
from typing import Any

_CONTAINERS = (dict, list, set, deque)


def sizes(root: object) -> dict[str, int]:
    """Return, by path of attributes, the length of every container that `root` and our objects within it keep. Objects
    in a container share a path: the longest counts."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([("", root)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            found[path] = max(found.get(path, 0), len(value))
        waiting.extend((f"{path}{step}", inner) for step, inner in _within(value))
    return found


def growing(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the lengths, before and after, of the containers that have become longer."""
    return {path: (before.get(path, 0), size) for path, size in after.items() if size > before.get(path, 0)}


def _within(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from (("[*]", inner) for inner in list(value.values()) if not isinstance(inner, Sized | int))
    elif isinstance(value, AbstractSet | list | deque):
        yield from (("[*]", inner) for inner in list(value) if not isinstance(inner, Sized | int))
    elif type(value).__module__.startswith(("crossdock", "tests")):
        yield from ((f".{name}", inner) for name, inner in _attributes(value))


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*names, *getattr(value, "__dict__", ())):
        if not name.startswith("__") and hasattr(value, name):
            yield name, getattr(value, name)
