"""Runs the cases of one client and prints their outcomes. Imports no client: each script has a process of its own."""

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL, KEY, MODEL = os.environ["URL"], os.environ["KEY"], "tiny"
STORY = "The quick brown fox 🙂 jumps over the lazy dog"
THOUGHT = "The user wants an answer."
FOUND = "The tools say: 21 degrees in Paris"
FOUND_BOTH = f"{FOUND}; 21 degrees in Rome"
ONE_CITY, TWO_CITIES = "What is the weather in Paris?", "What is the weather in Paris and in Rome?"
PICTURES = json.loads(os.environ["PICTURES"])  # a second server, what to send it, and transformers' answer
PICTURE_LIMITS = {"max_tokens": PICTURES["num_tokens"], "temperature": 0}
NO_PICTURE = "data:image/png;base64,aGVsbG8="


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


def equal(found: Any, expected: Any) -> None:
    """Raise AssertionError unless both are equal."""
    assert found == expected, f"{found!r} is not {expected!r}"


def run(client: str, package: str, cases: dict[str, Callable[[], Any]]) -> None:
    """Run every case, a function or a coroutine function that raises where it fails, and print the outcomes."""
    for name, case in cases.items():
        failure = ""
        try:
            asyncio.run(case()) if inspect.iscoroutinefunction(case) else case()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        outcome = {"client": client, "version": version(package), "case": name, "failure": failure}
        print(json.dumps(outcome), flush=True)


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
