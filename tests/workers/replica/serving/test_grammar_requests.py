"""Requests with grammars on an engine's thread: compiled before they are queued, while the thread goes on stepping."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ByteSize
from transformers import AutoTokenizer

from crossdock.workers.model.grammar.compiler import GrammarCompiler
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.channel import Channel
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Grammar, InvalidField, SamplingParams, Submission
from tests.workers.architectures import build

CHAINED_RULES = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(20_000)) + '\nr20000: "b"'
LONG, ALSO_LONG = (  # each compiles for half a second
    Grammar("regex", "|".join(f"{letter}{number:06d}" for number in range(40_000))) for letter in "yz"
)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    """An engine around a tiny model with a true tokenizer, and a process that vets grammars."""
    vocab_size = len(AutoTokenizer.from_pretrained(model_dir))
    model = wrap_module(build("llama", {"vocab_size": vocab_size, "max_position_embeddings": 4096}))
    engine = new_engine(model, EngineConfig(kv_cache_memory=ByteSize(64 << 20), admission="queue"), model_dir)
    engine.grammars.close()
    engine.grammars = GrammarCompiler(model_dir, vocab_size)
    engine.grammars.warm_up()
    yield engine
    engine.grammars.close()


def run(engine: Engine, main: Callable[[EngineThread, Channel], Awaitable[None]]) -> None:
    """Run a test on a thread of the engine, with its one reader."""

    async def all_of_it() -> None:
        thread = EngineThread(engine)
        async with asyncio.timeout(240):
            await main(thread, thread.channel("test"))
        await thread.close()
        engine.fail_all("the test has ended")

    asyncio.run(all_of_it())


async def count_tokens(reader: Channel, name: str, tokens: list[int]) -> FinishReason | None:
    async for message in reader.messages():
        for delta in message.deltas:
            if delta.request_id == name:
                tokens += delta.token_ids
                if delta.finish_reason is not None:
                    return delta.finish_reason
    return None


def test_stream_gets_tokens_while_the_grammar_of_another_request_compiles(engine: Engine) -> None:
    async def main(thread: EngineThread, reader: Channel) -> None:
        tokens: list[int] = []
        streaming = asyncio.create_task(count_tokens(reader, "stream", tokens))
        endless = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
        await thread.submit("test", Submission("stream", [5, 6, 7], endless))
        while not tokens:
            await asyncio.sleep(0.001)
        before = len(tokens)
        await thread.submit("test", Submission("long", [5, 6], SamplingParams(grammar=LONG)))
        during = len(tokens) - before
        assert during > 2, "the grammar of another request holds no step"
        thread.channels["test"].close()
        await streaming

    run(engine, main)


def test_poisonous_grammar_is_refused_and_the_stream_beside_it_ends_well(engine: Engine) -> None:
    async def main(thread: EngineThread, reader: Channel) -> None:
        tokens: list[int] = []
        streaming = asyncio.create_task(count_tokens(reader, "stream", tokens))
        endless = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        await thread.submit("test", Submission("stream", [5, 6, 7], endless))
        poison = SamplingParams(grammar=Grammar("lark", CHAINED_RULES))
        with pytest.raises(InvalidField, match="chained too deeply"):
            await thread.submit("test", Submission("poison", [5, 6], poison))
        assert thread.engine.scheduler.table.get("poison") is None
        assert await streaming is FinishReason.LENGTH
        assert len(tokens) == 200

    run(engine, main)


def test_request_whose_client_leaves_while_its_grammar_compiles_never_starts(engine: Engine) -> None:
    async def main(thread: EngineThread, reader: Channel) -> None:
        submitting = asyncio.create_task(
            thread.submit("test", Submission("left", [5, 6], SamplingParams(grammar=ALSO_LONG)))
        )
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        again = await thread.engine.grammars.compiled(ALSO_LONG)  # the same compile goes on for others
        assert again.error is None
        await thread.call(lambda: None)
        assert thread.engine.scheduler.table.get("left") is None

    run(engine, main)


def test_answer_under_a_grammar_goes_on_where_another_replica_ended(engine: Engine, model_dir: Path) -> None:
    """The grammar has the tokens that the client has already: the rest completes their text."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    async def main(thread: EngineThread, reader: Channel) -> None:
        sampling = SamplingParams(max_tokens=50, temperature=1.0, grammar=Grammar("choice", json.dumps(["left right"])))
        told = tokenizer.encode("left ri")
        tokens: list[int] = []
        await thread.submit("test", Submission("a", [5, 6], sampling, output_token_ids=told))
        assert await count_tokens(reader, "a", tokens) is FinishReason.STOP
        assert tokenizer.decode([*told, *tokens], skip_special_tokens=True) == "left right"

    run(engine, main)


def test_grammar_that_explodes_while_it_is_followed_ends_its_own_request_alone(engine: Engine) -> None:
    """It compiles in a millisecond, but after each letter the lexer needs twice as many expressions."""
    exploding = Grammar("regex", "([a-z ])*(e|t|x)([a-z ]){200}[0-9]+")

    async def main(thread: EngineThread, reader: Channel) -> None:
        sampling = SamplingParams(max_tokens=1000, temperature=1.0, grammar=exploding, ignore_eos=True)
        steady = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0.0)
        await thread.submit("test", Submission("exploding", [5, 6], sampling))
        await thread.submit("test", Submission("steady", [5, 6, 7], steady))
        ends: dict[str, TokenDelta] = {}
        async for message in reader.messages():
            ends |= {delta.request_id: delta for delta in message.deltas if delta.finish_reason is not None}
            if len(ends) == 2:
                break
        assert ends["exploding"].finish_reason is FinishReason.ERROR
        assert ends["exploding"].error is not None
        assert "too many" in ends["exploding"].error
        assert ends["steady"].finish_reason is FinishReason.LENGTH

    run(engine, main)
