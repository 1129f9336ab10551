"""A server whose model reads pictures, in front of a scripted dispatcher: one for all tests of its settings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from crossdock.cluster.api.body.pictures import VideoReading
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.media.media import Media
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.serve.media import open_media
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.media.hostile_scene import HostileScene, hostile_scene
from tests.cluster.api.media.picture_models import MODELS, encoded, picture
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import LiveServer, ScriptedDispatcher

TEXT = {"type": "text", "text": "What is this?"}


@dataclass
class PictureServer:
    """A server, and what its dispatcher was given."""

    url: str
    http: httpx.Client
    dispatcher: ScriptedDispatcher
    media: Media
    registry: CollectorRegistry
    folder: Path  # whose files may be read

    def ask(self, *parts: Any, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": [*parts, TEXT]}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **fields})

    def submission(self, answer: httpx.Response) -> Submission:
        """Return the last submission of a request, which must succeed."""
        assert answer.status_code == 200, answer.text
        return self.dispatcher.submissions[-1]

    def submitted(self, *parts: Any, **fields: Any) -> Submission:
        return self.submission(self.ask(*parts, **fields))

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(f"crossdock_ingress_{name}") or 0.0


@pytest.fixture(scope="session")
def picture_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PictureServer]:
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("pictures")
    template = replace(MODELS["qwen2_vl"])
    tokenizer = ModelTokenizer(template.save(model))
    (folder / "dog.png").write_bytes(encoded(picture()))
    config = HttpConfig(
        allowed_media_domains=("pictures.example", ".cdn.example", "private.example", "127.0.0.1", "localhost"),
        allowed_local_media_path=str(folder),
        limit_mm_per_prompt={"image": 8, "video": 2},
        media_io_kwargs={"video": VideoReading(num_frames=12)},
        media_max_pixels=1 << 20,
        media_max_bytes=2 << 20,
        media_timeout_s=1.0,
    )
    registry = CollectorRegistry()
    media = open_media(model, tokenizer, config, registry)
    assert media is not None
    dispatcher = ScriptedDispatcher(tokenizer, max_model_len=2000)
    app = one_model_api(dispatcher, tokenizer, config, media=media)  # type: ignore[arg-type]
    try:
        with LiveServer(app) as url, httpx.Client(base_url=url, timeout=240) as http:
            yield PictureServer(url, http, dispatcher, media, registry, folder)
    finally:
        media.close()


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileScene]:
    """One server for all hostile pictures and videos."""
    with hostile_scene(tmp_path_factory.mktemp("hostile")) as scene:
        yield scene
