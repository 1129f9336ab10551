"""`/v1/scaling`: what the scaler decided. Keys that do not see all requests are not shown the load."""

from typing import Any

import httpx

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher

RESIZE = {"at": 1.0, "pool": "mixed", "replicas": 2, "replicas_before": 1, "reason": "demand for 2", "error": None}
LOAD = {"replicas": 1, "demand": 1.4, "prompt_share": 0.9, "waiting_s": 3.0, "step_s": 0.02, "streams": 7}
KEYS = [{"key": "operator", "sees_all_requests": True}, "client"]


async def decided() -> list[dict[str, Any]]:
    return [{**RESIZE, "load": LOAD}]


async def hangs() -> list[dict[str, Any]]:
    raise TimeoutError


async def asked(tokenizer: ModelTokenizer, decisions: Any, key: str = "operator") -> httpx.Response:
    http = HttpConfig.model_validate({"api_keys": KEYS})
    app = one_model_api(ScriptedDispatcher(tokenizer), tokenizer, http, decisions=decisions)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.get("/v1/scaling", headers={"Authorization": f"Bearer {key}"})


async def test_decisions_show_the_load_to_keys_that_see_all_requests(tokenizer: ModelTokenizer) -> None:
    answer = await asked(tokenizer, decided)
    assert answer.json() == {"object": "list", "data": [{**RESIZE, "load": LOAD}]}
    (limited,) = (await asked(tokenizer, decided, "client")).json()["data"]
    assert limited == {key: value for key, value in RESIZE.items() if key != "reason"}
    assert (await asked(tokenizer, decided, "none")).status_code == 401


async def test_fixed_pools_have_no_decisions_and_a_silent_scaler_is_503(tokenizer: ModelTokenizer) -> None:
    assert (await asked(tokenizer, None)).json() == {"object": "list", "data": []}
    answer = await asked(tokenizer, hangs)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "The scaler does not answer."
