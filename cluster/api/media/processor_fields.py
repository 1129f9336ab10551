"""Fields of a processor's files that change nothing here, for the log."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crossdock.cluster.api.body.file_fields import names_in_code, passed_over
from crossdock.workers.model.weights.untrusted import read_json_if_any

PROCESSOR = "processor_config.json"
PICTURES = "preprocessor_config.json"
VIDEOS = "video_preprocessor_config.json"

HARMLESS: Mapping[str, str] = {
    "_*": "private to the program that wrote the file",
    "*_version": "which program wrote the file",
    "*_type": "the class, which transformers chooses by it",
    "processor_class": "the class, which transformers chooses by it",
    "auto_map": "code that comes with the model, which is not run",
    "chat_template": "the tokenizer's files say that, or chat_template.json",
    "*_token": "config.json names the tokens of pictures",
    "*_token_id": "config.json names the tokens of pictures",
    "*_token_ids": "config.json names the tokens of pictures",
    "tokenizer*": "the tokenizer's files say that",
    "feature_extractor": "sound, which is not read",
    "audio_*": "sound, which is not read",
    "return_*": "what transformers returns in Python",
    "model_input_names": "what transformers returns in Python",
    "data_format": "what transformers returns in Python",
    "input_data_format": "what transformers returns in Python",
    "device": "pictures are prepared on the CPU",
    "disable_grouping": "how it is computed",
    "backend": "how it is computed",
    "fps": "the server and each request say which frames are seen",
    "*_frames": "the server and each request say which frames are seen",
    "do_sample_frames": "the server and each request say which frames are seen",
}
"""Fields that change no picture and no video, by pattern."""

READ_OF_PROCESSOR = (
    *("image_processor", "video_processor", "image_seq_len", "image_seq_length", "patch_size", "spatial_merge_size"),
    *("num_additional_image_tokens", "vision_feature_select_strategy", "image_break_token", "image_end_token"),
)
"""Fields of processor_config.json that are read."""

READ_OF_VIDEOS = (
    *("size", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "do_resize"),
    *("image_mean", "image_std", "resample", "video_sampling", "max_image_size"),
)
"""Fields of video_preprocessor_config.json that are read. The image processor does the rest with each frame."""


def reasons(folder: Path, processor: Any) -> Iterator[str]:
    """Yield a sentence for each field of a model's processor files that transformers' image processor does not follow.

    `processor`: the image processor, which was made of these files.
    """
    config = read_json_if_any(folder / PROCESSOR)
    kind = type(processor)
    found = config.get("image_processor")
    file = PROCESSOR if found else PICTURES
    settings = found if isinstance(found, dict) and found else read_json_if_any(folder / PICTURES)
    for name, value in passed_over(settings, names_in_code(kind) | set(READ_OF_PROCESSOR), HARMLESS):
        why = f"transformers' code of {kind.__name__} does not read this field"
        yield f"{folder / file}: {name} is {_short(value)}: {why}"
    for name, value in passed_over(config, frozenset(READ_OF_PROCESSOR), HARMLESS):
        yield f"{folder / PROCESSOR}: {name} is {_short(value)}: this field is not read"


def reasons_of_videos(folder: Path, processor: Any) -> Iterator[str]:
    """Yield a sentence for each field of a model's video settings that its frames do not follow.

    `processor`: the image processor, which prepares each frame.
    """
    found = read_json_if_any(folder / PROCESSOR).get("video_processor")
    file = PROCESSOR if found else VIDEOS
    settings = found if isinstance(found, dict) and found else read_json_if_any(folder / VIDEOS)
    for name, value in passed_over(settings, frozenset(READ_OF_VIDEOS), HARMLESS):
        if getattr(processor, name, None) != value:
            yield f"{folder / file}: {name} is {_short(value)}: frames of videos are prepared as pictures are"


def _short(value: Any) -> str:
    return f"{json.dumps(value):.100}"
