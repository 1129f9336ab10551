"""A server for clients that send pictures: a tiny random Qwen2-VL in a real engine, and what transformers answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ByteSize
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.serve.media import open_media
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.api.engine_api import all_up
from tests.cluster.api.media.picture_models import MODELS, data_url, encoded, image_part, picture
from tests.cluster.api.media.picture_oracle import built, continuation_of, prompt_of
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess
from tests.cluster.ports import free_port

KIND = "qwen2_vl"
IMAGES = (picture(40, 30, 1), picture(30, 50, 2))
BETWEEN = " and "  # the text between the pictures
NUM_TOKENS = 8  # that clients ask for


@dataclass(frozen=True, slots=True)
class PictureServer:
    """A server that runs. `expected`: its address, the pictures and transformers' answer, as JSON for the clients."""

    expected: str
    engine: Engine

    def num_encoded(self) -> int:
        """Return how many pictures the engine has encoded."""
        return self.engine.scheduler.encoding.totals.num_encoded


@asynccontextmanager
async def picture_server(folder: Path, key: str) -> AsyncIterator[PictureServer]:
    """Serve the model, whose files are written to a folder, on a port of its own.

    Its prefix cache is off, so every prompt needs the embeddings of all its pictures.
    """
    torch.set_num_threads(1)  # clients and other programs run beside so small a model
    theirs = MODELS[KIND].save(folder)
    tokenizer = ModelTokenizer(theirs)
    config = EngineConfig(kv_cache_memory=ByteSize(4 << 20), max_num_batched_tokens=32, enable_prefix_caching=False)
    engine = new_engine(wrap_module(_model(folder, theirs)), config)
    http = HttpConfig.model_validate({"api_keys": [key]})
    media = open_media(folder, tokenizer, http)
    assert media is not None
    dispatcher, replica, port = Dispatcher("tiny"), InProcess(engine=engine), free_port()
    listener = await listen(one_model_api(dispatcher, tokenizer, http, media=media), "127.0.0.1", port)
    try:
        dispatcher.join("r0", replica, replica.profile)
        await all_up(dispatcher, 1)
        expected = await asyncio.to_thread(expected_of, folder, theirs, f"http://127.0.0.1:{port}")
        yield PictureServer(expected, engine)
    finally:
        await listener.close(5)
        await dispatcher.close()
        await replica.engine_thread.close()
        media.close()


def expected_of(folder: Path, tokenizer: PreTrainedTokenizerFast, url: str) -> str:
    """Return the pictures that clients send, and the answers that they must receive: transformers' own."""
    images = [data_url(encoded(image)) for image in IMAGES]
    parts = [image_part(images[0]), {"type": "text", "text": BETWEEN}, image_part(images[1])]
    prompt, _ = prompt_of(KIND, folder, tokenizer, [{"role": "user", "content": parts}], IMAGES)
    token_ids, _ = continuation_of(_model(folder, tokenizer), folder, prompt, IMAGES, NUM_TOKENS)
    without, _ = prompt_of(KIND, folder, tokenizer, [{"role": "user", "content": BETWEEN}], [])
    return json.dumps(
        {
            "url": url,
            "images": images,
            "between": BETWEEN,
            "prompt_tokens": len(prompt),
            "prompt_tokens_without": len(without),
            "num_tokens": NUM_TOKENS,
            "text": tokenizer.decode(token_ids, skip_special_tokens=True),
        }
    )


def _model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return the random model. It writes printable ASCII alone: bytes that are no text would hide its tokens."""
    module = built(KIND, folder, len(tokenizer))
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id], skip_special_tokens=True)
        if not (text.isascii() and text.isprintable() and text.strip()):
            module.lm_head.weight.data[token_id] = 0.0
    return module
