"""Minutes of transfers between real processes, with cancels at random moments, stops and kills: no transfer hangs, no
byte is wrong, every page is freed."""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from crossdock.kvtransfer.calls import (
    CancelExpectCall,
    CancelShipCall,
    ChunkCall,
    ExpectCall,
    FinishCall,
    GrantCall,
    PeerDeadCall,
    ShipCall,
)

from .one_group import whole

PAGE = 16
SECONDS = float(os.environ.get("CROSSDOCK_SOAK_SECONDS", "60"))


@pytest.mark.soak
def test_random_transfers_for_minutes_all_end_well(start: Callable[..., Any]) -> None:
    rng = random.Random(4)
    config = {"max_write_bytes": 1 << 17, "num_pages": 256}
    sources = [start(role=f"source {number}", **config) for number in range(2)]
    targets = [start(role=f"target {number}", **config) for number in range(2)]
    end = time.monotonic() + SECONDS
    outcomes = {"arrived": 0, "cancelled": 0, "killed": 0, "stopped": 0}
    number = 0
    while time.monotonic() < end:
        number += 1
        source, target = rng.choice(sources), rng.choice(targets)
        request = f"r{number}", 1
        here, there = rng.sample(range(256), 200), rng.sample(range(256), 200)
        first = rng.choice([0, 0, 50])
        source.ask("fill", seed=number, pages=here)
        target.call(ExpectCall(*request, (source.blob,), 2.0))
        source.call(ShipCall(*request, (target.blob,), 2.0))
        fault = rng.choices(["none", "source", "target", "both", "kill", "stop"], [70, 8, 8, 4, 4, 6])[0]
        granted_early = rng.random() < 0.5
        if granted_early:
            target.call(GrantCall(*request, first, whole(there[first:], first)))
        for done in range(40, 200, 40):
            source.call(ChunkCall(request[0], whole(here[:done]), done * PAGE))
        if not granted_early:
            target.call(GrantCall(*request, first, whole(there[first:], first)))
        time.sleep(rng.random() * 0.02)
        if fault in ("source", "both"):
            source.call(CancelShipCall(*request))
        if fault in ("target", "both"):
            target.call(CancelExpectCall(*request))
        if fault == "none":
            source.call(FinishCall(request[0], whole(here), 200 * PAGE - 3))
            target.event("Arrived", request[0])
            source.event("Released", request[0])
            assert all(target.ask("equal", seed=number, pages=there[first:], first=first))
            outcomes["arrived"] += 1
        elif fault == "kill":
            side = rng.choice([sources, targets])
            victim = source if side is sources else target
            victim.kill()
            for dock in (*sources, *targets):
                if dock is not victim:
                    dock.call(PeerDeadCall(victim.blob))
            if victim is source:
                target.event("WriterStopped", request[0])
            else:
                source.event("Released", request[0])
            side[side.index(victim)] = start(role=f"another {number}", **config)
            outcomes["killed"] += 1
        elif fault == "stop":
            victim = rng.choice([source, target])
            victim.signal(signal.SIGSTOP)
            time.sleep(rng.choice([0.5, 2.5]))
            victim.signal(signal.SIGCONT)
            source.call(CancelShipCall(*request))
            target.call(CancelExpectCall(*request))
            source.event("Released", request[0])
            target.event("WriterStopped", request[0])
            outcomes["stopped"] += 1
        else:
            source.event("Released", request[0])
            target.event("WriterStopped", request[0])
            outcomes["cancelled"] += 1
        for dock in (source, target):
            with dock.news:
                dock.events[:] = [e for e in dock.events if e["request"] != request[0]]
    for dock in (*sources, *targets):
        assert dock.ask("drain", timeout=240)
        assert dock.ask("counts")["num_malformed"] == 0
    assert outcomes["arrived"] > 10, outcomes
