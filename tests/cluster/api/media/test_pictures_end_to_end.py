"""Pictures from the body of a request to the tokens of an engine: equal to transformers' own, for each family."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ByteSize
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.serve.media import open_media
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine
from tests.cluster.api.engine_api import all_up
from tests.cluster.api.media.picture_models import MODELS, data_url, encoded, image_part, picture
from tests.cluster.dispatch.in_process import InProcess
from tests.workers.multimodal import CONFIGS

NUM_TOKENS = 5
IMAGES = [picture(40, 30, 1), picture(30, 50, 2)]


def built(kind: str, ids: dict[str, Any], vocab_size: int) -> Any:
    """Return a random model of a family, whose image tokens have the ids of a tokenizer."""
    settings = {"model_type": kind, **CONFIGS[kind]}
    settings |= {name: token_id for name, token_id in ids.items() if name.startswith("image_token")}
    settings["text_config"] = {**settings["text_config"], "vocab_size": vocab_size}
    torch.manual_seed(0)
    module = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # random weights of 0.02 give pictures that hardly matter
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return module


@torch.inference_mode()
def expected(
    module: Any, folder: Path, token_ids: list[int], arguments: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their log-probabilities, with all pictures processed together."""
    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    kind = module.config.model_type
    images: Any = [IMAGES] if kind in ("smolvlm", "idefics3") else IMAGES
    outputs = processor(images, return_tensors="pt", **arguments)
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    tensors.pop("num_patches", None)
    placeholder = getattr(module.config, "image_token_id", None) or module.config.image_token_index
    output: list[int] = []
    logprobs: list[float] = []
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([[*token_ids, *output]])
        if kind.startswith("qwen"):
            module.model.rope_deltas = None
            tensors["mm_token_type_ids"] = (ids == placeholder).long()
        found = module(input_ids=ids, **tensors, use_cache=False).logits[0, -1].log_softmax(-1)
        output.append(int(found.argmax()))
        logprobs.append(float(found.max()))
    return output, logprobs


async def answered(module: Any, folder: Path, tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    """Return the answers of a server to the same chat, alone and then twice at once."""
    media = open_media(folder, tokenizer, HttpConfig())
    assert media is not None
    config = EngineConfig(kv_cache_memory=ByteSize(4 << 20), max_num_batched_tokens=32)
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
    model = MODELS[kind]
    tokenizer = ModelTokenizer(model.save(tmp_path))
    vocab_size = tokenizer.last_token_id + 1
    module = built(kind, json.loads((tmp_path / "config.json").read_text()), vocab_size)
    answers = asyncio.run(answered(module, tmp_path, tokenizer))
    token_ids = answers[0]["prompt_token_ids"]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(token_ids)] * 3
    oracle = built(kind, json.loads((tmp_path / "config.json").read_text()), vocab_size)
    wanted, logprobs = expected(oracle, tmp_path, token_ids, {**(model.arguments or {})})
    for answer in answers:
        choice = answer["choices"][0]
        assert choice["token_ids"] == wanted
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-3)
