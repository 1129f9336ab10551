"""The forms in which model families write tool calls: where a call begins and ends, and what it says."""

import ast
import html
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from crossdock.cluster.api.text.call_values import (
    Brackets,
    Schemas,
    read_json,
    schema_of,
    typed,
    types_of,
    write_json,
)

# Before a marker that is a token of its own, so that the same characters written with other tokens are text. Unicode
# reserves this character for such uses within programs.
SIGN = "\ufdd0"
_MOST_ENDS = 64  # closing markers that a call may contain before its own; each costs one reading of the call
_PYTHON_CHARS = 1 << 15  # of calls in Python; its parser takes up to 7 µs for each


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call. `arguments`: a JSON object. Raises ValueError for a name that cannot be sent."""

    name: str
    arguments: str

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
    is_in_value: Callable[[str], bool] | None = None  # a closing marker after this text may be a part of a value


class CallScan:
    """Looks for the end of one call in a text that grows."""

    def __init__(self, form: CallForm, schemas: Schemas) -> None:
        self.form = form
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
        form, closer = self.form, self.form.closer
        while (at := text.find(closer, self._position)) >= 0:
            self._position = at + len(closer)
            if form.is_in_value is None and self._strings.end(text, at) is None and self._strings.quote:
                continue
            body = text[:at].replace(SIGN, "")
            if calls := self._read(body):
                return Taken(self._position, calls)
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
    value = read_json(text.lstrip("; \n"))
    return [_json_call(each) for each in (value if isinstance(value, list) else [value])]


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


def _call(name: str, arguments: Any) -> Call:
    """Return a call. Some models write the arguments as a string of JSON; none at all is an empty object."""
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no object")
    return Call(name, write_json(arguments))


def header_calls(pattern: str) -> Reader:
    """Return the reader of a header and a JSON object: `pattern` has the groups `name` and `arguments`."""

    def read(text: str, schemas: Schemas) -> Sequence[Call]:
        if text.lstrip().startswith("["):
            return json_calls(text, schemas)
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found is None:
            raise ValueError("not a call")
        return [_call(found["name"], read_json(found["arguments"]))]

    return read


def json_arguments(text: str) -> str | None:
    """Return the arguments of a call whose text is nothing else; None where this is no JSON object."""
    try:
        return _call("function", read_json(text)).arguments
    except ValueError:
        return None


def tagged_calls(head: str, parameter: str, *, escapes: bool = False) -> Reader:
    """Return the reader of calls that write each parameter between tags.

    `head` has the group `name`. `parameter` has `key` and `value`, and may have `kind`: "string" or "true" for a
    value that is text, whatever the schema. `escapes`: names are escaped as in XML.
    """
    one = re.compile(parameter, re.DOTALL)

    def read(text: str, schemas: Schemas) -> Sequence[Call]:
        found = re.match(head, text, re.DOTALL)
        if found is None:
            raise ValueError("not a call")
        unescape = html.unescape if escapes else str
        name, position = unescape(found["name"]), found.end()
        types: dict[str, Sequence[str]] = {}
        arguments: dict[str, Any] = {}
        while (each := one.match(text, position)) is not None:
            key, kind = unescape(each["key"]), each.groupdict().get("kind")
            if key not in types:  # a schema may be long, and a call may name a parameter often
                types[key] = types_of(schema_of(schemas, name, key)) if kind is None else ()
            arguments[key] = each["value"] if kind in ("string", "true") else typed(each["value"], types[key])
            position = each.end()
        if text[position:].strip():
            raise ValueError("not a parameter")
        return [Call(name, write_json(arguments))]

    return read


def python_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read [f(a=1), g()], with literals of Python and of JSON, where all of the functions exist."""
    if len(text) > _PYTHON_CHARS:
        raise ValueError(f"more than {_PYTHON_CHARS} characters")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape in a string is the model's, and no matter for a log
        tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("not a list of calls")
    calls = [_python_call(each) for each in tree.elts]
    return calls if all(call.name in schemas for call in calls) else ()


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("not a call with named arguments")
    return Call(
        ast.unparse(node.func), write_json({str(each.arg): _python_value(each.value) for each in node.keywords})
    )


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=("true" | "false" | "null") as name):
            return read_json(name)
        case ast.List(elts=parts):
            return [_python_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {
                str(ast.literal_eval(key)): _python_value(part) for key, part in zip(keys, values, strict=True) if key
            }
        case _:
            return ast.literal_eval(node)


def gemma_calls(text: str, schemas: Schemas) -> Sequence[Call]:
    """Read call:f{key:<|"|>text<|"|>,other:1}: strings between marks of their own, and keys without quotes."""
    found = re.fullmatch(r"\s*call:(?P<name>[^{\s]+)(?P<arguments>\{.*\})\s*", text, re.DOTALL)
    if found is None:
        raise ValueError("not a call")
    parts = found["arguments"].split('<|"|>')
    if len(parts) % 2 == 0:
        raise ValueError("a string without an end")
    keyed = (re.sub(r'([{,]\s*+)([^\s{}\[\]:,"][^{}\[\]:,"]*+):', _quoted_key, part) for part in parts[::2])
    texts = (write_json(part) for part in parts[1::2])
    written = [next(keyed)]
    for part in texts:
        written += [part, next(keyed, "")]
    return [_call(found["name"], read_json("".join(written)))]


def _quoted_key(found: re.Match[str]) -> str:
    return f"{found[1]}{write_json(found[2].rstrip())}:"
