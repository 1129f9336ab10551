"""A tokenizer for all tests of the API, and one server in front of a scripted dispatcher."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api import endpoints
from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.limits import Ledger
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import LiveServer, ScriptedDispatcher, Serve, serving
from tests.waiting import Clock, eventually


@pytest.fixture(scope="session")
def tokenizer(tokenizers: dict[str, PreTrainedTokenizerFast]) -> ModelTokenizer:
    return ModelTokenizer(tokenizers["byte_level"])


@pytest.fixture(scope="session")
def shared_engine(tokenizer: ModelTokenizer) -> ScriptedDispatcher:
    return ScriptedDispatcher(tokenizer)


@pytest.fixture
def engine(shared_engine: ScriptedDispatcher) -> Iterator[ScriptedDispatcher]:
    """The dispatcher behind `url` and `wide`. No test may leave a generator open in it, or its own script."""
    shared_engine.submissions.clear()
    shared_engine.aborted.clear()
    yield shared_engine
    eventually(lambda: shared_engine.running == 0)
    shared_engine.script = shared_engine.story
    shared_engine.is_ready = True


@pytest.fixture(scope="session")
def url(shared_engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> Iterator[str]:
    config = HttpConfig(max_body_bytes=100_000, model_aliases=("other",), trust_request_chat_template=True)
    with LiveServer(one_model_api(shared_engine, tokenizer, config)) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture(scope="session")
def wide(shared_engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> Iterator[httpx.Client]:
    """A server that takes bodies of the usual size, and lists any number of log-probabilities."""
    with serving(shared_engine, tokenizer, HttpConfig(max_logprobs=-1, trust_request_chat_template=True)) as http:
        yield http


@pytest.fixture
def serve(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> Iterator[Serve]:
    """Start servers for a test whose settings differ from those of `url`."""
    with ExitStack() as stack:

        def start(defaults: GenerationDefaults | None = None, **fields: Any) -> httpx.Client:
            return stack.enter_context(serving(engine, tokenizer, HttpConfig.model_validate(fields), defaults))

        yield start


@pytest.fixture
def stopped_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass for the limits of keys: on a slow machine they fill again between two requests."""
    monkeypatch.setattr(endpoints, "Ledger", partial(Ledger, clock=Clock()))


@pytest.fixture
def http(url: str, engine: ScriptedDispatcher) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=240) as client:
        yield client


@pytest.fixture
def client(url: str, engine: ScriptedDispatcher) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client
