"""An ingress in a process of its own, whose requests wait for their first token: for measurements of its memory."""

import asyncio
from collections.abc import Iterator
from multiprocessing.connection import Connection

from crossdock.cluster.api.heap import keep_one_heap
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher
from tests.cluster.ports import free_port
from tests.cluster.small_tokenizers import byte_level

WAIT_S = 600.0  # for a token


def serve(config: HttpConfig, orders: Connection) -> None:
    """Serve until told to stop. Sends the port. The heap is as in an ingress."""
    keep_one_heap()
    asyncio.run(_serve(config, orders))


async def _serve(config: HttpConfig, orders: Connection) -> None:
    tokenizer = ModelTokenizer(byte_level())
    engine = ScriptedDispatcher(tokenizer)

    def script(submission: Submission) -> Iterator[TokenDelta | Exception | float]:
        if submission.sampling.max_tokens > 1:
            yield WAIT_S
        yield from engine.story(submission)

    engine.script = script
    port = free_port()
    server = await listen(one_model_api(engine, tokenizer, config), "127.0.0.1", port)  # type: ignore[arg-type]
    orders.send(port)
    await asyncio.to_thread(orders.recv)
    await server.close(0)
