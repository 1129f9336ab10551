"""Pictures and videos from the body of a request to the tokens of an engine: equal to transformers' own."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ByteSize

from crossdock.cluster.api.body.pictures import VideoReading
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.serve.media import open_media
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from tests.cluster.api.engine_api import all_up
from tests.cluster.api.media import video_models
from tests.cluster.api.media.picture_models import MODELS, data_url, encoded, image_part, picture
from tests.cluster.api.media.picture_oracle import built, continuation_of
from tests.cluster.api.media.video_models import moving, their_frames, their_tensors, video_file, video_part
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess
from tests.workers.multimodal import CONFIGS

NUM_TOKENS, SHOWN = 5, 6
IMAGES = [picture(40, 30, 1), picture(30, 50, 2)]
FILES = [video_file(moving(12, seed=1)), video_file(moving(9, 48, 64, seed=2), kind="mov", codec="mpeg4", fps=8)]
USUAL = "qwen3_vl"  # rows are added after several layers, and positions have three axes
HTTP = HttpConfig(limit_mm_per_prompt={"video": 2}, media_io_kwargs={"video": VideoReading(num_frames=SHOWN)})


def usual_first(kinds: Any) -> list[Any]:
    """Return the families as parameters: one at each run of the tests, the others in the soak."""
    return [pytest.param(kind, marks=[pytest.mark.soak] * (kind != USUAL)) for kind in kinds]


async def answered(kind: str, folder: Path, *pairs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the answers of one server to a chat with each pair of parts."""
    tokenizer = ModelTokenizer(MODELS[kind].save(folder))
    media = open_media(folder, tokenizer, HTTP)
    assert media is not None
    module = built(kind, folder, tokenizer.last_token_id + 1)
    config = EngineConfig(
        kv_cache_memory=ByteSize(4 << 20), max_num_batched_tokens=32, max_num_seqs=8, admission="queue"
    )
    dispatcher, replica = Dispatcher("tiny"), InProcess(engine=new_engine(wrap_module(module), config))
    app = one_model_api(dispatcher, tokenizer, HTTP, media=media)
    try:
        dispatcher.join("r0", replica, replica.profile)
        await all_up(dispatcher, 1)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=240
        ) as http:
            return [await alone_and_together(http, *pair) for pair in pairs]
    finally:
        await dispatcher.close()
        await replica.engine_thread.close()
        media.close()


async def alone_and_together(
    http: httpx.AsyncClient, first: dict[str, Any], second: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the answers to the same chat, alone and then three times at once, beside streams of text."""
    body = {
        "messages": [{"role": "user", "content": [first, {"type": "text", "text": " and "}, second]}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
    }
    text = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "ignore_eos": True}
    alone = await http.post("/v1/chat/completions", json=body)
    bodies = [text, body, body, text, body]
    others = await asyncio.gather(*(http.post("/v1/chat/completions", json=each) for each in bodies))
    assert {answer.status_code for answer in (alone, *others)} == {200}, alone.text
    return [alone.json(), *(answer.json() for answer, asked in zip(others, bodies, strict=True) if asked is body)]


def token_ids_of(answers: list[dict[str, Any]]) -> list[int]:
    """Return the prompt of all answers, which count its tokens alike."""
    token_ids: list[int] = answers[0]["prompt_token_ids"]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(token_ids)] * 4
    return token_ids


def check(answers: list[dict[str, Any]], wanted: list[int], logprobs: list[float]) -> None:
    """Check the tokens of all answers, and their log-probabilities."""
    for answer in answers:
        choice = answer["choices"][0]
        assert choice["token_ids"] == wanted
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-3)


@torch.inference_mode()
def continuation_of_videos(module: Any, kind: str, token_ids: list[int], folder: Path) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their log-probabilities, by one whole pass for each."""
    found = [their_tensors(kind, *their_frames(file, SHOWN, folder))[0] for file in FILES]
    tensors = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    output, logprobs = list[int](), list[float]()
    for _ in range(NUM_TOKENS):
        ids = torch.tensor([[*token_ids, *output]])
        if kind.startswith("qwen"):
            module.model.rope_deltas = None
            tensors["mm_token_type_ids"] = 2 * (ids == module.config.video_token_id).long()
        logits = module(input_ids=ids, **tensors, use_cache=False).logits[0, -1].log_softmax(-1)
        output.append(int(logits.argmax()))
        logprobs.append(float(logits.max()))
    return output, logprobs


@pytest.mark.parametrize("kind", usual_first(CONFIGS))
def test_tokens_after_pictures_and_videos_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    pairs = [[image_part(data_url(encoded(image))) for image in IMAGES]]
    if kind in video_models.FAMILIES:
        pairs.append([video_part(data_url(file, "video/mp4")) for file in FILES])
    pictures, *videos = asyncio.run(answered(kind, tmp_path, *pairs))
    oracle = built(kind, tmp_path, ModelTokenizer(MODELS[kind].save(tmp_path)).last_token_id + 1)
    check(pictures, *continuation_of(oracle, tmp_path, token_ids_of(pictures), IMAGES, NUM_TOKENS))
    for answers in videos:
        check(answers, *continuation_of_videos(oracle, kind, token_ids_of(answers), tmp_path))
