"""Clients that leave, and API keys beside each other: real requests, real processes, a host that answers late."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.cluster.api.media.hostile_scene import HostileScene, hostile_scene
from tests.cluster.api.media.picture_models import data_url, image_part
from tests.cluster.api.media.video_models import long_file, moving, video_file, video_part
from tests.cluster.api.scripted_api import refused
from tests.waiting import eventually

KEYS = ("a", "b", "c")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileScene]:
    root = tmp_path_factory.mktemp("leaving")
    with hostile_scene(root, timeout_s=100.0, most_bytes=8 << 20, keys=KEYS) as scene:
        yield scene


@pytest.fixture(autouse=True)
def _nothing_is_left(scene: HostileScene) -> Iterator[None]:
    yield
    scene.host.opens.set()
    eventually(lambda: not is_busy(scene))
    scene.host.opens.clear()


def is_busy(scene: HostileScene) -> bool:
    """Return whether any request has a child, a slot, a place or bytes of a file."""
    media = scene.media
    fetches, files = media._fetcher._turns._owners, media._fetcher._file_turns._owners
    slots = [processes._turns._owners for processes in media._processes.values()]
    counts = [each.num_used for each in (fetches, files, *slots, *media._places.values())]
    return any(counts) or media._waiting_videos.num_bytes > 0 or bool(children(scene)) or bool(media._running)


def children(scene: HostileScene) -> list[psutil.Process]:
    return [child for pid in scene.media._processes["video"].pids for child in psutil.Process(pid).children()]


def stopped_child(scene: HostileScene) -> psutil.Process:
    """Return the child that decodes a video, stopped: from now on only a signal that kills ends it."""
    (child,) = eventually(lambda: children(scene))
    child.suspend()
    return child


def long_video(scene: HostileScene, number: int) -> dict[str, Any]:
    """Return the part of a long video, another one for each number: none is found processed."""
    path = scene.root / "pictures" / f"{number}.avi"
    path.write_bytes(long_file(5_000 + number))
    return video_part(f"file://{path}")


def short_video(seed: int) -> dict[str, Any]:
    return video_part(data_url(video_file(moving(4, seed=seed)), "video/mp4"))


@contextmanager
def connection(scene: HostileScene, key: str, *parts: dict[str, Any]) -> Iterator[None]:
    """Send a request, and leave at the end."""
    url = urlsplit(str(scene.http.base_url))
    body = json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 2})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.hostname or "", url.port or 0)) as wire:
        wire.sendall((head + body).encode())
        yield


def test_client_that_leaves_ends_the_decoding_of_its_video(scene: HostileScene) -> None:
    pids = scene.media.pids
    with connection(scene, "a", long_video(scene, 1)):
        child = stopped_child(scene)
        assert is_busy(scene)
    eventually(lambda: not child.is_running())
    eventually(lambda: not is_busy(scene))
    assert scene.ask(short_video(1), key="a").status_code == 200
    assert scene.media.pids == pids  # the process has not ended: it would take seconds to start


def test_video_that_two_clients_wait_for_is_decoded_for_the_one_that_stays(scene: HostileScene) -> None:
    video = long_video(scene, 2)
    with ThreadPoolExecutor(1) as pool:
        with connection(scene, "a", video):
            child = stopped_child(scene)
            stays = pool.submit(scene.ask, video, key="a")
            eventually(lambda: [work.num_waiting for work in scene.media._running.values()] == [2])
        eventually(lambda: [work.num_waiting for work in scene.media._running.values()] == [1])
        child.resume()
        assert stays.result().status_code == 200


def test_refusal_of_another_part_ends_the_decoding_of_a_video(scene: HostileScene) -> None:
    late = image_part(scene.url("http://pictures.example:HOST/held?status=404"))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(scene.ask, long_video(scene, 3), late, key="a")
        child = stopped_child(scene)
        scene.host.opens.set()
        error = refused(asked.result(), 400, param="messages[0].content[2]")
    assert "status 404" in error["message"]
    eventually(lambda: not child.is_running())


def test_client_that_leaves_ends_its_fetch(scene: HostileScene) -> None:
    before = len(scene.host.requests)
    with connection(scene, "a", image_part(scene.url("http://pictures.example:HOST/held"))):
        eventually(lambda: len(scene.host.requests) > before)
        assert scene.media._fetcher._turns._owners.num_used == 1
    eventually(lambda: not is_busy(scene))


def asked(pool: ThreadPoolExecutor, scene: HostileScene, key: str, path: str, num: int) -> list[Future[httpx.Response]]:
    """Send requests with one picture of a host each, and return their answers to come."""
    urls = (scene.url(f"http://{path}?n={i}&of={key}") for i in range(num))
    return [pool.submit(scene.ask, image_part(url), key=key) for url in urls]


def test_slow_host_delays_neither_other_hosts_nor_other_keys(scene: HostileScene) -> None:
    turns = scene.media._fetcher._turns
    with ThreadPoolExecutor(60) as pool:
        slow = asked(pool, scene, "a", "pictures.example:HOST/held", 20)
        eventually(lambda: turns._owners.num_used == 8)
        others = asked(pool, scene, "a", "a.cdn.example:HOST/dog.png", 4)
        others += asked(pool, scene, "b", "pictures.example:HOST/dog.png", 4)
        assert [each.result().status_code for each in others] == [200] * 8
        slow += asked(pool, scene, "b", "pictures.example:HOST/held", 20)
        assert scene.ask(image_part(scene.url("http://pictures.example:HOST/dog.png")), key="c").status_code == 200
        assert not wait(slow, timeout=0).done
        scene.host.opens.set()
        assert {each.result().status_code for each in slow} == {200}  # none was lost
