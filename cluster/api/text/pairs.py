"""Make prompts of pairs. A text of many pairs is encoded once. Each prompt is checked before the next one is made."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.body.generation_body import GenerationBody
from crossdock.cluster.api.http.request_memory import TOKEN_BYTES, RequestMemory
from crossdock.cluster.api.slices import PAUSE_S
from crossdock.cluster.api.text.choices import Prompt
from crossdock.cluster.api.text.prompts import LONG_TEXT, PromptEncoder, output_limit, room_for_text
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard


@dataclass(slots=True)
class PairPrompts:
    """Makes the prompts of one request.

    `body`: the completion that computes each. `memory`: of the request, in which each prompt is counted before the next
    one is made. Errors name the field `param`.
    """

    encoder: PromptEncoder
    tokenizer: ModelTokenizer
    body: GenerationBody
    card: ModelCard
    memory: RequestMemory
    param: str
    salt: str
    _num_read: int = 0  # characters since other requests were served

    async def joined(
        self, pairs: Sequence[tuple[str, str]], keep: int | None = None, *, keeps_end: bool = False
    ) -> list[Prompt]:
        """Return pairs as the tokenizer joins two texts.

        `keep`: tokens of a pair that are kept; -1: as many as fit; None: all. The longer text is cut first.
        `keeps_end`: the beginnings of texts are cut. Raises ApiError for a pair that is too long.
        """
        before, between, after = self.tokenizer.pair_frame
        most = self.card.max_model_len - self.card.least_output if keep == -1 else keep
        room = None if most is None else room_for_text(most, len(before) + len(between) + len(after))
        encoded: dict[str, list[int]] = {}
        prompts = []
        for pair in pairs:
            for text in pair:
                if text not in encoded:
                    found = await self._encoded(text, truncates=keep is not None)
                    self.memory.reserve(TOKEN_BYTES * len(found))
                    encoded[text] = found
            left, right = (encoded[text] for text in pair)
            if room is not None:
                left, right = _cut(left, right, room, keeps_end=keeps_end)
            second = len(before) + len(left) + len(between)
            prompts.append(replace(self._checked([*before, *left, *between, *right, *after]), second_text=second))
            await self._pause(len(prompts[-1].token_ids) // 8)
        return prompts

    async def judged(
        self, pairs: Sequence[tuple[str, str]], chat: Callable[[str, str], ChatCompletionRequest], border: str
    ) -> list[Prompt]:
        """Return the prompts of chats about pairs.

        `border`: stands in each chat before the second text, where a word ends. What is before it is encoded once for
        pairs with the same first text, one after the other. Raises ApiError for a chat that is too long.
        """
        begun_for: str | None = None
        beginning = ""
        ids = list[int]()
        prompts = []
        for first, second in pairs:
            text, _ = await self.encoder.rendered(chat(first, second))
            if first != begun_for:
                begun_for = first
                beginning = await self._beginning(text, chat(first, ""), border)
                ids = await self._encoded(beginning, is_chat=True) if beginning else []
            if not text.startswith(beginning):  # the template writes otherwise about this pair
                rest = text
                begun = list[int]()
            else:
                rest = text[len(beginning) :]
                begun = ids
            prompts.append(self._checked([*begun, *await self._encoded(rest, is_chat=True)]))
            await self._pause(len(text) // 8)
        return prompts

    async def _beginning(self, text: str, empty: ChatCompletionRequest, border: str) -> str:
        """Return the part of a chat's text before the border, if its tokens are the same in each chat; else nothing."""
        other, _ = await self.encoder.rendered(empty)
        at = other.rfind(border)
        if at < 0 or text[:at] != other[:at]:
            return ""
        places = at, len(text[:at].rstrip())  # some tokenizers divide white space by what follows it
        return next((text[:each] for each in places if self.tokenizer.divides(text[:each], text[each:])), "")

    async def _encoded(self, text: str, *, truncates: bool = False, is_chat: bool = False) -> list[int]:
        self._num_read += len(text)
        return await self.encoder.encode(
            text,
            self.card,
            self.param,
            add_special_tokens=False,
            truncates=truncates,
            salt=self.salt if is_chat else None,
        )

    def _checked(self, token_ids: list[int]) -> Prompt:
        """Return a prompt, counted. Raises ApiError for one that is too long."""
        output_limit(len(token_ids), self.body, self.card)
        self.memory.reserve(TOKEN_BYTES * len(token_ids))
        return Prompt(token_ids)

    async def _pause(self, num_chars: int) -> None:
        """Let other requests be served after some work. `num_chars`: characters that take as long to encode."""
        self._num_read += num_chars
        if self._num_read >= LONG_TEXT:
            self._num_read = 0
            await asyncio.sleep(PAUSE_S)


def _cut(left: list[int], right: list[int], room: int, *, keeps_end: bool) -> tuple[list[int], list[int]]:
    """Cut two texts as transformers' `longest_first` does: the longer one first."""
    if len(left) + len(right) <= room:
        return left, right
    short = min(len(left), len(right))
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    num_left = short if len(left) <= len(right) else long
    num_right = short + long - num_left
    if keeps_end:
        return left[len(left) - num_left :], right[len(right) - num_right :]
    return left[:num_left], right[:num_right]
