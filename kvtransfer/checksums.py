"""Checksums of writes: a CRC-32 of the bytes that travel, as they lie in the source's pool and in the target's.

Both sides go through groups of layers, pages and byte ranges in the same order, each with its own offsets. So the sums
of a write agree between pools of unlike layouts, and no transport has a part in them. CRC-32 takes 0.34 CPU seconds for
a GiB and Adler-32 0.40, in pieces of 1 MiB (AMD EPYC, zlib 1.2.13; benchmarks/records/pools.md).
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.messages import Checksum, Grant, Pages
from crossdock.kvtransfer.plan import PageCopies, plan_writes

_Parts: TypeAlias = Iterable[tuple[int, Sequence[int]]]
"""Pages by number of their group of layers; the number after the last group's is that of the recurrent state."""
_Ranges: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""(offset, length) of the bytes of a page that travel, by number of the group."""


class Checksums:
    """The checksums of one pool's writes. `memory`: its bytes, in ordinary memory; `spec` describes the pool."""

    def __init__(self, memory: memoryview, spec: PoolSpec) -> None:
        self._memory = memory
        self._spec = spec

    def of_write(self, copies: Sequence[PageCopies], target: PoolSpec) -> Checksum:
        """Return the checksum of a write that begins now. Its pages here stay unchanged until it has ended."""
        ranges = [[(part.source, part.length) for part in parts] for parts in plan_writes(self._spec, target)]
        value = self._crc32(((copy.group, copy.source_pages) for copy in copies), ranges)
        states = (copy.target_pages for copy in copies if copy.group == self._spec.num_groups)
        return Checksum(value, tuple(page for pages in states for page in pages))

    def agrees(self, message: Pages, grant: Grant, source: PoolSpec) -> bool:
        """Return whether the pages of a message lie here as they were sent. True: the message has no checksum."""
        if message.checksum is None:
            return True
        ranges = [[(part.target, part.length) for part in parts] for parts in plan_writes(source, self._spec)]
        return self._crc32(_arrived(message, message.checksum, grant), ranges) == message.checksum.crc32

    def _crc32(self, parts: _Parts, ranges: _Ranges) -> int:
        value = 0
        for group, pages in parts:
            for page in pages:
                for offset, length in ranges[group]:
                    begin = page * self._spec.page_bytes + offset
                    value = zlib.crc32(self._memory[begin : begin + length], value)
        return value


def _arrived(message: Pages, checksum: Checksum, grant: Grant) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the pages that a message says were written, as far as they were granted."""
    stop = message.first_page + message.num_pages
    for number, group in enumerate(grant.groups):
        first = max(message.first_page, group.first)
        if first < stop:
            yield number, group.pages[first - group.first : stop - group.first]
    yield len(grant.groups), [page for page in checksum.state_pages if page in grant.state_pages]
