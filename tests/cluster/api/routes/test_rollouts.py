"""The paths of trainers: pause and resume with vLLM's bodies, who may call them, and the answers of paused requests."""

import asyncio

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.engine_api import EngineApi
from tests.waiting import until

STREAM = {"prompt": [5 + i for i in range(9)], "max_tokens": 150, "ignore_eos": True, "temperature": 0}


async def test_pause_ends_running_requests_with_finish_reason_abort(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, http={"rollouts": True}) as api:
        assert (await api.http.get("/is_paused")).json() == {"is_paused": False}
        running = asyncio.create_task(api.http.post("/v1/completions", json=STREAM))
        await until(lambda: any(replica.engine_thread.num_computed > 20 for replica in api.replicas))
        assert (await api.http.post("/pause")).json() == {"status": "paused"}
        [choice] = (await running).json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert choice["text"]
        assert (await api.http.get("/is_paused")).json() == {"is_paused": True}
        late = asyncio.create_task(api.http.post("/v1/completions", json=STREAM | {"max_tokens": 3}))
        await until(lambda: api.dispatcher.num_queued == 1)
        assert (await api.http.post("/resume")).json() == {"status": "resumed"}
        assert (await late).json()["choices"][0]["finish_reason"] == "length"
        refused = await api.http.post("/pause?mode=now")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "mode"


async def test_request_that_waits_too_long_for_resume_is_answered_with_the_reason(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, http={"rollouts": True}, gate_s=0.05) as api:
        await api.http.post("/pause?mode=keep")
        answer = await api.http.post("/v1/completions", json=STREAM)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "generation_paused"


async def test_paths_of_trainers_need_the_switch_and_a_key_that_sees_all(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer) as api:
        answer = await api.http.post("/pause")
        assert answer.status_code == 404
        assert "--enable-rollouts" in answer.json()["error"]["message"]
    keys = ["plain", {"key": "admin", "sees_all_requests": True}]
    async with EngineApi(tokenizer, keys=keys, http={"rollouts": True}) as api:
        for key, status in (("plain", 403), ("admin", 200), ("wrong", 401)):
            headers = {"authorization": f"Bearer {key}"}
            for method, path in (("POST", "/pause"), ("GET", "/is_paused"), ("POST", "/resume")):
                assert (await api.http.request(method, path, headers=headers)).status_code == status
