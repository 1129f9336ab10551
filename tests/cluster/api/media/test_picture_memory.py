"""The memory of an ingress's pictures: counted over all requests, freed with the last use, and bounded."""

import asyncio
import gc
from collections.abc import AsyncIterator

import numpy as np
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.kept_pictures import KeptPictures
from crossdock.cluster.api.media.media import Media, MediaLimits, PictureMetrics
from crossdock.cluster.api.media.memory import PictureMemory
from crossdock.cluster.api.media.processes import PicturesBusy, ReadyPicture
from tests.cluster.api.media.picture_models import data_url, encoded, opened, picture
from tests.waiting import until

MEMORY = 1 << 20
REGISTRY = CollectorRegistry()


@pytest.fixture(scope="module")
async def media(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Media]:
    """All tests share one event loop with it: work that a cancelled test leaves ends there."""
    limits = MediaLimits(AllowedHosts(()), None, 32, 0, MEMORY, 1 << 20, 1.0, MEMORY, MEMORY, {}, {})
    with opened(tmp_path_factory.mktemp("model"), limits, PictureMetrics(REGISTRY)) as media:
        yield media


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(f"crossdock_ingress_picture_{name}") or 0.0


def one(size: int, seed: int) -> list[Picture]:
    return [Picture(data_url(encoded(picture(size, size, seed))), f"messages[{seed}]")]


def test_tensor_counts_until_it_is_dropped() -> None:
    memory = PictureMemory(1000)
    ready = ReadyPicture("", (1,), b"", {"a": np.zeros(100, np.uint8), "b": np.zeros(50, np.float32)})
    memory.add(ready)
    assert memory.num_bytes == 300
    kept = dict(ready.tensors)  # as an item of a submission keeps them
    del ready
    assert memory.num_bytes == 300
    del kept["a"]
    assert memory.num_bytes == 200
    kept.clear()
    assert memory.num_bytes == 0


def test_file_counts_while_it_waits() -> None:
    memory = PictureMemory(1000)
    with memory.file(bytes(600)):
        assert memory.num_bytes == 600
        with pytest.raises(PicturesBusy), memory.file(bytes(401)):
            pass
        with memory.file(bytes(400)):
            assert memory.num_bytes == 1000
    assert memory.num_bytes == 0


async def test_pictures_of_running_requests_take_the_memory_until_the_requests_end(media: Media) -> None:
    held: list[list[ReadyPicture]] = []

    async def fill() -> None:
        while True:
            held.append(await media.prepare(one(128, len(held)), salt=""))

    with pytest.raises(ApiError) as caught:
        await fill()
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": "2"}
    size = held[0][0].num_bytes
    assert MEMORY - 2 * size < size * len(held) <= MEMORY
    held.clear()
    gc.collect()
    assert await media.prepare(one(128, 101), salt="")


async def test_kept_pictures_make_room_for_others(media: Media) -> None:
    before = metric("cache_hits_total")
    for seed in range(45):  # of which all together take more than the memory
        await media.prepare(one(128, seed), salt="")
    await media.prepare(one(128, 44), salt="")
    assert metric("cache_hits_total") - before == 1


async def test_key_with_its_share_of_the_memory_leaves_some_to_others(media: Media) -> None:
    held: dict[str, list[list[ReadyPicture]]] = {"a": [], "b": [], "c": []}

    async def fill(owner: str) -> None:
        while True:
            held[owner].append(await media.prepare(one(128, len(held[owner])), salt=owner, owner=owner))

    def taken(owner: str) -> int:
        return sum(each.num_bytes for pictures in held[owner] for each in pictures)

    for owner in held:
        with pytest.raises(ApiError, match="pictures and videos of this API key take its share") as caught:
            await fill(owner)
        assert (caught.value.status, caught.value.param) == (429, f"messages[{len(held[owner])}]")
    size = held["a"][0][0].num_bytes
    assert taken("a") <= MEMORY // 2 < taken("a") + 3 * size
    assert taken("a") > taken("b") > taken("c") >= size
    for pictures in held.values():
        pictures.clear()
    assert await media.prepare(one(128, 0), salt="c", owner="c")


def test_kept_pictures_of_others_are_dropped_only_where_that_makes_room() -> None:
    memory = PictureMemory(1000)
    kept = KeptPictures(1000, memory)

    def add(key: str, num_bytes: int, owner: str) -> ReadyPicture:
        ready = ReadyPicture("", (), b"", {"a": np.zeros(num_bytes, np.uint8)})
        memory.add(ready, owner)
        kept.keep(key.encode(), ready, owner)
        return ready

    def found(*keys: str) -> list[str]:
        return [key for key in keys if kept.get(key.encode()) is not None]

    held = add("a1", 400, "a")
    add("a2", 50, "a")
    add("b1", 50, "b")
    kept.make_room(200, "a")  # more than a may have, whatever goes: the first was dropped, but it is still in use
    assert found("a1", "a2", "b1") == ["a2", "b1"]
    kept.make_room(70, "a")
    assert found("a2", "b1") == ["b1"]
    assert not memory.lacks(70, "a")
    kept.make_room(90, "a")
    assert found("b1") == []
    assert not memory.lacks(90, "a")
    assert held.num_bytes == 400


async def test_request_with_more_than_half_of_the_memory_is_refused_for_good(media: Media) -> None:
    plain = (Image.new("RGB", (128, 128), (seed, 0, 0)) for seed in range(24))  # small files
    pictures = [Picture(data_url(encoded(image)), f"messages[{i}]") for i, image in enumerate(plain)]
    with pytest.raises(ApiError, match="once they are decoded") as caught:
        await media.prepare(pictures, salt="")
    assert caught.value.status == 400


async def test_pictures_of_a_client_that_has_left_are_not_processed(media: Media) -> None:
    before = metric("seconds_count")
    pictures = [each for seed in range(20) for each in one(16, seed)]
    leaving = asyncio.create_task(media.prepare(pictures, salt=""))
    other = asyncio.create_task(media.prepare(pictures[:1], salt=""))  # waits for the first one too
    await until(lambda: metric("seconds_count") > before)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert len(await other) == 1
    assert await media.prepare(one(16, 30), salt="")
    assert 2 <= metric("seconds_count") - before < 15, "those that two processes had begun"
