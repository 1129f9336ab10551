"""LiteLLM: chats, responses, and messages, by its providers' prefixes."""

import json
from typing import Any

import litellm
from cases import FOUND_BOTH, KEY, MODEL, STORY, TWO_CITIES, URL, equal, get_weather, raised, run
from pydantic import BaseModel

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
AT = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "max_tokens": 900},
}


class Weather(BaseModel):
    city: str
    degrees: int


def cases(provider: str) -> dict[str, Any]:
    at = {"api_key": KEY, "num_retries": 0, **AT[provider]}

    def chat() -> None:
        equal(litellm.completion(messages=HI, **at).choices[0].message.content, STORY)

    def stream() -> None:
        chunks = litellm.completion(messages=HI, stream=True, **at)
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), STORY)

    def tools() -> None:
        messages = [{"role": "user", "content": TWO_CITIES}]
        for _ in range(3):
            message = litellm.completion(messages=messages, tools=[TOOL], **at).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        equal(message.content, FOUND_BOTH)

    def structured() -> None:
        answer = litellm.completion(messages=HI, response_format=Weather, **at)
        equal(Weather.model_validate_json(answer.choices[0].message.content), Weather(city="Paris", degrees=21))

    def errors() -> None:
        wrong = {**at, "api_key": "wrong"}
        raised(litellm.AuthenticationError, lambda: litellm.completion(messages=HI, **wrong))
        raised(litellm.BadRequestError, lambda: litellm.completion(messages=HI, top_p=7, **at), "top_p")

    return {
        f"{provider}: chat": chat,
        f"{provider}: streamed": stream,
        f"{provider}: two parallel calls": tools,
        f"{provider}: structured output": structured,
        f"{provider}: errors 401, 400": errors,
    }


def response() -> None:
    answer = litellm.responses(input="Hi", model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY)
    equal(answer.output[-1].content[0].text, STORY)


run(
    "LiteLLM",
    "litellm",
    {name: case for provider in AT for name, case in cases(provider).items()} | {"openai: response": response},
)
