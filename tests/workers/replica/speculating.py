"""Engines that verify drafts, random histories for them, and drafters that a test controls."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from llguidance import LLTokenizer
from pydantic import ByteSize
from transformers import PreTrainedModel

from crossdock.workers.draft.drafter import Drafter
from crossdock.workers.model.grammar.matcher import new_matcher
from crossdock.workers.model.grammar.state import GrammarState, MaskBudget
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.speculation import Speculation
from crossdock.workers.schedule.request import Grammar, SamplingParams, Submission, TokenDelta
from crossdock.workers.schedule.speculative_config import SpeculativeConfig
from tests.workers.architectures import build

VOCAB_SIZE, MAX_MODEL_LEN, PAGE_BYTES = 280, 128, 16 * 4 * 2 * 2 * 12 * 4  # 16 tokens, 4 layers, K and V, 2 heads
EOS = 2
_BYTES = LLTokenizer("byte")  # 256 bytes and a few special tokens

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95, "top_k": 60},
    {"min_p": 0.1, "min_tokens": 9},
    {"logit_bias": ((5, 4.0), (9, -3.0)), "allowed_token_ids": tuple(range(2, 60))},
    {"stop_token_ids": tuple(range(20, 60)), "temperature": 1.5, "min_tokens": 4},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.0},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.1, "min_tokens": 12, "top_p": 0.9},
    {"bad_words": ((5, 6), (7, 8, 9), (11,)), "allowed_token_ids": tuple(range(4, 14))},
    {"logprobs": 2, "temperature": 0.0},
    {"logprobs": 1, "logprob_token_ids": (3, 7), "temperature": 1.0},
    {"prompt_logprobs": 1, "temperature": 0.0},
    {"grammar": Grammar("regex", "(abc|abd|b[0-9]{2,9}){3,40}")},
    {"grammar": Grammar("regex", "[a-c]{4,12}"), "temperature": 0.0, "logprobs": 0},
    {"grammar": Grammar("choice", '["aaaaaaaaaaaaaaaabbbb", "aaaaaaaaaaaaaaaacccc"]'), "min_tokens": 3},
]


@cache
def module() -> PreTrainedModel:
    """Return a tiny random fp32 llama whose vocabulary has all bytes."""
    return build("llama", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN})


def engine_of(num_pages: int = 200, **config: Any) -> Engine:
    """Return an engine whose pool has `num_pages` pages of 16 tokens."""
    memory = ByteSize(num_pages * PAGE_BYTES)
    return Engine(wrap_module(module()), EngineConfig(kv_cache_memory=memory, admission="queue", **config))


def speculating(engine: Engine, drafter: Drafter) -> Engine:
    """Return the engine with another drafter."""
    assert engine.speculation is not None
    engine.speculation = Speculation(drafter, engine.scheduler, engine.speculation.sampler)
    return engine


def fixed(num_tokens: int) -> SpeculativeConfig:
    """Return a lookup that always drafts as many tokens."""
    settings = {"method": "ngram", "num_speculative_tokens": num_tokens, "adaptive": False, "prompt_lookup_min": 1}
    return SpeculativeConfig.model_validate(settings)


@dataclass
class Oracle:
    """Drafts the tokens that a request is known to get, some of them changed at random, and at times fewer or none."""

    answers: Mapping[str, Sequence[int]]  # by request
    share_right: float
    generator: random.Random
    streams: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)  # tokens; those of the prompt

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.streams[request_id] = token_ids, len(token_ids)

    def remove(self, request_id: str) -> None:
        self.streams.pop(request_id, None)

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        return {name: self._guess(name, most) for name, most in wanted.items()}

    def _guess(self, name: str, most: int) -> list[int]:
        tokens, num_prompt = self.streams[name]
        known = list(self.answers[name][len(tokens) - num_prompt :])
        known += [self.generator.randrange(VOCAB_SIZE) for _ in range(most - len(known))]
        draw = self.generator.random
        guess = [token if draw() < self.share_right else self.generator.randrange(VOCAB_SIZE) for token in known]
        return guess[: self.generator.randint(0, most)]

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        return 0.0

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        return 5


@dataclass(frozen=True)
class History:
    """Requests, the step before which each arrives, and the step before which some are aborted."""

    works: list[Submission]
    arrivals: list[int]
    aborts: dict[int, str]

    @classmethod
    def random(cls, seed: int, count: int) -> "History":
        """Return a history of `count` requests: prompts that repeat themselves, some with a common beginning."""
        draw = random.Random(seed)
        common = [draw.randrange(3, 250) for _ in range(40)]
        works = []
        for number in range(count):
            phrase = [draw.randrange(3, 250) for _ in range(draw.randint(1, 12))]
            prompt = (common[: draw.choice([0, 16, 40])] + phrase * draw.randint(1, 6))[: draw.randint(1, 90)]
            params = SamplingParams(max_tokens=draw.choice([0, 1, 2, 5, 17, 30, 60]), seed=seed, **draw.choice(KINDS))
            works.append(Submission(f"{number}", prompt, params, slo_class=draw.choice(["standard", "batch"])))
        arrivals = sorted(draw.randint(0, 3 * count) for _ in works)
        aborts = {draw.randint(5, 40): f"{draw.randrange(count)}" for _ in range(draw.randint(0, 2))}
        return cls(works, arrivals, aborts)


def serve(engine: Engine, history: History) -> tuple[dict[str, list[TokenDelta]], set[str]]:
    """Return the deltas of every request, and the names of those that were aborted."""
    deltas: dict[str, list[TokenDelta]] = {work.id: [] for work in history.works}
    waiting, number, aborted = list(zip(history.arrivals, history.works, strict=True)), 0, set()
    while waiting or engine.has_work:
        while waiting and (waiting[0][0] <= number or not engine.has_work):
            work = waiting.pop(0)[1]
            engine.add(work, grammar=grammar_of(work))
        name = history.aborts.get(number)
        if name is not None and engine.scheduler.get(name) is not None and not engine.is_in_flight(name):
            engine.abort(name)
            aborted.add(name)
        for delta in engine.step().deltas if engine.has_work else ():
            deltas[delta.request_id].append(delta)
        number += 1
    return deltas, aborted


def grammar_of(work: Submission) -> GrammarState | None:
    """Return the state of a request's grammar over bytes, after the tokens that the client has."""
    grammar = work.sampling.grammar
    if grammar is None:
        return None
    state = GrammarState(new_matcher(_BYTES, grammar), VOCAB_SIZE, MaskBudget())
    for token_id in work.output_token_ids:
        state.accept(token_id)
    return state
