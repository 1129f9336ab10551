"""The script that times decisions of the router, among replicas under load."""

from types import ModuleType

from tests.benchmarks.scripts import script

router = script("routing/router")


def test_decisions_are_timed_among_replicas_of_each_kind(router: ModuleType) -> None:
    for roles, cached in ((("mixed",), "tiers"), (("prefill", "decode"), "")):
        assert "µs" in router.decisions(2, roles, "seconds", 3, cached)
