"""Names a page in a file or an object, and writes the header before its bytes.

The header names the model and the layout, the page, and a checksum of the bytes: what is torn, foreign or changed is no
page.
"""

import hashlib
import struct
from collections.abc import Sequence

from crossdock.workers.schedule.memory.block_pool import STATES
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

_HEADER = struct.Struct(">8s16s17s16sQ")  # magic, fingerprint, key, checksum, bytes
HEADER_BYTES = _HEADER.size
_MAGIC = b"CDKVPG01"  # the last two digits are the version of this format
_STATES_BYTE = 255  # stands for a snapshot in the place of a group's number


def name_of(key: PageKey) -> bytes:
    """Return the name of a page, 17 bytes: its group and its hash."""
    return bytes([_STATES_BYTE if key.group == STATES else key.group]) + key.page_hash


def page_of(name: bytes) -> PageKey:
    """Return the page of a name."""
    return PageKey(STATES if name[0] == _STATES_BYTE else name[0], name[1:])


def path_of(key: PageKey) -> str:
    """Return where a page lies in what is kept of one model and layout: a folder of 256, and a name of 34 digits."""
    name = name_of(key).hex()
    return f"{name[-2:]}/{name}"


def page_in(name: str) -> PageKey | None:
    """Return the page that a name of 34 digits says; None: it is no page's name."""
    try:
        content = bytes.fromhex(name)
    except ValueError:
        return None
    return page_of(content) if len(content) == 17 else None


def header_of(fingerprint: bytes, key: PageKey, parts: Sequence[memoryview]) -> bytes:
    """Return the header of a page whose bytes are `parts`, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return _HEADER.pack(_MAGIC, fingerprint, name_of(key), digest.digest(), sum(part.nbytes for part in parts))


def is_header_of(header: bytes | bytearray | memoryview, fingerprint: bytes, key: PageKey, content: memoryview) -> bool:
    """Return whether a header says that `content` is this page."""
    return bytes(header) == header_of(fingerprint, key, [content])
