"""The forms in which model families write tool calls: where a call begins and ends, and what it says."""

import html
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from crossdock.cluster.api.text.call_values import (
    Brackets,
    Schemas,
    properties_of,
    read_json,
    typed,
    types_of,
    write_json,
)
from crossdock.cluster.api.text.gemma_calls import gemma_value
from crossdock.cluster.api.text.open_calls import SIGN, End, JsonCall, OpenCall, Parameters, TaggedCall
from crossdock.cluster.api.text.python_calls import python_list

_MOST_ENDS = 64  # closing markers that a call may contain before its own; each costs one reading of the call


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call. `arguments`: a JSON object. `id`: as the model wrote it; None: it wrote none.

    Raises ValueError for a name that cannot be sent.
    """

    name: str
    arguments: str
    id: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a call without a name")
        self.name.encode()  # not half of a surrogate pair


# Returns the calls in a text. Raises ValueError for a text that is no call.
Reader: TypeAlias = Callable[[str, Schemas], Sequence[Call]]


@dataclass(frozen=True, slots=True)
class Taken:
    """The end of a call in the text after its opening marker, and the calls up to there; none: malformed."""

    end: int
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to write calls.

    `opener`: the marker that begins them; empty: they begin a message without one. `closer`: the marker that ends
    them; empty: the first closed bracket does. `begins` matches every beginning of a call, however short. Each token
    tries `begins` and `value` again, so they look at a bounded part of the text. Without `is_in_value` a call is JSON,
    whose strings may contain closing markers.
    """

    opener: str
    read: Reader
    closer: str = ""
    begins: str = r""
    quotes: str = '"'
    value: str = ""  # where the text that ends with its bracket begins, as a pattern
    head: str = ""  # all before the arguments, where a call may be shown while it is written; has the group `name`
    parameters: Parameters | None = None  # of such a call; None: the arguments are JSON, or in a form of their own
    # Reads that form, given the markers that end a call, and the tools.
    own: Callable[[Sequence[str], Schemas], OpenCall] | None = None
    ends: End = "marker"  # such a call
    in_content: str = ""  # how a call without a marker begins behind text, but for white space; empty: never there
    is_in_value: Callable[[str], bool] | None = None  # a closing marker after this text may be a part of a value

    def opened(self, name: str, schemas: Schemas) -> OpenCall:
        """Return the rest of a call of a function, after its `head`."""
        if self.parameters is not None:
            return TaggedCall(self.parameters, self.closer, schemas, name)
        marks = [mark for mark in (self.closer, self.opener) if mark]
        return JsonCall(marks, self.ends) if self.own is None else self.own(marks, schemas)


class CallScan:
    """Looks for the end of one call in a text that grows."""

    def __init__(self, form: CallForm, schemas: Schemas) -> None:
        self.form = form
        self.may_open = True  # its beginning may still be that of a call that is shown while it is written
        self._schemas = schemas
        self._brackets: Brackets | None = None
        self._strings = Brackets()
        self._num_ends = 0
        self._position = 0

    def take(self, text: str) -> Taken | None:
        """Return the call at the beginning of a text; None while more text may complete one."""
        form = self.form
        if re.match(form.begins, text) is None:
            return Taken(0, ())
        return self._closed(text) if form.closer else self._bracketed(text)

    def last(self, text: str, *, is_cut: bool) -> Taken:
        """Return the call that the end of the output completes. `is_cut`: its marker may have been cut off."""
        calls = () if is_cut and self.form.closer else self._read(text)
        return Taken(len(text) if calls else 0, calls)

    def _closed(self, text: str) -> Taken | None:
        form = self.form
        closer = self.form.closer
        while (at := text.find(closer, self._position)) >= 0:
            self._position = at + len(closer)
            if form.is_in_value is None and self._strings.end(text, at) is None and self._strings.quote:
                continue
            body = text[:at].replace(SIGN, "")
            if calls := self._read(body):
                return Taken(self._position, calls)
            # The last opener before this marker: each marker is looked for once more at most.
            if (another := text.rfind(form.opener, 0, at)) >= 0:
                return Taken(another, self._read(text[:another]))
            self._num_ends += 1
            if self._num_ends > _MOST_ENDS or form.is_in_value is None or not form.is_in_value(body):
                return Taken(self._position, ())
        self._position = max(self._position, len(text) - len(closer) + 1)
        return None

    def _bracketed(self, text: str) -> Taken | None:
        if self._brackets is None:
            found = re.match(self.form.value, text, re.DOTALL)
            if found is None:
                return None
            self._brackets = Brackets(self.form.quotes, found.end())
        end = self._brackets.end(text)
        return None if end is None else Taken(end, self._read(text[:end]))

    def _read(self, body: str) -> Sequence[Call]:
        try:
            return self.form.read(body.replace(SIGN, ""), self._schemas)
        except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
            return ()


# -- readers ---------------------------------------------------------------------------------------------------------


def json_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read {"name": …, "arguments": {…}}, or a list of these. Llama writes "parameters"."""
    return [_json_call(each) for each in _json_list(text)]


def _json_list(text: str) -> Sequence[Any]:
    value = read_json(text.lstrip("; \n"))
    return value if isinstance(value, list) else [value]


def known_json_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read calls without a marker, as `json_calls` does: an object is a call only if it names an existing function."""
    calls = json_calls(text, schemas)
    return calls if all(call.name in schemas for call in calls) else ()


def _json_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("not a call")
    if "arguments" not in value and "parameters" not in value:
        raise ValueError("a call without arguments")
    return _call(value["name"], value.get("arguments", value.get("parameters")))


def _call(name: str, arguments: Any, call_id: str | None = None) -> Call:
    """Return a call. Some models write the arguments as a string of JSON; none at all is an empty object."""
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no object")
    return Call(name, write_json(arguments), call_id)


def header_calls(pattern: str) -> Reader:
    """Return the reader of a header and a JSON object.

    `pattern` has the groups `name` and `arguments`, and may have `id`.
    """

    def read(text: str, schemas: Schemas) -> Sequence[Call]:
        if text.lstrip().startswith("["):
            return [replace(_json_call(each), id=_id_in(each)) for each in _json_list(text)]
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found is None:
            raise ValueError("not a call")
        return [_call(found["name"], read_json(found["arguments"]), found.groupdict().get("id"))]

    return read


def _id_in(call: dict[str, Any]) -> str | None:
    """Return the id that a model wrote into a call in JSON, as Mistral's first formats have it."""
    call_id = call.get("id")
    return call_id if isinstance(call_id, str) else None


def json_arguments(text: str) -> str | None:
    """Return the arguments of a call whose text is nothing else; None where this is no JSON object."""
    try:
        return _call("function", read_json(text)).arguments
    except ValueError:
        return None


def tagged_calls(head: str, parameter: str, *, escapes: bool = False, wrappers: Collection[str] = ()) -> Reader:
    """Return the reader of calls that write each parameter between tags.

    `head` has the group `name`. `parameter` has `key` and `value`. It may have `kind`, which is "string" for a value
    that is text whatever the schema; or `is_text`, which is "true" or "false" and holds where the schema says nothing.
    `escapes`: names are escaped as in XML. `wrappers`: names of a single parameter that holds all arguments.
    """
    one = re.compile(parameter, re.DOTALL)

    def read(text: str, schemas: Schemas) -> Sequence[Call]:
        found = re.match(head, text, re.DOTALL)
        if found is None:
            raise ValueError("not a call")
        unescape = html.unescape if escapes else str
        name = unescape(found["name"])
        position = found.end()
        types: dict[str, Sequence[str]] = {}
        arguments: dict[str, Any] = {}
        while (each := one.match(text, position)) is not None:
            groups = each.groupdict()
            key = unescape(each["key"])
            kind = groups.get("kind")
            is_text = groups.get("is_text")
            if key not in types:  # a schema may be long, and a call may name a parameter often
                types[key] = types_of(schemas, name, key) if kind is None else ()
            is_raw = kind == "string" or (is_text == "true" and not types[key])
            arguments[key] = each["value"] if is_raw else typed(each["value"], types[key])
            position = each.end()
        if text[position:].strip():
            raise ValueError("not a parameter")
        return [Call(name, write_json(_unwrapped(arguments, wrappers, properties_of(schemas, name))))]

    return read


def _unwrapped(arguments: dict[str, Any], wrappers: Collection[str], declared: Collection[str]) -> dict[str, Any]:
    """Return the arguments, or those in a single one of a wrapper's name that the function does not declare."""
    name = next(iter(arguments)) if len(arguments) == 1 else ""
    if name not in wrappers or name in declared:
        return arguments
    value = arguments[name]
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError:
            return arguments
    return value if isinstance(value, dict) else arguments


def python_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read [f(a=1), g()], with literals of Python and of JSON, where all of the functions exist."""
    calls = _python_list(text)
    return calls if all(call.name in schemas for call in calls) else ()


def marked_python_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read [f(a=1), g()] after a marker, or the same calls as a list in JSON."""
    return json_calls(text, schemas) if re.match(r"\s*\[\s*\{", text) else _python_list(text)


def _python_list(text: str) -> Sequence[Call]:
    return [Call(name, arguments) for name, arguments in python_list(text)]


def gemma_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read call:f{key:<|"|>text<|"|>,other:1}: strings between marks of their own, and keys without quotes.

    Some models leave out the word before the colon.
    """
    found = re.fullmatch(r"\s*(?:call)?:(?P<name>[^{\s]+)(?P<arguments>\{.*\})\s*", text, re.DOTALL)
    if found is None:
        raise ValueError("not a call")
    return [_call(found["name"], gemma_value(found["arguments"]))]
