"""Work that grows with a request's input: other requests are served between its slices, or it runs in a thread."""

import asyncio
import gc
import json
import selectors
import threading
from collections import Counter
from collections.abc import Coroutine
from contextlib import aclosing
from types import FrameType
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.body import stop_strings
from crossdock.cluster.api.body.bodies import GenerationBody
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.http import json_size
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.http_json import long_json
from crossdock.cluster.api.http.json_size import check_json_size
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.text.choices import merge
from crossdock.cluster.api.text.tokenizer import Detokenizer, ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import VOCAB_SIZE, ScriptedDispatcher


class Turns:
    """Counts the turns of an event loop, and how much of each kind of work each turn does."""

    def __init__(self) -> None:
        self.number = 0
        self.work: dict[str, Counter[int]] = {}
        self.threads: dict[str, set[int]] = {}

    def record(self, kind: str, amount: int) -> None:
        self.work.setdefault(kind, Counter())[self.number] += amount
        self.threads.setdefault(kind, set()).add(threading.get_ident())

    def most(self, kind: str) -> int:
        """Return the most work of a kind that one turn did."""
        return max(self.work[kind].values())

    def ran_in_loop(self, kind: str) -> bool:
        return threading.get_ident() in self.threads[kind]

    async def during(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of `work`, and count the turns meanwhile."""

        async def count() -> None:
            while True:
                self.number += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        self.number = 0
        try:
            return await work
        finally:
            counting.cancel()


class WatchedTokenizer(ModelTokenizer):
    """Records the characters and tokens that it works on, by turn of the event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, turns: Turns) -> None:
        super().__init__(tokenizer)
        self.turns = turns

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str | None = None) -> list[int]:
        self.turns.record("encode", len(text))
        return super().encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        self.turns.record("decode", len(token_ids))
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def vocabulary_name(self, token_id: int) -> str:
        self.turns.record("name", 1)
        return super().vocabulary_name(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        self.turns.record("bytes", 1)
        return super().token_bytes(token_id)

    def render_chat(self, messages: Any, **options: Any) -> str:
        self.turns.record("render", len(messages))
        return super().render_chat(messages, **options)

    def detokenizer(self, **options: Any) -> Detokenizer:
        self.turns.record("detokenizer", 1)
        plain = super().detokenizer(**options)
        return WatchedDetokenizer(plain, self.turns)


class WatchedDetokenizer:
    def __init__(self, plain: Detokenizer, turns: Turns) -> None:
        self.plain = plain
        self.turns = turns
        self.flush = plain.flush

    def add(self, token_id: int) -> str:
        self.turns.record("detokenize", 1)
        return self.plain.add(token_id)


class LongContext(ScriptedDispatcher):
    @property
    def model(self) -> ModelCard:
        return ModelCard("tiny", 0, 100_000, VOCAB_SIZE)


class Watched:
    """The API in front of a scripted dispatcher, with a tokenizer that records when it works."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.turns = Turns()
        self.tokenizer = WatchedTokenizer(tokenizer, self.turns)
        self.engine = LongContext(self.tokenizer)
        self.app = one_model_api(self.engine, self.tokenizer, HttpConfig())  # type: ignore[arg-type]
        self.turns.work.clear()
        self.turns.threads.clear()

    def post(self, path: str, **body: Any) -> Any:
        """Return the body of an answer, which must succeed."""

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost") as http:
                return await http.post(path, json=body, timeout=240)

        answer = asyncio.run(self.turns.during(ask()))
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def watched(tokenizers: dict[str, PreTrainedTokenizerFast]) -> Watched:
    return Watched(tokenizers["byte_level"])


async def test_slices_let_other_tasks_run_between() -> None:
    turns = Turns()

    async def cut() -> list[tuple[int, list[int]]]:
        return [(turns.number, part) async for part in slices(iter(range(8)), 3)]

    numbers, parts = zip(*await turns.during(cut()), strict=True)
    assert parts == ([0, 1, 2], [3, 4, 5], [6, 7])
    assert numbers[0] < numbers[1] < numbers[2]


def test_slices_let_other_threads_run_between() -> None:
    """A loop that never waits keeps the interpreter from the threads that bring tokens."""
    waits = 0

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            nonlocal waits
            waits += timeout is not None and timeout > 0
            return super().select(timeout)

    async def cut() -> list[list[int]]:
        nonlocal waits
        waits = 0
        return [part async for part in slices(range(8), 3)]

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Selector())) as runner:
        assert runner.run(cut()) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert waits >= 2


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [  # the most of each kind of work that one turn does
        ("/v1/completions", {"prompt": ["dog " * 50] * 200}, {"encode": 2 * 4096}),
        ("/v1/completions", {"prompt": ["a"] * 8, "n": 64}, {"detokenizer": 32}),
        ("/v1/completions", {"prompt": [300] * 5000, "echo": True, "logprobs": 3}, {"detokenize": 300, "bytes": 1800}),
        ("/v1/completions", {"prompt": [300] * 3000, "prompt_logprobs": 5}, {"bytes": 1800}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "dog " * 3000}], "prompt_logprobs": 5},
            {"bytes": 1800},
        ),
        ("/tokenize", {"prompt": "dog " * 5000, "return_token_strs": True}, {"name": 1024}),
    ],
)
def test_work_of_a_large_request_is_done_over_many_turns(
    watched: Watched, path: str, body: dict[str, Any], most: dict[str, int]
) -> None:
    watched.post(path, **body, **({} if path == "/tokenize" else {"max_tokens": 1}))
    for kind, amount in most.items():
        assert watched.turns.most(kind) <= amount
        assert watched.turns.work[kind].total() > 4 * amount, "the request is large"


async def test_many_choices_are_submitted_and_ended_over_many_turns() -> None:
    turns = Turns()

    async def stream(number: int) -> Any:
        turns.record("begin", 1)
        try:
            yield number
            await asyncio.Event().wait()
        finally:
            turns.record("end", 1)

    async def read() -> None:
        async with aclosing(merge([stream(number) for number in range(200)])) as numbers:
            assert {await anext(numbers) for _ in range(200)} == set(range(200))

    await turns.during(read())
    assert turns.most("begin") <= 4
    assert turns.most("end") <= 16
    assert turns.work["end"].total() == 200


async def test_cancelled_reader_of_many_choices_ends_all() -> None:
    ended, ending = 0, asyncio.Event()

    async def stream(number: int) -> Any:
        nonlocal ended
        try:
            yield number
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.sleep(0.01)
            ended += 1

    async def read(begun: asyncio.Event) -> None:
        num_begun = 0
        async with aclosing(merge([stream(number) for number in range(100)])) as numbers:
            async for _ in numbers:
                num_begun += 1
                if num_begun == 100:
                    begun.set()

    begun = asyncio.Event()
    reading = asyncio.create_task(read(begun))
    await begun.wait()
    reading.cancel()
    await ending.wait()
    reading.cancel()  # while the choices are being ended
    with pytest.raises(asyncio.CancelledError):
        await reading
    async with asyncio.timeout(240):
        while ended < 100:
            await asyncio.sleep(0)
    assert ended == 100


async def test_refusal_of_first_choice_keeps_most_others_from_being_submitted() -> None:
    begun = 0

    async def stream(number: int) -> Any:
        nonlocal begun
        begun += 1
        if number == 0:
            raise ValueError("refused")
        yield number

    async def read() -> None:
        async for _ in merge([stream(number) for number in range(200)]):
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="refused"):
        await read()
    assert begun < 50


def test_choices_share_one_table_of_stop_strings_and_one_sampling(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    failures, sampling = stop_strings._failures, GenerationBody.sampling

    def counted_failures(stop: str) -> list[int]:
        calls["failures"] += 1
        return failures(stop)

    def counted_sampling(body: GenerationBody, *args: Any, **options: Any) -> Any:
        calls["sampling"] += 1
        return sampling(body, *args, **options)

    monkeypatch.setattr(stop_strings, "_failures", counted_failures)
    monkeypatch.setattr(GenerationBody, "sampling", counted_sampling)
    watched.post("/v1/completions", prompt=["a", "b", "c"], n=20, stop=["zebra", "giraffe"], max_tokens=1)
    assert calls == {"failures": 2, "sampling": 1}
    assert len({submission.sampling.seed for submission in watched.engine.submissions}) == 20


def test_long_text_and_many_messages_leave_the_event_loop(watched: Watched) -> None:
    watched.post("/tokenize", prompt="dog " * 20_000)
    watched.post("/detokenize", tokens=[300] * 5000)
    watched.post("/tokenize", messages=[{"role": "user", "content": "dog " * 20}] * 300)
    for kind in ("encode", "decode", "render"):
        assert not watched.turns.ran_in_loop(kind)
    watched.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
    watched.post("/detokenize", tokens=[300])
    for kind in ("encode", "decode", "render"):
        assert watched.turns.ran_in_loop(kind)


async def test_huge_texts_are_encoded_one_at_a_time(
    watched: Watched, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    running, most = 0, 0
    encode = watched.tokenizer.encode

    def counted(text: str, **ways: bool) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        ids = encode(text, **ways)
        running -= 1
        return ids

    watched.tokenizer.encode = counted  # type: ignore[method-assign]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(watched.app), base_url="http://localhost") as http:
        asking = (http.post("/tokenize", json={"prompt": "dog " * 30_000}, timeout=240) for _ in range(4))
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 4
    assert most == 1


async def test_long_answer_is_written_over_many_turns_and_is_the_same() -> None:
    value = {"a": list(range(10_000)), "é": [None, True, 1.5, {"b": "\ud800"}]}
    turns = Turns()
    assert await turns.during(long_json(value)) == to_json(value)
    assert turns.number >= 4


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [[]] * 131_073},
        {"prompt": [{}] * 131_073},
        {"prompt": ["a"] * 131_073},
        {f"x{i}": 1 for i in range(131_073)},
        {"prompt": [1] * ((1 << 19) + 2)},
        {"a": "[" * 200_000, "prompt": [[]] * 131_073},
    ],
)
async def test_body_of_too_many_values_is_refused_before_it_is_parsed(value: Any) -> None:
    with pytest.raises(ApiError, match=r"more than \d+ ") as refused:
        await check_json_size(json.dumps(value).encode())
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "[{,:" * 300_000},
        {"prompt": '"\\' * 300_000},
        {"prompt": '\\\\"' * 300_000 + "\\"},
        {"prompt": ["[" * 40] * 60_000},
        {"prompt": [1] * (1 << 19)},
    ],
)
async def test_marks_in_texts_are_no_values(value: Any) -> None:
    turns = Turns()
    await turns.during(check_json_size(json.dumps(value).encode()))
    assert turns.number >= 1


@pytest.mark.parametrize("piece", [1, 2, 7, 64])
def test_size_of_body_is_the_same_in_pieces_of_any_length(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(json_size, "_PIECE", piece)
    texts = ["", "\\", '\\"', '"', '"[,', "a\\\\", '\\\\"{', "é,", ",[{"]
    body = json.dumps({"a": texts, "b": [1, [2, {}]]}).encode()
    assert [*json_size._count(body)][-1] == (1 + 1 + 1 + len(texts) + 1 + 1 + 1 + 1, len(texts) - 1 + 1 + 2)


def test_strings_of_body_are_counted_many_at_a_time() -> None:
    body = json.dumps({"prompt": ["a"] * 131_072}).encode()
    assert len([*json_size._count(body)]) <= len(body) / (1 << 16) + 1


def test_refused_request_leaves_nothing_for_the_garbage_collector(watched: Watched) -> None:
    """An error and its frames refer to each other: a large body would stay until the collector runs."""

    async def ask(path: str, body: Any) -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            assert message.get("status", 400) == 400

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await watched.app(scope, receive, send)

    async def main() -> list[str]:
        await ask("/v1/completions", {"prompt": "a", "n": 999})  # the first request of each kind fills caches
        gc.collect()
        gc.freeze()  # all objects of other tests, which would cost seconds
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await ask("/v1/completions", {"prompt": "a", "n": 999})
            await ask("/v1/completions", {"prompt": [[]] * 140_000})
            await ask("/v1/chat/completions", {"messages": [{"role": "r" * 100, "content": "a"}]})
            await ask("/v1/completions", {"prompt": "a", "guided_json": "["})
            gc.collect()
            return [found.f_code.co_name for found in gc.garbage if isinstance(found, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            gc.unfreeze()

    assert asyncio.run(main()) == []
