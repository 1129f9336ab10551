"""The form of everything typed that travels between processes: msgspec writes and checks it, field by field.

What comes from another process may be older, broken or foreign. Decoding either returns a record whose fields are all
of their types and in range, or raises ValueError that names the field. It never builds objects that the bytes name.
"""

from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
"""A number of things, a place among things, an epoch or bytes: none is negative."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0)]


class Record(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message or a call. It travels as a map of its fields, with the name of its kind under `type`."""


class OfEpoch(Record, frozen=True):
    """A record about one epoch of one request."""

    request: str
    epoch: Count


class GroupPages(NamedTuple):
    """A request's pages of one group of layers, from page number `first` on. Page i holds tokens [i·size, (i+1)·size).

    Pages before `first` are not needed: the window of the group has passed them."""

    first: Count
    pages: tuple[Count, ...]

    @property
    def end(self) -> int:
        """The number after the last page's."""
        return self.first + len(self.pages)
