"""Replicas are compared in seconds: what each advertises, times what it still has to do."""

from crossdock.router.placement import Bookings, Placement, choose
from crossdock.workers.profile import Role, SchedulingProfile, StepCost
from crossdock.workers.slo import DEFAULT_CLASSES


def profile(prompt_seconds: float, decode_seconds: float = 0.001, role: Role = "mixed") -> SchedulingProfile:
    return SchedulingProfile(
        max_model_len=8192,
        vocab_size=100,
        page_size=16,
        num_pages=1000,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        slo_classes=DEFAULT_CLASSES,
        role=role,
        cost=StepCost(base=0.0, per_prefill_token=prompt_seconds, per_decode=decode_seconds),
    )


def test_a_fast_replica_with_a_longer_queue_wins() -> None:
    fast, slow = Bookings(), Bookings()
    fast.book("a", 3000)
    slow.book("b", 500)
    assert choose({"fast": (profile(0.0001), fast), "slow": (profile(0.001), slow)}, 1000).decode == "fast"


def test_running_streams_count() -> None:
    busy, idle = Bookings(), Bookings()
    for number in range(50):
        busy.book(f"{number}", 10)
        busy.first_token(f"{number}")
    assert choose({"busy": (profile(0.001, 0.01), busy), "idle": (profile(0.001, 0.01), idle)}, 10).decode == "idle"


def test_bookings_follow_a_request_to_its_end() -> None:
    bookings = Bookings()
    bookings.book("a", 100)
    assert bookings.prompt_tokens == {"a": 100}
    bookings.first_token("a")
    bookings.first_token("a")
    assert (bookings.prompt_tokens, bookings.streams) == ({}, {"a"})
    bookings.settle("a")
    bookings.settle("a")
    bookings.first_token("a")  # a late word of one that has ended
    assert (bookings.prompt_tokens, bookings.streams) == ({}, set())


def test_ties_are_broken_the_same_way_everywhere() -> None:
    candidates = {name: (profile(0.001), Bookings()) for name in ("b", "a", "c")}
    assert choose(candidates, 10).decode == "a"
    assert choose(dict(reversed(candidates.items())), 10).decode == "a"


def test_pools_share_a_request() -> None:
    """The least busy of each; a short prompt, and one that may not be shipped, stay with whoever decodes."""
    busy = Bookings()
    busy.book("a", 3000)
    streaming = Bookings()
    for number in range(9):
        streaming.book(f"{number}", 10)
        streaming.first_token(f"{number}")
    candidates = {
        "p1": (profile(0.001, role="prefill"), busy),
        "p2": (profile(0.001, role="prefill"), Bookings()),
        "d1": (profile(0.001, 0.01, role="decode"), streaming),
        "d2": (profile(0.001, 0.01, role="decode"), Bookings()),
    }
    assert choose(candidates, 100) == Placement("d2", "p2", "pools")
    assert choose(candidates, 15) == Placement("d2", None, "decode alone")
    assert choose(candidates, 100, may_ship=False) == Placement("d2", None, "decode alone")
    del candidates["d1"], candidates["d2"]
    assert choose(candidates, 100) == Placement("p2", None, "prefill alone")
