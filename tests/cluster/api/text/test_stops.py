"""Where outputs end: stop strings and tokens, special tokens, half characters."""

from typing import Any

import httpx
import pytest

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.scripted_api import STORY, ScriptedDispatcher, complete, events
from tests.waiting import eventually


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"stop": "brown"}, "The quick "),
        ({"stop": ["zebra", "own fox 🙂 ju"]}, "The quick br"),
        ({"stop": "brown", "include_stop_str_in_output": True}, "The quick brown"),
        ({"stop": ["o", "zebra"], "min_tokens": 4}, None),
    ],
)
def test_stop_string_ends_request(
    http: httpx.Client,
    engine: ScriptedDispatcher,
    tokenizer: ModelTokenizer,
    stream: bool,
    fields: dict[str, Any],
    shown: str | None,
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, "stream": stream, **fields})
    choices = [c["choices"][0] for c in events(answer)] if stream else answer.json()["choices"]
    output = "".join(choice["text"] for choice in choices)
    if shown is None:  # the first "o" after four tokens, which is not the first
        head = len(tokenizer.decode(tokenizer.encode(STORY)[:4]))
        shown = STORY[: STORY.index("o", head)]
        assert "o" in shown
    assert output == shown
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] in fields["stop"]
    eventually(lambda: engine.aborted == [engine.submissions[0].id])


def test_unfinished_stop_string_is_shown_at_end(http: httpx.Client) -> None:
    [choice] = complete(http, stop="dog!", max_tokens=100)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (STORY, "stop")
    assert choice["stop_reason"] is None


def test_tokens_after_stop_string_in_same_step_are_dropped(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    ids = tokenizer.encode(STORY)
    engine.script = lambda s: [TokenDelta(s.id, ids), TokenDelta(s.id, [engine.eos], finish_reason=FinishReason.STOP)]
    answer = complete(http, stop="quick", max_tokens=100, return_token_ids=True)
    assert answer["choices"][0]["text"] == "The "
    kept = answer["choices"][0]["token_ids"]
    assert kept == ids[: len(kept)]
    assert tokenizer.decode(kept).startswith("The quick")
    assert answer["usage"]["completion_tokens"] == len(kept) < len(ids)


def test_stop_token_is_shown_only_if_asked(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    last = tokenizer.encode(STORY)[-1]

    def script(submission: Submission) -> list[TokenDelta | Exception | float]:
        ids = tokenizer.encode(STORY)
        deltas: list[TokenDelta | Exception | float] = [TokenDelta(submission.id, [token]) for token in ids[:-1]]
        return [*deltas, TokenDelta(submission.id, [last], finish_reason=FinishReason.STOP, stop_token_id=last)]

    engine.script = script
    [choice] = complete(http, stop_token_ids=[last], max_tokens=100)["choices"]
    assert choice["text"] == STORY.removesuffix(tokenizer.decode([last]))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", last)
    [choice] = complete(http, stop_token_ids=[last], include_stop_str_in_output=True, max_tokens=100)["choices"]
    assert choice["text"] == STORY


def test_special_tokens_are_shown_only_if_asked(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    engine.script = lambda s: engine.story(s, "a<|im_start|>b")
    assert complete(http)["choices"][0]["text"] == "ab"
    assert complete(http, skip_special_tokens=False)["choices"][0]["text"] == "a<|im_start|>b"


def test_half_character_is_never_sent(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    engine.script = lambda s: engine.story(s, "🙂🙃")
    ids = tokenizer.encode("🙂🙃")
    for count in range(1, len(ids)):
        [choice] = complete(http, max_tokens=count)["choices"]
        assert choice["text"] in ("", "🙂")
    chunks = events(http.post("/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 100}))
    assert [c["choices"][0]["text"] for c in chunks if c["choices"][0]["text"]] == ["🙂", "🙃"]
