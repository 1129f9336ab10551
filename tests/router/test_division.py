"""The division of devices among pools: within bounds, close to the best there is, and at rest under equal demand."""

from itertools import product
from math import ceil, inf

from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.division import MOVE_MARGIN, Claim, Starts, divide, fits
from crossdock.router.scaling import Bounds, Resize, Scaling, ScalingConfig
from tests.router.test_scaling import Pools

GPU = {"GPU": 1.0}


def claim(size: int, least: int, demand: float, gpus: int = 1) -> Claim:
    return Claim(size, least, max(ceil(demand / 0.7), least), demand, {"GPU": float(gpus)})


@st.composite
def scarce(draw: st.DrawFn) -> tuple[dict[str, Claim], dict[str, float]]:
    """Return claims of two to four pools that fit, and the GPUs of the cluster."""
    size, demand = st.integers(0, 4), st.floats(0, 4)
    drawn = draw(st.lists(st.tuples(size, size, demand, st.sampled_from((1, 1, 2))), min_size=2, max_size=4))
    claims = {f"{i}": claim(max(n, least), min(n, least), load, gpus) for i, (n, least, load, gpus) in enumerate(drawn)}
    used = sum(each.size * each.each["GPU"] for each in claims.values())
    return claims, {"GPU": used + draw(st.integers(0, 2))}


@given(scarce())
def test_division_fits_and_keeps_every_pool_between_its_least_and_what_it_wants(
    case: tuple[dict[str, Claim], dict[str, float]],
) -> None:
    claims, room = case
    sizes = divide(claims, room)
    assert fits(sizes, claims, room)
    for name, each in claims.items():
        assert each.least <= sizes[name] <= max(each.size, each.wanted)


@given(scarce())
def test_division_of_what_was_divided_changes_nothing(case: tuple[dict[str, Claim], dict[str, float]]) -> None:
    claims, room = case
    sizes = divide(claims, room)
    again = {name: Claim(sizes[name], each.least, each.wanted, each.demand, each.each) for name, each in claims.items()}
    assert divide(again, room) == sizes


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 4)), min_size=2, max_size=4), st.integers(0, 2))
def test_pressure_of_a_pool_that_wants_more_is_within_the_margin_of_the_best_division(
    pools: list[tuple[int, float]], spare: int
) -> None:
    """All divisions of the cluster are tried."""
    claims = {f"{i}": claim(size, 1, demand) for i, (size, demand) in enumerate(pools)}
    gpus = sum(size for size, _ in pools) + spare
    sizes = divide(claims, {"GPU": float(gpus)})
    short = [each.pressure(sizes[name]) for name, each in claims.items() if sizes[name] < each.wanted]

    def worst(division: tuple[int, ...]) -> float:
        return max(each.pressure(size) for each, size in zip(claims.values(), division, strict=True))

    every = product(range(1, gpus + 1), repeat=len(pools))
    best = min((worst(division) for division in every if sum(division) <= gpus), default=inf)
    assert not short or max(short) * MOVE_MARGIN <= best + 1e-9


def test_pool_of_two_gpus_gets_the_place_of_two_small_replicas_with_less_to_do() -> None:
    claims = {"small": claim(3, 1, 0.3), "large": claim(1, 1, 3.0, gpus=2)}
    assert divide(claims, {"GPU": 5.0}) == {"small": 1, "large": 2}


# -- models ------------------------------------------------------------------------------------------------------------

CONFIG = ScalingConfig(utilisation=0.5, interval_s=1.0, up_delay_s=3.0, down_delay_s=50.0, zero_after_s=20.0)


class Two(Pools):
    """Two models that divide the GPUs of a cluster."""

    start_s = 4

    def __init__(self, least: int, sizes: tuple[int, int], room: int = 2) -> None:
        self.room = room
        super().__init__(CONFIG, **{name: Bounds("mixed", least, 2, name, GPU) for name in "ab"})
        for name, size in zip("ab", sizes, strict=True):
            self.roles[name] = {f"{name}{number}": "mixed" for number in range(size)}
        self.scaling = Scaling(CONFIG, self.scaling.pools, dict(zip("ab", sizes, strict=True)), {"GPU": float(room)})

    def resized_in(self, seconds: int) -> list[tuple[str, int]]:
        """Let time pass. Return the new sizes that were decided meanwhile."""
        log = [(each.pool, each.replicas) for each in self.run(seconds) if isinstance(each, Resize)]
        assert self.size("a") + self.size("b") <= self.room
        return log


def test_two_models_change_places_by_demand_and_back() -> None:
    two = Two(0, (2, 0))
    two.load["a"] = 0.9
    assert two.resized_in(30) == [], "the model that works keeps both"
    two.load["a"] = 0.0
    two.scaling.ask("b", two.now)
    assert two.resized_in(8) == [("a", 1), ("b", 1)]
    two.load["b"] = 0.9
    assert two.resized_in(12) == [("a", 0), ("b", 2)]
    two.load |= {"a": 0.0, "b": 0.1}
    two.scaling.ask("a", two.now)
    assert two.resized_in(8) == [("b", 1), ("a", 1)]


def test_models_with_least_replicas_keep_them_however_others_are_pressed() -> None:
    two = Two(1, (1, 1))
    two.load["a"] = 5.0
    assert two.resized_in(60) == []


def test_model_without_work_has_no_replica_after_its_idle_time_and_one_at_a_request() -> None:
    two = Two(0, (2, 0))
    log = two.resized_in(60)
    assert log == [("a", 0)]
    assert two.size("a") == two.size("b") == 0
    assert two.resized_in(30) == [], "no request, no start"
    two.scaling.ask("a", two.now)
    assert two.resized_in(10) == [("a", 1)]
    assert two.size("a") == 1
    two.load["a"] = 0.4
    assert two.resized_in(60) == [], "a replica that works stays"


def test_silent_replica_of_one_model_does_not_keep_the_others_pools_large() -> None:
    two = Two(1, (2, 1), room=3)
    two.silent = {"b0"}
    assert two.resized_in(60) == [("a", 1)]


# -- starts ------------------------------------------------------------------------------------------------------------


def test_start_is_predicted_from_earlier_starts_and_counted_down() -> None:
    starts = Starts({"a": 30.0})
    assert starts.remaining("a", 0.0) == 30.0
    starts.begin("a", 100.0)
    assert starts.remaining("a", 110.0) == 20.0
    assert starts.remaining("a", 150.0) == 3.0, "late: soon, but not at once"
    assert starts.end("a", 112.0) == 12.0
    assert starts.end("a", 113.0) is None
    assert starts.remaining("a", 200.0) == 12.0
    starts.begin("a", 200.0)
    starts.end("a", 208.0)
    assert starts.remaining("a", 300.0) == 10.0
