"""Moves hot experts between the ranks of a stage, and copies them, while steps run: a piece of one expert a step.

The first rank of the stage decides by the rows that it has counted, and tells the others before each step in which
something moves. An expert is sent in pieces that take a few milliseconds. When all have arrived, the next step is the
first that is computed by the new placement.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.expert_plan import Loads, Move, after_moves, next_moves, rank_loads
from crossdock.workers.model.cut.expert_slots import ExpertSlots, slot_bytes, slot_tensors

logger = logging.getLogger("ray.serve")

_PIECE_S = 0.005  # seconds that a step may take longer by what is sent: a tenth of the shortest default time per token
_LEAST_PIECE = 1 << 18  # bytes


@dataclass(frozen=True, slots=True)
class BalanceTimes:
    """When experts are counted and moved, in steps."""

    window_size: int  # steps whose rows are counted before a plan, at most `step_interval`
    step_interval: int  # steps from the end of a rearrangement to the next plan
    log_interval: int = 0  # steps from one line of the log to the next; 0: none


@dataclass(slots=True)
class _Sending:
    """A change that is on the way."""

    layer: int
    moves: tuple[Move, ...]
    rows: Loads  # of each expert, as the first rank has counted them
    arriving: dict[int, Tensor]  # bytes for the slots of this rank
    done: int = 0  # bytes of each expert that all have


class ExpertBalance:
    """The moving experts of one rank. Each method is collective: every rank of the stage calls it between two steps."""

    def __init__(
        self, experts: Sequence[Any], slots: Sequence[ExpertSlots], links: Collectives, times: BalanceTimes
    ) -> None:
        """Measure how long a piece of an expert takes to send. experts: the module of each of `slots`."""
        self._slots = slots
        self._experts = experts
        self._links = links
        self._times = times
        self._steps = 0  # since the last rearrangement
        self._next_layer: int | None = None  # to plan for; None: nothing is rearranged
        self._sending: _Sending | None = None
        self._piece = max(int(_rate(links, self._experts[0]) * _PIECE_S), _LEAST_PIECE)
        self.num_moved = 0  # experts, since the start
        self.balancedness: float | None = None  # on the first rank: see `_measured`; None: not measured yet
        self._clear()

    @property
    def is_moving(self) -> bool:
        """Whether the next step takes longer by what is sent before it."""
        return self._next_layer is not None

    @property
    def moved_names(self) -> set[str]:
        """The parameters in which experts no longer lie as they were read."""
        return {each.name for each in self._slots if each.has_moved}

    @torch.inference_mode()
    def before_step(self) -> None:
        """Count a step; plan, or send the next piece, where it is time for that."""
        times = self._times
        if times.log_interval and self._steps and self._steps % times.log_interval == 0:
            self._log()
        if self._next_layer is None:
            self._steps += 1
            if self._steps == times.step_interval - min(times.window_size, times.step_interval):
                self._clear()
            if self._steps > times.step_interval:
                self._next_layer = 0
                self._measured()
        if self._next_layer is not None:
            self._rearrange(self._next_layer)

    @torch.inference_mode()
    def reset(self) -> None:
        """Begin again, with the experts where ranks read them: other weights are in place now."""
        for each in self._slots:
            each.reset()
        self._end()

    def _rearrange(self, layer: int) -> None:
        if self._sending is None:
            self._sending = self._planned(layer)
        if self._sending is None:
            self._next_layer = layer + 1
            if self._next_layer == len(self._slots):
                self._end()
        else:
            self._send_piece(self._sending)

    def _end(self) -> None:
        self._sending = self._next_layer = None
        self._steps = 0
        self._clear()

    def _clear(self) -> None:
        for each in self._slots:
            each.clear_rows()

    def _planned(self, layer: int) -> _Sending | None:
        """Return the next change of a layer that the first rank plans; None: it needs none."""
        slots = self._slots[layer]
        message = list[int]()
        if self._links.position.tensor_rank == 0:
            rows = slots.counted_rows()
            moves = next_moves(slots.placement, np.array(rows, float))
            message = [*rows, *chain.from_iterable(moves)] if moves else []
        message = self._links.from_first(message, most=slots.num_experts + 2 * len(Move._fields))
        if not message:
            return None
        rows, numbers = message[: slots.num_experts], message[slots.num_experts :]
        moves = tuple(Move(*numbers[first : first + 4]) for first in range(0, len(numbers), 4))
        size = slot_bytes(self._experts[layer])
        device = slots.rows.device
        rank = self._links.position.tensor_rank
        arriving = {
            move.slot: torch.empty(size, dtype=torch.uint8, device=device) for move in moves if move.rank == rank
        }
        return _Sending(layer, moves, np.array(rows, float), arriving)

    def _send_piece(self, sending: _Sending) -> None:
        """Send and receive the next piece of each expert of a change. The last one puts the change in place."""
        experts = self._experts[sending.layer]
        slots = self._slots[sending.layer]
        rank = self._links.position.tensor_rank
        size = slot_bytes(experts)
        end = min(sending.done + self._piece, size)
        outgoing = list[tuple[int, Tensor]]()
        incoming = list[tuple[int, Tensor]]()
        for move in sending.moves:
            if move.source == rank:
                own = slot_tensors(experts, slots.own_slot_of(move.expert))
                outgoing.append((move.rank, _bytes_of(own, sending.done, end)))
            if move.rank == rank:
                incoming.append((move.source, sending.arriving[move.slot][sending.done : end]))
        self._links.exchange(outgoing, incoming)
        sending.done = end
        if end < size:
            return
        for slot, found in sending.arriving.items():
            tensors = slot_tensors(experts, slot)
            for tensor, part in zip(tensors, torch.split(found, [len(each) for each in tensors]), strict=True):
                tensor.copy_(part)
        slots.place(after_moves(slots.placement, sending.moves), sending.rows)
        self.num_moved += len(sending.moves)
        self._sending = None

    def _measured(self) -> tuple[float, float]:
        """Measure how evenly the counted rows are divided among the ranks, as vLLM does: mean / most, 1 is even.

        Returns the mean rows of a rank, and the most, of all layers; 0 on ranks that do not count.
        """
        if self._links.position.tensor_rank:
            return 0.0, 0.0
        loads = np.array([rank_loads(each.placement, np.array(each.counted_rows(), float)) for each in self._slots])
        mean, most = float(loads.mean(1).sum()), float(loads.max(1).sum())
        if most:
            self.balancedness = mean / most
        return mean, most

    def _log(self) -> None:
        """Log what `_measured` finds."""
        mean, most = self._measured()
        if most:
            logger.info(
                "experts: mean rows of a rank %.2f, most %.2f, balancedness %.4f; %d moved so far",
                *(mean, most, mean / most, self.num_moved),
            )


def _bytes_of(tensors: Sequence[Tensor], first: int, end: int) -> Tensor:
    """Return bytes of tensors of bytes that lie one after the other."""
    parts = []
    for tensor in tensors:
        if first < len(tensor) and end > 0:
            parts.append(tensor[max(first, 0) : end])
        first -= len(tensor)
        end -= len(tensor)
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _rate(links: Collectives, experts: Any) -> float:
    """Return the bytes per second that every rank can send to the next one, at least. Takes some milliseconds."""
    device = slot_tensors(experts, 0)[0].device
    sent = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    position = links.position
    ranks = position.tensor_size
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        received = torch.empty_like(sent)
        links.exchange([((position.tensor_rank + 1) % ranks, sent)], [((position.tensor_rank - 1) % ranks, received)])
        int(received[-1])  # on a GPU the host waits here
        seconds.append(time.monotonic() - began)
    return len(sent) / links.largest(min(seconds))
