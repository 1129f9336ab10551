"""One transfer between docks in other processes, step by step, for tests over every transport."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from crossdock.kvtransfer.calls import ChunkCall, ExpectCall, FinishCall, GrantCall, ShipCall

from .one_group import whole

PAGE = 16  # tokens
Start = Callable[..., Any]
_numbers = count()


class Transfer:
    """One request on its way from the ranks of a source to the ranks of a target. Calls go to every rank."""

    def __init__(self, sources: Any, targets: Any, request: str = "", epoch: int = 1, deadline: float = 60.0) -> None:
        self.sources = sources if isinstance(sources, list) else [sources]
        self.targets = targets if isinstance(targets, list) else [targets]
        self.request = request or f"request-{next(_numbers)}"
        self.epoch = epoch
        self.deadline = deadline
        self.seed = next(_numbers)
        self.first_frontier = 0
        self.key = self.request, epoch

    def fill(self, pages: Sequence[int]) -> None:
        for source in self.sources:
            source.ask("fill", seed=self.seed, pages=pages)

    def ship(self) -> None:
        blobs = tuple(target.blob for target in self.targets)
        for source in self.sources:
            source.call(ShipCall(*self.key, blobs, self.deadline))

    def expect(self) -> None:
        blobs = tuple(source.blob for source in self.sources)
        for target in self.targets:
            target.call(ExpectCall(*self.key, blobs, self.deadline))

    def begin(self) -> "Transfer":
        """Expect, then ship."""
        self.expect()
        self.ship()
        return self

    def grant(self, pages: Sequence[int], first_page: int = 0) -> None:
        for target in self.targets:
            target.call(GrantCall(*self.key, first_page, whole(pages, first_page)))

    def chunk(self, pages: Sequence[int], num_tokens: int) -> None:
        for source in self.sources:
            source.call(ChunkCall(self.request, whole(pages), num_tokens))

    def finish(self, pages: Sequence[int], num_tokens: int, result: bytes = b"result") -> None:
        for source in self.sources:
            source.call(FinishCall(self.request, whole(pages), num_tokens, result))

    def arrived(self) -> dict[str, Any]:
        """Wait until both sides are done. Return the `Arrived` event, with the source's figures as `released`."""
        released = [source.event("Released", self.request, self.epoch) for source in self.sources]
        assert all(event["arrived"] for event in released)
        arrived = [target.event("Arrived", self.request, self.epoch) for target in self.targets]
        return {**arrived[0], "released": released[0]["figures"]}

    def equal(self, pages: Sequence[int], first: int = 0) -> bool:
        """Return whether the targets' `pages` hold pages `first` and following of the request."""
        return all(all(target.ask("equal", seed=self.seed, pages=pages, first=first)) for target in self.targets)

    def frontiers(self) -> list[int]:
        """Return the frontiers that the first target has committed since the last call."""
        found = []
        while self.targets[0].has("Committed", self.request, self.epoch):
            found.append(self.targets[0].event("Committed", self.request, self.epoch)["num_tokens"])
        return found


def source_and_target(start: Start, **config: Any) -> tuple[Any, Any]:
    source, target = start(role="prefill", **config), start(role="decode", **config)
    return source, target


def mid_transfer(start: Start, deadline: float) -> tuple[Transfer, list[int]]:
    """Begin a transfer of 512 pages in as many writes, and wait until some are committed. `deadline`: seconds."""
    big = {"max_write_bytes": 1, "num_pages": 512, "role": "big"}
    transfer = Transfer(start(**big), start(**big), deadline=deadline).begin()
    pages = list(range(512))
    transfer.fill(pages)
    transfer.grant(pages[::-1])
    transfer.chunk(pages, 512 * PAGE)
    transfer.first_frontier = transfer.targets[0].event("Committed", transfer.request)["num_tokens"]
    return transfer, pages
