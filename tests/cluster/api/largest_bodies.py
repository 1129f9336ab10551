"""For each route, the largest requests that its bounds allow, and requests just beyond a bound."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from crossdock.cluster.api import bounds
from tests.cluster.api.measured_ingress import CONTEXT

MAX_BODY = 6 << 20  # of the server
MAX_FILE = 8 << 20
REFUSED = range(400, 500)
TAKEN = (200,)
EITHER = (200, *REFUSED)
JSON = "application/json"
CHATS = "/v1/chat/completions"
WORD = "dog "
HI = {"role": "user", "content": "Hi"}


@dataclass(frozen=True)
class Sent:
    """A request. `name`: of the case in an error. `statuses`: what may be answered."""

    name: str
    content: bytes
    statuses: Any = EITHER
    kind: str = JSON
    query: str = ""


Case: TypeAlias = Callable[[], Iterator[Sent]]


def sent(name: str, body: Any, statuses: Any = EITHER) -> Sent:
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return Sent(name, content, statuses)


def text(num_chars: int) -> str:
    return (WORD * (num_chars // len(WORD) + 1))[:num_chars]


def parts(num: int) -> list[list[Any]]:
    return [[] for _ in range(num)]


def any_json(**right: Any) -> Iterator[Sent]:
    """The largest JSON of any form, beside fields that are right."""
    room = MAX_BODY - 64 - len(json.dumps(right))
    yield sent("a field that is not known", {**right, "unknown": text(room)}, REFUSED)
    yield sent("strings, lists and objects", {**right, "unknown": parts(bounds.BODY_PARTS - 64)}, REFUSED)
    yield sent("too many lists", {**right, "unknown": parts(bounds.BODY_PARTS + 1)}, REFUSED)
    yield sent("values", {**right, "unknown": [1] * (bounds.BODY_VALUES - 64)}, REFUSED)
    yield sent("too many values", {**right, "unknown": [1] * (bounds.BODY_VALUES + 64)}, REFUSED)
    yield sent("levels", b"[" * 1000 + b"]" * 1000, REFUSED)
    yield sent("fields", {**right, **{f"x{i}": 1 for i in range(bounds.BODY_FIELDS)}}, REFUSED)
    yield sent("no JSON", b'{"a": "' + b'\\"' * (MAX_BODY // 2 - 8), REFUSED)
    yield sent("no UTF-8", b'{"a": "' + b"\xff" * (MAX_BODY - 16) + b'"}', REFUSED)


def few_json(**right: Any) -> Iterator[Sent]:
    """The same for a route whose body is read by the same code: what a route of its own could count differently."""
    yield sent("strings, lists and objects", {**right, "unknown": parts(bounds.BODY_PARTS - 64)}, REFUSED)
    yield sent("too many lists", {**right, "unknown": parts(bounds.BODY_PARTS + 1)}, REFUSED)


def generation(**right: Any) -> Iterator[Sent]:
    """The largest fields that completions and chats have."""
    yield sent("user", {**right, "user": text(MAX_BODY - 4096)})
    yield sent("logit_bias", {**right, "logit_bias": {str(i % 600): 1 for i in range(600)}})
    stops = ["x" * 255 + str(i) for i in range(10, 10 + bounds.STOPS)]
    yield sent("stop", {**right, "stop": [each[: bounds.ALL_STOPS_CHARS // bounds.STOPS] for each in stops]}, TAKEN)
    yield sent("stop, too many", {**right, "stop": [*stops, "x"]}, REFUSED)
    words = ["dog " * (bounds.BAD_WORD_CHARS // 4 - 1) + str(i) for i in range(bounds.BAD_WORDS)]
    yield sent("bad_words", {**right, "bad_words": words})
    yield sent("bad_words, too many", {**right, "bad_words": [*words, "x"]}, REFUSED)
    yield sent("stop_token_ids", {**right, "stop_token_ids": [i % 600 for i in range(bounds.STOP_TOKENS)]})
    yield sent("allowed_token_ids", {**right, "allowed_token_ids": [i % 600 for i in range(bounds.ALLOWED_TOKENS)]})
    half = bounds.GRAMMAR_CHARS - 300
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(half // 26)}}
    yield sent("guided_json", {**right, "guided_json": schema})
    yield sent("guided_json, too long", {**right, "guided_json": {**schema, "title": text(half)}}, REFUSED)
    yield sent("guided_regex", {**right, "guided_regex": "a" * bounds.GRAMMAR_CHARS})
    yield sent("guided_grammar", {**right, "guided_grammar": 'start: "' + "a" * half + '"'})
    choices = [text(bounds.GRAMMAR_CHARS // bounds.GUIDED_CHOICES - 4) + str(i) for i in range(1000, 1000 + 1000)]
    yield sent("guided_choice", {**right, "guided_choice": [each[-60:] for each in choices]})
    yield sent("cache_salt", {**right, "cache_salt": "x" * bounds.CACHE_SALT_CHARS}, TAKEN)
    yield sent("cache_salt, too long", {**right, "cache_salt": "x" * (bounds.CACHE_SALT_CHARS + 1)}, REFUSED)


def completions() -> Iterator[Sent]:
    right = {"prompt": "Hi", "max_tokens": 2}
    yield from any_json(**right)
    yield from generation(**right)
    yield sent("a text", {"prompt": text(MAX_BODY - 64)}, REFUSED)
    yield sent("a text to be cut", {"prompt": text(bounds.TRUNCATED_CHARS), "truncate_prompt_tokens": 9}, TAKEN)
    most = max(bounds.TRUNCATED_CHARS, bounds.TRUNCATED_PER_TOKEN * CONTEXT)
    yield sent("a longer one", {"prompt": text(most + 1), "truncate_prompt_tokens": 9}, REFUSED)
    each = MAX_BODY // bounds.OUTPUTS - 16
    yield sent("texts", {"prompt": [text(each)] * bounds.OUTPUTS, "max_tokens": 1})
    yield sent(
        "texts to be cut", {"prompt": [text(each)] * bounds.OUTPUTS, "max_tokens": 1, "truncate_prompt_tokens": 5}
    )
    yield sent("too many texts", {"prompt": ["a"] * (bounds.OUTPUTS + 1)}, REFUSED)
    outputs = {"prompt": ["Hi"] * (bounds.OUTPUTS // 128), "n": 128}
    yield sent("outputs", {**outputs, "max_tokens": 20}, TAKEN)
    yield sent("outputs with logprobs", {**outputs, "max_tokens": 5, "logprobs": 20}, TAKEN)
    yield sent("too many outputs", {"prompt": ["Hi"] * 9, "n": 128}, REFUSED)
    yield sent("token ids", {"prompt": [5] * (bounds.BODY_VALUES - 64)}, REFUSED)
    yield sent("token ids of many", {"prompt": [[5] * 500] * bounds.OUTPUTS, "max_tokens": 1})
    echo = {"prompt": [5] * (CONTEXT - 2), "max_tokens": 1, "echo": True}
    yield sent("echo", {**echo, "logprobs": 20})
    yield sent("prompt_logprobs", {**echo, "prompt_logprobs": 120})


def conversation(**right: Any) -> Iterator[Sent]:
    """The largest fields that all APIs of conversations have."""
    kwargs = {"a": text(bounds.TEMPLATE_CHARS - 64)}
    yield sent("chat_template_kwargs", {**right, "chat_template_kwargs": kwargs}, TAKEN)
    yield sent("chat_template_kwargs, too long", {**right, "chat_template_kwargs": {"a": 2 * kwargs["a"]}}, REFUSED)
    many = {"a": parts(bounds.TEMPLATE_CHARS // 3 - 64)}
    yield sent("chat_template_kwargs of many parts", {**right, "chat_template_kwargs": many})


def function(i: int, num_chars: int) -> dict[str, Any]:
    return {"name": f"f{i}", "description": text(num_chars), "parameters": {"type": "object", "properties": {}}}


def chats() -> Iterator[Sent]:
    right = {"messages": [HI], "max_tokens": 2}
    yield from few_json(**right)
    yield from conversation(**right)
    yield from messages_of_chats(CHATS)
    each = bounds.TOOLS_CHARS // bounds.TOOLS - 200
    tools = [{"type": "function", "function": function(i, each)} for i in range(bounds.TOOLS)]
    yield sent("tools", {**right, "tools": tools})
    yield sent("tools, forced", {**right, "tools": tools, "tool_choice": "required"})
    yield sent("tools, too many", {**right, "tools": tools + tools[:1]}, REFUSED)
    long = [{"type": "function", "function": function(0, bounds.TOOLS_CHARS)}]
    yield sent("tools, too long", {**right, "tools": long}, REFUSED)
    yield sent("outputs", {**right, "n": 128}, TAKEN)
    yield sent("too many outputs", {**right, "n": 129}, REFUSED)


def messages_of_chats(path: str) -> Iterator[Sent]:
    """The largest messages. `path` answers them."""
    limit = {} if path == "/tokenize" else {"max_tokens": 1}
    long = MAX_BODY - 256
    yield sent("messages", {"messages": [{"role": "user", "content": "a"}] * 4000, **limit})
    yield sent("too many messages", {"messages": [HI] * (bounds.MESSAGES + 1), **limit}, REFUSED)
    yield sent("a message", {"messages": [{"role": "user", "content": text(long)}], **limit}, REFUSED)
    yield sent("a name", {"messages": [{**HI, "name": "x" * long}], **limit}, TAKEN)
    yield sent("a role", {"messages": [{"role": "x" * long, "content": "a"}], **limit}, REFUSED)
    yield sent("reasoning", {"messages": [HI, {"role": "assistant", "content": "a", "reasoning": text(long)}], **limit})
    content = [{"type": "text", "text": "a"}] * bounds.MESSAGE_PARTS
    yield sent("parts", {"messages": [{"role": "user", "content": content}], **limit})
    yield sent("too many parts", {"messages": [{"role": "user", "content": [*content, content[0]]}], **limit}, REFUSED)
    for name, arguments, statuses in (
        ("a call", '{"a": "' + "x" * (bounds.ARGUMENTS_CHARS - 64) + '"}', EITHER),
        ("a longer call", '{"a": "' + "x" * bounds.ARGUMENTS_CHARS + '"}', REFUSED),
        ("a call of many parts", '{"a": [' + "[]," * (bounds.BODY_PARTS - 64) + "0]}", EITHER),
        ("a call of more parts", '{"a": [' + "[]," * (bounds.BODY_PARTS + 64) + "0]}", REFUSED),
    ):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        yield sent(
            name, {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": [call]}], **limit}, statuses
        )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [{**call, "id": f"c{i}"} for i in range(bounds.MESSAGE_PARTS // 2)]
    answers = [{"role": "tool", "tool_call_id": f"c{i}", "content": "a"} for i in range(bounds.MESSAGE_PARTS // 2)]
    yield sent(
        "calls", {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": calls}, *answers], **limit}
    )
    picture = "data:image/png;base64," + base64.b64encode(bytes(MAX_BODY * 3 // 4 - 1024)).decode()
    pictures = [{"type": "image_url", "image_url": {"url": picture}}]
    yield sent("a picture", {"messages": [{"role": "user", "content": pictures}], **limit}, REFUSED)
    reads = "{% for each in documents %}{{ each.text }}{% endfor %}{{ messages[0].content }}"
    papers = [{"text": text(MAX_BODY // bounds.DOCUMENTS - 64)}] * bounds.DOCUMENTS
    chosen = {"messages": [HI], "chat_template": reads, **limit}
    yield sent("documents", {**chosen, "documents": papers}, REFUSED)
    yield sent("short documents", {**chosen, "documents": [{"text": "a"}] * bounds.DOCUMENTS}, TAKEN)
    yield sent("too many documents", {**chosen, "documents": [{}] * (bounds.DOCUMENTS + 1)}, REFUSED)
    template = "{{ messages[0].content }}" + "{# a #}" * (bounds.TEMPLATE_CHARS // 7 - 8)
    yield sent("a template", {"messages": [HI], "chat_template": template, **limit}, TAKEN)
    loop = "{% for i in range(300000) %}a{% endfor %}{{ messages[0].content }}"
    yield sent("a template that writes much", {"messages": [HI], "chat_template": loop, **limit})


def tokenize() -> Iterator[Sent]:
    yield from few_json(prompt="Hi")
    yield from conversation(messages=[HI])
    yield from messages_of_chats("/tokenize")
    most = max(bounds.TRUNCATED_CHARS, bounds.TRUNCATED_PER_TOKEN * CONTEXT)
    yield sent("a text", {"prompt": text(most), "return_token_strs": True}, TAKEN)
    yield sent("a longer text", {"prompt": text(most + 1)}, REFUSED)


def detokenize() -> Iterator[Sent]:
    yield from few_json(tokens=[5])
    yield sent("tokens", {"tokens": [5] * bounds.DETOKENIZED}, TAKEN)
    yield sent("too many tokens", {"tokens": [5] * (bounds.DETOKENIZED + 1)}, REFUSED)


def responses() -> Iterator[Sent]:
    right = {"input": "Hi", "max_output_tokens": 2, "store": False}
    yield from few_json(**right)
    yield from conversation(**right)
    item = {"type": "message", "role": "user", "content": "a"}
    most = bounds.CONVERSATION_CHARS
    yield sent("a text", {**right, "input": text(most - 64)}, REFUSED)
    yield sent("a text, stored", {"input": text(CONTEXT), "max_output_tokens": 2})
    yield sent("a longer text", {**right, "input": text(most + 64)}, REFUSED)
    yield sent("instructions", {**right, "instructions": text(most)}, REFUSED)
    yield sent("instructions, too long", {**right, "instructions": text(most + 1)}, REFUSED)
    yield sent("items", {**right, "input": [item] * 4000})
    yield sent("too many items", {**right, "input": [item] * (bounds.MESSAGES + 1)}, REFUSED)
    call = {"type": "function_call", "call_id": "c", "name": "f"}
    parts_of_call = '{"a": [' + "[]," * (bounds.BODY_PARTS - 64) + "0]}"
    yield sent("a call", {**right, "input": [{**call, "arguments": '{"a": "' + text(most - 99) + '"}'}, item]})
    yield sent("a call of many parts", {**right, "input": [{**call, "arguments": parts_of_call}, item]})
    output = {"type": "function_call_output", "call_id": "c", "output": text(most - 99)}
    yield sent("an output", {**right, "input": [item, {**call, "arguments": "{}"}, output]}, REFUSED)
    url = "data:image/png;base64," + "A" * (MAX_BODY - 4096)
    picture = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    yield sent("a picture", {**right, "input": [picture]}, REFUSED)
    yield sent("metadata", {**right, "metadata": {f"{i}": "x" * 512 for i in range(16)}}, TAKEN)
    yield sent("metadata, too many", {**right, "metadata": {f"{i}": "" for i in range(17)}}, REFUSED)
    tools = [{"type": "function", **function(i, 800)} for i in range(bounds.TOOLS)]
    yield sent("tools", {**right, "tools": tools})
    namespace = {"type": "namespace", "name": "n", "description": text(100_000), "tools": tools}
    yield sent("a namespace, whose description each of its tools gets", {**right, "tools": [namespace]}, REFUSED)


def of_anthropic() -> Iterator[Sent]:
    right = {"messages": [HI], "max_tokens": 2}
    yield from few_json(**right)
    long = MAX_BODY - 256
    block = {"type": "text", "text": "a"}
    yield sent("system", {**right, "system": text(long)})
    yield sent("system of parts", {**right, "system": [block] * 4000})
    yield sent("messages", {**right, "messages": [HI, {"role": "assistant", "content": "a"}] * 2000})
    yield sent("too many messages", {**right, "messages": [HI] * (bounds.MESSAGES + 1)}, REFUSED)
    yield sent("blocks", {**right, "messages": [{"role": "user", "content": [block] * 4096}]})
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": parts(bounds.BODY_PARTS // 2)}}
    yield sent("a call", {**right, "messages": [HI, {"role": "assistant", "content": [use]}, HI]})
    uses = [{**use, "id": f"a{i}", "input": {}} for i in range(2000)]
    results = [{"type": "tool_result", "tool_use_id": f"a{i}", "content": "a"} for i in range(2000)]
    turns = [HI, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    yield sent("calls", {**right, "messages": turns})
    thinking = [{"type": "thinking", "thinking": text(long), "signature": ""}, block]
    yield sent("thinking", {**right, "messages": [HI, {"role": "assistant", "content": thinking}, HI]})
    source = {"type": "base64", "media_type": "image/png", "data": "A" * (MAX_BODY - 4096)}
    picture = {"role": "user", "content": [{"type": "image", "source": source}]}
    yield sent("a picture", {**right, "messages": [picture]}, REFUSED)
    schema = {"type": "object", "properties": {}}
    tools = [{"name": f"f{i}", "description": text(800), "input_schema": schema} for i in range(bounds.TOOLS)]
    yield sent("tools", {**right, "tools": tools})
    yield sent("tools, too many", {**right, "tools": [*tools, tools[0]]}, REFUSED)


def pooled() -> Iterator[Sent]:
    yield from few_json(input="Hi")
    each = MAX_BODY // bounds.INPUTS - 16
    yield sent("texts", {"input": [text(each)] * bounds.INPUTS})
    yield sent("short texts", {"input": ["a"] * bounds.INPUTS})
    yield sent("texts to be cut", {"input": [text(each)] * bounds.INPUTS, "truncate_prompt_tokens": 5})
    yield sent("too many texts", {"input": ["a"] * (bounds.INPUTS + 1)}, REFUSED)
    yield sent("token ids", {"input": [[5] * 250] * bounds.INPUTS})
    yield sent("a text", {"input": text(MAX_BODY - 64)}, REFUSED)
    yield sent("a text to be cut", {"input": text(bounds.TRUNCATED_CHARS), "truncate_prompt_tokens": 5})


def scores() -> Iterator[Sent]:
    yield from few_json(text_1="a", text_2="b")
    each = MAX_BODY // bounds.INPUTS - 16
    yield sent("a text and many", {"text_1": text(CONTEXT // 2), "text_2": [text(each)] * bounds.INPUTS})
    yield sent("pairs", {"text_1": [text(each // 2)] * bounds.INPUTS, "text_2": [text(each // 2)] * bounds.INPUTS})
    yield sent("a long text and many", {"text_1": text(MAX_BODY - 20_000), "text_2": ["a"] * bounds.INPUTS}, REFUSED)
    yield sent("too many", {"text_1": "a", "text_2": ["a"] * (bounds.INPUTS + 1)}, REFUSED)


def ranks() -> Iterator[Sent]:
    yield from few_json(query="a", documents=["b"])
    each = MAX_BODY // bounds.INPUTS - 16
    yield sent("documents", {"query": text(CONTEXT // 2), "documents": [text(each)] * bounds.INPUTS})
    yield sent("short documents", {"query": "a", "documents": [{"text": "a"}] * bounds.INPUTS})
    yield sent("a long query", {"query": text(MAX_BODY - 20_000), "documents": ["a"] * bounds.INPUTS}, REFUSED)
    yield sent("too many documents", {"query": "a", "documents": ["a"] * (bounds.INPUTS + 1)}, REFUSED)


def decisions() -> Iterator[Sent]:
    question = {"type": "predicate", "instructions": "a"}
    right = {"input": "Hi", "questions": [question]}
    yield from few_json(**right)
    yield sent("questions", {**right, "questions": [question] * bounds.QUESTIONS})
    yield sent("too many questions", {**right, "questions": [question] * (bounds.QUESTIONS + 1)}, REFUSED)
    each = MAX_BODY // bounds.QUESTIONS - 64
    long = {"type": "predicate", "instructions": text(each)}
    yield sent("long questions", {**right, "questions": [long] * bounds.QUESTIONS})
    yield sent("an input for all", {"input": text(2 * CONTEXT), "questions": [question] * bounds.QUESTIONS})
    yield sent("a long input", {"input": text(MAX_BODY - 50_000), "questions": [question] * bounds.QUESTIONS}, REFUSED)
    choices = [{"value": f"v{i}"} for i in range(bounds.QUESTION_CHOICES)]
    many = {"type": "choice", "instructions": "a", "choices": choices}
    yield sent("choices", {**right, "questions": [many] * (bounds.BODY_PARTS // 2 // bounds.QUESTION_CHOICES - 1)})
    yield sent("too many choices", {**right, "questions": [{**many, "choices": [*choices, {"value": "v"}]}]}, REFUSED)
    data = {"type": "input_json", "data": {"a": parts(bounds.BODY_PARTS - 128)}}
    yield sent("JSON of many parts", {**right, "input": [{"role": "user", "content": [data]}]})
    item = {"role": "user", "content": "a"}
    yield sent("items", {**right, "input": [item] * 4000})
    yield sent("too many items", {**right, "input": [item] * (bounds.MESSAGES + 1)}, REFUSED)


BOUNDARY = "x-boundary-x"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def form(*fields: tuple[str, bytes], headers: bytes = b"") -> bytes:
    """Return the content of a form. `fields`: what follows `name=` in the header of each, and its value."""
    lines = [
        b"--%s\r\nContent-Disposition: form-data; name=%s\r\n%s\r\n%s\r\n"
        % (BOUNDARY.encode(), name.encode(), headers, value)
        for name, value in fields
    ]
    return b"".join(lines) + b"--" + BOUNDARY.encode() + b"--\r\n"


def line(url: str, body: Any, number: int = 0) -> bytes:
    made = {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
    return json.dumps(made, separators=(",", ":")).encode() + b"\n"


def files() -> Iterator[Sent]:
    purpose = ('"purpose"', b"batch")
    file = '"file"; filename="in.jsonl"'

    def upload(name: str, *fields: tuple[str, bytes], statuses: Any = REFUSED, headers: bytes = b"") -> Sent:
        return Sent(name, form(*fields, headers=headers), statuses, FORM)

    yield upload("a file", purpose, (file, b"x" * (MAX_FILE - 1024)), statuses=TAKEN)
    yield upload("a larger file", purpose, (file, b"x" * MAX_FILE))
    yield upload("a field", ('"purpose"', b"x" * (MAX_FILE - 1024)))
    yield upload("a name of a field", ('"' + "x" * (MAX_FILE - 1024) + '"', b""))
    yield upload("a name of a file", purpose, (f'"file"; filename="{"x" * (MAX_FILE - 1024)}"', b""))
    yield upload("headers", purpose, (file, b""), headers=b"a: b\r\n" * (MAX_FILE // 12 - 1024))
    yield upload("fields", *[('"x"', b"")] * 50_000)
    yield upload("files", purpose, *[(file, b"")] * 50_000)
    yield Sent("no end of a header", b"--" + BOUNDARY.encode() + b"\r\n" + b"a" * (MAX_FILE - 99), REFUSED, FORM)
    yield sent("JSON", b"[" * 1024, REFUSED)


def batch_files() -> Iterator[tuple[str, bytes]]:
    """Files of batches whose lines are the largest, each for chats."""
    long = MAX_BODY - 256
    yield "a line of one text", line(CHATS, {"messages": [HI], "user": text(long)})
    yield (
        "lines of many parts",
        b"".join(line(CHATS, {"messages": [HI], "unknown": parts(bounds.BODY_PARTS - 99)}, i) for i in range(8)),
    )
    yield "a line of too many parts", line(CHATS, {"messages": [HI], "unknown": parts(bounds.BODY_PARTS + 1)})
    yield "a line that is too long", line(CHATS, {"messages": [HI], "user": text(MAX_BODY + 64)})
    yield "many lines", b"".join(line(CHATS, {"messages": [HI], "max_tokens": 1}, i) for i in range(500))
    yield "no JSON", b"[" * (MAX_FILE - 4096)
    yield "lines without text", b"\n" * (MAX_FILE - 4096)


def batches() -> Iterator[Sent]:
    right = {"input_file_id": "file-" + "0" * 32, "endpoint": CHATS, "completion_window": "24h"}
    yield from few_json(**right)
    yield sent("metadata", {**right, "metadata": {f"{i}": "x" * 512 for i in range(16)}}, REFUSED)
    yield sent("metadata, too long", {**right, "metadata": {"a": text(MAX_BODY - 256)}}, REFUSED)


def adapters() -> Iterator[Sent]:
    yield from few_json(lora_name="a", lora_path="b")
    yield sent(
        "a name", {"lora_name": "x" * bounds.ITEM_NAME_CHARS, "lora_path": "y" * bounds.ITEM_NAME_CHARS}, REFUSED
    )
    yield sent("a longer name", {"lora_name": text(MAX_BODY - 64)}, REFUSED)


def of_trainers(**right: Any) -> Case:
    """The largest JSON of a trainer's path, whose fields may be of any form."""

    def cases() -> Iterator[Sent]:
        yield from few_json(**right)
        for name in right:
            yield sent(f"{name}, a text", {**right, name: text(MAX_BODY - 256)}, REFUSED)
            yield sent(f"{name}, an object", {**right, name: {"a": parts(bounds.BODY_PARTS - 64)}})

    return cases


def finish_update() -> Iterator[Sent]:
    yield sent("a text", {"weight_version": text(MAX_BODY - 64)}, (503,))  # there is no replica
    yield sent("parts", {"unknown": parts(bounds.BODY_PARTS - 8)}, REFUSED)
    yield sent("too many parts", {"unknown": parts(bounds.BODY_PARTS + 8)}, REFUSED)


def no_body() -> Iterator[Sent]:
    """Routes that read no body: it is read off the wire all the same, and given back."""
    yield Sent("a body that nobody reads", b"x" * MAX_BODY, EITHER, "application/octet-stream")


def scenarios() -> Iterator[Sent]:
    yield from no_body()
    largest = "num_prompts=8&num_streams=64&prompt_tokens=65536&max_num_batched_tokens=128"
    for policy in ("adaptive", "whole"):  # chunks that fit, and none; test_scenario_run has all four
        yield Sent(f"the largest, {policy}", b"", TAKEN, query=f"?{largest}&policy={policy}")
    yield Sent("a larger one", b"", REFUSED, query="?num_prompts=9")
    yield Sent("a long name", b"", REFUSED, query="?profile=" + "x" * 8000)


ROUTES: Mapping[tuple[str, str], Case] = {
    ("POST", "/v1/completions"): completions,
    ("POST", CHATS): chats,
    ("POST", "/v1/responses"): responses,
    ("POST", "/v1/messages"): of_anthropic,
    ("POST", "/v1/messages/count_tokens"): of_anthropic,
    ("POST", "/v1/embeddings"): pooled,
    ("POST", "/classify"): pooled,
    ("POST", "/v1/score"): scores,
    ("POST", "/score"): partial(few_json, text_1="a", text_2="b"),
    ("POST", "/v1/rerank"): ranks,
    ("POST", "/rerank"): partial(few_json, query="a", documents=["b"]),
    ("POST", "/v2/rerank"): partial(few_json, query="a", documents=["b"]),
    ("POST", "/v1/decisions"): decisions,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("POST", "/v1/load_lora_adapter"): adapters,
    ("POST", "/v1/unload_lora_adapter"): adapters,
    ("POST", "/v1/files"): files,
    ("POST", "/v1/batches"): batches,
    ("POST", "/init_weight_transfer_engine"): of_trainers(init_info={}),
    ("POST", "/update_weights"): of_trainers(update_info={}),
    ("POST", "/finish_weight_update"): finish_update,
    ("POST", "/update_weights_from_disk"): of_trainers(model_path="a"),
    ("POST", "/weight_checker"): of_trainers(action="compare", baseline={"a": "b"}),
    **{
        ("POST", path): no_body
        for path in ("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/flush_cache")
    },
    ("POST", "/start_weight_update"): no_body,
    ("POST", "/v1/responses/{name}/cancel"): no_body,
    ("POST", "/v1/batches/{name}/cancel"): no_body,
    ("GET", "/v1/simulator"): scenarios,
    ("DELETE", "/v1/responses/{name}"): no_body,
    ("DELETE", "/v1/files/{name}"): no_body,
    **{
        ("GET", path): no_body
        for path in (
            *("/health", "/ready", "/metrics", "/version", "/openapi.json"),
            *("/v1/models", "/v1/models/{name:path}", "/v1/requests", "/v1/requests/{name:path}", "/v1/replicas"),
            *("/v1/scaling", "/v1/responses/{name}", "/v1/responses/{name}/input_items"),
            *("/v1/files", "/v1/files/{name}", "/v1/files/{name}/content", "/v1/batches", "/v1/batches/{name}"),
            *("/is_paused", "/is_sleeping", "/get_world_size", "/server_info", "/weight_info"),
        )
    },
}
