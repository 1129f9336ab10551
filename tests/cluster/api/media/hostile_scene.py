"""A server that may fetch pictures and videos, beside a hostile host and a witness on a forbidden address."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.media.addresses import AllowedHosts, is_public
from crossdock.cluster.api.media.fetch import PictureFetcher
from crossdock.cluster.api.media.media import Media, MediaLimits
from tests.cluster.api.media.hostile_host import HOST, NAMES, HostileHost, Names, Witness
from tests.cluster.api.media.picture_models import encoded, picture, saved
from tests.cluster.api.media.video_models import video_file
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import LiveServer, ScriptedDispatcher

SECRET = "TOP-SECRET"


class HostileScene:
    """A server that may fetch pictures and videos, a hostile host, and a witness on an address that is forbidden."""

    def __init__(
        self, root: Path, http: httpx.Client, host: HostileHost, witness: Witness, names: Names, media: Media
    ) -> None:
        self.root, self.http, self.host, self.witness, self.names = root, http, host, witness, names
        self.media = media

    def ask(self, *parts: Any, key: str = "") -> httpx.Response:
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}, headers=headers)

    def url(self, text: str) -> str:
        """Return a URL with the ports of this scene: HOST is the hostile host's, WITNESS the witness's."""
        text = text.replace(":HOST", f":{self.host.port}").replace(":WITNESS", f":{self.witness.port}")
        text = text.replace("%3AWITNESS", f"%3A{self.witness.port}").replace("%3AHOST", f"%3A{self.host.port}")
        return text.replace("ROOT", str(self.root))


@contextmanager
def hostile_scene(
    root: Path, *, timeout_s: float = 1.0, most_bytes: int = 2 << 20, keys: Sequence[str] = ()
) -> Iterator[HostileScene]:
    """Open the scene in a directory.

    `timeout_s`: of a fetch. `most_bytes`: of a file. `keys`: of the server's clients; none: it needs none.
    """
    model, folder = root / "model", root / "pictures"
    folder.mkdir()
    tokenizer, vocabulary = saved("qwen2_vl", model)
    (root / "secret.png").write_bytes(encoded(picture()))
    (root / "secret.mp4").write_bytes(video_file())
    (root / "pictures-beside").mkdir()
    (root / "pictures-beside" / "a.png").write_bytes(encoded(picture()))
    (folder / "text.png").write_text(SECRET)
    (folder / "link.png").symlink_to(root / "secret.png")
    (folder / "linked").symlink_to(root)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "large.png").write_bytes(b"\x89PNG" + bytes(3 << 20))
    names = Names()
    hosts = AllowedHosts((*NAMES, ".cdn.example", "rebind.example", "127.0.0.1", "localhost", "absent.example"))
    fetcher = PictureFetcher(
        hosts=hosts,
        folder=folder,
        most_bytes=most_bytes,
        timeout_s=timeout_s,
        resolve=names.resolve,
        is_allowed=lambda address: address == HOST or is_public(address),
    )
    limits = MediaLimits(hosts, folder, 4, 1, most_bytes, 1 << 20, timeout_s, 1 << 20, 1 << 30, {}, {"num_frames": 8})
    media = Media(model, vocabulary, limits, fetcher=fetcher)
    witness = Witness()
    dispatcher = ScriptedDispatcher(tokenizer, max_model_len=2000)
    http_config = HttpConfig.model_validate({"api_keys": keys})
    app = one_model_api(dispatcher, tokenizer, http_config, media=media)  # type: ignore[arg-type]
    try:
        media.wait_until_ready()  # the start of its processes is nothing that a test waits for
        with HostileHost() as host, LiveServer(app) as url, httpx.Client(base_url=url, timeout=240) as http:
            yield HostileScene(root, http, host, witness, names, media)
    finally:
        media.close()
        witness.close()
