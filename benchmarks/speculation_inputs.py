"""The prompts of speculation.py: kinds whose answers repeat the prompt, free chat, and forms. All text is our own."""

import json
from pathlib import Path
from typing import Any

import yaml

_TEXTS = yaml.safe_load(Path(__file__).with_name("speculation_prompts.yaml").read_text())


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have all the fields that it lists, and no others."""
    if "items" in schema:
        return schema | {"items": _closed(schema["items"])}
    if "properties" not in schema:
        return schema
    fields = {name: _closed(each) for name, each in schema["properties"].items()}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


FORMS: tuple[tuple[str, str], ...] = tuple((form["question"], json.dumps(_closed(form))) for form in _TEXTS["forms"])
"""Questions in a chat, each with the JSON schema that the answer must follow."""


def _one_line(text: str) -> str:
    return " ".join(text.split())


WORKLOADS: dict[str, tuple[str, ...]] = {
    "quotes": tuple(
        f"The text:\n\n{_one_line(text)}\n\nRepeat it word by word, with the most important sentence in bold."
        for text in _TEXTS["reports"]
    ),
    "edits": tuple(
        f"The program:\n\n```python\n{text}\n```\n\nThe same program, with a comment in each function:\n\n```python\n"
        for text in _TEXTS["programs"]
    ),
    "json": tuple(
        f"The text:\n\n{_one_line(text)}\n\nAs JSON, one object in each line:\n\n{first}\n{first.partition(':')[0]}:"
        for first, text in ((record["first"], record["text"]) for record in _TEXTS["records"])
    ),
    "chat": tuple(_TEXTS["questions"]),
}
"""Prompts by workload. Answers to all but `chat` repeat parts of the prompt, as far as the model does what is asked."""

CHATS = ("quotes", "chat")
"""Workloads that are asked for in a chat. The prompts of others are continued: a small model copies better so."""
