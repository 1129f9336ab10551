"""Hostile pictures: each is refused in OpenAI's form, names its part, reveals nothing and connects to no other host."""

import asyncio
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.media.addresses import AllowedHosts, is_public
from crossdock.cluster.api.media.fetch import PictureFetcher
from tests.cluster.api.media.hostile_host import HOST, NAMES
from tests.cluster.api.media.hostile_scene import SECRET, HostileScene
from tests.cluster.api.media.picture_models import data_url, encoded, image_part, picture
from tests.cluster.api.scripted_api import refused


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, pixels: bytes = b"", *extra: bytes, depth: int = 8, color: int = 2) -> bytes:
    """Return a PNG file with any header, whatever its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    body = b"".join((*extra, chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + header + body


def gif(width: int, height: int) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HH", width, height)
        + b"\x00\x00\x00,\0\0\0\0"
        + struct.pack("<HH", width, height)
        + b"\0\2\0;"
    )


def jpeg(width: int, height: int) -> bytes:
    whole = bytearray(encoded(picture(), "JPEG"))
    at = whole.index(b"\xff\xc0") + 5
    whole[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(whole)


PNG, JPEG, WEBP = encoded(picture()), encoded(picture(), "JPEG"), encoded(picture(), "WEBP")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/></svg>'
FILES = {
    "PNG of 60,000 by 60,000 pixels": png(60_000, 60_000),
    "PNG of 2^31 by 2^31 pixels": png(2**31 - 1, 2**31 - 1),
    "PNG one pixel high": png(2 << 20, 1, bytes(6 << 20)),
    "PNG without pixels": png(0, 0),
    "PNG without width": png(0, 100),
    "PNG whose data are missing": png(100, 100),
    "PNG with a bomb of text": png(9, 9, bytes(9 * 28), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20), 9))),
    "PNG with a wrong checksum": PNG[:40] + bytes([PNG[40] ^ 255]) + PNG[41:],
    "PNG cut off": PNG[: len(PNG) // 2],
    "PNG's signature alone": PNG[:8],
    "PNG narrow beyond the model's bound": encoded(picture(1000, 4)),
    "JPEG of 65,500 by 65,500 pixels": jpeg(65_500, 65_500),
    "JPEG cut off": JPEG[: len(JPEG) // 3],
    "JPEG's signature alone": b"\xff\xd8\xff\xe0",
    "WebP cut off": WEBP[: len(WEBP) // 2],
    "WebP of 16,383 by 16,383 pixels": b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xfe\x3f\x00\xfe\x3f\x00",
    "GIF of 65,535 by 65,535 pixels": gif(65_535, 65_535),
    "GIF without a frame": b"GIF89a\x01\0\x01\0\0\0\0;",
    "SVG": SVG,
    "HTML": b"<html><script>alert(1)</script></html>",
    "TIFF": encoded(picture(), "TIFF"),
    "BMP": encoded(picture(), "BMP"),
    "ICO": encoded(picture(), "ICO"),
    "EPS that runs a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (w) file\n",
    "PDF": b"%PDF-1.4\n1 0 obj",
    "ZIP": b"PK\x03\x04" + bytes(100),
    "random bytes": bytes(range(256)) * 40,
    "zeros": bytes(1 << 20),
    "more bytes than a file may have": b"\x89PNG\r\n\x1a\n" + bytes(3 << 20),
}
URLS = {
    "base64 with a wrong letter": "data:image/png;base64,iVBORw0KGgo!!!!",
    "base64 of a wrong length": "data:image/png;base64,iVBOR",
    "base64 with line breaks": "data:image/png;base64,iVBO\nRw0K",
    "base64 in Unicode": "data:image/png;base64,ïVBO",
    "no data": "data:image/png;base64,",
    "no comma": "data:image/png;base64",
    "many parameters": "data:image/png" + ";a=b" * 500 + ",",
    "text as data": "data:text/plain,hello",
    "no scheme": "pictures.example/dog.png",
    "bare base64": "iVBORw0KGgo=",
    "FTP": "ftp://pictures.example/dog.png",
    "gopher": "gopher://127.0.0.1:WITNESS/_x",
    "JavaScript": "javascript:alert(1)",
    "blob": "blob:https://pictures.example/1",
    "scheme with a space": " http://127.0.0.1:WITNESS/",
    "Unix socket": "unix:///var/run/docker.sock",
    "long URL": "http://pictures.example:HOST/" + "a" * 10_000,
    "loopback by address": "http://127.0.0.1:WITNESS/",
    "loopback by name": "http://localhost:WITNESS/",
    "loopback in capitals": "http://LOCALHOST:WITNESS/",
    "loopback as a number": "http://2130706433:WITNESS/",
    "loopback in hexadecimal": "http://0x7f000001:WITNESS/",
    "loopback in octal": "http://0177.0.0.1:WITNESS/",
    "loopback in two parts": "http://127.1:WITNESS/",
    "loopback of IPv6": "http://[::1]:WITNESS/",
    "loopback of IPv4 in IPv6": "http://[::ffff:127.0.0.1]:WITNESS/",
    "loopback in full-width letters": "http://①②⑦.⓪.⓪.①:WITNESS/",
    "name with a dot at its end": "http://localhost.:WITNESS/",
    "host that is not named": "http://other.example:HOST/dog.png",
    "host whose beginning is named": "http://pictures.example.evil.example:HOST/",
    "host whose end is named": "http://evilpictures.example:HOST/",
    "host that ends in a suffix without its dot": "http://evilcdn.example:HOST/",
    "host that does not exist": "http://absent.example:HOST/",
    "credentials": "http://user:password@pictures.example:HOST/dog.png",
    "credentials that look like a host": "http://pictures.example@127.0.0.1:WITNESS/",
    "host after a backslash": "http://127.0.0.1:WITNESS\\@pictures.example/",
    "host after a line break": "http://pictures.example\r\nHost: 127.0.0.1:WITNESS/",
    "port that is none": "http://pictures.example:99999/",
    "missing host": "http:///dog.png",
    **{
        f"{name} leads to {NAMES[name]}": f"http://{name}:WITNESS/"
        for name in NAMES
        if HOST not in NAMES[name][:1] or len(NAMES[name]) > 1
    },
    "redirect to loopback": "http://pictures.example:HOST/to?u=http%3A%2F%2F127.0.0.1%3AWITNESS%2F",
    "redirect to a private name": "http://pictures.example:HOST/to?u=http%3A%2F%2Fprivate.example%3AWITNESS%2F",
    "redirect to a name that is not named": "http://pictures.example:HOST/to?u=http%3A%2F%2Fother.example%2F",
    "redirect to a file": "http://pictures.example:HOST/to?u=file%3A%2F%2F%2Fetc%2Fpasswd",
    "redirect to data": "http://pictures.example:HOST/to?u=data%3Aimage%2Fpng%2Ca",
    "redirect to credentials": "http://pictures.example:HOST/to?u=http%3A%2F%2Fa%3Ab%40pictures.example%3AHOST%2Fdog.png",
    "redirect without end": "http://pictures.example:HOST/to?u=%2Fto%3Fu%3D"
    + quote(quote("/to?u=/to?u=/dog.png", safe=""), safe=""),
    "name that changes its address": "http://rebind.example:HOST/to?u=http%3A%2F%2Frebind.example%3AWITNESS%2F",
    "host that is silent": "http://pictures.example:HOST/silent",
    "host that is slow": "http://pictures.example:HOST/slow",
    "host that never ends": "http://pictures.example:HOST/endless",
    "host whose headers never end": "http://pictures.example:HOST/headers",
    "host that announces a terabyte": "http://pictures.example:HOST/long",
    "host that cuts its answer": "http://pictures.example:HOST/cut",
    "host that compresses": "http://pictures.example:HOST/gzip",
    "host that sends HTML": "http://pictures.example:HOST/html",
    "host that sends nothing": "http://pictures.example:HOST/empty",
    "host that speaks no HTTP": "http://pictures.example:HOST/garbage",
    "host that has no such picture": "http://pictures.example:HOST/absent",
    "host without TLS": "https://pictures.example:HOST/dog.png",
    "file of the system": "file:///etc/passwd",
    "file above the folder": "file://ROOT/pictures/../secret.png",
    "file above the folder, escaped": "file://ROOT/pictures/%2e%2e/secret.png",
    "file beside the folder": "file://ROOT/pictures-beside/a.png",
    "file by a link": "file://ROOT/pictures/link.png",
    "file by a linked folder": "file://ROOT/pictures/linked/secret.png",
    "file by a link to itself": "file://ROOT/pictures/loop.png",
    "file that is a pipe": "file://ROOT/pictures/pipe.png",
    "file that is the folder": "file://ROOT/pictures",
    "file that is no picture": "file://ROOT/pictures/text.png",
    "file that is too large": "file://ROOT/pictures/large.png",
    "file that is not there": "file://ROOT/pictures/absent.png",
    "file with a zero byte": "file://ROOT/pictures/a%00.png",
    "file of the process": "file:///proc/self/environ",
    "file of another host": "file://pictures.example/ROOT/pictures/text.png",
    "file without slashes": "file:ROOT/pictures/text.png",
    "device": "file:///dev/zero",
}
PARTS: dict[str, Any] = {
    "no URL": {"type": "image_url"},
    "URL that is a number": {"type": "image_url", "image_url": {"url": 5}},
    "URL that is a list": {"type": "image_url", "image_url": ["a"]},
    "empty URL": {"type": "image_url", "image_url": {"url": ""}},
    "unknown detail": {"type": "image_url", "image_url": {"url": "data:,a", "detail": {}}},
    "embeddings": {"type": "image_embeds", "image_embeds": "AAAA"},
    "video": {"type": "video_url", "video_url": {"url": "data:,a"}},
    "sound": {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}},
    "stored file": {"type": "input_image", "file_id": "file-1"},
    "unknown type": {"type": ["image_url"]},
}
CASES = [
    *((name, image_part(data_url(data))) for name, data in FILES.items()),
    *((name, image_part(url)) for name, url in URLS.items()),
    *PARTS.items(),
]


@pytest.mark.parametrize(("name", "part"), CASES, ids=[name for name, _ in CASES])
def test_hostile_picture_is_refused(scene: HostileScene, name: str, part: dict[str, Any]) -> None:
    if isinstance(part.get("image_url"), dict) and isinstance(part["image_url"].get("url"), str):
        part = image_part(
            scene.url(part["image_url"]["url"]), **{k: v for k, v in part["image_url"].items() if k != "url"}
        )
    answer = scene.ask(part)
    error = refused(answer, 400, type="invalid_request_error")
    assert error["param"].startswith("messages[0].content[1]")
    for leaked in (SECRET, str(scene.root), "127.0.0.", "root:", "Errno", "python"):
        assert leaked not in answer.text, leaked
    assert scene.witness.num_connections() == 0


def test_picture_of_a_named_host_is_fetched_from_the_address_that_was_checked(scene: HostileScene) -> None:
    """The host sees the name, not the address, and a name is looked up once for a request."""
    for url in (
        "http://pictures.example:HOST/dog.png",
        "http://a.cdn.example:HOST/dog.png",
        "http://faß.example:HOST/dog.png",
        "http://pictures.example:HOST/to?u=http%3A%2F%2Fa.cdn.example%3AHOST%2Fdog.png",
        "http://pictures.example:HOST/to?u=%2Fto%3Fu%3D%2Fdog.png",
    ):
        before = scene.names.looks.total()
        num_requests = len(scene.host.requests)
        assert scene.ask(image_part(scene.url(url))).status_code == 200, url
        requests = scene.host.requests[num_requests:]
        assert scene.names.looks.total() - before == len(requests)
        assert all(
            f"\r\nHost: {name}:{scene.host.port}\r\n" in requests[-1] for name in ("a.cdn.example",) if "cdn" in url
        )
        assert all(f"Host: {HOST}" not in request for request in requests)


def test_many_pictures_are_refused_before_any_is_fetched(scene: HostileScene) -> None:
    num_requests = len(scene.host.requests)
    parts = [image_part(scene.url("http://pictures.example:HOST/dog.png"))] * 1000
    messages = [{"role": "user", "content": parts}]
    answer = scene.http.post("/v1/chat/completions", json={"messages": messages})
    error = refused(answer, 400, param="messages[0].content[4]")
    assert "1000 pictures" in error["message"]
    assert len(scene.host.requests) == num_requests


def test_pictures_go_on_after_all_that(scene: HostileScene) -> None:
    assert scene.ask(image_part(data_url(encoded(picture(seed=77))))).status_code == 200


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"), True),
        (("::ffff:10.0.0.1", "127.0.0.1", "169.254.169.254", "168.63.129.16", "100.64.0.1", "192.168.1.1"), False),
        (("198.18.0.1", "240.0.0.1", "224.0.0.1", "ff02::1", "fe80::1%eth0", "64:ff9b::808:808"), False),
        (("2001:0:1::1", "0.0.0.0", "::127.0.0.1", "fec0::1", "3fff::1", "192.0.0.192", "192.88.99.1"), False),
        (("not an address",), False),
    ],
)
def test_public_addresses(addresses: tuple[str, ...], expected: bool) -> None:
    assert [is_public(address) for address in addresses] == [expected] * len(addresses)


def test_hosts_are_allowed_by_name_or_suffix() -> None:
    hosts = AllowedHosts(("images.example", ".cdn.example"))
    assert [
        hosts.allows(host) for host in ("images.example", "IMAGES.example", "a.cdn.example", "a.b.cdn.example")
    ] == [True] * 4
    assert not any(
        hosts.allows(host) for host in ("cdn.example", "xcdn.example", "a.images.example", "", "images.example.")
    )
    assert not AllowedHosts(()).allows("")


WITHOUT_DESCRIPTORS = """
import asyncio, resource, sys
from pathlib import Path
from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.fetch import PictureFetcher
async def resolve(host, port): return ["127.0.0.1"]
async def main():
    limits = {"most_bytes": 99, "timeout_s": 30.0, "resolve": resolve, "is_allowed": lambda _: True}
    fetcher = PictureFetcher(hosts=AllowedHosts((".cdn.example",)), folder=Path(sys.argv[1]), **limits)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for url in sys.argv[2:]:
        try: await fetcher.fetch(Picture(url, "messages[0]"))
        except ApiError as error: print(error.status, error.code)
asyncio.run(main())
"""


def test_server_without_a_free_descriptor_blames_itself_and_not_the_url(tmp_path: Path) -> None:
    (tmp_path / "dog.png").write_bytes(b"a picture")
    urls = (f"file://{tmp_path}/dog.png", "http://a.cdn.example/dog.png")
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path), *urls]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["503", "too_many_files"] * 2, ended.stderr


@pytest.mark.parametrize("host", ["a" * 64 + ".cdn.example", "a..cdn.example", ".cdn.example"])
def test_name_that_cannot_be_looked_up_is_refused(host: str) -> None:
    """By the system's own lookup: as text, such a name would raise another error than one that has no address."""
    hosts = AllowedHosts((".cdn.example",))
    fetcher = PictureFetcher(hosts=hosts, folder=None, most_bytes=1 << 20, timeout_s=30.0)
    with pytest.raises(ApiError) as caught:
        asyncio.run(fetcher.fetch(Picture(f"http://{host}/dog.png", "messages[0]")))
    assert (caught.value.status, caught.value.param) == (400, "messages[0]")
