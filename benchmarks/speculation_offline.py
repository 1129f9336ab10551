"""Which drafts does lookup find in greedy answers, and are longer matches better? For `speculation.py --offline`."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pydantic import ByteSize
from speculation_inputs import CHATS
from tables import cell, markdown
from transformers import AutoTokenizer

from crossdock.workers.draft.prompt_lookup import PromptLookup
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.drafts.acceptance import PRIORS, Acceptance
from crossdock.workers.schedule.drafts.drafting import DraftPolicy, FreeDrafts, Stream
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request import SamplingParams, Submission

MOST = 8  # drafts in a step
MATCHES = ((1, 8), (2, 8), (3, 8), (5, 5))  # shortest and longest match, in tokens

Answer: TypeAlias = tuple[list[int], list[int]]  # tokens of the prompt, of the greedy answer
Find: TypeAlias = Callable[[Sequence[int]], tuple[int, list[int]]]  # text to the length of a match, and its drafts


def greedy_answers(model: Path, num_tokens: int, workloads: Mapping[str, Sequence[str]]) -> dict[str, list[Answer]]:
    """Return the model's answers to all prompts, by workload."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = Engine(load_model(ModelSpec(str(model))), EngineConfig(kv_cache_memory=ByteSize(1 << 30)))
    answers: dict[str, list[Answer]] = {}
    outputs: dict[str, list[int]] = {}
    for workload, prompts in workloads.items():
        answers[workload] = []
        for number, prompt in enumerate(prompts):
            if workload in CHATS:
                messages = [{"role": "user", "content": prompt}]
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            else:
                ids = tokenizer(prompt)["input_ids"]
            output = outputs[f"{workload} {number}"] = []
            answers[workload].append((ids, output))
            engine.add(Submission(f"{workload} {number}", ids, SamplingParams(max_tokens=num_tokens, temperature=0.0)))
    while engine.has_work:
        for delta in engine.step().deltas:
            outputs[delta.request_id] += delta.token_ids
    return answers


def lookup(shortest: int, longest: int) -> Callable[[list[int]], Find]:
    """Return, for a text that grows, our lookup in it."""

    def begin(text: list[int]) -> Find:
        config = SpeculativeConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest)
        drafting = PromptLookup(config)
        drafting.add("", text)
        return lambda _: (drafting.match_length(""), drafting.propose({"": MOST}).get("", []))

    return begin


def earliest(shortest: int, longest: int) -> Callable[[list[int]], Find]:
    """Return the same with the earliest of the longest matches, which is what vLLM 0.32 takes."""

    def find(text: Sequence[int]) -> tuple[int, list[int]]:
        for length in range(longest, shortest - 1, -1):
            for end in range(length, len(text)):
                if text[end - length : end] == text[-length:]:
                    return length, list(text[end : end + MOST])
        return 0, []

    return lambda _: find


def replayed(answers: Sequence[Answer], begin: Callable[[list[int]], Find]) -> list[tuple[int, int, int]]:
    """Return (match length, drafts, accepted drafts) of every step in which the answers would be made."""
    steps = []
    for prompt, answer in answers:
        text, made = [*prompt, *answer[:1]], 1
        find = begin(text)
        while made < len(answer):
            length, drafts = find(text)
            drafts = drafts[: len(answer) - made]
            pairs = zip(drafts, answer[made:], strict=False)
            accepted = next((n for n, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
            steps.append((length, len(drafts), accepted))
            text += answer[made : made + accepted + 1]
            made += accepted + 1
    return steps


def lookup_table(answers: Mapping[str, Sequence[Answer]]) -> str:
    """Return tokens per step, and the accepted share of drafts, by workload and by which match is taken."""
    lines = [["match, tokens", *(f"{name}: tokens/step, accepted %" for name in answers)]]
    kinds = [(f"{low} to {high}, the latest", lookup(low, high)) for low, high in MATCHES]
    kinds += [(f"{low} to {high}, the earliest", earliest(low, high)) for low, high in MATCHES[1::2]]
    for name, begin in kinds:
        cells = [name]
        for found in answers.values():
            steps = replayed(found, begin)
            drafted, accepted = sum(step[1] for step in steps), sum(step[2] for step in steps)
            cells.append(f"{cell(1 + accepted / len(steps))}, {cell(100 * accepted / max(drafted, 1))}")
        lines.append(cells)
    return markdown(lines)


def accepted_by_length(answers: Mapping[str, Sequence[Answer]]) -> str:
    """Return how many drafts are accepted by the length of the match, drafts before it included."""
    reached, accepted = defaultdict[int, int](int), defaultdict[int, int](int)
    for found in answers.values():
        for length, num_drafts, num_accepted in replayed(found, lookup(1, 16)):
            for position in range(min(num_accepted + 1, num_drafts)):
                reached[min(length + position, 16)] += 1
                accepted[min(length + position, 16)] += position < num_accepted
    lines = [["match, tokens", *(str(length) for length in sorted(reached))]]
    lines.append(["accepted %", *(cell(100 * accepted[length] / reached[length]) for length in sorted(reached))])
    return markdown([*lines, ["drafts", *(cell(reached[length]) for length in sorted(reached))]])


# -- do the policy's first guesses matter? ---------------------------------------------------------------------------

COST = StepCost(base=0.008, per_prefill_token=0.001, per_decode=0.00027, bend_rows=8, per_early_row=0.00062)
"""Steps of the default model with 1, 8 and 16 rows after 100 tokens take 8.9, 15.1 and 17.3 ms at least, drafts and
decodes alike (two cores of Zen 5, 2026-11-23)."""

_GUESSES = {
    "as shipped": PRIORS,
    "all one half": (0.0, 0.5),
    "all 0.9: too bold": (0.0, 0.9),
    "all 0.1: too timid": (0.0, 0.1),
}


class _Drafts(FreeDrafts):
    """Lookup as a source for a policy."""

    def __init__(self) -> None:
        self.lookup = PromptLookup(SpeculativeConfig(method="ngram", num_speculative_tokens=MOST))

    def match_length(self, request_id: str) -> int:
        return self.lookup.match_length(request_id)


def predicted_rate(answers: Sequence[Answer], guess: Sequence[float], num_streams: int) -> float:
    """Return the tokens per predicted second of a replica that makes all answers, so many streams at a time.

    Its policy begins with these guesses and learns.
    """
    drafts = _Drafts()
    config = drafts.lookup.config
    policy = DraftPolicy(config, drafts, _acceptance=Acceptance(guess))
    waiting = list(enumerate(answers))
    streams: dict[str, tuple[list[int], list[int]]] = {}  # text so far; tokens to come
    seconds, tokens = 0.0, 0
    while waiting or streams:
        while waiting and len(streams) < num_streams:
            number, (prompt, answer) = waiting.pop(0)
            streams[str(number)] = [*prompt, *answer[:1]], list(answer[1:])
            drafts.lookup.add(str(number), streams[str(number)][0])
        seen = [Stream(name, len(text), min(len(rest) - 1, MOST)) for name, (text, rest) in streams.items() if rest]
        work = StepWork.of([], [stream.context for stream in seen])
        found = drafts.lookup.propose(policy.lengths(seen, work, COST))
        for stream in seen:
            text, rest = streams[stream.id]
            draft = found.get(stream.id, [])
            accepted = next((n for n, token in enumerate(draft) if token != rest[n]), len(draft))
            if draft:
                work = work.plus_drafts(stream.context, len(draft))
                policy.observe(stream.id, len(draft), accepted)
            text += rest[: accepted + 1]
            del rest[: accepted + 1]
            tokens += accepted + 1
        seconds += COST.seconds(work)
        for name in [name for name, (_, rest) in streams.items() if not rest]:
            del streams[name]
            policy.forget(name)
    return tokens / seconds


def priors_table(answers: Mapping[str, Sequence[Answer]]) -> str:
    """Return the predicted tokens per second by what the policy assumes before it has seen drafts."""
    loads = [(name, count) for name in answers for count in (1, 8)]
    lines = [["first guesses", *(f"{name}, {count} stream{'s' * (count > 1)}" for name, count in loads)]]
    for title, guess in _GUESSES.items():
        rates = [predicted_rate(answers[name], guess, count) for name, count in loads]
        lines.append([title, *map(cell, rates)])
    return markdown(lines)
