"""The pictures of one step: what to encode first, and which rows of its flat batch are embeddings of pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.device_copies import to_device
from crossdock.workers.schedule.pictures.encoding import ItemFailure
from crossdock.workers.schedule.request.batch import EncoderWork


@dataclass(slots=True)
class StepPictures:
    """The pictures of one step: what to encode first, and which rows of the flat batch are embeddings of items."""

    work: EncoderWork
    rows: NDArray[np.int64]  # [R], among the T of the step
    parts: Sequence[tuple[bytes, int, int]]  # (content hash, first row, end) of the embeddings, in the order of `rows`
    positions: NDArray[np.int64] | None = None  # [3, T]; None: one for each token, which the step has
    key_end: NDArray[np.int32] | None = None  # [T]; see `AttentionBatch`
    timer: Callable[[], float] = lambda: 0.0  # of `seconds`
    failures: Mapping[bytes, ItemFailure] = field(default_factory=dict)  # items of `parts` without embeddings
    prepared: "PictureRows | None" = None  # on the rank that encodes, from the step's begin on

    @property
    def seconds(self) -> float:
        """Return the seconds that encoding took. On a GPU, wait for the end of encoding first."""
        return self.timer()

    @property
    def is_read(self) -> bool:
        """Return whether the forward pass reads pictures, or positions in three axes; False: it reads tokens alone."""
        return bool(len(self.rows)) or self.positions is not None


@dataclass(slots=True, eq=False)
class PictureRows:
    """The rows of a flat batch that are embeddings of items, on the device."""

    rows: Tensor  # [R]
    embeddings: Tensor  # [1 + L, R, E]: of the input, and added after each of the first L layers
    positions: Tensor | None  # [3, T]; None: the step's own
    key_end: Tensor | None = None  # [T]; see `AttentionBatch`

    @classmethod
    def of(cls, pictures: StepPictures, embeddings: Tensor) -> "PictureRows":
        """Return the rows of a step on the device of its `embeddings` [1 + L, R, E]."""
        device = embeddings.device
        positions = None if pictures.positions is None else to_device(pictures.positions, device)
        key_end = None if pictures.key_end is None else to_device(pictures.key_end, device)
        return cls(to_device(pictures.rows, device), embeddings, positions, key_end)
