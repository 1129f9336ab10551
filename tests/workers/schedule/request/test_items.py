"""Items in page hashes: every page counts the items that its tokens stand for."""

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.request.items import Item, page_keys
from crossdock.workers.schedule.request.page_hashes import hash_pages


@st.composite
def items_of_a_prompt(draw: st.DrawFn) -> list[Item]:
    items, end = list[Item](), 0
    for content in range(draw(st.integers(0, 8))):
        start = end + draw(st.integers(0, 20))
        length = draw(st.integers(1, 30))
        items.append(Item(start, length, length, "image", bytes([content]) * 16))
        end = start + length
    return items


def hashes_page_by_page(tokens: Sequence[int], size: int, items: Sequence[Item]) -> list[bytes]:
    """Return the expected result of `hash_pages`: look at all items for each page."""
    parent, hashes = hashlib.blake2b(b"", digest_size=16).digest(), list[bytes]()
    for start in range(0, len(tokens) // size * size, size):
        found = [item for item in items if item.start < start + size and item.end > start]
        key = b"".join(struct.pack("<qq", item.start - start, item.length) + item.content_hash for item in found)
        content = array("I", tokens[start : start + size]).tobytes()
        parent = hashlib.blake2b(parent + content + key, digest_size=16).digest()
        hashes.append(parent)
    return hashes


@given(items_of_a_prompt(), st.integers(0, 80), st.integers(1, 20), st.data())
def test_hashes_of_pages_count_every_item_in_them(
    items: list[Item], further: int, size: int, data: st.DataObject
) -> None:
    tokens = list(range((items[-1].end if items else 0) + further))
    expected = hashes_page_by_page(tokens, size, items)
    known = expected[: data.draw(st.integers(0, len(expected)))]
    assert hash_pages(tokens, size, known=known, items=items) == expected


class CountedItems(Sequence[Item]):
    """Items, and how often one was read."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items, self.num_reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: Any) -> Any:
        self.num_reads += 1
        return self.items[number]

    def __iter__(self) -> Iterator[Item]:
        raise AssertionError("all items are read")


def test_items_of_a_long_prompt_are_read_a_few_times_each() -> None:
    items = CountedItems([Item(start, 30, 30, "image", bytes(16)) for start in range(0, 64_000, 64)])
    num_pages = 64_000 // 16
    assert len(list(page_keys(items, 0, 16, num_pages))) == num_pages
    assert items.num_reads <= 4 * (num_pages + len(items))
    items.num_reads = 0
    list(page_keys(items, 32_000, 16, 1))  # one page of a decode
    assert items.num_reads <= 16
