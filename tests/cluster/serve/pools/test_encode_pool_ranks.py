"""Pictures and a video encoded by a replica of their own for replicas of two ranks each, divided in different ways."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.picture_server import save_picture_model, undisturbed
from tests.cluster.serve.pools.test_encode_pool import VIDEOS, Chat, chat, new_salt, wait_until_whole

POOLS = (
    {"name": "encode"},
    {"name": "prefill", "tensor_parallel_size": 2},
    {"name": "decode", "pipeline_parallel_size": 2},
)
NUMBERS = (2, 100, VIDEOS[0])  # of chats: small pictures, large ones, a video and a picture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    save_picture_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(ray_cluster: None, model: Path) -> Iterator[str]:
    with pools.deployment(model, POOLS) as address:
        yield address


@pytest.mark.soak  # test_encode_pool has replicas of one rank; tests/workers/replica/ranks has pictures on several
def test_tokens_of_replicas_of_two_ranks_equal_those_of_one_engine(url: str, model: Path) -> None:
    """Twice: the second time pictures and prompts are in caches of all replicas."""
    wanted = asyncio.run(undisturbed(model, pools.local_engine(model), [chat(number) for number in NUMBERS]))
    salt = new_salt()
    for is_cached in (False, True):
        chats = [Chat(url, number, **salt) for number in NUMBERS]
        assert [each.result() for each in chats] == wanted
        assert all(each.encodings() for each in chats) != is_cached
    (rows,) = (value for value in pools.samples(url, "crossdock_items_received_total").values() if value)
    assert rows == 3 + 6 + 2
    wait_until_whole(url, len(POOLS))
