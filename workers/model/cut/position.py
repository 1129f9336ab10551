"""Where a rank stands among the ranks of its replica, and the error if a model cannot be divided among them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's place in its gang. Ranks are numbered stage by stage, and so are the shards of a `PoolSpec`."""

    rank: int = 0
    tensor_size: int = 1  # ranks that share every layer
    num_stages: int = 1  # groups of layers, one after the other

    @property
    def size(self) -> int:
        return self.tensor_size * self.num_stages

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def driver(self) -> int:
        """The rank that schedules and samples: a rank that has the logits, so that no logits are sent."""
        return (self.num_stages - 1) * self.tensor_size

    @property
    def is_driver(self) -> bool:
        return self.rank == self.driver

    def __str__(self) -> str:
        return f"rank {self.rank} (tensor {self.tensor_rank} of {self.tensor_size}, stage {self.stage} of " + (
            f"{self.num_stages})"
        )


class CannotCut(ValueError):
    """The model cannot be divided among so many ranks; the message gives the reason, and what could be asked for."""
