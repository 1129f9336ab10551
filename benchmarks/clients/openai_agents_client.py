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
from cases import FOUND_BOTH, KEY, MODEL, PARIS, STORY, TWO_CITIES, URL, Weather, case, equal, get_weather, run

set_tracing_disabled(True)


def model(kind: Any, key: str = KEY) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    return kind(model=MODEL, openai_client=client)


def add_cases(name: str, kind: Any) -> None:
    @case(f"{name}: chat")
    async def chat() -> None:
        equal((await Runner.run(Agent(name="A", model=model(kind)), "Hi")).final_output, STORY)

    @case(f"{name}: two parallel calls")
    async def tools() -> None:
        agent = Agent(name="A", instructions="Be short.", model=model(kind), tools=[function_tool(get_weather)])
        equal((await Runner.run(agent, TWO_CITIES)).final_output, FOUND_BOTH)

    @case(f"{name}: the same, streamed")
    async def streamed() -> None:
        agent = Agent(name="A", model=model(kind), tools=[function_tool(get_weather)])
        result = Runner.run_streamed(agent, TWO_CITIES)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        equal(result.final_output, FOUND_BOTH)

    @case(f"{name}: structured output")
    async def structured() -> None:
        agent = Agent(name="A", model=model(kind), output_type=Weather)
        equal((await Runner.run(agent, "Hi")).final_output, PARIS)

    @case(f"{name}: error 401")
    async def errors() -> None:
        try:
            await Runner.run(Agent(name="A", model=model(kind, "wrong")), "Hi")
        except openai.AuthenticationError:
            return
        raise AssertionError("no AuthenticationError was raised")


add_cases("responses", OpenAIResponsesModel)
add_cases("chats", OpenAIChatCompletionsModel)
run("openai-agents (Python)", "openai-agents")
