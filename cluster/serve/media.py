"""The pictures of the served model, within the limits that the configuration names."""

import logging
from pathlib import Path

from prometheus_client import CollectorRegistry

from crossdock.cluster.api.body.pictures import VideoReading
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.families import NoPictures
from crossdock.cluster.api.media.media import Media, MediaLimits, PictureMetrics
from crossdock.cluster.api.text.tokenizer import ModelTokenizer

logger = logging.getLogger("ray.serve")


def open_media(
    model: Path, tokenizer: ModelTokenizer, http: HttpConfig, registry: CollectorRegistry | None = None
) -> Media | None:
    """Start the processes of pictures, and wait for one. Returns None where the model or the limits take no pictures.

    Args:
        model: directory of the model.
        tokenizer: the model's.
        http: the limits of pictures.
        registry: of the metrics; None: a new one.

    Raises:
        ValueError: the image processor refuses the arguments that the configuration gives.
    """
    metrics = PictureMetrics(registry or CollectorRegistry())
    most_pictures = http.limit_mm_per_prompt.get("image", 32)
    most_videos = http.limit_mm_per_prompt.get("video", 1 if most_pictures else 0)
    if not most_pictures and not most_videos:
        return None
    limits = MediaLimits(
        hosts=AllowedHosts(http.allowed_media_domains),
        folder=None if http.allowed_local_media_path is None else Path(http.allowed_local_media_path),
        most_pictures=most_pictures,
        most_videos=most_videos,
        most_bytes=http.media_max_bytes,
        most_pixels=http.media_max_pixels,
        timeout_s=http.media_timeout_s,
        cache_bytes=http.media_cache_bytes,
        memory_bytes=http.media_memory_bytes,
        arguments=http.mm_processor_kwargs,
        sampling=(http.media_io_kwargs.get("video") or VideoReading.model_validate({})).model_dump(),
    )
    names = {token_id: text for text, token_id in tokenizer.added_tokens().items()}
    media: Media | None = None
    try:
        media = Media(model, names, limits, metrics=metrics)
        media.wait_until_ready()
        if media.why_no_videos:
            logger.info("requests can have no videos: %s", media.why_no_videos)
        return media
    except (NoPictures, ValueError, TimeoutError) as reason:
        if media is not None:
            media.close()
        if not isinstance(reason, NoPictures):
            raise
        logger.info("requests can have no pictures: %s", str(reason))  # the error holds the frames of its callers
        return None
