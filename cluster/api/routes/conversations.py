"""The part that the three APIs of conversations share: a chat begins, and its answer comes back in pieces."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.conversation_body import ConversationChat
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import cache_salt, tenant_of
from crossdock.cluster.api.routes.generation import Generation, Generations
from crossdock.cluster.api.text.choices import Choice, Output
from crossdock.cluster.api.text.message_format import MessageFormat
from crossdock.cluster.api.text.message_parser import ChatMessage, Piece
from crossdock.cluster.api.text.prompts import PromptEncoder, truncate_chat
from crossdock.cluster.dispatch.dispatcher import ModelCard


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an answer that one step of the model adds."""

    pieces: list[Piece]
    output: Output


@dataclass(slots=True)
class BegunChat:
    """A chat that has begun: its prompt is known, and each of its choices has a message."""

    chat: ChatCompletionRequest
    generation: Generation
    messages: list[ChatMessage]

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    @property
    def message(self) -> ChatMessage:
        return self.messages[0]

    def fills_context(self) -> bool:
        """Return whether the answer ended where the model's context does."""
        choice = self.choice
        return len(choice.prompt.token_ids) + choice.num_tokens >= self.generation.card.max_model_len


class Conversations:
    """Begins chats. Errors name the fields of the API's own body."""

    def __init__(self, generations: Generations, encoder: PromptEncoder, message_format: MessageFormat) -> None:
        self._generations = generations
        self._encoder = encoder
        self._format = message_format

    async def count(self, request: Request, chat: ConversationChat, card: ModelCard) -> int:
        """Return the number of tokens of the prompt, also beyond the context."""
        try:
            salt, tenant = cache_salt(request.state.api_key, chat.cache_salt), tenant_of(request.state.api_key)
            prompt = await self._encoder.encode_chat(
                chat, card, truncates=True, salt=salt, tenant=tenant, memory=request.state.memory
            )
        except ApiError as error:
            raise chat.renamed(error) from None
        return len(prompt.token_ids)

    async def begin(self, request: Request, chat: ChatCompletionRequest) -> BegunChat:
        """Begin a chat. Raises ApiError for one that cannot be served."""
        try:
            generation = self._generations.begin(request, chat)
            card, truncates = generation.card, chat.truncate_prompt_tokens is not None
            chat.check_logprobs()
            whole = await self._encoder.encode_chat(
                chat,
                card,
                truncates=truncates,
                salt=generation.salt,
                tenant=generation.tenant,
                memory=request.state.memory,
            )
            prompt = truncate_chat(whole, chat, card)
            left = card.max_model_len - len(prompt.token_ids)
            fitted = chat.fitted(left, can_bound_reasoning=self._format.can_bound_reasoning)
            generation.body = fitted
            reading = self._format.reading(fitted, prompt.token_ids)
            await self._generations.add_choices(generation, [prompt], reading)
        except ApiError as error:
            raise chat.renamed(error) from None
        return BegunChat(chat, generation, [reading.message() for _ in generation.choices])

    async def parts(self, begun: BegunChat, event: Callable[[Part], bytes] | None = None) -> AsyncGenerator[Part, None]:
        """Yield the answer as it comes. The last part has a finish reason. Closing the iterator aborts the request.

        `event` makes the event of a part; empty: there is none. As in `Generations.outputs`.
        """

        def part(output: Output) -> Part:
            return Part(begun.message.pieces(output.texts, output.finish_reason), output)

        direct = None if event is None else lambda output: event(part(output))
        try:
            async with aclosing(self._generations.outputs(begun.generation, direct)) as outputs:
                async for output in outputs:
                    yield part(output)
        except ApiError as error:
            raise begun.chat.renamed(error) from None
