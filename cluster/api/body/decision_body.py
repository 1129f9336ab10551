"""Bodies of requests for decisions, as OpenAI's /v1/decisions has them: one input, and typed questions about it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.bodies import CompletionRequest
from crossdock.cluster.api.body.conversation_body import ConversationChat, object_of, text_of
from crossdock.cluster.api.body.embedding_body import PooledBody
from crossdock.cluster.api.body.json_body import invalid_field
from crossdock.cluster.api.body.other_fields import RefusedField
from crossdock.cluster.api.body.response_items import chat_messages, input_items
from crossdock.cluster.api.errors import ApiError, to_json, wrong
from crossdock.workers.schedule.request.submission import SamplingParams

Kind: TypeAlias = Literal["predicate", "choice", "score"]
_Name = Annotated[str, Field(max_length=bounds.ITEM_NAME_CHARS)]
_TEXT_ALONE = "questions are about texts alone; send pictures to /v1/chat/completions"


class DecisionChat(ConversationChat):
    """The chat in which the model is asked one question."""

    parameter_names: ClassVar[Mapping[str, str]] = {"messages": "input"}


class DecisionCompletion(CompletionRequest):
    """Questions as prompts of completions with one token, whose log-probabilities are those of all labels."""

    label_ids: tuple[int, ...]

    prompt_field: ClassVar[str] = "input"

    def sampling(
        self, max_tokens: int, *, defaults: Mapping[str, Any], vocab_size: int, max_logprobs: int, **others: Any
    ) -> SamplingParams:
        """Return parameters for the likeliest token. No client sees this token."""
        plain = super().sampling(max_tokens, defaults={}, vocab_size=vocab_size, max_logprobs=max_logprobs, **others)
        labels: Mapping[str, Any] = {"logprobs": 0, "logprob_token_ids": self.label_ids}
        return replace(plain, temperature=0.0, logprobs_mode="raw_logprobs", **labels)


@dataclass(frozen=True, slots=True)
class Option:
    """One of the answers that a question allows. `value`: as answers show it; `text`: as the model reads it."""

    value: str | bool | int
    text: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and what the model may answer."""

    kind: Kind
    name: str | None
    instructions: str
    options: Sequence[Option]

    def written(self, labels: Sequence[str]) -> str:
        """Return the question as the model reads it. `labels`: a word for each option, one token long."""
        what = f"Is this true? {self.instructions}" if self.kind == "predicate" else self.instructions
        lines = [
            f"{label}: {option.text}" + (f" ({option.description})" if option.description else "")
            for label, option in zip(labels, self.options, strict=False)
        ]
        last = f"Answer with one label alone, from {labels[0]} to {labels[len(self.options) - 1]}."
        return "\n".join([what, *lines, last])

    def answer(self, logprobs: Sequence[float]) -> dict[str, Any]:
        """Return the answer as JSON. `logprobs`: of each option's label, among all tokens of the vocabulary.

        Probabilities are those of the options alone. As in vLLM, `confidence` is that of the likeliest option among all
        tokens: low where the model would rather have said something else.
        """
        top = max(logprobs)
        weights = [math.exp(each - top) for each in logprobs]
        shares = [each / sum(weights) for each in weights]
        head = {"type": self.kind, "name": self.name}
        if self.kind == "predicate":
            return {**head, "probability": shares[1]}
        best = shares.index(max(shares))
        listed = [
            {"value": option.value, **({"label": option.text} if self.kind == "score" else {}), "probability": share}
            for option, share in zip(self.options, shares, strict=True)
        ]
        if self.kind == "choice":
            found: dict[str, Any] = {"choice": self.options[best].value}
        else:
            found = {"score": sum(i * share for i, share in enumerate(shares))}
        return {**head, **found, "probabilities": listed, "confidence": math.exp(logprobs[best])}


class DecisionRequest(PooledBody):
    """OpenAI's fields, and those that all requests for numbers about texts have here."""

    input: Any = Field(description="A text, or items as in /v1/responses: messages, function calls and their outputs.")
    questions: list[dict[str, Any]] = Field(
        min_length=1,
        max_length=bounds.QUESTIONS,
        description="1 to 400, of the types `predicate`, `choice` (2 to 255 choices) and `score` (2 to 10 levels).",
    )

    no_effect: ClassVar[Mapping[str, str]] = {
        **PooledBody.no_effect,
        "prompt_cache_key": "every prompt is cached, and the router finds the replica that has it",
        "prompt_cache_options": "cached pages stay until their place is needed",
        "safety_identifier": "nothing is kept about end users",
    }
    refused_fields: ClassVar[Mapping[str, RefusedField]] = {}

    def asked(self) -> list[Question]:
        """Return the questions. Raises ApiError, which names the question and the field at fault."""
        return [_question(each, i) for i, each in enumerate(self.questions)]

    def messages(self) -> list[dict[str, Any]]:
        """Return the input as the messages of a chat that ends with a user's. Raises ApiError.

        Messages of users that follow each other become one: many templates want roles to alternate. A question can be
        added to the last one.
        """
        given = self.input
        if isinstance(given, list):
            given = [_item(each, f"input[{i}]") for i, each in enumerate(given)]
        items = input_items(given)
        messages: list[dict[str, Any]] = []
        for message in [*chat_messages(None, items, len(items)), {"role": "user", "content": ""}]:
            if message["role"] == "user" and messages and messages[-1]["role"] == "user":
                before = messages[-1]["content"]
                message = {"role": "user", "content": "\n\n".join(filter(None, (before, message["content"])))}
                messages.pop()
            messages.append(message)
        return messages


class _Asked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Kind
    instructions: Any
    name: _Name | None = None

    def options(self) -> list[Option]:
        """List the options in the order of their labels: of a predicate no, then yes."""
        return [Option(False, "no"), Option(True, "yes")]


class _Choice(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    value: StrictStr | StrictBool
    description: str = ""


class _AskedChoice(_Asked):
    choices: list[_Choice] = Field(min_length=2, max_length=bounds.QUESTION_CHOICES)

    def options(self) -> list[Option]:
        # As JSON, which tells the text "true" from the value true.
        return [Option(each.value, to_json(each.value).decode(), each.description) for each in self.choices]


class _Level(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    label: str
    description: str = ""


class _AskedScore(_Asked):
    levels: list[_Level] = Field(min_length=2, max_length=bounds.QUESTION_LEVELS)

    def options(self) -> list[Option]:
        return [Option(i, each.label, each.description) for i, each in enumerate(self.levels)]


_KINDS: Mapping[str, type[_Asked]] = {"predicate": _Asked, "choice": _AskedChoice, "score": _AskedScore}


def _question(given: Mapping[str, Any], index: int) -> Question:
    where = f"questions[{index}]"
    kind = _KINDS.get(str(given.get("type")))
    if kind is None:
        raise wrong(f"{where}.type", f"it must be {', '.join(map(repr, _KINDS))}")
    try:
        asked = kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise invalid_field(("questions", index, *first["loc"]), first["type"], first["msg"]) from None
    options = asked.options()
    if len({(type(option.value), option.value) for option in options}) < len(options):
        raise wrong(f"{where}.choices", "two of them have the same value")
    return Question(asked.type, asked.name, _instructions(asked.instructions, f"{where}.instructions"), options)


def _instructions(given: Any, where: str) -> str:
    """Return the text of instructions: a string, or parts of text and JSON."""
    if not isinstance(given, list):
        return text_of(given, where)
    parts = [_part(each, f"{where}[{i}]") for i, each in enumerate(given)]
    for i, part in enumerate(parts):
        if part.get("type") != "input_text":
            raise wrong(f"{where}[{i}].type", "it must be 'input_text' or 'input_json'")
    return "\n".join(text_of(part.get("text"), f"{where}[{i}].text") for i, part in enumerate(parts))


def _item(given: Any, where: str) -> Any:
    """Return an item of the input with JSON written as text. Raises ApiError for a picture."""
    if not isinstance(given, dict):
        return given
    changed = {
        name: [_part(each, f"{where}.{name}[{i}]") for i, each in enumerate(given[name])]
        for name in ("content", "output")
        if isinstance(given.get(name), list)
    }
    return {**given, **changed}


def _part(given: Any, where: str) -> Mapping[str, Any]:
    part = object_of(given, where)
    if part.get("type") == "input_image":
        raise ApiError(f"'{where}' is not supported: {_TEXT_ALONE}.", param=where, code="unsupported_value")
    if part.get("type") != "input_json":
        return part
    if not isinstance(part.get("data"), dict | list):
        raise wrong(f"{where}.data", "it must be an object, or a list of objects")
    return {"type": "input_text", "text": to_json(part["data"]).decode()}
