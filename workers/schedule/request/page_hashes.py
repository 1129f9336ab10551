"""The hash of each full page of a prompt. Hashes are chained: a hash names its page's content and all earlier pages."""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

from crossdock.workers.schedule.request.items import NO_ITEMS, Item, page_keys

PageHash: TypeAlias = bytes
"""Names the content of a full page and of all pages before it: equal hashes mean equal prefixes and equal salts."""


def hash_pages(
    token_ids: Sequence[int],
    page_size: int,
    salt: str = "",
    known: Sequence[PageHash] = (),
    items: Sequence[Item] = NO_ITEMS,
) -> list[PageHash]:
    """Return the chained hashes of the full pages of `token_ids`.

    `known`: hashes of the first pages, computed before. `items`: the pictures among the tokens, whose content counts in
    every page that holds a token of theirs. blake2b, because tenants share an index: with a hash whose
    collisions can be constructed, one tenant could read another's prompt.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    content = array("I", token_ids[len(hashes) * page_size : len(token_ids) - len(token_ids) % page_size]).tobytes()
    page_bytes = page_size * array("I").itemsize
    starts = range(0, len(content), page_bytes)
    keys = page_keys(items, len(hashes) * page_size, page_size, len(starts)) if items else repeat(b"")
    for start, key in zip(starts, keys, strict=False):
        parent = hashlib.blake2b(parent + content[start : start + page_bytes] + key, digest_size=16).digest()
        hashes.append(parent)
    return hashes
