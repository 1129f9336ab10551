"""One request has at most 1,024 outputs and 4,096 messages: the documented numbers, at them and beyond."""

import httpx

from tests.cluster.api.scripted_api import ScriptedDispatcher, refused


def test_request_with_1024_outputs_is_served_and_one_more_is_refused(
    http: httpx.Client, engine: ScriptedDispatcher
) -> None:
    """However prompts and `n` share them, before a replica hears of any."""
    body = {"prompt": ["Hi"] * 512, "n": 2, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(1024))
    engine.submissions.clear()
    for prompts, n in ((205, 5), (1025, 1), (9, 128)):
        answer = http.post("/v1/completions", json={**body, "prompt": ["Hi"] * prompts, "n": n})
        assert "1024" in refused(answer, 400)["message"]
    refused(http.post("/v1/completions", json={"prompt": "Hi", "n": 1025}), 400, param="n")
    refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user"}], "n": 1025}), 400, param="n")
    assert not engine.submissions


def test_chat_with_more_than_4096_messages_is_refused(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    """Beyond that, the number of messages is what is wrong; up to it, what the messages are."""

    def ask(count: int) -> httpx.Response:
        return http.post("/v1/chat/completions", json={"messages": [{}] * count})

    assert refused(ask(4096), 400)["param"] == "messages[0].role"
    error = refused(ask(4097), 400, param="messages")
    assert "4096" in error["message"]
    assert not engine.submissions
