"""Hostile videos: each is refused in OpenAI's form, names its part, reveals nothing, connects to and opens nothing."""

import base64
import struct
from typing import Any

import av
import numpy as np
import psutil
import pytest

from tests.cluster.api.media.hostile_scene import SECRET, HostileScene
from tests.cluster.api.media.picture_models import data_url, encoded, picture
from tests.cluster.api.media.test_hostile_media import png
from tests.cluster.api.media.video_models import joined_url, moving, video_file, video_part
from tests.cluster.api.scripted_api import refused


def patched(file: bytes, box: bytes, at: int, value: int, size: int = 4) -> bytes:
    """Return an MP4 with one field of a box changed. `at`: bytes after the box's name."""
    start = file.index(box) + 4 + at
    return file[:start] + (value % (1 << 8 * size)).to_bytes(size, "big") + file[start + size :]


def with_size(file: bytes, width: int, height: int, *, last: bool = False) -> bytes:
    """Return a video of JPEG frames, of which the first or the last claims another size."""
    at = (file.rindex if last else file.index)(b"\xff\xc0") + 5
    return file[:at] + struct.pack(">HH", height, width) + file[at + 4 :]


def many_samples(file: bytes, count: int) -> bytes:
    """Return an MP4 whose table names `count` samples of one byte each, in one chunk."""
    file = patched(patched(file, b"stsz", 4, 1), b"stsz", 8, count)
    file = patched(file, b"stts", 8, count)
    return patched(file, b"stsc", 12, count) + bytes(1 << 20)


def jpegs() -> bytes:
    return video_file(kind="avi", codec="mjpeg", pixels="yuvj420p")


def sound() -> bytes:
    return video_file([], sound=True)


def nested(depth: int) -> bytes:
    """Return boxes inside boxes."""
    body = b""
    for _ in range(depth):
        body = struct.pack(">I", len(body) + 8) + b"moov" + body
    return b"\0\0\0\x10ftypisom\0\0\0\0" + body


MP4 = video_file()
MKV = video_file(kind="matroska")
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:WITNESS/a.ts\n#EXT-X-ENDLIST\n"
FILES: dict[str, bytes] = {
    "MP4 without its table, which is at the end": MP4[: len(MP4) // 2],
    "MP4's signature alone": MP4[:32],
    "MP4 of noise": MP4.replace(MP4[MP4.index(b"mdat") + 4 : MP4.index(b"moov") - 4], bytes(4096), 1),
    "MP4 without frames": patched(patched(MP4, b"stsz", 8, 0), b"stts", 4, 0),
    "MP4 with a million frames": many_samples(MP4, 1_000_000),
    "MP4 with two billion frames": many_samples(MP4, (1 << 31) - 1),
    "MP4 of negative durations": patched(MP4, b"stts", 12, -1),
    "MP4 whose clock stands": patched(MP4, b"mdhd", 12, 0),
    "MP4 whose frames last for days": patched(MP4, b"stts", 12, 1 << 30),
    "MP4 of sound alone": sound(),
    "MP4 with larger frames than are accepted": video_file(moving(2, 1200, 1000)),
    "MP4 with frames too narrow for the model": video_file(moving(2, 804, 4)),
    "MP4 of boxes inside boxes": nested(100_000),
    "MP4 with a box of 2^63 bytes": b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\1moov" + struct.pack(">Q", 1 << 63),
    "Matroska cut off in its header": MKV[:100],
    "Matroska's signature alone": MKV[:4],
    "AVI with frames of 65,500 by 65,500 pixels": with_size(jpegs(), 65_500, 65_500),
    "AVI whose last frame has 16,000 by 16,000 pixels": with_size(jpegs(), 16_000, 16_000, last=True),
    "AVI cut off in its header": jpegs()[:120],
    "AVI of raw pixels": video_file(moving(2), kind="avi", codec="rawvideo"),
    "Matroska of a codec that is not named": video_file(moving(2), kind="matroska", codec="ffv1"),
    "Ogg": video_file(moving(2), kind="ogg", codec="libtheora") if "libtheora" in av.codecs_available else b"OggS",
    "transport stream": video_file(moving(4), kind="mpegts", codec="mpeg2video"),
    "Flash": video_file(moving(4), kind="flv", codec="flv1" if "flv1" in av.codecs_available else "libx264"),
    "GIF": encoded(picture(), "GIF"),
    "PNG": encoded(picture()),
    "playlist of HLS": PLAYLIST,
    "manifest of DASH": b'<?xml version="1.0"?><MPD><BaseURL>http://127.0.0.1:WITNESS/</BaseURL></MPD>',
    "script that joins files": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "session description": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video WITNESS RTP/AVP 96\n",
    "raw frames": b"YUV4MPEG2 W8 H8 F25:1\nFRAME\n" + bytes(96),
    "random bytes": np.random.default_rng(0).bytes(10_000),
    "zeros": bytes(1 << 20),
    "more bytes than a file may have": MP4 + bytes(3 << 20),
    "ZIP": b"PK\x03\x04" + bytes(100),
}
LARGE = base64.b64encode(png(60_000, 60_000)).decode()
SMALL = base64.b64encode(encoded(picture(16, 16))).decode()
URLS = {
    "frames of which one is empty": f"data:video/jpeg;base64,{SMALL},,{SMALL}",
    "frames of which one is no picture": f"data:video/jpeg;base64,{SMALL},AAAA",
    "frames of which one is no base64": f"data:video/jpeg;base64,{SMALL},!!!!",
    "frames of unlike sizes": f"data:video/jpeg;base64,{SMALL},{base64.b64encode(encoded(picture())).decode()}",
    "frames of which one is a bomb": f"data:video/jpeg;base64,{SMALL},{LARGE}",
    "no frames": "data:video/jpeg;base64,",
    "commas alone": f"data:video/jpeg;base64,{',' * 1000}",
    "more frames than a URL may have": f"data:video/jpeg;base64,{','.join(['AAAA'] * 5000)}",
    "a video that calls itself a picture": data_url(MP4, "image/png"),
    "a video that calls itself HTML": data_url(MP4, "text/html"),
    "a video that calls itself nothing": data_url(MP4, ""),
    "a picture that calls itself a video": data_url(encoded(picture()), "video/mp4"),
    "base64 with a wrong letter": "data:video/mp4;base64,AAAA!!!!",
    "no data": "data:video/mp4;base64,",
    "loopback by address": "http://127.0.0.1:WITNESS/walk.mp4",
    "host that is not named": "http://other.example:HOST/walk.mp4",
    "redirect to loopback": "http://pictures.example:HOST/to?u=http%3A%2F%2F127.0.0.1%3AWITNESS%2F",
    "host that is slow": "http://pictures.example:HOST/slow",
    "protocol of a demuxer": "concat:/etc/passwd",
    "playlist by the protocol of a demuxer": "hls+http://127.0.0.1:WITNESS/a.m3u8",
    "file above the folder": "file://ROOT/pictures/../secret.mp4",
}
PARTS: dict[str, Any] = {
    "no URL": {"type": "video_url"},
    "URL that is a number": {"type": "video_url", "video_url": {"url": 5}},
    "URL that is a list": {"type": "video_url", "video_url": ["a"]},
    "empty URL": {"type": "video_url", "video_url": {"url": ""}},
    "embeddings": {"type": "video_embeds", "video_embeds": "AAAA"},
}
CASES = [
    *((name, video_part(data_url(data, "video/mp4"))) for name, data in FILES.items()),
    *((name, video_part(url)) for name, url in URLS.items()),
    *PARTS.items(),
]


@pytest.mark.parametrize(("name", "part"), CASES, ids=[name for name, _ in CASES])
def test_hostile_video_is_refused(scene: HostileScene, name: str, part: dict[str, Any]) -> None:
    given = part.get("video_url")
    if isinstance(given, dict) and isinstance(given["url"], str):
        text = given["url"]
        if name in FILES and b"WITNESS" in FILES[name]:
            port = str(scene.witness.port).encode()
            text = data_url(FILES[name].replace(b"WITNESS", port), "video/mp4")
        part = video_part(scene.url(text))
    answer = scene.ask(part)
    error = refused(answer, 400, type="invalid_request_error")
    assert error["param"].startswith("messages[0].content[1]")
    for leaked in (SECRET, str(scene.root), "127.0.0.", "root:", "Errno", "python", "av.error"):
        assert leaked not in answer.text, leaked
    assert scene.witness.num_connections() == 0


def test_videos_after_hostile_ones_are_taken(scene: HostileScene) -> None:
    """The same process serves them, and none of its children is left."""
    pids = scene.media.pids
    for url in (data_url(MP4, "video/mp4"), joined_url(moving(4)), scene.url("http://pictures.example:HOST/walk.mp4")):
        answer = scene.ask(video_part(url))
        assert answer.status_code == 200, answer.text
    assert scene.media.pids == pids
    assert not [child for pid in pids for child in psutil.Process(pid).children()]
    assert {file.path for pid in pids for file in psutil.Process(pid).open_files()} == set()


def test_video_that_refers_to_another_file_is_read_without_it(scene: HostileScene) -> None:
    """Its own media are shown: the demuxer follows no reference."""
    inside = patched(MP4, b"url ", 0, 0)  # the flag that the media are in this file
    answer = scene.ask(video_part(data_url(inside, "video/mp4")))
    assert answer.status_code == 200, answer.text
    assert scene.witness.num_connections() == 0
