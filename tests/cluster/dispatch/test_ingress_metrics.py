"""The metrics of a deployment as one text."""

from crossdock.cluster.dispatch.ingress_metrics import IngressMetrics, merge_metrics
from crossdock.router.placement import Placement
from crossdock.workers.schedule.pictures.items import Item
from crossdock.workers.schedule.submission import SamplingParams, Submission


def test_placements_of_requests_with_pictures_count_by_who_encodes() -> None:
    metrics = IngressMetrics()
    picture = Submission("p", [1, 2, 3], SamplingParams(), items=[Item(1, 1, 1, "image", b"hash", {})])
    placements = [
        (picture, Placement("m", reason="local")),
        (picture, Placement("d", "p", reason="shipped")),
        (picture, Placement("d", "p", "e", reason="shipped")),
        (picture, Placement("m", encoder="e", reason="local")),
        (Submission("t", [1, 2, 3], SamplingParams()), Placement("m", reason="local")),
    ]
    for submission, placement in placements:
        metrics.placed(submission, placement)
    text = metrics.text()
    for role, count in (("mixed", 1), ("prefill", 1), ("encode", 2)):
        assert f'crossdock_router_encodings_total{{role="{role}"}} {count}.0' in text
    assert 'crossdock_router_decisions_total{reason="local"} 3.0' in text


def test_merged_metrics_describe_each_family_once() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b B.\n# TYPE b counter\nb{x="y"} 2.0\n'
    assert merge_metrics({"r1": text, "r2": text}, "replica") == (
        '# HELP a A.\n# TYPE a gauge\na{replica="r1"} 1.0\na{replica="r2"} 1.0\n'
        '# HELP b B.\n# TYPE b counter\nb{x="y",replica="r1"} 2.0\nb{x="y",replica="r2"} 2.0\n'
    )
