"""Pictures from the body of a request to the tokens of an engine: equal to transformers' own, for each family."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ByteSize

from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.serve.media import open_media
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.api.engine_api import all_up
from tests.cluster.api.media.picture_models import MODELS, data_url, encoded, image_part, picture
from tests.cluster.api.media.picture_oracle import built, continuation_of
from tests.cluster.dispatch.in_process import InProcess
from tests.workers.multimodal import CONFIGS

NUM_TOKENS = 5
IMAGES = [picture(40, 30, 1), picture(30, 50, 2)]


async def answered(module: Any, folder: Path, tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    """Return the answers of a server to the same chat, alone and then twice at once."""
    media = open_media(folder, tokenizer, HttpConfig())
    assert media is not None
    config = EngineConfig(kv_cache_memory=ByteSize(4 << 20), max_num_batched_tokens=32, max_num_seqs=8)
    dispatcher, replica = Dispatcher("tiny"), InProcess(engine=Engine(wrap_module(module), config))
    app = build_api(dispatcher, tokenizer, HttpConfig(), media=media)
    parts = [image_part(data_url(encoded(image))) for image in IMAGES]
    text = {"type": "text", "text": " and "}
    body = {
        "messages": [{"role": "user", "content": [parts[0], text, parts[1]]}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
    }
    try:
        dispatcher.join("r0", replica, replica.profile)
        await all_up(dispatcher, 1)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a", timeout=60) as http:
            first = await http.post("/v1/chat/completions", json=body)
            others = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for _ in range(2)))
        answers = [first, *others]
        assert [answer.status_code for answer in answers] == [200] * 3, first.text
        return [answer.json() for answer in answers]
    finally:
        await dispatcher.close()
        await replica.engine_thread.close()
        media.close()


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_after_pictures_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(MODELS[kind].save(tmp_path))
    vocab_size = tokenizer.last_token_id + 1
    answers = asyncio.run(answered(built(kind, tmp_path, vocab_size), tmp_path, tokenizer))
    token_ids = answers[0]["prompt_token_ids"]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(token_ids)] * 3
    oracle = built(kind, tmp_path, vocab_size)
    wanted, logprobs = continuation_of(oracle, tmp_path, token_ids, IMAGES, NUM_TOKENS)
    for answer in answers:
        choice = answer["choices"][0]
        assert choice["token_ids"] == wanted
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-3)
