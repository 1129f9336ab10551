"""Pictures and videos encoded in a process of their own: the same tokens, whichever replica is lost when."""

import asyncio
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.cluster.api.media.picture_models import picture
from tests.cluster.api.media.picture_oracle import continuation_of
from tests.cluster.api.media.video_models import joined_url, moving, video_part
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.picture_server import SIDE, picture_chat, save_picture_model, undisturbed
from tests.cluster.serve.pools.served_pools import processes
from tests.waiting import eventually

NUM_TOKENS = 16
POOLS = ("encode", "prefill", "decode")
SMALL, LARGE = range(6), range(100, 106)  # numbers of chats: with small pictures, and with six large ones each
VIDEOS = range(200, 202)  # with a video and a picture each


def images(number: int) -> list[Image.Image]:
    """Return the pictures of a chat. No two chats share one."""
    if number in VIDEOS:
        return [picture(64, 64, 10 * number)]
    if number in LARGE:
        return [picture(SIDE, SIDE, 10 * number + place) for place in range(6)]
    return [picture(40 + 8 * place, 64, 10 * number + place) for place in range(1 + number % 3)]


def num_frames(number: int) -> int:
    return 8 + 2 * (number % 3)


def chat(number: int) -> dict[str, Any]:
    """Return the body of a chat with pictures between words, and for some numbers a video in front."""
    body = picture_chat(f"Chat {number}: " + "what is this? " * (number % 5), images(number), NUM_TOKENS)
    if number in VIDEOS:
        body["messages"][0]["content"].insert(0, video_part(joined_url(moving(num_frames(number), seed=number))))
    return body


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    save_picture_model(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """The tokens that one engine in this process answers to each chat."""
    numbers = [*SMALL, *LARGE, *VIDEOS]
    tokens = asyncio.run(undisturbed(model, pools.local_engine(model), [chat(number) for number in numbers]))
    return dict(zip(numbers, tokens, strict=True))


@pytest.fixture(scope="module")
def url(ray_cluster: None, model: Path, wanted: dict[int, list[int]]) -> Iterator[str]:
    with pools.deployment(model, tuple({"name": name} for name in POOLS)) as address:
        yield address


@pytest.fixture(autouse=True)
def _wait_until_whole(url: str) -> None:
    wait_until_whole(url)


def wait_until_whole(url: str, replicas: int = len(POOLS)) -> None:
    """Wait until all replicas are up, no request owns a page, and no embeddings are on their way."""
    idle = ("landing_pages_owned", "transfers_open", "requests_active")  # metrics that are 0 when nothing is done
    pools.wait_until_whole(url, replicas, *(f"crossdock_{name}" for name in idle))


class Chat(pools.TokenStream):
    """A streaming chat with pictures."""

    def __init__(self, url: str, number: int, **params: Any) -> None:
        super().__init__(url, "/v1/chat/completions", chat(number) | params)

    def is_caught_encoding(self) -> bool:
        """Wait until the encode replica has encoded some of the pictures, and not all. False: the chat ended before."""
        caught, ended = "caught", "ended"

        def state() -> str:
            if any(0 < part["num_computed_tokens"] < part["num_prompt_tokens"] for part in self.encodings()):
                return caught
            return "" if self.is_alive() else ended

        return eventually(state) == caught

    def encodings(self) -> list[dict[str, Any]]:
        """Return the timelines of this request at encode replicas."""
        return [part for part in self.timelines() if part["leg"] == "encode"]


def chat_that_encodes(url: str, number: int) -> Chat:
    """Return a chat whose pictures are being encoded. On a busy machine one may end before it is caught."""
    for _ in range(10):
        found = Chat(url, number, **new_salt())
        if found.is_caught_encoding():
            return found
    raise AssertionError("ten chats ended before one was caught while its pictures were encoded")


def encoded_items(url: str) -> dict[str, float]:
    """Return how many pictures each replica has encoded, by name."""
    return pools.samples(url, "crossdock_items_encoded_total")


_RECEIVED = "crossdock_items_received_total"


def new_salt() -> dict[str, str]:
    """Return parameters by which a chat finds no page and no embeddings of other chats."""
    return {"cache_salt": f"{time.monotonic_ns()}"}


def test_tokens_after_pictures_equal_those_of_one_engine(url: str, wanted: dict[int, list[int]]) -> None:
    """And pictures that come again are not encoded again."""
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda number: Chat(url, number).result(), SMALL))
        assert found == [wanted[number] for number in SMALL]
        before = encoded_items(url)
        assert sum(before.values()) == sum(len(images(number)) for number in SMALL)
        (encoder,) = processes("encode")
        assert before[encoder] > 0
        assert sum(pools.samples(url, _RECEIVED).values()) > 0
        again = list(threads.map(lambda number: Chat(url, number).result(), reversed(SMALL)))
    assert again == [wanted[number] for number in reversed(SMALL)]
    assert encoded_items(url) == before


def test_tokens_after_pictures_equal_those_of_transformers(url: str, model: Path) -> None:
    body = chat(2) | {"model": "smol", "temperature": 0, **new_salt()}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    module = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    tokens, _ = continuation_of(module, model, answer["prompt_token_ids"], images(2), NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == tokens


def test_tokens_after_videos_equal_those_of_one_engine(url: str, wanted: dict[int, list[int]]) -> None:
    """The encode replica takes some of the videos, beside the pictures of the same chats."""
    (encoder,) = processes("encode")
    before, received = encoded_items(url)[encoder], sum(pools.samples(url, _RECEIVED).values())
    with ThreadPoolExecutor(len(VIDEOS)) as threads:
        chats = list(threads.map(lambda number: Chat(url, number, **new_salt()), VIDEOS))
    assert [each.result() for each in chats] == [wanted[number] for number in VIDEOS]
    assert all(each.encodings() for each in chats)
    num_items = sum(1 + num_frames(number) // 2 for number in VIDEOS)  # a picture, and groups of two frames
    assert encoded_items(url)[encoder] == before + num_items
    assert sum(pools.samples(url, _RECEIVED).values()) == received + num_items


def test_text_alone_is_no_work_for_encode_replicas(url: str) -> None:
    (encoder,) = processes("encode")
    before = pools.sample_of(url, 'crossdock_steps_total{kind="chunks"', encoder)
    assert len(pools.Stream(url, pools.prompt(1, 300)).result()) == 24
    assert pools.sample_of(url, 'crossdock_steps_total{kind="chunks"', encoder) == before


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_encode_replica_lost_while_it_encodes_costs_no_token(url: str, wanted: dict[int, list[int]], end: str) -> None:
    """Some embeddings have arrived, some are in transfer, some are not encoded: the other replica encodes the rest.
    SIGSTOP: no process knows that it will not continue, and its late writes hit pages in quarantine."""
    (encoder,) = processes("encode")
    received = sum(pools.samples(url, _RECEIVED).values())
    encoded = sum(count for name, count in encoded_items(url).items() if name != encoder)
    beside = [Chat(url, number, **new_salt()) for number in LARGE[1:3]]
    chats = [chat_that_encodes(url, LARGE[0]), *beside]
    victim = processes("encode")[encoder]
    victim.send_signal(signal.SIGKILL if end == "killed" else signal.SIGSTOP)
    try:
        assert [each.result() for each in chats] == [wanted[number] for number in LARGE[:3]]
        others = {name: count for name, count in encoded_items(url).items() if name != encoder}
        assert sum(others.values()) > encoded, "no other replica encoded anything"
        assert sum(pools.samples(url, _RECEIVED).values()) > received, "no embeddings had arrived"
    finally:
        if end == "stopped":
            victim.send_signal(signal.SIGCONT)
    wait_until_whole(url)
    again = Chat(url, LARGE[3], **new_salt())
    assert again.result() == wanted[LARGE[3]]
    assert again.encodings(), "the encode replica that Serve started gets no request"


def test_client_that_leaves_while_its_pictures_are_encoded_frees_all_pages(url: str) -> None:
    body = chat(LARGE[4]) | {"model": "smol", "stream": True, **new_salt()}
    headers = {"X-Request-Id": "leaves"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60):
        eventually(lambda: any(part["leg"] == "encode" for part in pools.timelines(url, "leaves")))
    wait_until_whole(url)


def test_prefill_replica_killed_while_embeddings_arrive_costs_no_token(url: str, wanted: dict[int, list[int]]) -> None:
    """A decode replica encodes and computes."""
    stream = chat_that_encodes(url, LARGE[5])
    (victim,) = processes("prefill").values()
    victim.kill()
    assert stream.result() == wanted[LARGE[5]]


def test_encode_replica_that_drains_ends_and_pictures_are_encoded_elsewhere(
    url: str, wanted: dict[int, list[int]]
) -> None:
    """The last test: the deployment ends without the replica."""
    stream = chat_that_encodes(url, LARGE[5])
    pools.scale("encode", 0)
    assert stream.result() == wanted[LARGE[5]]
    late = Chat(url, LARGE[0], **new_salt())
    assert late.result() == wanted[LARGE[0]]
    assert not late.encodings()
    wait_until_whole(url, len(POOLS) - 1)
