"""Divide the layers of a model into groups whose pages have the same number of bytes.

A page holds some tokens for all layers of its group. The layers of a group have the same window, so that a page can go
once the window has passed it. A group with fewer layers than others leaves a part of its pages unused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window, most_visible

_MOST_GROUPS = 8  # each has a page table, which every step fills and copies


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share pages."""

    window: Window
    layers: tuple[int, ...]  # numbers, ascending


def group_layers(
    windows: Sequence[Window], token_bytes: Sequence[int], max_model_len: int, page_size: int
) -> tuple[LayerGroup, ...]:
    """Return the groups with which a stream of `max_model_len` tokens holds the fewest bytes; groups without a window
    first.

    `windows` and `token_bytes`: of each layer. Among equal divisions, the one of fewest groups is chosen.
    """
    visible = [window if window is not None and most_visible(window) < max_model_len else None for window in windows]
    divisions = [_in_one_group(visible), *(_divided(visible, most) for most in range(len(visible), 0, -1))]
    divisions = [division for division in divisions if len(division) <= _MOST_GROUPS]

    def cost(division: Sequence[LayerGroup]) -> tuple[int, int]:
        return held_bytes(division, token_bytes, max_model_len, page_size), len(division)

    return min(divisions, key=cost)


def held_bytes(groups: Sequence[LayerGroup], token_bytes: Sequence[int], num_tokens: int, page_size: int) -> int:
    """Return the bytes of pages that a stream of `num_tokens` tokens holds at most."""
    needs = PageNeeds(page_size, [group.window for group in groups], chunk=1)
    return (
        needs.held(num_tokens) * page_size * max(sum(token_bytes[layer] for layer in group.layers) for group in groups)
    )


def _in_one_group(windows: Sequence[Window]) -> tuple[LayerGroup, ...]:
    """Return all layers as one group: its pages stay as long as some layer sees them."""
    seen = [window for window in windows if window is not None]
    widest: Window = None
    if len(seen) == len(windows):  # a sliding window covers an attention chunk of as many tokens
        widest = seen[0] if len(set(seen)) == 1 else max(map(most_visible, seen))
    return (LayerGroup(widest, tuple(range(len(windows)))),)


def _divided(windows: Sequence[Window], most_layers: int) -> tuple[LayerGroup, ...]:
    """Return groups of up to `most_layers` layers with equal windows.

    Neighbours are in different groups: so every stage of a pipeline holds as many layers of each group, about."""
    groups = []
    for window in sorted(set(windows), key=_order):
        layers = [layer for layer, other in enumerate(windows) if other == window]
        num_groups = -(-len(layers) // most_layers)
        groups += [LayerGroup(window, tuple(layers[first::num_groups])) for first in range(num_groups)]
    return tuple(groups)


def _order(window: Window) -> tuple[int, bool]:
    """Return the sort key of windows: no window first, then short windows before long ones."""
    return 0 if window is None else most_visible(window), isinstance(window, AttentionChunk)
