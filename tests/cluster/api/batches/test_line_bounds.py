"""Lines of batches have the bounds of bodies, and count in the memory of all requests until they are free."""

import asyncio
import json
from pathlib import Path

import pytest

from crossdock.cluster.api import bounds
from crossdock.cluster.api.batches import lines as lines_module
from crossdock.cluster.api.batches.folder import BatchFolder, Owner
from crossdock.cluster.api.batches.lines import Line
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.worker import BatchWorker
from crossdock.workers.schedule.shares import Shares
from tests.cluster.api.batches.scripted_batches import CHATS, NoSource, Scripted, created, ended
from tests.waiting import until

WIDE = b"[" + b"[]," * (bounds.BODY_PARTS + 1) + b"[]]"
MANY = b"[" + b"1," * (bounds.BODY_VALUES + 1) + b"1]"


def line(value: bytes) -> bytes:
    head = json.dumps({"custom_id": "a", "method": "POST", "url": CHATS, "body": {}})[:-2].encode()
    return head + b'"x": ' + value + b"}}\n"


@pytest.mark.parametrize("value", [WIDE, MANY], ids=["lists", "numbers"])
async def test_line_beyond_the_bounds_of_a_body_is_never_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    parsed = list[int]()
    from_json = lines_module.from_json
    monkeypatch.setattr(
        lines_module, "from_json", lambda content, **ways: parsed.append(len(content)) or from_json(content, **ways)
    )
    folder, memory = BatchFolder(tmp_path), Shares(1 << 30)
    worker = BatchWorker(folder, Scripted(), Pace(NoSource(), lambda: 1), memory)
    worker.start()
    batch = await ended(folder, created(folder, line(b"1") + line(value)))
    await worker.close()
    assert batch["status"] == "failed"
    assert [(each["line"], each["code"]) for each in batch["errors"]["data"]] == [(2, "invalid_json_line")]
    assert all(size < 1000 for size in parsed)
    assert memory.is_unused


async def test_lines_count_while_they_run_and_wait_where_requests_fill_the_memory(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    whole = Shares(4 << 20)
    part = Shares(2 << 20, within=whole)
    gate = asyncio.Event()
    running = list[str]()

    async def answer(given: Line, owner: Owner, request_id: str) -> tuple[int, bytes]:
        running.append(given.custom_id)
        await gate.wait()
        return 200, b"{}"

    text = b'"' + b"x" * 300_000 + b'"'
    content = b"".join(line(text).replace(b'"a"', b'"c%d"' % number, 1) for number in range(8))
    worker = BatchWorker(folder, answer, Pace(NoSource(), lambda: 64), part)
    worker.start()
    name = created(folder, content)
    await until(lambda: len(running) == 3)
    assert 3 * 600_000 <= whole.num_used <= 2 << 20
    gate.set()
    batch = await ended(folder, name)
    await worker.close()
    assert batch["request_counts"]["completed"] == 8
    assert whole.is_unused
