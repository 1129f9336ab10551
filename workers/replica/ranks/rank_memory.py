"""Change the memory of a replica's ranks, when the replica sleeps and wakes."""

from dataclasses import dataclass

from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.ranks.rank_messages import MemoryChange
from crossdock.workers.replica.ranks.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank: its pages, its weights, and the steps that are recorded over them."""

    model: LoadedModel
    weights: NewWeights
    runner: Runner

    def change(self, what: MemoryChange) -> None:
        """Give memory back, or take it again, or record steps over it. Belongs between two steps.

        Raises:
            ValueError: a GPU has not as much free memory as is to be taken. Nothing has changed.
        """
        match what:
            case "give pages":
                self.model.pool.sleep()
            case "take pages":
                self.model.pool.wake()
            case "give weights" | "keep weights":
                self.weights.give_up(keeps=what == "keep weights")
            case "take weights":
                self.weights.take()
            case "forget steps":
                self.runner.forget()
            case "record steps":
                self.runner.record()


def change_on_all(own: RankMemory, worker_group: WorkerGroup | None, what: MemoryChange) -> None:
    """Do as `RankMemory.change` on the driver's rank and on all others.

    The driver takes memory before the others: where it cannot, nothing has changed on any rank. Steps are recorded by
    all ranks at once.
    """
    takes = what in ("take pages", "take weights")
    if takes:
        own.change(what)
    if worker_group is not None:
        worker_group.change_memory(what)
    if not takes:
        own.change(what)
