"""Which attention heads a rank holds: whole groups of query heads go with their KV head."""

from dataclasses import dataclass

from crossdock.kvtransfer.layout import head_range
from crossdock.workers.model.cut.position import CannotCut, RankPosition


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
