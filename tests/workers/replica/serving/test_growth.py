"""A replica keeps nothing of a request that has ended, however it ended, but for histories with a bound."""

import contextlib
from dataclasses import replace
from itertools import count

from crossdock.workers.report.timeline import KEEP_CHUNKS, KEEP_FINISHED
from crossdock.workers.schedule.output_lengths import RECENT
from crossdock.workers.schedule.request.submission import InvalidField, Leg
from tests.sizes import growing, sizes
from tests.workers.replica.sides import Side, pair, prompts, ship, start, submission

BOUNDED = (  # the end of a path, and the most entries
    ("timelines._finished", KEEP_FINISHED),
    ("timelines._finished[*].chunks", KEEP_CHUNKS),  # a slow machine cuts prompts into more
    ("steps._steps", 2048),
    ("._fence._epochs", 16_384),
    ("._ended._epochs", 16_384),
    ("._merger._over", 1024),
    ("._early_offers", 4096),
    ("cost_fit._errors", 4096),
    *((f".table.outputs.{name}", 2 * RECENT) for name in ("_begun", "_whole", "_cut", "_sums", "_censored", "_longer")),
    (".pages.block_pool._free", 512),  # of all pages there are
    (".pages.prefixes.changes._changes", 512),  # until the next message to the routers
)
_numbers = count()


async def work(prefill: Side, decode: Side) -> None:
    """Have requests end in every way that there is."""
    for prompt in prompts(4):
        await ship(prefill, decode, replace(submission(prompt), id=f"shipped {next(_numbers)}", cache_salt="x"))
        await decode.generate(replace(submission(prompt), id=f"local {next(_numbers)}"))
        aborted = replace(submission(prompts()[6], 200), id=f"aborted {next(_numbers)}")
        await start(prefill, decode, aborted)
        await prefill.thread.abort([(aborted.id, aborted.epoch)])
        await decode.thread.abort([(aborted.id, aborted.epoch)])
        alone = replace(submission(prompt), id=f"alone {next(_numbers)}", leg=Leg.RECEIVE, peer=prefill.blob)
        await decode.thread.submit("test", alone)  # the other side never learns of it
        await decode.thread.abort([(alone.id, alone.epoch)])
        with contextlib.suppress(InvalidField):
            await decode.thread.submit("test", replace(submission([1 << 20]), id=f"refused {next(_numbers)}"))
        channel = decode.thread.channel("reader")
        leaves = replace(submission(prompt, 100), id=f"leaves {next(_numbers)}")
        await decode.thread.submit("reader", leaves)
        await decode.thread.close_channel("reader", channel)
    for side in (prefill, decode):
        assert await side.is_clean()
        side.deltas.clear()
        side.ended.clear()
        await side.on_engine(side.engine.pages.block_pool.clear_cache)


async def test_requests_that_ended_leave_nothing() -> None:
    async with pair("tcp", max_num_batched_tokens=24) as sides:
        await work(*sides)
        before = [sizes(side.thread) for side in sides]
        for _ in range(3):
            await work(*sides)
        for side, earlier in zip(sides, before, strict=True):
            grown = growing(earlier, sizes(side.thread))
            for ending, most in BOUNDED:
                for path in [path for path in grown if path.endswith(ending)]:
                    assert grown.pop(path)[1] <= most
            assert not grown
