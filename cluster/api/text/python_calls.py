"""Calls as a list in Python, [f(a=1), g()], with literals of Python and of JSON."""

import ast
import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from crossdock.cluster.api.text.call_values import read_json, write_json
from crossdock.cluster.api.text.message_parser import num_held
from crossdock.cluster.api.text.open_calls import SIGN

_MOST_CHARS = 1 << 15  # that Python's parser reads at once, but for a single string; it takes up to 7 µs for each
_ERRORS = ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError
_SPACE = r"\s{0,64}"
_NAME = r"[A-Za-z_][\w.]{0,255}"
_KEYWORD = re.compile(rf"(?P<key>[^\W\d]\w*){_SPACE}=(?!=)(?P<value>.*)", re.DOTALL)
_QUOTES = ("'''", '"""', "'", '"')
_STRING = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in _QUOTES}  # what matters within one
_FOLLOWS = re.compile(rf"{_SPACE}(?:,{_SPACE}(?P<name>{_NAME}){_SPACE}\(|\])")  # a call
_MAY_FOLLOW = re.compile(rf"{_SPACE}(?:,{_SPACE}(?:{_NAME}{_SPACE})?)?")
_TAIL = 512  # characters behind a call that are looked at

# The beginning of a list whose first call shows that it has named arguments, or none.
PYTHON_HEAD = rf"{_SPACE}\[{_SPACE}(?P<name>{_NAME}){_SPACE}\((?={_SPACE}(?:[^\W\d]\w{{0,255}}{_SPACE}=[^=]|\)))"


class PythonCall:
    """The rest of a list from the arguments of one call on, see `OpenCall`. Each argument is shown once it is
    complete. One that the model wrote wrongly is a text, and one without a name is left out."""

    def __init__(self, marks: Sequence[str], known: Collection[str] | None) -> None:
        """`marks`: markers that end the list wherever they stand outside a string. `known`: the functions that a
        further call may name; None: any."""
        self.following: str | None = None
        self._marks = marks
        self._known = known
        self._next = re.compile("|".join(map(re.escape, (*marks, *_QUOTES))) + r"|[()\[\]{},]")
        self._position = 0  # all before it is read
        self._begin = 0  # of the argument that is read
        self._depth = 0
        self._quote = ""  # of the string that is open
        self._is_first = True
        self._end: int | None = None  # of the arguments
        self._has_ended = False  # the list, at `_end`

    def take(self, text: str) -> tuple[str, int | None]:
        shown: list[str] = []
        while self._end is None:
            found = (_STRING[self._quote] if self._quote else self._next).search(text, self._position)
            if found is None:
                # A backslash waits for what it escapes, and one mark of three for the others.
                marks = (self._quote, 2 * "\\") if self._quote else self._marks
                held = num_held(text[self._position :], marks)
                self._position = max(self._position, len(text) - held)
                return "".join(shown), None
            mark = found[0]
            if not self._quote and mark in "'\"" and text[found.start() : found.start() + 3] in (mark, 2 * mark):
                return "".join(shown), None  # it may be the first of three
            self._position = found.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in _QUOTES:
                self._quote = mark
            elif mark in self._marks:
                shown.append(self._argument(text[self._begin : found.start()]) + self._closing())
                return "".join(shown), found.start()
            else:
                shown.append(self._bracket(text, found))
        return "".join(shown), self._after(text, self._end)

    def last(self, text: str, *, is_cut: bool) -> tuple[str, int]:
        if self._end is not None:
            rest = text[self._end :].strip(" \n,")
            return "", len(text) if any(mark.startswith(rest) for mark in (*self._marks, "")) else self._end
        raw = text[self._begin :].replace(SIGN, "").rstrip()
        shown = ""
        if not self._depth and not self._quote and (not is_cut or raw.endswith(("'", '"', "]", "}"))):
            found = _KEYWORD.fullmatch(raw.lstrip())
            shown = "" if found is None or _read(found["value"]) is None else self._argument(raw)
        return shown + ("" if is_cut else self._closing()), len(text)

    def _bracket(self, text: str, found: re.Match[str]) -> str:
        """Return the argument that a bracket or a comma ends; nothing within one."""
        mark = found[0]
        self._depth += (mark in "([{") - (mark in ")]}")
        if self._depth > 0 or (mark != "," and self._depth == 0):
            return ""
        shown = self._argument(text[self._begin : found.start()])
        self._begin = found.end()
        if mark == ",":
            return shown
        self._end = found.start() if mark == "]" else found.end()  # the list may end without the call
        return shown + self._closing()

    def _after(self, text: str, end: int) -> int | None:
        """Return where the call ends, with what belongs to the list; None: more text decides."""
        found = None if self._has_ended else _FOLLOWS.match(text, end)
        if found is not None and found["name"] is not None:
            is_call = self._known is None or found["name"] in self._known
            self.following = found["name"] if is_call else None
            return found.end() if is_call else end
        if found is not None:
            self._has_ended, self._end = True, found.end()
            end = found.end()
        rest = text[end : end + _TAIL]
        after = rest.lstrip()
        if any(after.startswith(mark) for mark in self._marks):
            return end + len(rest) - len(after)
        if self._marks and len(rest) < _TAIL and (not after or any(mark.startswith(after) for mark in self._marks)):
            return None
        return None if not self._has_ended and len(rest) < _TAIL and _MAY_FOLLOW.fullmatch(rest) else end

    def _argument(self, raw: str) -> str:
        """Return an argument as a part of a JSON object; nothing where it has no name."""
        found = _KEYWORD.fullmatch(raw.replace(SIGN, "").strip())
        if found is None:
            return ""
        value = found["value"].strip()
        written = _read(value) or write_json(value)
        before = "{" if self._is_first else ", "
        self._is_first = False
        return f"{before}{write_json(found['key'])}: {written}"

    def _closing(self) -> str:
        return "{}" if self._is_first else "}"


def _read(text: str) -> str | None:
    """Return the value of a text as JSON; None where it is none. A string may have line breaks."""
    text = text.strip()
    if len(text) > _MOST_CHARS and not text.startswith(_QUOTES):
        return None
    for written in (text, text.replace("\n", "\\n")):
        try:
            return write_json(python_value(_parsed(written)))
        except _ERRORS:
            continue
    return None


def python_list(text: str) -> Sequence[tuple[str, str]]:
    """Return the name and the arguments of each call in a list. Raises ValueError or SyntaxError for other texts."""
    if len(text) > _MOST_CHARS:
        raise ValueError(f"more than {_MOST_CHARS} characters")
    tree = _parsed(text.strip())
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("not a list of calls")
    return [_call(each) for each in tree.elts]


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape in a string is the model's, and no matter for a log
        return ast.parse(text, mode="eval").body


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(each.arg): python_value(each.value) for each in node.keywords}
    return ast.unparse(node.func), write_json(arguments)


def python_value(node: ast.expr) -> Any:
    """Return the value of a literal of Python or of JSON. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=("true" | "false" | "null") as name):
            return read_json(name)
        case ast.List(elts=parts):
            return [python_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {
                str(ast.literal_eval(key)): python_value(part) for key, part in zip(keys, values, strict=True) if key
            }
        case _:
            return ast.literal_eval(node)
