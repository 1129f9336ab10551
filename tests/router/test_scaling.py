"""Pools follow demand: within bounds, neither at once nor back and forth, and each in its own share."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.scaling import Bounds, Flip, Resize, Scaling, ScalingConfig, demand
from crossdock.workers.report.advertise import LiveProfile, Prompts
from crossdock.workers.report.profile import Role
from tests.router.replicas import COST, profile, quiet

CONFIG = ScalingConfig(utilisation=0.5, interval_s=1.0, up_delay_s=3.0, down_delay_s=5.0)


class Pools:
    """Replicas that share what work there is for their role, as a router would have it, heard once a second."""

    def __init__(self, config: ScalingConfig = CONFIG, **bounds: Bounds) -> None:
        self.scaling = Scaling(config, bounds)
        self.roles: dict[str, dict[str, Role]] = {
            name: {f"{name}-{number}": its.role for number in range(its.least)} for name, its in bounds.items()
        }
        self.load: dict[Role, float] = {}  # seconds of prompts that come per second
        self.streams: dict[Role, int] = {}
        self.now = 0.0
        self.done: dict[str, float] = {}
        self.log: list[Resize | Flip] = []

    def size(self, pool: str) -> int:
        return len(self.roles[pool])

    def count(self, role: Role) -> int:
        return sum(each == role for its in self.roles.values() for each in its.values())

    def pass_(self, seconds: int) -> list[Resize | Flip]:
        """What was changed meanwhile."""
        before = len(self.log)
        for _ in range(seconds):
            self.now += 1
            for pool, its in self.roles.items():
                for name, role in its.items():
                    self.done[name] = self.done.get(name, 0.0) + min(self.load.get(role, 0.0) / self.count(role), 1.0)
                    self.scaling.hear(name, pool, profile(role=role), self.live(name, role), self.now)
            for action in self.scaling.decide(self.now):
                self.log.append(action)
                if isinstance(action, Flip):
                    pool = action.replica.split("-")[0]
                    self.roles[pool][action.replica] = action.role
                else:
                    self.resize(action)
        return self.log[before:]

    def resize(self, action: Resize) -> None:
        its, home = self.roles[action.pool], self.scaling.pools[action.pool].role
        while len(its) > action.replicas:
            name = next((name for name, role in its.items() if role == home), next(iter(its)))
            del its[name]
            self.scaling.forget(name)
        while len(its) < action.replicas:
            its[f"{action.pool}-{self.now:.0f}.{len(its)}"] = home

    def live(self, name: str, role: Role) -> LiveProfile:
        streams = (0, -(-self.streams.get(role, 0) // self.count(role)), 0)
        return quiet(int(self.now), role=role, streams=streams, done_seconds=self.done[name])


def mixed(least: int, most: int) -> Bounds:
    return Bounds("mixed", least, most)


def test_demand_is_a_share_of_a_replicas_time() -> None:
    its = profile()
    assert demand(its, quiet(), 0.0) == 0.0
    assert demand(its, quiet(), 0.4) == 0.4
    waiting = quiet(prompts=(Prompts(0, 3, 1, 500, 0.25), Prompts(1, 4, 1, 4000, 5.0)))
    assert demand(its, waiting, 0.0) == 0.25 / 1.0 + 5.0 / 10.0  # the classes' times to a first token
    decoding = quiet(streams=(0, 8, 30), context_tokens=10_000)
    roomy = profile(max_num_seqs=1000)
    assert demand(roomy, decoding, 0.0) == pytest.approx((COST.base + COST.decode_seconds(38, 10_000)) / 0.1)
    assert demand(its, decoding, 0.0) == 38 / 64  # its places, which are more
    assert demand(its, replace(quiet(), free_pages=(4000, 1500, 1000)), 0.0) == 0.75


def test_a_slower_cost_is_believed_once_it_is_said() -> None:
    decoding = quiet(streams=(1, 0, 0))
    roomy = profile(max_num_seqs=1000)
    slower = replace(decoding, cost=tuple(5 * it for it in COST.coefficients))
    assert demand(roomy, slower, 0.0) == pytest.approx(5 * demand(roomy, decoding, 0.0))


def test_a_pool_grows_after_a_while_and_shrinks_after_a_longer_one() -> None:
    pools = Pools(mixed=mixed(1, 10))
    pools.load["mixed"] = 0.4
    assert not pools.pass_(20)
    pools.load["mixed"] = 1.9
    assert not pools.pass_(3)
    pools.pass_(30)
    assert pools.size("mixed") == 4  # at half their time each
    assert not pools.pass_(30)
    pools.load["mixed"] = 0.0
    assert not pools.pass_(5)
    pools.pass_(60)
    assert pools.size("mixed") == 1


def test_a_moment_of_demand_changes_nothing() -> None:
    pools = Pools(mixed=mixed(2, 10))
    for _ in range(10):
        pools.load["mixed"] = 9.0
        assert not pools.pass_(3)
        pools.load["mixed"] = 0.3
        assert not pools.pass_(2)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 20), st.integers(0, 3), st.integers(1, 12))
def test_under_a_steady_load_it_comes_to_rest_within_bounds(load: float, least: int, more: int) -> None:
    pools = Pools(mixed=mixed(least + 1, least + 1 + more))
    pools.load["mixed"] = load
    pools.pass_(200)
    assert not pools.pass_(100)
    wanted = min(max(load / CONFIG.utilisation, least + 1), least + 1 + more)
    assert wanted - 1e-6 <= pools.size("mixed") <= wanted / 0.85 + 1


def test_each_pool_follows_the_demand_for_its_role() -> None:
    pools = Pools(prefill=Bounds("prefill", 1, 20), decode=Bounds("decode", 1, 20))
    pools.load["prefill"], pools.streams["decode"] = 2.4, 320
    pools.pass_(100)
    assert pools.size("prefill") == 5
    assert pools.size("decode") == 10  # 320 streams in 64 places each, half of them
    pools.load["prefill"], pools.streams["decode"] = 4.9, 50
    pools.pass_(200)
    assert (pools.size("prefill"), pools.size("decode")) == (10, 2)


def test_a_pool_of_fixed_size_is_left_alone() -> None:
    pools = Pools(mixed=mixed(2, 2))
    pools.load["mixed"] = 50.0
    assert not pools.pass_(100)


def test_roles_flip_where_pools_cannot_grow_and_back() -> None:
    config = CONFIG.model_copy(update={"flip_roles": True})
    pools = Pools(config, prefill=Bounds("prefill", 3, 3), decode=Bounds("decode", 3, 3))
    pools.load["prefill"], pools.streams["decode"] = 0.2, 90
    assert not pools.pass_(50)
    pools.load["prefill"], pools.streams["decode"] = 2.4, 5
    changed = pools.pass_(100)
    assert [(type(it), it.role) for it in changed if isinstance(it, Flip)] == [(Flip, "prefill")] * 2
    assert (pools.count("prefill"), pools.count("decode")) == (5, 1)
    pools.load["prefill"], pools.streams["decode"] = 0.3, 90
    changed = pools.pass_(100)
    assert {it.replica.split("-")[0] for it in changed if isinstance(it, Flip)} == {"decode"}  # those come home
    assert (pools.count("prefill"), pools.count("decode")) == (3, 3)


def test_nobody_flips_the_last_of_a_role_or_where_pools_can_grow() -> None:
    config = CONFIG.model_copy(update={"flip_roles": True})
    pools = Pools(config, prefill=Bounds("prefill", 1, 1), decode=Bounds("decode", 1, 1))
    pools.load["prefill"] = 5.0
    assert not pools.pass_(50)
    pools = Pools(config, prefill=Bounds("prefill", 1, 9), decode=Bounds("decode", 3, 3))
    pools.load["prefill"] = 2.0
    assert all(isinstance(it, Resize) for it in pools.pass_(50))
    assert pools.size("prefill") == 4


def test_a_new_incarnation_begins_its_count_anew() -> None:
    scaling = Scaling(CONFIG, {"mixed": mixed(1, 9)})
    scaling.hear("a", "mixed", profile(), quiet(1, "one", done_seconds=1000.0), 0.0)
    scaling.hear("a", "mixed", profile(), quiet(1, "two", done_seconds=0.0), 1.0)
    scaling.hear("a", "mixed", profile(), quiet(2, "two", done_seconds=0.1), 2.0)
    assert not scaling.decide(2.0)
    assert not scaling.decide(10.0)


def test_a_scaler_that_is_restarted_goes_on_from_what_it_finds() -> None:
    pools = Pools(mixed=mixed(1, 9))
    pools.load["mixed"] = 2.9
    pools.pass_(30)
    assert pools.size("mixed") == 6
    pools.scaling = Scaling(CONFIG, pools.scaling.pools)
    pools.load["mixed"] = 0.0
    pools.pass_(60)
    assert pools.size("mixed") == 1
