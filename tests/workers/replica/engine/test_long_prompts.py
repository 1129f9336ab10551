"""A prompt of thousands of tokens in chunks of many lengths: its tokens are those of transformers."""

import asyncio
from typing import Any

import pytest

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.submission import Submission
from tests.workers.architectures import build
from tests.workers.replica.engines import before_each_step, engine_on, generated, greedy, run, tokens_of
from tests.workers.replica.sides import Side, closing, ship, submission

NUM_TOKENS = 12
VOCAB_SIZE = 2000
SHARED = 3000  # tokens that both prompts begin with
PROMPTS = [
    [(at * at * 31 + at * 7 + 11 * (at >= SHARED) * (1 + number)) % (VOCAB_SIZE - 3) + 3 for at in range(length)]
    for number, length in enumerate((4500, 4203))
]


def module() -> Any:
    found = build("llama", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 8192})
    found.set_attn_implementation("sdpa")  # eager holds all scores of a prompt at once
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generated(module(), PROMPTS, NUM_TOKENS)


def engine() -> Engine:
    """Return an engine whose chunks shrink with the streams beside them, and with the prompts that share a step."""
    return engine_on(wrap_module(module(), LoadOptions(None)), 700, max_num_batched_tokens=230, max_num_seqs=8)


def test_tokens_after_thousands_in_unlike_chunks_equal_generate(expected: list[list[int]]) -> None:
    one, lengths = engine(), dict[str, list[int]]()

    def note(batch: Batch) -> None:
        for part in batch.scheduled[batch.num_decodes :]:
            lengths.setdefault(part.request.id, []).append(part.num_tokens)

    before_each_step(one, note)
    for number in range(6):  # streams that begin and end beside the prompt's chunks
        one.add(Submission(f"stream {number}", [5 + number] * (3 + 20 * number), greedy(4 + 3 * number)))
    one.add(Submission("long", PROMPTS[0], greedy(NUM_TOKENS)))
    assert tokens_of(run(one)["long"]) == expected[0]
    assert len(lengths["long"]) >= 20
    assert len(set(lengths["long"])) >= 3
    one.add(Submission("after a prefix hit", PROMPTS[1], greedy(NUM_TOKENS)))
    assert tokens_of(run(one)["after a prefix hit"]) == expected[1]
    assert sum(lengths["after a prefix hit"]) == len(PROMPTS[1]) - SHARED // 16 * 16


async def test_tokens_after_thousands_shipped_chunk_by_chunk_equal_generate(expected: list[list[int]]) -> None:
    async with closing(Side("tcp", engine=engine()), Side("tcp", engine=engine())) as (prefill, decode):
        works = [submission(prompt, NUM_TOKENS) for prompt in PROMPTS]
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected
        shipped = sum(figures.num_pages for _, is_sent, figures, _ in prefill.ended if is_sent)
        assert shipped >= sum(len(prompt) // 16 for prompt in PROMPTS) - SHARED // 16  # the second may find a prefix
