"""The part that the Responses and Messages APIs share: a chat begins, and its text comes back in pieces."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request

from crossdock.cluster.api.body.conversation_body import ConversationChat
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.generation import Generation, Generations
from crossdock.cluster.api.http.keys import cache_salt, tenant_of
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
    """A chat that has begun: one choice, whose prompt is known."""

    chat: ConversationChat
    generation: Generation
    message: ChatMessage

    @property
    def choice(self) -> Choice:
        return self.generation.choices[0]

    def fills_context(self) -> bool:
        """Return whether the answer ended where the model's context does."""
        choice = self.choice
        return len(choice.prompt.token_ids) + choice.num_tokens >= self.generation.card.max_model_len


class Conversations:
    """Begins chats for other APIs as /v1/chat/completions does. Errors name the fields of the API's own body."""

    def __init__(self, generations: Generations, encoder: PromptEncoder, message_format: MessageFormat) -> None:
        self._generations = generations
        self._encoder = encoder
        self._format = message_format

    async def count(self, request: Request, chat: ConversationChat, card: ModelCard) -> int:
        """Return the number of tokens of the prompt, however many the context has."""
        try:
            key = request.state.api_key
            salt, tenant = cache_salt(key, chat.cache_salt), tenant_of(key)
            prompt = await self._encoder.encode_chat(
                chat, chat.template_tools(), card, truncates=True, salt=salt, tenant=tenant
            )
        except ApiError as error:
            raise chat.renamed(error) from None
        return len(prompt.token_ids)

    async def begin(self, request: Request, chat: ConversationChat) -> BegunChat:
        """Begin a chat. Raises ApiError where /v1/chat/completions would refuse it."""
        try:
            generation = self._generations.begin(request, chat)
            chat.check_logprobs()
            whole = await self._encoder.encode_chat(
                chat,
                chat.template_tools(),
                generation.card,
                truncates=False,
                salt=generation.salt,
                tenant=generation.tenant,
            )
            generation.body = _within_context(chat, len(whole.token_ids), generation.card)
            reading = self._format.reading(self._with_possible_budget(chat), whole.token_ids)
            await self._generations.add_choices(generation, [truncate_chat(whole, chat, generation.card)], reading)
        except ApiError as error:
            raise chat.renamed(error) from None
        return BegunChat(chat, generation, reading.message())

    def _with_possible_budget(self, chat: ConversationChat) -> ConversationChat:
        """Return the chat without a budget of reasoning that this model's reasoning cannot have."""
        if chat.thinking_token_budget is None or self._format.can_bound_reasoning:
            return chat
        return chat.model_copy(update={"thinking_token_budget": None})

    async def parts(self, begun: BegunChat) -> AsyncGenerator[Part, None]:
        """Yield the answer as it comes. The last part has a finish reason. Closing the iterator aborts the request."""
        try:
            async with aclosing(self._generations.outputs(begun.generation)) as outputs:
                async for output in outputs:
                    yield Part(begun.message.pieces(output.texts, output.finish_reason), output)
        except ApiError as error:
            raise begun.chat.renamed(error) from None


def _within_context(chat: ConversationChat, num_prompt_tokens: int, card: ModelCard) -> ConversationChat:
    """Return the chat with a limit that the context has place for: clients of these APIs ask for all there could be."""
    limit, left = chat.token_limit(), card.max_model_len - num_prompt_tokens
    if limit is None or left < 1 or limit <= left:
        return chat
    return chat.model_copy(update={"max_completion_tokens": left})
