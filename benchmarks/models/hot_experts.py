"""How unevenly are experts used by the ranks that have whole ones, and what do moves and copies of hot ones change?

    python benchmarks/models/hot_experts.py                         # some minutes of one core
    python benchmarks/models/hot_experts.py --model ./checkpoint    # the router of a model with experts

Counts which experts the router of each layer chooses for the texts of this repository's documentation. By the first
half of the texts experts are moved and copied, the second half is measured: in chunks of prompts, of tokens that follow
each other, and in decodes, of single tokens of unlike texts. The plan and the division of rows are those of ranks on
CPUs with --enable-eplb; without it experts lie on the ranks in the order of the model. "Divided evenly": each copy
computes as many rows of its expert, and reads the weights for them, whatever the step has.

Prints how many rows the rank with most of them computes, and how many experts the rank reads that reads most, both
beside the mean of the ranks if each expert is read by one rank: in each layer the others wait for that rank. Without
`--model` the model has random weights. Its router is uneven by the texts alone; a trained one is even by its training,
and uneven by topics.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import ROOT, Row, add_output_options, table, write

from crossdock.workers.model.cut.expert_plan import (
    CopiedExperts,
    Placement,
    after_moves,
    first_placement,
    holders,
    next_moves,
)
from crossdock.workers.model.cut.expert_slots import WORTH_A_COPY
from crossdock.workers.model.weights.checkpoint import default_model_dir

STEPS = {"chunk of 512": 512, "chunk of 2,048": 2048, "64 decodes": 64, "16 decodes": 16}
_TEXT = 2048  # tokens


def random_model(vocabulary: int) -> Any:
    """Return a small model with 128 experts, 8 of them for a token, in 4 layers."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=128,
        num_experts_per_tok=8,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def chosen_experts(model: Any, texts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the experts of each token, [text, token, layer, k]."""
    number = model.config.num_experts_per_tok
    found = []
    for text in texts:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([text]), output_router_logits=True).router_logits
        found.append(torch.stack([each.topk(number).indices for each in logits], 1).numpy())
    return np.stack(found)


def settled(load: NDArray[np.float64], num_ranks: int, copies: int | None) -> tuple[Placement, int]:
    """Return where experts lie after all changes, and how many were sent. copies: of a layer; None: nothing moves."""
    placement = first_placement(len(load), num_ranks, (len(load) + (copies or 0)) // num_ranks)
    sent = 0
    while copies is not None and (moves := next_moves(placement, load)):
        placement = after_moves(placement, moves)
        sent += len(moves)
    return placement, sent


def steps_of(chosen: NDArray[np.int64], rows: int, is_prompt: bool) -> Iterator[NDArray[np.int64]]:
    """Yield the experts of each step's rows, [row, layer, k]."""
    texts, tokens = chosen.shape[:2]
    if is_prompt:
        for text in chosen:
            yield from (text[first : first + rows] for first in range(0, tokens - rows + 1, rows))
        return
    rng = np.random.default_rng(0)
    for _ in range(100):
        yield chosen[rng.integers(texts, size=rows), rng.integers(tokens, size=rows)]


def work(held: NDArray[np.bool_], count: NDArray[np.int64], *, evenly: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return how many rows each rank computes, and how many experts it reads, [ranks] each.

    held: which rank holds which expert, [ranks, experts]. count: rows of each expert in a step. evenly: copies divide
    their rows evenly, whatever the step has, and each of them is read.
    """
    if evenly:
        return held @ (count / held.sum(0)), held @ (count > 0).astype(int)
    divided = CopiedExperts(held).divided(count, WORTH_A_COPY["cpu"])
    alone = np.where(np.isin(np.arange(len(count)), list(divided)), 0, count)
    computed = held @ alone
    read = held @ (alone > 0).astype(int)
    for parts in divided.values():
        for rank, number in parts:
            computed[rank] += number
            read[rank] += 1
    return computed, read


def unevenness(
    steps: Sequence[NDArray[np.int64]], places: Sequence[NDArray[np.bool_]], *, evenly: bool
) -> tuple[float, float]:
    """Return most rows of a rank, and most experts read, beside the mean of ranks: the means over layers and steps.

    places: which rank holds which expert, [ranks, experts], for each layer. evenly: see `work`.
    """
    rows, reads = [], []
    for step in steps:
        for layer, held in enumerate(places):
            count = np.bincount(step[:, layer].ravel(), minlength=held.shape[1])
            computed, read = work(held, count, evenly=evenly)
            rows.append(computed.max() / computed.mean())
            reads.append(read.max() / (count > 0).sum() * len(held))
    return float(np.mean(rows)), float(np.mean(reads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory of a model with experts (default: random)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--texts", type=int, default=40, help=f"of {_TEXT} tokens (default: %(default)s)")
    add_output_options(parser, "hot-experts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model or default_model_dir())
    ids = [
        token for page in sorted((ROOT / "docs").rglob("*.md")) for token in tokenizer(page.read_text())["input_ids"]
    ]
    texts = [ids[first : first + _TEXT] for first in range(0, len(ids) - _TEXT, _TEXT)][: args.texts]
    model = random_model(len(tokenizer)) if args.model is None else AutoModelForCausalLM.from_pretrained(args.model)
    chosen = chosen_experts(model, texts)
    seen, left = np.split(chosen, [len(chosen) // 2])
    num_experts: int = model.config.num_experts
    loads = [np.bincount(seen[:, :, layer].ravel(), minlength=num_experts) + 0.5 for layer in range(seen.shape[2])]
    hottest = [load.max() / load.mean() for load in loads]
    rows = dict[str, Row]()
    for ranks in args.ranks:
        kinds: list[tuple[str, int | None, bool]] = [("in order", None, False), ("moved", 0, False)]
        for number in (ranks, 4 * ranks):
            kinds += [(f"{number} copies, divided evenly", number, True), (f"{number} copies", number, False)]
        for name, copies, evenly in kinds:
            found = [settled(load, ranks, copies) for load in loads]
            places = [holders(placement, num_experts) for placement, _ in found]
            row: Row = {}
            for step, size in STEPS.items():
                some = list(steps_of(left, size, step.startswith("chunk")))
                most, read = unevenness(some, places, evenly=evenly)
                row |= {f"{step}: rows": most, f"{step}: experts": read}
            rows[f"{ranks} ranks, {name}"] = row | {"sent, a layer": sum(sent for _, sent in found) / len(found)}
    text = f"The hottest expert of a layer has {min(hottest):.1f} to {max(hottest):.1f} times the mean.\n\n"
    write(args, text + table(rows, "most of a rank / mean"), {"hottest": hottest, "rows": rows})


if __name__ == "__main__":
    main()
