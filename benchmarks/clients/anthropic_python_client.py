"""anthropic for Python: messages, thinking, tools, and their errors."""

from typing import Any

import anthropic
from cases import (
    ASKS,
    FOUND_BOTH,
    HI,
    KEY,
    MODEL,
    NO_PICTURE,
    PARIS,
    PICTURES,
    SCHEMA,
    STORY,
    THOUGHT,
    URL,
    Weather,
    case,
    equal,
    get_weather,
    raised,
    run,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
seeing = anthropic.Anthropic(base_url=PICTURES["url"], api_key=KEY, max_retries=0)
limits = {"max_tokens": PICTURES["num_tokens"], "extra_body": {"temperature": 0}}  # the client has no temperature
TOOL = {"name": "get_weather", "description": "The weather in a city", "input_schema": SCHEMA}


@case("chat")
def chat() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=500, messages=HI)
    equal([block.type for block in answer.content], ["thinking", "text"])
    equal((answer.content[0].thinking.strip(), answer.content[1].text), (THOUGHT, STORY))


@case("chat, streamed")
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=500, messages=HI) as events:
        texts = list(events.text_stream)
        final = events.get_final_message()
    equal("".join(texts), STORY)
    equal((final.content[-1].text, final.stop_reason), (STORY, "end_turn"))


@case("two parallel calls")
def tools() -> None:
    messages = [*ASKS]
    for _ in range(3):
        answer = client.messages.create(model=MODEL, max_tokens=900, messages=messages, tools=[TOOL])
        if answer.stop_reason != "tool_use":
            break
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)} for call in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    equal(answer.content[-1].text, FOUND_BOTH)


@case("tool runner")
def runner() -> None:
    weather = anthropic.beta_tool(get_weather)
    messages = [*ASKS]
    running = client.beta.messages.tool_runner(model=MODEL, max_tokens=900, messages=messages, tools=[weather])
    equal(running.until_done().content[-1].text, FOUND_BOTH)


@case("tool runner, streamed")
def streaming_runner() -> None:
    weather = anthropic.beta_tool(get_weather)
    messages = [*ASKS]
    turns = [
        turn.get_final_message()
        for turn in client.beta.messages.tool_runner(
            model=MODEL, max_tokens=900, messages=messages, tools=[weather], stream=True
        )
    ]
    equal(turns[-1].content[-1].text, FOUND_BOTH)


@case("structured output")
def parse() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=500, messages=HI, output_format=Weather)
    equal(answer.parsed_output, PARIS)


@case("tokens counted")
def count() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=HI, tools=[TOOL]).input_tokens > 20


def _image(url: str) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": "image", "source": source}


@case("two pictures")
def pictures() -> None:
    first, second = map(_image, PICTURES["images"])
    content = [first, {"type": "text", "text": PICTURES["between"]}, second]
    messages = [{"role": "user", "content": content}]
    answer = seeing.messages.create(model=MODEL, messages=messages, **limits)
    equal(answer.content[-1].text, PICTURES["text"])
    equal(answer.usage.input_tokens, PICTURES["prompt_tokens"])
    equal(seeing.messages.count_tokens(model=MODEL, messages=messages).input_tokens, PICTURES["prompt_tokens"])


@case("picture that is none")
def wrong_picture() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, _image(NO_PICTURE)]}]
    asking = seeing.messages.create
    raised(
        anthropic.BadRequestError,
        lambda: asking(model=MODEL, messages=messages, **limits),
        "messages[0].content[1]",
    )


@case("errors 401, 400, 404")
def errors() -> None:
    wrong = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    raised(anthropic.AuthenticationError, lambda: wrong.messages.create(model=MODEL, max_tokens=5, messages=HI), "401")
    raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(model=MODEL, max_tokens=0, messages=HI),
        "max_tokens",
    )
    raised(anthropic.NotFoundError, lambda: client.messages.create(model="other", max_tokens=5, messages=HI), "other")


run("anthropic (Python)", "anthropic")
