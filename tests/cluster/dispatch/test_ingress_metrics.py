"""The metrics of a deployment as one text."""

from crossdock.cluster.dispatch.ingress_metrics import IngressMetrics, merge_metrics
from crossdock.router.placement import Placement


def test_placements_count_by_their_reason() -> None:
    metrics = IngressMetrics()
    for placement in (
        Placement("m", reason="local"),
        Placement("d", "p", reason="shipped"),
        Placement("m", reason="local"),
    ):
        metrics.placed(placement)
    assert 'crossdock_router_decisions_total{reason="local"} 2.0' in metrics.text()


def test_merged_metrics_describe_each_family_once() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b B.\n# TYPE b counter\nb{x="y"} 2.0\n'
    assert merge_metrics({"r1": text, "r2": text}, "replica") == (
        '# HELP a A.\n# TYPE a gauge\na{replica="r1"} 1.0\na{replica="r2"} 1.0\n'
        '# HELP b B.\n# TYPE b counter\nb{x="y",replica="r1"} 2.0\nb{x="y",replica="r2"} 2.0\n'
    )
