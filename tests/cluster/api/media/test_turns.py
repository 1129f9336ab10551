"""Videos that wait: they delay no picture, and those of one owner neither refuse nor long delay another's."""

import asyncio
import resource
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.media import media as media_module
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.fetch import PictureFetcher
from crossdock.cluster.api.media.media import Media, MediaLimits
from crossdock.cluster.api.media.turns import Turns
from tests.cluster.api.media.picture_models import data_url, encoded, opened, picture
from tests.cluster.api.media.video_models import moving, video_file

NUM_FILES = 200
SLOW = ("slow", "slower")  # owners whose videos have both processes


@pytest.fixture(scope="module")
async def media(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Media]:
    """All tests share one event loop with it: work that a cancelled test leaves ends there."""
    sampling = {"num_frames": 4, "fps": None}
    limits = MediaLimits(AllowedHosts(()), None, 4, 4, 1 << 20, 1 << 20, 1.0, 0, 8 << 20, {}, sampling)
    with opened(tmp_path_factory.mktemp("model"), limits) as media:
        assert not media.why_no_videos
        yield media


def video(seed: int) -> list[Picture]:
    return [Picture(data_url(video_file(moving(4, seed=seed)), "video/mp4"), f"messages[{seed}]", kind="video")]


IMAGE = [Picture(data_url(encoded(picture())), "messages[0]")]


async def settled() -> None:
    """Let every task that runs come to a stop, hashing in threads included."""
    for _ in range(5):
        await asyncio.to_thread(int)
        await asyncio.sleep(0.02)


async def refusal(media: Media, pictures: list[Picture], owner: str) -> str:
    """Return the reason why there is no place or memory for pictures now."""
    with pytest.raises(ApiError) as caught:
        await media.prepare(pictures, salt="", owner=owner)
    assert (caught.value.status, caught.value.param) == (429, pictures[0].param)
    assert caught.value.headers == {"Retry-After": "2"}
    return str(caught.value)


async def test_videos_that_wait_leave_room_for_pictures_and_for_other_owners(
    media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media._places["video"], "most", 4)
    ended = list[str]()

    async def ask(seed: int, owner: str) -> None:
        await media.prepare(video(seed), salt="", owner=owner)
        ended.append(owner)

    turns = media._processes["video"]._turns
    for owner in SLOW:  # as videos of many seconds do
        await turns.acquire(owner)
    async with asyncio.TaskGroup() as group:
        for seed in (1, 2):
            group.create_task(ask(seed, "a"))
        await settled()
        assert "of this API key" in await refusal(media, video(3), "a")
        group.create_task(ask(4, "b"))
        await settled()
        assert "of this API key" in await refusal(media, video(5), "b")
        group.create_task(ask(6, "c"))
        await settled()
        assert "wait already" in await refusal(media, video(7), "d")
        assert await media.prepare(IMAGE, salt="", owner="a")
        assert ended == []
        turns.release(SLOW[0])
    media._processes["video"]._turns.release(SLOW[1])
    assert ended == ["a", "b", "c", "a"]


async def test_files_of_videos_that_wait_leave_memory_for_pictures(
    media: Media, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(video_file(moving(4, seed=1)))
    monkeypatch.setattr(media._waiting_videos._shares, "most", 2 * size + size // 2)
    turns = media._processes["video"]._turns
    for owner in SLOW:
        await turns.acquire(owner)
    async with asyncio.TaskGroup() as group:
        for seed in (1, 2):
            group.create_task(media.prepare(video(seed), salt=""))
        await settled()
        assert "all memory" in await refusal(media, video(3), "")
        assert await media.prepare(IMAGE, salt="")
        for owner in SLOW:
            turns.release(owner)
    assert media._waiting_videos.num_bytes == 0


async def test_owners_take_turns_and_one_that_leaves_loses_none() -> None:
    order = list[str]()
    turns = Turns(1)
    await turns.acquire("first")

    async def take(owner: str, number: int) -> None:
        await turns.acquire(owner)
        order.append(f"{owner}{number}")
        turns.release(owner)

    names = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1)]
    tasks = {name: asyncio.create_task(take(*name)) for name in names}
    await asyncio.sleep(0)
    tasks["a", 0].cancel()
    tasks["b", 0].cancel()
    await asyncio.sleep(0)
    turns.release("first")
    tasks["a", 1].cancel()  # which has just been given the slot
    await asyncio.wait(tasks.values())
    await turns.acquire("last")  # no slot was lost
    later = asyncio.create_task(turns.acquire("more"))
    await asyncio.sleep(0)
    assert not later.done()  # and none was made
    later.cancel()
    assert order == ["c0", "a2", "c1"]


async def test_caller_that_leaves_as_a_slot_is_freed_costs_its_owner_no_turn() -> None:
    order = list[str]()
    turns = Turns(1)
    await turns.acquire("first")

    async def take(owner: str, number: int) -> None:
        await turns.acquire(owner)
        order.append(f"{owner}{number}")
        turns.release(owner)

    leaves, *tasks = [asyncio.create_task(take(*name)) for name in (("a", 0), ("a", 1), ("b", 0))]
    await asyncio.sleep(0)
    leaves.cancel()
    turns.release("first")  # before the one that leaves has run
    await asyncio.wait(tasks)
    assert order == ["a1", "b0"]


async def test_server_without_free_descriptors_refuses_pictures_and_loses_no_slot(media: Media) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for _ in range(3):  # more than there are slots
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # the loop has its descriptors
        try:
            assert "too many open files" in await refusal(media, IMAGE, "")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await media.prepare(IMAGE, salt="")
    assert media._processes["image"]._turns._owners.num_used == 0


async def test_files_of_many_requests_are_not_all_in_memory_at_once(
    media: Media, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are counted: a URL of a few bytes may name a large file."""
    (tmp_path / "dog.png").write_bytes(encoded(picture()))
    fetcher = PictureFetcher(hosts=AllowedHosts(()), folder=tmp_path, most_bytes=1 << 20, timeout_s=1.0)
    fetched, keyed, most = list[int](), list[int](), 0
    fetch, key = fetcher.fetch, media_module._key

    async def counted_fetch(given: Picture, owner: str) -> bytes:
        nonlocal most
        data = await fetch(given, owner)
        fetched.append(len(data))
        most = max(most, len(fetched) - len(keyed))
        return data

    def counted_key(data: bytes, given: Picture, salt: str) -> bytes:
        keyed.append(len(data))
        return key(data, given, salt)

    monkeypatch.setattr(fetcher, "fetch", counted_fetch)
    monkeypatch.setattr(media, "_fetcher", fetcher)
    monkeypatch.setattr(media_module, "_key", counted_key)
    pictures = [Picture(f"file://{tmp_path}/dog.png", f"messages[{i}]") for i in range(NUM_FILES)]
    await asyncio.gather(*(media.prepare([replace(each)], salt="") for each in pictures))
    assert len(fetched) == len(keyed) == NUM_FILES
    assert most < NUM_FILES // 2
