"""How many seconds does a step take where an indexer chooses the tokens to read, and how many with full attention?

    python benchmarks/models/indexers.py --record experts-and-indexers      # three minutes of one core

Two models of random weights, in turn, in one process with one thread: of DeepSeek-V3.2, whose indexers choose 2,048
tokens, and of DeepSeek-V3, which has the same layers without indexers. Their layers have an eighth of the published
heads, for queries and for indexers alike, over latents as published, and small dense products behind them: so attention
is most of a step. With `--family minimax` the layers are those of MiniMax-M3, with half of the published heads, whose
indexers choose 16 blocks of 128 tokens for each KV head, beside the same layers without. Prints CPU seconds of a
decode step, and of chunks of prompts, after several contexts: the median of repeats, and the median of the ratio of
both models' steps in one turn.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import ByteSize
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    MiniMaxM3VLTextConfig,
    PretrainedConfig,
)

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import measure_step
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import Row, add_output_options, table, write

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,  # no layer has experts
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 40_960,
}
INDEX: dict[str, Any] = {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 2048}


MINIMAX: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "dense_intermediate_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "max_position_embeddings": 40_960,
}


def of_minimax(layers: int) -> dict[str, PretrainedConfig]:
    """Return the configurations of both models of MiniMax-M3."""
    shape = MINIMAX | {"num_hidden_layers": layers, "mlp_layer_types": ["dense"] * layers}
    kinds = {"full": "full_attention", "indexed": "minimax_m3_sparse"}
    return {name: MiniMaxM3VLTextConfig(**shape, layer_types=[kind] * layers) for name, kind in kinds.items()}


def of_deepseek(layers: int) -> dict[str, PretrainedConfig]:
    """Return the configurations of both models of DeepSeek."""
    shape = SHAPE | {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    return {
        "full": DeepseekV3Config(**shape),
        "indexed": DeepseekV32Config(
            **shape, **INDEX, mlp_layer_types=["dense"] * layers, layer_types=["indexed_attention"] * layers
        ),
    }


FAMILIES = {"deepseek": of_deepseek, "minimax": of_minimax}


def write_models(folder: Path, configs: dict[str, PretrainedConfig]) -> dict[str, Path]:
    """Write both models. Returns their folders by the name of their attention."""
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return {name: folder / name for name in configs}


def engine_of(folder: Path) -> Engine:
    """Return an engine whose clock counts CPU seconds, and whose pages hold random numbers, as if prompts had."""
    model = load_model(ModelSpec(str(folder), dtype="float32"), "cpu")
    config = EngineConfig(
        kv_cache_memory=ByteSize(512 << 20), max_num_batched_tokens=512, max_num_seqs=8, enable_prefix_caching=False
    )
    engine = new_engine(model, config, clock=time.process_time)
    generator = torch.Generator().manual_seed(0)
    for pages in model.pool.pages:
        for each in pages:
            each.normal_(generator=generator)
    return engine


def measure(engines: dict[str, Engine], chunk: tuple[int, int] | None, context: int, repeats: int) -> Row:
    """Return the milliseconds of one kind of step of both engines in turn, and the ratio of these."""
    turns = []
    for _ in range(repeats):
        seconds = dict[str, float]()
        for name, engine in engines.items():
            measured = measure_step(engine, chunk, int(chunk is None), context, 1 if chunk else 3, vocabulary=1024)
            assert measured is not None, "the pool holds every step"
            seconds[name] = min(measured[1])
        turns.append(seconds)
    row = {f"{name}, ms": 1000 * median(turn[name] for turn in turns) for name in engines}
    return row | {"indexed / full": median(turn["indexed"] / turn["full"] for turn in turns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32_768])
    parser.add_argument("--chunks", nargs="+", type=int, default=[512], help="tokens of a chunk")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=5, help="turns of each kind of step")
    parser.add_argument("--family", choices=list(FAMILIES), default="deepseek")
    add_output_options(parser, "indexers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = dict[str, Row]()
    with tempfile.TemporaryDirectory() as name:
        folders = write_models(Path(name), FAMILIES[args.family](args.layers))
        engines = {kind: engine_of(path) for kind, path in folders.items()}
        for context in args.contexts:
            rows[f"decode after {context:,} tokens"] = measure(engines, None, context, args.repeats)
            for tokens in args.chunks:
                chunk = context, tokens
                rows[f"chunk of {tokens} after {context:,}"] = measure(engines, chunk, context, args.repeats)
            print(table(dict(list(rows.items())[-1 - len(args.chunks) :]), "step"), flush=True)
    write(args, table(rows, "step, CPU milliseconds of one thread"), rows)


if __name__ == "__main__":
    main()
