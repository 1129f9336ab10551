"""A folder of batches and a worker whose answers are scripted; run as a program, one that can be killed."""

import asyncio
import io
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from crossdock.cluster.api.batches.folder import TERMINAL, BatchFolder, Owner
from crossdock.cluster.api.batches.lines import Line
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.worker import BatchWorker
from crossdock.cluster.dispatch.dispatcher import ModelCard
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.waiting import until

CHATS = "/v1/chat/completions"


class NoSource:
    """A source of no tokens: answers are scripted."""

    model = ModelCard("tiny", 0, 1, 1)

    async def generate(self, submission: Submission, reader: object = None) -> AsyncIterator[TokenDelta]:
        raise NotImplementedError
        yield


class Scripted:
    """Answers each line after `seconds`, and counts how often."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.asked = Counter[str]()

    async def __call__(self, line: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        self.asked[line.custom_id] += 1
        await asyncio.sleep(self.seconds)
        return (400, b'{"error":{}}') if line.body.get("wrong") else (200, json.dumps(line.body).encode())


def lines(count: int, **body: Any) -> bytes:
    """Return a file of so many requests."""
    made = [{"custom_id": f"c{i}", "method": "POST", "url": CHATS, "body": {"i": i, **body}} for i in range(count)]
    return b"".join(json.dumps(one).encode() + b"\n" for one in made)


def created(folder: BatchFolder, content: bytes, owner: str = "", lifetime_s: int = 600) -> str:
    """Store a file and create its batch. Returns the id of the batch."""
    file = folder.create_file(owner, io.BytesIO(content), "in.jsonl", "batch")
    fields = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h", "metadata": None}
    name: str = folder.create_batch(Owner(owner), fields, lifetime_s)["id"]
    return name


def worker(folder: BatchFolder, answer: Callable[[Line, Owner, str], Awaitable[tuple[int, bytes]]]) -> BatchWorker:
    return BatchWorker(folder, answer, Pace(NoSource(), lambda: 2))


async def ended(folder: BatchFolder, name: str, owner: str = "") -> Any:
    """Wait for the end of a batch, and return its object."""
    await until(lambda: folder.batch(owner, name)["status"] in TERMINAL)
    return folder.batch(owner, name)


def records(folder: BatchFolder, batch: Any, owner: str = "") -> list[Any]:
    """Return all records of an ended batch, those of errors last."""
    files = [batch[field] for field in ("output_file_id", "error_file_id") if batch[field]]
    return [json.loads(line) for file in files for line in folder.content(owner, file).read_text().splitlines()]


async def _serve(root: str) -> None:
    serving = worker(BatchFolder(Path(root)), Scripted(0.01))
    serving.start()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
