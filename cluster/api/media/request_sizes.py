"""The sizes of one request's pictures together: sizes that can never fit are refused for good."""

from collections.abc import Mapping

from crossdock.cluster.api.body.pictures import Kind, Picture
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.media.processes import ReadyPicture

KINDS: Mapping[Kind, str] = {"image": "pictures", "video": "videos"}
PART_OF_VIDEOS = 2  # files of videos that wait may take the memory for pictures divided by this
_PART_OF_ONE = 2  # the share of an owner that is alone; a request that needs more would never find it free
_HINTS: Mapping[Kind, str] = {
    "image": "Use smaller pictures, or 'detail': 'low'.",
    "video": "Use smaller videos, or send fewer frames of them as data:video/jpeg.",
}


class RequestSizes:
    """Counts what the pictures of a request have taken so far, within bounds."""

    def __init__(self, most_embedding_tokens: int | None, memory_bytes: int) -> None:
        """`most_embedding_tokens`: the tokens of the context; None: any number. `memory_bytes`: of all requests."""
        self._most_embedding_tokens = most_embedding_tokens
        self._most_bytes = memory_bytes // _PART_OF_ONE
        self._most_video_bytes = memory_bytes // PART_OF_VIDEOS // _PART_OF_ONE
        self._num_tokens = self._bytes = self._video_bytes = 0

    def add_file(self, data: bytes, picture: Picture) -> None:
        """Count a file. Raises ApiError where all are too large."""
        if picture.kind == "video":
            self._video_bytes += len(data)
            if self._video_bytes > self._most_video_bytes:
                reason = f"the files of the request's videos take more than {_in_units(self._most_video_bytes)}"
                raise wrong(picture.param, reason)
        self._add_bytes(len(data), picture)

    def add(self, ready: ReadyPicture, picture: Picture) -> None:
        """Count a processed picture. Raises ApiError where all together are too large."""
        self._num_tokens += ready.num_embedding_tokens
        if self._most_embedding_tokens is not None and self._num_tokens > self._most_embedding_tokens:
            kind = KINDS[picture.kind]
            hint = _HINTS[picture.kind]
            most = self._most_embedding_tokens
            reason = f"the {kind} have at least {self._num_tokens} tokens; this model's context has {most}"
            text = f"Invalid value for '{picture.param}': {reason}. {hint}"
            raise ApiError(text, param=picture.param, code="context_length_exceeded")
        self._add_bytes(ready.num_bytes, picture)

    def _add_bytes(self, num_bytes: int, picture: Picture) -> None:
        self._bytes += num_bytes
        if self._bytes > self._most_bytes:
            most = f"{_in_units(self._most_bytes)}, as files and once they are decoded"
            raise wrong(picture.param, f"the {KINDS[picture.kind]} of the request take more than {most}")


def _in_units(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"
