"""Chats with pictures whose answers are known."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize
from streams import MAX_MODEL_LEN, TokenAnswer

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.api.media.picture_models import picture
from tests.cluster.serve.pools.picture_server import SIDE, picture_chat, save_picture_model, undisturbed

_SIZES = (16, 48, SIDE)  # pixels
_OUTPUTS = (8, 16, 24)


@dataclass(frozen=True, slots=True)
class PictureChat:
    """A chat, and the tokens of its answer."""

    question: Mapping[str, Any]
    expected: list[int]
    path: str = "/v1/chat/completions"

    def body(self, rng: random.Random) -> dict[str, Any]:
        """Return the request. Most have a cache of their own, so that their pictures are encoded."""
        body = {**self.question, "model": "tiny", "stream": True}
        body["service_tier"] = rng.choice(["interactive", "standard", "standard", "batch"])
        if rng.random() < 0.7:
            body["cache_salt"] = f"{rng.getrandbits(64):x}"
        return body

    def new_answer(self) -> TokenAnswer:
        return TokenAnswer()

    def difference(self, answer: TokenAnswer, *, is_whole: bool) -> str | None:
        """Return how the tokens differ from the known ones; None: equal, as far as the tokens go."""
        tokens, expected = answer.tokens, self.expected
        is_right = tokens == expected if is_whole else tokens == expected[: len(tokens)]
        return None if is_right else f"wrong tokens {tokens}, not {expected}"

    def __str__(self) -> str:
        content = self.question["messages"][0]["content"]
        return f"a chat with {sum(part['type'] == 'image_url' for part in content)} pictures"


def picture_model(folder: Path, prepare: Callable[[Any], None] | None = None) -> Path:
    """Make a model in a folder that reads pictures. `prepare` changes its tokenizer."""
    folder.mkdir(parents=True)
    save_picture_model(folder, prepare)
    return folder


def make_picture_chats(model: Path, count: int, seed: int) -> list[PictureChat]:
    """Compute the answers beforehand, on engines of this process that nothing disturbs, with chunks of two sizes.

    Chats whose answer depends on the sizes of chunks are left out, as in `make_cases`.
    """
    rng, asked = random.Random(f"pictures {seed}"), list[dict[str, Any]]()
    for number in range(count):
        sides = [rng.choice(_SIZES) for _ in range(rng.choice([1, 1, 2, 3]))]
        images = [picture(side, side, 10 * number + place) for place, side in enumerate(sides)]
        asked.append(picture_chat("look at " * rng.choice([1, 9, 30]), images, rng.choice(_OUTPUTS)))
    torch.set_num_threads(1)  # a second thread would spin and take the core from other processes
    answers = [asyncio.run(undisturbed(model, _engine(model, budget), asked)) for budget in (512, 96)]
    chats = [PictureChat(body, one) for body, one, other in zip(asked, *answers, strict=True) if one == other]
    if len(chats) < 0.9 * count:
        raise RuntimeError(f"of {count} chats only {len(chats)} have an answer that does not depend on chunks")
    return chats


def _engine(model: Path, budget: int) -> Engine:
    config = EngineConfig(
        kv_cache_memory=ByteSize(256 << 20),
        max_num_batched_tokens=budget,
        admission="queue",
        enable_prefix_caching=False,
    )
    return new_engine(load_model(ModelSpec(str(model), "float32", MAX_MODEL_LEN)), config)
