"""The process of pictures or of videos: decodes each and prepares it for the model, in a child that has limits.

Run as `python -m` by `PictureProcess`. It reads messages from stdin, first its settings, then files, and writes one
answer for each to stdout. It ends when stdin does.

A file of a few kilobytes can take gigabytes and minutes, or use a fault of a decoder written in C. So the ingress
decodes none. torch is not imported.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from crossdock.cluster.api.media.decoding import BadPicture
from crossdock.cluster.api.media.preparation import Preparation, VideoPreparation
from crossdock.workers.sandbox.limited_child import ChildFailed, Limits, run_limited, sandbox_main
from crossdock.workers.sandbox.messages import questions, read_message, write_message

_MOST_REASON_CHARS = 200


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Prepare one picture or video after the other until `requests` ends."""
    settings = read_message(requests)
    if settings is None:
        return
    try:
        prepare = VideoPreparation(settings) if settings["kind"] == "video" else Preparation(settings)
    except Exception as error:  # transformers raises errors of many kinds
        write_message(answers, {"unsupported": f"{type(error).__name__}: {error}"[:_MOST_REASON_CHARS]})
        return
    write_message(answers, prepare.tried())
    limits = Limits(**settings["limits"])
    for asked in questions(requests):
        write_message(answers, _answer(requests, prepare, asked, limits))


def _answer(
    requests: BinaryIO, prepare: Callable[[Mapping[str, Any]], dict[str, Any]], asked: Mapping[str, Any], limits: Limits
) -> dict[str, Any]:
    """Prepare a file in a child. Returns what `prepare` does, or `error`, or `is_busy`: the machine was too slow."""
    try:
        return run_limited(lambda: _prepared_or_reason(prepare, asked), requests, limits)
    except ChildFailed as failed:
        if failed.is_too_slow:
            return {"error": "it takes too long to decode"}
        if failed.is_too_large:
            return {"error": f"it needs more than {limits.memory_bytes >> 20} MiB to decode"}
        return {"error": "it cannot be decoded within this server's limits"}


def _prepared_or_reason(
    prepare: Callable[[Mapping[str, Any]], dict[str, Any]], asked: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        return prepare(asked)
    except BadPicture as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to block an import
    warnings.simplefilter("ignore")
    sandbox_main(serve)
