"""Model the bytes that a layer's experts move in one step, to see whether fusing the steps around their products pays.

    python benchmarks/expert_bytes.py

A computation, not a measurement. `weights`: every expert that some token chose is read once; tokens choose uniformly.
`rows`: what transformers' grouped products read and write beside the weights. `fused`: the same if the gathering of
rows and SiLU were part of the first product, and the weights of the routes part of the second.
"""

from typing import NamedTuple

BYTES = 2  # of a bfloat16
TOKENS = (1, 8, 64, 512, 8192)


class Experts(NamedTuple):
    """The shape of a layer's experts."""

    num_experts: int
    num_chosen: int  # by each token
    hidden: int
    intermediate: int

    def weights(self, num_tokens: int) -> float:
        """Return the expected bytes of the weights of all experts that some token chose."""
        missed = (1 - self.num_chosen / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed) * 3 * self.hidden * self.intermediate * BYTES

    def rows(self, num_tokens: int) -> int:
        """Return the bytes of rows: gather 2 H; product H + 2 I; SiLU 2 I; times up 3 I; product I + H; weigh 2 H; back
        in order 2 H; sum H for each chosen expert, and H for each token."""
        per_choice = 9 * self.hidden + 8 * self.intermediate
        return num_tokens * (self.num_chosen * per_choice + self.hidden) * BYTES

    def fused(self, num_tokens: int) -> int:
        """Return the bytes of rows if fused: product H + I; product I + H; sum H for each chosen expert, H for each
        token."""
        per_choice = 3 * self.hidden + 2 * self.intermediate
        return num_tokens * (self.num_chosen * per_choice + self.hidden) * BYTES


MODELS = {"Qwen3-30B-A3B": Experts(128, 8, 2048, 768), "Mixtral-8x7B": Experts(8, 2, 4096, 14336)}


def main() -> None:
    for name, experts in MODELS.items():
        print(f"{name}, MB of one layer\n{'tokens':>8}{'weights':>10}{'rows':>8}{'fused':>8}{'saved':>8}")
        for num_tokens in TOKENS:
            parts = (experts.weights(num_tokens), experts.rows(num_tokens), experts.fused(num_tokens))
            weights, rows, fused = (part / 1e6 for part in parts)
            saved = (rows - fused) / (weights + rows)
            print(f"{num_tokens:8}{weights:10.1f}{rows:8.1f}{fused:8.1f}{saved:8.1%}")


if __name__ == "__main__":
    main()
