"""Tools and the choice among them: which are allowed, which call `tool_choice` forces, and its grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crossdock.cluster.api.body.constraints import from_text
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.workers.schedule.request.submission import CLOSED, Grammar

# As `json.dumps` writes, and with no white space that a small model could repeat for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_INPUT_WORDS = {  # a schema without these words declares no input
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required", "minProperties"),
    *("$ref", "allOf", "anyOf", "oneOf", "const", "enum"),
}


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The output must be one call of one of these functions. `parameters`: the JSON schema of each, by name."""

    parameters: Mapping[str, Mapping[str, Any]]
    is_named: bool  # the client has named the function, and did not leave the choice to the model

    def grammar(self) -> Grammar:
        """Return the grammar of the call. Raises ApiError for schemas that are too long."""
        rules = ["start: " + " | ".join(f"call{i}" for i in range(len(self.parameters)))]
        for i, (name, schema) in enumerate(self.parameters.items()):
            rules.append(f'call{i}: {json.dumps(before_arguments(name))} arguments{i} "}}"')
            rules.append(f"arguments{i}: %json {json.dumps({**schema, CLOSED: True, 'x-guidance': _WRITTEN})}")
        grammar = from_text("lark", "\n".join(rules), "tools")
        assert grammar is not None
        return grammar


def check_functions(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ApiError for a tool that is no function in the form of chats."""
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            reason = 'A tool must be {"type": "function", "function": {"name": …}}, and the name a string.'
            raise ApiError(reason, param=f"tools[{i}]", code="invalid_value")


def allowed_tools(
    tools: Sequence[Mapping[str, Any]], given: Any, param: str
) -> tuple[list[Mapping[str, Any]], Literal["auto", "required"]]:
    """Return the tools that `allowed_tools` leaves, and the choice among these. The tools have been checked.

    `given` is the object with `mode` and `tools`, at `param` of the body. Each of its tools has its name in it, as in
    Responses, or in its `function`, as in chats.

    Raises:
        ApiError: `given` has another form, or names a tool that is not there.
    """
    if not isinstance(given, dict):
        raise wrong(param, "it must be an object with 'mode' and 'tools'")
    mode = given.get("mode")
    listed = given.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{param}.mode", "it must be 'auto' or 'required'")
    if not isinstance(listed, list):
        raise wrong(f"{param}.tools", "it must be a list")
    names = {tool["function"]["name"] for tool in tools}
    allowed = set()
    for i, tool in enumerate(listed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise wrong(f"{param}.tools[{i}]", "it names no function of 'tools'")
        allowed.add(name)
    return [tool for tool in tools if tool["function"]["name"] in allowed], mode


def forced_call(tools: Sequence[Mapping[str, Any]], choice: Any) -> ForcedCall | None:
    """Return the call that `tool_choice` forces; None where it forces none. The tools have been checked.

    Raises:
        ApiError: the choice has another form, or names a tool that is not there.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = {
        tool["function"]["name"]: arguments_schema(tool["function"], f"tools[{i}].function")
        for i, tool in enumerate(tools)
    }
    if choice == "required":
        if functions:
            return ForcedCall(functions, is_named=False)
        raise wrong("tool_choice", "'required' needs 'tools'")
    if not isinstance(choice, dict):
        raise wrong("tool_choice", "it must be 'auto', 'none', 'required', or an object that names a function")
    if choice.get("type") != "function":
        reason = "an object must have the type 'function' or 'allowed_tools'"
        raise wrong("tool_choice", reason, "unsupported_value")
    named = choice.get("function")
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in functions:
        raise wrong("tool_choice", "it names no function of 'tools'")
    return ForcedCall({name: functions[name]}, is_named=True)


def arguments_schema(function: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object. Raises ApiError for any other schema."""
    schema = function.get("parameters")
    param = f"{param}.parameters"
    if schema is None:
        return _NO_PARAMETERS
    if not isinstance(schema, dict):
        raise ApiError(f"'{param}' must be a JSON schema.", param=param, code="invalid_value")
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise wrong(f"{param}.type", "the arguments of a call are an object")
    return {**schema, "type": "object"} if schema.keys() & _INPUT_WORDS else _NO_PARAMETERS


def before_arguments(name: str) -> str:
    """Return the texts that the model writes before the arguments; after the arguments it writes a brace."""
    return f'{{"name": {json.dumps(name)}, "arguments": '
