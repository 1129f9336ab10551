"""Where a rank stands among the ranks of its replica, and the error if a model cannot be divided among them."""

from dataclasses import dataclass

from crossdock.kvtransfer.layout import head_range


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's place in its worker group. Ranks are numbered stage by stage, and so are the shards of a `PoolSpec`."""

    rank: int = 0
    tensor_size: int = 1  # ranks that share every layer
    num_stages: int = 1  # groups of layers, one after the other
    has_whole_experts: bool = False  # where the model allows it; else a slice of every expert
    num_redundant_experts: int | None = None  # copies of whole experts in each layer; None: experts do not move

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


@dataclass(frozen=True, slots=True)
class HeadRanges:
    """The query and KV heads `[start, stop)` of one attention layer that a rank holds."""

    query: tuple[int, int]
    kv: tuple[int, int]
    num_heads: int  # of the whole layer
    num_kv_heads: int  # of the whole layer

    @classmethod
    def of_rank(cls, num_heads: int, num_kv_heads: int, position: RankPosition) -> "HeadRanges":
        """Divide the heads. Ranks that hold the same KV head divide its group of query heads.

        Raises:
            CannotCut: fewer query heads than ranks.
        """
        ranges = [head_range(num_kv_heads, position.tensor_size, rank) for rank in range(position.tensor_size)]
        kv = ranges[position.tensor_rank]
        group = num_heads // num_kv_heads
        sharing = [rank for rank, held in enumerate(ranges) if held == kv]
        if len(sharing) > group:
            raise CannotCut(
                f"{num_heads} query heads over {num_kv_heads} KV heads cannot be divided among {position.tensor_size} "
                f"ranks: {len(sharing)} of them would share the {group} query heads of one; tensor_parallel_size can "
                f"be at most {num_heads}"
            )
        if len(sharing) == 1:
            return cls((kv[0] * group, kv[1] * group), kv, num_heads, num_kv_heads)
        start, stop = even_range(group, len(sharing), sharing.index(position.tensor_rank))
        return cls((kv[0] * group + start, kv[0] * group + stop), kv, num_heads, num_kv_heads)

    def features(self, name: str, size: int) -> tuple[int, int]:
        """Return this rank's range of the `size` features of the projection called `name`."""
        is_kv = name.endswith((".k_proj", ".v_proj"))
        (start, stop), count = (self.kv, self.num_kv_heads) if is_kv else (self.query, self.num_heads)
        if size % count:
            raise CannotCut(f"{name}: its {size} features are not a multiple of {count} heads")
        return start * (size // count), stop * (size // count)


def even_range(size: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return this rank's `[start, stop)` of `size` indices, divided as evenly as whole indices can be."""
    return size * rank // num_ranks, size * (rank + 1) // num_ranks
