"""A model of pictures on disk for whole deployments, chats with pictures, and what an undisturbed engine answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.serve.media import open_media
from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.api.media.picture_models import MODELS, data_url, encoded, image_part
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess, serving
from tests.workers.multimodal import CONFIGS

KIND = "qwen3_vl"  # adds embeddings after its first layers too, so that a row is several vectors
SIDE = 128  # pixels; such a picture has 256 rows


def save_picture_model(folder: Path, prepare: Callable[[Any], None] | None = None) -> None:
    """Write a random Qwen3-VL whose encoder takes longer than its decoder: about 0.2 s for a large picture.

    `prepare`: changes the tokenizer, which is then saved again.
    """
    tokenizer = MODELS[KIND].save(folder)
    if prepare is not None:
        prepare(tokenizer)
        tokenizer.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    placeholders = {name: saved[name] for name in ("image_token_id", "video_token_id")}
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["size"] = {"shortest_edge": 16 * 16, "longest_edge": SIDE * SIDE}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    text = {**CONFIGS[KIND]["text_config"], **sizes, "eos_token_id": tokenizer.eos_token_id}
    vision = {**CONFIGS[KIND]["vision_config"], "depth": 6, "hidden_size": 256, "intermediate_size": 1024}
    settings = {**CONFIGS[KIND], **placeholders, "text_config": text, "vision_config": vision}
    torch.manual_seed(0)
    module = AutoModelForImageTextToText.from_config(AutoConfig.for_model(KIND, **settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # random weights of 0.02 give pictures that hardly matter
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    module.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def picture_chat(text: str, images: Sequence[Image.Image], num_tokens: int) -> dict[str, Any]:
    """Return the body of a chat with pictures between words. Sampled: greedy tokens of a random model hardly vary."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for place, image in enumerate(images):
        content += [image_part(data_url(encoded(image))), {"type": "text", "text": f" and {place} "}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": num_tokens, "temperature": 1.0}
    return body | {"seed": 7, "ignore_eos": True, "return_token_ids": True}


async def undisturbed(model: Path, engine: Engine, bodies: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the tokens that an engine of the model in this process answers to each chat, one after the other."""
    tokenizer = ModelTokenizer(AutoTokenizer.from_pretrained(model))
    media = open_media(model, tokenizer, HttpConfig())
    assert media is not None
    with closing(media):
        async with serving(Dispatcher("tiny"), one=InProcess(engine=engine)) as dispatcher:
            app = httpx.ASGITransport(one_model_api(dispatcher, tokenizer, HttpConfig(), media=media))
            async with httpx.AsyncClient(transport=app, base_url="http://localhost", timeout=240) as http:
                answers = [await http.post("/v1/chat/completions", json=dict(body)) for body in bodies]
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return [answer.json()["choices"][0]["token_ids"] for answer in answers]
