"""Find what a chat template drops or refuses, and write it in another way; else it is an error.

What a template shows cannot be read from it: it is a program. A chat of the same form is rendered instead, in which
each text is a mark of its own. A mark that is not in the prompt is a text that the model would never see.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from crossdock.cluster.api.body.tool_calls import before_arguments
from crossdock.cluster.api.errors import shown, to_json, wrong
from crossdock.cluster.api.text.call_ids import CallIds, with_own_ids

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Returns the text that a template makes of messages and of its variables. Raises ValueError."""

_MARK = "crossdockprobe"  # and numbers between letters: no mark is a part of another, and no template writes one
_MARKS = re.compile(rf"{_MARK}\d+[xy]")
_KEPT_BYTES = 1 << 13  # of a chat's form as JSON; a longer one is tried each time
_KEPT = 512  # forms
_REASONING = ("reasoning", "reasoning_content", "thinking")
_NO_TEXT = frozenset(
    {
        *("role", "content", "tool_calls", "tool_call_id"),  # which are looked at
        # A template may leave these out. Names of participants and of functions, and old reasoning, as OpenAI does.
        *("name", *_REASONING, "annotations", "id"),
    }
)
_RULES = ("system", "developer")  # roles whose texts may stand in other messages
_SPEAKERS = ("user", "assistant", *_RULES)  # the name in other messages is a function's, which their call has too
_USE = {"function_call": "use 'tool_calls'", "audio": "send its transcript as text"}


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark, and the place of the text for which it stands. `param`: as errors name it, or the kind of a text that a
    template may leave out."""

    text: str
    param: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """A chat without its texts. `messages` and `documents` have a mark for each.

    `optional`: marks of texts that a template may leave out: participants' names, and reasoning.
    """

    messages: Sequence[Message]
    documents: Sequence[Mapping[str, str]]
    marks: Sequence[_Mark]
    optional: Sequence[_Mark]


class Carried(NamedTuple):
    """Messages for a template, and the kinds of texts that it leaves out all the same: `name`, `reasoning`."""

    messages: Sequence[Message]
    unread: Sequence[str]


def form_of(messages: Sequence[Message], documents: Sequence[Mapping[str, str]]) -> Form:
    """Return the form of a chat whose messages a template is to read."""
    marks: list[_Mark] = []
    optional: list[_Mark] = []
    ids: dict[str, str] = {}

    def mark(text: Any, param: str, role: str = "") -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        marks.append(_Mark(f"{_MARK}{len(marks)}x", param, role))
        return marks[-1].text

    def may_be_left_out(kind: str) -> str:
        optional.append(_Mark(f"{_MARK}{len(optional)}y", kind))
        return optional[-1].text

    def marked(message: Message, where: str) -> Message:
        role = message["role"]
        content = message["content"]
        calls = message.get("tool_calls")
        result = dict(message)
        if isinstance(content, str):
            result["content"] = mark(content, f"{where}.content", role)
        else:
            result["content"] = [
                {**part, "text": mark(part["text"], f"{where}.content[{i}]", role)} if part["type"] == "text" else part
                for i, part in enumerate(content)
            ]
        if role in _SPEAKERS and isinstance(message.get("name"), str) and message["name"].strip():
            result["name"] = may_be_left_out("name")
        if thoughts := [name for name in _REASONING if message.get(name)]:
            result |= dict.fromkeys(thoughts, may_be_left_out("reasoning"))
        if calls is not None:
            result["tool_calls"] = [marked_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        if isinstance(call_id := message.get("tool_call_id"), str):
            result["tool_call_id"] = ids.get(call_id, "")
        return result

    def marked_call(call: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        function = call["function"]
        given = str(call.get("id"))
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = {key: mark("value", f"{where}.function.arguments.{shown(key, 40)}") for key in arguments}
        ids[given] = f"call{len(ids)}"
        name = mark(function.get("name"), f"{where}.function.name")
        return {**call, "id": ids[given], "function": {**function, "name": name, "arguments": arguments}}

    bodies = [marked(message, f"messages[{i}]") for i, message in enumerate(messages)]
    papers = [{key: mark(text, f"documents[{i}]") for key, text in each.items()} for i, each in enumerate(documents)]
    return Form(bodies, papers, marks, optional)


def check_fields(messages: Sequence[Message], template: str) -> None:
    """Raise ApiError for a field of a message that says something and that the template does not name."""
    for i, message in enumerate(messages):
        if len(message) == 2:  # a role and a content
            continue
        for name, value in message.items():
            if name in _NO_TEXT or value in (None, False, "", [], {}) or re.search(rf"\b{re.escape(name)}\b", template):
                continue
            where = f"messages[{i}].{shown(name, 64)}"
            use = f"; {_USE[name]}" if name in _USE else ""
            raise wrong(where, f"this model's chat template does not read this field{use}", "unsupported_parameter")


class Carrier:
    """Writes chats so that the template shows all of their texts. Keeps how, for the forms of the newest chats."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Way] = OrderedDict()
        self._lock = Lock()  # threads render long chats

    def carried(
        self,
        messages: Sequence[Message],
        template: str,
        render: Render,
        variables: Mapping[str, Any],
        *,
        ids: CallIds | None = None,
        key: object = None,
    ) -> Carried:
        """Return the messages for a template, and what it leaves out.

        `render` is called with a chat of the same form, and with `variables`, in which documents are marked. `ids`: the
        form of the ids of calls. `key`: the template and what else decides how it renders; None: nothing is kept.
        Raises ApiError, which names the first text that the template drops.
        """
        check_fields(messages, template)
        form: Form | None = None
        documents = variables.get("documents") or ()
        roles = [] if documents else _roles(messages)
        if not roles:
            form = form_of(messages, documents)
            variables = {**variables, "documents": form.documents} if documents else variables
        written = to_json([key, roles or (form and form.messages), variables])
        keeps = key is not None and len(written) <= _KEPT_BYTES
        with self._lock:
            way = self._kept.get(written) if keeps else None
            if way is not None:
                self._kept.move_to_end(written)
        if way is None:
            way = _found(form or form_of(messages, ()), template, render, variables, ids)
            if keeps:
                with self._lock:
                    self._kept[written] = way
                    if len(self._kept) > _KEPT:
                        self._kept.popitem(last=False)
        if way.lost is not None:
            raise _dropped(way.lost)
        messages = _written(messages, way.steps)
        return Carried(messages if ids is None else with_own_ids(messages, ids), way.unread)


def _roles(messages: Sequence[Message]) -> list[str]:
    """Return the roles of messages that are a text each, which are their form; nothing for all other chats."""
    is_plain = all(len(each) == 2 and isinstance(each["content"], str) for each in messages)
    return [each["role"] if each["content"].strip() else f" {each['role']}" for each in messages] if is_plain else []


@dataclass(frozen=True, slots=True)
class _Way:
    """The steps after which a template shows the most texts, and the first text that it drops all the same.

    `unread`: the kinds of texts that it may leave out, and does.
    """

    steps: Sequence["_Step"]
    lost: _Mark | None = None
    unread: Sequence[str] = ()


def _found(form: Form, template: str, render: Render, variables: Mapping[str, Any], ids: CallIds | None) -> _Way:
    """Return how the messages of a chat's form are written. Renders at most 17 times, and once for most chats."""

    def shown_of(messages: Sequence[Message]) -> set[str] | None:
        """Return the marks in the prompt; None: the template refuses the messages."""
        try:
            text = render(messages if ids is None else with_own_ids(messages, ids), variables)
        except ValueError:
            return None
        return set(_MARKS.findall(text))

    def lost_in(shown: set[str] | None) -> Sequence[_Mark] | None:
        return None if shown is None else [mark for mark in form.marks if mark.text not in shown]

    steps: list[_Step] = [] if re.search(r"\bdeveloper\b", template) else [_developers_as_system]
    messages = _written(form.messages, steps)
    shown = shown_of(messages)
    lost = lost_in(shown)
    for step in _STEPS:
        if lost is not None and not lost:
            break
        other = step(messages)
        if list(other) == list(messages):
            continue
        shown_after = shown_of(other)
        after = lost_in(shown_after)
        if after is not None and (lost is None or len(after) < len(lost)):
            steps.append(step)
            messages = other
            lost = after
            shown = shown_after
    unread = [] if shown is None else [mark.param for mark in form.optional if mark.text not in shown]
    return _Way(steps, lost[0] if lost else None, tuple(dict.fromkeys(unread)))  # a template that refuses all says why


def _dropped(mark: _Mark) -> Exception:
    """Return the error for a text that the template drops."""
    where = mark.param
    known = ("user", "assistant", "system")
    if mark.role and mark.role not in known:
        where = where.partition(".")[0] + ".role"
        reason = f"this model's chat template shows no message of the role '{shown(mark.role, 64)}' there"
    else:
        reason = "this model's chat template does not show it there, so that the model would not see it"
    return wrong(where, reason, "unsupported_value")


# -- steps: ways to write the same messages ------------------------------------------------------------------------

_Step: TypeAlias = Callable[[Sequence[Message]], Sequence[Message]]


def _written(messages: Sequence[Message], steps: Sequence[_Step]) -> Sequence[Message]:
    """Return messages after steps."""
    for step in steps:
        messages = step(messages)
    return messages


def _developers_as_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Give OpenAI's newer name of the role its older one."""
    return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]


def _contents_in_parts(messages: Sequence[Message]) -> Sequence[Message]:
    """Write each content that is a text as a list of one part."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if isinstance(each["content"], str) else each
        for each in messages
    ]


def _one_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Join the system messages at the beginning: many templates have place for one."""
    num = next((i for i, each in enumerate(messages) if each["role"] not in _RULES), len(messages))
    if num < 2:
        return messages
    texts = [_text(each["content"]) for each in messages[:num]]
    first = messages[0]["content"][:0]  # of the same kind, a text or parts
    return [{**messages[0], "content": _joined(texts, first, [])}, *messages[num:]]


def _system_in_users(messages: Sequence[Message], first: int) -> Sequence[Message]:
    """Write system messages from the message `first` on into the user's message that comes next, or came last."""
    result = list(messages)
    users = [i for i, each in enumerate(messages) if each["role"] == "user"]
    waiting: list[int] = []
    for i, each in enumerate(messages):
        if each["role"] in _RULES and i >= first:
            waiting.append(i)
        elif each["role"] == "user" and waiting:
            texts = [_text(messages[j]["content"]) for j in waiting]
            result[i] = {**each, "content": _joined(texts, each["content"], [])}
            waiting = []
    if waiting and users:
        last = users[-1]
        texts = [_text(messages[j]["content"]) for j in waiting]
        result[last] = {**result[last], "content": _joined([], result[last]["content"], texts)}
    if not users:
        return messages
    return [each for i, each in enumerate(result) if each["role"] not in _RULES or i < first]


def _text_before_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Write the content of a message with calls as a message before it."""
    result: list[Message] = []
    for each in messages:
        if each.get("tool_calls") and _text(each["content"]).strip():
            result.append({"role": each["role"], "content": each["content"]})
            each = {**each, "content": each["content"][:0]}
        result.append(each)
    return result


def _text_after_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Write the content of a message with calls into the assistant's next message without calls."""
    result: list[Message] = []
    waiting: list[str] = []
    for i, each in enumerate(messages):
        if each["role"] == "assistant" and each.get("tool_calls") and _text(each["content"]).strip():
            if any(other["role"] == "assistant" and not other.get("tool_calls") for other in messages[i + 1 :]):
                waiting.append(_text(each["content"]))
                each = {**each, "content": each["content"][:0]}
        elif each["role"] == "assistant" and not each.get("tool_calls") and waiting:
            each = {**each, "content": _joined(waiting, each["content"], [])}
            waiting = []
        result.append(each)
    return result


def _call_by_call(messages: Sequence[Message]) -> Sequence[Message]:
    """Write several calls of one message as messages of their own, each with its result after it."""
    result: list[Message] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        i += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        end = next((j for j in range(i, len(messages)) if messages[j]["role"] != "tool"), len(messages))
        answers = list(messages[i:end])
        i = end
        for number, call in enumerate(calls):
            own = message if number == 0 else {"role": message["role"], "content": message["content"][:0]}
            found = [each for each in answers if each.get("tool_call_id") == call.get("id")]
            result += [{**own, "tool_calls": [call]}, *found]
            answers = [each for each in answers if each not in found]
        result += answers
    return result


def _calls_as_text(messages: Sequence[Message]) -> Sequence[Message]:
    """Write calls into the content, in the form in which any model writes forced calls."""
    result: list[Message] = []
    for each in messages:
        if calls := each.get("tool_calls"):
            functions = [call["function"] for call in calls]
            texts = [
                before_arguments(str(function.get("name"))) + json.dumps(function.get("arguments") or {}) + "}"
                for function in functions
            ]
            rest = {name: value for name, value in each.items() if name != "tool_calls"}
            each = {**rest, "content": _joined([], each["content"], ["\n".join(texts)])}
        result.append(each)
    return result


_FIRST: Sequence[_Step] = (
    _developers_as_system,
    _contents_in_parts,
    _one_system,
    partial(_system_in_users, first=1),
    _text_before_calls,
    _call_by_call,
    _text_after_calls,
)
_STEPS: Sequence[_Step] = (*_FIRST, *_FIRST, partial(_system_in_users, first=0), _calls_as_text)
"""In the order in which they are tried. The first ones are tried twice: some help after others alone."""


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _joined(
    before: Sequence[str], content: str | Sequence[Mapping[str, Any]], after: Sequence[str]
) -> str | list[Mapping[str, Any]]:
    """Return a content with texts before and after it, and empty lines between them."""
    if isinstance(content, str):
        return "\n\n".join([*before, *([content] if content else []), *after])
    firsts = [{"type": "text", "text": f"{text}\n\n"} for text in before]
    lasts = [{"type": "text", "text": f"\n\n{text}"} for text in after]
    return [*firsts, *content, *lasts]
