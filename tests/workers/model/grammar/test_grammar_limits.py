"""Grammars that would take the replica down, or make its streams wait: refused in time, and nothing else suffers."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from crossdock.workers.model.grammar.compiler import Compiled, GrammarCache, GrammarCompiler
from crossdock.workers.model.grammar.state import GrammarState, MaskBudget
from crossdock.workers.schedule.request.submission import Grammar, InvalidField, Overloaded

CHAINED_RULES = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(20_000)) + '\nr20000: "b"'
MANY_PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*{number}.*$"} for number in range(300)]}
DEEP_SCHEMA = '{"properties":{"a":' * 500 + "{}" + "}}" * 500

LONG = Grammar("regex", "|".join(f"z{number:06d}" for number in range(30_000)))  # compiles for long

REFUSED = {
    "chained rules": (Grammar("lark", CHAINED_RULES), "chained too deeply"),
    "many patterns": (Grammar("json_schema", json.dumps(MANY_PATTERNS)), "takes too long"),
    "repetition": (Grammar("regex", "a{999999999}"), "dictates a text of more than 8192 bytes"),
    "repetition after a choice": (Grammar("regex", "(x|y)a{100000}"), "dictates a text"),
    "regex of 1 MB": (Grammar("regex", "a" * 1_000_000), "dictates a text|too long"),
    "too many rules at once": (Grammar("lark", "start: " + " | ".join(f'"{n}x"' for n in range(5000))), "max is 2000"),
    "deep schema": (Grammar("json_schema", DEEP_SCHEMA), "recursion limit"),
    "deep choice": (Grammar("choice", "[" * 100_000), "recursion"),
    "recursive regex": (Grammar("regex", "(?R)"), "no text but the empty one"),  # Rust's flag R, without an expression
    "empty rule": (Grammar("lark", "start:"), "no text but the empty one"),
}


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    yield compiler
    compiler.close()


def vetting_processes() -> set[int]:
    """Return the ids of this process's vetting processes, without those that were killed and not waited for."""
    pids = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed, or a zombie
            if any("grammar.vetting" in part for part in child.cmdline()):
                pids.add(child.pid)
    return pids


def compiled(compiler: GrammarCompiler, grammar: Grammar) -> GrammarState:
    """Compile as a client does, which tries again where the machine is too busy for a verdict."""
    while True:
        try:
            return compiler.compile(grammar)
        except Overloaded:
            continue


@pytest.mark.parametrize("name", REFUSED)
def test_grammar_beyond_the_limits_is_refused_and_the_next_compiles(name: str, compiler: GrammarCompiler) -> None:
    grammar, reason = REFUSED[name]
    before = vetting_processes()
    with pytest.raises(InvalidField, match=f"{reason}|takes too long") as refused:  # any may, where a core is slow
        compiled(compiler, grammar)
    assert refused.value.field == "grammar"
    assert len(str(refused.value)) < 400
    assert compiled(compiler, Grammar("regex", "[a-z]{2,5}")).error is None
    assert vetting_processes() >= before, "the vetting process itself survives what it refuses"


def test_choice_of_many_compiles_and_is_followed(compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase) -> None:
    state = compiled(compiler, Grammar("choice", json.dumps([f"k{choice:06d}" for choice in range(20_000)])))
    for token_id in tokenizer.encode("k012345"):
        assert state.mask()[token_id]
        state.accept(token_id)
    assert state.error is None
    assert state.finished


def test_refusal_is_remembered_without_asking_again(compiler: GrammarCompiler) -> None:
    grammar = REFUSED["chained rules"][0]
    with pytest.raises(InvalidField, match="chained") as first:
        compiler.compile(grammar)
    for pid in vetting_processes():
        os.kill(pid, signal.SIGKILL)
    while vetting_processes():
        time.sleep(0.01)
    with pytest.raises(InvalidField) as second:
        compiler.compile(grammar)
    assert str(second.value) == str(first.value)
    assert not vetting_processes(), "no process was started to find out once more"


def test_event_loop_goes_on_while_a_grammar_compiles(compiler: GrammarCompiler) -> None:
    async def main() -> int:
        while True:
            compiling, turns = asyncio.create_task(compiler.compiled(LONG)), 0
            while not compiling.done():
                await asyncio.sleep(0)
                turns += 1
            with contextlib.suppress(Overloaded):  # the machine is too busy for a verdict
                assert (await compiling).error is None
                return turns

    assert asyncio.run(main()) > 100


def test_choices_of_one_request_share_one_compile_and_too_many_grammars_are_overload(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(tokenizer, len(tokenizer))
        await asyncio.to_thread(compiler.warm_up)
        long = asyncio.create_task(compiler.compiled(LONG))
        same = [asyncio.create_task(compiler.compiled(Grammar("regex", "a+"))) for _ in range(100)]
        others = [asyncio.create_task(compiler.compiled(Grammar("regex", f"a{{{n}}}"))) for n in range(1, 15)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="Retry"):
            await compiler.compiled(Grammar("regex", "b+"))
        accepted = asyncio.create_task(compiler.compiled(Grammar("regex", "accepted"), may_refuse=False))
        states = await asyncio.gather(long, *same, *others, accepted)
        assert len({id(state) for state in states}) == 116
        assert compiler.num_cached == 17
        assert (await compiler.compiled(Grammar("regex", "b+"))).error is None
        compiler.close()

    asyncio.run(main())


def test_owner_whose_grammars_fill_its_share_delays_another_owner_by_one(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    async def main() -> None:
        compiler, ended = GrammarCompiler(tokenizer, len(tokenizer)), list[str]()
        await asyncio.to_thread(compiler.warm_up)

        async def compiled(source: str, owner: str) -> None:
            grammar = LONG if source == "long" else Grammar("regex", source)
            await compiler.compiled(grammar, owner=owner)
            ended.append(source)

        sources = ["long", *(f"a{{{number}}}" for number in range(1, 8))]
        of_one = [asyncio.create_task(compiled(source, "one")) for source in sources]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="Retry"):
            await compiled("b+", "one")
        await asyncio.gather(*of_one, compiled("c+", "two"))
        assert ended.index("c+") <= 2, ended
        await compiled("b+", "one")
        compiler.close()

    asyncio.run(main())


def test_masks_beyond_their_budget_end_the_states_of_that_grammar_alone(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    slow, sibling = (compiler.compile(Grammar("regex", "[a-f]+")) for _ in range(2))
    other = compiler.compile(Grammar("regex", "[a-g]+"))
    assert slow.mask().sum() > 1
    slow.budget.spend(1.0)
    for state in (slow, sibling):
        assert state.mask().nonzero().flatten().tolist() == [tokenizer.eos_token_id]
        assert state.error == "the grammar takes too long to follow"
        assert state.finished
    assert other.mask().sum() > 1
    assert other.error is None


async def test_slow_masks_of_a_owner_end_no_state_of_another_with_that_grammar(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "[a-h]+")
    slow, again, other = [await compiler.compiled(grammar, owner=owner) for owner in ("one", "one", "two")]
    slow.budget.spend(1.0)
    masks = [state.mask() for state in (slow, again, other)]
    assert [state.error is None for state in (slow, again, other)] == [False, False, True]
    assert masks[2].sum() > 1


def test_grammar_is_refused_where_the_end_token_is_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """The engine would end the answer at that letter, within the grammar."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id, *tokenizer.encode("a")])
    with pytest.raises(InvalidField, match="structured output needs an end token that is no text, and 'a'"):
        compiler.compile(Grammar("regex", "[a-f]+"))
    compiler.close()


def test_quick_masks_pay_back_a_slow_one() -> None:
    budget = MaskBudget()
    budget.spend(0.4)
    assert not budget.is_spent
    for _ in range(100):
        budget.spend(0.0001)
    assert budget.overdraft == 0
    budget.spend(0.6)
    assert budget.is_spent


def test_state_of_a_request_that_was_placed_again_continues_after_its_tokens(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase
) -> None:
    grammar, tokens = Grammar("regex", "(ab){300}c"), tokenizer.encode("ab") * 300
    state = asyncio.run(compiler.compiled(grammar, tokens))
    assert state.mask().nonzero().flatten().tolist() == tokenizer.encode("c")


def test_cache_is_bounded_by_entries_and_by_bytes() -> None:
    cache = GrammarCache(most=3, most_bytes=100)
    for key in (b"a", b"b", b"c"):
        cache.put(key, Compiled(None, "", 10))
    assert cache.get(b"a") is not None  # now the newest
    cache.put(b"d", Compiled(None, "", 10))
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key) is None] == [b"b"]
    cache.put(b"e", Compiled(None, "", 85))
    assert [key for key in (b"a", b"c", b"d", b"e") if cache.get(key) is not None] == [b"d", b"e"]
    assert cache.num_bytes == 95
    cache.put(b"f", Compiled(None, "", 101))
    assert len(cache) == 0
    assert cache.num_bytes == 0
