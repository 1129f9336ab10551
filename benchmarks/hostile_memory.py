"""Requests that hold memory, places or the event loop: parsers, JSON in strings, open paths, slow and kept bodies."""

from collections.abc import Iterator
from typing import Any

MIB = 1 << 20
CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
STORED = "{stored}"  # in a path: the id of the newest response that was stored

Made = Iterator[tuple[Any, ...]]  # name, path, body as bytes or JSON


class Slow(bytes):
    """A body that is sent in 20 parts, a tenth of a second apart."""


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "temperature": 0, **fields}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **fields}}


def parsers() -> Made:
    """Yield chats whose answers are long runs that parsers of calls look at."""
    for head, run in (
        ("<tool_call>", " "),
        ("<tool_call>{", "\\n"),
        ("", "<"),
        ("", "</tool_call>"),
        ("", "\\[TOOL_CALLS\\]f "),
    ):
        fields = {"tools": [function()], "guided_regex": f"{head}({run}){{1000}}!", "max_tokens": 1000}
        yield f"a run of {run!r} after {head!r}", CHATS, chat(**fields)
    prefix = {"role": "assistant", "content": " " * 4000 + "to=!"}
    yield "a run that the client wrote", CHATS, chat(messages=[prefix], continue_final_message=True)


def strings() -> Made:
    for name, text in (
        ("lists", "[" + "[]," * (5 * MIB) + "1]"),
        ("numbers", "[" + "1," * (8 * MIB) + "1]"),
        ("deep", "[" * 10**6),
    ):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        yield f"{name} in arguments of a chat", CHATS, chat(messages=[{"role": "assistant", "tool_calls": [call]}])
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
        yield f"{name} in arguments of a response", RESPONSES, {"input": [item], "max_output_tokens": 4}


def strangers() -> Made:
    for path in ("/health", "/ready", "/metrics", "/version", "/openapi.json"):
        yield f"19 MB to {path}", path, b"x" * (19 * MIB)
        yield f"a slow body to {path}", path, Slow(b"x" * MIB)


def slow_bodies() -> Made:
    for size in (1000, MIB, 19 * MIB):
        yield (
            f"a slow body of {size} bytes",
            COMPLETIONS,
            Slow(b'{"prompt": "Hi", "max_tokens": 4, "user": "%b"}' % (b"x" * size)),
        )
    yield "a slow body that is no JSON", CHATS, Slow(b" " * 19 * MIB)


def kept() -> Made:
    for text in ("x", "é", "🙂"):
        name = text * (18 * MIB // len(text.encode()))
        yield (
            f"18 MB of {text!r} that no template reads",
            CHATS,
            chat(messages=[{"role": "user", "content": "Hi", "name": name}], n=8),
        )
    yield "1,024 prompts of 18 KB", COMPLETIONS, {"prompt": ["a " * 9000] * 1024, "max_tokens": 1}
    yield "500,000 values that no field takes", CHATS, chat(user=None, x=[[1]] * 30_000 + [1] * 400_000)


def listed_tokens() -> Made:
    ids = list(range(128))
    yield "128 listed tokens", COMPLETIONS, {"prompt": "Hi", "max_tokens": 400, "logprobs": 0, "logprob_token_ids": ids}
    yield (
        "128 listed tokens, 128 times",
        COMPLETIONS,
        {"prompt": "Hi", "max_tokens": 400, "logprobs": 0, "n": 128, "logprob_token_ids": ids},
    )
    yield (
        "128 listed tokens in a stream",
        CHATS,
        chat(max_tokens=400, logprobs=True, logprob_token_ids=ids, stream=True),
    )


def stored() -> Made:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    for name, item in (
        ("a namespace of 18 MB", {**call, "namespace": "n" * 18 * MIB}),
        ("a call of 18 MB", {**call, "call_id": "c" * 18 * MIB}),
    ):
        yield name, RESPONSES, {"input": [item, output], "max_output_tokens": 4}
    yield "1,000 items", RESPONSES, {"input": [{"role": "user", "content": "a"}] * 1000, "max_output_tokens": 4}
    yield (
        "a response",
        RESPONSES,
        {"input": "Hi", "max_output_tokens": 4, "metadata": {str(i): "m" * 512 for i in range(16)}},
    )
    for number in range(20):
        yield f"the response again, {number}", f"{RESPONSES}/{STORED}", None
        yield f"its items, {number}", f"{RESPONSES}/{STORED}/input_items", None


def typed_tools() -> Made:
    for odd in ([], {}, 5, True, None, "f" * MIB):
        yield f"a name {str(odd)[:20]!r}", CHATS, chat(tools=[function(name=odd)], tool_choice="required")
    for schema in (
        {"enum": 5},
        {"required": 5},
        {"required": [["a"]]},
        {"anyOf": 5},
        {"type": 5},
        {"properties": 5},
        {"items": 5},
    ):
        for choice in ("required", "auto"):
            parameters = {"type": "object", "properties": {"a": schema}, **schema}
            yield f"{schema} with {choice}", CHATS, chat(tools=[function(parameters=parameters)], tool_choice=choice)


GROUPS = {
    "parsers": parsers,
    "JSON in strings": strings,
    "strangers": strangers,
    "slow bodies": slow_bodies,
    "kept": kept,
    "listed tokens": listed_tokens,
    "stored": stored,
    "typed tools": typed_tools,
}
