"""Prompts with known answers, and clients that stream them, leave, read slowly, or send what no server accepts."""

import asyncio
import collections
import json
import math
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import ByteSize

from crossdock.cluster.bench.http import HttpResponse
from crossdock.cluster.config import emulated_device
from crossdock.workers.model.load import load_model
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.emulated import emulated_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.submission import Adapter, SamplingParams, Submission

HUNG_S = 60.0  # without a byte: the stream hangs
MAX_MODEL_LEN = 1024
VOCABULARY = 1024  # tokens
POISON = (101, 103, 107, 109)  # a prompt with these ids side by side kills its replica
_LENGTHS = (5, 16, 40, 90, 250, 600)  # tokens of prompts
_TURNS, _INSTRUCTION = 8, 200  # turns of an agent, and the tokens of its instruction
_OUTPUTS = (8, 8, 16, 16, 24, 40, 64)
_CLASSES = ("interactive", "standard", "standard", "batch")
_HOSTILE: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"prompt": [10**9]},
    {"prompt": list(range(100, 100 + MAX_MODEL_LEN + 1))},
    {"logit_bias": {"9" * 5000: 1}},
    {"guided_regex": "("},
    {"guided_json": {"type": "no such type"}},
    {"stop": [["nested"]]},
    {"n": 10**6},
    {"model": "another"},
)


class TokenAnswer:
    """The tokens of a completion, or of a chat with one choice."""

    def __init__(self) -> None:
        self.is_done = False
        self.tokens: list[int] = []

    def add(self, event: Mapping[str, Any]) -> None:
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or ()

    def value(self) -> list[int]:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the sum of its stream: lists, mappings, texts and numbers, without ids that differ each time."""

    name: str
    request: Mapping[str, Any]
    expected: Any = None
    path: str = "/v1/completions"
    new_answer: Callable[[], Any] = TokenAnswer  # adds the events of a stream up
    is_turn: bool = False  # of a conversation: its beginning is cached, or lies in a tier, or is fetched

    def body(self, rng: random.Random) -> dict[str, Any]:
        """Return the request. Most but turns have a cache of their own, so that their prompts are computed."""
        body = {"model": "tiny", **self.request, "stream": True, "service_tier": rng.choice(_CLASSES)}
        if not self.is_turn and rng.random() < 0.7:
            body["cache_salt"] = f"{rng.getrandbits(64):x}"
        return body

    def difference(self, answer: Any, *, is_whole: bool) -> str | None:
        """Return how the answer differs from the undisturbed one; None: equal, as far as the answer goes."""
        value = answer.value()
        is_right = value == self.expected if is_whole else is_beginning(value, self.expected)
        return None if is_right else f"wrong answer {value}, not {self.expected}"

    def __str__(self) -> str:
        return f"{self.path} {self.name}"


def is_beginning(part: Any, whole: Any) -> bool:
    """Return whether an answer that was left early is the beginning of another one."""
    if isinstance(part, str):
        return isinstance(whole, str) and whole.startswith(part)
    if isinstance(part, dict):
        return all(name in whole and is_beginning(each, whole[name]) for name, each in part.items())
    if isinstance(part, list):
        beginning = zip(part, whole, strict=False)
        return len(part) <= len(whole) and all(is_beginning(each, other) for each, other in beginning)
    return bool(part == whole)


def undisturbed_config(budget: int, **more: Any) -> EngineConfig:
    """Return the settings of an engine that nothing disturbs. `budget`: tokens of a step."""
    given = {"kv_cache_memory": ByteSize(256 << 20), "max_num_batched_tokens": budget, "admission": "queue"}
    return EngineConfig(**given | {"enable_prefix_caching": False} | more)


def with_answers(asked: Sequence[Case], answers_by: Callable[[int], Sequence[Any]], least: float) -> list[Case]:
    """Compute the answers beforehand, in chunks of two sizes. `answers_by`: returns the answers by a budget of steps.

    Cases whose answer depends on the sizes of chunks are left out: two tokens are equally likely there to the last
    digits, and either is right.

    Raises:
        RuntimeError: a share of less than `least` is left.
    """
    torch.set_num_threads(1)  # a second thread would spin and take the core from other processes
    answers = [answers_by(budget) for budget in (512, 96)]
    found = [replace(case, expected=one) for case, one, other in zip(asked, *answers, strict=True) if one == other]
    if len(found) < least * len(asked):
        raise RuntimeError(f"of {len(asked)} requests only {len(found)} have an answer that does not depend on chunks")
    return found


def make_cases(
    model: Path,
    count: int,
    seed: int,
    *,
    are_turns: bool = False,
    emulated: str | None = None,
    adapters: Sequence[Adapter] = (),
) -> list[Case]:
    """Return completions, with the answers of an engine of this process.

    `are_turns`: prompts are the turns of agents, each with the turns before it, and begin with one of two instructions.
    A third is sampled with a seed. `adapters`: of which prompts name one, or none.
    """
    rng = random.Random(f"cases {seed}")
    asked = []
    for number in range(count):
        length, talk = rng.choice(_LENGTHS), number
        if are_turns:
            talk, length = number // _TURNS, 300 + 80 * (number % _TURNS)
        prompt = [(talk * 977 + 31 * place * place + 7 * place) % 800 + 200 for place in range(length)]
        if are_turns:
            prompt[:_INSTRUCTION] = [(talk % 2 * 53 + 17 * place * place) % 800 + 200 for place in range(_INSTRUCTION)]
        sampling: dict[str, Any] = {"max_tokens": rng.choice(_OUTPUTS), "temperature": 0.0, "ignore_eos": True}
        if rng.random() < 1 / 3:
            sampling |= {"temperature": 0.8, "seed": number}
        adapter = rng.choice([None, *adapters])
        request = {"prompt": prompt, "return_token_ids": True, **sampling} | (
            {"model": adapter.name} if adapter else {}
        )
        name = f"{length} prompt tokens, {sampling}, {adapter and adapter.name}"
        asked.append((Case(name, request, is_turn=are_turns), SamplingParams(**sampling), adapter))

    def answers(budget: int) -> list[list[int]]:
        engine, tokens = _engine(model, budget, emulated), collections.defaultdict[str, list[int]](list)
        for number, (case, params, adapter) in enumerate(asked):
            engine.add(Submission(f"{number}", case.request["prompt"], params, adapter=adapter))
        while engine.has_work:
            for delta in engine.step().deltas:
                tokens[delta.request_id] += delta.token_ids
        return [tokens[f"{number}"] for number in range(len(asked))]

    return with_answers([case for case, *_ in asked], answers, 0.97)


def _engine(model: Path, budget: int, emulated: str | None) -> Engine:
    if emulated:
        config = undisturbed_config(budget, kv_cache_memory=None)
        return emulated_engine(emulated_device(emulated).profile.slowed(1e-6), config, model)
    config = undisturbed_config(budget, enable_lora=True, max_loras=8)
    return new_engine(load_model(config.model_spec(str(model), "float32", MAX_MODEL_LEN)), config)


class Malformed(Exception):
    """The events of a stream contradict each other."""


class Told(Exception):
    """The server answered with an error. `status`: of the answer; 200 where a stream had begun."""

    def __init__(self, status: int, error: dict[str, Any], num_events: int) -> None:
        super().__init__(error.get("message", ""))
        self.status, self.code, self.num_events = status, error.get("code"), num_events

    @property
    def is_suspect(self) -> bool:
        """Return whether replicas were lost one after the other while they worked on the request."""
        return (
            self.code == "suspect_request" or "Replicas of the model ended" in self.args[0]
        )  # not all APIs have codes

    def __str__(self) -> str:
        return f"{self.status} {self.code} after {'some' if self.num_events else 'no'} events: {self.args[0][:200]}"


class Cut(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Reader:
    """How a client reads its answer."""

    leave_after: float = math.inf  # events
    leave_at_s: float = math.inf
    pause_s: float = 0.0  # between two reads


class Exchange:
    """One streamed request on a connection of its own."""

    def __init__(self, port: int, reader: Reader, path: str = "/v1/completions", answer: Any = None) -> None:
        """`answer` adds the events up."""
        self.answer = TokenAnswer() if answer is None else answer
        self.num_events = 0
        self.path = path
        self.own_port = 0  # of the client's end, once connected
        self.request_id = uuid.uuid4().hex
        self.longest_gap = 0.0  # seconds between two reads
        self.num_bytes = 0  # of the answer
        self.began_at = time.monotonic()
        self._port, self._reader = port, reader
        self._response = HttpResponse()
        self._rest = b""

    async def run(self, body: dict[str, Any]) -> None:
        """Send the request and read to the end of the answer, or until the reader leaves.

        Raises:
            Told: the server answered with an error.
            Cut: the connection ended before the answer.
            TimeoutError: not a byte came for `HUNG_S` seconds.
        """
        content = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: {self.request_id}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        if self._reader.pause_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            async with asyncio.timeout(HUNG_S):
                await loop.sock_connect(sock, ("127.0.0.1", self._port))
                self.own_port = sock.getsockname()[1]
                await loop.sock_sendall(sock, head.encode() + content)
            await self._read(loop, sock)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise Cut(f"{type(error).__name__} after {self.num_events} events") from None
        finally:
            sock.close()

    async def _read(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        reader, began, error = self._reader, time.monotonic(), b""
        last = began
        while not self._response.complete:
            left = reader.leave_at_s - (time.monotonic() - began)
            try:
                async with asyncio.timeout(min(HUNG_S, max(0.0, left))):
                    data = await loop.sock_recv(sock, 512 if reader.pause_s else 1 << 16)
            except TimeoutError:
                if left < HUNG_S:
                    return
                raise TimeoutError(f"hung after {self.num_events} events") from None
            now = time.monotonic()
            self.longest_gap, last = max(self.longest_gap, now - last), now
            self.num_bytes += len(data)
            if not data:
                self._response.end_of_stream()
                break
            part = self._response.feed(data)
            if self._response.status == 200:
                self._take(part)
            else:
                error += part
            if self.num_events >= reader.leave_after:
                return
            if reader.pause_s:
                await asyncio.sleep(reader.pause_s)
                last += reader.pause_s
        if error:
            raise Told(self._response.status, json.loads(error)["error"], 0)
        if not self.answer.is_done:
            raise Cut(f"status {self._response.status}, {self.num_events} events")

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                self.answer.is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                error = event.get("error") or (event.get("response") or {}).get("error")
                if error:
                    raise Told(200, error, self.num_events)
                self.num_events += 1
                self.answer.add(event)


@dataclass(slots=True)
class Habits:
    """Which shares of the clients are odd, and which errors are honest."""

    vanish: float = 0.0
    slow: float = 0.0
    hostile: float = 0.0
    may_refuse: bool = False  # 429 before the first token
    may_suspect: bool = False  # the request was on several replicas when they were killed
    may_unload: bool = False  # 404 before the first token


@dataclass(slots=True)
class Clients:
    """Clients that stream without a pause, on a thread of their own, and the count of what became of their streams."""

    port: int
    cases: Sequence[Case]
    habits: Habits
    seed: int
    limit: int  # streams
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # the longest of each stream, seconds
    cut_ports: set[int] = field(default_factory=set)  # clients' ends of connections to an ingress that was killed
    ingress_ended_at: float = -math.inf  # the one killed last; inf while it is being killed
    began: int = 0
    in_flight: int = 0
    _started: float = field(default_factory=time.monotonic)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread | None = None
    _is_stopping: bool = False

    @property
    def is_done(self) -> bool:
        return self.began >= self.limit and not self.in_flight

    @property
    def ended(self) -> int:
        return sum(self.outcomes.values()) + len(self.problems)

    def start(self, clients: int) -> None:
        """Start so many clients. Each begins its next stream when the last one has ended."""

        async def run() -> None:
            await asyncio.gather(*(self._client(random.Random(f"{self.seed} {number}")) for number in range(clients)))

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(run(),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin no further stream, and wait for the end of those that run."""
        self._is_stopping = True
        if self._thread is not None:
            self._thread.join(3 * HUNG_S)

    async def _client(self, rng: random.Random) -> None:
        while self.began < self.limit and not self._is_stopping:
            self.began += 1
            self.in_flight += 1
            try:
                await self._one(rng)
            except Exception as error:
                self._problem(f"the client failed: {type(error).__name__}: {error}")
            self.in_flight -= 1

    async def _one(self, rng: random.Random) -> None:
        case, chance, habits = rng.choice(self.cases), rng.random(), self.habits
        body = case.body(rng)
        if chance < habits.hostile:
            await self._hostile(body | rng.choice(_HOSTILE), case.path)
            return
        kind, reader = "complete", Reader()
        if chance < habits.hostile + habits.vanish:
            kind = "left by the client"
            leaves_early = rng.random() < 0.3
            reader = (
                Reader(leave_at_s=rng.choice([0.0, 0.005, 0.05, 0.3]))
                if leaves_early
                else Reader(rng.choice([1, 2, 5, 12]))
            )
        elif chance < habits.hostile + habits.vanish + habits.slow:
            kind, reader = "complete, read slowly", Reader(pause_s=rng.choice([0.02, 0.1, 0.3]))
        for _ in range(4):
            exchange = Exchange(self.port, reader, case.path, case.new_answer())
            outcome = await self._stream(exchange, body, case, kind)
            if outcome is None or outcome == kind:
                return
            await asyncio.sleep(rng.uniform(0.05, 0.5))  # a client retries where it was told that it may

    async def _stream(self, exchange: Exchange, body: dict[str, Any], case: Case, kind: str) -> str | None:
        """Count and return the outcome of one stream; None: a problem."""
        outcome: str | None = kind
        is_whole = False
        try:
            await exchange.run(body)
            is_whole = exchange.answer.is_done
        except Told as told:
            outcome = self._honest(told)
            problem = f"told {told}"
        except Cut as cut:
            outcome = "cut with its killed ingress" if self._is_cut_by_kill(exchange) else None
            problem = f"cut: {cut}"
        except TimeoutError as hung:
            outcome, problem = None, f"{hung}"
        except Malformed as wrong:
            outcome, problem = None, f"malformed: {wrong}"
        self.gaps.append(exchange.longest_gap)
        if (difference := case.difference(exchange.answer, is_whole=is_whole)) is not None:
            outcome, problem = None, difference
        if outcome is None:
            problem += f"; {case}"
            self._problem(f"{problem}; {exchange.request_id}: {await self._timelines(exchange.request_id)}")
        else:
            self.outcomes[outcome] += 1
        return outcome

    def _honest(self, told: Told) -> str | None:
        """Return the outcome where the error is an honest one; None: a problem."""
        if told.status == 429 and self.habits.may_refuse:
            return "429 before the first token"
        if told.is_suspect and self.habits.may_suspect:
            return "told to be suspect: several of its replicas were killed"
        if told.status == 404 and self.habits.may_unload and not told.num_events:
            return "404 of an adapter that is unloaded"
        return None

    def _is_cut_by_kill(self, exchange: Exchange) -> bool:
        """Return whether the connection ended because its ingress was killed.

        A connection that the kernel gave to the ingress between the listing of its connections and its end has no byte
        of an answer, and ends with it. This thread may notice a while later.
        """
        seconds = time.monotonic() - self.ingress_ended_at
        is_late = not exchange.num_bytes and exchange.began_at < self.ingress_ended_at and seconds < 5
        return exchange.own_port in self.cut_ports or is_late

    async def _hostile(self, body: dict[str, Any], path: str) -> None:
        exchange = Exchange(self.port, Reader(), path)
        try:
            await exchange.run(body)
        except Told as told:
            if 400 <= told.status < 500:
                self.outcomes[f"hostile, answered {told.status}"] += 1
                return
            self._problem(f"hostile: {told}")
        except (Cut, TimeoutError) as error:
            if isinstance(error, Cut) and self._is_cut_by_kill(exchange):
                self.outcomes["cut with its killed ingress"] += 1
                return
            self._problem(f"hostile: {error}")
        else:
            self._problem(f"hostile: served {str(body)[:200]}")

    async def _timelines(self, request_id: str) -> str:
        """Return the timelines of a request at all replicas, and what these have to do, as evidence."""
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=5) as http:
                replicas = (await http.get("/v1/replicas")).json()["data"]
                answer = await http.get(f"/v1/requests/{request_id}")
                loads = [{name: each[name] for name in ("replica", "pool", "requests", "pages")} for each in replicas]
                return json.dumps({"replicas": loads, "requests": answer.json()["requests"]})
        except (httpx.HTTPError, ValueError, KeyError) as error:
            return f"no timelines: {error!r}"

    def _problem(self, text: str) -> None:
        self.problems.append(f"{time.monotonic() - self._started:.0f} s: {text}")
        print("PROBLEM", self.problems[-1][:20_000], flush=True)
