"""openai-agents: runs with tools over responses and over chats."""

from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import FOUND_BOTH, KEY, MODEL, STORY, TWO_CITIES, URL, equal, get_weather, run
from pydantic import BaseModel

set_tracing_disabled(True)


class Weather(BaseModel):
    city: str
    degrees: int


def model(kind: Any, key: str = KEY) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    return kind(model=MODEL, openai_client=client)


def cases(kind: Any) -> dict[str, Any]:
    async def chat() -> None:
        equal((await Runner.run(Agent(name="A", model=model(kind)), "Hi")).final_output, STORY)

    async def tools() -> None:
        agent = Agent(name="A", instructions="Be short.", model=model(kind), tools=[function_tool(get_weather)])
        equal((await Runner.run(agent, TWO_CITIES)).final_output, FOUND_BOTH)

    async def streamed() -> None:
        agent = Agent(name="A", model=model(kind), tools=[function_tool(get_weather)])
        result = Runner.run_streamed(agent, TWO_CITIES)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        equal(result.final_output, FOUND_BOTH)

    async def structured() -> None:
        agent = Agent(name="A", model=model(kind), output_type=Weather)
        equal((await Runner.run(agent, "Hi")).final_output, Weather(city="Paris", degrees=21))

    async def errors() -> None:
        try:
            await Runner.run(Agent(name="A", model=model(kind, "wrong")), "Hi")
        except openai.AuthenticationError:
            return
        raise AssertionError("no AuthenticationError was raised")

    name = "responses" if kind is OpenAIResponsesModel else "chats"
    return {
        f"{name}: chat": chat,
        f"{name}: two parallel calls": tools,
        f"{name}: the same, streamed": streamed,
        f"{name}: structured output": structured,
        f"{name}: error 401": errors,
    }


run("openai-agents (Python)", "openai-agents", cases(OpenAIResponsesModel) | cases(OpenAIChatCompletionsModel))
