"""Pictures and videos in prompts: which tokens stand for them, and what the encoder computes them from."""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One picture, or the frames of one video, in a prompt.

    The tokens `[start, start + length)` of the prompt stand for it. Those among them that equal the model's placeholder
    get the rows of the encoder's output, in order; others, such as the breaks between the rows of a picture, are text.
    """

    start: int
    length: int  # tokens
    num_rows: int  # placeholders among these tokens: rows of the encoder's output
    kind: str  # `image` or `video`
    content_hash: bytes  # 16 bytes, of `tensors`: equal hashes mean equal embeddings
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # keyword arguments of the encoder, by name

    @property
    def end(self) -> int:
        """Return the position after the item's last token."""
        return self.start + self.length


NO_ITEMS: Sequence[Item] = ()


def salted(items: Sequence[Item], salt: str) -> Sequence[Item]:
    """Return the items under content hashes of their own for requests with this `salt`; as they are without one.

    Embeddings are then shared between these requests alone, as cached pages are: the time to a first token would show
    that another tenant has sent the same picture.
    """
    if not salt or not items:
        return items
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    return [
        replace(item, content_hash=hashlib.blake2b(item.content_hash, digest_size=16, key=key).digest())
        for item in items
    ]


def num_bytes(item: Item) -> int:
    """Return the bytes of what the encoder reads."""
    return sum(np.asarray(tensor).nbytes for tensor in item.tensors.values())


def items_in(items: Sequence[Item], start: int, end: int) -> Iterator[Item]:
    """Yield the items of which a token lies in `[start, end)`, in order."""
    return (item for item in items if item.start < end and item.end > start)


def page_key(items: Sequence[Item], start: int, end: int) -> bytes:
    """Return what the tokens `[start, end)` of a prompt do not say about the items that they stand for.

    Empty where there is no item. Two pages with equal tokens and equal keys have equal content: each item counts by its
    content, its length, and the place where it begins.
    """
    found = items_in(items, start, end)
    return b"".join(struct.pack("<qq", item.start - start, item.length) + item.content_hash for item in found)
