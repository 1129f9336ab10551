"""One OpenAI endpoint under test: the request fields that it takes, prompts of exact length, one request per job."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from crossdock.cluster.bench.http import BenchError, Endpoint, ServerGone, TokenStream, error_text
from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.pictures import picture_url
from crossdock.cluster.bench.workloads import WORDS, Job, Segment


@dataclass(frozen=True)
class Dialect:
    """The request fields that the server takes, as its answers to small requests show."""

    chat: bool = False  # /v1/chat/completions instead of /v1/completions
    token_ids: bool = True  # the prompt as token ids; else as text
    continuous_usage: bool = True
    usage: bool = True
    ignore_eos: bool = True
    service_tier: bool = True  # where a job names one


# Optional parts of a request, and the field that a server's refusal would name. If it names none, they are dropped
# in this order.
_OPTIONAL = {
    "service_tier": "service_tier",
    "continuous_usage": "continuous_usage_stats",
    "token_ids": "prompt",
    "ignore_eos": "ignore_eos",
    "usage": "stream_options",
}


@dataclass
class Server:
    """An OpenAI endpoint. `connect` finds its model, its dialect and the words that make a prompt of some length."""

    url: str
    model: str | None = None
    api_key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    chat: bool = False
    tokenizer: Path | None = None
    seed: int = 0
    service_tier: str | None = None  # one that jobs will ask for; `connect` tries whether the server knows the field
    salt: str = ""  # differs from run to run, so that prompts of the last run are in no prefix cache
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        bearer = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        self._endpoint = Endpoint(self.url, {**bearer, **self.headers})
        self._of_tenants: dict[str, Endpoint] = {}
        self.url = self._endpoint.url
        has_tiers = self.service_tier is not None
        self._dialect = Dialect(chat=self.chat, token_ids=not self.chat, service_tier=has_tiers)
        self.max_model_len: int | None = None  # tokens; None: the server does not report it
        self._ids: Sequence[int] = ()  # ordinary tokens of the vocabulary
        self._words = (0.0, 1.0)  # prompt tokens of a text = first + second x words
        self._answers: dict[str, tuple[str, list[int]]] = {}  # text and token ids, by the key of later prompts

    # ---- one exchange

    async def fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a plain request and return the status and body of its response.

        Raises:
            BenchError: the server cannot be reached, or does not answer in time.
        """
        try:
            async with asyncio.timeout(self.timeout):
                exchange = await self._endpoint.exchange(method, path, b"" if body is None else _encode(body))
        except TimeoutError:
            raise BenchError(f"{self.url}{path} did not answer within {self.timeout:.0f} s") from None
        except ConnectionError as error:
            raise BenchError(f"{self.url}{path}: {error}") from None
        return exchange.response.status, bytes(exchange.body)

    async def run(self, job: Job, sample: Sample) -> Sample:
        """Send a job's request and fill in its sample as tokens arrive. Cancelling closes the connection."""
        path, body = self._body(job)
        content = _encode(body)
        stream = TokenStream(sample)
        sample.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout):
                exchange = await self._endpoint_of(job).exchange("POST", path, content, stream.feed)
            if exchange.response.status != 200:
                sample.error = f"HTTP {exchange.response.status}: {error_text(exchange.body)}"
                sample.refused = exchange.response.status == 429
            elif sample.error is None and not stream.done:
                sample.error = "the stream ended without a finish reason"
        except asyncio.CancelledError:
            sample.stopped = True
            raise
        except TimeoutError:
            sample.error = f"no end after {self.timeout:.0f} s"
        except (BenchError, OSError, ValueError) as error:
            sample.error = str(error) or type(error).__name__
            sample.unreachable = isinstance(error, ServerGone)
        finally:
            sample.ended = time.perf_counter()
        if job.answer is not None and job.follow_ups and sample.ok:
            text = "".join(stream.texts)
            ids = await self._tokenize(text) if self._dialect.token_ids else []
            self._answers[job.answer] = text, ids
        return sample

    def _endpoint_of(self, job: Job) -> Endpoint:
        """Return the endpoint with the key of the job's tenant."""
        if job.tenant is None:
            return self._endpoint
        bearer = {"Authorization": f"Bearer {job.tenant}"}
        return self._of_tenants.setdefault(job.tenant, Endpoint(self.url, {**bearer, **self.headers}))

    def _body(self, job: Job) -> tuple[str, dict[str, Any]]:
        dialect = self._dialect
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "max_tokens": job.output_tokens,
            "temperature": 0,
        }
        if dialect.ignore_eos:
            # Not min_tokens too: vLLM would compute a logits mask in each step, for the same output.
            body["ignore_eos"] = True
        if dialect.service_tier and job.service_tier is not None:
            body["service_tier"] = job.service_tier
        if dialect.usage:
            body["stream_options"] = {"include_usage": True}
            if dialect.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if job.pictures:
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": self._content(job)}]}
        if dialect.token_ids:
            prompt: str | list[int] = [token for part in job.prompt for token in self._part_ids(part)]
        else:
            prompt = self._text(job.prompt)
        if dialect.chat:
            turns = groupby(job.prompt, key=lambda part: part.is_answer)
            messages = [
                {"role": "assistant" if is_answer else "user", "content": self._text(tuple(parts))}
                for is_answer, parts in turns
            ]
            return "/v1/chat/completions", {**body, "messages": messages}
        return "/v1/completions", {**body, "prompt": prompt}

    def _content(self, job: Job) -> list[dict[str, Any]]:
        """Return the parts of a chat's message: the job's pictures, then its text."""
        urls = (picture_url(picture, f"{self.seed}/{self.salt}") for picture in job.pictures)
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [*pictures, {"type": "text", "text": self._text(job.prompt)}]

    def _part_ids(self, part: Segment) -> list[int]:
        """Return the token ids of a part; of an answer, the ids that the server has given."""
        _, ids = self._answers.get(part.key, ("", [])) if part.is_answer else ("", [])
        return ids or self._draw(part, self._ids, part.tokens)

    def _draw(self, part: Segment, choices: Sequence[Any], count: int) -> list[Any]:
        return random.Random(f"{self.seed}/{self.salt}/{part.key}").choices(choices, k=count)

    def _text(self, parts: Sequence[Segment]) -> str:
        fixed, per_word = self._words
        texts: list[str] = []
        tokens = num_words = 0
        for part in parts:
            # Rounding on the running sum keeps the prompt within a word of its length, however many segments it has.
            tokens += part.tokens
            count = max(0, round((tokens - fixed) / per_word) - num_words)
            num_words += count
            text, _ = self._answers.get(part.key, ("", [])) if part.is_answer else ("", [])
            texts += [text] if text else self._draw(part, WORDS, count)
        return " ".join(texts) or WORDS[0]

    # ---- connecting

    async def connect(self) -> None:
        """Find the model, the dialect, and how prompts of an exact length are made.

        Raises:
            BenchError: there is no server, or it refuses every form of request known here.
        """
        await self._read_models()
        if self._dialect.token_ids:
            self._ids = self._local_ids(self.tokenizer) if self.tokenizer else await self._server_ids()
            if not self._ids:
                self._dialect = replace(self._dialect, token_ids=False)
        status, answer = await self._negotiate()
        if status != 200:
            raise BenchError(f"{self.url} refuses a plain completion: HTTP {status}: {error_text(answer)}")
        if not self._dialect.token_ids:
            await self._calibrate()

    async def _read_models(self) -> None:
        """Read the first model that the server lists, unless one is given, and its context where reported."""
        status, answer = await self.fetch("GET", "/v1/models")
        try:
            models = json.loads(answer)["data"]
            card = next(model for model in models if self.model in (None, model["id"]))
            self.model = str(card["id"])
            self.max_model_len = card["max_model_len"] if isinstance(card.get("max_model_len"), int) else None
        except (ValueError, LookupError, TypeError, StopIteration):
            if self.model is None:
                advice = "give --api-key" if status in (401, 403) else "give one with --model"
                text = f"{self.url}/v1/models lists no model: HTTP {status}: {error_text(answer)}; {advice}"
                raise BenchError(text) from None

    @staticmethod
    def _local_ids(directory: Path) -> list[int]:
        from tokenizers import Tokenizer  # only this option needs tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise BenchError(f"tokenizer: there is no {file}")
        return sorted(set(Tokenizer.from_file(str(file)).encode(" ".join(WORDS), add_special_tokens=False).ids))

    async def _server_ids(self) -> list[int]:
        """Return ordinary token ids from the server's own tokenizer; none if it has no such endpoint."""
        return sorted(set(await self._tokenize(" ".join(WORDS))))

    async def _tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text by the server's own tokenizer; none if it has no such endpoint.

        vLLM and Crossdock take the text as `prompt`, llama.cpp as `content`.
        """
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
        try:
            status, answer = await self.fetch("POST", "/tokenize", body)
            ids = json.loads(answer)["tokens"] if status == 200 else ()
        except (BenchError, ValueError, LookupError, TypeError):
            return []
        return [token for token in ids if isinstance(token, int)]

    async def _negotiate(self) -> tuple[int, bytes]:
        """Drop optional fields one by one until a small request passes. Return its status and body.

        If none passes, return the first refusal.
        """
        probe = Job((Segment("probe", 16),), 2, service_tier=self.service_tier)
        path, body = self._body(probe)
        first = status, answer = await self.fetch("POST", path, body)
        if status == 404 and not self._dialect.chat:
            self._dialect = replace(self._dialect, chat=True, token_ids=False)
            self.notes.append("no /v1/completions here: using /v1/chat/completions")
            path, body = self._body(probe)
            first = status, answer = await self.fetch("POST", path, body)
        while status in (400, 422, 500, 501):
            refusal = error_text(answer)
            left = [name for name in _OPTIONAL if getattr(self._dialect, name)]
            if not left:
                break
            missing = next((name for name in left if _OPTIONAL[name] in refusal), left[0])
            self._dialect = replace(self._dialect, **{missing: False})
            self.notes.append(f"asking without {missing}: the server answered {refusal}")
            path, body = self._body(probe)
            status, answer = await self.fetch("POST", path, body)
        return (status, answer) if status == 200 else first

    async def _calibrate(self) -> None:
        """Fit the tokens of a text to its words, from two small requests: tokens of the template, tokens per word."""
        counted = []
        for words in (16, 144):
            sample = Sample("request", 1, 0)
            await self.run(Job((Segment(f"calibrate/{words}", words),), 1), sample)
            if not sample.prompt_tokens:
                self.notes.append("the server counts no prompt tokens: one token per word is assumed")
                return
            counted.append(sample.prompt_tokens)
        per_word = (counted[1] - counted[0]) / 128
        if per_word > 0:
            self._words = (counted[0] - 16 * per_word, per_word)


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
