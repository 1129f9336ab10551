"""Tokens of the texts between special tokens, kept: most of a chat's prompt is text that came before, as the system
prompt, the words of the template, and earlier turns."""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from sys import getsizeof
from threading import Lock
from typing import Any, Self

_MOST_BYTES = 16 << 20  # kept, of texts and ids
_MOST_TOKENS = 4096  # tokens that divide texts: more would make a slow pattern
_INDEPENDENT = {"ByteLevel", "Digits", "Split"}  # pre-tokenizers that see no text but what they divide


class TextPieces:
    """Encodes a text as a tokenizer does, and keeps the ids of its pieces, the least recently used ones the shortest.

    A tokenizer first divides a text at the added tokens that are matched before normalization, and encodes each piece
    alone. Threads may share one object.
    """

    def __init__(self, backend: Any, dividers: Mapping[str, int], most_bytes: int = _MOST_BYTES) -> None:
        self._backend = backend
        self._dividers = dividers
        longest_first = sorted(dividers, key=len, reverse=True)  # as the tokenizer prefers
        self._divide = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], Sequence[int]] = OrderedDict()  # by salt and piece
        self._lock = Lock()
        self.num_bytes = 0  # kept

    @classmethod
    def of(cls, backend: Any) -> Self | None:
        """Return None for a tokenizer whose pieces may have other ids in another text."""
        added = backend.get_added_tokens_decoder()
        reaches_out = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        dividers = {token.content: i for i, token in added.items() if not token.normalized and token.content}
        if reaches_out or not 0 < len(dividers) <= _MOST_TOKENS or backend.encode_special_tokens:
            return None
        if backend.truncation is not None or backend.padding is not None:
            return None
        if getattr(backend.model, "dropout", 1.0):  # chance decides; other models than BPE: not known
            return None
        normalizer = backend.normalizer and json.loads(backend.normalizer.__getstate__())
        if normalizer and normalizer["type"] != "NFC":
            return None
        splitter = backend.pre_tokenizer and json.loads(backend.pre_tokenizer.__getstate__())
        steps = [splitter] if splitter and splitter["type"] != "Sequence" else (splitter or {}).get("pretokenizers", [])
        if not steps or any(step["type"] not in _INDEPENDENT or step.get("add_prefix_space") for step in steps):
            return None
        return cls(backend, dividers)

    def encode(self, text: str, salt: str = "") -> list[int]:
        """Return the ids of a text, without those that the tokenizer puts around a text.

        `salt`: only texts with the same one share pieces, so that no time tells what others sent."""
        found: list[int] = []
        for piece in self._divide(text):
            divider = self._dividers.get(piece)
            if divider is not None:
                found.append(divider)
            elif piece:
                found += self._ids((salt, piece))
        return found

    def _ids(self, key: tuple[str, str]) -> Sequence[int]:
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
                return ids
        new = tuple(self._backend.encode(key[1], add_special_tokens=False).ids)
        size = _size(key, new)
        with self._lock:
            if key not in self._kept and size <= self._most_bytes:
                self._kept[key] = new
                self.num_bytes += size
                while self.num_bytes > self._most_bytes:
                    self.num_bytes -= _size(*self._kept.popitem(last=False))
        return new


def _size(key: tuple[str, str], ids: Sequence[int]) -> int:
    """Return the bytes of an entry. Each id is an object."""
    return sum(map(getsizeof, (key, *key, ids))) + 32 * len(ids) + 128
