"""LiteLLM: chats, responses, and messages, by its providers' prefixes."""

import json

import litellm
from cases import (
    ASKS,
    FOUND_BOTH,
    HI,
    KEY,
    MODEL,
    PARIS,
    SCHEMA,
    STORY,
    URL,
    Weather,
    case,
    equal,
    get_weather,
    raised,
    run,
)

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
AT = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "max_tokens": 900},
}


def add_cases(provider: str) -> None:
    at = {"api_key": KEY, "num_retries": 0, **AT[provider]}

    @case(f"{provider}: chat")
    def chat() -> None:
        equal(litellm.completion(messages=HI, **at).choices[0].message.content, STORY)

    @case(f"{provider}: streamed")
    def stream() -> None:
        chunks = litellm.completion(messages=HI, stream=True, **at)
        equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), STORY)

    @case(f"{provider}: two parallel calls")
    def tools() -> None:
        messages = [*ASKS]
        for _ in range(3):
            message = litellm.completion(messages=messages, tools=[TOOL], **at).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        equal(message.content, FOUND_BOTH)

    @case(f"{provider}: structured output")
    def structured() -> None:
        answer = litellm.completion(messages=HI, response_format=Weather, **at)
        equal(Weather.model_validate_json(answer.choices[0].message.content), PARIS)

    @case(f"{provider}: errors 401, 400")
    def errors() -> None:
        wrong = {**at, "api_key": "wrong"}
        raised(litellm.AuthenticationError, lambda: litellm.completion(messages=HI, **wrong))
        raised(litellm.BadRequestError, lambda: litellm.completion(messages=HI, top_p=7, **at), "top_p")


@case("openai: response")
def response() -> None:
    answer = litellm.responses(input="Hi", model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY)
    equal(answer.output[-1].content[0].text, STORY)


for provider in AT:
    add_cases(provider)
run("LiteLLM", "litellm")
