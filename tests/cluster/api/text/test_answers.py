"""Shapes of answers, checked against OpenAI's own models."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from crossdock.cluster.api.http.answers import AnswerEvents
from crossdock.cluster.api.text.logprobs import LogprobWriter
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import TokenLogprobs


def half_a_smile(tokenizer: ModelTokenizer) -> int:
    return next(token for token in range(600) if tokenizer.token_bytes(token) == b"\xf0")


async def test_completion_logprobs_match_openais_model(tokenizer: ModelTokenizer) -> None:
    the, dog = tokenizer.encode(" the")[0], tokenizer.encode(" dog")[0]
    half = half_a_smile(tokenizer)
    positions = [
        (the, None),
        (dog, TokenLogprobs(dog, -0.5, 1, ((dog, -0.5), (the, -1.5)))),
        (half, TokenLogprobs(half, float("-inf"), 9, ((the, -0.1),))),
    ]
    shape = await LogprobWriter(tokenizer, as_ids=False).completion(positions, [0, 4, 8])
    # The client's model does not know that the first prompt token has none, though OpenAI sends it so.
    parsed = Logprobs.model_validate({name: values[1:] for name, values in shape.items()})
    assert parsed.text_offset == [4, 8]
    assert shape["token_logprobs"] == [None, -0.5, -9999.0]
    names = tokenizer.token_bytes(the).decode(), tokenizer.token_bytes(dog).decode()
    assert shape["tokens"] == [*names, "bytes:\\xf0"]
    # The token itself is always among the likeliest, so that a reader can compare them.
    assert shape["top_logprobs"] == [None, {names[1]: -0.5, names[0]: -1.5}, {names[0]: -0.1, "bytes:\\xf0": -9999.0}]
    json.dumps(shape, allow_nan=False)


async def test_chat_logprobs_match_openais_model(tokenizer: ModelTokenizer) -> None:
    the = tokenizer.encode(" the")[0]
    half = half_a_smile(tokenizer)
    positions = [TokenLogprobs(half, -3.0, 3, ((the, -0.1), (5, -2.0))), TokenLogprobs(the, -0.1, 1, ((the, -0.1),))]
    writer = LogprobWriter(tokenizer, as_ids=False)
    shape = await writer.chat(positions, 2)
    parsed = ChoiceLogprobs.model_validate(shape)
    assert parsed.content is not None
    first, second = parsed.content
    assert (first.token, first.bytes, first.logprob) == ("\ufffd", [0xF0], -3.0)
    assert [top.logprob for top in first.top_logprobs] == [-0.1, -2.0]  # the two likeliest, which it is not among
    assert bytes(second.bytes or []).decode() == second.token
    assert [top.token for top in second.top_logprobs] == [second.token]
    assert (await writer.chat(positions, 0))["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_have_vllms_shape(tokenizer: ModelTokenizer) -> None:
    the, dog = tokenizer.encode(" the")[0], tokenizer.encode(" dog")[0]
    shape = await LogprobWriter(tokenizer, as_ids=False).prompt([None, TokenLogprobs(dog, -2.0, 7, ((the, -0.1),))])
    assert shape == [
        None,
        {
            str(the): {"logprob": -0.1, "rank": 1, "decoded_token": tokenizer.token_bytes(the).decode()},
            str(dog): {"logprob": -2.0, "rank": 7, "decoded_token": tokenizer.token_bytes(dog).decode()},
        },
    ]


def parsed_event(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


@given(st.text(st.characters(codec="utf-8")), st.integers(0, 3))
def test_text_event_equals_serialised_json(piece: str, index: int) -> None:
    head = {"id": "x-1", "created": 1, "model": 'a"b'}
    for is_chat, kind in ((True, "chat.completion.chunk"), (False, "text_completion")):
        events = AnswerEvents({**head, "object": kind}, is_chat=is_chat, include_usage=False)
        body = {"delta": {"content": piece}} if is_chat else {"text": piece}
        choice = {"index": index, **body, "logprobs": None, "finish_reason": None}
        for event in (events.text(index, piece), events.choice(choice)):
            assert parsed_event(event) == {**head, "object": kind, "choices": [choice]}
