"""Every route of the application's own table gets the largest requests that its bounds allow: none is a side door.

A route without cases fails. Memory is the peak of a real process. Work that does not yield is CPU time of one callback
of the event loop, in times that the parser takes for the largest body. Other work on a machine makes such a ratio
larger at times: so the least of a few counts.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from crossdock.cluster.api.batches.folder import TERMINAL
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.largest_bodies import CHATS, FORM, MAX_BODY, MAX_FILE, ROUTES, Sent, batch_files, form
from tests.cluster.api.measured_ingress import Ingress, config_at, every_route, measured_ingress
from tests.waiting import eventually

MIB = 1 << 20
KEPT = 24 * MIB  # by the allocator, and code that a first request imports
LONGEST_BLOCK = 3.0  # 1.1 at most on a quiet machine, and 2.5 beside others; a body that is parsed twice is more
TRIES = 3
EXEMPT = ("/web/", "/dashboard", "/simulator")  # files of the web pages, which read no body


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ingress]:
    with measured_ingress(tmp_path_factory.mktemp("ingress")) as running:
        yield running


@pytest.fixture(scope="module")
def http(ingress: Ingress) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ingress.url, timeout=240) as client:
        yield client


def most_bytes(folder: Path) -> int:
    """Return how much memory requests may take: what counts, two copies of the body that is parsed, and the rest."""
    config = config_at(folder)
    return config.request_memory_bytes + 2 * config.max_body_bytes + KEPT


def test_every_route_of_the_application_has_cases(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    app, _ = every_route(tokenizer, tmp_path)
    found = set()
    for route in app.routes:
        path = getattr(route, "path", "")
        if not path.startswith(EXEMPT) and path:
            found |= {(method, path) for method in getattr(route, "methods", None) or () if method != "HEAD"}
    assert found == ROUTES.keys()
    assert config_at(tmp_path).max_body_bytes == MAX_BODY


def check(ingress: Ingress, http: httpx.Client, folder: Path, send: Callable[[], str]) -> None:
    """Check what requests cost, and that nothing of them counts any longer. `send` returns their name."""
    for _ in range(TRIES):
        ingress.begin()
        name = send()
        assert http.get("/health").status_code == 200
        eventually(lambda: (found := ingress.measured()).held == 0 and found.running == 0, f"{name} is held")
        found = ingress.measured()
        told = f"{name}: {found.grown / MIB:.0f} MiB; the longest block {found.longest_block:.2f}: {found.what}"
        sys.stdout.write(f"{told}\n")
        assert found.grown <= most_bytes(folder), told
        if found.longest_block <= LONGEST_BLOCK:
            return
    pytest.fail(told)


@pytest.mark.parametrize(("method", "path"), ROUTES, ids=lambda part: part)
def test_largest_requests_of_a_route_stay_within_the_memory_and_the_turns_of_an_ingress(
    ingress: Ingress, http: httpx.Client, tmp_path: Path, method: str, path: str
) -> None:
    url = path.replace("{name:path}", "a/b").replace("{name}", "x" * 100)
    too_large = Sent("one byte too many", b"x" * (MAX_FILE + 1), (413,))

    def sent(case: Sent) -> str:
        answer = http.request(method, url + case.query, content=case.content, headers={"content-type": case.kind})
        name = f"{answer.status_code} {method} {path}: {case.name}"
        assert answer.status_code in case.statuses, f"{name}: {answer.text[:300]}"
        return name

    for case in [*ROUTES[method, path](), too_large]:
        check(ingress, http, tmp_path, partial(sent, case))


@pytest.mark.parametrize(("name", "content"), [*batch_files()], ids=lambda part: part if isinstance(part, str) else "")
def test_largest_lines_of_a_batch_stay_within_the_memory_and_the_turns_of_an_ingress(
    ingress: Ingress, http: httpx.Client, tmp_path: Path, name: str, content: bytes
) -> None:
    fields = (('"purpose"', b"batch"), ('"file"; filename="in.jsonl"', content))
    file = http.post("/v1/files", content=form(*fields), headers={"content-type": FORM}).json()["id"]
    body = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}

    def ran() -> str:
        batch = http.post("/v1/batches", json=body).json()["id"]
        eventually(lambda: http.get(f"/v1/batches/{batch}").json()["status"] in TERMINAL)
        return name

    check(ingress, http, tmp_path, ran)
