"""Pictures and videos in the messages of a body: the parts that give them become one form for all APIs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field

from crossdock.cluster.api.errors import ApiError, wrong

Detail: TypeAlias = Literal["auto", "low", "high", "original"]
Kind: TypeAlias = Literal["image", "video"]
TYPES = ("image_url", "input_image")  # of OpenAI's chats, and of its Responses
VIDEO_TYPES = ("video_url",)  # of vLLM's chats

_REFUSED = {  # type of part: the reason
    "audio_url": "sound is not supported",
    "file": "files are not supported; send text or pictures",
    "image_embeds": "embeddings of clients cannot be checked; send the picture itself as 'image_url'",
    "image_file": "files are not stored here; send the picture itself as 'image_url'",
    "input_audio": "sound is not supported",
    "input_file": "files are not supported; send text or pictures",
    "input_video": "send a video as 'video_url', to /v1/chat/completions",
    "video": "send a video as 'video_url'",
    "video_embeds": "embeddings of clients cannot be checked; send the video itself as 'video_url'",
}


class VideoReading(BaseModel):
    """Which frames of a video a model is shown, by the server or for one request; the names are vLLM's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_frames: int = Field(32, ge=1, le=768, description="Most frames, sampled evenly from the first to the last.")
    fps: float | None = Field(None, gt=0, le=1000, description="Frames a second; of frames sent singly: their rate, 1.")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture or video of a request, before it is fetched."""

    url: str  # data:, http:, https: or file:
    param: str  # the part of the body that gives it, which errors name
    detail: Detail = "auto"
    kind: Kind = "image"
    reading: VideoReading | None = None  # of a video; None: as the server reads them


def picture_of(part: Mapping[str, Any], param: str) -> Picture:
    """Return the picture of a part of the type `image_url` or `input_image`. Raises ApiError, which names the field."""
    given = part.get("image_url")
    # Of the URL, and of the detail.
    where = f"{param}.image_url"
    owner = param
    if isinstance(given, Mapping):
        url = given.get("url")
        detail = given.get("detail")
        where, owner = f"{where}.url", where
    else:
        url = given
        detail = None
    if detail is None:
        detail = part.get("detail")
        owner = param
    if part.get("file_id") is not None:
        raise wrong(f"{param}.file_id", "files are not stored here; send the picture itself as 'image_url'")
    if not isinstance(url, str) or not url:
        raise wrong(where, "it must be a URL: data:, https: or http:")
    return Picture(url, param, detail_of(detail, f"{owner}.detail"))


def video_of(part: Mapping[str, Any], param: str) -> Picture:
    """Return the video of a part of the type `video_url`. Raises ApiError, which names the field."""
    given = part.get("video_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        where = f"{param}.video_url.url" if isinstance(given, Mapping) else f"{param}.video_url"
        raise wrong(where, "it must be a URL: data:, https: or http:")
    return Picture(url, param, kind="video")


def detail_of(value: Any, param: str) -> Detail:
    """Return the detail that a part asks for. Raises ApiError for a word that OpenAI does not have."""
    if value is None:
        return "auto"
    if value not in get_args(Detail):
        raise wrong(param, "it must be 'auto', 'low', 'high' or 'original'")
    detail: Detail = value
    return detail


def refusal(kind: object, param: str, *, takes_pictures: bool) -> ApiError:
    """Return the error for a part of a type that is not accepted. `takes_pictures`: the model does."""
    takes = "this model takes text and pictures" if takes_pictures else "this model takes text only"
    reason = _REFUSED.get(kind) if isinstance(kind, str) and takes_pictures else None
    text = f"'{param}' is of type {str(kind)[:100]!r}; {takes}" + (f": {reason}." if reason else ".")
    return ApiError(text, param=param, code="invalid_value")
