"""Draw what can happen to pools of any kind: clients leave, messages are lost, time passes, or all goes well."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.workers.replica.pools_world import World


class AnyPools(RuleBasedStateMachine):
    """A state machine over a world of pools, which begins when `world` is set. All requests must end after it."""

    world: World

    @rule(rounds=st.integers(1, 20))
    def go_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.go_round()

    @rule(number=st.integers(0, 99))
    def leave(self, number: int) -> None:
        clients = [client for client in self.world.clients.values() if not client.is_over]
        if clients:
            self.world.leave(clients[number % len(clients)])

    @rule(number=st.integers(0, 99))
    def lose(self, number: int) -> None:
        if ready := self.world.ready():
            self.world.lose(ready[number % len(ready)])

    @rule(number=st.integers(0, 99))
    def damage(self, number: int) -> None:
        if self.world.writes:
            self.world.land(number % len(self.world.writes), is_damaged=True)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
