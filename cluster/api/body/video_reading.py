"""How a video is read: by the server's settings, or by those of one request."""

from pydantic import BaseModel, ConfigDict, Field


class VideoReading(BaseModel):
    """Which frames of a video a model is shown; the names are vLLM's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_frames: int = Field(32, ge=1, le=768, description="Most frames, sampled evenly from the first to the last.")
    fps: float | None = Field(None, gt=0, le=1000, description="Frames a second; of frames sent singly: their rate, 1.")
