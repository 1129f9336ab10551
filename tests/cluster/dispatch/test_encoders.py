"""Requests with pictures over an encode replica in this process: each replica gets the address of the other one."""

import asyncio
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.encoder_model import drop_decoder, wrap_encoder
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.submission import SamplingParams, Submission
from tests.cluster.dispatch.in_process import InProcess, ready
from tests.workers.multimodal import NO_PLACEHOLDERS, PicturePrompt, build_multimodal, picture

FAMILY = "qwen3_vl"
PROMPTS = [
    PicturePrompt.of(20, picture(FAMILY, 2 * number, (3, 4)), 9, picture(FAMILY, 2 * number + 1), 5, seed=number)
    for number in range(6)
]


def replica(role: Role, *, takes_rows: bool = False) -> InProcess:
    config = EngineConfig(kv_cache_memory=ByteSize(4 << 20), max_num_batched_tokens=48)
    module: Any = build_multimodal(FAMILY)
    if role == "encode":
        drop_decoder(module)
        return InProcess(role=role, engine=new_engine(wrap_encoder(module), config))
    return InProcess(role=role, engine=new_engine(wrap_module(module, LoadOptions(takes_rows=takes_rows)), config))


async def answers(replicas: dict[str, InProcess]) -> tuple[list[list[int]], Dispatcher]:
    """Return the tokens after each prompt, all asked at once. Whatever can be encoded elsewhere is."""
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
    for name, client in replicas.items():
        dispatcher.join(name, client, client.profile)
    await ready(dispatcher, len(replicas))

    async def one(number: int) -> list[int]:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logit_bias=NO_PLACEHOLDERS)
        prompt, tokens = PROMPTS[number], list[int]()
        name = f"r{number}"
        work = Submission(name, prompt.token_ids, params, request_id=name, items=prompt.items)
        async for delta in dispatcher.generate(work):
            tokens += delta.token_ids
        return tokens

    return await asyncio.gather(*map(one, range(len(PROMPTS)))), dispatcher


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
async def test_tokens_with_an_encode_replica_equal_those_of_one_replica(roles: tuple[Role, ...]) -> None:
    alone = {"alone": replica("mixed")}
    wanted, dispatcher = await answers(alone)
    await dispatcher.close()
    together = {"encode": replica("encode")} | {role: replica(role, takes_rows=True) for role in roles}
    found, dispatcher = await answers(together)
    assert found == wanted
    legs = [{part["leg"] for part in await dispatcher.timelines(f"r{number}", None)} for number in range(6)]
    assert legs == [{"encode", "local"} if roles == ("mixed",) else {"encode", "send", "receive"}] * 6
    assert 'crossdock_router_encodings_total{role="encode"} 6.0' in dispatcher.metrics.text()
    text = await together[roles[0]].call("metrics_text", None)
    assert "crossdock_items_received_total 12.0" in text
    assert "crossdock_items_encoded_total 0.0" in text
    assert (await together["encode"].watched({}, None))["profile"]["role"] == "encode"
    await dispatcher.close()
    for client in (*alone.values(), *together.values()):
        await client.engine_thread.close()
