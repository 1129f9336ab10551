"""The memory under tensors of a GPU: given back, and taken again at another address, while the tensors stay.

Linux takes a CPU's memory back and keeps the address (huge_pages.py). A GPU's memory is a storage of torch: the storage
is freed and allocated again, and all tensors that are views of the storage follow. What keeps addresses by itself must
be made again: recorded steps, and registrations for transfers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def keeps_addresses(device: torch.device) -> bool:
    """Return whether memory of a device can be given back and taken again at the same address."""
    return device.type == "cpu"


class StorageMemory:
    """The memory of some tensors, each storage once. Tensors without their memory may not be read."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {each._cdata: each for each in (tensor.untyped_storage() for tensor in tensors)}
        # Memory that is not torch's stays, for example that of a loader's own buffers.
        self._sizes = {each: each.nbytes() for each in storages.values() if each.resizable()}
        self._contents: dict[torch.UntypedStorage, torch.UntypedStorage] = {}  # on the host

    @property
    def nbytes(self) -> int:
        """The bytes of all storages, while they have their memory."""
        return sum(self._sizes.values())

    @property
    def has_contents(self) -> bool:
        """Whether the host has the contents."""
        return bool(self._contents)

    def give_back(self, *, keeps: bool = False) -> None:
        """Give the memory back to the device. `keeps`: the host's memory gets the contents, for `fill`."""
        for storage in self._sizes:
            if keeps:
                self._contents[storage] = _on_host(storage)
            storage.resize_(0)
        _release()

    def forget(self) -> None:
        """Forget the contents."""
        self._contents.clear()

    def take(self) -> None:
        """Take the memory again. It holds anything.

        Raises:
            ValueError: the device has not enough free memory. Then the tensors lack theirs as before.
        """
        try:
            for storage, size in self._sizes.items():
                _allocate(storage, size)
        except torch.OutOfMemoryError as error:
            for storage in self._sizes:
                storage.resize_(0)
            _release()
            raise ValueError(
                f"the GPU has not the {self.nbytes} bytes free that this replica gave back: end what uses them, and "
                f"wake it again. {error}"
            ) from None

    def fill(self) -> None:
        """Copy the contents that were kept back into the memory, and forget them."""
        while self._contents:
            storage, content = self._contents.popitem()
            storage.copy_(content, False)


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage in the host's memory."""
    copy: torch.UntypedStorage = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    copy.copy_(storage, False)
    return copy


def _allocate(storage: torch.UntypedStorage, size: int) -> None:
    storage.resize_(size)


def _release() -> None:
    """Have torch give freed memory back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
