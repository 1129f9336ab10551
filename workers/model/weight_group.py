"""Tensors that a trainer broadcasts to all ranks of all replicas, in a process group of torch that it opens."""

import io
import pickle
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_JOIN_S = 300.0  # for all ranks to come; a trainer waits longer
_RECEIVE_S = 1800.0  # for one broadcast, as TRL's trainer waits for a whole update
_ID_BYTES = 128  # of NCCL's unique id
_BUFFER_BYTES = 1 << 30  # of packed tensors, vLLM's default


class Announced(NamedTuple):
    """A tensor that the trainer is about to send."""

    name: str  # in a checkpoint
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def announced(update: Any) -> list[Announced]:
    """Return the tensors of vLLM's `update_info`. ValueError: it does not say name, dtype and shape of each."""
    try:
        names, dtypes, shapes = (update[key] for key in ("names", "dtype_names", "shapes"))
        kinds = [getattr(torch, name) for name in dtypes]
        found = [Announced(*each) for each in zip(names, kinds, shapes, strict=True)]
        assert all(isinstance(kind, torch.dtype) for kind in kinds)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ValueError(f"update_info needs names, dtype_names and shapes of equal length: {error!r}") from None
    return found


class WeightGroup:
    """One rank's place in the trainer's group. The trainer is rank 0, and sends whole tensors."""

    def __init__(self, info: Any, own: int, device: torch.device) -> None:
        """Join. `info`: vLLM's `init_info`; `own`: this rank among those of all replicas.

        Raises:
            ValueError: `info` lacks a field. RuntimeError: the trainer or another rank does not come in time.
        """
        try:
            address = str(info["master_address"])
            port = int(info["master_port"])
            rank = int(info["rank_offset"]) + own
            size = int(info["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            needed = "master_address, master_port, rank_offset and world_size"
            raise ValueError(f"init_info needs {needed}: {error!r}") from None
        if not 0 < rank < size:
            raise ValueError(f"init_info: world_size is {size}; rank {rank} of this replica is not below it")
        self._buffer_bytes = int(info.get("packed_buffer_size_bytes", _BUFFER_BYTES)) if info.get("packed") else 0
        self._device = device
        wait = timedelta(seconds=_JOIN_S)
        # As a worker of the store: that of vLLM's trainers waits until it has counted all.
        store: Any = dist.TCPStore(address, port, size, False, wait)  # type: ignore[attr-defined]
        if device.type == "cuda":
            self._group: Any = vllm_group(store, rank, size, device, dist.ProcessGroupNCCL)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=_RECEIVE_S)
            options._devices = [gloo.create_device(hostname=_own_address(address, port))]
            self._group = gloo(store, rank, size, options)

    def receive(self, tensors: Sequence[Announced]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name, on the host, in the order in which the trainer sends them."""
        for some in _buffers(tensors, self._buffer_bytes):
            sizes = [each.num_bytes for each in some]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            whole = buffer if self._buffer_bytes else buffer.view(some[0].dtype)
            self._group.broadcast(whole, 0).wait()
            for each, part in zip(some, torch.split(buffer.cpu(), sizes), strict=True):
                is_aligned = part.storage_offset() % each.dtype.itemsize == 0
                yield each.name, (part if is_aligned else part.clone()).view(each.dtype).view(*each.shape)


def vllm_group(store: Any, rank: int, size: int, device: torch.device, nccl: Any) -> Any:
    """Join the NCCL communicator that vLLM's `PyNcclCommunicator` opens as rank 0. `nccl`: torch's process group of it.

    vLLM's trainer pickles NCCL's unique id into the store. torch's ranks read the id of their first communicator from
    the key "0" of a store, which is given here. The first sum is vLLM's: all ranks of a communicator warm up with one.
    """
    known: Any = dist.HashStore()  # type: ignore[attr-defined]
    known.set("0", unique_id(store.get("broadcast_from/0/0")))
    group = nccl(known, rank, size, nccl.Options())
    group.allreduce([torch.zeros(1, device=device)]).wait()
    return group


class _IdReader(pickle.Unpickler):
    """Reads the pickle of a ctypes structure, and nothing else: another process at the store could write any pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return lambda _, state: state[1]
        if name == "ncclUniqueId":
            return name
        raise ValueError(f"the trainer's store has {module}.{name} in the place of NCCL's unique id")


def unique_id(pickled: bytes) -> bytes:
    """Return the bytes of NCCL's unique id, as vLLM pickles it. ValueError: it is something else."""
    found: Any = None
    try:
        found = _IdReader(io.BytesIO(pickled)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"the trainer's store has no pickle of NCCL's unique id: {error!r}") from None
    if not isinstance(found, bytes) or len(found) != _ID_BYTES:
        raise ValueError(f"NCCL's unique id has {_ID_BYTES} bytes, and the trainer's store has {str(found)[:50]}")
    return found


def _own_address(address: str, port: int) -> str:
    """Return the address of this machine that leads to another one."""
    family, *_, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _buffers(tensors: Sequence[Announced], most_bytes: int) -> Iterator[list[Announced]]:
    """Yield the tensors that come as one: each alone, or so many that they have more than `most_bytes`."""
    some: list[Announced] = []
    for each in tensors:
        some.append(each)
        if sum(one.num_bytes for one in some) > most_bytes or not most_bytes:
            yield some
            some = []
    if some:
        yield some
