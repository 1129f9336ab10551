"""Pieces of the stack of frames: no depth of a test is one at which each call maps a piece."""

import resource

CALLS = 200  # at each depth
DEPTH = 600  # frames of 100 bytes and more: several pieces of 16 KiB


def nothing() -> None:
    """Return, so that the frame of a call ends at once."""


def faults() -> int:
    """Return how many pages this process has got so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def most_faults(depth: int) -> int:
    """Return the most pages that the calls at one depth took, of all depths from here on."""
    before = faults()
    for _ in range(CALLS):
        nothing()
    here = faults() - before
    return max(here, most_faults(depth - 1)) if depth else here


def test_calls_at_no_depth_map_a_piece_of_the_stack_each() -> None:
    assert most_faults(DEPTH) < CALLS // 2
