"""Does a real server give OpenAI's client whole tool calls and vectors, streamed and not?

    python benchmarks/live_tools.py                    # the default model
    python benchmarks/live_tools.py --model ./my-model

Starts `crossdock serve`, forces calls by `tool_choice` (named and required, strict and nested schemas, chats and
responses), and asks for embeddings. Prints a row a case: what came, and its seconds. A call counts if its arguments
are what the schema allows, and the streamed one if it equals the other. Exits with 1 if a case failed.
"""

import argparse
import base64
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import openai
from servers import add_server_options, crossdock_command, log_of, serving
from tables import hardware, markdown, today

from crossdock.workers.model.weights.checkpoint import default_model_dir

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TRIP = {
    "type": "object",
    "properties": {
        "stops": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                    "nights": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "nights"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["stops"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER},
    "book_trip": {"name": "book_trip", "description": "Books nights in cities", "parameters": TRIP},
}
ASK = [{"role": "user", "content": "Book me three nights in Rome and one in Oslo, and tell me the weather in Paris."}]
TEXTS = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "The invoice is due on Friday."]


def check(name: str, arguments: str) -> None:
    """Raise ValidationError unless these are arguments that the function's schema allows."""
    jsonschema.validate(json.loads(arguments), FUNCTIONS[name]["parameters"])


def chat_calls(client: openai.OpenAI, model: str, choice: Any, *, strict: bool) -> str:
    """Return the calls of a chat, checked; the streamed ones must be the same."""
    tools = [{"type": "function", "function": {**function, "strict": strict}} for function in FUNCTIONS.values()]
    fields: Any = {"model": model, "messages": ASK, "tools": tools, "tool_choice": choice}
    fields |= {"temperature": 0, "max_completion_tokens": 300, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**fields).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
    assert len(calls) == 1, answer
    for name, arguments in calls:
        check(name, arguments)
    if isinstance(choice, dict):
        assert calls[0][0] == choice["function"]["name"], calls
    names, parts, ids = [""], [""], set()
    for chunk in client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            names[0] += delta.function.name or ""
            parts[0] += delta.function.arguments or ""
            ids |= {delta.id} - {None}
    assert list(zip(names, parts, strict=True)) == calls, (names, parts, calls)
    assert len(ids) == 1, ids
    return f"{calls[0][0]}({calls[0][1]})"


def response_call(client: openai.OpenAI, model: str, name: str) -> str:
    """Return the forced call of a response, checked; the streamed one must be the same."""
    tools: Any = [{"type": "function", "strict": True, **function} for function in FUNCTIONS.values()]
    fields: Any = {"model": model, "input": ASK, "tools": tools, "tool_choice": {"type": "function", "name": name}}
    fields |= {"temperature": 0, "max_output_tokens": 300, "store": False}
    [call] = client.responses.create(**fields).output
    assert call.type == "function_call", call
    assert call.name == name, call
    check(name, call.arguments)
    with client.responses.stream(**fields) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == call.arguments, parts
    return f"{name}({call.arguments})"


def embeddings(client: openai.OpenAI, model: str, pooling: str) -> str:
    """Return how alike the texts' vectors are: both encodings have the same, and like texts have the more alike."""
    more: Any = {"pooling": pooling}
    answer = client.embeddings.create(model=model, input=TEXTS, encoding_format="float", extra_body=more)
    vectors = np.array([one.embedding for one in answer.data])
    raw = client.embeddings.with_raw_response.create(
        model=model, input=TEXTS, encoding_format="base64", extra_body=more
    )
    texts = [one["embedding"] for one in json.loads(raw.text)["data"]]
    same = np.array([np.frombuffer(base64.b64decode(text), "<f4") for text in texts])
    assert np.allclose(vectors, same, atol=2e-2), "the encodings differ"
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5), "a length is not 1"
    alike, unlike = float(vectors[0] @ vectors[1]), float(vectors[0] @ vectors[2])
    assert alike > unlike, (alike, unlike)
    return f"{vectors.shape[1]} numbers; cat and kitten {alike:.3f}, cat and invoice {unlike:.3f}"


def cases(client: openai.OpenAI, model: str) -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {}
    for name in FUNCTIONS:
        named = {"type": "function", "function": {"name": name}}
        for strict in (False, True):
            title = f"chat, named {name}, {'strict' if strict else 'not strict'}"
            found[title] = lambda named=named, strict=strict: chat_calls(client, model, named, strict=strict)
        found[f"response, named {name}, strict"] = lambda name=name: response_call(client, model, name)
    for strict in (False, True):
        title = f"chat, required, {'strict' if strict else 'not strict'}"
        found[title] = lambda strict=strict: chat_calls(client, model, "required", strict=strict)
    for pooling in ("last", "mean"):
        found[f"embeddings, {pooling}"] = lambda pooling=pooling: embeddings(client, model, pooling)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(default_model_dir()), help="directory or hub name")
    add_server_options(parser, "live-tools", 8437)
    args = parser.parse_args()
    rows, num_failed = [["case", "outcome", "seconds"]], 0
    with serving("crossdock", crossdock_command(args), args, log_of(args, "server")) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120)
        model = client.models.list().data[0].id
        for title, case in cases(client, model).items():
            began = time.monotonic()
            try:
                outcome = case()
            except (AssertionError, ValueError, jsonschema.ValidationError, openai.OpenAIError) as error:
                outcome, num_failed = f"FAILED: {type(error).__name__}: {error}"[:300], num_failed + 1
            rows.append([title, outcome.replace("|", "\\|").replace("\n", " "), f"{time.monotonic() - began:.1f}"])
    print(f"{today()}; {hardware()}; {model}\n")
    print(markdown(rows))
    return num_failed


if __name__ == "__main__":
    sys.exit(main() > 0)
