"""How long do streams wait while prompts with eight pictures arrive? Paced encoding against all pictures at once.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/models/pictures.py --requests 12       # three minutes

Streams of the class standard decode while requests of eight pictures each arrive. The class promises 100 ms a token,
and a stream that is ahead may wait for 125 ms once (`LONGEST_GAP` in workers/schedule/pacing/pace.py). The same model,
engine and requests are measured three ways:

- paced: as Crossdock serves. A picture is encoded in the step of the chunk that reads it, within the streams' slack.
- at once: all pictures of a request are encoded in the step of its first chunk, as other servers do.
- text: prompts of as many tokens, without pictures.

Weights are random: 12 decoder layers of 576 and an encoder of 4 layers of 384 (SmolVLM's shapes, made small), since
seconds depend on shapes alone. Prints the gaps between tokens of the streams while such a request is prefilled, and the
requests' time to first token.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

import numpy as np
import torch
from pydantic import ByteSize
from tables import Row, hardware, medians, table, today, write
from transformers import AutoConfig, AutoModelForImageTextToText

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.pictures.encoding import Encoding, ItemStop
from crossdock.workers.schedule.pictures.items import Item
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import SamplingParams, Submission

PLACEHOLDER = 9
PICTURES = 8


class AtOnce(Encoding):
    """Encodes all pictures of a request in the step of its first chunk, whatever the streams need."""

    def stops(self, request: Request, start: int, page_size: int) -> Iterator[ItemStop]:
        return iter(())

    def take(self, request: Request, start: int, num_tokens: int) -> float:
        super().take(request, 0, request.num_tokens)
        return 0.0


def new_model() -> LoadedModel:
    """Return a random bfloat16 model of SmolVLM's kind with a small decoder and a small encoder."""
    text = {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
    }
    vision = {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "image_size": 336,
        "patch_size": 14,
    }
    config = AutoConfig.for_model(
        "smolvlm", text_config=text, vision_config=vision, scale_factor=2, image_token_id=PLACEHOLDER
    )
    torch.manual_seed(0)
    return wrap_module(AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval())


def prompt_of(example: Item, rng: random.Random, with_pictures: bool) -> tuple[list[int], list[Item]]:
    """Return a prompt of eight new pictures with 20 tokens of text around each, or of as many tokens of text."""
    tokens, items = list[int](), list[Item]()
    for _ in range(PICTURES):
        tokens += [rng.randrange(10, 8000) for _ in range(20)]
        if with_pictures:
            items.append(replace(example, start=len(tokens), content_hash=rng.randbytes(16)))
            tokens += [PLACEHOLDER] * example.num_rows
        else:
            tokens += [rng.randrange(10, 8000) for _ in range(example.num_rows)]
    return tokens + [rng.randrange(10, 8000) for _ in range(20)], items


@dataclass
class Measured:
    """Gaps between the streams' tokens while a request with pictures was prefilled, and the requests' first tokens."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    encodings: list[int] = field(default_factory=list)  # pictures of each step that encoded some

    def row(self) -> Row:
        gaps = np.array(self.gaps) * 1e3
        return {
            "mean gap, ms": float(gaps.mean()),
            "gap p50, ms": float(np.quantile(gaps, 0.5)),
            "gap p99, ms": float(np.quantile(gaps, 0.99)),
            "longest gap, ms": float(gaps.max()),
            "gaps": len(gaps),
            "first token p50, ms": float(np.quantile(self.first_tokens, 0.5)) * 1e3,
            "pictures a step, most": max(self.encodings, default=0),
        }


def measure(engine: Engine, num_streams: int, num_requests: int, with_pictures: bool, seed: int) -> Measured:
    """Serve streams, and one request after the other that is prefilled beside them."""
    rng, found = random.Random(seed), Measured()
    assert engine.model.encoder is not None
    example = engine.model.encoder.example(2)
    for number in range(num_streams):
        sampling = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
        prompt = [rng.randrange(10, 8000) for _ in range(64)]
        engine.add(Submission(f"stream-{number}", prompt, sampling, slo_class="standard"))
    last: dict[str, float] = {}

    def run_until(done: Callable[[], bool]) -> None:
        while not done():
            step = engine.step()
            ended = step.started + step.seconds
            if step.batch.encoder.items:
                found.encodings.append(len(step.batch.encoder.items))
            for delta in step.deltas:
                if delta.request_id in last and prefilling:
                    found.gaps.append(ended - last[delta.request_id])
                last[delta.request_id] = ended

    prefilling: Sequence[str] = ()
    until = engine.clock() + 1.0
    run_until(lambda: engine.clock() > until)
    for number in range(num_requests):
        tokens, items = prompt_of(example, rng, with_pictures)
        name, arrived = f"pictures-{seed}-{number}", engine.clock()
        prefilling = (name,)
        engine.add(Submission(name, tokens, SamplingParams(max_tokens=1), items=items))
        run_until(lambda name=name: engine.scheduler.table.get(name) is None)
        found.first_tokens.append(engine.clock() - arrived)
        prefilling = ()
        until = engine.clock() + 0.5
        run_until(lambda until=until: engine.clock() > until)
    for request in engine.scheduler.table.requests():
        while engine.is_in_flight(request.id):
            engine.finish_step()
        engine.abort(request.id)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12, help="requests of eight pictures in each measurement")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=Path("out/pictures"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, rows = new_model(), dict[str, list[Row]]()
    config = EngineConfig(
        kv_cache_memory=ByteSize(256 << 20),
        enable_prefix_caching=False,
        admission="queue",
        max_num_batched_tokens=1024,
        max_num_seqs=16,
    )
    engine = new_engine(model, config)
    warm_up(engine)
    paced = engine.scheduler.encoding
    assert paced is not None
    assert engine.encoder_fit is not None
    print(f"encoding: {engine.encoder_fit.cost}", flush=True)
    at_once = AtOnce(paced.capacity, paced.cost)
    for repeat in range(args.repeats):
        for setting, encoding in (("paced", paced), ("at once", at_once), ("text", paced)):
            engine.scheduler.encoding = engine.scheduler.forecast.encoding = encoding
            found = measure(engine, args.streams, args.requests, setting != "text", seed=repeat)
            rows.setdefault(setting, []).append(found.row())
            print(setting, rows[setting][-1], flush=True)
    results = {setting: medians(measured) for setting, measured in rows.items()}
    text = f"{hardware()}, {today()}; medians of {args.repeats}\n\n{table(results, 'encoding')}"
    write(args.output, text, rows)


if __name__ == "__main__":
    main()
