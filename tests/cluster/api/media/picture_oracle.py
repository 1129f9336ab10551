"""Ask transformers what follows a chat with pictures: the ids of the prompt, and the tokens of a random model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.media.families import read_family
from crossdock.cluster.api.media.media import Place
from crossdock.cluster.api.media.preparation import Preparation, VideoPreparation
from crossdock.cluster.api.media.processes import ReadyPicture, as_ready
from crossdock.cluster.api.media.video_families import read_video_family
from tests.cluster.api.media.picture_models import MODELS
from tests.workers.multimodal import CONFIGS


def built(kind: str, folder: Path, vocab_size: int) -> Any:
    """Return a random model of a family, whose image tokens have the ids of the configuration in a directory."""
    ids = json.loads((folder / "config.json").read_text())
    settings = {"model_type": kind, **CONFIGS[kind]}
    settings |= {name: token_id for name, token_id in ids.items() if name.startswith(("image_token", "video_token"))}
    settings["text_config"] = {**settings["text_config"], "vocab_size": vocab_size}
    torch.manual_seed(0)
    module = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**settings), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # random weights of 0.02 give pictures that hardly matter
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return module


def prompt_of(
    kind: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[Image.Image],
) -> tuple[list[int], list[Mapping[str, Any]]]:
    """Return the ids of a chat's prompt, and the outputs of the image processor for each of its pictures.

    `messages` are those of OpenAI's chats: the parts of type `image_url` stand for `images`, in order.
    """
    model = MODELS[kind]
    seen = [{**message, "content": _shown(message["content"])} for message in messages]
    text = str(tokenizer.apply_chat_template(seen, tokenize=False, add_generation_prompt=True))
    token = "<start_of_image>" if kind == "gemma3" else model.tokens[-1 if kind.startswith("qwen") else 0]
    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    found = [processor(image, return_tensors="np", **(model.arguments or {})) for image in images]
    for outputs in found:
        text = text.replace(token, model.expand(outputs, 0).replace(token, "\0"), 1)
    return tokenizer.encode(text.replace("\0", token), add_special_tokens=False), found


def _shown(content: str | Sequence[Mapping[str, Any]]) -> Any:
    """Return the content of a message as templates read it."""
    if isinstance(content, str):
        return content
    return [{**part, "type": "image"} if part["type"] == "image_url" else part for part in content]


@torch.inference_mode()
def continuation_of(
    module: Any, folder: Path, token_ids: Sequence[int], images: Sequence[Image.Image], num_tokens: int
) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their log-probabilities, with all pictures processed together."""
    processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
    kind = module.config.model_type
    given: Any = [list(images)] if kind in ("smolvlm", "idefics3") else list(images)
    outputs = processor(given, return_tensors="pt", **(MODELS[kind].arguments or {}))
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    tensors.pop("num_patches", None)
    placeholder = getattr(module.config, "image_token_id", None) or module.config.image_token_index
    output: list[int] = []
    logprobs: list[float] = []
    for _ in range(num_tokens):
        ids = torch.tensor([[*token_ids, *output]])
        if kind.startswith("qwen"):
            module.model.rope_deltas = None
            tensors["mm_token_type_ids"] = (ids == placeholder).long()
        if kind == "gemma3":  # whose mask needs to know which tokens are pictures
            tensors["token_type_ids"] = (ids == placeholder).long()
        found = module(input_ids=ids, **tensors, use_cache=False).logits[0, -1].log_softmax(-1)
        output.append(int(found.argmax()))
        logprobs.append(float(found.max()))
    return output, logprobs


class PreparedHere:
    """Media whose pictures and videos are prepared in this process, where the oracle runs as well."""

    def __init__(self, folder: Path, names: dict[int, str], files: dict[str, bytes], num_frames: int = 0) -> None:
        """`files`: by their URLs. `num_frames`: shown of each video; 0: pictures alone."""
        settings = {"folder": str(folder), "names": {str(key): name for key, name in names.items()}, "arguments": {}}
        settings["most_pixels"] = 1 << 20
        families = {"image": read_family(folder, names)}
        self._prepare: dict[str, Any] = {"image": Preparation(settings)}
        if num_frames:
            families["video"] = read_video_family(folder, names, {}).family
            sampling = {"num_frames": num_frames, "fps": None}
            self._prepare["video"] = VideoPreparation({**settings, "sampling": sampling})
        self.places = {
            kind: Place(each.written, each.placeholder, each.placeholder_id) for kind, each in families.items()
        }
        self.placeholders = {kind: place.token_id for kind, place in self.places.items()}
        assert all(each.tried() == {"is_ready": True, "passed_over": []} for each in self._prepare.values())
        self._files = files

    def check(self, pictures: list[Picture]) -> None:
        """Accept all."""

    async def prepare(
        self, pictures: list[Picture], most_embedding_tokens: int | None, *, salt: str, owner: str
    ) -> list[ReadyPicture]:
        asked = [(each, {"data": self._files[each.url], "detail": each.detail}) for each in pictures]
        answers = [self._prepare[each.kind](given) for each, given in asked]
        return [as_ready(each) for each in answers]
