"""Prepare pictures and videos for a model: its tensors, their hash, and what replaces them in the prompt.

For the processes of pictures: transformers is imported, torch never.
"""

import io
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from crossdock.cluster.api.media.clips import Sampling, load_decoders, read_clip, trial_file
from crossdock.cluster.api.media.decoding import BadPicture, decode, load_formats
from crossdock.cluster.api.media.families import Family, Json, Outputs, read_family
from crossdock.cluster.api.media.processor_fields import reasons, reasons_of_videos
from crossdock.cluster.api.media.sent_frames import join_frames
from crossdock.cluster.api.media.video_families import read_video_family
from crossdock.workers.schedule.request.items import LEVELS, PIXELS, with_levels

_MOST_REASON_CHARS = 200
_BYTES_ALONE = {"do_rescale": False, "do_normalize": False}


class Preparation:
    """The image processor of a model, and how its family writes pictures."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: see `PictureProcesses`."""
        folder = Path(settings["folder"])
        names = _names(settings)
        self._folder = folder
        self._family: Family = read_family(folder, names)
        self._processor = _FrameProcessor(folder, {**self._family.arguments, **settings["arguments"]})
        self._without = {**self._family.arguments}
        self._most_pixels = settings["most_pixels"]

    def tried(self) -> dict[str, Any]:
        """Prepare a small picture. Returns `is_ready`, or `wrong_arguments`, or `unsupported` with the reason.

        `passed_over` has a sentence for each field of the processor's files that is not followed.
        """
        asked = {"data": _file(_noise()), "detail": "auto"}
        reason = self._why_not(asked)
        if not reason:
            return {"is_ready": True, "passed_over": list(reasons(self._folder, self._processor.made))}
        given = self._processor
        self._processor = self._processor.with_arguments(self._without)
        try:
            return {"unsupported" if self._why_not(asked) else "wrong_arguments": reason}
        finally:
            self._processor = given

    def __call__(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the encoder's tensors for a picture, and what replaces it in the prompt."""
        image = decode(asked["data"], self._most_pixels, is_low=asked["detail"] == "low")
        return _answer(self._family, "image", self._processor(image), self._processor.levels)

    def _why_not(self, asked: Mapping[str, Any]) -> str:
        try:
            self._processor.measure(_noise())
            self(asked)
        except Exception as error:  # transformers raises errors of many kinds
            return f"{type(error).__name__}: {error}"[:_MOST_REASON_CHARS]
        return ""


class VideoPreparation:
    """The image processor of a model, for the frames of videos, and how its family writes these."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: see `PictureProcesses`."""
        folder = Path(settings["folder"])
        self._folder = folder
        self._video = read_video_family(folder, _names(settings), settings["arguments"])
        self._processor = _FrameProcessor(folder, self._video.family.arguments)
        self._most_pixels = settings["most_pixels"]
        self._sampling = Sampling(**settings["sampling"])
        self._reads_files = load_decoders()  # before a child, which may open no file, not even to import

    def tried(self) -> dict[str, Any]:
        """Prepare a small video. Returns `is_ready` with `passed_over`, as of pictures, or `unsupported`: a reason."""
        try:
            self._processor.measure(_noise())
            self({"data": join_frames([_file(_noise())] * 2)})
            if self._reads_files:
                self({"data": trial_file(_noise())})
        except Exception as error:  # transformers raises errors of many kinds
            return {"unsupported": f"{type(error).__name__}: {error}"[:_MOST_REASON_CHARS]}
        return {"is_ready": True, "passed_over": list(reasons_of_videos(self._folder, self._processor.made))}

    def __call__(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the encoder's tensors for a video, and what replaces it in the prompt."""
        video = self._video
        sampling = Sampling(**asked["sampling"]) if "sampling" in asked else self._sampling
        clip = read_clip(asked["data"], sampling, self._most_pixels, video.resize, video.resample)
        outputs = video.join([self._processor(frame) for frame in clip.frames], clip)
        return _answer(video.family, video.kind, outputs, self._processor.levels)


class _FrameProcessor:
    """The image processor of a model with its arguments. Pixels stay bytes where their levels have a table."""

    def __init__(self, folder: Path, arguments: Json) -> None:
        from transformers import AutoImageProcessor  # late: torch must be out of the way

        load_formats()  # before a child

        self._processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        self._arguments = {**arguments, "return_tensors": "np"}
        self.levels: NDArray[np.float32] | None = None

    @property
    def made(self) -> Any:
        """The image processor of transformers."""
        return self._processor

    def with_arguments(self, arguments: Json) -> "_FrameProcessor":
        """Return a copy of the processor with other arguments."""
        other = copy(self)
        other._arguments = {**arguments, "return_tensors": "np"}
        other.levels = None
        return other

    def measure(self, image: Image.Image) -> None:
        """Find the processor's value for each of the 256 levels of each colour, if each pixel is processed alone.

        A pixel is then one byte until it is encoded: a quarter of its bytes as a float, here and on the way.
        """
        self.levels = None
        floats = self(image)
        try:
            self.levels = self._table()
            found = with_levels({**self(image), LEVELS: self.levels})
            is_same = all(np.array_equal(found[name], floats[name]) for name in PIXELS if name in floats)
        except Exception:  # a processor with other settings
            is_same = False
        if not is_same:
            self.levels = None

    def _table(self) -> NDArray[np.float32]:
        """Return the values [3, 256] of the levels of each colour."""
        values = {name: self._arguments.get(name, getattr(self._processor, name, None)) for name in _COLOURS}
        levels = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        if values["do_rescale"]:
            levels = self._processor.rescale(levels, values["rescale_factor"])
        if values["do_normalize"]:
            levels = self._processor.normalize(levels, values["image_mean"], values["image_std"])
        return np.ascontiguousarray(levels[:, 0], np.float32)

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        """Return the processor's outputs for one picture or frame. Raises BadPicture for one that it refuses."""
        arguments = self._arguments if self.levels is None else {**self._arguments, **_BYTES_ALONE}
        try:
            outputs = dict(self._processor(image, **arguments))
        except ValueError as error:  # such as a picture that is too narrow
            raise BadPicture(f"the model's processor refuses it: {str(error)[:_MOST_REASON_CHARS]}") from None
        for name in PIXELS:
            if name in outputs:
                pixels = np.asarray(outputs[name])
                outputs[name] = pixels if self.levels is None else pixels.astype(np.uint8, copy=False)
        return outputs


_COLOURS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def _answer(family: Family, kind: str, outputs: Outputs, levels: "NDArray[np.float32] | None") -> dict[str, Any]:
    text, runs = family.written_runs(outputs)
    tensors = {name: np.ascontiguousarray(outputs[name]) for name in family.tensors if name in outputs}
    if levels is not None:
        tensors[LEVELS] = levels
    return {
        "kind": kind,
        "text": text,
        "runs": runs,
        "tensors": {name: [tensor.dtype.str, tensor.shape, tensor.tobytes()] for name, tensor in tensors.items()},
    }


def _names(settings: Mapping[str, Any]) -> dict[int, str]:
    return {int(key): name for key, name in settings["names"].items()}


def _noise() -> Image.Image:
    """Return a small picture with many colours."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8))


def _file(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
