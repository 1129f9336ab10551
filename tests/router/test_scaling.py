"""Pools follow demand: within bounds, after a delay, without moving back and forth, and each by its own role."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.scaling import SHRINK_MARGIN, Bounds, Flip, Resize, Scaling, ScalingConfig, demand
from crossdock.workers.report.live_profile import LiveProfile, Prompts
from crossdock.workers.report.profile import Role
from tests.router.replicas import COST, changed, live, profile

CONFIG = ScalingConfig(utilisation=0.5, interval_s=1.0, up_delay_s=3.0, down_delay_s=5.0)
FLIPPING = CONFIG.model_copy(update={"flip_roles": True})


class Pools:
    """Replicas that share the work for their role evenly, as a router would place it, and report once a second.

    The work for a pool's model is that of the model, whatever its role, where models are several."""

    start_s = 0  # until a replica is up

    def __init__(self, config: ScalingConfig = CONFIG, **bounds: Bounds) -> None:
        self.scaling = Scaling(config, bounds)
        self.roles: dict[str, dict[str, Role]] = {
            name: {f"{name}-{number}": pool.role for number in range(pool.least)} for name, pool in bounds.items()
        }
        self.load: dict[str, float] = {}  # by role or model: seconds of prompts that arrive per second
        self.streams: dict[str, int] = {}
        self.starting: list[tuple[float, str]] = []  # when a replica of a pool will be up
        self.now = 0.0
        self.done: dict[str, float] = {}
        self.log: list[Resize | Flip] = []
        self.joined: set[str] = set()
        self.silent: set[str] = set()  # replicas that are not heard
        self.asleep = False  # their operator has put all replicas to sleep

    def restart(self) -> None:
        """Begin with a new scaler, which is told the sizes and the members, and nothing else."""
        targets = {pool: len(roles) for pool, roles in self.roles.items()}
        self.scaling = Scaling(self.scaling.config, self.scaling.pools, targets)
        self.joined.clear()

    def size(self, pool: str) -> int:
        return len(self.roles[pool])

    def work_of(self, pool: str, role: Role) -> str:
        return self.scaling.pools[pool].model or role

    def count(self, work: str) -> int:
        return sum(self.work_of(pool, each) == work for pool, roles in self.roles.items() for each in roles.values())

    def run(self, seconds: int) -> list[Resize | Flip]:
        """Let time pass. Return the decisions made meanwhile."""
        before = len(self.log)
        for _ in range(seconds):
            self.now += 1
            for pool, roles in self.roles.items():
                for name, role in roles.items():
                    work = self.work_of(pool, role)
                    self.done[name] = self.done.get(name, 0.0) + min(self.load.get(work, 0.0) / self.count(work), 1.0)
                    if name not in self.joined:
                        self.joined.add(name)
                        self.scaling.join(name, pool, profile(role=self.scaling.pools[pool].role))
                    if name not in self.silent:
                        self.scaling.hear(name, self.live(name, role), self.now)
            for action in self.scaling.decide(self.now):
                self.log.append(action)
                if isinstance(action, Flip):
                    pool = action.replica.split("-")[0]
                    self.roles[pool][action.replica] = action.role
                else:
                    self.resize(action)
            for at, pool in [each for each in self.starting if each[0] <= self.now]:
                self.starting.remove((at, pool))
                roles = self.roles[pool]
                roles[f"{pool}-{self.now:.0f}.{len(roles)}"] = self.scaling.pools[pool].role
        return self.log[before:]

    def resize(self, action: Resize) -> None:
        roles, home = self.roles[action.pool], self.scaling.pools[action.pool].role
        while len(roles) > action.replicas:
            name = next((name for name, role in roles.items() if role == home), next(iter(roles)))
            del roles[name]
            self.scaling.leave(name)
        for _ in range(action.replicas - len(roles) - sum(pool == action.pool for _, pool in self.starting)):
            self.starting.append((self.now + self.start_s, action.pool))

    def live(self, name: str, role: Role) -> LiveProfile:
        streams = (0, -(-self.streams.get(role, 0) // max(self.count(role), 1)), 0)
        return live(int(self.now), role=role, streams=streams, done_seconds=self.done[name], is_paused=self.asleep)


def mixed(least: int, most: int) -> Bounds:
    return Bounds("mixed", least, most)


def eight_replicas() -> Pools:
    """Return a mixed pool that has grown to what its load needs."""
    pools = Pools(mixed=mixed(1, 16))
    pools.load["mixed"] = 3.9
    pools.run(30)
    assert pools.size("mixed") == 8
    return pools


# -- demand ------------------------------------------------------------------------------------------------------------


def test_demand_is_the_share_of_time_pages_or_places_in_use() -> None:
    static = profile()
    assert demand(static, live(), 0.0) == 0.0
    assert demand(static, live(), 0.4) == 0.4
    waiting = live(prompts=(Prompts(0, 3, 1, 500, 0.25), Prompts(1, 4, 1, 4000, 5.0)))
    assert demand(static, waiting, 0.0) == 0.25 / 1.0 + 5.0 / 10.0  # over the classes' times to first token
    decoding = live(streams=(0, 8, 30), context_tokens=10_000)
    many_places = profile(max_num_seqs=1000)
    assert demand(many_places, decoding, 0.0) == pytest.approx((COST.decode_step_seconds(38, 10_000)) / 0.1)
    assert demand(static, decoding, 0.0) == 38 / 64  # places, of which more are in use
    assert demand(static, changed(live(), free_pages=(4000, 1500, 1000)), 0.0) == 0.75


def test_demand_follows_the_reported_cost() -> None:
    decoding = live(streams=(1, 0, 0))
    static = profile(max_num_seqs=1000)
    slower = changed(decoding, cost=tuple(5 * coefficient for coefficient in COST.coefficients))
    assert demand(static, slower, 0.0) == pytest.approx(5 * demand(static, decoding, 0.0))


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_pool_grows_after_a_delay_and_shrinks_after_a_longer_one() -> None:
    pools = Pools(mixed=mixed(1, 10))
    pools.load["mixed"] = 0.4
    assert not pools.run(20)
    pools.load["mixed"] = 1.9
    assert not pools.run(3)
    pools.run(30)
    assert pools.size("mixed") == 4  # at half of their time each
    assert not pools.run(30)
    pools.load["mixed"] = 0.0
    assert not pools.run(5)
    pools.run(60)
    assert pools.size("mixed") == 1


def test_pool_whose_operator_has_put_it_to_sleep_stays_as_it_is_until_it_is_awake() -> None:
    pools = Pools(mixed=mixed(1, 10))
    pools.load["mixed"] = 1.9
    pools.run(30)
    pools.asleep = True
    for load in (9.0, 0.0):  # prompts that wait for the operator are no demand, and their absence is no idle time
        pools.load["mixed"] = load
        assert not pools.run(60)
    pools.asleep = False
    assert not pools.run(5)
    pools.run(60)
    assert pools.size("mixed") == 1


def test_short_peaks_of_demand_change_nothing() -> None:
    pools = Pools(mixed=mixed(2, 10))
    for _ in range(10):
        pools.load["mixed"] = 9.0
        assert not pools.run(3)
        pools.load["mixed"] = 0.3
        assert not pools.run(2)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 20), st.integers(0, 3), st.integers(1, 12))
def test_pool_under_a_steady_load_comes_to_rest_within_bounds(load: float, least: int, more: int) -> None:
    pools = Pools(mixed=mixed(least + 1, least + 1 + more))
    pools.load["mixed"] = load
    pools.run(200)
    assert not pools.run(100)
    wanted = min(max(load / CONFIG.utilisation, least + 1), least + 1 + more)
    assert wanted - 1e-6 <= pools.size("mixed") <= wanted / SHRINK_MARGIN + 1


def test_pools_follow_the_demand_for_their_own_roles() -> None:
    pools = Pools(prefill=Bounds("prefill", 1, 20), decode=Bounds("decode", 1, 20))
    pools.load["prefill"], pools.streams["decode"] = 2.4, 320
    pools.run(100)
    assert pools.size("prefill") == 5
    assert pools.size("decode") == 10  # 320 streams in 64 places each, half of them
    pools.load["prefill"], pools.streams["decode"] = 4.9, 50
    pools.run(200)
    assert (pools.size("prefill"), pools.size("decode")) == (10, 2)


def test_pool_of_fixed_size_is_never_resized() -> None:
    pools = Pools(mixed=mixed(2, 2))
    pools.load["mixed"] = 50.0
    assert not pools.run(100)


def test_restarted_scaling_goes_on_from_the_sizes_it_finds() -> None:
    pools = Pools(mixed=mixed(1, 9))
    pools.load["mixed"] = 2.9
    pools.run(30)
    assert pools.size("mixed") == 6
    pools.restart()
    pools.load["mixed"] = 0.0
    pools.run(60)
    assert pools.size("mixed") == 1


def test_restarted_scaling_that_hears_replicas_one_after_the_other_keeps_the_pool() -> None:
    pools = eight_replicas()
    pools.restart()
    names = list(pools.roles["mixed"])
    for heard in range(9):
        pools.silent = set(names[heard:])
        assert not pools.run(7), "each time longer than the delays"


def test_replica_that_starts_while_the_scaling_restarts_counts() -> None:
    """It has not joined yet, and Serve would stop it, or another, if the pool were asked for fewer."""
    pools = eight_replicas()
    pools.restart()
    pools.scaling.targets["mixed"] = 10
    assert not pools.run(30)
    pools.load["mixed"] = 4.9
    assert not pools.run(30), "ten are enough for that; eight are not"


def test_replica_that_cannot_be_heard_keeps_pools_from_shrinking_until_it_leaves() -> None:
    pools = eight_replicas()
    pools.load["mixed"] = 0.0
    lost = next(iter(pools.roles["mixed"]))
    pools.silent = {lost}
    pools.scaling.lose(lost)
    assert not pools.run(60)
    del pools.roles["mixed"][lost]
    pools.scaling.leave(lost)
    pools.run(100)
    assert pools.size("mixed") == 1


def test_resize_that_could_not_be_applied_is_decided_again() -> None:
    pools = Pools(mixed=mixed(1, 16))
    pools.load["mixed"] = 1.4
    pools.run(3)
    resized: list[Resize | Flip] = []
    for _ in range(3):
        for _ in range(10):
            if resized:
                break
            pools.now += 1
            pools.done["mixed-0"] += 1.0
            pools.scaling.hear("mixed-0", pools.live("mixed-0", "mixed"), pools.now)
            resized = pools.scaling.decide(pools.now)
        (resize,) = resized
        assert (resize.pool, resize.replicas, resize.reason, resize.replicas_before) == ("mixed", 2, "demand for 2", 1)
        pools.scaling.undo(resize)
        resized = []


def test_replicas_that_left_leave_nothing() -> None:
    scaling = Scaling(CONFIG, {"mixed": mixed(1, 9)})
    for number in range(100):
        scaling.join(f"r{number}", "mixed", profile())
        scaling.hear(f"r{number}", live(1), float(number))
        scaling.decide(float(number))
        scaling.leave(f"r{number}")
        scaling.hear(f"r{number}", live(2), float(number))
    assert not scaling._members
    assert set(scaling.targets) == {"mixed"}


def test_new_incarnation_starts_its_done_seconds_at_zero() -> None:
    scaling = Scaling(CONFIG, {"mixed": mixed(1, 9)})
    scaling.join("a", "mixed", profile())
    scaling.hear("a", live(1, "one", done_seconds=1000.0), 0.0)
    scaling.hear("a", live(1, "two", done_seconds=0.0), 1.0)
    scaling.hear("a", live(2, "two", done_seconds=0.1), 2.0)
    assert not scaling.decide(2.0)
    assert not scaling.decide(10.0)


# -- roles -------------------------------------------------------------------------------------------------------------


def test_roles_flip_where_pools_cannot_grow_and_flip_back() -> None:
    pools = Pools(FLIPPING, prefill=Bounds("prefill", 3, 3), decode=Bounds("decode", 3, 3))
    pools.load["prefill"], pools.streams["decode"] = 0.2, 90
    assert not pools.run(50)
    pools.load["prefill"], pools.streams["decode"] = 2.4, 5
    changed = pools.run(100)
    assert [(type(action), action.role) for action in changed if isinstance(action, Flip)] == [(Flip, "prefill")] * 2
    assert (pools.count("prefill"), pools.count("decode")) == (5, 1)
    pools.load["prefill"], pools.streams["decode"] = 0.3, 90
    changed = pools.run(100)
    returned = {action.replica.split("-")[0] for action in changed if isinstance(action, Flip)}
    assert returned == {"decode"}  # replicas return to their own pool's role first
    assert (pools.count("prefill"), pools.count("decode")) == (3, 3)


def test_last_replica_of_a_role_never_flips() -> None:
    pools = Pools(FLIPPING, prefill=Bounds("prefill", 1, 1), decode=Bounds("decode", 1, 1))
    pools.load["prefill"] = 5.0
    assert not pools.run(50)


def test_pool_whose_replicas_have_other_roles_keeps_one_of_its_own() -> None:
    slow = FLIPPING.model_copy(update={"down_delay_s": 30.0})
    pools = Pools(slow, prefill=Bounds("prefill", 1, 3), decode=Bounds("decode", 2, 4))
    pools.load["prefill"] = 1.4
    pools.run(50)
    pools.load["prefill"], pools.streams["decode"] = 0.0, 300
    assert [action.role for action in pools.run(100) if isinstance(action, Flip)] == ["decode"] * 2
    assert (pools.count("prefill"), pools.count("decode")) == (1, 6)


def test_replica_does_not_flip_where_a_pool_can_grow() -> None:
    pools = Pools(FLIPPING, prefill=Bounds("prefill", 1, 9), decode=Bounds("decode", 3, 3))
    pools.load["prefill"] = 2.0
    assert all(isinstance(action, Resize) for action in pools.run(50))
    assert pools.size("prefill") == 4
