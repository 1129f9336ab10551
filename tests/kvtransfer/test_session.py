"""The protocol keeps its promises after any history of calls, delays, lost messages, cancels, deaths and broken
connections. `World` checks them."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.kvtransfer.world import World


class Transfers(RuleBasedStateMachine):
    @initialize()
    def setup(self) -> None:
        self.world = World()

    @rule(
        request=st.sampled_from("abc"),
        replica=st.integers(0, 1),
        number=st.integers(0, 1),
        tokens=st.integers(1, 22),
        has=st.integers(0, 2),
        started=st.sampled_from(["both", "both", "both", "source", "target", "none"]),
    )
    def begin(self, request: str, replica: int, number: int, tokens: int, has: int, started: str) -> None:
        self.world.begin(request, replica, number, tokens, has, started)

    @rule(kind=st.integers(0, 13), index=st.integers(0, 99))
    def go_wrong(self, kind: int, index: int) -> None:
        match kind:
            case 0 | 1:
                self.world.cancel_ship(index, index // 7 % 2)
            case 2 | 3:
                self.world.cancel_expect(index)
            case 4 | 5:
                self.world.pass_time([0.1, 0.6, 2.0, 6.0][index % 4])
            case 6:
                self.world.kill_replica(index % 2)
            case 7:
                self.world.kill_target(index % 2)
            case 8:
                self.world.break_connection(index % 2, index // 2 % 2)
            case 9 | 10:
                self.world.ship(index)
            case 11 | 12:
                self.world.lose(index)
            case _:
                self.world.expect(index)

    @precondition(lambda self: self.world.attempts)
    @rule(steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 99)), min_size=20, max_size=100))
    def go_on(self, steps: list[tuple[int, int]]) -> None:
        """Do things that go well, in any order: most of what happens, or nothing would ever arrive."""
        for kind, index in steps:
            match kind:
                case 0 | 1:
                    self.world.deliver(index)
                case 2:
                    self.world.land(index)
                case 3:
                    self.world.complete(index)
                case 4:
                    self.world.grant(index)
                case 5:
                    self.world.offer(index, index // 7 % 2)
                case _:
                    self.world.compute(index, index // 7 % 2, index % 13)

    def teardown(self) -> None:
        self.world.settle()


Transfers.TestCase.settings = settings(
    max_examples=50, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTransfers = Transfers.TestCase
