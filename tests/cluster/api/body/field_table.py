"""The tables of docs/fields.md, made from the code and from `known_fields.yaml`.

`python -m tests.cluster.api.body.field_table` writes them into the page.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.body.constraints import STRUCTURED_OUTPUTS
from crossdock.cluster.api.body.decision_body import DecisionRequest
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.generation_body import StreamOptions
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.messages_body import MessagesRequest
from crossdock.cluster.api.body.other_fields import NO_EFFECT, REFUSED
from crossdock.cluster.api.body.responses_body import ResponsesRequest
from crossdock.cluster.api.body.score_body import RerankRequest, ScoreRequest

PAGE = Path(__file__).parents[4] / "docs" / "fields.md"
BEGIN = "<!-- The tables below are made by `python -m tests.cluster.api.body.field_table`. -->\n"
KNOWN: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("known_fields.yaml").read_text())


def honoured() -> dict[str, set[str]]:
    """Return the honoured fields of each endpoint, nested ones by their path."""
    nested = {f"stream_options.{name}" for name in StreamOptions.model_fields}
    nested |= {f"structured_outputs.{name}" for name in STRUCTURED_OUTPUTS}
    return {
        "completions": {*CompletionRequest.model_fields, *nested},
        "chats": {*ChatCompletionRequest.model_fields, *nested},
    }


def known(endpoint: str) -> set[str]:
    """Return every field that OpenAI's client or vLLM defines for an endpoint, nested ones by their path."""
    vllm, openai = KNOWN["vllm"], KNOWN["openai"]
    nested = {f"stream_options.{name}" for name in (*vllm["stream_options"], *openai["stream_options"])}
    nested |= {f"structured_outputs.{name}" for name in vllm["structured_outputs"]}
    return {*vllm[endpoint], *vllm["removed"], *openai[endpoint], *nested}


def tables() -> str:
    """Return all tables as Markdown."""
    by_endpoint = honoured()
    both = by_endpoint["completions"] | by_endpoint["chats"]
    versions = f"vLLM {KNOWN['vllm']['version']} and OpenAI's Python client {KNOWN['openai']['version']}"
    return "\n".join(
        [
            f"Compared with {versions}.\n",
            "## Honoured\n",
            *_table(
                ("field", "completions", "chats", "from", "note"),
                ((_code(name), *_endpoints(name, by_endpoint), _source(name), _note(name)) for name in sorted(both)),
            ),
            "\n## Accepted without effect\n",
            *_table(("field", "why"), ((_code(name), reason) for name, reason in sorted(NO_EFFECT.items()))),
            "\n## Refused, unless the value asks for nothing\n",
            *_table(
                ("field", "accepted values", "why, and what to use instead"),
                (
                    (
                        _code(name) + _where(name, by_endpoint),
                        ", ".join(["`null`", *(_code(json.dumps(value)) for value in field.neutral)]),
                        re.sub(r"'([\w.]+)'", r"`\1`", field.reason),
                    )
                    for name, field in sorted(REFUSED.items())
                ),
            ),
            "\n## /v1/embeddings\n",
            *_states(EmbeddingRequest),
            "\n## /classify\n",
            *_states(ClassifyRequest),
            "\n## /v1/score\n",
            *_states(ScoreRequest),
            "\n## /v1/rerank\n",
            *_states(RerankRequest),
            "\n## /v1/decisions\n",
            *_states(DecisionRequest),
            "\n## /v1/responses\n",
            *_states(ResponsesRequest),
            "\n## /v1/messages\n",
            *_states(MessagesRequest),
            "",
        ]
    )


def _states(kind: type[Body]) -> list[str]:
    """Return the table of an API that turns its body into a chat."""
    rows = [(name, "honoured", field.description or "") for name, field in kind.model_fields.items()]
    rows += [(name, "without effect", reason) for name, reason in kind.no_effect.items()]
    for name, field in kind.refused_fields.items():
        accepted = "".join(f", {_code(json.dumps(value))}" for value in field.neutral)
        rows.append((name, f"refused, unless it is `null`{accepted}", re.sub(r"'([\w.]+)'", r"`\1`", field.reason)))
    return _table(("field", "state", "note"), ((_code(name), *rest) for name, *rest in sorted(rows)))


def _where(name: str, by_endpoint: Mapping[str, set[str]]) -> str:
    """Return in which endpoint a field is refused that the other one honours."""
    if name in by_endpoint["chats"]:
        return " in completions"
    return " in chats" if name in by_endpoint["completions"] else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return a table; fields whose further cells are equal share a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    grouped = [(", ".join(found), *cells) for cells, found in names.items()]
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *grouped)]


def _code(text: str) -> str:
    return f"`{text}`"


def _endpoints(name: str, by_endpoint: Mapping[str, set[str]]) -> tuple[str, str]:
    return ("yes" if name in by_endpoint["completions"] else "", "yes" if name in by_endpoint["chats"] else "")


def _source(name: str) -> str:
    vllm, openai = KNOWN["vllm"], KNOWN["openai"]
    top, _, part = name.partition(".")
    lists = (openai["completions"], openai["chats"])
    if part:
        lists = (openai.get(top, ()),)
    if any((part or name) in each for each in lists):
        return "OpenAI"
    return "older vLLM" if name in vllm["removed"] else "vLLM"


def _note(name: str) -> str:
    for kind in (ChatCompletionRequest, CompletionRequest):
        if name in kind.model_fields and (text := kind.model_fields[name].description):
            return text
    return ""


def written_page() -> str:
    """Return the page with the tables of now."""
    return PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n" + tables()


if __name__ == "__main__":
    PAGE.write_text(written_page())
