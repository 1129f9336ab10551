"""How far are the predicted seconds of drafting and of verification from those that they take?

    nice python benchmarks/models/drafting_seconds.py --record speculation        # two minutes of one core
    nice python benchmarks/models/drafting_seconds.py --head HEAD                 # … and a head of EAGLE-3

Models with random weights and a random MTP head answer prompts of 64 to 4,000 tokens greedily: with full attention, and
with indexers that choose 512 tokens, where further drafts choose for themselves (DeepSeek-V3.2) or read what the first
draft chose (GLM-5.2). HEAD is of the embedded model (eagle_head.py). A random head's drafts would all be rejected. So
each engine answers once without drafts, and then three in four drafts are replaced by the token that comes next.

The seconds are CPU seconds of one thread, of the engine and of the drafter alike: other processes change them less.
Prints p50 and p90 of |predicted - actual| / actual, and the median of (predicted - actual) / actual: of calls of the
drafter, and of steps that verify drafts alone, beside a chunk, and of steps without drafts.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from crossdock.workers.draft.head_drafter import HeadDrafter
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import Row, add_output_options, table, write

LAYERS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "max_position_embeddings": 8192,
}
INDEX: dict[str, Any] = {"index_n_heads": 8, "index_head_dim": 64, "index_topk": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # model type, and what published files say beside sizes
    "MTP that shares its choice": ("glm_moe_dsa", INDEX | {"index_share_for_mtp_iteration": True}),
    "MTP, full attention": ("deepseek_v3", {}),
    "MTP with an indexer": ("deepseek_v32", INDEX),
}
PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
NUM_DRAFTS = 3
RIGHT = 0.75  # of drafts
TOKENS = 48  # of an answer


def write_model(folder: Path, model_type: str, fields: Mapping[str, Any]) -> None:
    """Write a random model whose last layer is its MTP head."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": LAYERS + 1, "first_k_dense_replace": LAYERS}
    config = AutoConfig.for_model(model_type, **SHAPE, **fields, **layers)
    if model_type != "deepseek_v3":
        config.mlp_layer_types = ["dense"] * LAYERS + ["sparse"]
        config.layer_types = ["indexed_attention"] * (LAYERS + 1)
    if hasattr(config, "indexer_types"):
        config.indexer_types = ["full"] * (LAYERS + 1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    width = config.hidden_size
    further = {name: torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    further["eh_proj"] = torch.randn(width, 2 * width) * width**-0.5
    file = folder / "model.safetensors"
    named = {f"model.layers.{LAYERS}.{name}.weight": tensor for name, tensor in further.items()}
    save_file(load_file(file) | named, file, metadata={"format": "pt"})
    published = json.loads((folder / "config.json").read_text()) | fields
    published |= {name: published[name][:LAYERS] for name in PER_LAYER if published.get(name)}
    published |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(published))


class Guided:
    """Drafts what a first round answered, but for some tokens, in the seconds of a drafter, which are noted.

    Until the answers are known nothing is drafted.
    """

    def __init__(self, drafter: HeadDrafter) -> None:
        self._drafter = drafter
        self._rng = random.Random(0)
        self._texts: dict[str, tuple[Sequence[int], int]] = {}  # by request: its tokens, and how many are the prompt's
        self.answers: dict[str, list[int]] = {}  # by request
        self.residuals = list[float]()  # (predicted - actual) / actual, of calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request."""
        self._texts[request_id] = token_ids, len(token_ids)
        self._drafter.add(request_id, token_ids)

    def propose(self, wanted: Mapping[str, int], *forced: Any) -> dict[str, list[int]]:
        """Draft as the drafter does, and exchange what it drafts."""
        if not self.answers:
            return {}
        predicted = self._drafter.seconds(len(wanted), max(wanted.values(), default=0))
        began = time.process_time()
        drafts = self._drafter.propose(wanted, *forced)
        if len(drafts) == len(wanted) > 0:
            actual = time.process_time() - began
            self.residuals.append((predicted - actual) / actual)
        return {request_id: self._exchanged(request_id, len(tokens)) for request_id, tokens in drafts.items()}

    def _exchanged(self, request_id: str, count: int) -> list[int]:
        tokens, num_prompt = self._texts[request_id]
        begun = len(tokens) - num_prompt
        nexts = self.answers[request_id][begun : begun + count]
        return [token if self._rng.random() < RIGHT else token ^ 1 for token in nexts]


def engine_of(folder: Path, speculative_config: dict[str, Any]) -> tuple[Engine, Guided]:
    """Return a measured engine, whose clock and whose drafter's clock count CPU seconds; and that drafter."""
    model = load_model(ModelSpec(str(folder), dtype="float32"), "cpu")
    config = EngineConfig(
        kv_cache_memory=ByteSize(512 << 20),
        max_num_seqs=16,
        admission="queue",
        enable_prefix_caching=False,
        speculative_config=speculative_config | {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False},
    )
    engine = new_engine(model, config, clock=time.process_time)
    speculation: Any = engine.speculation
    by_clock = speculation.drafter
    drafter = HeadDrafter(by_clock.head, by_clock.target, by_clock.pages, time.process_time)
    engine.head = engine.pipeline.head = drafter
    speculation.drafter = guided = Guided(drafter)
    warm_up(engine)
    return engine, guided


def prompts_of(count: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts of unlike lengths."""
    rng = random.Random(1)
    lengths = [int(64 * (4000 / 64) ** rng.random()) for _ in range(count)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def serve(engine: Engine, prompts: Sequence[Sequence[int]], streams: int) -> tuple[list[Step], dict[str, list[int]]]:
    """Answer prompts greedily, so many at a time. Returns the steps and the answers."""
    steps = list[Step]()
    answers: dict[str, list[int]] = {}
    left = list(enumerate(prompts))
    num_open = 0
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    while left or engine.has_work:
        while left and num_open < streams:
            number, prompt = left.pop(0)
            answers[f"{number}"] = []
            engine.add(Submission(f"{number}", list(prompt), sampling))
            num_open += 1
        steps.append(engine.step())
        for delta in steps[-1].deltas:
            answers[delta.request_id] += delta.token_ids
            num_open -= delta.finish_reason is not None
    return [step for step in steps if step.batch], answers


def kind_of(step: Step) -> str:
    """Return the kind of a step, as a column of the table."""
    work = step.batch.work
    if work.drafts:
        return "drafts beside a chunk" if work.prefill_tokens else "drafts alone"
    return "chunks without drafts" if work.prefill_tokens else "decodes alone"


def errors_of(residuals: Sequence[float]) -> Row:
    """Return quantiles of the errors and their median with its sign, in per cent, and their number."""
    p50, p90 = 100 * np.quantile(np.abs(residuals), [0.5, 0.9])
    return {"p50 %": p50, "p90 %": p90, "median with sign %": 100 * np.median(residuals), "number": len(residuals)}


def measured(engine: Engine, guided: Guided, streams: int, count: int) -> dict[str, Row]:
    """Return the errors of one kind of load: of calls of the drafter, and of steps by kind."""
    prompts = prompts_of(count, engine.executor.vocab_size)
    guided.answers = {}
    steps, guided.answers = serve(engine, prompts, streams)
    steps += serve(engine, prompts, streams)[0]
    residuals = defaultdict[str, list[float]](list, {"calls of the drafter": guided.residuals})
    for step in steps:
        residuals[kind_of(step)].append((step.predicted - step.seconds) / step.seconds)
    rows = {kind: errors_of(found) for kind, found in residuals.items()}
    guided.residuals.clear()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, help="directory of a head of EAGLE-3 of the embedded model")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", type=int, default=6, help="of one stream; twice as many of more (%(default)s)")
    add_output_options(parser, "drafting_seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = dict[str, Row]()
    with tempfile.TemporaryDirectory() as name:
        models: dict[str, tuple[Path, dict[str, Any]]] = {}
        if args.head:
            models["EAGLE-3"] = default_model_dir(), {"method": "eagle3", "model": str(args.head)}
        for model, (model_type, fields) in MODELS.items():
            write_model(Path(name, model_type), model_type, fields)
            models[model] = Path(name, model_type), {"method": "mtp"}
        for model, (folder, config) in models.items():
            engine, guided = engine_of(folder, config)
            for streams in args.streams:
                found = measured(engine, guided, streams, args.prompts * (1 + (streams > 1)))
                of_load = f"{model}, {streams} stream{'s' * (streams > 1)}"
                rows |= {f"{of_load}: {kind}": row for kind, row in found.items()}
                print(f"load {os.getloadavg()[0]:.1f}", table(rows, "seconds"), sep="\n", flush=True)
    write(args, table(rows, "CPU seconds of"), rows)


if __name__ == "__main__":
    main()
