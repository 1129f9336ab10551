"""Adapters by name: /v1/load_lora_adapter and its opposite as in vLLM, and requests that name one as their model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.routes.adapters import AdapterNames, Naming
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ReplicaLost
from crossdock.workers.schedule.request.submission import Adapter
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import LiveServer, ScriptedDispatcher

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def read(name: str, folder: Path) -> Adapter:
    content = (folder / "content").read_text()
    if content == "bad":
        raise ValueError("use_dora is True")
    return Adapter(name, str(folder), content)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for name in ("one", "two", "bad", "wide", "early"):
        (root / "all" / name).mkdir(parents=True)
        (root / "all" / name / "content").write_text(name)
    (root / "outside").mkdir()
    (root / "outside" / "content").write_text("outside")
    (root / "all" / "link").symlink_to(root / "outside")
    (root / "all" / "linked").mkdir()
    (root / "all" / "linked" / "content").symlink_to(root / "outside" / "content")
    return root


@pytest.fixture
def told() -> list[tuple[str, Naming]]:
    return []


@pytest.fixture
def http(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer, root: Path, told: list[tuple[str, Naming]]
) -> Iterator[httpx.Client]:
    async def notify(name: str, naming: Naming) -> None:
        told.append((name, naming))

    keys: Any = ["client", {"key": "operator", "sees_all_requests": True}]

    async def check(path: str) -> None:
        if path.endswith("wide"):
            raise ValueError("it has 64 inputs; this model's has 48")
        if path.endswith("early"):
            raise ReplicaLost("no replica is up")

    adapters = AdapterNames(read, root / "all", notify, ("tiny", "other"), check)
    api = one_model_api(engine, tokenizer, HttpConfig(api_keys=keys, model_aliases=("other",)), adapters=adapters)  # type: ignore[arg-type]
    headers = {"authorization": "Bearer operator"}
    with LiveServer(api) as url, httpx.Client(base_url=url, timeout=240, headers=headers) as client:
        yield client


def load(http: httpx.Client, name: str = "sql", path: str = "one", **fields: Any) -> httpx.Response:
    return http.post(LOAD, json={"lora_name": name, "lora_path": path, **fields})


def models(http: httpx.Client) -> dict[str, Any]:
    return {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}


def test_loaded_adapter_is_a_model_until_it_is_unloaded(
    http: httpx.Client, engine: ScriptedDispatcher, told: list[tuple[str, Naming]]
) -> None:
    answer = load(http)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert models(http) == {"tiny": None, "other": None, "sql": "tiny"}
    body = {"prompt": "Hi", "max_tokens": 4}
    answers = [http.post("/v1/completions", json=body | {"model": name}).json() for name in ("sql", "tiny", "other")]
    assert [each["model"] for each in answers] == ["sql", "tiny", "other"]
    assert [each.adapter and each.adapter.fingerprint for each in engine.submissions] == ["one", None, None]
    assert len({each.page_salt for each in engine.submissions}) == 2
    answer = http.post(UNLOAD, json={"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    answer = http.post("/v1/completions", json=body | {"model": "sql"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert [name for name, _ in told] == ["sql", "sql"]
    assert told[1][1].adapter is None


def test_name_means_other_files_only_in_place(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    load(http)
    answer = load(http, path="two")
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert answer.json()["error"]["message"] == "The lora adapter 'sql' has already been loaded."
    assert load(http, path="two", load_inplace=True).status_code == 200
    http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert engine.submissions[-1].adapter is not None
    assert engine.submissions[-1].adapter.fingerprint == "two"


@pytest.mark.parametrize(
    ("name", "path", "status", "reason"),
    [
        ("sql", "", 400, "must be provided"),
        ("", "one", 400, "must be provided"),
        ("sql", "none", 404, "No adapter is at"),
        ("sql", "bad", 400, "use_dora is True"),
        ("sql", "wide", 400, "this model's has 48"),
        ("sql", "early", 503, "not available now"),
        ("sql", "../outside", 400, "must be below the folder of adapters"),
        ("sql", "link", 400, "must be below the folder of adapters"),
        ("sql", "linked", 400, "linked/content is a link out of its folder"),
        ("sql", "/etc", 400, "must be below the folder of adapters"),
        ("sql", "a\0b", 400, "character 0"),
        ("tiny", "one", 400, "is a name of the base model"),
        ("other", "one", 400, "is a name of the base model"),
    ],
)
def test_adapter_that_cannot_be_loaded_is_refused(
    http: httpx.Client, name: str, path: str, status: int, reason: str
) -> None:
    answer = load(http, name, path)
    assert answer.status_code == status
    assert reason in answer.json()["error"]["message"]
    assert models(http) == {"tiny": None, "other": None}


def test_unknown_name_cannot_be_unloaded(http: httpx.Client) -> None:
    answer = http.post(UNLOAD, json={"lora_name": "sql"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
    assert http.post(UNLOAD, json={}).status_code == 400


def test_key_without_the_right_to_see_all_loads_nothing(http: httpx.Client) -> None:
    answer = http.post(LOAD, json={"lora_name": "sql", "lora_path": "one"}, headers={"authorization": "Bearer client"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")


def test_server_without_a_folder_loads_nothing(url: str) -> None:
    answer = httpx.post(f"{url}{LOAD}", json={"lora_name": "sql", "lora_path": "one"}, timeout=240)
    assert answer.status_code == 403
    assert "--enable-lora --lora-folder FOLDER" in answer.json()["error"]["message"]
