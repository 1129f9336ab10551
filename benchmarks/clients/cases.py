"""The cases of one client, and their outcomes. Imports no client: each script has a process of its own."""

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

URL, KEY, MODEL = os.environ["URL"], os.environ["KEY"], "tiny"
STORY = "The quick brown fox 🙂 jumps over the lazy dog"
THOUGHT = "The user wants an answer."
FOUND = "The tools say: 21 degrees in Paris"
FOUND_BOTH = f"{FOUND}; 21 degrees in Rome"
ONE_CITY, TWO_CITIES = "What is the weather in Paris?", "What is the weather in Paris and in Rome?"
PICTURES = json.loads(os.environ["PICTURES"])  # a second server, what to send it, and transformers' answer
PICTURE_LIMITS = {"max_tokens": PICTURES["num_tokens"], "temperature": 0}
NO_PICTURE = "data:image/png;base64,aGVsbG8="
HI = [{"role": "user", "content": "Hi"}]
ASKS = [{"role": "user", "content": TWO_CITIES}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}

Case = Callable[[], Any]
_CASES: dict[str, Case] = {}


class Weather(BaseModel):
    """The weather in a city, which models are asked for as JSON."""

    city: str
    degrees: int


PARIS = Weather(city="Paris", degrees=21)


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


def equal(found: Any, expected: Any) -> None:
    """Raise AssertionError unless both are equal."""
    assert found == expected, f"{found!r} is not {expected!r}"


def case(name: str) -> Callable[[Case], Case]:
    """Return a decorator: the function is a case, which raises where it fails. It may be a coroutine function."""

    def added(function: Case) -> Case:
        _CASES[name] = function
        return function

    return added


def run(client: str, package: str) -> None:
    """Run every case since the last call, and print the outcomes."""
    for name, function in _CASES.items():
        failure = ""
        try:
            asyncio.run(function()) if inspect.iscoroutinefunction(function) else function()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        outcome = {"client": client, "version": version(package), "case": name, "failure": failure}
        print(json.dumps(outcome), flush=True)
    _CASES.clear()


def raised(kind: type[Exception], call: Callable[[], Any], *texts: str) -> None:
    """Check that a call raises this exception, whose text has these parts."""
    message = None
    try:
        call()
    except kind as error:
        message = str(error)
    assert message is not None, f"no {kind.__name__} was raised"
    for text in texts:
        assert text in message, f"{text!r} is not in {message}"
