"""Messages of chats on their way to the template."""

from typing import Any

import pytest

from crossdock.cluster.api.body.messages import template_messages
from crossdock.cluster.api.body.response_items import input_items
from crossdock.cluster.api.errors import ApiError


def test_messages_reach_template_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "S", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    seen = template_messages(messages)
    assert seen[0] == messages[0]
    assert seen[1]["content"] == "a\nb"
    assert seen[2]["content"] == ""
    assert seen[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert seen[3]["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": 5, "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_invalid_message_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        template_messages([message])
    assert refused.value.param == param


def test_content_stays_in_parts_for_templates_that_read_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    as_texts = [[{"type": "text", "text": text} for text in texts] for texts in (["a", "b"], ["c"])]
    assert [message["content"] for message in template_messages(messages, keeps_parts=True)] == as_texts
    assert [message["content"] for message in template_messages(messages)] == ["a\nb", "c"]


@pytest.mark.parametrize("calls", [None, []])
def test_message_without_calls_has_no_field_for_calls(calls: Any) -> None:
    """The templates of Llama 3.1 to 3.3 ask whether a message has the field."""
    [seen] = template_messages([{"role": "assistant", "content": "yo", "tool_calls": calls}])
    assert "tool_calls" not in seen


def test_refusal_of_the_assistant_is_text() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    assert template_messages([{"role": "assistant", "content": parts}])[0]["content"] == "Well.\nNo."
    [item] = input_items([{"role": "assistant", "content": [{"type": "output_text", "text": "Well."}, parts[1]]}])
    assert [part["text"] for part in item["content"]] == ["Well.", "No."]
    for role, part in (
        ("user", parts[1]),
        ("assistant", {"type": "refusal"}),
        ("assistant", {"type": "refusal", "refusal": 5}),
    ):
        with pytest.raises(ApiError) as refused:
            template_messages([{"role": role, "content": [part]}])
        assert refused.value.param == "messages[0].content[0]"
