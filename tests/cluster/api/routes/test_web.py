"""The web pages: their content and policy, the data that they may show, and their behaviour in a browser."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.routes.web_assets import web_assets
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.engine_api import LiveApi, live_api
from tests.cluster.api.routes.browser import MISSING, REASON, Browser

KEYS = ("mine", "theirs", {"key": "operator", "sees_all_requests": True})
SCREENSHOTS = os.environ.get("CROSSDOCK_SCREENSHOTS")  # a folder to keep them in, to be looked at


@pytest.fixture(scope="module")
def open_api(tokenizer: ModelTokenizer) -> Iterator[LiveApi]:
    with live_api(tokenizer) as api:
        yield api


@pytest.fixture(scope="module")
def guarded(tokenizer: ModelTokenizer) -> Iterator[LiveApi]:
    with live_api(tokenizer, KEYS) as api:
        yield api


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- content and policy ----------------------------------------------------------------------------------------------


def test_pages_load_from_this_server_only(open_api: LiveApi) -> None:
    """The policy forbids other sources, and no page would violate it."""
    assert {"/dashboard", "/web/style.css", "/web/dashboard.js"} <= web_assets().keys()
    for path, page in web_assets().items():
        answer = httpx.get(open_api.url + path, timeout=240)
        assert (answer.status_code, answer.headers["content-type"]) == (200, page.media_type)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        source = answer.text.replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
        assert not re.search(r"https?://|//\w+\.\w+/|@import|url\(", source), f"{path} names another server"
        assert not re.search(r"\sstyle=|\son\w+=|<script>|innerHTML|\beval\b", source), f"{path} has code in a page"


def test_steps_hide_requests_of_other_keys(guarded: LiveApi) -> None:
    guarded.work("mine")
    with httpx.Client(base_url=guarded.url, timeout=240) as http:

        def names(key: str) -> set[str | None]:
            (replica,) = http.get("/v1/replicas", headers=bearer(key)).json()["data"]
            return {chunk["request_id"] for step in replica["steps"] for chunk in step["chunks"]}

        assert "of-mine" in names("mine")
        assert "of-mine" in names("operator")
        assert names("theirs") == set()
        (theirs,) = http.get("/v1/replicas", headers=bearer("theirs")).json()["data"]
        assert (theirs["pages"], theirs["tiers"]) == (None, None), "they show how long the prompts of others are"


def test_steps_are_sent_once(open_api: LiveApi) -> None:
    open_api.work()
    with httpx.Client(base_url=f"{open_api.url}/v1", timeout=240) as http:

        def replica(*after: str) -> dict[str, Any]:
            (found,) = http.get("/replicas", params=[("after", value) for value in after]).json()["data"]
            return dict(found)

        first = replica()
        assert first["pool"] == "mixed"
        assert max(first["profile"]["cost"].values()) > 0
        assert (
            sum(first["pages"][state] for state in ("free", "owned", "cached", "quarantined"))
            == first["pages"]["total"]
        )
        assert first["profile"]["max_num_batched_tokens"] == 40
        (host,) = first["tiers"]
        assert host.keys() == {"name", "pages", "bytes", "stored", "loaded", "missed"}
        numbers = [step["number"] for step in first["steps"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert any(step["num_decodes"] and step["chunks"] for step in first["steps"]), "chunks beside decodes"
        newest = f"{first['incarnation']}:{first['last_step']}"
        assert replica("other:3", newest)["steps"] == []
        assert replica(f"other:{first['last_step']}")["steps"]
        for wrong in ("x", "x:y", "x:-1", f"x:{'9' * 99}", "x:\u0661"):
            answer = http.get("/replicas", params={"after": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


# -- behaviour in a browser -------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(bool(MISSING), reason=REASON)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


def keep(browser: Browser, name: str) -> None:
    if SCREENSHOTS:
        browser.screenshot(Path(SCREENSHOTS) / f"{name}.png")


def colours(browser: Browser, place: int = 0) -> int:
    """Return how many colours the pixels of a canvas have."""
    return int(
        browser.run(
            """const canvas = document.querySelectorAll("canvas")[arguments[0]];
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(data.buffer)).size;""",
            place,
        )
    )


def keep_busy(api: LiveApi, key: str = "none") -> Callable[[], None]:
    """Keep a replica busy until the returned function is called."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            api.work(key)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(240)

    return end


@needs_browser
def test_dashboard_shows_steps_as_they_happen(browser: Browser, open_api: LiveApi) -> None:
    end = keep_busy(open_api)
    try:
        browser.prefers("light")
        browser.open(f"{open_api.url}/dashboard")
        browser.eventually(lambda: browser.text("#state") == "live" and "running" in browser.text("#replicas"))
        assert browser.text("#replicas h3").startswith("mixed")
        assert re.search(r"host: [\d,]+ pages, 0\.0 GiB; [\d,]+ loaded, 0 missed", browser.text("#replicas"))
        browser.eventually(lambda: colours(browser) > 4)  # ground, decodes, prompts, lines
        description = "return document.querySelector('canvas').ariaLabel"
        browser.eventually(lambda: re.search(r"[1-9]\d* with chunks and streams", browser.run(description)))
        first = browser.run("return document.querySelector('#replicas li').value")
        browser.eventually(lambda: browser.run("return document.querySelector('#replicas li').value") > first)
        keep(browser, "dashboard-light")
        light = browser.run("return getComputedStyle(document.body).backgroundColor")
        browser.prefers("dark")
        assert browser.run("return getComputedStyle(document.body).backgroundColor") != light
        keep(browser, "dashboard-dark")
        browser.click("#pause")
        browser.run("document.querySelector('canvas').focus()")
        browser.type("canvas", "\ue012")  # the left arrow
        assert re.match(r"Step [\d,]+ took", browser.text(".caption"))
        assert browser.complaints() == []
    finally:
        end()


@needs_browser
def test_dashboard_names_the_model_and_what_was_kept(browser: Browser, open_api: LiveApi) -> None:
    open_api.work()
    browser.open(f"{open_api.url}/dashboard")
    browser.eventually(lambda: "in time" in browser.text("#totals"))
    assert re.fullmatch(r"\S+ · version \S+ · 127\.0\.0\.1:\d+", browser.text("#model"))
    tiles = browser.text("#totals")
    assert re.search(r"\d+(\.\d)? %\s+First tokens in time", tiles)
    assert re.search(r"\d+(\.\d)? %\s+Streams in time", tiles)
    assert re.search(r"\d+\s+Refused \(429\)", tiles)
    assert browser.complaints() == []


@needs_browser
def test_request_is_shown_as_a_picture_on_one_axis(browser: Browser, open_api: LiveApi) -> None:
    end = keep_busy(open_api)
    try:
        browser.open(f"{open_api.url}/dashboard")
        browser.eventually(lambda: browser.run("document.querySelector('#requests button')?.click(); return true"))
        browser.eventually(
            lambda: (
                browser.run("document.querySelector('#requests button')?.click();") is None
                and browser.run("return document.querySelectorAll('#request svg .part').length") > 0
            )
        )
    finally:
        end()
    label = browser.run("return document.querySelector('#request svg').ariaLabel")
    assert re.match(r"[1-9]\d* chunks over [\d.]+ m?s", label)
    parts = browser.run(
        """return [...document.querySelectorAll("#request svg rect")].map((node) =>
        [node.getAttribute("class"), Number(node.getAttribute("x")), Number(node.getAttribute("width"))])"""
    )
    chunks = [(x, width) for kind, x, width in parts if kind == "part"]
    assert chunks == sorted(chunks), "chunks stand in the order of time"
    assert all(170 <= x <= 1000 for _, x, _ in parts)
    keep(browser, "request")
    browser.click("#request button")
    assert browser.text("#request") == ""
    assert browser.complaints() == []


@needs_browser
@pytest.mark.parametrize("count", [16, 64])
def test_dashboard_of_many_replicas_has_a_row_for_each_and_steps_of_those_that_are_chosen(
    browser: Browser, open_api: LiveApi, count: int
) -> None:
    """Pools of more than 16 are folded, and requests stand above the replicas."""
    open_api.work()
    browser.open(f"{open_api.url}/dashboard")
    browser.eventually(lambda: browser.text("#state") == "live")
    browser.run(MANY, count)
    browser.eventually(lambda: f"decode: {count - 4} replicas" in browser.text("#pools"))
    assert re.search(r"prefill: 4 replicas, \d+ running", browser.text("#pools"))
    rows = "return document.querySelectorAll('#pools tbody tr').length"
    assert browser.run(rows) == (16 if count == 16 else 4), "a large pool is folded"
    visible = "return [...document.querySelectorAll('#replicas section')].filter((node) => !node.hidden).length"
    assert browser.run(visible) == 0
    assert browser.run("return document.documentElement.scrollHeight") < 1500
    assert browser.run(
        "return document.getElementById('requests').getBoundingClientRect().top"
        " < document.getElementById('pools').getBoundingClientRect().top"
    )
    if count > 16:
        browser.click("#pools details:first-child summary")
        browser.eventually(lambda: browser.run(rows) == count)
    browser.click("#pools tbody button")
    browser.eventually(lambda: browser.run(visible) == 1)
    keep(browser, f"dashboard-{count}")
    assert browser.complaints() == []


MANY = """const real = fetch, count = arguments[0];
window.fetch = async (...given) => {
  const answer = await real(...given);
  if (!`${given[0]}`.includes("v1/replicas")) return answer;
  const { data: [state] } = await answer.json();
  const name = (number) => `${number}`.padStart(8, "r");
  const data = [...Array(count).keys()].map((number) =>
    ({ ...state, replica: name(number), incarnation: name(number), pool: number < 4 ? "prefill" : "decode" }));
  return new Response(JSON.stringify({ data }));
};"""
"""Shows the one replica of the server many times."""


@needs_browser
def test_dashboard_requires_key(browser: Browser, guarded: LiveApi) -> None:
    browser.open(f"{guarded.url}/dashboard")
    browser.eventually(lambda: "requires an API key" in browser.text("#key"))
    browser.type("#key input", "wrong")
    browser.click("#key button")
    browser.eventually(lambda: "not accepted" in browser.text("#key"))
    browser.type("#key input", "mine")
    browser.click("#key button")
    browser.eventually(lambda: browser.text("#state") == "live")
    assert browser.run("return document.getElementById('key').hidden")
    assert all("401" in complaint for complaint in browser.complaints())
    assert "mine" not in browser.run("return location.href + document.cookie + JSON.stringify(localStorage)")


@needs_browser
def test_dashboard_without_a_server_asks_less_and_less_often(browser: Browser, open_api: LiveApi) -> None:
    browser.open(f"{open_api.url}/dashboard")
    browser.eventually(lambda: browser.text("#state") == "live")
    browser.run("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
    for pause in (2, 4):
        browser.eventually(
            lambda pause=pause: browser.text("#state").endswith(f"does not answer. Next try in {pause} s.")
        )
    browser.run("window.fetch = window.real")
    browser.eventually(lambda: browser.text("#state") == "live")
    assert browser.complaints() == []


@needs_browser
def test_page_fits_a_narrow_screen(browser: Browser, open_api: LiveApi) -> None:
    end = keep_busy(open_api)
    try:
        browser.resize(360, 900)
        browser.prefers("dark")
        browser.open(f"{open_api.url}/dashboard")
        browser.eventually(lambda: browser.text("#state") == "live")
        browser.eventually(lambda: colours(browser) > 3)
        keep(browser, "dashboard-narrow")
        assert browser.run("return document.documentElement.scrollWidth") <= 360
    finally:
        browser.resize(1280, 1100)
        end()


@needs_browser
def test_page_is_accessible(browser: Browser, open_api: LiveApi) -> None:
    """Every control has a name, every picture a text, and text contrasts with its background."""
    browser.prefers("light")
    browser.open(f"{open_api.url}/dashboard")
    browser.eventually(lambda: browser.text("#state") == "live")
    unnamed = browser.run(
        """return [...document.querySelectorAll("button, input, select, a, canvas, [role=img]")].filter((node) =>
        !(node.ariaLabel || node.innerText?.trim() || node.labels?.length)).map((node) => node.outerHTML)"""
    )
    assert unnamed == []
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map((node) => Number(node.tagName[1]))")
    assert levels[0] == 1
    assert browser.run("return document.documentElement.lang") == "en"
    for scheme in ("light", "dark"):
        browser.prefers(scheme)
        faint, card = browser.run(
            """const style = getComputedStyle(document.documentElement);
            return ["--faint", "--card"].map((name) => style.getPropertyValue(name))"""
        )
        assert contrast(faint, card) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2 between two colours, written #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour.strip()[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
