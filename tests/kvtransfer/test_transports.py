"""One contract, over every transport, between real processes: bytes arrive exactly, in order, once, or not at all."""

import pytest

pytestmark = pytest.mark.timeout(60)
PAGE = 16


def test_e2e(pair) -> None:
    source, target = pair
    source.ask("fill", seed=1, pages=[3, 9, 4, 30, 31, 32])
    target.ask("expect", request="r", epoch=1, peers=[source.blob], deadline_seconds=5)
    source.ask("ship", request="r", epoch=1, peers=[target.blob], deadline_seconds=5)
    source.ask("chunk", request="r", pages=[3, 9, 4], num_tokens=40)
    target.ask("grant", request="r", epoch=1, first_page=0, pages=[60, 2, 3, 4, 5, 6])
    assert target.event("Committed", "r")["num_tokens"] == 32
    source.ask("finish", request="r", pages=[3, 9, 4, 30, 31, 32], num_tokens=90, state=b"hi".hex())
    e = target.event("Arrived", "r")
    print(e)
    print(source.event("Released", "r"))
    assert e["num_tokens"] == 90
    assert all(target.ask("equal", seed=1, pages=[60, 2, 3, 4, 5, 6]))
