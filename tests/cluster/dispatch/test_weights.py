"""Weights that are replaced under requests, over engines in this process: whose tokens an answer has."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.checksums import checksums_in
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import OtherWeights
from crossdock.workers.schedule.request.request import FinishReason
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.dispatch.in_process import InProcess, serving, tokens
from tests.cluster.dispatch.test_rollouts import PROMPT, Stream, computed
from tests.waiting import until
from tests.workers.model.test_new_weights import saved
from tests.workers.replica.engines import generated

MEMORY = ByteSize(4 << 20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of the small model, beside the one that is loaded."""
    return [saved(tmp_path_factory.mktemp("weights") / f"{seed}", seed) for seed in (1, 2)]


def dict_of(checksums: dict[str, str]) -> Any:
    async def found(_which: str) -> dict[str, str]:
        return checksums

    return found


def greedy_of(folder: Path, count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    return generated(AutoModelForCausalLM.from_pretrained(folder), [PROMPT], count)[0]


async def output(dispatcher: Dispatcher, name: str, count: int) -> list[int]:
    stream = Stream(dispatcher, name, count)
    await stream.task
    return stream.output


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "decode")])
async def test_answers_after_an_update_have_the_new_weights_tokens_alone(
    roles: tuple[str, str], folders: list[Path]
) -> None:
    """Prompts were cached with the old weights on both replicas: none of their pages is used."""
    replicas = [InProcess(EngineConfig(kv_cache_memory=MEMORY, admission="queue"), role) for role in roles]  # type: ignore[arg-type]
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
    async with serving(dispatcher, first=replicas[0], second=replicas[1]):
        rollouts, old = Rollouts(dispatcher), await output(dispatcher, "old", 20)
        wanted = [greedy_of(folder, 20) for folder in folders]
        assert old not in wanted
        for number, folder in enumerate(folders):
            running = [Stream(dispatcher, f"{number} {each}", 20) for each in range(6)]
            await until(lambda running=running: any(stream.output for stream in running))
            weights = await rollouts.update(str(folder), "", "wait")
            assert weights[::2] == (number + 1, f"{number + 1}")
            after = [Stream(dispatcher, f"{number} after {each}", 20) for each in range(3)]
            await asyncio.gather(*(stream.task for stream in (*running, *after)))
            before = {stream.deltas[-1].weights for stream in running}
            assert before <= {str(number) if number else "", f"{number + 1}"}
            for stream in (*running, *after):
                names = {delta.weights for delta in stream.deltas if delta.token_ids}
                assert len(names) == 1, "no answer mixes versions"
                assert stream.output == (wanted[int(name) - 1] if (name := names.pop()) else old)
            assert {stream.deltas[-1].weights for stream in after} == {f"{number + 1}"}
        await until(lambda: all(not each.engine_thread.engine.scheduler.table.requests() for each in replicas))


async def test_kept_streams_go_on_with_the_new_weights_and_say_so(folders: list[Path]) -> None:
    async with serving(Dispatcher("tiny"), only=InProcess()) as dispatcher:
        rollouts, stream = Rollouts(dispatcher), Stream(dispatcher, "r", 150)
        await until(lambda: len(stream.output) > 5)
        await rollouts.update(str(folders[0]), "policy", "keep")
        await stream.task
        assert {delta.weights for delta in stream.deltas if delta.token_ids} == {"", "policy"}
        assert len(stream.output) == 150
        aborted = Stream(dispatcher, "a", 150)
        await until(lambda: bool(aborted.output))
        await rollouts.update(str(folders[1]), "", "abort")
        await aborted.task
        assert aborted.end is FinishReason.ABORT


async def test_update_that_one_replica_cannot_read_changes_none(folders: list[Path], tmp_path: Path) -> None:
    first, second = InProcess(), InProcess()
    other = saved(tmp_path / "other", 3, intermediate_size=80)
    async with serving(Dispatcher("tiny"), first=first, second=second) as dispatcher:
        rollouts, old = Rollouts(dispatcher), await output(dispatcher, "old", 12)
        with pytest.raises(ValueError, match="of another shape"):
            await rollouts.update(str(other), "", "wait")
        good, name = checksums_in(folders[0]), "model.layers.1.self_attn.o_proj.weight"
        with pytest.raises(ValueError, match=f"sent of {name}$"):
            await rollouts.update(str(folders[0]), "", "wait", checksums=good | {name: good["model.norm.weight"]})
        second.controls.checksums = dict_of(good | {name: "0"})  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=f"replicas have unlike tensors: {name}$"):
            await rollouts.update(str(folders[0]), "", "wait", checksums=good)
        assert not rollouts.is_paused
        assert rollouts.weights.number == 0
        assert await output(dispatcher, "still old", 12) == old


async def test_replica_with_older_weights_gets_no_request_until_it_has_caught_up(folders: list[Path]) -> None:
    """As one that restarted: it reads the folder of the last update, and answers with those weights."""
    first, late = InProcess(), InProcess()
    async with serving(Dispatcher("tiny"), first=first) as dispatcher:
        rollouts = Rollouts(dispatcher)
        await rollouts.update(str(folders[0]), "", "wait")
        dispatcher.join("late", late, late.profile)
        await until(lambda: dispatcher.fleet.table.outdated == {"late"} and len(dispatcher.fleet) == 2)
        for number in range(3):
            await tokens(dispatcher, f"{number}", 3)
        assert await computed([late]) == 0
        await rollouts.start()
        await until(lambda: not dispatcher.fleet.table.outdated)
        rollouts.stop()
        dispatcher.leave("first")
        assert await output(dispatcher, "after", 12) == greedy_of(folders[0], 12)


async def test_replica_refuses_a_submission_for_other_weights(folders: list[Path]) -> None:
    """The router of one ingress may hear of an update later than another's."""
    replica = InProcess()
    async with serving(Dispatcher("tiny"), only=replica) as dispatcher:
        await Rollouts(dispatcher).update(str(folders[0]), "", "wait")
        with pytest.raises(OtherWeights, match="the request is for weights ''"):
            await replica.submit(Submission("r", PROMPT))
        assert len(await output(dispatcher, "s", 5)) == 5


@pytest.mark.soak
def test_real_deployment_updates_from_a_folder_and_from_ray(
    ray_cluster: None, small_model_dir: Path, tmp_path: Path
) -> None:
    import httpx
    import torch
    from transformers import AutoModelForCausalLM

    from crossdock.cluster.serve.rollouts import push_weights
    from crossdock.workers.model.checksums import checksum
    from tests.cluster.serve.pools.served_pools import behind_proxies
    from tests.waiting import eventually

    settings = {"http.rollouts": True, "http.weights_folder": str(tmp_path)}
    with behind_proxies(small_model_dir, settings) as url:
        module = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
        old = generated(module, [PROMPT], 8)[0]
        before = {name: tensor.clone() for name, tensor in module.named_parameters()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
        module.save_pretrained(tmp_path / "new")
        new = generated(module, [PROMPT], 8)[0]
        assert old != new

        def answer() -> tuple[list[int], object]:
            body = {"prompt": PROMPT, "max_tokens": 8, "min_tokens": 8, "temperature": 0, "return_token_ids": True}
            [choice] = httpx.post(f"{url}/v1/completions", json=body, timeout=240).json()["choices"]
            return choice["token_ids"], choice.get("weight_versions")

        def after_sleep(level: int) -> list[int]:
            """Return the answer to a request that comes while replicas sleep."""
            assert httpx.post(f"{url}/sleep?level={level}", timeout=240).status_code == 200
            assert httpx.get(f"{url}/is_sleeping", timeout=240).json() == {"is_sleeping": True}
            with ThreadPoolExecutor(1) as thread:
                waiting = thread.submit(answer)
                in_flight = re.compile(r"^crossdock_ingress_requests(\{.*\})? [1-9]", re.MULTILINE)
                eventually(lambda: in_flight.search(httpx.get(f"{url}/metrics", timeout=240).text), "no request waits")
                assert httpx.post(f"{url}/wake_up", timeout=240).status_code == 200
                return waiting.result()[0]

        assert answer() == (old, None)
        assert after_sleep(2) == old
        update = {"model_path": "new", "weight_version": "a"}
        done = httpx.post(f"{url}/update_weights_from_disk", json=update, timeout=240)
        assert done.status_code == 200, done.text
        for _ in range(4):
            assert answer() == (new, [{"version": "a", "start": 0, "end": 8}])
        assert after_sleep(2) == new
        assert push_weights(before.items()) == "2"
        found = httpx.post(f"{url}/weight_checker", json={"action": "checksum"}, timeout=240).json()
        assert found == {"checksums": {name: checksum(tensor) for name, tensor in before.items()}}
        for _ in range(4):
            assert answer() == (old, [{"version": "2", "start": 0, "end": 8}])
        chat = {"model": "smol", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for path, body in (("messages", chat), ("responses", {"input": "Hi", "max_output_tokens": 4})):
            whole = httpx.post(f"{url}/v1/{path}", json=body, timeout=240).json()
            end = whole["usage"]["output_tokens"]
            assert whole["weight_versions"] == [{"version": "2", "start": 0, "end": end}]
            events = httpx.post(f"{url}/v1/{path}", json=body | {"stream": True}, timeout=240).text
            assert events.count('"weight_versions":[{"version":"2","start":0') == 1, path
        told = httpx.get(f"{url}/server_info", timeout=240).json()["vllm_config"]
        assert told["model_config"]["dtype"] == "torch.float32"
        assert told["weight_transfer_config"] == {"backend": "gloo"}, "a CPU has no NCCL"
        refused = httpx.post(f"{url}/sleep?level=2", timeout=240)
        assert (refused.status_code, "a trainer has pushed them" in refused.text) == (400, True)
        assert after_sleep(1) == old
        wrong = httpx.post(f"{url}/update_weights_from_disk", json={"model_path": "../x"}, timeout=240)
        assert wrong.status_code == 400
        assert httpx.post(f"{url}/pause?mode=keep", timeout=240).json() == {"status": "paused"}
        assert httpx.get(f"{url}/get_world_size", timeout=240).json() == {"world_size": 1}
        assert httpx.post(f"{url}/resume", timeout=240).json() == {"status": "resumed"}
        assert answer()[0] == old
