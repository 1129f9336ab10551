"""Learn what a transfer of pages to another replica takes on a replica's link, from those that ended."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.schedule.cost.cost_fit import non_negative_solution

_Floats = NDArray[np.float64]

_KEPT = 0.9  # of the weight of each transfer before, when one more ends: the last ten decide
_OUTLIER = 3.0  # actual / predicted, or the inverse, beyond which a transfer counts no more
_SCALE = np.array([1.0, 1e6])  # of a transfer and of its bytes: the columns differ by many orders of magnitude
_LEAST_S = 1e-6  # a clock may see none
_ONE_SIZE = 0.001
"""Share by which a transfer's own seconds are made dearer. Sizes that differ by a few percent so count as one."""


class LinkCost(NamedTuple):
    """seconds(transfer) = transfer_s + bytes / bytes_per_second."""

    transfer_s: float = 0.0  # of each transfer, whatever its bytes
    bytes_per_second: float = 0.0  # 0: no transfer has ended

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a transfer of so many bytes takes. Only where one has ended."""
        return self.transfer_s + num_bytes / self.bytes_per_second


@dataclass(slots=True)
class LinkFit:
    """Fits a `LinkCost` to the transfers of a link: least squares of relative errors, with exponential forgetting.

    Neither figure is negative. A transfer's own seconds are at most as many as the bytes of a mean transfer take: so a
    long transfer is never predicted to be free, also where only short ones were seen. Where all have one size, bytes
    alone explain the seconds.
    """

    cost: LinkCost = field(default_factory=LinkCost)
    _matrix: _Floats = field(default_factory=lambda: np.zeros((2, 2)))
    _vector: _Floats = field(default_factory=lambda: np.zeros(2))

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from a transfer that took `seconds`."""
        seconds = max(seconds, _LEAST_S)
        scale = seconds
        if self.cost.bytes_per_second:  # relative to what is predicted, so that the mean is learnt
            scale = min(max(self.cost.seconds(num_bytes), seconds / _OUTLIER), seconds * _OUTLIER)
        columns = np.array([1.0, num_bytes]) / _SCALE / scale
        self._matrix = _KEPT * self._matrix + np.outer(columns, columns)
        self._vector = _KEPT * self._vector + columns * (seconds / scale)
        if self._matrix[0, 1]:
            self.cost = self._solved()

    def _solved(self) -> LinkCost:
        inverse_mean = self._matrix[0, 0] / self._matrix[0, 1]  # of the scaled bytes of a transfer
        # Solve for two other unknowns. The first counts a transfer whose own seconds are those of the mean bytes.
        # The second counts bytes alone. Neither is negative, so a transfer's own seconds keep the bound of the class.
        change = np.array([[1.0, 0.0], [inverse_mean, 1.0]])
        matrix = change.T @ self._matrix @ change
        matrix[0, 0] *= 1 + _ONE_SIZE
        transfer_s, further = non_negative_solution(matrix, change.T @ self._vector)
        return LinkCost(float(transfer_s), float(_SCALE[1] / (further + transfer_s * inverse_mean)))
