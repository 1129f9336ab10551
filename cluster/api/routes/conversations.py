"""The part that the three APIs of conversations share: a chat begins, and its answer comes back in pieces."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.conversation_body import ConversationChat
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.keys import cache_salt, owner_of
from crossdock.cluster.api.routes.generation import Generation, Generations
from crossdock.cluster.api.text.choices import Choice, Output
from crossdock.cluster.api.text.message_format import MessageFormat
from crossdock.cluster.api.text.message_parser import ChatMessage, Piece
from crossdock.cluster.api.text.prompts import PromptEncoder, truncate_chat
from crossdock.cluster.dispatch.dispatcher import ModelCard

_LEFT_OUT = {  # kinds of texts of messages that a template may leave out
    "name": "names of participants change nothing",
    "reasoning": "thoughts of earlier answers change nothing",
}


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
            salt = cache_salt(request.state.api_key, chat.cache_salt)
            owner = owner_of(request.state.api_key)
            prompt = await self._encoder.encode_chat(
                chat, card, truncates=True, salt=salt, owner=owner, memory=request.state.memory
            )
        except ApiError as error:
            raise chat.renamed(error) from None
        return len(prompt.token_ids)

    async def begin(self, request: Request, chat: ChatCompletionRequest) -> BegunChat:
        """Begin a chat. Raises ApiError for one that cannot be served."""
        try:
            generation = self._generations.begin(request, chat)
            card = generation.card
            truncates = chat.truncate_prompt_tokens is not None
            chat.check_logprobs()
            whole = await self._encoder.encode_chat(
                chat,
                card,
                truncates=truncates,
                salt=generation.salt,
                owner=generation.owner,
                memory=request.state.memory,
            )
            frame = self._encoder.frame(add_special_tokens=chat.add_special_tokens)
            prompt = truncate_chat(whole, chat, card, frame)
            left = card.max_model_len - len(prompt.token_ids)
            fitted = chat.fitted(left, can_bound_reasoning=self._format.can_bound_reasoning(chat, prompt.token_ids))
            request.state.warnings = self._warnings(chat, fitted, prompt.unread)
            generation.body = fitted
            reading = self._format.reading(fitted, prompt.token_ids)
            await self._generations.add_choices(generation, [prompt], reading)
        except ApiError as error:
            raise chat.renamed(error) from None
        return BegunChat(chat, generation, [reading.message() for _ in generation.choices])

    def _warnings(self, chat: ChatCompletionRequest, fitted: ChatCompletionRequest, unread: Sequence[str]) -> list[str]:
        """Return a sentence for each field of a chat that changes nothing with this model."""
        warnings = [
            f"'{chat.own_name(field)}' changes nothing: this model's chat template does not read it"
            for field in self._encoder.unread_fields(chat)
        ]
        if fitted.thinking_token_budget is None and chat.thinking_token_budget not in (None, -1):
            name = chat.own_name("thinking_token_budget")
            warnings.append(f"'{name}' changes nothing: no token of this model ends its reasoning")
        name = chat.own_name("messages")
        return warnings + [
            f"'{name}': {_LEFT_OUT[kind]}: this model's chat template leaves them out" for kind in unread
        ]

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
