"""The vetting process: compiles each grammar in a child of its own, within limits of time, memory and stack.

Run as `python -m` by `new_vetter`. It reads messages from stdin, first the tokenizer, then grammars, and writes one
answer for each to stdout. It ends when stdin does.

A grammar of a few kilobytes can make llguidance overflow the stack, or take minutes and gigabytes.
"""

import random
import resource
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer

from crossdock.workers.model.grammar.matcher import check, new_matcher, text_tokens
from crossdock.workers.sandbox.limited_child import ChildFailed, Limits, answer_all, sandbox_main
from crossdock.workers.sandbox.messages import read_message, write_message
from crossdock.workers.schedule.request.submission import Grammar, InvalidField

_STEPS = 8  # of a random text: some grammars fail after their first token


def serve(requests: BinaryIO, verdicts: BinaryIO) -> None:
    """Vet one grammar after the other until `requests` ends."""
    start = read_message(requests)
    if start is None:
        return
    limits = Limits(**start["limits"])
    tokenizer = LLTokenizer(start["tokenizer"], eos_token=start["eos_token_ids"])
    write_message(verdicts, {"is_ready": True})
    answer_all(partial(_vet, tokenizer), lambda failed: {"reason": _reason(failed, limits)}, requests, verdicts, limits)


def _reason(failed: ChildFailed, limits: Limits) -> str:
    if failed.is_too_slow:
        return "it takes too long to compile"
    if failed.is_too_deep:
        return "its rules are nested or chained too deeply"
    if failed.is_too_large:
        return f"it needs more than {limits.memory_bytes >> 20} MiB to compile"
    return "it cannot be compiled within this server's limits"


def _vet(tokenizer: LLTokenizer, asked: Mapping[str, str]) -> dict[str, Any]:
    """Compile a grammar. Returns the `bytes` that this took, or `error`."""
    grammar = Grammar(asked["kind"], asked["source"])
    before = _memory_bytes()
    try:
        matcher = new_matcher(tokenizer, grammar)
        follow(matcher, tokenizer, grammar)
    except InvalidField as error:
        return {"error": str(error)}
    return {"bytes": _memory_bytes() - before}


def _memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def follow(matcher: LLMatcher, tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Let a short random text follow the grammar. InvalidField where the matcher fails on the way."""
    draw = random.Random(0)
    for _ in range(_STEPS):
        allowed = text_tokens(matcher.compute_bitmask(), tokenizer)
        check(matcher, grammar)
        if not allowed or matcher.is_stopped():
            return
        start = draw.randrange(allowed.bit_length())
        rest = allowed >> start
        matcher.consume_token(start + (rest & -rest).bit_length() - 1)  # the first allowed token from there on
        check(matcher, grammar)


if __name__ == "__main__":
    sandbox_main(serve)
