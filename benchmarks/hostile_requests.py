"""Requests that no honest client sends: too large, too many, too deep, too slow, or costly to compute.

What is refused at once for its type or value is in tests/cluster/api: it could disturb nobody.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE, EMBEDDINGS = "/tokenize", "/detokenize", "/v1/embeddings"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One request. `body`: as it is sent; None: a GET."""

    group: str
    name: str
    path: str
    body: bytes | None = None


class Slow(bytes):
    """A body that is sent in 20 parts, a tenth of a second apart."""


Made = Iterator[tuple[str, str, Any]]  # name, path, body as bytes or JSON


def hostile_requests() -> Iterator[HostileRequest]:
    """Yield all requests, group by group."""
    for group, make in GROUPS.items():
        yield from _requests(group, make())


def ordinary_requests() -> Iterator[HostileRequest]:
    """Yield one ordinary request of each kind, so that what they load is not taken for what hostile ones leave."""
    return _requests("ordinary", ordinary())


def _requests(group: str, made: Made) -> Iterator[HostileRequest]:
    for name, path, body in made:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        yield HostileRequest(group, name, path, content)


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "The cat", "max_tokens": 4, "temperature": 0, **fields}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [user("Hi")], "max_tokens": 4, "temperature": 0, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **fields}}


def called(arguments: str) -> dict[str, Any]:
    """Return a chat in which a tool has been called with these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat({"role": "assistant", "tool_calls": [call]}, user("Hi"))


def ordinary() -> Made:
    """Yield one request of each kind that an ingress serves, also those that need modules of their own."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    yield "a completion", COMPLETIONS, completion(logprobs=1)
    yield "a batch of 256 prompts", COMPLETIONS, completion(prompt=["The cat sat on"] * 256, max_tokens=1)
    yield "a long prompt", COMPLETIONS, completion(prompt="The cat sat on a mat. " * 600)
    yield "a chat", CHATS, chat()
    yield "a stream", CHATS, chat(stream=True)
    yield "a call of a tool", CHATS, chat(tools=[function()], tool_choice="required", max_tokens=30)
    yield "a schema", CHATS, chat(response_format=schema, max_tokens=30)
    yield "a regular expression", COMPLETIONS, completion(guided_regex="[a-z]{3,9}")
    yield "a picture", CHATS, chat(user([picture]))
    yield "a response", RESPONSES, {"input": "Hi", "max_output_tokens": 4}
    yield "a message", "/v1/messages", {"model": "SmolLM2-135M-Instruct", "messages": [user("Hi")], "max_tokens": 4}
    yield "a vector", EMBEDDINGS, {"input": "Hi"}
    yield "a batch of 2,048 vectors, OpenAI's bound", EMBEDDINGS, {"input": ["The cat sat on"] * 2048}
    yield "tokens", TOKENIZE, {"prompt": "Hi"}
    yield "text", DETOKENIZE, {"tokens": [5]}
    yield "metrics", "/metrics", None


def lists() -> Made:
    stops = [f"{i:02d}" + "x" * 4094 for i in range(64)]
    yield "64 stops of 4,096", COMPLETIONS, completion(stop=stops, n=128)
    yield "64 stops of 4,096 for 1,024 prompts", COMPLETIONS, completion(prompt=["a"] * 1024, max_tokens=1, stop=stops)
    yield "a million stops", COMPLETIONS, completion(stop=["a"] * 10**6)
    yield "300,000 biases", COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(300_000)})
    yield "1,024 biases for 64 outputs", COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(1024)}, n=64)
    yield "16,384 tokens allowed, 32 outputs", COMPLETIONS, completion(allowed_token_ids=list(range(16384)), n=32)
    yield "1,024 prompts", COMPLETIONS, completion(prompt=["a b c"] * 1024, max_tokens=1)
    yield "1,024 prompts of 18 KB", COMPLETIONS, completion(prompt=["a " * 9000] * 1024, max_tokens=1)
    yield "256 prompts of 300 tokens", COMPLETIONS, completion(prompt=[[7] * 300] * 256, max_tokens=1)
    yield "a prompt of a million ids", COMPLETIONS, completion(prompt=[1] * 10**6)
    yield "prompt log-probabilities", COMPLETIONS, completion(prompt="a b " * 1000, prompt_logprobs=20)
    listed = {"logprobs": 0, "logprob_token_ids": list(range(128))}
    yield "128 listed tokens, 128 times", COMPLETIONS, completion(max_tokens=400, n=128, **listed)
    yield "a million ids to text", DETOKENIZE, {"tokens": [5] * 10**6}
    yield "600,000 characters with names", TOKENIZE, {"prompt": "ab " * 200_000, "return_token_strs": True}
    yield "a text of 5 MB to a vector", EMBEDDINGS, {"input": "word " * MIB}
    yield "a million empty lists to vectors", EMBEDDINGS, b'{"input":[' + b"[]," * 10**6 + b"[]]}"


def chats() -> Made:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    yield "4,096 messages", CHATS, chat(*[user("a")] * 4096)
    yield "100,000 parts", CHATS, chat(user([{"type": "text", "text": "a"}] * 100_000))
    yield "a tool of 1 MB", CHATS, chat(tools=[function(description="d" * MIB)])
    yield "100,000 tool calls", CHATS, chat({"role": "assistant", "tool_calls": [call] * 100_000}, user("Hi"))
    yield "a template", CHATS, chat(chat_template="{% for i in range(10**9) %}{% endfor %}")
    yield "20,000 unknown fields in a message", CHATS, chat({**user("Hi"), **{f"x{i}": i for i in range(20_000)}})
    yield "18 MB that no template reads", CHATS, chat({**user("Hi"), "name": "x" * (18 * MIB)}, n=8)
    yield "4,096 messages to tokens", TOKENIZE, {"messages": [user("a b c")] * 4096}
    for head, run in (("<tool_call>", " "), ("<tool_call>{", "\\n"), ("", "<"), ("", "</tool_call>")):
        fields = {"tools": [function()], "guided_regex": f"{head}({run}){{1000}}!", "max_tokens": 1000}
        yield f"a run of {run!r} after {head!r}, which a parser of calls reads", CHATS, chat(**fields)
    item = {"type": "function_call", "call_id": "c" * 18 * MIB, "name": "f", "arguments": "{}"}
    yield "a call of 18 MB in a response", RESPONSES, {"input": [item], "max_output_tokens": 4}
    yield "1,000 items", RESPONSES, {"input": [user("a")] * 1000, "max_output_tokens": 4}


def nesting() -> Made:
    def nested(depth: int) -> str:
        return '{"a":' * depth + "1" + "}" * depth

    schema = '{"type":"object","properties":{"a":' * 500 + "{}" + "}}" * 500
    yield "a body 10,000 deep", COMPLETIONS, nested(10_000).encode()
    yield "a schema 500 deep as text", COMPLETIONS, completion(guided_json=schema)
    yield "a schema of 100,000 lists", COMPLETIONS, completion(guided_json="[" * 100_000)
    yield "arguments 100,000 deep", CHATS, called(nested(100_000))
    yield "lists in arguments", CHATS, called("[" + "[]," * (5 * MIB) + "1]")
    yield "numbers in arguments", CHATS, called("[" + "1," * (8 * MIB) + "1]")


def unicode() -> Made:
    zalgo = ("e" + "\u0301\u0302\u0303\u0489" * 10) * 10_000
    yield "600,000 emoji", COMPLETIONS, json.dumps(completion(prompt="🙂" * 600_000), ensure_ascii=False).encode()
    yield "2.5 million emoji to tokens", TOKENIZE, {"prompt": "🙂" * 2_500_000}
    yield "zalgo to tokens", TOKENIZE, {"prompt": zalgo}
    yield "special tokens", COMPLETIONS, completion(prompt="<|im_start|>" * 3000)
    yield "spaces", COMPLETIONS, completion(prompt=" " * 600_000)
    yield "one letter", TOKENIZE, {"prompt": "r" * 600_000}
    yield "escapes", TOKENIZE, b'{"prompt": "' + b"\\u0041" * (19 * MIB // 6) + b'"}'


def bodies() -> Made:
    yield "45 MB", COMPLETIONS, completion(prompt="a" * 45_000_000)
    yield "20 MiB of text", COMPLETIONS, completion(prompt="word, " * (19 * MIB // 6))
    yield "20 MiB of lists", COMPLETIONS, b'{"prompt":[' + b"[]," * (19 * MIB // 3) + b"0]}"
    yield "20 MiB of numbers", COMPLETIONS, b'{"prompt":[' + b"1," * (19 * MIB // 2) + b"0]}"
    yield "20 MiB of short strings", COMPLETIONS, b'{"prompt":[' + b'"a",' * (19 * MIB // 4) + b'"a"]}'
    yield "300,000 unknown fields", COMPLETIONS, completion(**{f"x{i}": "v" for i in range(300_000)})
    yield "a slow body", COMPLETIONS, Slow(b'{"prompt": "Hi", "max_tokens": 4, "user": "%b"}' % (b"x" * 19 * MIB))
    yield "a slow body that is no JSON", CHATS, Slow(b" " * 19 * MIB)
    for path in ("/health", "/metrics"):
        yield f"19 MB to {path}", path, b"x" * (19 * MIB)
        yield f"a slow body to {path}", path, Slow(b"x" * MIB)


def grammars() -> Made:
    chain = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(20_000)) + '\nr20000: "b"'
    yield "20,000 chained rules", COMPLETIONS, completion(guided_grammar=chain)
    patterns = [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(300)]
    for count in (300, 30):
        yield f"{count} patterns at once", COMPLETIONS, completion(guided_json={"allOf": patterns[:count]})
    yield "a long repetition", COMPLETIONS, completion(guided_regex="a{999999999}")
    yield "repetitions in repetitions", COMPLETIONS, completion(guided_regex="((a{1,99}){1,99}){1,99}")
    yield "a regex of 1 MB", COMPLETIONS, completion(guided_regex="a" * MIB)
    yield "a regex of 60 KB", COMPLETIONS, completion(guided_regex="[a-z]{2}" * 7500)
    yield "8,000 alternatives", COMPLETIONS, completion(guided_regex="|".join(f"a{i}" for i in range(8000)))
    yield "100,000 choices", COMPLETIONS, completion(guided_choice=[f"choice {i}" for i in range(100_000)])
    yield "letters of all scripts", COMPLETIONS, completion(guided_regex="\\p{L}{1000}")
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    yield "3,000 properties", COMPLETIONS, completion(guided_json=many)
    yield "a billion items", COMPLETIONS, completion(guided_json={"type": "array", "minItems": 10**9})


GROUPS: dict[str, Callable[[], Made]] = {
    "lists": lists,
    "chats": chats,
    "nesting": nesting,
    "unicode": unicode,
    "bodies": bodies,
    "grammars": grammars,
}
