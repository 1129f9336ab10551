"""openai for Python: chats, responses, and their errors."""

import json
from typing import Any

import openai
from cases import (
    ASKS,
    FOUND_BOTH,
    HI,
    KEY,
    MODEL,
    NO_PICTURE,
    ONE_CITY,
    PARIS,
    PICTURE_LIMITS,
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

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
seeing = openai.OpenAI(base_url=f"{PICTURES['url']}/v1", api_key=KEY, max_retries=0)
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}


@case("chat")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI)
    equal(answer.choices[0].message.content, STORY)
    equal(answer.choices[0].message.reasoning_content.strip(), THOUGHT)


@case("chat, streamed")
def chat_stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=HI, stream_options={"include_usage": True}) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    equal("".join(texts), STORY)
    equal(final.choices[0].message.content, STORY)
    assert final.usage.completion_tokens > 0


@case("chat, two parallel calls")
def chat_tools() -> None:
    messages = [*ASKS]
    for _ in range(3):
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
        message = answer.choices[0].message
        if answer.choices[0].finish_reason != "tool_calls":
            break
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    equal(len(messages), 4)
    equal(message.content, FOUND_BOTH)


@case("chat, forced call")
def chat_required() -> None:
    messages = [{"role": "user", "content": ONE_CITY}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL], tool_choice="required")
    equal(json.loads(answer.choices[0].message.tool_calls[0].function.arguments), {"city": "Paris"})


@case("chat, structured output")
def chat_parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HI, response_format=Weather)
    equal(answer.choices[0].message.parsed, PARIS)


@case("response, streamed")
def response_stream() -> None:
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    equal("".join(texts), STORY)
    equal(final.output_text, STORY)
    equal([item.type for item in final.output], ["reasoning", "message"])


@case("response, two parallel calls")
def response_tools() -> None:
    items = [*ASKS]
    for _ in range(3):
        answer = client.responses.create(model=MODEL, input=items, tools=[TOOL], store=False)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            output = get_weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    equal(answer.output_text, FOUND_BOTH)


@case("response, structured output")
def response_parse() -> None:
    answer = client.responses.parse(model=MODEL, input="Hi", text_format=Weather)
    equal(answer.output_parsed, PARIS)


@case("embeddings")
def embeddings() -> None:
    texts = ["a text", "another text", "a text"]
    answer = client.embeddings.create(model=MODEL, input=texts)  # asks for base64, and decodes it
    vectors = [one.embedding for one in answer.data]
    equal(vectors[0], vectors[2])
    assert vectors[0] != vectors[1], vectors
    assert abs(sum(number * number for number in vectors[0]) - 1) < 1e-5, vectors
    as_numbers = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float")
    assert max(abs(a - b) for a, b in zip(as_numbers.data[0].embedding, vectors[0], strict=True)) < 1e-6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
    raised(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input=[]), "input")


def _chat_with_pictures(**more: Any) -> Any:
    first, second = ({"type": "image_url", "image_url": {"url": url}} for url in PICTURES["images"])
    content = [first, {"type": "text", "text": PICTURES["between"]}, second]
    messages = [{"role": "user", "content": content}]
    return seeing.chat.completions.create(model=MODEL, messages=messages, **PICTURE_LIMITS, **more)


@case("chat, two pictures")
def chat_pictures() -> None:
    answer = _chat_with_pictures()
    equal(answer.choices[0].message.content, PICTURES["text"])
    equal(answer.usage.prompt_tokens, PICTURES["prompt_tokens"])
    text = [{"role": "user", "content": PICTURES["between"]}]
    without = seeing.chat.completions.create(model=MODEL, messages=text, **PICTURE_LIMITS)
    equal(without.usage.prompt_tokens, PICTURES["prompt_tokens_without"])
    assert without.choices[0].message.content != PICTURES["text"]


@case("chat, two pictures, streamed")
def chat_pictures_stream() -> None:
    chunks = list(_chat_with_pictures(stream=True, stream_options={"include_usage": True}))
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), PICTURES["text"])
    equal(chunks[-1].usage.prompt_tokens, PICTURES["prompt_tokens"])


def _input(*urls: str) -> Any:
    first, *others = ({"type": "input_image", "image_url": url, "detail": "auto"} for url in urls)
    return [{"role": "user", "content": [first, {"type": "input_text", "text": PICTURES["between"]}, *others]}]


@case("response, two pictures")
def response_pictures() -> None:
    limits = {"max_output_tokens": PICTURES["num_tokens"], "temperature": 0}
    answer = seeing.responses.create(model=MODEL, input=_input(*PICTURES["images"]), **limits)
    equal(answer.output_text, PICTURES["text"])
    equal(answer.usage.input_tokens, PICTURES["prompt_tokens"])
    after = seeing.responses.create(model=MODEL, input="And?", previous_response_id=answer.id, **limits)
    assert after.usage.input_tokens > PICTURES["prompt_tokens"], after.usage  # the stored conversation has them too


@case("picture that is none")
def wrong_picture() -> None:
    part = {"type": "image_url", "image_url": {"url": NO_PICTURE}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, part]}]
    asking = seeing.chat.completions.create
    raised(openai.BadRequestError, lambda: asking(model=MODEL, messages=messages), "messages[0].content[1]")
    asking_too = seeing.responses.create
    given = _input(PICTURES["images"][0], NO_PICTURE)
    raised(openai.BadRequestError, lambda: asking_too(model=MODEL, input=given), "input[0].content[2]")
    told = client.chat.completions.create  # the model behind the other address reads text alone
    raised(openai.BadRequestError, lambda: told(model=MODEL, messages=messages), "messages[0].content[1]")


@case("models")
def models() -> None:
    equal([model.id for model in client.models.list()], [MODEL])


@case("errors 401, 400, 404")
def errors() -> None:
    wrong = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    raised(openai.AuthenticationError, lambda: wrong.responses.create(model=MODEL, input="Hi"), "401")
    raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=HI, top_p=7),
        "top_p",
    )
    raised(openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=HI), "other")


run("openai (Python)", "openai")
