"""Engines that verify drafts, random histories for them, and drafters that a test controls."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer
from pydantic import ByteSize
from transformers import PreTrainedModel

from crossdock.workers.draft.drafter import Drafter
from crossdock.workers.model.grammar.matcher import new_matcher
from crossdock.workers.model.grammar.state import GrammarState, MaskBudget
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.drafts.verify import DraftTotals
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams, Submission
from tests.workers.architectures import SERVED, build
from tests.workers.replica.engines import tokens_of

VOCAB_SIZE, MAX_MODEL_LEN = 280, 128
NUM_REQUESTS = 8  # of a history
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
def module(name: str = "llama") -> PreTrainedModel:
    """Return a tiny random fp32 model whose vocabulary has all bytes."""
    return build(name, SERVED.get(name, {}) | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN})


@cache
def recurrent_model(name: str) -> LoadedModel:
    """Return a tiny random model with recurrent layers, which can be wrapped once. It serves one engine at a time."""
    return wrap_module(module(name))


def least_pages(model: str) -> int:
    """Return the pages without which an engine of `model` does not start."""
    return MAX_MODEL_LEN // 16 + (2 * recurrent_model(model).state_pages(16) if model != "llama" else 0)


def engine_of(num_pages: int = 200, model: str = "llama", target: Any = None, **config: Any) -> Engine:
    """Return an engine whose pool has `num_pages` pages of 16 tokens. `target`: a model in the place of the llama."""
    wrapped = wrap_module(target or module()) if model == "llama" else recurrent_model(model)
    memory = ByteSize(num_pages * wrapped.layout(16).page_bytes)
    return new_engine(wrapped, EngineConfig(kv_cache_memory=memory, admission="queue", **config))


def speculating(engine: Engine, drafter: Drafter) -> Engine:
    """Return the engine with another drafter."""
    assert engine.speculation is not None
    engine.speculation.drafter = drafter
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
    vocab_size: int = VOCAB_SIZE
    num_prompt: Mapping[str, int] = field(default_factory=dict)  # by request; missing: all tokens that it comes with
    streams: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)  # tokens; those of the prompt

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.streams[request_id] = token_ids, self.num_prompt.get(request_id, len(token_ids))

    def remove(self, request_id: str) -> None:
        self.streams.pop(request_id, None)

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        return {name: self._guess(name, most) for name, most in wanted.items()}

    def _guess(self, name: str, most: int) -> list[int]:
        tokens, num_prompt = self.streams[name]
        known = list(self.answers[name][len(tokens) - num_prompt :])
        known += [self.generator.randrange(self.vocab_size) for _ in range(most - len(known))]
        draw = self.generator.random
        guess = [token if draw() < self.share_right else self.generator.randrange(self.vocab_size) for token in known]
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
        if name is not None and engine.scheduler.table.get(name) is not None and not engine.is_in_flight(name):
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


@cache
def expected(seed: int, model: str = "llama") -> dict[str, list[TokenDelta]]:
    """Return the deltas of a history's requests from an engine without drafts, with pages for all and no abort."""
    history = History.random(seed, NUM_REQUESTS)
    return serve(engine_of(model=model), History(history.works, history.arrivals, {}))[0]


def check_history(seed: int, model: str = "llama") -> DraftTotals:
    """Serve one random history with and without drafts. Returns what became of the drafts."""
    draw, reference = random.Random(seed), expected(seed, model)
    config: dict[str, Any] = {
        "speculative_config": fixed(draw.choice([1, 2, 4, 9])),
        "max_num_batched_tokens": draw.choice([24, 40, 80]),
        "max_num_seqs": draw.choice([2, 4, 8]),
        "enable_prefix_caching": draw.random() < 0.7,
        "mixed_chunks": draw.random() < 0.8,
        "num_pages": draw.choice([0, 2, 6, 92]) + least_pages(model),
    }
    engine = engine_of(model=model, **config)
    answers = {name: tokens_of(deltas) for name, deltas in reference.items()}
    if draw.random() < 0.8:
        speculating(engine, Oracle(answers, draw.choice([0.0, 0.5, 0.9, 1.0]), draw))
    found, aborted = serve(engine, History.random(seed, NUM_REQUESTS))
    for name, deltas in reference.items():
        check_request(found[name], deltas, name in aborted)
    assert engine.pages.counts().owned == 0
    assert engine.scheduler.verification is not None
    return engine.scheduler.verification.totals


def check_request(
    found: Sequence[TokenDelta], deltas: Sequence[TokenDelta], was_aborted: bool, error: float = 1e-4
) -> None:
    """Compare everything that a client sees of one request, but in how many deltas. `error`: most of a logprob."""
    tokens, logprobs = tokens_of(found), [entry for delta in found for entry in delta.logprobs or ()]
    assert tokens == tokens_of(deltas)[: len(tokens) if was_aborted else None]
    first = 0
    for delta in found:
        assert delta.first == first
        first += len(delta.token_ids)
    theirs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [(each.token_id, each.rank) for each in logprobs] == [
        (each.token_id, each.rank) for each in theirs[: len(logprobs)]
    ]
    assert len(logprobs) == (len(tokens) if theirs else 0)
    assert [each.logprob for each in logprobs] == pytest.approx(
        [each.logprob for each in theirs[: len(logprobs)]], abs=error
    )
    if not was_aborted:
        assert (found[-1].finish_reason, found[-1].stop_token_id) == (
            deltas[-1].finish_reason,
            deltas[-1].stop_token_id,
        )
        assert found[-1].error == deltas[-1].error
    prompt = [entry.token_id if entry else None for delta in found for entry in delta.prompt_logprobs or ()]
    reported = [entry.token_id if entry else None for delta in deltas for entry in delta.prompt_logprobs or ()]
    assert prompt == reported[: len(prompt)]


def forms() -> list[Submission]:
    """Return requests whose grammars dictate much, under several kinds of sampling."""
    names = {"type": "object", "additionalProperties": False, "required": ["first_name", "married"]}
    names["properties"] = {"first_name": {"type": "string", "maxLength": 3}, "married": {"type": "boolean"}}
    grammars = [
        Grammar("json_schema", json.dumps(names)),
        Grammar("choice", '["the first of two long choices", "the first of many", "a third"]'),
        Grammar("regex", "(dictated text [0-9]{1,2}, ){2,3}end"),
    ]
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "logprobs": 1},
        {"repetition_penalty": 1.4, "top_p": 0.8},
        {"temperature": 1.0, "max_tokens": 13},
    ]
    return [
        Submission(
            f"{number}",
            [3 + number] * (5 + 7 * number),
            SamplingParams(**{"max_tokens": 60, "seed": number, "grammar": grammars[number % 3], **sampling}),
        )
        for number, sampling in enumerate(2 * samplings)
    ]
