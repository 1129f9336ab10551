"""Parsers of model output: CPU time grows no faster than the text, in one piece and token by token."""

import re
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, islice, permutations

import pytest

from crossdock.cluster.api.body.tool_calls import ForcedCall
from crossdock.cluster.api.text.families import FAMILIES
from crossdock.cluster.api.text.forced_call import ForcedCallText, plain_openings
from crossdock.cluster.api.text.harmony import HarmonyText
from crossdock.cluster.api.text.marked_text import MarkedText
from crossdock.cluster.api.text.message_parser import MessageParser, ReasonedText
from crossdock.cluster.api.text.strict_calls import forced_calls
from tests.cluster.api.linear_time import CHARACTERS, LONG, assert_linear
from tests.cluster.api.text.test_message_parsers import CALLS, SCHEMAS

FORCED = ForcedCall({"move": {}, "wait": {}}, is_named=False)
SPACES = (100, 800, LONG)  # a header of gpt-oss has 1,024 characters at most
PAIRS = 8000
BACKTRACKED = [  # one for each expression that took quadratic time or worse; the last number: characters of the run
    ("gpt_oss", "", " ", "to=!", 150),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]", " ", "!", LONG),
    ("glm", "<tool_call>f<arg_key>", "</arg_key><arg_value>", "</tool_call>", PAIRS),
    ("gemma4", "<|tool_call>call:f{a", " ", "}<tool_call|>", LONG),
]
_TOKEN = re.compile(r"\[[A-Z_/]+\]|<[^<>\s]*>?|\w+|\s+|.", re.DOTALL)


def native(family: str) -> Callable[[], MessageParser]:
    found = forced_calls(family, FORCED, {"[ARGS]": 1}, is_single=False)
    assert found is not None
    return lambda: ForcedCallText(found[1])


PARSERS: dict[str, Callable[[], MessageParser]] = {
    **{family: lambda family=family: MarkedText(FAMILIES[family], SCHEMAS, is_thinking=False) for family in FAMILIES},  # type: ignore[misc]
    "gpt_oss": lambda: HarmonyText(SCHEMAS),
    "forced": lambda: ReasonedText(
        MarkedText(FAMILIES["hermes"], None, is_thinking=False), ForcedCallText(plain_openings(FORCED))
    ),
    "forced kimi_k2": native("kimi_k2"),
}
SAMPLES = {
    **CALLS,
    "think": "<think>\nWhy\n</think>\n\nSure.",
    "forced": '<think>Why</think>{"name": "move", "arguments": {"to": "a"}}',
    "forced kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.move:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|>",
}


def contexts(name: str) -> tuple[list[str], list[str]]:
    """Return the beginnings of a family's text, one up to each kind of token, and the tokens that are no words."""
    tokens = _TOKEN.findall(SAMPLES[name])
    kinds = [
        (before, "word") if token.isalnum() else token for before, token in zip(["", *tokens], tokens, strict=False)
    ]
    ends = dict(zip(kinds, accumulate(map(len, tokens)), strict=True))
    others = [mark for mark in FAMILIES[name].markers() if mark not in SAMPLES[name]] if name in FAMILIES else []
    beginnings = ["", *others, *(SAMPLES[name][:end] for end in ends.values())]
    return beginnings, [*others, *(kind for kind in ends if isinstance(kind, str))]


def texts(name: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield texts: what comes before a run, the text that the run repeats, what comes after it, and its characters."""
    beginnings, tokens = contexts(name)
    marks = [token for token in tokens if len(token) > 2]
    for before in beginnings:
        for unit in dict.fromkeys([*CHARACTERS, *marks]):
            yield from ((before, unit, after, LONG) for after in ("!", SAMPLES[name].removeprefix(before)))
        if not before or before.endswith(tuple(marks)):
            yield from ((before, "".join(pair), "!", PAIRS) for pair in permutations(marks, 2))
        ends = [f"{token}{end}" for token in (*marks, "to=", "}") for end in ("!", marks[-1] if marks else "")]
        yield from ((before, " ", end, length) for end in ends for length in SPACES)


def run(unit: str, length: int) -> str:
    return unit * (length // len(unit) + 1)


EACH = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])  # all texts in the soak


@EACH
@pytest.mark.parametrize("name", PARSERS)
def test_text_in_one_piece_takes_time_in_proportion_to_its_length(name: str, every: int) -> None:
    for before, unit, after, most in islice(texts(name), 0, None, every):
        assert_read_in_linear_time(name, before, unit, after, most)


@pytest.mark.parametrize(
    ("name", "before", "unit", "after", "most"), BACKTRACKED, ids=[each[0] for each in BACKTRACKED]
)
def test_text_at_which_an_expression_once_went_back_takes_time_in_proportion_to_its_length(
    name: str, before: str, unit: str, after: str, most: int
) -> None:
    assert_read_in_linear_time(name, before, unit, after, most)


def assert_read_in_linear_time(name: str, before: str, unit: str, after: str, most: int) -> None:
    def read(length: int) -> None:
        parser = PARSERS[name]()
        parser.add(f"{before}{run(unit, length)}{after}")
        parser.finish(is_cut=False)

    assert_linear(read, f"{name}: {before!r}, then {unit!r}, then {after!r}", most)


@EACH
@pytest.mark.parametrize("name", PARSERS)
def test_token_takes_the_same_time_after_a_short_text_and_after_a_long_one(name: str, every: int) -> None:
    """A parser that looked at the whole text again would take far longer after the long one."""
    for before in contexts(name)[0][:: min(every, 3)]:
        for unit in (" ", "a", "0", '"'):
            short = long = 1.0
            for _ in range(3):
                short = min(short, seconds_of_tokens(PARSERS[name](), before, unit, 1000))
                long = min(long, seconds_of_tokens(PARSERS[name](), before, unit, 60_000))
                if long <= 3 * short + 2e-4:
                    break
            assert long <= 3 * short + 2e-4, f"{name}: {before!r}, then {unit!r}: {long:.5f} s, {short:.5f} s"


def seconds_of_tokens(parser: MessageParser, before: str, unit: str, length: int) -> float:
    """Return the CPU seconds of twenty tokens more after a run of so many characters."""
    parser.add(before + run(unit, length))
    started = time.thread_time()
    for _ in range(20):
        parser.add(unit)
    return time.thread_time() - started


def test_every_family_has_a_sample() -> None:
    assert SAMPLES.keys() == PARSERS.keys()
