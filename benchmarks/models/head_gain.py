"""Measure what drafts of a head of EAGLE-3 gain beside those of a lookup, in CPU seconds of one thread.

    nice python benchmarks/models/head_gain.py HEAD --record speculation        # four minutes of one core

Answers the chats of speculation_inputs.py greedily, by engines in this process, with one stream and with eight: without
drafts, with lookup and with the head, each with fixed numbers of drafts. The settings take turns, one round of prompts
each. CPU seconds leave out the time that other processes have the core, so figures of a busy machine can be compared;
speculation.py measures servers, whose drafts are chosen by predicted seconds, on an idle one.

Prints tokens for each CPU second, tokens for each step of a stream, the accepted share of drafts and that of the first
drafts, and the share of answers that equal those without drafts. Of heads also by how much the predicted seconds of
drafting, by which `adaptive` decides, differ from those that it took by the clock: measure these on an idle machine.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ByteSize
from transformers import AutoTokenizer

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from speculation_inputs import WORKLOADS
from tables import Row, add_output_options, cell, markdown, write


class Watched:
    """A drafter that notes by how much the predicted seconds to draft differ from those that it takes."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.errors = list[float]()  # (predicted - actual) / actual

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, wanted: Mapping[str, int], *forced: Any) -> dict[str, list[int]]:
        """Draft as the drafter does."""
        predicted = self._drafter.seconds(len(wanted), max(wanted.values(), default=0))
        began = time.perf_counter()
        drafts: dict[str, list[int]] = self._drafter.propose(wanted, *forced)
        if any(drafts.values()):
            actual = time.perf_counter() - began
            self.errors.append((predicted - actual) / actual)
        return drafts

    def row(self) -> Row:
        """Return the quantiles of the errors, without their signs, and forget these."""
        p50, p90 = np.quantile(np.abs(self.errors), [0.5, 0.9])
        self.errors.clear()
        return {"off by p50 %": 100 * p50, "p90 %": 100 * p90}


class Counts(NamedTuple):
    """Counts of an engine's work."""

    seconds: float = 0.0  # of CPU time
    tokens: int = 0
    parts: int = 0  # of streams in steps, each of which gave at least a token
    drafted: int = 0
    firsts: int = 0  # drafts that were the first of their step
    accepted: int = 0
    firsts_accepted: int = 0
    answers: int = 0
    same: int = 0  # answers that equal those of the first setting

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums."""
        return Counts(*(one + another for one, another in zip(self, other, strict=True)))  # type: ignore[arg-type]

    @property
    def row(self) -> Row:
        """Return the figures of a table's row."""
        row: Row = {"tok/s": self.tokens / self.seconds, "a step": self.tokens / self.parts}
        row["same %"] = 100 * self.same / self.answers
        if self.drafted:
            row |= {"accepted %": 100 * self.accepted / self.drafted}
            row |= {"first %": 100 * self.firsts_accepted / self.firsts}
        return row


def settings_of(head: Path) -> dict[str, dict[str, Any] | None]:
    """Return speculative configurations by the name of the setting."""
    always: dict[str, Any] = {"adaptive": False}
    lookup, drafting = always | {"method": "ngram"}, always | {"method": "eagle3", "model": str(head)}
    return {
        "none": None,
        **{f"lookup, {number}": lookup | {"num_speculative_tokens": number} for number in (1, 2)},
        **{f"head, {number}": drafting | {"num_speculative_tokens": number} for number in (1, 2)},
    }


def engine_of(folder: Path, speculative_config: dict[str, Any] | None) -> Engine:
    """Return an engine whose prefixes are not cached: rounds repeat prompts."""
    model = load_model(ModelSpec(str(folder), dtype="float32"), "cpu")
    settings: dict[str, Any] = {"max_num_seqs": 16, "admission": "queue", "enable_prefix_caching": False}
    memory = ByteSize(512 << 20)
    return new_engine(model, EngineConfig(kv_cache_memory=memory, speculative_config=speculative_config, **settings))


def serve(engine: Engine, prompts: list[list[int]], streams: int, num_tokens: int) -> tuple[Counts, list[list[int]]]:
    """Answer prompts, so many at a time. Returns what that took, and the answers."""
    answers: dict[str, list[int]] = {}
    left = list(enumerate(prompts))
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    before, parts, num_open = drafts_of(engine), 0, 0
    started = time.process_time()
    while left or engine.has_work:
        while left and num_open < streams:
            number, prompt = left.pop(0)
            answers[f"{number}"] = []
            engine.add(Submission(f"{number}", prompt, sampling))
            num_open += 1
        for delta in engine.step().deltas:
            answers[delta.request_id] += delta.token_ids
            parts += bool(delta.token_ids)
            num_open -= delta.finish_reason is not None
    seconds = time.process_time() - started
    found = list(answers.values())
    drafted = [after - at_first for after, at_first in zip(drafts_of(engine), before, strict=True)]
    return Counts(seconds, sum(map(len, found)), parts, *drafted), found


def drafts_of(engine: Engine) -> tuple[int, int, int, int]:
    """Return drafted tokens, drafts of streams, accepted tokens, and accepted first ones, since the start."""
    verification = engine.scheduler.verification
    if verification is None:
        return 0, 0, 0, 0
    totals = verification.totals
    return totals.num_tokens, totals.num_drafts, sum(totals.num_accepted_at), sum(totals.num_accepted_at[:1])


def table(rows: dict[str, Row]) -> str:
    """Return a row for each setting. `gain`: tokens per CPU second beside those without drafts."""
    heads = (
        "tokens per CPU second",
        "gain",
        "tokens a step",
        "accepted %",
        "first drafts accepted %",
        "same answers %",
        "seconds to draft off by p50 %",
        "p90 %",
    )
    optional = ("accepted %", "first %", "same %", "off by p50 %", "p90 %")
    lines = [["setting", *heads]]
    for name, row in rows.items():
        figures = (row["tok/s"], row["tok/s"] / rows["none"]["tok/s"], row["a step"])
        lines.append([name, *map(cell, figures), *(cell(row.get(key)) for key in optional)])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="directory of the head")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the embedded model)")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="times that every setting takes its turn")
    add_output_options(parser, "head_gain")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.model or default_model_dir()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": prompt}] for prompt in WORKLOADS["chat"]]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    engines = {name: engine_of(folder, config) for name, config in settings_of(args.head).items()}
    watched = dict[str, Watched]()
    for name, engine in engines.items():
        serve(engine, prompts[:1], 1, 8)  # first calls
        if name.startswith("head"):
            speculation: Any = engine.speculation
            speculation.drafter = watched[name] = Watched(speculation.drafter)
    text, data = "", dict[str, dict[str, Row]]()
    for streams in args.streams:
        asked = list(islice(cycle(prompts), max(len(prompts), 2 * streams)))
        counts = dict.fromkeys(engines, Counts())
        for _ in range(args.rounds):
            wanted = list[list[int]]()
            for name, engine in engines.items():
                found, answers = serve(engine, asked, streams, args.tokens)
                wanted = wanted or answers
                same = sum(one == another for one, another in zip(answers, wanted, strict=True))
                counts[name] = counts[name].plus(found._replace(answers=len(answers), same=same))
                print(f"{streams} streams, {name}: {counts[name].row}", flush=True)
        part = f"{streams} stream{'s' * (streams > 1)}"
        data[part] = {name: count.row for name, count in counts.items()}
        for name, drafter in watched.items():
            data[part][name] |= drafter.row()
        text += f"**{part}**, {len(asked)} answers of at most {args.tokens} tokens\n\n{table(data[part])}\n"
    write(args, text, data)


if __name__ == "__main__":
    main()
