"""How much do int8 weights cost and save? The embedded SmolLM2-135M in float32, bfloat16 and int8, on this CPU.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/models/int8.py

Prints the perplexity of each model on this repository's documentation, how far its logits are from those of float32,
and milliseconds of whole forward passes. The passes of the models alternate, so that other load affects all alike.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from crossdock.kernels.attention import AttentionBatch
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import default_model_dir

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = ("operations.md", "serving.md", "models.md", "routing.md")
WINDOW, PAGE_SIZE, CONTEXT = 1024, 16, 64  # tokens


def step(sequences: int, query_len: int, kv_len: int) -> AttentionBatch:
    """Return a batch of equal sequences, each in pages of its own."""
    pages = torch.arange(sequences * -(-kv_len // PAGE_SIZE), dtype=torch.int32).view(sequences, -1)
    positions = torch.arange(kv_len - query_len, kv_len)
    slots = pages[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    starts = torch.arange(sequences + 1, dtype=torch.int32) * query_len
    lengths = torch.full((sequences,), kv_len, dtype=torch.int32)
    decodes = sequences if query_len == 1 else 0
    return AttentionBatch(starts, lengths, pages, slots.flatten(), query_len, kv_len, decodes)


def logits_of(model: LoadedModel, windows: list[Tensor]) -> Tensor:
    """Return the logits [windows * WINDOW, vocab] of independent windows."""
    every = torch.arange(WINDOW)
    return torch.cat([model.forward(ids, every, step(1, WINDOW, WINDOW), every).float() for ids in windows])


def quality(models: dict[str, LoadedModel], num_windows: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir())
    text = "\n".join((DOCS / name).read_text() for name in TEXTS)
    windows = list(torch.tensor(tokenizer(text)["input_ids"]).split(WINDOW))[:num_windows]
    assert all(len(window) == WINDOW for window in windows), "the text is too short for so many windows"
    followed = torch.ones(num_windows * WINDOW, dtype=torch.bool)
    followed[WINDOW - 1 :: WINDOW] = False  # the last token of a window predicts none
    targets = torch.cat(windows).roll(-1)[followed]
    print(f"\n{len(targets)} tokens of {', '.join(TEXTS)}, windows of {WINDOW}")
    print(f"{'':10} {'perplexity':>10} {'error of logits':>16} {'same argmax':>12} {'KL, nats':>9}")
    exact: Tensor | None = None
    for name, model in models.items():
        logits = logits_of(model, windows)
        exact = logits if exact is None else exact
        perplexity = F.cross_entropy(logits[followed], targets).exp()
        error = (logits - exact).norm() / exact.norm()
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        divergence = F.kl_div(logits.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True)
        print(f"{name:10} {perplexity:10.3f} {error:16.4f} {same:12.4f} {divergence:9.5f}")


def speed(models: dict[str, LoadedModel], repeats: int) -> None:
    print(f"\nforward passes, ms, least of {repeats}: decodes after {CONTEXT} tokens, or one chunk of a prompt")
    print(f"{'':14} " + " ".join(f"{name:>9}" for name in models))
    decodes, chunks = (1, 2, 4, 8, 16, 32, 64), (64, 256, 1024)
    passes = [(f"{n} decodes", step(n, 1, CONTEXT + 1)) for n in decodes]
    passes += [(f"chunk of {n}", step(1, n, n)) for n in chunks]
    for name, batch in passes:
        rows = len(batch.slots)
        ids = torch.arange(rows) % 1000
        positions = torch.full((rows,), CONTEXT) if batch.max_query_len == 1 else torch.arange(rows)
        wanted = batch.query_start[1:].long() - 1
        least = dict.fromkeys(models, float("inf"))
        for _ in range(repeats + 1):
            for each, model in models.items():
                start = time.perf_counter()
                model.forward(ids, positions, batch, wanted)
                least[each] = min(least[each], time.perf_counter() - start)
        print(f"{name:14} " + " ".join(f"{1e3 * seconds:9.2f}" for seconds in least.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    path = str(default_model_dir())
    models = {
        "float32": load_model(ModelSpec(path, "float32")),
        "bfloat16": load_model(ModelSpec(path, "bfloat16")),
        "int8": load_model(ModelSpec(path, "bfloat16", quantization="int8")),
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, model in models.items():
        model.allocate_pool(max(WINDOW // PAGE_SIZE, 64 * (CONTEXT // PAGE_SIZE + 1)), PAGE_SIZE)
        print(f"{name}: kernels {model.kernels}")
    with torch.inference_mode():
        quality(models, arguments.windows)
        speed(models, arguments.repeats)


if __name__ == "__main__":
    main()
