"""How each family of models sees a video: the size of its frames, their tensors, and the tokens that stand for them.

transformers' own processors of videos need torch and torchvision, and this must run without. So a model's processor of
pictures prepares each frame, and the frames are joined here. Tests compare the two.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crossdock.cluster.api.media.families import Checkpoint, Family, Json, NoPictures, Outputs
from crossdock.workers.schedule.pictures.families import PICTURE_FAMILIES, VideoWriting

if TYPE_CHECKING:
    from crossdock.cluster.api.media.clips import Clip, Resize

_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]  # of transformers' classes, where a file names none
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_ASPECT = 200  # longest side of a frame over its shortest, at most
_BICUBIC = 3  # of Pillow's filters


@dataclass(frozen=True, slots=True)
class VideoFamily:
    """A model's way to see a video."""

    family: Family  # its `arguments` are those for one frame
    kind: str  # of the item: `image` where the encoder takes frames as it takes the tiles of a picture
    resize: "Resize"
    resample: int  # Pillow's filter
    join: "Callable[[Sequence[Outputs], Clip], dict[str, Any]]"  # outputs for all frames → tensors of the video


def read_video_family(folder: Path, names: Mapping[int, str], arguments: Json) -> VideoFamily:
    """Return how the model in a directory sees videos.

    Args:
        folder: directory of the model.
        names: the text of each token that was added to the vocabulary, by its id.
        arguments: of the image processor, as the configuration gives them.

    Raises:
        NoPictures: the model sees no videos, or its family is not known here.
    """
    checkpoint = Checkpoint.read(folder, names)
    writing = checkpoint.family.video
    if writing is None:
        kind = checkpoint.config.get("model_type")
        known = (name for name, own in PICTURE_FAMILIES.items() if own.video)
        raise NoPictures(f"videos of models of the type {kind} are not supported; {', '.join(known)} see videos")
    settings = {**checkpoint.video_processor, **{name: arguments[name] for name in _OF_FRAMES if name in arguments}}
    return _WRITINGS[writing](checkpoint, settings)


_OF_FRAMES = ("size", "min_pixels", "max_pixels", "image_mean", "image_std", "resample")


def _smart_size(
    height: int, width: int, factor: int, least: float, most: float, num_frames: int = 1, depth: int = 1
) -> tuple[int, int]:
    """Return the height and width of frames in multiples of `factor`, for `least` to `most` pixels of all together.

    Frames are compared in whole groups of `depth`, but shrunk and grown by their own number, as the model's own
    processor does.
    """
    if max(height, width) > _ASPECT * min(height, width):
        raise ValueError(f"a side of its frames is more than {_ASPECT} times the other")
    rows, columns = (round(side / factor) * factor for side in (height, width))
    volume = round(num_frames / depth) * depth * rows * columns
    if volume > most:
        shrink = math.sqrt(num_frames * height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif volume < least:
        grow = math.sqrt(least / (num_frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def _qwen2(checkpoint: Checkpoint, settings: Json) -> VideoFamily:
    """Qwen2-VL and 2.5: one token for each square of merged patches of a group of frames."""
    video = checkpoint.name(checkpoint.config.get("video_token_id"))
    has_seconds = checkpoint.family.has_seconds
    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768, **(settings.get("size") or {})}
    least = settings.get("min_pixels") or size["shortest_edge"]
    most = settings.get("max_pixels") or size["longest_edge"]
    patches = _Patches.of(settings, 14)

    def resize(num_frames: int, width: int, height: int) -> tuple[int, int]:
        rows, columns = _smart_size(height, width, patches.side * patches.merged, least, most)
        return columns, rows

    def join(frames: Sequence[Outputs], clip: "Clip") -> dict[str, Any]:
        tensors = patches.join(frames)
        if has_seconds:
            tensors["second_per_grid_ts"] = np.array([patches.depth / clip.shown_fps], np.float32)
        return tensors

    def tokens_of(outputs: Outputs) -> list[str]:
        return [video] * (int(outputs["video_grid_thw"][0].prod()) // patches.merged**2)

    family = Family(video, video, checkpoint.config["video_token_id"], _QWEN_TENSORS, tokens_of)
    return _qwen_family(family, settings, patches, resize, join, (_CLIP_MEAN, _CLIP_STD))


def _qwen3(checkpoint: Checkpoint, settings: Json) -> VideoFamily:
    """Qwen3-VL: the second of each group of frames as text, then its tokens between a beginning and an end."""
    video = checkpoint.name(checkpoint.config.get("video_token_id"))
    begin, end = checkpoint.known("<|vision_start|>", "<|vision_end|>")
    size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768, **(settings.get("size") or {})}
    patches = _Patches.of(settings, 16)

    def resize(num_frames: int, width: int, height: int) -> tuple[int, int]:
        factor = patches.side * patches.merged
        if min(height, width) < factor:
            grow = max(factor / height, factor / width)
            height = int(height * grow)
            width = int(width * grow)
        least = size["shortest_edge"]
        most = size["longest_edge"]
        num_frames = max(num_frames, patches.depth)
        rows, columns = _smart_size(height, width, factor, least, most, num_frames, patches.depth)
        return columns, rows

    def join(frames: Sequence[Outputs], clip: "Clip") -> dict[str, Any]:
        seconds = clip.timestamps
        seconds += seconds[-1:] * (-len(seconds) % patches.depth)
        groups = (seconds[at : at + patches.depth] for at in range(0, len(seconds), patches.depth))
        return {**patches.join(frames), "seconds": [(group[0] + group[-1]) / 2 for group in groups]}

    def tokens_of(outputs: Outputs) -> list[str]:
        rows = int(outputs["video_grid_thw"][0][1:].prod()) // patches.merged**2
        parts = ([f"<{second:.1f} seconds>", begin, *[video] * rows, end] for second in outputs["seconds"])
        return [token for part in parts for token in part]

    # The chat template writes a beginning and an end for the video as a whole; those of each group take their place.
    family = Family(f"{begin}{video}{end}", video, checkpoint.config["video_token_id"], _QWEN_TENSORS, tokens_of)
    return _qwen_family(family, settings, patches, resize, join, ([0.5] * 3, [0.5] * 3))


_QWEN_TENSORS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


@dataclass(frozen=True, slots=True)
class _Patches:
    """The patches of Qwen's models: `side` pixels high and wide, `depth` frames deep."""

    side: int
    depth: int
    merged: int  # patches on a side of the square that one token stands for

    @classmethod
    def of(cls, settings: Json, side: int) -> "_Patches":
        """Read the sizes of patches from a model's settings. `side`: used where the settings name none."""
        depth = settings.get("temporal_patch_size", 2)
        merged = settings.get("merge_size", 2)
        return cls(settings.get("patch_size", side), depth, merged)

    def join(self, frames: Sequence[Outputs]) -> dict[str, Any]:
        """Return the patches of a video, from those of each frame, which are one frame deep."""
        _, high, wide = frames[0]["image_grid_thw"][0]
        flat: list[NDArray[Any]] = [frame["pixel_values"] for frame in frames]
        flat += flat[-1:] * (-len(flat) % self.depth)  # the last frame again
        groups = len(flat) // self.depth
        parts = np.stack(flat).reshape(groups, self.depth, high * wide, -1, self.side**2)  # … frame, patch, channel, …
        whole = parts.transpose(0, 2, 3, 1, 4).reshape(groups * high * wide, -1)
        return {"pixel_values_videos": whole, "video_grid_thw": np.array([[groups, high, wide]], np.int64)}


def _qwen_family(
    family: Family,
    settings: Json,
    patches: _Patches,
    resize: "Resize",
    join: Any,
    colors: tuple[list[float], list[float]],
) -> VideoFamily:
    """Return the family, whose frames are prepared one by one and one frame deep."""
    arguments = {
        "do_resize": False,
        "patch_size": patches.side,
        "merge_size": patches.merged,
        "temporal_patch_size": 1,
        **_colors(settings, *colors),
    }
    return VideoFamily(replace(family, arguments=arguments), "video", resize, settings.get("resample", _BICUBIC), join)


def _colors(settings: Json, mean: list[float], std: list[float]) -> dict[str, Any]:
    return {
        "image_mean": settings.get("image_mean", mean),
        "image_std": settings.get("image_std", std),
    }


def _internvl(checkpoint: Checkpoint, settings: Json) -> VideoFamily:
    """InternVL: each frame as a picture of one tile, after its number."""
    image = checkpoint.name(checkpoint.placeholder_id)
    begin, end = checkpoint.known("<img>", "</img>")
    length = checkpoint.processor.get("image_seq_length", checkpoint.config.get("image_seq_length", 256))
    size = settings.get("size") or {"height": 384, "width": 384}

    def resize(num_frames: int, width: int, height: int) -> tuple[int, int]:
        return size["width"], size["height"]

    def join(frames: Sequence[Outputs], clip: "Clip") -> dict[str, Any]:
        return {"pixel_values": np.concatenate([frame["pixel_values"] for frame in frames])}

    def tokens_of(outputs: Outputs) -> list[str]:
        names = (f"\nFrame{number + 1}: " if number else "Frame1: " for number in range(len(outputs["pixel_values"])))
        return [token for name in names for token in [name, begin, *[image] * length, end]]

    arguments = {"do_resize": False, "crop_to_patches": False, **_colors(settings, _CLIP_MEAN, _CLIP_STD)}
    family = Family("<video>", image, checkpoint.placeholder_id, ("pixel_values",), tokens_of, arguments)
    return VideoFamily(family, "image", resize, settings.get("resample", _BICUBIC), join)


def _smolvlm(checkpoint: Checkpoint, settings: Json) -> VideoFamily:
    """SmolVLM: an introduction in words, then each frame as a picture without tiles, after its minute and second."""
    image = checkpoint.name(checkpoint.placeholder_id)
    fake, whole = checkpoint.known("<fake_token_around_image>", "<global-img>")
    length = checkpoint.processor.get("image_seq_len", 169)
    sampled = settings.get("video_sampling") or {}

    def join(frames: Sequence[Outputs], clip: "Clip") -> dict[str, Any]:
        joined = {name: np.concatenate([frame[name] for frame in frames], 1) for name in _SMOLVLM_TENSORS}
        return {**joined, "seconds": clip.timestamps, "duration": int(clip.total / clip.fps)}

    def tokens_of(outputs: Outputs) -> list[str]:
        count = number_in_words(len(outputs["seconds"]))
        duration = timedelta(seconds=outputs["duration"])
        text = f"You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n"
        tokens = list[str]()
        for second in outputs["seconds"]:
            text += f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:"
            tokens += [text, fake, whole, *[image] * length, fake]
            text = ""
        return [*tokens, "\n\n"]

    arguments = {
        "do_image_splitting": False,
        "size": sampled.get("video_size") or settings.get("size") or {"longest_edge": 4 * 364},
        "max_image_size": settings.get("max_image_size") or {"longest_edge": 364},
        **_colors(settings, [0.5] * 3, [0.5] * 3),
    }
    family = Family("<video>", image, checkpoint.placeholder_id, _SMOLVLM_TENSORS, tokens_of, arguments)
    return VideoFamily(family, "image", lambda _, width, height: (width, height), _BICUBIC, join)


_SMOLVLM_TENSORS = ("pixel_values", "pixel_attention_mask")


def number_in_words(number: int) -> str:
    """Return an English number from 1 to 999, as SmolVLM reads it: thirty-two, one hundred and one."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" and {number_in_words(rest)}" if rest else "")


_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

_WRITINGS: Mapping[VideoWriting, Callable[[Checkpoint, Json], VideoFamily]] = {
    "internvl": _internvl,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smolvlm": _smolvlm,
}
