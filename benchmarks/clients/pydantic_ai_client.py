"""pydantic-ai: agents over chats, responses and messages."""

from typing import Any

from cases import FOUND_BOTH, KEY, MODEL, PARIS, STORY, TWO_CITIES, URL, Weather, case, equal, get_weather, run
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def chats(key: str = KEY) -> Any:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=key))


def responses(key: str = KEY) -> Any:
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=key))


def messages(key: str = KEY) -> Any:
    return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=key))


def add_cases(name: str, new: Any) -> None:
    @case(f"{name}: chat")
    async def chat() -> None:
        equal((await Agent(new()).run("Hi")).output, STORY)

    @case(f"{name}: streamed")
    async def stream() -> None:
        async with Agent(new()).run_stream("Hi") as result:
            texts = [text async for text in result.stream_text(delta=True)]
        equal("".join(texts), STORY)

    @case(f"{name}: two parallel calls")
    async def tools() -> None:
        equal((await Agent(new(), tools=[get_weather]).run(TWO_CITIES)).output, FOUND_BOTH)

    @case(f"{name}: structured output by a tool")
    async def structured() -> None:
        equal((await Agent(new(), output_type=Weather).run("Hi")).output, PARIS)

    async def native() -> None:
        agent = Agent(new(), output_type=NativeOutput(Weather))
        equal((await agent.run("Hi")).output, PARIS)

    if name != "messages":  # the package offers this for Claude's own model names alone
        case(f"{name}: structured output")(native)

    @case(f"{name}: errors 401, 400")
    async def errors() -> None:
        for key, settings, status in (("wrong", {}, 401), (KEY, {"top_p": 7}, 400)):
            try:
                await Agent(new(key), model_settings=settings).run("Hi")
            except ModelHTTPError as error:
                equal(error.status_code, status)
            else:
                raise AssertionError(f"no ModelHTTPError with status {status} was raised")


for api in (chats, responses, messages):
    add_cases(api.__name__, api)
run("pydantic-ai", "pydantic-ai-slim")
