"""vLLM's `bad_words` as token ids, which the output may not have in a row."""

from collections.abc import Sequence

from crossdock.cluster.api.errors import wrong
from crossdock.cluster.api.slices import slices
from crossdock.cluster.api.text.tokenizer import ModelTokenizer

_WORDS_AT_ONCE = 16  # each is encoded twice; about a millisecond


async def encode_bad_words(words: Sequence[str], tokenizer: ModelTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return each word as it is written at the beginning of a text, and after a space.

    Raises ApiError for a word without tokens.
    """
    spellings: dict[tuple[int, ...], None] = {}  # in order, each once
    async for some in slices(words, _WORDS_AT_ONCE):
        for word in some:
            bare = word.lstrip()
            for text in (bare, f" {bare}"):
                token_ids = tokenizer.encode(text, add_special_tokens=False) if bare else []
                if not token_ids:
                    raise wrong("bad_words", f"{word[:40]!r} has no tokens of its own")
                spellings[tuple(token_ids)] = None
    return tuple(spellings)
