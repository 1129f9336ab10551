"""Directories of tiny models that read pictures, one for each family, and transformers' own text for a picture."""

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from crossdock.cluster.api.media.media import Media, MediaLimits, PictureMetrics
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.small_tokenizers import byte_level

# Shows text alone where content is a string, and pictures where it is a list of parts.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}WRITTEN{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MEAN = [0.5, 0.4, 0.3]
_STD = [0.5, 0.6, 0.7]
_COMMON = {"image_mean": _MEAN, "image_std": _STD, "do_normalize": True, "do_rescale": True}


@dataclass(frozen=True)
class PictureModel:
    """The files of a tiny model, and what transformers would do with a picture."""

    config: Mapping[str, Any]  # token ids are given by the token's text, and written as ids
    processor: Mapping[str, Any]
    image_processor: Mapping[str, Any]
    tokens: tuple[str, ...]  # added to the vocabulary
    written: str
    expand: Callable[[Mapping[str, Any], int], str]  # transformers' own: outputs and index of a picture → its text
    arguments: Mapping[str, Any] | None = None  # that transformers' processor gives to the image processor
    video_written: str = "<video>"
    video_processor: Mapping[str, Any] | None = None

    def save(self, folder: Path) -> PreTrainedTokenizerFast:
        """Write the files into a directory, and return its tokenizer."""
        tokenizer = byte_level()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.tokens)})
        tokenizer.chat_template = TEMPLATE.replace("WRITTEN", self.written).replace("VIDEO", self.video_written)
        tokenizer.save_pretrained(folder)
        ids = {
            name: tokenizer.convert_tokens_to_ids(value) if "token" in name and isinstance(value, str) else value
            for name, value in self.config.items()
        }
        (folder / "config.json").write_text(json.dumps(ids))
        (folder / "preprocessor_config.json").write_text(json.dumps(dict(self.image_processor)))
        (folder / "processor_config.json").write_text(json.dumps(dict(self.processor)))
        if self.video_processor is not None:
            (folder / "video_preprocessor_config.json").write_text(json.dumps(dict(self.video_processor)))
        return tokenizer


def _unbuilt(processor: Any, **attributes: Any) -> Callable[[Mapping[str, Any], int], str]:
    """Return a processor's own way to write a picture. Its constructor may need packages that are not here."""
    fields = SimpleNamespace(**attributes)
    return lambda outputs, index: str(processor.replace_image_token(fields, outputs, index))


def _idefics(kind: str, processor: Any) -> PictureModel:
    tiles = (f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", *tiles)
    return PictureModel(
        {"model_type": kind, "image_token_id": "<image>", "vision_config": {"patch_size": 8}},
        {"image_seq_len": 4},
        {
            "image_processor_type": "SmolVLMImageProcessor" if kind == "smolvlm" else "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            **_COMMON,
        },
        tokens,
        "<image>",
        _unbuilt(
            processor,
            image_seq_len=4,
            fake_image_token=tokens[1],
            image_token="<image>",
            global_image_token=tokens[2],
            global_image_tag=tokens[2],
        ),
        {"return_row_col_info": True},
        video_processor={
            "video_sampling": {"video_size": {"longest_edge": 48}},
            "max_image_size": {"longest_edge": 32},
            "image_mean": _STD,
            "image_std": _MEAN,
        },
    )


def _qwen(kind: str, processor: Any) -> PictureModel:
    return PictureModel(
        {
            "model_type": kind,
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_config": {},
        },
        {},
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            **_COMMON,
        },
        ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        _unbuilt(processor, image_token="<|image_pad|>", image_processor=SimpleNamespace(merge_size=2)),
        video_written="<|vision_start|><|video_pad|><|vision_end|>",
        video_processor={
            "size": {"shortest_edge": 16 * 16, "longest_edge": (8 if kind.startswith("qwen3") else 1) * 40 * 40},
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": _STD,
            "image_std": _MEAN,
        },
    )


def _pixtral_text(outputs: Mapping[str, Any], index: int, side: int) -> str:
    """Do the same as PixtralProcessor, which cannot be imported without torchvision."""
    height, width = outputs["image_sizes"][index]
    tokens = [["[IMG]"] * (width // side) + ["[IMG_BREAK]"]] * (height // side)
    flat = [token for row in tokens for token in row]
    flat[-1] = "[IMG_END]"
    return "".join(flat)


def _pixtral(kind: str, merged: int) -> PictureModel:
    return PictureModel(
        {"model_type": kind, "image_token_index": "[IMG]", "vision_config": {"model_type": "pixtral", "patch_size": 8}},
        {"patch_size": 8, "spatial_merge_size": merged},
        {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 48},
            "patch_size": {"height": 8, "width": 8},
            **_COMMON,
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        partial(_pixtral_text, side=8 * merged),
        {"patch_size": 8 * merged},
    )


MODELS: Mapping[str, PictureModel] = {
    "smolvlm": _idefics("smolvlm", SmolVLMProcessor),
    "idefics3": _idefics("idefics3", Idefics3Processor),
    "qwen2_vl": _qwen("qwen2_vl", Qwen2VLProcessor),
    "qwen2_5_vl": _qwen("qwen2_5_vl", Qwen2VLProcessor),
    "qwen3_vl": _qwen("qwen3_vl", Qwen3VLProcessor),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", Qwen3VLProcessor),
    "llava": PictureModel(
        {"model_type": "llava", "image_token_index": "<image>", "vision_config": {"model_type": "clip_vision_model"}},
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            **_COMMON,
        },
        ("<image>",),
        "<image>",
        _unbuilt(
            LlavaProcessor,
            patch_size=8,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
            image_token="<image>",
        ),
    ),
    "pixtral": _pixtral("llava", 1),
    "mistral3": _pixtral("mistral3", 2),
    "gemma3": PictureModel(
        {
            "model_type": "gemma3",
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "mm_tokens_per_image": 16,
            "vision_config": {},
        },
        {"image_seq_length": 16},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}, **_COMMON},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        "<start_of_image>",
        _unbuilt(
            Gemma3Processor,
            full_image_sequence="\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n",
        ),
        {"do_convert_rgb": True, "do_pan_and_scan": False},
    ),
    "internvl": PictureModel(
        {"model_type": "internvl", "image_token_id": "<IMG_CONTEXT>", "vision_config": {}},
        {"image_seq_length": 4},
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "min_patches": 1,
            "max_patches": 4,
            **_COMMON,
        },
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        "<IMG_CONTEXT>",
        _unbuilt(
            InternVLProcessor,
            image_seq_length=4,
            start_image_token="<img>",
            end_image_token="</img>",
            image_token="<IMG_CONTEXT>",
        ),
        {"crop_to_patches": True},
        video_processor={"size": {"height": 32, "width": 32}, "image_mean": _STD, "image_std": _MEAN},
    ),
}


def saved(kind: str, folder: Path) -> tuple[ModelTokenizer, dict[int, str]]:
    """Write a tiny model into a directory. Returns its tokenizer, and the text of each added token by its id."""
    tokenizer = ModelTokenizer(MODELS[kind].save(folder))
    return tokenizer, {token_id: text for text, token_id in tokenizer.added_tokens().items()}


def process_settings(kind: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Write a tiny model into a directory. Returns the settings of the process of its pictures."""
    _, names = saved(kind, folder)
    by_text = {str(token_id): name for token_id, name in names.items()}
    return {"folder": str(folder), "names": by_text, "arguments": arguments, "most_pixels": 1 << 20}


@contextmanager
def opened(folder: Path, limits: MediaLimits, metrics: PictureMetrics | None = None) -> Iterator[Media]:
    """Open the pictures of a tiny model of Qwen2-VL, and of videos if there may be any, until the context ends."""
    media = Media(folder, saved("qwen2_vl", folder)[1], limits, metrics=metrics)
    try:
        media.wait_until_ready()
        yield media
    finally:
        media.close()


def picture(width: int = 40, height: int = 30, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of a picture's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Return the data URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    """Return a part of a chat's message that gives a picture."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}
