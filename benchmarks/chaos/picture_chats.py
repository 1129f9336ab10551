"""Chats with pictures whose answers are known."""

import asyncio
import random
from pathlib import Path

from conversations import answers_of
from streams import Case, with_answers

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.serve.media import open_media
from tests.cluster.api.media.picture_models import picture
from tests.cluster.serve.pools.picture_server import SIDE, picture_chat

_SIZES = (16, 48, SIDE)  # pixels
_OUTPUTS = (8, 16, 24)


def make_picture_chats(model: Path, count: int, seed: int) -> list[Case]:
    """Return chats with one to three pictures, with the answers of an engine of this process."""
    rng, asked = random.Random(f"pictures {seed}"), list[Case]()
    for number in range(count):
        sides = [rng.choice(_SIZES) for _ in range(rng.choice([1, 1, 2, 3]))]
        images = [picture(side, side, 10 * number + place) for place, side in enumerate(sides)]
        request = picture_chat("look at " * rng.choice([1, 9, 30]), images, rng.choice(_OUTPUTS))
        asked.append(Case(f"with {len(sides)} pictures", request, path="/v1/chat/completions"))
    tokenizer = ModelTokenizer.load(model)
    media = open_media(model, tokenizer, HttpConfig())
    assert media is not None
    try:
        return with_answers(asked, lambda budget: asyncio.run(answers_of(model, tokenizer, asked, budget, media)), 0.9)
    finally:
        media.close()
