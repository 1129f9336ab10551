"""The simulator over HTTP, in a process with limits, and its pages in a browser: with a server, and as a file."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.simulator_page import PAGE
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.routes import simulator
from crossdock.cluster.api.routes.simulator import Simulator
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.simulate.scenario import Scenario
from crossdock.cluster.simulate.scenario_run import play
from crossdock.workers.sandbox.limited_child import Limits
from tests.cluster.api.engine_api import LiveApi, live_api
from tests.cluster.api.routes.browser import Browser
from tests.cluster.api.routes.test_web import colours, keep, needs_browser

POLICIES = ["adaptive", "fixed", "alternating", "whole"]


@pytest.fixture(scope="module")
def api(tokenizer: ModelTokenizer) -> Iterator[LiveApi]:
    with live_api(tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tokenizer: ModelTokenizer) -> Iterator[LiveApi]:
    with live_api(tokenizer, ("mine",)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


def test_answer_is_the_run_of_the_scenario(api: LiveApi) -> None:
    fields = {"policy": "fixed", "prompt_tokens": 4096, "num_streams": 3}
    answer = httpx.get(f"{api.url}/v1/simulator", params=fields, timeout=240)
    assert answer.json() == {"object": "simulator.run", **play(Scenario.model_validate(fields))}


def test_run_with_the_costs_of_this_server_differs_from_the_run_of_a_preset(api: LiveApi) -> None:
    api.work()
    runs = [
        httpx.get(f"{api.url}/v1/simulator", params={"profile": profile, "prompt_tokens": 500}, timeout=240).json()
        for profile in ("here", "l4-8b")
    ]
    assert all(sum(chunk["num_tokens"] for step in run["steps"] for chunk in step["chunks"]) == 500 for run in runs)
    assert runs[0]["ttft_s"] != runs[1]["ttft_s"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "best"),
        ("prompt_tokens", "many"),
        ("prompt_tokens", "1e400"),
        ("tpot_s", "nan"),
        ("tpot_s", "inf"),
        ("colour", "red"),
        ("max_num_batched_tokens", "64"),
        ("profile", "/etc/passwd.json"),
        ("profile", "http://127.0.0.1:1"),
    ],
)
def test_wrong_field_is_named(api: LiveApi, name: str, value: str) -> None:
    answer = httpx.get(f"{api.url}/v1/simulator", params={name: value}, timeout=240)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_server_with_keys_simulates_for_none_without_one(guarded: LiveApi) -> None:
    assert httpx.get(f"{guarded.url}/v1/simulator", timeout=240).status_code == 401


def test_scenario_beyond_the_limits_of_its_process_is_refused_and_the_next_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulator, "_LIMITS", Limits(cpu_seconds=0.3, wall_seconds=20.0, memory_bytes=512 << 20))
    endpoint = Simulator(Dispatcher("tiny"))

    async def ask() -> None:
        long = Scenario(policy="fixed", max_num_batched_tokens=128, num_streams=64, prompt_tokens=65536, num_prompts=8)
        with pytest.raises(ApiError, match="more time or memory") as refused:
            await endpoint.run(long)
        assert refused.value.status == 400
        answer = await endpoint.run(Scenario(num_streams=0, prompt_tokens=16))
        assert answer.status_code == 200

    asyncio.run(ask())


def test_scenarios_beyond_the_queue_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "_MOST_WAITING", 2)
    endpoint = Simulator(Dispatcher("tiny"))

    async def ask() -> None:
        small = Scenario(num_streams=0, prompt_tokens=16)
        found = await asyncio.gather(*[endpoint.run(small) for _ in range(4)], return_exceptions=True)
        refused = [each for each in found if isinstance(each, ApiError)]
        assert [each.status for each in refused] == [503, 503]
        assert (await endpoint.run(small)).status_code == 200, "the queue is empty again"

    asyncio.run(ask())


@needs_browser
def test_page_shows_each_policy_and_follows_its_form(browser: Browser, api: LiveApi) -> None:
    browser.prefers("light")
    browser.open(f"{api.url}/simulator")
    browser.eventually(lambda: browser.text("#state") == "computed by this server's scheduler")
    check_page(browser)
    browser.run("document.querySelector('[name=profile]').value = 'here'")
    choose(browser, "prompt_tokens", 512)
    browser.eventually(lambda: browser.text("#state") == "computed by this server's scheduler")
    assert "profile=here" in browser.run("return location.hash")
    browser.resize(360, 900)
    browser.prefers("dark")
    assert browser.run("return document.documentElement.scrollWidth") <= 360
    keep(browser, "simulator-narrow")
    browser.resize(1280, 1100)
    assert browser.complaints() == []


@needs_browser
def test_page_of_a_server_with_keys_asks_for_one(browser: Browser, guarded: LiveApi) -> None:
    browser.open(f"{guarded.url}/simulator")
    browser.eventually(lambda: "requires an API key" in browser.text("#key"))
    browser.type("#key input", "mine")
    browser.click("#key button")
    browser.eventually(lambda: browser.text("#state") == "computed by this server's scheduler")
    assert all("401" in complaint for complaint in browser.complaints())


@needs_browser
def test_page_as_a_file_shows_its_runs_without_a_server(browser: Browser, tmp_path: Path) -> None:
    browser.open(PAGE.as_uri())
    browser.eventually(lambda: browser.text("#state") == "computed by the real scheduler, before")
    check_page(browser)
    assert browser.complaints() == []


def check_page(browser: Browser) -> None:
    """Check what the page shows, and that another budget changes TTFT and TPOT as it should."""
    keep(browser, "simulator")
    assert [colours(browser, place) > 3 for place in range(4)] == [True] * 4
    assert "with chunks and streams" in browser.run("return document.querySelector('canvas').ariaLabel")
    before = rows(browser)
    assert [row[0] for row in before] == POLICIES
    choose(browser, "max_num_batched_tokens", 8192)
    browser.eventually(lambda: rows(browser) != before)
    fixed_before, fixed = before[1], rows(browser)[1]
    assert seconds(fixed[1]) < seconds(fixed_before[1]), "a larger budget: a sooner first token"
    assert seconds(fixed[3]) > seconds(fixed_before[3]), "and longer gaps"
    assert "max_num_batched_tokens=8192" in browser.run("return location.hash")


def choose(browser: Browser, name: str, value: int) -> None:
    browser.run(
        """const select = document.querySelector(`[name=${arguments[0]}]`);
        select.value = arguments[1]; select.dispatchEvent(new Event("change", { bubbles: true }));""",
        name,
        str(value),
    )


def rows(browser: Browser) -> list[list[str]]:
    return [line.split("\t") for line in browser.text("#summary").splitlines()]


def seconds(text: str) -> float:
    number, unit = text.split(" ")
    return float(number) / (1000 if unit == "ms" else 1)
