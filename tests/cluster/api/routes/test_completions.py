"""POST /v1/completions over sockets: prompts, echoes, log-probabilities and streams, as OpenAI's client reads them."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.scripted_api import HI, STORY, ScriptedDispatcher, complete, events, refused


def test_completion_matches_openais_model(
    client: openai.OpenAI, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    answer = client.completions.create(model="tiny", prompt="Once upon", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert abs(answer.created - time.time()) < 60
    [choice] = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (STORY, 0, "stop", None)
    num_prompt, num_output = len(tokenizer.encode("Once upon")), len(tokenizer.encode(STORY)) + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert engine.submissions[0].prompt_token_ids == tokenizer.encode("Once upon")
    assert engine.aborted == []


def test_completion_without_max_tokens_has_sixteen(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    engine.script = lambda s: engine.story(s, STORY * 3)
    answer = complete(http)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == tokenizer.decode(tokenizer.encode(STORY * 3)[:16]).rstrip("\ufffd")
    assert engine.submissions[0].sampling.temperature == 1.0


def test_prompt_as_token_ids_or_batch_is_completed_in_order(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    complete(http, [5, 6, 7])
    assert [list(s.prompt_token_ids) for s in engine.submissions] == [[5, 6, 7]]
    engine.submissions.clear()
    engine.script = lambda s: engine.story(s, f"{len(s.prompt_token_ids)} tokens")
    answer = complete(http, [[5], [6, 7], [8, 9, 10]], max_tokens=50, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in answer["choices"]] == [f"{n} tokens" for n in (1, 1, 2, 2, 3, 3)]
    assert answer["usage"]["prompt_tokens"] == 6  # a prompt counts once, whatever n
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    engine.submissions.clear()
    complete(http, ["a", "b c"])
    assert sorted(list(s.prompt_token_ids) for s in engine.submissions) == sorted(
        [tokenizer.encode("a"), tokenizer.encode("b c")]
    )


def test_batched_prompts_run_concurrently(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    begun_before_the_first_token = []

    def script(submission: Submission) -> Iterator[TokenDelta | Exception | float]:
        for _ in range(1000):  # 10 s
            if len(engine.submissions) == 20:
                break
            yield 0.01
        begun_before_the_first_token.append(len(engine.submissions))
        yield from engine.story(submission)

    engine.script = script
    complete(http, ["a"] * 20)
    assert begun_before_the_first_token == [20] * 20


def test_seed_is_distinct_for_each_choice_and_drawn_if_missing(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    complete(http, n=3, seed=7, best_of=3)
    assert sorted(s.sampling.seed for s in engine.submissions) == [7, 8, 9]
    engine.submissions.clear()
    complete(http, seed=-1)
    complete(http, seed=2**63 - 1, n=2)
    assert all(0 <= s.sampling.seed < 2**63 for s in engine.submissions)
    engine.submissions.clear()
    complete(http)
    complete(http)
    assert len({s.sampling.seed for s in engine.submissions}) == 2  # drawn


def test_echo_precedes_output(http: httpx.Client) -> None:
    answer = complete(http, "The dog €", echo=True, max_tokens=100)
    assert answer["choices"][0]["text"] == "The dog €" + STORY
    answer = complete(http, "<|im_start|>a", echo=True, max_tokens=100)
    assert answer["choices"][0]["text"] == "<|im_start|>a" + STORY


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output_scores_prompt(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer, stream: bool
) -> None:
    """Clients that want the log-probabilities of a prompt send max_tokens 0."""
    body = {"prompt": "The dog", "echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    if stream:
        [chunk] = events(answer)
    else:
        chunk = answer.json()
        assert chunk["usage"]["completion_tokens"] == 0
    [choice] = chunk["choices"]
    ids = tokenizer.encode("The dog")
    assert (choice["text"], choice["finish_reason"]) == ("The dog", "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
    assert "".join(logprobs["tokens"]) == "The dog"
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert engine.submissions[0].sampling.max_tokens == 1
    assert engine.submissions[0].sampling.prompt_logprobs == 2
    assert complete(http, max_tokens=0)["choices"][0]["text"] == ""


@pytest.mark.parametrize("echo", [False, True])
def test_prompt_without_output_is_no_success_where_the_replica_ends_it(
    http: httpx.Client, engine: ScriptedDispatcher, echo: bool
) -> None:
    """An abort has no log-probabilities of the prompt, so an answer would lack them."""
    for reason, status in ((FinishReason.ABORT, 503), (FinishReason.ERROR, 500)):
        engine.script = lambda s, reason=reason: [TokenDelta(s.id, [], finish_reason=reason, error="broken")]  # type: ignore[misc]
        body = {"prompt": "The dog", "max_tokens": 0, "echo": echo, "logprobs": 2 if echo else None}
        assert http.post("/v1/completions", json=body).status_code == status


def test_text_offsets_point_at_tokens(http: httpx.Client) -> None:
    for echo in (False, True):
        [choice] = complete(http, "Say €: ", logprobs=1, echo=echo, max_tokens=100)["choices"]
        logprobs = choice["logprobs"]
        lengths = {len(values) for values in logprobs.values()}
        assert len(lengths) == 1
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:") and token != "<|im_end|>":
                assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("skips", [True, False])
def test_text_offsets_of_an_echo_point_at_tokens_behind_special_tokens(http: httpx.Client, skips: bool) -> None:
    prompt = "a dog. <|im_end|> In 1984<|im_end|> a €"
    fields = {"logprobs": 1, "echo": True, "max_tokens": 3, "skip_special_tokens": skips}
    [choice] = complete(http, prompt, **fields)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(prompt)
    assert tokens.count("<|im_end|>") == 2
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


def test_streamed_completion_ends_with_usage_if_asked(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    body = {"prompt": "Hi", "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post("/v1/completions", json=body))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    *tokens, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in tokens) == STORY
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in tokens)
    assert last["choices"] == []
    assert last["usage"] == complete(http, max_tokens=100)["usage"]
    without = events(http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, "stream": True}))
    assert all("usage" not in chunk for chunk in without)


def test_streamed_completion_equals_whole_answer(http: httpx.Client) -> None:
    body = {
        "prompt": ["a", "The dog"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 100,
        "return_token_ids": True,
    }
    whole = complete(http, **body)["choices"]
    streamed: dict[int, list[Any]] = {}
    for chunk in events(http.post("/v1/completions", json={**body, "stream": True})):
        for choice in chunk["choices"]:
            streamed.setdefault(choice["index"], []).append(choice)
    for choice in whole:
        parts = streamed[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_prompt_logprobs_and_token_ids_are_returned(
    http: httpx.Client, tokenizer: ModelTokenizer, engine: ScriptedDispatcher
) -> None:
    ids = tokenizer.encode("The dog")
    [choice] = complete(http, "The dog", prompt_logprobs=1, return_token_ids=True, max_tokens=3)["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == tokenizer.encode(STORY)[:3]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])]["rank"] == 1
    answer = http.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 0, "return_token_ids": True})
    chat = answer.json()
    assert chat["prompt_token_ids"] == engine.submissions[-1].prompt_token_ids
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["choices"][0]["token_ids"] == [*tokenizer.encode(STORY), engine.eos]
    stream = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    refused(http.post("/v1/completions", json=stream), 400, param="prompt_logprobs")
