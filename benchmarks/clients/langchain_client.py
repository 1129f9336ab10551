"""LangChain's clients of chats, responses and messages, and LangGraph's agent."""

from functools import partial
from typing import Any

import anthropic
import openai
from cases import (
    ASKS,
    FOUND_BOTH,
    KEY,
    MODEL,
    NO_PICTURE,
    PARIS,
    PICTURE_LIMITS,
    PICTURES,
    STORY,
    URL,
    Weather,
    case,
    equal,
    get_weather,
    raised,
    run,
)
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI


def chats(key: str = KEY, url: str = URL, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=key, max_retries=0, **more)


def responses(key: str = KEY, **more: Any) -> ChatOpenAI:
    return chats(key, use_responses_api=True, **more)


def messages(key: str = KEY, url: str = URL, **more: Any) -> ChatAnthropic:
    settings = {"max_tokens": 900, **more}
    return ChatAnthropic(model=MODEL, base_url=url, api_key=key, max_retries=0, **settings)


def image_url(url: str) -> dict[str, Any]:
    """Return the block of a picture that OpenAI's chats have."""
    return {"type": "image_url", "image_url": {"url": url}}


def image(url: str) -> dict[str, Any]:
    """Return the block of a picture that LangChain has for all models."""
    return {"type": "image", "base64": url.partition(",")[2], "mime_type": "image/png"}


def add_cases(name: str, new: Any, wrong_key: type[Exception], bad: type[Exception]) -> None:
    @case(f"{name}: chat")
    def chat() -> None:
        equal(new().invoke("Hi").text, STORY)

    @case(f"{name}: streamed")
    def stream() -> None:
        equal("".join(chunk.text for chunk in new().stream("Hi")), STORY)

    @case(f"{name}: agent, two parallel calls")
    def tools(**more: Any) -> None:
        agent = create_agent(new(**more), tools=[get_weather])
        equal(agent.invoke({"messages": ASKS})["messages"][-1].text, FOUND_BOTH)

    case(f"{name}: the same, streamed")(partial(tools, streaming=True))

    @case(f"{name}: structured output, both ways")
    def structured() -> None:
        for method in ("function_calling", "json_schema"):
            answer = new().with_structured_output(Weather, method=method).invoke("Hi")
            equal(answer, PARIS)

    @case(f"{name}: two pictures, in both kinds of blocks")
    def pictures() -> None:
        for block in (image_url, image):
            first, second = map(block, PICTURES["images"])
            content = [first, {"type": "text", "text": PICTURES["between"]}, second]
            answer = new(url=PICTURES["url"], **PICTURE_LIMITS).invoke([{"role": "user", "content": content}])
            equal(answer.text, PICTURES["text"])
            equal(answer.usage_metadata["input_tokens"], PICTURES["prompt_tokens"])

    @case(f"{name}: picture that is none")
    def wrong_picture() -> None:
        for block in (image_url, image):
            content = [{"type": "text", "text": "Look:"}, block(NO_PICTURE)]
            asking = new(url=PICTURES["url"]).invoke
            raised(bad, partial(asking, [{"role": "user", "content": content}]), "[0].content[1]")

    @case(f"{name}: errors 401, 400")
    def errors() -> None:
        raised(wrong_key, lambda: new("wrong").invoke("Hi"), "401")
        raised(bad, lambda: new(top_p=7).invoke("Hi"), "top_p")


for api in (chats, responses):
    add_cases(api.__name__, api, openai.AuthenticationError, openai.BadRequestError)
run("LangChain (langchain-openai)", "langchain-openai")
add_cases("messages", messages, anthropic.AuthenticationError, anthropic.BadRequestError)
run("LangChain (langchain-anthropic)", "langchain-anthropic")
