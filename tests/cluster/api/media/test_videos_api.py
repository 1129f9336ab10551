"""Videos in chats: from the part of a message to the items of a submission."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.media import clips
from crossdock.cluster.api.media import media as media_module
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.media import Media, MediaLimits
from tests.cluster.api.media.conftest import TEXT, PictureServer
from tests.cluster.api.media.picture_models import data_url, encoded, image_part, picture, saved
from tests.cluster.api.media.test_clips import KINDS
from tests.cluster.api.media.video_models import joined_url, moving, video_file, video_part
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import LiveServer, ScriptedDispatcher, refused


def url(*, frames: int = 12, seed: int = 0, **options: Any) -> str:
    return data_url(video_file(moving(frames, seed=seed), **options), "video/mp4")


def test_video_becomes_an_item(picture_server: PictureServer) -> None:
    submission = picture_server.submitted(video_part(url()))
    (item,) = submission.items
    pad = picture_server.media.placeholders["video"]
    assert (item.kind, item.length) == ("video", item.num_embedding_tokens)
    assert submission.prompt_token_ids[item.start : item.end] == [pad] * item.num_embedding_tokens
    groups, rows, columns = item.tensors["video_grid_thw"][0]
    assert (groups, groups * rows * columns) == (6, 4 * item.num_embedding_tokens)
    assert item.tensors["pixel_values_videos"].dtype == np.uint8
    assert picture_server.ask(video_part(url())).json()["usage"]["prompt_tokens"] == len(submission.prompt_token_ids)


def test_videos_and_pictures_keep_their_order(picture_server: PictureServer) -> None:
    shown = image_part(data_url(encoded(picture())))
    parts = (video_part(url()), shown, video_part(url(seed=1)), shown)
    submission = picture_server.submitted(*parts)
    assert [item.kind for item in submission.items] == ["video", "image", "video", "image"]
    assert [item.start for item in submission.items] == sorted(item.start for item in submission.items)
    assert submission.items[0].content_hash != submission.items[2].content_hash
    assert submission.items[1].content_hash == submission.items[3].content_hash


@pytest.mark.parametrize(("kind", "codec"), KINDS)
def test_every_codec_is_read_where_nothing_can_be_opened(picture_server: PictureServer, kind: str, codec: str) -> None:
    """In a child of a process that has one thread, before and after: a fork of more could hang."""
    data = video_file(kind=kind, codec=codec, pixels="yuvj420p" if codec == "mjpeg" else "yuv420p")
    (item,) = picture_server.submitted(video_part(data_url(data, f"video/{kind}"))).items
    assert item.tensors["video_grid_thw"][0][0] == 6
    assert [psutil.Process(pid).num_threads() for pid in picture_server.media.pids] == [1, 1, 1, 1]


def test_frames_sent_one_by_one_are_a_video(picture_server: PictureServer) -> None:
    frames = moving(6)
    (item,) = picture_server.submitted(video_part(joined_url(frames, "PNG"))).items
    assert item.tensors["video_grid_thw"][0][0] == 3
    (again,) = picture_server.submitted({"type": "video_url", "video_url": joined_url(frames)}).items
    assert again.num_embedding_tokens == item.num_embedding_tokens


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_frame_may_be_of_every_format_of_pictures(picture_server: PictureServer, kind: str) -> None:
    """Though Pillow would load the decoders of some only when a child needs them, which may open no file."""
    (item,) = picture_server.submitted(video_part(joined_url(moving(6, seed=3), kind))).items
    assert item.tensors["video_grid_thw"][0][0] == 3


def test_video_is_processed_once(picture_server: PictureServer) -> None:
    before = picture_server.metric("picture_seconds_count")
    video = video_part(url(seed=7))  # encoded once: libx264 may encode the same frames differently each time
    for _ in range(3):
        picture_server.submitted(video)
    assert picture_server.metric("picture_seconds_count") - before == 1


@pytest.mark.parametrize(
    ("reading", "groups"), [({}, 6), ({"num_frames": 4}, 2), ({"fps": 2.0}, 3), ({"num_frames": 2, "fps": 4}, 1)]
)
def test_request_reads_its_videos_in_its_own_way(
    picture_server: PictureServer, reading: dict[str, Any], groups: int
) -> None:
    """Twelve frames in three seconds, of which the server shows all. Other readings share no processed video."""
    given = {"media_io_kwargs": {"video": reading}}
    for _ in range(2):
        submission = picture_server.submitted(video_part(url(seed=8)), **given)
        assert submission.items[0].tensors["video_grid_thw"][0][0] == groups
    messages = [{"role": "user", "content": [video_part(url(seed=8)), TEXT]}]
    counted = picture_server.http.post("/tokenize", json={"messages": messages, **given})
    assert counted.json()["count"] == len(submission.prompt_token_ids)


@pytest.mark.parametrize(
    ("reading", "param"),
    [
        ({"video": {"num_frames": 769}}, "media_io_kwargs.video.num_frames"),
        ({"video": {"fps": 0}}, "media_io_kwargs.video.fps"),
        ({"video": {"frame_recovery": True}}, "media_io_kwargs.video.frame_recovery"),
        ({"image": {}}, "media_io_kwargs.image.[key]"),
    ],
)
def test_wrong_way_to_read_videos_is_refused(
    picture_server: PictureServer, reading: dict[str, Any], param: str
) -> None:
    refused(picture_server.ask(video_part(url()), media_io_kwargs=reading), 400, param=param)


def test_more_frames_one_by_one_than_the_limit_are_refused(picture_server: PictureServer) -> None:
    for count, reason in ((4096, "frame 0: "), (4097, "more than the 4096 frames")):
        frames = video_part("data:video/jpeg;base64," + ",".join(["AAAA"] * count))
        error = refused(picture_server.ask(frames), 400, param="messages[0].content[0]")
        assert reason in error["message"]


def test_more_videos_than_the_limit_are_refused(picture_server: PictureServer) -> None:
    error = refused(picture_server.ask(*[video_part(url())] * 3), 400, param="messages[0].content[2]")
    assert "3 videos, more than the 2" in error["message"]


@pytest.mark.parametrize("token", ["<|video_pad|>", "<|image_pad|>"])
def test_placeholder_without_a_video_is_refused(picture_server: PictureServer, token: str) -> None:
    refused(picture_server.http.post("/v1/completions", json={"prompt": f"a {token}"}), 400, param="prompt")
    text = {"type": "text", "text": token}
    error = refused(picture_server.ask(text, video_part(url())), 400, param="messages")
    assert token in error["message"]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "video", "video": "a"}, "send a video as 'video_url'"),
        ({"type": "input_video", "input_video": "a"}, "/v1/chat/completions"),
        ({"type": "video_embeds", "video_embeds": "AAAA"}, "cannot be checked"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "cannot be checked"),
    ],
)
def test_other_parts_are_refused_with_the_way_out(
    picture_server: PictureServer, part: dict[str, Any], reason: str
) -> None:
    assert reason in refused(picture_server.ask(part), 400, param="messages[0].content[0]")["message"]


def test_other_apis_name_the_one_that_takes_videos(picture_server: PictureServer) -> None:
    items = [{"role": "user", "content": [{"type": "input_video", "video_url": url()}]}]
    answer = picture_server.http.post("/v1/responses", json={"input": items})
    assert "/v1/chat/completions" in refused(answer, 400, param="input[0].content[0]")["message"]
    message = {"role": "user", "content": [{"type": "video", "source": {"type": "base64", "data": "a"}}]}
    answer = picture_server.http.post("/v1/messages", json={"model": "tiny", "messages": [message], "max_tokens": 2})
    assert answer.status_code == 400
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "most_videos", "reason"),
    [
        ("llava", 1, "videos of models of the type llava are not supported; internvl, qwen2_5_vl, qwen2_vl, qwen3_vl"),
        ("qwen2_vl", 0, "--limit-mm-per-prompt"),
    ],
)
def test_server_without_videos_says_why(
    kind: str, most_videos: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(media_module, "PictureProcesses", lambda settings: started.append(settings["kind"]))
    tokenizer, names = saved(kind, tmp_path)
    limits = MediaLimits(AllowedHosts(()), None, 1, most_videos, 1 << 20, 1 << 20, 1.0, 0, 1 << 20, {}, {})
    media = Media(tmp_path, names, limits)
    app = one_model_api(ScriptedDispatcher(tokenizer), tokenizer, HttpConfig(), media=media)  # type: ignore[arg-type]
    with LiveServer(app) as address, httpx.Client(base_url=address, timeout=240) as client:
        messages = [{"role": "user", "content": [video_part(url())]}]
        answer = client.post("/v1/chat/completions", json={"messages": messages})
        assert reason in refused(answer, 400, param="messages[0].content[0]")["message"]
    assert started == ["image"]


def test_without_decoders_frames_are_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "load_decoders", lambda: False)
    with pytest.raises(clips.BadPicture, match="data:video/jpeg"):
        clips.read_clip(video_file(), clips.Sampling(), 1 << 20, lambda _, *size: size, 3)


@pytest.mark.parametrize("wrong", [{"num_frames": 0}, {"num_frames": 1000}, {"fps": 0}, {"fps": -1}, {"backend": "a"}])
def test_wrong_sampling_is_refused_at_the_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"media_io_kwargs.video.{next(iter(wrong))}"):
        HttpConfig.model_validate({"media_io_kwargs": {"video": wrong}})
