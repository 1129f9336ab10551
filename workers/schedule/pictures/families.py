"""Families of models whose pictures are served: one record for the ingress, which writes prompts, and for the replica.

Each family was compared with transformers' own pass, chunk by chunk. To serve another one, add its record here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Writing: TypeAlias = Literal["gemma", "idefics", "internvl", "llava", "pixtral", "qwen"]
VideoWriting: TypeAlias = Literal["internvl", "qwen2", "qwen3", "smolvlm"]


@dataclass(frozen=True, slots=True)
class PictureFamily:
    """A family of models that read pictures."""

    writing: Writing  # how the prompt stands for a picture
    video: VideoWriting | None = None  # how the prompt stands for a video; None: the models see none
    pixels: Literal["patches", "pictures", "tiles"] = "pictures"  # [N, depth], [N, 3, H, W] or [prompts, N, 3, H, W]
    attends_both_ways: bool = False  # a row of a picture sees later rows of that picture too, in every layer
    has_seconds: bool = False  # the positions of a video are in seconds


_PIXTRAL = PictureFamily("pixtral")
_QWEN3 = PictureFamily("qwen", "qwen3", "patches")
PICTURE_FAMILIES: Mapping[str, PictureFamily] = {  # by the model's type
    "gemma3": PictureFamily("gemma", attends_both_ways=True),
    "idefics3": PictureFamily("idefics", pixels="tiles"),
    "internvl": PictureFamily("internvl", "internvl"),
    "llava": PictureFamily("llava"),
    "mistral3": _PIXTRAL,
    "qwen2_5_vl": PictureFamily("qwen", "qwen2", "patches", has_seconds=True),
    "qwen2_vl": PictureFamily("qwen", "qwen2", "patches"),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": PictureFamily("idefics", "smolvlm", "tiles"),
}
_WHOLE_PROMPT = {"paligemma"}  # every token of the prompt sees all others, so that no prefix of it can be shared


def picture_family(model_type: str, encoder_type: str | None) -> PictureFamily:
    """Return the family of a model. `encoder_type`: the type of its encoder of pictures, as its configuration says.

    Raises:
        ValueError: pictures of such a model are not served. The message gives the reason.
    """
    if model_type == "llava" and encoder_type == "pixtral":
        return _PIXTRAL
    if model_type in _WHOLE_PROMPT:
        raise ValueError(
            f"{model_type} attends in both directions over the whole prompt, which chunks and prefixes cannot"
        )
    if model_type not in PICTURE_FAMILIES:
        raise ValueError(f"pictures of {model_type} are not supported; supported are {', '.join(PICTURE_FAMILIES)}")
    return PICTURE_FAMILIES[model_type]
