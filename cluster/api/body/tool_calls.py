"""Forced tool calls: the grammar of one call, and the call in the text that the model writes."""

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossdock.cluster.api.body.constraints import from_text
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.request import FinishReason, Grammar

# As `json.dumps` writes, and with no white space that a small model could repeat for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The output must be one call of one of these functions. `parameters`: the JSON schema of each, by name."""

    parameters: Mapping[str, Mapping[str, Any]]
    is_named: bool  # the client has named the function, and did not leave the choice to the model

    def grammar(self) -> Grammar:
        """Return the grammar of the call. Raises ApiError for schemas that are too long."""
        rules = ["start: " + " | ".join(f"call{i}" for i in range(len(self.parameters)))]
        for i, (name, schema) in enumerate(self.parameters.items()):
            rules.append(f'call{i}: {json.dumps(_before(name))} arguments{i} "}}"')
            rules.append(f"arguments{i}: %json {json.dumps({**schema, 'x-guidance': _WRITTEN})}")
        grammar = from_text("lark", "\n".join(rules), "tools")
        assert grammar is not None
        return grammar

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason: a call that the client has named ends as a text does."""
        is_whole = reason == FinishReason.STOP.value
        return "tool_calls" if is_whole and not self.is_named else reason


def forced_call(tools: Sequence[Mapping[str, Any]], choice: Any) -> ForcedCall | None:
    """Return the call that `tool_choice` forces; None where it forces none. The tools have been checked.

    Raises:
        ApiError: the choice has another form, or names a tool that is not there.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = {tool["function"]["name"]: _schema(i, tool["function"]) for i, tool in enumerate(tools)}
    if choice == "required":
        if functions:
            return ForcedCall(functions, is_named=False)
        raise _refused("'required' needs 'tools'", "invalid_value")
    if not isinstance(choice, dict):
        raise _refused("it must be 'auto', 'none', 'required', or an object that names a function", "invalid_value")
    if choice.get("type") != "function":
        raise _refused("only an object of type 'function' is supported", "unsupported_value")
    named = choice.get("function")
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise _refused("it names no function of 'tools'", "invalid_value")
    return ForcedCall({name: functions[name]}, is_named=True)


def _refused(reason: str, code: str) -> ApiError:
    return ApiError(f"Invalid value for 'tool_choice': {reason}.", param="tool_choice", code=code)


def _schema(i: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters")
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict):
        param = f"tools[{i}].function.parameters"
        raise ApiError(f"'{param}' must be a JSON schema.", param=param, code="invalid_value")
    return schema


def _before(name: str) -> str:
    """Return what the model writes before the arguments; after these it writes a brace."""
    return f'{{"name": {json.dumps(name)}, "arguments": '


@dataclass(slots=True)
class CallReader:
    """Reads the call in the text of one choice, which comes in pieces."""

    names: Iterable[str]
    _text: str = ""  # before the arguments begin; then what may be the last brace
    _has_begun: bool = False
    _arguments: list[str] = field(default_factory=list)

    def delta(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return what a piece adds to the message, in the form of a streamed event; nothing where it adds nothing.

        A text that ends before its arguments begin is content.
        """
        self._text += text
        call: dict[str, Any] = {"index": 0}
        if not self._has_begun:
            name = next((name for name in self.names if self._text.startswith(_before(name))), None)
            if name is None:
                return {"content": self._text} if finish_reason is not None and self._text else {}
            self._has_begun = True
            self._text = self._text.removeprefix(_before(name))
            call |= {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name}}
        arguments = self._new_arguments(finish_reason)
        if not arguments and "function" not in call:
            return {}
        return {"tool_calls": [{**call, "function": {**call.get("function", {}), "arguments": arguments}}]}

    def _new_arguments(self, finish_reason: str | None) -> str:
        """Return the text without its last brace, which ends the call and not the arguments if nothing follows."""
        has_brace = self._text.endswith("}")
        if has_brace and finish_reason == FinishReason.LENGTH.value:
            has_brace = _is_json("".join([*self._arguments, self._text[:-1]]))
        arguments = self._text[:-1] if has_brace else self._text
        self._text = "}" if has_brace else ""
        self._arguments.append(arguments)
        return arguments


def whole_message(reader: CallReader, text: str, finish_reason: str | None) -> dict[str, Any]:
    """Return the fields of a whole message in which the model has written this text."""
    delta = reader.delta(text, finish_reason)
    calls = [{key: part for key, part in call.items() if key != "index"} for call in delta.get("tool_calls", ())]
    return {"content": delta.get("content"), "tool_calls": calls} if calls else {"content": text}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
