"""Responses and Messages over real engines, one of which is lost in mid-stream: the same answer as without the loss."""

import json
from typing import Any

import pytest

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.engine_api import EngineApi, lose_after
from tests.cluster.dispatch.in_process import IN_TURN
from tests.cluster.small_tokenizers import byte_level

NUM_TOKENS = 100
TALK = [{"role": "user", "content": "!#%&!#%&"}]  # one token each, of the few that the small model has
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": TALK, "max_output_tokens": NUM_TOKENS},
    "/v1/messages": {"messages": TALK, "max_tokens": NUM_TOKENS},
}


def streamed_text(answer: str) -> str:
    events = [json.loads(block.partition("data: ")[2]) for block in answer.split("\n\n") if block]
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta") or "_delta" in event["type"]]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


@pytest.mark.parametrize("path", BODIES)
async def test_stream_goes_on_at_another_replica_after_the_loss_of_its_own(path: str) -> None:
    fields = {"temperature": 0, "ignore_eos": True}
    plain = byte_level()
    plain.chat_template = "{{ messages[0].content }}"
    tokenizer = ModelTokenizer(plain)
    async with EngineApi(tokenizer, num_replicas=2, router=IN_TURN) as api:
        chat = {"messages": TALK, "max_tokens": NUM_TOKENS, **fields}
        whole = (await api.http.post("/v1/chat/completions", json=chat)).json()
        body = {**BODIES[path], **fields, "stream": True}
        lose_after(api, 5)
        answer = await api.http.post(path, json=body)
        assert streamed_text(answer.text) == whole["choices"][0]["message"]["content"]
        assert 'crossdock_ingress_placed_again_total{ingress="0"} 1.0' in await api.dispatcher.metrics_text()
