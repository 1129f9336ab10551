"""Shares of a whole, and slots in turns: what one owner leaves to others, whatever all of them do."""

import asyncio
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crossdock.cluster.api.media.turns import Turns
from crossdock.workers.schedule.shares import Shares

NUM_SLOTS = 10
OWNERS = ("a", "b", "c", "")


class AnyUse(RuleBasedStateMachine):
    """Owners take what fits and release it, beside a plain list of all grants."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(40)
        self.grants: list[tuple[str, int]] = []

    def used(self, owner: str) -> int:
        return sum(amount for other, amount in self.grants if other == owner)

    @property
    def free(self) -> int:
        return 40 - sum(amount for _, amount in self.grants)

    @rule(owner=st.sampled_from(OWNERS), amount=st.integers(1, 30))
    def ask(self, owner: str, amount: int) -> None:
        used, left = self.used(owner), self.free - amount
        fits = left >= 0 and (owner == "" or used == 0 or used + amount <= left)
        assert (amount <= self.shares.room(owner)) == fits
        if fits:
            self.shares.take(owner, amount)
            self.grants.append((owner, amount))

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.shares.release(*self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1))))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def ask_as_if_released(self, data: st.DataObject, owner: str) -> None:
        gone = data.draw(st.sets(st.integers(0, len(self.grants) - 1)))
        freed = [self.grants[i] for i in gone]
        other = Shares(40)
        for i, grant in enumerate(self.grants):
            if i not in gone:
                other.take(*grant)
        own = sum(each for name, each in freed if name == owner)
        every = sum(each for _, each in freed)
        assert self.shares.room(owner, freed=every, freed_of_owner=own) == other.room(owner)

    @invariant()
    def all_is_counted(self) -> None:
        assert self.shares.num_used == 40 - self.free <= 40


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=25, stateful_step_count=40)


class AnyTurns(RuleBasedStateMachine):
    """Callers come, get slots, leave while they wait or while they have one."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.turns = self.runner.run(self.new())
        self.tasks: list[tuple[str, str, asyncio.Task[None]]] = []
        self.running: list[tuple[str, str]] = []

    async def new(self) -> Turns:
        return Turns(NUM_SLOTS, leaves_some=True)

    def teardown(self) -> None:
        async def end() -> None:
            for *_, task in self.tasks:
                task.cancel()
            await asyncio.gather(*(task for *_, task in self.tasks), return_exceptions=True)

        self.runner.run(end())
        self.runner.close()

    @rule(owner=st.sampled_from(OWNERS), host=st.sampled_from(("x", "y", "z")))
    def come(self, owner: str, host: str) -> None:
        async def start() -> None:
            task = asyncio.create_task(self.turns.acquire(owner, host))
            self.tasks.append((owner, host, task))

        self.runner.run(start())
        self.settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), leaves=st.booleans())
    def end(self, data: st.DataObject, leaves: bool) -> None:
        """End one that has a slot; with `leaves`, another that waits leaves in the same moment."""
        owner, host = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

        async def release() -> None:
            self.turns.release(owner, host)
            if leaves and self.tasks:
                self.tasks[data.draw(st.integers(0, len(self.tasks) - 1))][2].cancel()

        self.runner.run(release())
        self.settle()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        async def cancel() -> None:
            self.tasks[data.draw(st.integers(0, len(self.tasks) - 1))][2].cancel()

        self.runner.run(cancel())
        self.settle()

    def settle(self) -> None:
        async def let_run() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.runner.run(let_run())
        for owner, host, task in self.tasks:
            if task.done() and not task.cancelled():
                self.running.append((owner, host))
        self.tasks = [each for each in self.tasks if not each[2].done()]

    @invariant()
    def slots_are_counted(self) -> None:
        assert len(self.running) <= NUM_SLOTS
        assert self.turns._owners.num_used == self.turns._of_host.total() == len(self.running)

    @invariant()
    def none_waits_that_may_have_a_slot(self) -> None:
        free = NUM_SLOTS - len(self.running)
        tenants = Counter(owner for owner, _ in self.running)
        hosts = Counter(self.running)
        for owner, host, _ in self.tasks:
            room = free if not owner or not tenants[owner] else max(0, free - tenants[owner]) // 2
            assert not room or 0 < hosts[owner, host] > room - 2


TestAnyTurns = AnyTurns.TestCase
TestAnyTurns.settings = settings(max_examples=25, stateful_step_count=40)


@pytest.mark.parametrize(("owner", "most"), [("a", 8), ("", 16)])
async def test_slow_host_leaves_fetches_of_others_and_of_other_owners(owner: str, most: int) -> None:
    turns = Turns(32, leaves_some=True)
    slow = [asyncio.create_task(turns.acquire(owner, "slow.example")) for _ in range(100)]
    await asyncio.sleep(0)
    async with asyncio.timeout(240):
        await turns.acquire(owner, "fast.example")
        turns.release(owner, "fast.example")
        await turns.acquire("b", "slow.example")
    assert sum(task.done() for task in slow) == most
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


async def test_slots_that_leave_none_may_all_be_of_one_owner() -> None:
    turns = Turns(2)
    await turns.acquire("a")
    await turns.acquire("a")
    other = asyncio.create_task(turns.acquire("b"))
    await asyncio.sleep(0)
    assert not other.done()
    turns.release("a")
    await other
