"""Files of videos, made on the spot, and transformers' own view of their frames."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_all
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from transformers.video_utils import VideoMetadata, read_video_pyav

from tests.cluster.api.media.picture_models import MODELS, encoded

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm")
_WORDS = {1: "one", 5: "five", 6: "six", 7: "seven"}


def moving(num_frames: int = 12, width: int = 64, height: int = 48, seed: int = 0) -> list[NDArray[np.uint8]]:
    """Return frames [height, width, 3] of a square that moves over blocks of colour."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    still = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    frames = []
    for number in range(num_frames):
        frame = still.copy()
        frame[4:12, 4 * number % width : (4 * number % width) + 8] = (255, 20 * number % 256, 0)
        frames.append(frame)
    return frames


def video_file(
    frames: Sequence[NDArray[np.uint8]] | None = None,
    *,
    kind: str = "mp4",
    codec: str = "libx264",
    fps: int = 4,
    pixels: str = "yuv420p",
    sound: bool = False,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """Return the file of a video. `frames` of no length: only sound, if any."""
    file, policy, parameters = io.BytesIO(), os.sched_getscheduler(0), os.sched_getparam(0)
    frames = moving() if frames is None else frames
    with av.open(file, "w", format=kind) as container:
        if len(frames):
            stream: Any = container.add_stream(codec, rate=fps)
            stream.height, stream.width = frames[0].shape[:2]
            stream.pix_fmt, stream.options = pixels, dict(options or {})
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        if sound:
            voice: Any = container.add_stream("aac", rate=16_000)
            voice.layout = "mono"
            for _ in range(8):
                samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                samples.rate = 16_000
                container.mux(voice.encode(samples))
            container.mux(voice.encode())
    # As root, SVT-AV1 takes the highest real-time priority for the thread that calls it. All later threads and
    # processes would inherit that, and starve the machine.
    os.sched_setscheduler(0, policy, parameters)
    return file.getvalue()


def in_container(data: bytes, kind: str) -> bytes:
    """Put the encoded frames into a file of another kind. (libx264 may encode frames differently each time.)"""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format=kind) as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:  # the last one is empty
                packet.stream = stream
                container.mux(packet)
    return file.getvalue()


def long_file(num_frames: int = 10_000) -> bytes:
    """Return the file of a video that takes some seconds to decode: a large frame, then others that repeat it."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream: Any = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 1008, 1008, "yuv420p"
        blank = np.zeros((1008, 1008, 3), np.uint8)
        frames = [av.VideoFrame.from_ndarray(blank, format="rgb24") for _ in range(2)]
        packets = [*stream.encode(frames[0]), *stream.encode(frames[1]), *stream.encode()]
        first, repeat = map(bytes, packets)
        for number in range(num_frames):
            packet = av.Packet(repeat if number else first)
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 4)
            packet.is_keyframe = not number
            container.mux(packet)
    return file.getvalue()


def joined_url(frames: Sequence[NDArray[np.uint8]], kind: str = "JPEG") -> str:
    """Return vLLM's URL of frames that are sent one by one."""
    import base64

    parts = (base64.b64encode(encoded(Image.fromarray(frame), kind)).decode() for frame in frames)
    return f"data:video/jpeg;base64,{','.join(parts)}"


def video_part(url: str) -> dict[str, Any]:
    """Return a part of a chat's message that gives a video."""
    return {"type": "video_url", "video_url": {"url": url}}


def their_frames(file: bytes, num_frames: int, folder: Path) -> tuple[NDArray[np.uint8], VideoMetadata]:
    """Return the frames [N, height, width, 3] that transformers' own reader samples, and which they are."""
    path = folder / "their-video"
    path.write_bytes(file)

    def sample(metadata: VideoMetadata, **_: Any) -> list[int]:
        count = min(num_frames, metadata.total_num_frames)
        return [int(each) for each in np.linspace(0, metadata.total_num_frames - 1, count, dtype=int)]

    frames, metadata = read_video_pyav(str(path), sample)
    return frames, metadata


def their_tensors(kind: str, frames: NDArray[np.uint8], metadata: VideoMetadata) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a video and its text, by transformers' own parts; Pillow resizes, as for pictures."""
    settings: Mapping[str, Any] = MODELS[kind].video_processor or {}
    count, height, width = frames.shape[:3]
    size = settings.get("size", {})
    bounds = size.get("shortest_edge"), size.get("longest_edge")
    if kind == "internvl":
        rows, columns = size["height"], size["width"]
    elif kind == "smolvlm":
        return _their_smolvlm(frames, metadata)
    elif kind == "qwen3_vl":
        rows, columns = smart_resize_all(
            max(count, 2), height, width, 2, 8, size["shortest_edge"], size["longest_edge"]
        )
    else:
        rows, columns = smart_resize(height, width, 8, *bounds)
    images = [Image.fromarray(frame).resize((columns, rows), Image.Resampling.BICUBIC) for frame in frames]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
    values = (pixels.float() / 255 - mean) / std
    if kind == "internvl":
        return {"pixel_values": values}, _text(kind, {"pixel_values_videos": values[None]})
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, values[None], 4, 2, 2)
    tensors = {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}
    text = _text(kind, {"video_grid_thw": tensors["video_grid_thw"], "video_metadata": [metadata]})
    if kind == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([2 / metadata.sampled_fps])
    return tensors, text


def _their_smolvlm(frames: NDArray[np.uint8], metadata: VideoMetadata) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors and the text of SmolVLM: frames of 48 pixels on the longer side become squares of 32."""
    height, width = frames.shape[1:3]
    size = (48, int(48 / (width / height))) if width >= height else (int(48 * (width / height)), 48)
    columns, rows = (side if side == 48 else max(side + side % 2, 1) for side in size)
    images = [Image.fromarray(frame).resize((columns, rows), Image.Resampling.LANCZOS) for frame in frames]
    squares = [np.asarray(image.resize((32, 32), Image.Resampling.LANCZOS)) for image in images]
    pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor((MODELS["smolvlm"].video_processor or {})[name]) for name in ("image_mean", "image_std"))
    values = ((pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1))[None]
    mask = torch.ones(1, len(frames), 32, 32, dtype=torch.long)
    with patch("transformers.models.smolvlm.processing_smolvlm.num2words", _WORDS.__getitem__):  # a package
        text = _text("smolvlm", {"pixel_values": values, "video_metadata": [metadata]})
    return {"pixel_values": values, "pixel_attention_mask": mask}, text


def _text(kind: str, outputs: Mapping[str, Any]) -> str:
    processors: dict[str, tuple[Any, dict[str, Any]]] = {
        "qwen2_vl": (Qwen2VLProcessor, {"video_token": "<|video_pad|>"}),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, {"video_token": "<|video_pad|>"}),
        "qwen3_vl": (
            Qwen3VLProcessor,
            {
                "video_token": "<|video_pad|>",
                "vision_start_token": "<|vision_start|>",
                "vision_end_token": "<|vision_end|>",
                "_calculate_timestamps": _bound(Qwen3VLProcessor._calculate_timestamps),
            },
        ),
        "internvl": (
            InternVLProcessor,
            {
                "image_seq_length": 4,
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "image_token": "<IMG_CONTEXT>",
            },
        ),
        "smolvlm": (
            SmolVLMProcessor,
            {
                "image_seq_len": 4,
                "fake_image_token": "<fake_token_around_image>",
                "image_token": "<image>",
                "global_image_token": "<global-img>",
            },
        ),
    }
    processor, fields = processors[kind]
    video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    return str(processor.replace_video_token(SimpleNamespace(video_processor=video_processor, **fields), outputs, 0))


def _bound(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: method(None, *arguments)
