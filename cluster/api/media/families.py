"""How each family of models writes a picture: the tokens that stand for it, around and between its rows.

transformers' processors do the same, but need torch, torchvision or further packages, and this must run without. Tests
compare the two.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeAlias

from crossdock.workers.schedule.pictures.families import PictureFamily, Writing, picture_family

Json: TypeAlias = Mapping[str, Any]
Outputs: TypeAlias = Mapping[str, Any]
"""The outputs of an image processor for one picture, as numpy arrays and lists, by name."""


class NoPictures(ValueError):
    """The model takes no pictures here. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model's way to write a picture."""

    written: str  # what the chat template writes for a picture
    placeholder: str  # the token that stands for one embedding token
    placeholder_id: int
    tensors: tuple[str, ...]  # outputs of the image processor that the encoder reads
    tokens_of: Callable[[Outputs], list[str]]  # what replaces `written`: tokens, and text between them
    arguments: Json = field(default_factory=dict)  # of the image processor's call

    def written_runs(self, outputs: Outputs) -> tuple[str, list[int]]:
        """Return the replacement of `written`, with one placeholder for each run, and the length of each run.

        A run of one special token becomes as many tokens as it is long, whatever stands beside it. So a text with
        single placeholders can be encoded, in a fraction of the time, and each run gets its length afterwards.
        """
        texts = []
        runs = []
        for token, same in groupby(self.tokens_of(outputs)):
            count = len(list(same))
            if token == self.placeholder:
                runs.append(count)
                texts.append(token)
            else:
                texts.append(token * count)
        return "".join(texts), runs


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a model's directory that say how pictures are written."""

    config: Json
    processor: Json  # settings of the processor
    image_processor: Json
    video_processor: Json
    names: Mapping[int, str]  # the text of each added token, by its id

    @classmethod
    def read(cls, folder: Path, names: Mapping[int, str]) -> "Checkpoint":
        """Read the directory's JSON files."""
        processor = _json(folder / "processor_config.json")
        shared = _json(folder / "preprocessor_config.json")
        images = processor.get("image_processor") or shared
        videos = processor.get("video_processor") or _json(folder / "video_preprocessor_config.json") or shared
        return cls(_json(folder / "config.json"), processor, images, videos, names)

    @property
    def family(self) -> PictureFamily:
        """The family of the model. NoPictures: pictures of such a model are not served."""
        try:
            return picture_family(str(self.config.get("model_type")), self.vision.get("model_type"))
        except ValueError as error:
            raise NoPictures(str(error)) from None

    @property
    def placeholder_id(self) -> int:
        """The token that the model replaces by embedding tokens of its encoder."""
        found = self.config.get("image_token_id", self.config.get("image_token_index"))
        if not isinstance(found, int):
            raise NoPictures("its config.json names no image token")
        return found

    @property
    def vision(self) -> Json:
        """The configuration of the encoder."""
        vision: Json = self.config.get("vision_config") or {}
        return vision

    def name(self, token_id: Any) -> str:
        """Return the text of an added token."""
        if token_id not in self.names:
            raise NoPictures(f"its tokenizer has no added token with the id {token_id}")
        return self.names[token_id]

    def known(self, *tokens: str) -> tuple[str, ...]:
        """Return the tokens, all of which the tokenizer must have."""
        missing = [token for token in tokens if token not in self.names.values()]
        if missing:
            raise NoPictures(f"its tokenizer has no added token {missing[0]!r}")
        return tokens


def read_family(folder: Path, names: Mapping[int, str]) -> Family:
    """Return how the model in a directory writes pictures.

    Raises:
        NoPictures: the model reads text alone, or its family is not known here.
    """
    checkpoint = Checkpoint.read(folder, names)
    if "vision_config" not in checkpoint.config:
        raise NoPictures("this model reads text only")
    writing = checkpoint.family.writing
    if not checkpoint.image_processor:
        raise NoPictures("it has no preprocessor_config.json")
    return _WRITINGS[writing](checkpoint)


def _json(file: Path) -> Json:
    found: Json = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _idefics(checkpoint: Checkpoint) -> Family:
    """SmolVLM and Idefics3: a large picture is divided into a grid of tiles, followed by the whole one."""
    image = checkpoint.name(checkpoint.placeholder_id)
    fake, whole = checkpoint.known("<fake_token_around_image>", "<global-img>")
    length = checkpoint.processor.get("image_seq_len", 169)

    def tokens_of(outputs: Outputs) -> list[str]:
        rows = int(outputs["rows"][0][0])
        columns = int(outputs["cols"][0][0])
        tokens: list[str] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                tokens += [fake, f"<row_{row}_col_{column}>", *[image] * length]
            tokens.append("\n")
        return [*tokens, *(["\n"] if rows or columns else []), fake, whole, *[image] * length, fake]

    tensors = ("pixel_values", "pixel_attention_mask")
    return Family(image, image, checkpoint.placeholder_id, tensors, tokens_of, {"return_row_col_info": True})


def _qwen(checkpoint: Checkpoint) -> Family:
    """Qwen2-VL, 2.5 and 3: one token for each square of merged patches."""
    image = checkpoint.name(checkpoint.placeholder_id)
    merged = checkpoint.image_processor.get("merge_size", 2) ** 2

    def tokens_of(outputs: Outputs) -> list[str]:
        return [image] * (int(outputs["image_grid_thw"][0].prod()) // merged)

    return Family(image, image, checkpoint.placeholder_id, ("pixel_values", "image_grid_thw"), tokens_of)


def _llava(checkpoint: Checkpoint) -> Family:
    image = checkpoint.name(checkpoint.placeholder_id)
    settings = checkpoint.processor
    patch = settings.get("patch_size") or checkpoint.vision["patch_size"]
    strategy = settings.get("vision_feature_select_strategy") or checkpoint.config.get("vision_feature_select_strategy")
    others = settings.get("num_additional_image_tokens", 1 if "patch_size" not in settings else 0)
    others -= strategy == "default"  # without the encoder's class token

    def tokens_of(outputs: Outputs) -> list[str]:
        height, width = outputs["pixel_values"].shape[-2:]
        return [image] * ((height // patch) * (width // patch) + others)

    return Family(image, image, checkpoint.placeholder_id, ("pixel_values",), tokens_of)


def _pixtral(checkpoint: Checkpoint) -> Family:
    """Pixtral and Mistral 3: a token ends each row of patches, and another the picture."""
    image = checkpoint.name(checkpoint.placeholder_id)
    settings = checkpoint.processor
    between, end = checkpoint.known(
        settings.get("image_break_token", "[IMG_BREAK]"), settings.get("image_end_token", "[IMG_END]")
    )
    patch = settings.get("patch_size") or checkpoint.vision["patch_size"]
    patch *= settings.get("spatial_merge_size") or checkpoint.config.get("spatial_merge_size", 1)

    def tokens_of(outputs: Outputs) -> list[str]:
        height, width = (int(size) // patch for size in outputs["image_sizes"][0])
        rows = [[*[image] * width, between] for _ in range(height)]
        return [*[*chain.from_iterable(rows)][:-1], end]

    tensors = ("pixel_values", "image_sizes")
    return Family(image, image, checkpoint.placeholder_id, tensors, tokens_of, {"patch_size": patch})


def _gemma(checkpoint: Checkpoint) -> Family:
    """Gemma 3: as many tokens for every picture, between a beginning and an end."""
    image = checkpoint.name(checkpoint.placeholder_id)
    config = checkpoint.config
    begin, end = (checkpoint.name(config.get(f"{name}_token_id", config.get(f"{name}_token_index"))) for name in _ENDS)
    length = checkpoint.processor.get("image_seq_length", config.get("mm_tokens_per_image", 256))

    def tokens_of(outputs: Outputs) -> list[str]:
        return ["\n\n", begin, *[image] * length, end, "\n\n"]

    arguments = {"do_convert_rgb": True, "do_pan_and_scan": False}
    return Family(begin, image, checkpoint.placeholder_id, ("pixel_values",), tokens_of, arguments)


_ENDS = ("boi", "eoi")  # beginning and end of an image, in Gemma's configuration


def _internvl(checkpoint: Checkpoint) -> Family:
    """InternVL: as many tokens for each tile of a picture, between a beginning and an end."""
    image = checkpoint.name(checkpoint.placeholder_id)
    begin, end = checkpoint.known("<img>", "</img>")
    length = checkpoint.processor.get("image_seq_length", checkpoint.config.get("image_seq_length", 256))

    def tokens_of(outputs: Outputs) -> list[str]:
        return [begin, *[image] * (length * len(outputs["pixel_values"])), end]

    return Family(image, image, checkpoint.placeholder_id, ("pixel_values",), tokens_of, {"crop_to_patches": True})


_WRITINGS: Mapping[Writing, Callable[[Checkpoint], Family]] = {
    "gemma": _gemma,
    "idefics": _idefics,
    "internvl": _internvl,
    "llava": _llava,
    "pixtral": _pixtral,
    "qwen": _qwen,
}
