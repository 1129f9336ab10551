"""The process of pictures or of videos: decodes each and prepares it for the model, in a child that has limits.

Run as `python -m` by `PictureProcesses`. It reads messages from stdin, first its settings, then files, and writes one
answer for each to stdout. It ends when stdin does.

A file of a few kilobytes can take gigabytes and minutes, or use a fault of a decoder written in C. So the ingress
decodes none. torch is not imported.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any, BinaryIO

from crossdock.cluster.api.media.decoding import BadPicture
from crossdock.cluster.api.media.preparation import Preparation, VideoPreparation
from crossdock.workers.sandbox.limited_child import ChildFailed, Limits, answer_all, sandbox_main
from crossdock.workers.sandbox.messages import read_message, write_message

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

    def prepared_or_reason(asked: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return prepare(asked)
        except BadPicture as error:
            return {"error": str(error)}

    limits = Limits(**settings["limits"])
    answer_all(prepared_or_reason, lambda failed: _refusal(failed, limits), requests, answers, limits)


def _refusal(failed: ChildFailed, limits: Limits) -> dict[str, Any]:
    if failed.is_too_slow:
        return {"error": "it takes too long to decode"}
    if failed.is_too_large:
        return {"error": f"it needs more than {limits.memory_bytes >> 20} MiB to decode"}
    return {"error": "it cannot be decoded within this server's limits"}


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to block an import
    warnings.simplefilter("ignore")
    sandbox_main(serve)
