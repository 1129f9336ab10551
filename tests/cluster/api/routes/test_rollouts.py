"""The paths of trainers: bodies and answers as vLLM's clients know them, who may call them, and what answers show."""

import asyncio
from pathlib import Path

import pytest

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch import gate
from crossdock.workers.model.checksums import checksums_in
from crossdock.workers.replica.serving.metrics import EngineMetrics
from tests.cluster.api.engine_api import EngineApi
from tests.waiting import until
from tests.workers.model.test_new_weights import saved

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


async def test_request_that_waits_too_long_for_resume_is_answered_with_the_reason(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MOST_WAIT_S", 0.05)
    async with EngineApi(tokenizer, http={"rollouts": True}) as api:
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


async def test_answers_name_the_weights_that_made_them(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    saved(tmp_path / "step", 1)
    saved(tmp_path / "wide", 1, intermediate_size=80)
    async with EngineApi(tokenizer, http={"rollouts": True, "weights_folder": str(tmp_path)}) as api:
        body = STREAM | {"max_tokens": 4}
        assert "weight_versions" not in (await api.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (await api.http.get("/weight_info")).json()["weight_version"] == "default"
        assert (await api.http.get("/get_world_size")).json() == {"world_size": 1}
        refused = await api.http.post("/weight_checker", json={"action": "checksum"})
        assert refused.status_code == 400
        assert "no update" in refused.json()["error"]["message"]
        sent = checksums_in(tmp_path / "step")
        name = next(iter(sent))
        update = {"model_path": "step", "weight_version": "policy 7", "checksums": sent}
        wrong = update | {"checksums": {name: "0" * 64}}
        refused = await api.http.post("/update_weights_from_disk", json=wrong)
        assert refused.status_code == 400
        assert f"than were sent of {name}" in refused.json()["error"]["message"]
        assert (await api.http.get("/weight_info")).json()["weight_version"] == "default"
        answer = await api.http.post("/update_weights_from_disk", json=update)
        assert answer.json() == {"success": True, "message": "Weights updated", "weight_version": "policy 7"}
        [choice] = (await api.http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["weight_versions"] == [{"version": "policy 7", "start": 0, "end": 4}]
        events = (await api.http.post("/v1/completions", json=body | {"stream": True})).text
        assert events.count('"version":"policy 7","start":0,"end":4') == 1
        name = events.split('"id":"')[1].split('"')[0]
        timelines = (await api.http.get(f"/v1/requests/{name}")).json()["requests"]
        assert [each["weight_versions"] for each in timelines] == [["policy 7"]]
        metrics = EngineMetrics(api.replicas[0].engine_thread.engine).registry
        assert metrics.get_sample_value("crossdock_weight_version", {"version": "policy 7"}) == 1
        assert (await api.http.get("/weight_info")).json()["weight_version"] == "policy 7"
        found = await api.http.post("/weight_checker", json={"action": "checksum"})
        assert found.json() == {"checksums": sent}
        for baseline, mismatches in ((sent, []), (sent | {name: "0", "x": "1"}, sorted([name, "x"]))):
            compared = await api.http.post("/weight_checker", json={"action": "compare", "baseline": baseline})
            assert compared.json() == {"match": not mismatches, "mismatches": mismatches}
        for unknown, param in (({"action": "reset"}, "action"), ({"action": "compare"}, "baseline")):
            refused = await api.http.post("/weight_checker", json=unknown)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        for path, status in (("gone", 404), ("../step", 400), ("wide", 400)):
            refused = await api.http.post("/update_weights_from_disk", json={"model_path": path})
            assert refused.status_code == status
            assert refused.json()["error"]["param"] == "model_path"
        assert (await api.http.post("/start_weight_update", json={})).json() == {"message": "Weight update started"}
        info = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
        refused = await api.http.post("/update_weights", json=info)
        assert "call /init_weight_transfer_engine first" in refused.json()["error"]["message"]
        assert (await api.http.post("/reset_prefix_cache")).json() == {"success": True}


async def test_sleep_and_wake_up_answer_as_vllm_does(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, http={"rollouts": True}) as api:
        body = STREAM | {"max_tokens": 8}
        wanted = (await api.http.post("/v1/completions", json=body)).json()["choices"]
        for path in ("/sleep?level=2", "/sleep?level=1&mode=keep", "/sleep?level=x", "/wake_up?tags=pages"):
            refused = await api.http.post(path)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] in path
        assert (await api.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        answer = await api.http.post("/sleep")
        assert (answer.status_code, answer.content) == (200, b"")
        assert (await api.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await api.http.post("/resume")).status_code == 400
        waiting = asyncio.create_task(api.http.post("/v1/completions", json=body))
        await until(lambda: api.dispatcher.num_queued == 1)
        assert (await api.http.post("/wake_up?tags=weights&tags=kv_cache")).status_code == 200
        assert (await waiting).json()["choices"] == wanted
        assert (await api.http.get("/is_sleeping")).json() == {"is_sleeping": False}
