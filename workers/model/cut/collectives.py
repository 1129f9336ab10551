"""Communication between the ranks of a worker group: sums and gathers within a stage, hidden states between stages."""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.cut.symmetric_sums import SymmetricSums, symmetric_sums

_ROWS = 1  # tag of rows of pictures; hidden states have 0


class Collectives:
    """One rank's connections to the others: all-reduce and gather within its stage, hidden states between stages.

    If a rank does not take part within `deadline_s`, the call fails on every other rank.
    """

    def __init__(self, position: RankPosition, deadline_s: float, backend: str = "gloo") -> None:
        """Connect this rank. Collective: every rank of the worker group must call it.

        Needs an initialised torch.distributed world, by gloo, of this worker group alone.
        """
        self.position = position
        timeout = timedelta(seconds=deadline_s)
        size = position.size
        width = position.tensor_size
        stages = [range(size)[stage * width :][:width] for stage in range(position.num_stages)]
        groups = [dist.new_group(list(ranks), timeout, backend) for ranks in stages]
        self._stage = groups[position.stage]
        self._stage_hosts = self._stage  # by gloo, between the hosts
        if position.num_redundant_experts is not None and backend == "nccl":
            self._stage_hosts = [dist.new_group(list(ranks), timeout) for ranks in stages][position.stage]
        self._worker_group = dist.new_group(timeout=timeout, backend=backend)
        self._small_sums: SymmetricSums | None = None
        self._sending: tuple[Any, Tensor] | None = None
        self._host_group = self._worker_group if backend != "nccl" else None  # None: the world, which is of gloo
        self._sending_rows: deque[list[tuple[Any, Tensor]]] = deque()  # of the newest steps with pictures
        self._is_alone = False
        self._checks_logits = False

    def use_symmetric_memory(self, device: torch.device) -> None:
        """Sum small tensors through memory that all GPUs of a stage read, where they can.

        Collective: every rank of the worker group must call it, at the start.
        """
        if self.position.tensor_size > 1:
            is_on_one_host = self.ranks_on_this_host() == self.position.size
            self._small_sums = symmetric_sums(self._stage, device, is_on_one_host, self.gather_texts)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Leave the other ranks out of sums and gathers, which then have the right shapes and wrong numbers.

        For steps that only compile kernels, allocate memory or show what a model's code does: this rank may fail in
        them without leaving others waiting.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Give logits to every rank, which compares them with those of its own layers: at the load of a model."""
        self._checks_logits = True
        try:
            yield
        finally:
            self._checks_logits = False

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks of this stage. `x` may be overwritten."""
        x = x.contiguous()
        if self._is_alone:
            return x
        if self._small_sums is not None and self._small_sums.takes(x):
            return self._small_sums.sum(x)
        dist.all_reduce(x, group=self._stage)
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the `x` of every rank of this stage, side by side. Rank r gives [..., sizes[r]]."""
        padded = _padded(x, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes]
        if not self._is_alone:
            dist.all_gather(parts, padded, group=self._stage)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def gather_logits(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return on the driver, which alone samples, what `gather` returns, and zeros without memory on other ranks."""
        if self._checks_logits:
            return self.gather(x, sizes)
        padded = _padded(x, max(sizes))
        driver = self.position.driver
        is_driver = self.position.is_driver
        parts = [torch.empty_like(padded) for _ in sizes] if is_driver else None
        if not self._is_alone:
            dist.gather(padded, parts, driver, group=self._stage)
        if parts is None:
            return x.new_zeros(1).expand(*x.shape[:-1], sum(sizes))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def from_driver(self, x: Tensor) -> Tensor:
        """Return the driver's `x`. The other ranks' `x` has its shape and dtype, and is overwritten. One stage only."""
        dist.broadcast(x, self.position.driver, group=self._stage)
        return x

    def send_rows(self, rows: Tensor, ranks: Sequence[int]) -> None:
        """Send the driver's rows of pictures to `ranks`, which call `receive_rows` with a tensor of the same shape.

        Between stages rows go through the hosts' memory, also on GPUs. NCCL would first wait for the hidden states that
        the same connection carries the other way. The driver does not wait for the stages before its own.
        """
        if self.position.num_stages == 1:
            self.from_driver(rows)
            return
        while len(self._sending_rows) >= self.position.num_stages:  # more than steps are in flight
            for work, _ in self._sending_rows.popleft():
                work.wait()
        rows = rows.cpu()
        group = self._host_group
        self._sending_rows.append([(dist.isend(rows, rank, group=group, tag=_ROWS), rows) for rank in ranks])

    def receive_rows(self, rows: Tensor) -> Tensor:
        """Return the driver's rows of pictures, in the shape, dtype and device of `rows`, which may be overwritten."""
        if self.position.num_stages == 1:
            return self.from_driver(rows)
        on_host = rows.cpu()
        dist.recv(on_host, self.position.driver, group=self._host_group, tag=_ROWS)
        return on_host.to(rows.device)

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` to the same tensor rank of the next stage.

        Waits for the previous transfer but not for this one, so that the next batch can begin meanwhile.
        """
        self._finish_sending()
        hidden = hidden.contiguous()
        destination = self.position.rank + self.position.tensor_size
        self._sending = dist.isend(hidden, destination, group=self._worker_group), hidden

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the hidden states that the same tensor rank of the previous stage has sent."""
        hidden = torch.empty(*shape, dtype=dtype, device=device)
        dist.recv(hidden, self.position.rank - self.position.tensor_size, group=self._worker_group)
        return hidden

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to tensor ranks of this stage, and fill others from such ranks, which call this too."""
        first = self.position.stage * self.position.tensor_size
        calls = [dist.P2POp(dist.isend, tensor, first + rank, self._stage) for rank, tensor in outgoing]
        calls += [dist.P2POp(dist.irecv, tensor, first + rank, self._stage) for rank, tensor in incoming]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()

    def from_first(self, numbers: Sequence[int], most: int) -> list[int]:
        """Return the numbers of the first rank of this stage. They are at most `most`; others' numbers do not count."""
        message = torch.zeros(1 + most, dtype=torch.int64)
        message[: 1 + len(numbers)] = torch.tensor([len(numbers), *numbers])
        first = self.position.stage * self.position.tensor_size
        dist.broadcast(message, first, group=self._stage_hosts)
        found: list[int] = message[1 : 1 + int(message[0])].tolist()
        return found

    def largest(self, number: float) -> float:
        """Return the largest `number` of the ranks of this stage."""
        found = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._stage_hosts)
        return float(found)

    def wait_for_all(self) -> None:
        """Wait until every rank has called this. The deadline is the world's own, which is longer."""
        dist.all_reduce(torch.zeros(1))

    def ranks_on_this_host(self) -> int:
        """Return how many ranks share this host's memory, this one included."""
        name = socket.gethostname()
        return self.gather_texts(name).count(name)

    def gather_texts(self, text: str) -> list[str]:
        """Return the `text` of every rank, by rank. The deadline is the world's own."""
        texts: list[Any] = [None] * self.position.size
        dist.all_gather_object(texts, text)
        return texts

    def _finish_sending(self) -> None:
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None


def _padded(x: Tensor, width: int) -> Tensor:
    """Return `x` with as many columns as the widest rank's: gloo gathers equal shapes only."""
    return nn.functional.pad(x, (0, width - x.shape[-1])).contiguous()
