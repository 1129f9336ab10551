"""How unevenly are experts used by the ranks that have whole ones, and what would copies of hot experts change?

    python benchmarks/models/hot_experts.py                         # a minute of one core
    python benchmarks/models/hot_experts.py --model ./checkpoint    # the router of a model with experts

Counts which experts the router of each layer chooses for the texts of this repository's documentation. The first half
of the texts says which experts are hot, the second half is measured: in steps of prompts, of tokens that follow each
other, and of decodes, of single tokens of unlike texts. Experts lie on the ranks in order, as they do here; or they are
placed by the counted load; or some are there twice, on ranks with room for one or two experts more in each layer.

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

from crossdock.workers.model.weights.checkpoint import default_model_dir

STEPS = {"chunk of 512": 512, "64 decodes": 64, "16 decodes": 16}
_TEXT = 512  # tokens


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


def places(load: NDArray[np.float64], num_ranks: int, room: int, is_ordered: bool) -> NDArray[np.float64]:
    """Return the share of each expert's rows that each rank computes, [rank, expert]. `room`: experts of a rank."""
    count = len(load)
    share = np.zeros((num_ranks, count))
    if is_ordered:
        share[np.arange(count) * num_ranks // count, np.arange(count)] = 1
        return share
    copies = np.ones(count, dtype=int)
    for _ in range(num_ranks * room - count):
        copies[np.where(copies < num_ranks, load / copies, -1).argmax()] += 1
    loads = np.zeros(num_ranks)
    each = load / copies
    for expert in np.argsort(-each, kind="stable"):
        for _ in range(copies[expert]):
            is_free = ((share > 0).sum(1) < room) & (share[:, expert] == 0)
            if not is_free.any():  # every rank with room has it: the other copies have its rows
                break
            rank = np.where(is_free, loads, np.inf).argmin()
            share[rank, expert] = 1
            loads[rank] += each[expert]
    return share / share.sum(0)


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


def unevenness(steps: Sequence[NDArray[np.int64]], shares: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Return most rows of a rank, and most experts read, beside the mean of ranks: the means over layers and steps."""
    rows, reads = [], []
    for step in steps:
        for layer, share in enumerate(shares):
            count = np.bincount(step[:, layer].ravel(), minlength=share.shape[1])
            computed = share @ count
            read = ((share > 0) & (count > 0)).sum(1)
            rows.append(computed.max() / computed.mean())
            reads.append(read.max() / (count > 0).sum() * len(share))
    return float(np.mean(rows)), float(np.mean(reads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory of a model with experts (default: random)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--texts", type=int, default=48, help=f"of {_TEXT} tokens (default: %(default)s)")
    add_output_options(parser, "hot-experts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model or default_model_dir())
    ids = [
        token for page in sorted((ROOT / "docs").rglob("*.md")) for token in tokenizer(page.read_text())["input_ids"]
    ]
    texts = [ids[first : first + _TEXT] for first in range(0, len(ids) - _TEXT, _TEXT)][::2][: args.texts]
    model = random_model(len(tokenizer)) if args.model is None else AutoModelForCausalLM.from_pretrained(args.model)
    chosen = chosen_experts(model, texts)
    seen, left = np.split(chosen, [len(chosen) // 2])
    num_experts: int = model.config.num_experts
    loads = [np.bincount(seen[:, :, layer].ravel(), minlength=num_experts) + 0.5 for layer in range(seen.shape[2])]
    hottest = [load.max() / load.mean() for load in loads]
    rows = dict[str, Row]()
    for ranks in args.ranks:
        own = -(-num_experts // ranks)
        for name, room, is_ordered in [("in order", own, True), ("placed", own, False)] + [
            (f"{more} cop{'ies' if more > 1 else 'y'} a rank", own + more, False) for more in (1, 2)
        ]:
            shares = [places(load, ranks, room, is_ordered) for load in loads]
            row: Row = {}
            for step, number in STEPS.items():
                most, read = unevenness(list(steps_of(left, number, step.startswith("chunk"))), shares)
                row |= {f"{step}: rows": most, f"{step}: experts": read}
            rows[f"{ranks} ranks, {name}"] = row
    text = f"The hottest expert of a layer has {min(hottest):.1f} to {max(hottest):.1f} times the mean.\n\n"
    write(args, text + table(rows, "most of a rank / mean"), {"hottest": hottest, "rows": rows})


if __name__ == "__main__":
    main()
