"""The API on a port, in front of a dispatcher whose tokens are scripted: helpers to call it and to check answers."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.http_guard import HttpGuard
from crossdock.cluster.api.http.keys import KeyRing
from crossdock.cluster.api.http.limits import Ledger, Loan, Unit
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.routes.response_store import StoredResponse
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import DeltaReader, ModelCard
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta, TokenLogprobs
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.one_model import one_model_api
from tests.waiting import eventually, until

MAX_MODEL_LEN = 200
VOCAB_SIZE = 620
STORY = "The quick brown fox 🙂 jumps over the lazy dog"
HI = [{"role": "user", "content": "Hi"}]
Script = Callable[[Submission], Iterable[TokenDelta | Exception | float]]


class ScriptedDispatcher:
    """A dispatcher that plays a script: deltas, errors, and pauses in seconds. Records submissions and aborts."""

    def __init__(self, tokenizer: ModelTokenizer, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.cache_page_size = 0
        self.eos = tokenizer.encode("<|im_end|>")[0]
        self.is_ready = True
        self.num_replicas = 1
        self.script: Script = self.story
        self.submissions: list[Submission] = []
        self.aborted: list[str] = []
        self.running = 0

    @property
    def model(self) -> ModelCard:
        return ModelCard("tiny", 1_700_000_000, self.max_model_len, VOCAB_SIZE, self.cache_page_size)

    def ready(self) -> bool:
        return self.is_ready

    async def metrics_text(self) -> str:
        return "crossdock_up 1\n"

    async def timelines(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        return [
            {"id": submission.id}
            for submission in self.submissions
            if submission.request_id == request_id and owner in (None, submission.key_owner)
        ]

    async def live_requests(self, owner: str | None) -> list[dict[str, Any]]:
        return [{"id": submission.id} for submission in self.submissions if owner in (None, submission.key_owner)]

    async def generate(self, submission: Submission, reader: DeltaReader | None = None) -> AsyncIterator[TokenDelta]:
        self.submissions.append(submission)
        self.running += 1
        is_over = False
        try:
            for step in self.script(submission):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    is_over = True
                    raise step
                is_over = step.finish_reason is not None
                yield step
        finally:
            self.running -= 1
            if not is_over:
                self.aborted.append(submission.id)

    def story_in_two(self, event: threading.Event, submission: Submission) -> Iterator[TokenDelta | Exception | float]:
        """Play three tokens, and the rest of the story once the event is set, after four minutes at the latest."""
        story = self.story(submission)
        yield from story[:3]
        for _ in range(24_000):
            if event.is_set():
                break
            yield 0.01
        yield from story[3:]

    def story(self, submission: Submission, words: str = STORY) -> list[TokenDelta | Exception | float]:
        """Play `words`, then EOS, one token a step, with the log-probabilities that the submission asks for."""
        sampling = submission.sampling
        ids = [*self.tokenizer.encode(words), self.eos][: sampling.max_tokens]
        deltas: list[TokenDelta | Exception | float] = []
        for i, token in enumerate(ids):
            delta = TokenDelta(submission.id, [token])
            if sampling.logprobs is not None:
                delta.logprobs = [self.logprob(token, sampling.logprobs, sampling.logprob_token_ids)]
            if i == 0:
                delta.num_cached_tokens = min(4, len(submission.prompt_token_ids))
                if sampling.prompt_logprobs is not None:
                    known = [self.logprob(t, sampling.prompt_logprobs) for t in submission.prompt_token_ids[1:]]
                    delta.prompt_logprobs = [None, *known]
            if i == len(ids) - 1:
                delta.finish_reason = FinishReason.STOP if token == self.eos else FinishReason.LENGTH
                delta.stop_token_id = self.eos if token == self.eos else None
            deltas.append(delta)
        return deltas

    def logprob(self, token: int, count: int, listed: Sequence[int] = ()) -> TokenLogprobs:
        others = listed or [(token + i) % VOCAB_SIZE for i in range(count)]
        return TokenLogprobs(token, -0.25, 1, tuple((other, -0.25 - i) for i, other in enumerate(others)))


class LiveServer(uvicorn.Server):
    """uvicorn in a thread of this process, which ends once no request runs, without uvicorn's pauses of 0.1 s."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="critical", ws="none", lifespan="off"))
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> str:
        self.thread.start()
        eventually(lambda: self.started)
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.ends.set)
        self.thread.join(240)

    async def main_loop(self) -> None:
        self.loop, self.ends = asyncio.get_running_loop(), asyncio.Event()
        while not self.ends.is_set():  # it wakes up now and then: another ingress of this process may have asked it
            await self.on_tick(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ends.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await until(lambda: not (self.server_state.connections or self.server_state.tasks))


Serve: TypeAlias = Callable[..., httpx.Client]
"""Serves an API of its own until the end of the test, given fields of `HttpConfig` by name. Returns a client."""


@contextmanager
def serving(
    engine: ScriptedDispatcher,
    tokenizer: ModelTokenizer,
    config: HttpConfig,
    defaults: GenerationDefaults | None = None,
) -> Iterator[httpx.Client]:
    """Serve an API of its own, for a test whose settings differ from those of the fixture `url`."""
    app = one_model_api(engine, tokenizer, config, defaults=defaults)  # type: ignore[arg-type]
    with LiveServer(app) as url, httpx.Client(base_url=url, timeout=240) as http:
        yield http


@contextmanager
def two_ingresses(engine: ScriptedDispatcher, tokenizer: ModelTokenizer, **http: Any) -> Iterator[list[httpx.Client]]:
    """Yield a connection to each of two ingresses that can ask each other."""
    apps: list[FastAPI] = []

    def build(other: int) -> FastAPI:
        async def ask_peers(owner: str, unit: Unit, amount: float) -> list[Loan]:
            return [apps[other].state.lend(owner, unit, amount)]

        async def ask_stores(action: str, owner: str, name: str, after: int) -> list[StoredResponse]:
            asked = apps[other].state.stored(action, owner, name, after)  # in its own loop, as in a process of its own
            found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, servers[other].loop))
            return [] if found is None else [found]

        config = HttpConfig.model_validate({"replicas": 2, **http})
        return one_model_api(engine, tokenizer, config, ask_peers=ask_peers, ask_stores=ask_stores)  # type: ignore[arg-type]

    apps += [build(1), build(0)]
    servers = [LiveServer(app) for app in apps]
    with ExitStack() as stack:
        urls = [stack.enter_context(server) for server in servers]
        yield [stack.enter_context(httpx.Client(base_url=url, timeout=240)) for url in urls]


def guarded(app: Any, max_body_bytes: int = 10, **options: Any) -> HttpGuard:
    """Return an application behind a guard that asks for no key."""
    options = {"keys": KeyRing(), "open_paths": (), "ledger": Ledger(), "request_timeout_s": None, **options}
    return HttpGuard(app, max_body_bytes=max_body_bytes, **options)


def held_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that tells how many bytes of requests this process's servers have counted from now on."""
    held, hold = list[int](), RequestMemory.hold

    def counted(memory: RequestMemory, num_bytes: int) -> None:
        hold(memory, num_bytes)
        held.append(num_bytes)

    monkeypatch.setattr(RequestMemory, "hold", counted)
    return lambda: sum(held)


@contextmanager
def raw(url: str) -> Iterator[socket.socket]:
    """Open a TCP connection, for requests that no HTTP client would send."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=240) as wire:
        yield wire


def complete(http: httpx.Client, prompt: Any = "Hi", **fields: Any) -> Any:
    """Return the body of a completion, which must succeed."""
    answer = http.post("/v1/completions", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int, **expected: Any) -> dict[str, Any]:
    """Check OpenAI's error shape and the given fields; return the error."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    assert {name: error[name] for name in expected} == expected
    return error


def events(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream, which must end in [DONE]."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream of Responses or Messages, each of which is named by its type."""
    assert answer.status_code == 200, answer.text
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found
