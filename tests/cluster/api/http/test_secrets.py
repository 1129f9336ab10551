"""Keys and prompts are in no log of any level, no traceback, no trace and no metric, and keys in no answer."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from crossdock.cluster.api.http import tracing
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ReplicaLost
from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.api.http.otlp_collector import collector
from tests.cluster.api.http.test_tracing import TracedApi
from tests.cluster.api.scripted_api import ScriptedDispatcher, raw, serving
from tests.cluster.dispatch.in_process import InProcess

KEY, TEXT = "hunter2hunter2", "swordfish opens the vault"
TOKENS = [41, 42, 43, 44, 45, 46]  # of a prompt
SECRETS = (KEY, "hunter2", "swordfish", "41, 42, 43", "[41,42,43")
BEARER = {"authorization": f"Bearer {KEY}"}
NOT_OURS = ("httpx", "httpcore", "asyncio")  # the test's own client


class Kept(logging.Handler):
    """Keeps every record as text, with its traceback, as a log file would have it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(NOT_OURS):
            self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[list[str]]:
    """All that is logged, at any level and by any logger."""
    kept, root = Kept(), logging.getLogger()
    names = ("ray", "ray.serve", "crossdock", "uvicorn", "uvicorn.error")
    loggers = [root, *(logging.getLogger(name) for name in names)]
    before = [(logger.level, logger.propagate) for logger in loggers]
    root.addHandler(kept)
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = True  # Ray turns this off for its own once it has started
    yield kept.lines
    root.removeHandler(kept)
    for logger, (level, propagates) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagates


def assert_no_secret(texts: list[str]) -> None:
    found = [(secret, text) for text in texts for secret in SECRETS if secret in text]
    assert not found


CHAT = {"messages": [{"role": "user", "content": TEXT}]}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT, "temperature": TEXT}),
    ("/v1/completions", {"prompt": {TEXT: TEXT}}),
    ("/v1/completions", {"prompt": TEXT, "n": -1}),
    ("/v1/completions", {"prompt": f"{TEXT} " * 500}),  # more than the context
    ("/v1/completions", {"prompt": TEXT, "logit_bias": {TEXT: 1}}),
    ("/v1/chat/completions", {"messages": TEXT}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": TEXT}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "forbidden", "content": TEXT}]}),  # the template raises
    ("/v1/chat/completions", {**CHAT, "service_tier": "none"}),
    ("/tokenize", {"prompt": TEXT, "add_special_tokens": TEXT}),
]


def test_no_log_shows_a_key_or_a_prompt(engine: ScriptedDispatcher, tokenizer: ModelTokenizer, log: list[str]) -> None:
    """Requests are answered, refused, lost and broken, whole and as streams. No answer shows a key."""
    with serving(engine, tokenizer, HttpConfig(api_keys=(KEY, "other"))) as http:
        answers = []
        for path, body in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", CHAT)):
            for stream in (False, True):
                answers.append(http.post(path, json={**body, "stream": stream, "user": TEXT}, headers=BEARER))
                assert answers[-1].status_code == 200
                for failure in (ReplicaLost("r0 is gone"), RuntimeError("broken"), KeyError("x")):
                    for script in ([failure], [0.01, failure]):
                        engine.script = lambda s, script=script: list(script)  # type: ignore[misc]
                        answers.append(http.post(path, json={**body, "stream": stream}, headers=BEARER))
                engine.script = engine.story
        for path, body in REFUSED:
            answers.append(http.post(path, json=body, headers=BEARER))
            assert answers[-1].status_code in (400, 404), (body, answers[-1].text)
        answers.append(http.post("/v1/completions", content=f'{{"prompt": "{TEXT}'.encode(), headers=BEARER))
        answers.append(http.get("/v1/requests/none", headers=BEARER))
        answers.append(http.post("/v1/completions", json=CHAT, headers={"authorization": f"Bearer {KEY}{KEY}"}))
        answers.append(http.post("/v1/completions", json=CHAT, headers={"authorization": KEY}))
        assert {answer.status_code for answer in answers} >= {200, 400, 401, 404, 500, 503}
        with raw(str(http.base_url)) as wire:  # not HTTP
            wire.sendall(f"{TEXT}\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
            wire.recv(4096)
    assert any("Traceback" in line for line in log), "failures were logged, with their tracebacks"
    assert_no_secret(log)
    bodies = [answer.text for answer in answers]
    assert not [body for body in bodies if "hunter2" in body]
    assert not [answer.text for answer in answers if answer.status_code >= 401 and "swordfish" in answer.text]


async def test_no_trace_log_or_metric_of_an_engine_shows_a_key_or_a_prompt(
    tokenizer: ModelTokenizer, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request runs, one is refused, and the step of one raises. Each that ran leaves a line."""
    monkeypatch.setattr(tracing, "SETTLE_S", (0.05, 0.2, 0.5))
    with collector() as (endpoint, received):
        async with TracedApi(tokenizer, [InProcess()], otlp_endpoint=endpoint, api_keys=[KEY]) as api:
            api.http.headers.update(BEARER)
            assert (await api.ask(prompt=TOKENS)).status_code == 200
            refusal = await api.ask(prompt=TOKENS, max_tokens=100_000)
            assert (refusal.status_code, "41" in refusal.text) == (400, False)
            metrics = (await api.http.get("/metrics")).text
            with monkeypatch.context() as broken:
                broken.setattr(Engine, "step", lambda *_: [][0])
                answer = await api.ask(prompt=TOKENS)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "Internal server error."
    assert received
    assert any(line.startswith("crossdock.requests ") for line in log), "the line of an ended request"
    assert any("its requests end with an error" in line and "IndexError" in line for line in log)
    assert_no_secret([*log, *(str(request) for request in received), metrics])
    assert_figures(metrics)


FIGURE = re.compile(r"[+-]?(\d+(\.\d+)?(e[+-]?\d+)?|Inf)|NaN")
LABELS = {  # label: its values, which the configuration and the code know, and no request
    "replica": "r0",
    "version": "default",
    "level": "[012]",
    "ingress": "0",
    "slo_class": "interactive|standard|batch",
    "le": r"[\d.e+-]+|\+Inf",
    "quantile": r"0\.\d+",
    "prompt_tokens": r"\d+|inf",
    "state": "free|owned|cached|quarantined",
    "status": "waiting|running|held|preempted",
    "kind": "decodes|chunks|mixed",
    "reason": "[a-z -]+",
    "finish_reason": "stop|length|abort|error|shipped|returned",
    "outcome": "met|missed",
    "source": "pool|host|files|replica",
    "coefficient": "[a-z_]+",
    "chunk": "[a-z_]+",
    "phase": "[a-z_]+",
    "page_size": r"\d+",
    "num_pages": r"\d+",
    "kv_cache_dtype": "[a-z0-9]+",
    "enable_prefix_caching": "True|False",
    "prefill_shared": "[a-z_]+",
    "tenant": "[0-9a-f]{8}|others",
}


def assert_figures(metrics: str) -> None:
    """Assert that every sample is a number, with labels of known values."""
    samples = [line for line in metrics.splitlines() if not line.startswith("#")]
    assert len(samples) > 200
    for sample in samples:
        name, value = sample.rsplit(" ", 1)
        assert FIGURE.fullmatch(value), sample
        for label, text in re.findall(r'(\w+)="([^"]*)"', name):
            assert re.fullmatch(LABELS[label], text), sample
