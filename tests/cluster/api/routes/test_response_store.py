"""The store of responses: its bounds, each owner's share, and what other ingresses find in it."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.cluster.api.routes import responses
from crossdock.cluster.api.routes.response_store import ITEM_BYTES, RECORD_BYTES, ResponseStore, StoredResponse
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import STORY, ScriptedDispatcher, named_events, refused, two_ingresses
from tests.waiting import Clock, eventually

TTL_S = 100.0


def record(size: int) -> StoredResponse:
    """Return a response of so many bytes, half of them those of an item."""
    items = (("", b"i" * (size // 2)),) if size > ITEM_BYTES else ()
    return StoredResponse(b"r" * (size - sum(len(item) for _, item in items)), items, is_background=False)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete", "wait"]),
        st.sampled_from("ab"),
        st.sampled_from("xyz"),
        st.integers(0, 3000),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_any_history_equals_a_plain_dictionary_while_there_is_place(steps: list[tuple[str, str, str, int]]) -> None:
    clock = Clock()
    store, known = ResponseStore(10**9, TTL_S, clock), dict[tuple[str, str], tuple[float, StoredResponse]]()
    for action, owner, name, number in steps:
        clock.now += number / 50 if action == "wait" else 0.0
        expires, expected = known.get((owner, name), (0.0, None))
        expected = expected if clock.now < expires else None
        if action == "put":
            store.put(owner, name, record(number))
            known[owner, name] = (clock.now + TTL_S, record(number))
        elif action == "delete":
            assert expected is None or store.delete(owner, name) == expected
            if expected is not None:
                del known[owner, name]
        else:
            assert store.get(owner, name) == expected
    for owner in "ab":
        store.get(owner, "")
    alive = [each for expires, each in known.values() if clock.now < expires]
    assert store.num_bytes == sum(each.num_bytes for each in alive)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4000)), max_size=30))
def test_bound_holds_after_every_record(puts: list[tuple[str, int]]) -> None:
    store = ResponseStore(10_000, TTL_S, Clock())
    for i, (owner, size) in enumerate(puts):
        store.put(owner, str(i), record(size))
        assert store.num_bytes <= 10_000
        assert store.get(owner, str(i)) is not None or record(size).num_bytes > 10_000 / 3


def test_owner_that_uses_most_loses_its_oldest_records() -> None:
    store = ResponseStore(10 * RECORD_BYTES, TTL_S, Clock())
    store.put("quiet", "first", record(0))
    for i in range(100):
        store.put("loud", str(i), record(0))
    assert store.get("quiet", "first") == record(0)
    kept = [i for i in range(100) if store.get("loud", str(i)) is not None]
    assert kept == list(range(91, 100))


def test_record_beyond_all_memory_is_not_kept() -> None:
    store = ResponseStore(5000, TTL_S, Clock())
    store.put("a", "large", record(5000))
    assert (store.get("a", "large"), store.num_bytes) == (None, 0)


def test_records_of_a_owner_that_left_are_forgotten() -> None:
    clock = Clock()
    store = ResponseStore(10**9, TTL_S, clock)
    store.put("left", "x", record(1))
    clock.now = 2 * TTL_S
    store.put("other", "x", record(0))
    assert store.num_bytes == record(0).num_bytes


@pytest.fixture
def ingresses(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> Iterator[list[httpx.Client]]:
    with two_ingresses(engine, tokenizer, api_keys=["a", "b"]) as ingresses:
        for http in ingresses:
            http.headers["authorization"] = "Bearer a"
        yield ingresses


def test_response_is_found_at_the_ingress_that_stored_it(
    ingresses: list[httpx.Client], engine: ScriptedDispatcher
) -> None:
    here, there = ingresses
    first = here.post("/v1/responses", json={"input": "Hi"}).json()
    path = f"/v1/responses/{first['id']}"
    assert there.get(path).json() == here.get(path).json() == first
    assert there.get(f"{path}/input_items").json() == here.get(f"{path}/input_items").json()
    for http in ingresses:
        body = {"input": "More", "previous_response_id": first["id"], "store": False}
        assert http.post("/v1/responses", json=body).status_code == 200
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        given = [{"role": role, "content": text} for role, text in (("user", "Hi"), ("user", "More"))]
        referring = {"input": [given[0], reference, given[1]], "store": False}
        assert http.post("/v1/responses", json=referring).status_code == 200
        refused(http.post("/v1/responses", json=referring, headers={"authorization": "Bearer b"}), 404)
    assert len({tuple(each.prompt_token_ids) for each in engine.submissions[1:]}) == 1
    refused(there.get(path, headers={"authorization": "Bearer b"}), 404)
    assert there.delete(path).json()["deleted"] is True
    for http in ingresses:
        refused(http.get(path), 404)


def test_stored_response_is_read_without_being_parsed(
    ingresses: list[httpx.Client], engine: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may read a long record often: only a conversation that goes on needs its parts."""
    parsed: list[bytes] = []

    def counted(content: bytes) -> Any:
        parsed.append(content)
        return json.loads(content)

    monkeypatch.setattr(responses, "from_json", counted)
    (http, _), items = ingresses, [{"role": "user", "content": f"Hi {i}"} for i in range(5)]
    stored = http.post("/v1/responses", json={"input": items, "background": True}).json()
    path = f"/v1/responses/{stored['id']}"
    eventually(lambda: http.get(path).json()["status"] == "completed")
    assert http.post(f"{path}/cancel").json() == http.get(path).json()
    page = http.get(f"{path}/input_items", params={"order": "asc", "limit": 3}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == [f"Hi {i}" for i in range(3)]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (
        page["data"][0]["id"],
        page["data"][-1]["id"],
        True,
    )
    assert parsed == []
    answer = http.post("/v1/responses", json={"input": "More", "previous_response_id": stored["id"]})
    assert answer.status_code == 200
    assert len(parsed) == 6


def test_response_in_the_background_is_cancelled_from_another_ingress(
    ingresses: list[httpx.Client], engine: ScriptedDispatcher
) -> None:
    here, there = ingresses
    engine.script = lambda submission: [*engine.story(submission)[:3], 60.0]
    name = here.post("/v1/responses", json={"input": "Hi", "background": True}).json()["id"]
    eventually(lambda: engine.running == 1)
    cancelled = there.post(f"/v1/responses/{name}/cancel").json()
    assert cancelled["status"] == "cancelled"
    text = "".join(part["text"] for item in cancelled["output"] for part in item["content"])
    assert STORY.startswith(text), "some of it may have arrived"
    assert here.get(f"/v1/responses/{name}").json() == cancelled
    assert len(engine.aborted) == 1


def test_stream_in_the_background_is_followed_from_another_ingress(
    ingresses: list[httpx.Client], engine: ScriptedDispatcher
) -> None:
    here, there = ingresses
    asked = threading.Event()
    engine.script = partial(engine.story_in_two, asked)
    body = {"input": "Hi", "background": True, "stream": True}
    with ExitStack() as stack:
        first = stack.enter_context(here.stream("POST", "/v1/responses", json=body))
        name = next(line for line in first.iter_lines() if line.startswith("data: "))
        path = f"/v1/responses/{json.loads(name.removeprefix('data: '))['response']['id']}"
        follower = stack.enter_context(there.stream("GET", path, params={"stream": True, "starting_after": 1}))
        asked.set()
        follower.read()
        found = named_events(follower)
    assert [event["sequence_number"] for event in found] == list(range(2, len(found) + 2))
    assert found[-1]["response"] == here.get(path).json()
    assert named_events(here.get(path, params={"stream": True}))[2:] == found
    refused(there.get(path, params={"stream": True}, headers={"authorization": "Bearer b"}), 404)
