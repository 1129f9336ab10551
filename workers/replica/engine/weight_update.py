"""New weights on all ranks of one replica."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossdock.workers.model.new_weights import Arrays, NewWeights
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.ranks.rank_messages import PutWeights, WeightMethod
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.schedule.request.weight_version import unlike


class WeightUpdate:
    """The driver's new weights and those of its followers. `call` may run in another thread than steps."""

    def __init__(self, own: NewWeights, worker_group: WorkerGroup | None) -> None:
        self._own = own
        self._worker_group = worker_group
        self.checksums: Mapping[str, str] = {}  # of the tensors that were last read or checked, by name

    @property
    def is_read(self) -> bool:
        """Whether there are weights to put in place."""
        return self._own.is_read

    @property
    def are_given_up(self) -> bool:
        """Whether the present weights are given up, so that no step may be computed."""
        return self._own.are_given_up

    def why_not(self) -> str:
        """Return why weights cannot be read again or replaced; empty: they can."""
        return self._own.why_not()

    @property
    def are_kept(self) -> bool:
        """Whether the present weights are given up, and the host's memory has them."""
        return self._own.are_kept

    def call(self, method: WeightMethod, argument: Mapping[str, Any]) -> str:
        """Call the new weights of every rank, beside steps. Returns the id of the weights in a folder.

        Raises:
            ValueError: a rank's call failed, with its reason; or ranks have unlike tensors.
        """
        text = json.dumps(argument)
        failure = ""
        own = dict[str, str]()
        wait = None if self._worker_group is None else self._worker_group.call_weights(method, text)
        try:
            own = self._own.call(method, text)
        except Exception as error:  # files and tensors of others: a library may raise anything
            failure = f"{error}" or type(error).__name__
        others = [] if wait is None else wait()
        if failure := failure or next((each.failure for each in others if each.failure), ""):
            raise ValueError(failure)
        if wrong := next(filter(None, (unlike(each.checksums, own) for each in others)), ""):
            raise ValueError(f"ranks of a replica have unlike tensors: {wrong}")
        self.checksums = own
        return fingerprint(Path(argument["folder"])) if argument.get("folder") else ""

    def read_arrays(self, arrays: Arrays) -> None:
        """Have every rank read whole tensors, which other ranks hold already. ValueError as in `call`."""
        self._own.hold(arrays)
        self.call("read", {"folder": ""})

    def put(self) -> None:
        """Compute with the weights that were read from the next step on. No step may be in flight.

        Raises:
            ValueError: weights were given up, and the GPU has not enough free memory. Nothing has changed.
        """
        self._own.make_room()
        if self._worker_group is not None:
            self._worker_group.broadcast(PutWeights())
        self._own.put()
