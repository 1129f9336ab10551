"""An OpenAI server whose every behaviour a test sets."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import WORDS

ANSWER_ID = 7  # of the word that every answer repeats


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Scripted:
    """An OpenAI server whose every behaviour a test sets. `bodies` are the requests that it got."""

    def __init__(self) -> None:
        self.first_delay = 0.0
        self.gap = 0.0
        self.long_delay = 0.0  # before the first token of a prompt of 1000 tokens or more
        self.refused_fields: tuple[str, ...] = ()
        self.tokenizes = True
        self.completions = True
        self.fail_every = 0
        self.hold_until = 0  # measured requests in flight; answers wait for that many
        self.break_off = False
        self.usage = True
        self.template_tokens = 0
        self.refused_tier: str | None = None  # its requests are answered 429
        self.metrics_text: str | None = None
        self.max_model_len: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = self.closed_early = 0
        self.api = FastAPI()
        self.models_refusal: tuple[int, str] | None = None  # status and message of /v1/models
        self.api.get("/v1/models")(self.models)
        self.api.get("/metrics")(lambda: Response(self.metrics_text, 404 if self.metrics_text is None else 200))
        self.api.post("/tokenize")(self.tokenize)
        self.api.post("/v1/completions")(self.complete)
        self.api.post("/v1/chat/completions")(self.complete)

    async def models(self) -> Response:
        if self.models_refusal is not None:
            status, message = self.models_refusal
            return JSONResponse({"error": {"message": message}}, status)
        return JSONResponse({"data": [{"id": "scripted", "max_model_len": self.max_model_len}]})

    async def tokenize(self, request: Request) -> Response:
        if not self.tokenizes:
            return JSONResponse({"detail": "Not Found"}, 404)
        words = (await request.json())["prompt"].split()
        return JSONResponse({"tokens": [1000 + WORDS.index(word) if word in WORDS else ANSWER_ID for word in words]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if not self.completions and "prompt" in body:
            return JSONResponse({"detail": "Not Found"}, 404)
        for name in self.refused_fields:
            if name in json.dumps(body):
                return JSONResponse({"error": {"message": f"unknown field {name}"}}, 422)
        self.bodies.append(body)
        if body["max_tokens"] > 2 and body.get("service_tier", "") == self.refused_tier:
            return JSONResponse({"error": {"message": "overloaded"}}, 429, {"Retry-After": "3"})
        if self.fail_every and len(self.measured) and len(self.measured) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "scripted failure"}}, 500)
        if not body.get("stream"):
            return JSONResponse({})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The bodies of all requests but those that find out what the server takes."""
        return [body for body in self.bodies if body["max_tokens"] > 2]

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        return self.template_tokens + len(prompt.split() if isinstance(prompt, str) else prompt)

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        finished = False
        try:
            options = body.get("stream_options", {})
            prompt_tokens = self.prompt_tokens(body)
            while body["max_tokens"] > 2 and self.most_under_way < self.hold_until:
                await asyncio.sleep(0.005)
            await asyncio.sleep(self.long_delay if prompt_tokens >= 1000 else self.first_delay)
            count = body["max_tokens"]
            for number in range(1, count + 1):
                usage = {"prompt_tokens": prompt_tokens, "completion_tokens": number}
                running = {"usage": usage} if options.get("continuous_usage_stats") else {}
                end = "length" if number == count else None
                if "messages" in body:
                    yield event(choices=[{"delta": {"content": "w "}, "finish_reason": end}], **running)
                else:
                    yield event(choices=[{"text": "w ", "finish_reason": end}], **running)
                if self.break_off and count > 2 and number == 2:
                    return
                await asyncio.sleep(self.gap)
            if options.get("include_usage") and self.usage:
                yield event(choices=[], usage=usage)
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.under_way -= 1
            self.closed_early += not finished


def measure(url: str, **options: Any) -> Any:
    """Run a benchmark without warmup."""
    return asyncio.run(run_bench(BenchOptions(url=url, **{"warmup": 0, **options})))
