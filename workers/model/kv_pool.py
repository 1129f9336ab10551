"""The one KV tensor of a process, and each layer's views of it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from crossdock.kernels.cpu.huge_pages import HugePages, MemoryTaker, give_back
from crossdock.kernels.gpu.storage_memory import StorageMemory, keeps_addresses
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, View


def one_layer(num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> PoolLayout:
    """Return the layout of a page that one layer has for itself."""
    return PoolLayout([LayerShape(num_kv_heads, head_dim, head_dim)], page_size, dtype.itemsize)


class KVPool:
    """Pages of keys and values. Empty until it is allocated."""

    def __init__(self) -> None:
        self.tensor: Tensor = torch.empty(0)
        self.pages: Sequence[tuple[Tensor, Tensor]] = ()  # of each layer: keys and values
        # Tokens of a page.
        self.page_size = 1
        self._num_pages = 0
        self._taker: MemoryTaker | None = None  # on a CPU
        self._storage: StorageMemory | None = None  # on a GPU
        self.is_asleep = False  # the memory is given back: no step may read it
        self.before_step: Callable[[Iterable[int]], None] | None = None  # see `watch`
        self.before_others: Callable[[Iterable[int]], None] | None = None

    def allocate(
        self,
        layouts: Sequence[PoolLayout],
        order: Sequence[int],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate pages, after freeing the earlier ones. `order`: the number of each layer in the layouts."""
        self.free()
        num_elements = num_pages * layouts[0].page_elements
        if keeps_addresses(device):
            pool = HugePages().take(num_elements, dtype)
            self._taker = MemoryTaker(pool)
        else:
            pool = torch.zeros(num_elements, dtype=dtype, device=device)
            self._storage = StorageMemory([pool])

        def tensor(view: View) -> Tensor:
            return pool.as_strided(view.shape, view.strides, view.offset)

        views = [layout.views(layer, num_pages) for layout in layouts for layer in range(len(layout.layers))]
        pages = [(tensor(keys), tensor(values)) for keys, values in views]
        self.pages = [pages for _, pages in sorted(zip(order, pages, strict=True), key=lambda pair: pair[0])]
        self.tensor = pool
        self.page_size = layouts[0].page_size
        self._num_pages = num_pages

    @property
    def by_page(self) -> Tensor:
        """The pool as [page, page_bytes] uint8."""
        return self.tensor.view(torch.uint8).view(self._num_pages, -1)

    def watch(
        self, before_step: Callable[[Iterable[int]], None], before_others: Callable[[Iterable[int]], None]
    ) -> None:
        """Have these called with pages before they are written to: by the next step; or by others, from then on."""
        self.before_step = before_step
        self.before_others = before_others

    def free(self) -> None:
        """Free the memory. Call it only before another component has a reference to the pool."""
        self.pages, self.tensor = (), torch.empty(0)
        self._storage = None
        if self._taker is not None:
            self._taker.end()
            self._taker = None

    @property
    def moves(self) -> bool:
        """Whether `wake` takes memory at another address than before."""
        return self._storage is not None

    def sleep(self) -> None:
        """Give the memory back until `wake`; contents are lost. Views stay. Registrations do unless the pool
        `moves`."""
        if self.before_others is not None:
            self.before_others(range(self._num_pages))
        if self._storage is not None:
            self._storage.give_back()
        elif self._taker is not None:
            self._taker.end()
            self._taker = None
            give_back(self.tensor)
        self.is_asleep = True

    def wake(self) -> None:
        """Take the memory again, all zeros. ValueError: a GPU has not so much free memory, and the pool sleeps on."""
        if self._storage is not None:
            self._storage.take()
            self.tensor.zero_()
        else:
            self._taker = MemoryTaker(self.tensor)
        self.is_asleep = False

    def wait_for_memory(self) -> None:
        """Wait until this process has the memory of its pool. Until then a step that reaches new pages takes longer."""
        if self._taker is not None:
            self._taker.wait()

    def memory_paused(self) -> AbstractContextManager[None]:
        """Return a context for measurements, in which no memory of the pool is taken unless `wait_for_memory` asks."""
        return nullcontext() if self._taker is None else self._taker.paused()
