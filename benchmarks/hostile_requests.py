"""Requests that no honest client sends: too large, too many, too deep, of the wrong type, or costly to compute."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hostile_memory

COMPLETIONS, CHATS, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
EMBEDDINGS = "/v1/embeddings"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One request. `body`: as it is sent; None: a GET."""

    group: str
    name: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def hostile_requests() -> Iterator[HostileRequest]:
    """Yield all requests, group by group."""
    for group, make in GROUPS.items():
        yield from _requests(group, make)


def ordinary_requests() -> Iterator[HostileRequest]:
    """Yield one ordinary request of each kind, so that what they load is not taken for what hostile ones leave."""
    yield from _requests("ordinary", ordinary)


def _requests(group: str, make: "Callable[[], Made]") -> Iterator[HostileRequest]:
    for name, path, body, *headers in make():
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {} if content is None else {"content-type": "application/json"}
        yield HostileRequest(group, name, path, content, {**sent, **(headers[0] if headers else {})})


Made = Iterator[tuple[Any, ...]]  # name, path, body as bytes or JSON, and perhaps headers


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "The cat", "max_tokens": 4, "temperature": 0, **fields}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages) or [user("Hi")], "max_tokens": 4, "temperature": 0, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ordinary() -> Made:
    """Yield one request of each kind that an ingress serves, also those that need modules of their own."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    yield "a completion", COMPLETIONS, completion(logprobs=1)
    yield "a batch of 256 prompts", COMPLETIONS, completion(prompt=["The cat sat on"] * 256, max_tokens=1)
    yield "a long prompt", COMPLETIONS, completion(prompt="The cat sat on a mat. " * 600)
    yield "a chat", CHATS, chat()
    yield "a stream", CHATS, chat(stream=True)
    yield "a call of a tool", CHATS, chat(tools=[tool], tool_choice="required", max_tokens=30)
    yield "a schema", CHATS, chat(response_format=schema, max_tokens=30)
    yield "a regular expression", COMPLETIONS, completion(guided_regex="[a-z]{3,9}")
    yield "a picture", CHATS, chat(user([picture]))
    yield "a response", "/v1/responses", {"input": "Hi", "max_output_tokens": 4}
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
    short = [f"{i:02d}" + "x" * 250 for i in range(64)]
    yield "64 stops of 252 for 128 outputs", COMPLETIONS, completion(stop=short, n=128, max_tokens=2)
    yield "65 stops", COMPLETIONS, completion(stop=["a"] * 65)
    yield "a million stops", COMPLETIONS, completion(stop=["a"] * 10**6)
    yield "an empty stop", COMPLETIONS, completion(stop=[""])
    yield "300,000 biases", COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(300_000)})
    yield "300,000 wrong biases", COMPLETIONS, completion(logit_bias={f"x{i}": "y" for i in range(300_000)})
    yield "1,024 biases for 64 outputs", COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(1024)}, n=64)
    yield "a bias of 5,000 digits", COMPLETIONS, completion(logit_bias={"1" * 5000: 1})
    yield "a bias twice", COMPLETIONS, completion(logit_bias={"1": 1, "0001": 2})
    yield "a bias of 1e308", COMPLETIONS, completion(logit_bias={"1": 1e308})
    yield "a million stop tokens", COMPLETIONS, completion(stop_token_ids=list(range(10**6)))
    yield "300,000 wrong stop tokens", COMPLETIONS, completion(stop_token_ids=["a"] * 300_000)
    yield "all tokens allowed", COMPLETIONS, completion(allowed_token_ids=list(range(49152)))
    yield "16,384 tokens allowed, 32 outputs", COMPLETIONS, completion(allowed_token_ids=list(range(16384)), n=32)
    yield "129 outputs", COMPLETIONS, completion(n=129)
    yield "1,025 prompts", COMPLETIONS, completion(prompt=["a"] * 1025)
    yield "1,024 prompts twice", COMPLETIONS, completion(prompt=["a"] * 1024, n=2)
    yield "1,024 prompts", COMPLETIONS, completion(prompt=["a b c"] * 1024, max_tokens=1)
    yield "256 prompts of 300 tokens", COMPLETIONS, completion(prompt=[[7] * 300] * 256, max_tokens=1)
    yield "empty prompts", COMPLETIONS, completion(prompt=[""] * 1000)
    yield "a prompt of a million ids", COMPLETIONS, completion(prompt=[1] * 10**6)
    yield "echo with log-probabilities", COMPLETIONS, completion(prompt="a b " * 1000, echo=True, logprobs=20)
    yield "prompt log-probabilities", COMPLETIONS, completion(prompt="a b " * 1000, prompt_logprobs=20)
    yield "a million ids to text", DETOKENIZE, {"tokens": [5] * 10**6}
    yield "131,072 ids to text", DETOKENIZE, {"tokens": [5] * 131_072}
    yield "wrong ids to text", DETOKENIZE, {"tokens": ["a"] * 300_000}
    yield "ids of no token to text", DETOKENIZE, {"tokens": [10**9]}
    yield "600,000 characters with names", TOKENIZE, {"prompt": "ab " * 200_000, "return_token_strs": True}


def chats() -> Made:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    yield "a role of 100 KB", CHATS, chat({"role": "r" * 100_000, "content": "Hi"})
    yield "a role that repeats", CHATS, chat({"role": "-" * 100_000, "content": "Hi"})
    yield "4,096 messages", CHATS, chat(*[user("a")] * 4096)
    yield "4,097 messages", CHATS, chat(*[user("a")] * 4097)
    yield "100,000 parts", CHATS, chat(user([{"type": "text", "text": "a"}] * 100_000))
    yield "parts in parts", CHATS, chat(user([[[["a"]]]]))
    yield "a part of 100 KB of type", CHATS, chat(user([{"type": "t" * 100_000}]))
    yield "200 tools", CHATS, chat(tools=[tool] * 200)
    yield "a tool of 1 MB", CHATS, chat(tools=[{**tool, "function": {"name": "f", "description": "d" * MIB}}])
    yield "128 tools", CHATS, chat(tools=[tool] * 128)
    yield "wrong tools", CHATS, chat(tools=[{"type": "web"}])
    yield "100,000 tool calls", CHATS, chat({"role": "assistant", "tool_calls": [call] * 100_000}, user("Hi"))
    yield "template variables of 1 MB", CHATS, chat(chat_template_kwargs={"a": "b" * MIB})
    yield "a template", CHATS, chat(chat_template="{% for i in range(10**9) %}{% endfor %}")
    yield "a reserved variable", CHATS, chat(chat_template_kwargs={"tokenize": True})
    yield "20,000 unknown fields in a message", CHATS, chat({**user("Hi"), **{f"x{i}": i for i in range(20_000)}})
    yield "5 MB of text", CHATS, chat(user("word " * MIB))
    yield "an image", CHATS, chat(user([{"type": "image_url", "image_url": {"url": "data:" + "a" * MIB}}]))
    yield "a forced tool", CHATS, chat(tools=[tool], tool_choice="required")
    yield "4,096 messages to tokens", TOKENIZE, {"messages": [user("a b c")] * 4096}


def nesting() -> Made:
    def nested(depth: int, inner: str = "1") -> str:
        return '{"a":' * depth + inner + "}" * depth

    schema = '{"type":"object","properties":{"a":' * 500 + "{}" + "}}" * 500
    yield "10,000 open lists", COMPLETIONS, b"[" * 10_000
    yield "a body 10,000 deep", COMPLETIONS, nested(10_000).encode()
    yield "an unknown field 190 deep", COMPLETIONS, b'{"prompt":"a","max_tokens":1,"x":' + nested(190).encode() + b"}"
    yield "a schema 500 deep as text", COMPLETIONS, completion(guided_json=schema)
    yield "a schema of 100,000 lists", COMPLETIONS, completion(guided_json="[" * 100_000)
    yield "a schema 90 deep", COMPLETIONS, completion(guided_json='{"items":' * 90 + "{}" + "}" * 90)
    for depth in (150, 5000, 100_000):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested(depth)}}
        yield f"arguments {depth:,} deep", CHATS, chat({"role": "assistant", "tool_calls": [call]}, user("Hi"))
    variables = nested(150).encode()
    body = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":%b}' % variables
    yield "variables 150 deep", CHATS, body


def unicode() -> Made:
    zalgo = ("e" + "\u0301\u0302\u0303\u0489" * 10) * 1000
    bidi = "\u202eabc\u202c\u2066def\u2069" * 1000
    yield "2.5 million emoji to tokens", TOKENIZE, {"prompt": "🙂" * 2_500_000}
    yield "2.5 million emoji", COMPLETIONS, json.dumps(completion(prompt="🙂" * 2_500_000), ensure_ascii=False).encode()
    yield "600,000 emoji", COMPLETIONS, json.dumps(completion(prompt="🙂" * 600_000), ensure_ascii=False).encode()
    yield "zalgo", COMPLETIONS, completion(prompt=zalgo)
    yield "zalgo to tokens", TOKENIZE, {"prompt": zalgo * 10}
    yield "bidi", COMPLETIONS, completion(prompt=bidi)
    yield "bidi and zalgo in a chat", CHATS, chat(user(bidi + zalgo))
    yield "a lone surrogate", COMPLETIONS, b'{"prompt": "\\ud800"}'
    yield "not UTF-8", COMPLETIONS, b'{"prompt": "\xff\xfe"}'
    yield "zeros", COMPLETIONS, completion(prompt="\0" * 1000)
    yield "a byte order mark", COMPLETIONS, b'\xef\xbb\xbf{"prompt": "a"}'
    yield "special tokens", COMPLETIONS, completion(prompt="<|im_start|>" * 3000)
    yield "spaces", COMPLETIONS, completion(prompt=" " * 600_000)
    yield "one letter", TOKENIZE, {"prompt": "r" * 600_000}
    yield "escapes", TOKENIZE, b'{"prompt": "' + b"\\u0041" * (19 * MIB // 6) + b'"}'


def bodies() -> Made:
    yield "25 MB", COMPLETIONS, completion(prompt="a" * 25_000_000)
    yield "25 MB to tokens", TOKENIZE, {"prompt": "a" * 25_000_000}
    yield "45 MB", COMPLETIONS, completion(prompt="a" * 45_000_000)
    yield "20 MiB of text", COMPLETIONS, completion(prompt="word, " * (19 * MIB // 6))
    yield "20 MiB of text to tokens", TOKENIZE, {"prompt": "word, " * (19 * MIB // 6)}
    yield "20 MiB of lists", COMPLETIONS, b'{"prompt":[' + b"[]," * (19 * MIB // 3) + b"0]}"
    yield "20 MiB of objects", COMPLETIONS, b'{"prompt":[' + b"{}," * (19 * MIB // 3) + b"0]}"
    yield "20 MiB of numbers", COMPLETIONS, b'{"prompt":[' + b"1," * (19 * MIB // 2) + b"0]}"
    yield "20 MiB of short strings", COMPLETIONS, b'{"prompt":[' + b'"a",' * (19 * MIB // 4) + b'"a"]}'
    yield "8 MiB of lists to text", DETOKENIZE, b'{"tokens":[' + b"[]," * (8 * MIB // 3) + b"0]}"
    yield "300,000 unknown fields", COMPLETIONS, completion(**{f"x{i}": "v" for i in range(300_000)})
    yield "60,000 unknown fields", COMPLETIONS, completion(**{f"x{i}": 1 for i in range(60_000)})
    yield "100,000 times one field", COMPLETIONS, b'{"prompt":"a",' + b'"n":1,' * 60_000 + b'"max_tokens":1}'
    yield "half a body", COMPLETIONS, b'{"prompt": "a", "max_tokens": '
    yield "nothing", COMPLETIONS, b""
    yield "not a number", COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'
    yield "plain text", COMPLETIONS, b"Hello", {"content-type": "text/plain"}
    yield "a field name of 1 MB", COMPLETIONS, completion(**{"x" * MIB: 1})
    yield "a model of 1 MB", COMPLETIONS, completion(model="m" * MIB)
    yield "a tier of 100 KB", COMPLETIONS, completion(service_tier="t" * 100_000)
    yield "a salt of 1 MB", COMPLETIONS, completion(cache_salt="s" * MIB)


def wrong_types() -> Made:
    fields = {
        "prompt": [{"a": 1}, 5, [1.5], [[]], [True]],
        "max_tokens": ["4", -1, 1.5],
        "n": [True, 0],
        "stop": [5, {"a": 1}],
        "stream": ["yes"],
        "seed": [1.5],
        "temperature": ["hot", [1]],
        "logprobs": [21, -1],
        "response_format": ["json", {"type": "xml"}, {"type": "json_schema"}],
        "guided_choice": ["a", [], [""], [1]],
        "structured_outputs": [[], {"regex": 5}, {"choice": {}}],
        "stream_options": [1],
        "guided_json": ["{", "5"],
    }
    for name, values in fields.items():
        for value in values:
            yield f"{name} {json.dumps(value)}", COMPLETIONS, completion(**{name: value})
    for value in ("Hi", [], [5], [{}], [{"role": 5, "content": "a"}], [{"role": "user", "content": 5}]):
        yield f"messages {json.dumps(value)}", CHATS, {"messages": value}


def numbers() -> Made:
    for name in ("max_tokens", "n", "seed", "top_k", "min_tokens", "truncate_prompt_tokens", "prompt_logprobs"):
        yield f"{name} of 100 digits", COMPLETIONS, completion(**{name: 10**100})
    digits = b"9" * 5000
    for name in (b"max_tokens", b"prompt", b"temperature", b"seed"):
        yield f"{name.decode()} of 5,000 digits", COMPLETIONS, b'{"prompt":"a","%b":%b}' % (name, digits)
    yield "temperature 1e308", COMPLETIONS, completion(temperature=1e308)
    yield "temperature 1e-300", COMPLETIONS, completion(temperature=1e-300)
    yield "top_k of 100 digits, drawn", COMPLETIONS, completion(top_k=10**100, temperature=1)
    yield "a penalty of 1e-300, drawn", COMPLETIONS, completion(repetition_penalty=1e-300, temperature=1, top_p=0.9)
    yield "temperature 0.00002", COMPLETIONS, completion(temperature=2e-5, min_p=1, top_k=1)
    yield "a penalty of 1e-300", COMPLETIONS, completion(repetition_penalty=1e-300)
    yield "top_p 1e-300", COMPLETIONS, completion(top_p=1e-300)
    yield "an id of 5,000 digits", COMPLETIONS, b'{"prompt":[%b]}' % digits
    yield "negative ids", COMPLETIONS, completion(prompt=[-1, -(2**63)])


def grammars() -> Made:
    chain = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(20_000)) + '\nr20000: "b"'
    yield "20,000 chained rules", COMPLETIONS, completion(guided_grammar=chain)
    yield (
        "2,000 chained rules",
        COMPLETIONS,
        completion(guided_grammar="\n".join(chain.split("\n")[:2001]) + '\nr2000: "b"'),
    )
    patterns = [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(300)]
    for count in (300, 30):
        yield f"{count} patterns at once", COMPLETIONS, completion(guided_json={"allOf": patterns[:count]})
    yield "a long repetition", COMPLETIONS, completion(guided_regex="a{999999999}")
    yield "repetitions in repetitions", COMPLETIONS, completion(guided_regex="((a{1,99}){1,99}){1,99}")
    yield "a regex of 1 MB", COMPLETIONS, completion(guided_regex="a" * MIB)
    yield "a regex of 60 KB", COMPLETIONS, completion(guided_regex="[a-z]{2}" * 7500)
    yield "100,000 alternatives", COMPLETIONS, completion(guided_regex="|".join(f"a{i}" for i in range(100_000)))
    yield "8,000 alternatives", COMPLETIONS, completion(guided_regex="|".join(f"a{i}" for i in range(8000)))
    yield "100,000 choices", COMPLETIONS, completion(guided_choice=[f"choice {i}" for i in range(100_000)])
    yield "1,024 choices", COMPLETIONS, completion(guided_choice=[f"choice {i}" for i in range(1024)])
    yield "a choice of 1 MB", COMPLETIONS, completion(guided_choice=["a" * MIB])
    yield "a choice of 60 KB", COMPLETIONS, completion(guided_choice=["ab" * 30_000])
    yield "a recursive regex", COMPLETIONS, completion(guided_regex="(?R)")
    yield "a look-ahead", COMPLETIONS, completion(guided_regex="(?=a)b")
    yield "a back-reference", COMPLETIONS, completion(guided_regex="(a)\\1")
    yield "letters of all scripts", COMPLETIONS, completion(guided_regex="\\p{L}{1000}")
    yield "an empty rule", COMPLETIONS, completion(guided_grammar="start:")
    yield "no start", COMPLETIONS, completion(guided_grammar='a: "b"')
    yield "left recursion", COMPLETIONS, completion(guided_grammar='start: start "a" | "b"')
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    yield "3,000 properties", COMPLETIONS, completion(guided_json=many)
    few = {**many, "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    yield "1,000 properties", COMPLETIONS, completion(guided_json={**few, "required": list(few["properties"])})
    yield "5,000 values", COMPLETIONS, completion(guided_json={"enum": [f"v{i}" for i in range(5000)]})
    yield "a schema of itself", COMPLETIONS, completion(guided_json={"$ref": "#"})
    yield "a billion items", COMPLETIONS, completion(guided_json={"type": "array", "minItems": 10**9})
    yield "a billion letters", COMPLETIONS, completion(guided_json={"type": "string", "minLength": 10**9})
    yield "no value at all", COMPLETIONS, completion(guided_json=False)
    yield "two grammars", COMPLETIONS, completion(guided_regex="a", guided_choice=["a"])


def embeddings() -> Made:
    yield "2,049 texts", EMBEDDINGS, {"input": ["a"] * 2049}
    yield "2,048 texts as base64", EMBEDDINGS, {"input": ["a"] * 2048, "encoding_format": "base64"}
    yield "2,048 texts as numbers", EMBEDDINGS, {"input": ["a"] * 2048, "pooling": "mean"}
    yield "a text of 5 MB", EMBEDDINGS, {"input": "word " * MIB}
    yield "a text of 5 MB that is cut", EMBEDDINGS, {"input": "word " * MIB, "truncate_prompt_tokens": 8}
    yield "a million ids to a vector", EMBEDDINGS, {"input": [1] * 10**6}
    yield "a million empty lists", EMBEDDINGS, b'{"input":[' + b"[]," * 10**6 + b"[]]}"
    yield "an id of 5,000 digits", EMBEDDINGS, b'{"input":[%b]}' % (b"9" * 5000)
    yield "texts beside ids", EMBEDDINGS, {"input": ["a", [1]]}
    yield "a picture to a vector", EMBEDDINGS, {"input": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}
    for value in (None, "", [], [[]], {}, 5, True, [True], [1.5], [-1], [10**9]):
        yield f"input {json.dumps(value)}", EMBEDDINGS, {"input": value}
    for name, values in {
        "dimensions": [0, -1, 10**9, 10**100, "8", True],
        "encoding_format": ["hex", 5, []],
        "normalize": ["yes", 2],
        "pooling": ["cls", 5, {}],
        "truncate_prompt_tokens": [-2, 0, 10**100],
        "messages": [[user("Hi")]],
    }.items():
        for value in values:
            yield f"{name} {json.dumps(value)[:20]} of a vector", EMBEDDINGS, {"input": "a", name: value}
    yield "a salt of 1 MB for a vector", EMBEDDINGS, {"input": "a", "cache_salt": "s" * MIB}


def wire() -> Made:
    body = completion()
    yield "a header of 100 KB", COMPLETIONS, body, {"x-a": "a" * 100_000}
    yield "a header of 60 KB", COMPLETIONS, body, {"x-a": "a" * 60_000}
    yield "1,000 headers", COMPLETIONS, body, {f"x-{i}": "a" for i in range(1000)}
    yield "a class of 10 KB", COMPLETIONS, body, {"x-slo-class": "a" * 10_000}
    yield "a request id of 10 KB", COMPLETIONS, body, {"x-request-id": "a" * 10_000}
    yield "a wrong trace", COMPLETIONS, body, {"traceparent": "00-" + "z" * 1000}
    yield "a path of 30 KB", "/v1/models/" + "m" * 30_000, None
    yield "an unknown path of 30 KB", "/" + "p" * 30_000, None
    yield "zeros in a path", "/v1/requests/%00%00", None
    yield "a wrong step", "/v1/replicas?after=" + "x" * 10_000, None


GROUPS: dict[str, Callable[[], Made]] = {
    "lists": lists,
    "chats": chats,
    "nesting": nesting,
    "unicode": unicode,
    "bodies": bodies,
    "wrong types": wrong_types,
    "numbers": numbers,
    "grammars": grammars,
    "embeddings": embeddings,
    "wire": wire,
    **hostile_memory.GROUPS,
}
