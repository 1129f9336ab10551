"""A prompt for which the model computes NaN is answered with the documented error, and requests beside it go on."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import ByteSize

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from tests.cluster.api.engine_api import all_up
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess
from tests.cluster.small_tokenizers import TOKENIZERS
from tests.workers.architectures import build

BROKEN = 9  # its embedding is finite, and infinite after the model's own factor; no check at start uses this token


def save(folder: Path) -> None:
    module = build("granite", {"vocab_size": 640, "embedding_multiplier": 12.0})
    with torch.no_grad():
        module.get_input_embeddings().weight[BROKEN] = 3e38
    module.save_pretrained(folder)


async def answers(folder: Path, rounds: list[list[dict[str, Any]]]) -> list[list[httpx.Response]]:
    """Return the answers of one server: each round's requests run at once."""
    config = EngineConfig(
        kv_cache_memory=ByteSize(4 << 20), max_num_batched_tokens=32, max_num_seqs=8, admission="queue"
    )
    engine = new_engine(load_model(ModelSpec(str(folder), "float32")), config)
    dispatcher, replica = Dispatcher("tiny"), InProcess(engine=engine)
    app = one_model_api(dispatcher, ModelTokenizer(TOKENIZERS["byte_level"]()), HttpConfig())
    try:
        dispatcher.join("r0", replica, replica.profile)
        await all_up(dispatcher, 1)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=240) as http:
            return [
                await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies)) for bodies in rounds
            ]
    finally:
        await dispatcher.close()
        await replica.engine_thread.close()


def test_prompt_that_gives_nan_is_answered_with_the_error_and_others_go_on(tmp_path: Path) -> None:
    save(tmp_path)
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    good = [{**asked, "prompt": [*range(40 + 40 * number, 75 + 40 * number)]} for number in (0, 2)]
    bad = {**asked, "prompt": [5, 7, BROKEN, *range(100, 130)]}
    alone, together, after = asyncio.run(answers(tmp_path, [good, [good[0], bad, good[1], bad], good]))
    tokens = [answer.json()["choices"][0]["token_ids"] for answer in alone]
    for failed in (together[1], together[3]):
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "not_finite"
        assert failed.headers["x-should-retry"] == "false"
    for others in ([together[0], together[2]], after):
        assert [answer.json()["choices"][0]["token_ids"] for answer in others] == tokens
