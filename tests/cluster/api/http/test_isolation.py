"""A cached prefix is found by the requests that may share it and by no other, through the API and on a real engine."""

from typing import Any

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.engine_api import EngineApi

KEYS = ["a", "b", {"key": "c", "cache_group": "us"}, {"key": "d", "cache_group": "us"}]


async def test_cached_prefix_is_found_by_its_own_key_group_and_salt_alone(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, keys=KEYS, enable_prefix_caching=True) as api:

        async def num_cached(key: str, **fields: Any) -> int:
            answer = await api.ask("standard", key=key, **fields)
            assert answer.status_code == 200, answer.text
            cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        assert await num_cached("a") == 0
        whole = await num_cached("a")
        assert whole > 100
        assert await num_cached("b") == 0, "of another key"
        assert await num_cached("c") == 0, "of a key in no group"
        assert await num_cached("d") == whole, "of another key in the group"
        assert await num_cached("a", cache_salt="x") == 0
        assert await num_cached("a", cache_salt="x") == whole
        assert await num_cached("b", cache_salt="x") == 0
        assert await num_cached("a", cache_salt="us") == 0
        assert await num_cached("d", cache_salt="x") == 0
        assert await num_cached("b") == whole, "its own, which is there as well"


async def test_cached_prefix_without_keys_is_found_with_the_same_salt_alone(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, enable_prefix_caching=True) as api:
        found = []
        for salt in ("", "", "x", "x", ""):
            answer = await api.ask("standard", cache_salt=salt)
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert found == [False, True, False, True, True]
