"""Plots of TTFT against TPOT: where points stand, what axes say, and what each of the three commands draws."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.plot import Series, check_plot_file, plot, series_of_samples
from tests.cluster.watch.terminal import run

SVG = "{http://www.w3.org/2000/svg}"
POINTS = st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-1, 1e5)), min_size=1, max_size=30)


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def dots(svg: str) -> list[tuple[float, float]]:
    """Return the places of points in pixels; those of the legend, above the plot, are left out."""
    circles = [
        (float(node.get("cx", "")), float(node.get("cy", "")))
        for node in ElementTree.fromstring(svg).iter(f"{SVG}circle")
    ]
    return [place for place in circles if place[1] > 97]


@given(POINTS)
def test_points_keep_their_order_on_both_axes_and_stay_inside(points: list[tuple[float, float]]) -> None:
    svg = plot("a <title>", "", [Series("one", points)])
    places = dots(svg)
    assert len(places) == len(points)
    for point, place in zip(points, places, strict=True):
        assert 74 <= place[0] <= 836
        assert 98 <= place[1] <= 482
        for other, elsewhere in zip(points, places, strict=True):
            assert point[0] > other[0] or place[0] <= elsewhere[0]
            assert point[1] > other[1] or place[1] >= elsewhere[1], "a longer TPOT is higher"
    assert "a <title>" in texts(svg)


def test_axes_name_quantities_and_units_and_have_round_values() -> None:
    found = texts(plot("t", "sub", [Series("beside 4", [(0.1, 20), (2, 300)], ["512", "64"], is_line=True)]))
    assert {"TTFT, seconds (log scale)", "TPOT, milliseconds per token (log scale)"} <= set(found)
    assert {"0.1", "0.2", "0.5", "1", "2"} <= set(found)
    assert {"20", "50", "100", "200"} <= set(found), found
    assert {"beside 4", "512", "64", "sub"} <= set(found)


def test_points_that_a_logarithmic_axis_lacks_are_left_out_and_many_are_thinned() -> None:
    assert len(dots(plot("t", "", [Series("a", [(0.0, 1), (1, 1), (2, float("inf")), (3, 4)])]))) == 2
    svg = plot("t", "", [Series("a", [(1 + n, 1 + n) for n in range(5000)])])
    assert len(dots(svg)) == 1667
    assert "a, one of 3 shown" in texts(svg)
    with pytest.raises(ValueError, match="nothing to plot"):
        plot("t", "", [Series("a", [], target=(1, 1))])


def test_series_of_samples_are_classes_with_their_targets() -> None:
    def sample(tier: str | None, times: list[float], error: str | None = None) -> Sample:
        made = Sample("request", 2, 2, 1.0, times, [1] * len(times), error=error)
        made.service_tier = tier
        return made

    found = series_of_samples(
        [sample("fast", [1.5, 1.6]), sample(None, [2.0, 4.0]), sample("fast", [2.0]), sample("fast", [2, 3], "lost")],
        {"fast": {"ttft": 0.4, "tpot": 0.05}, "slow": {"ttft": 1, "tpot": 1}},
    )
    assert [each.name for each in found] == ["fast: 1 requests", "request: 1 requests"]
    assert found[0].points == [(pytest.approx(0.5), pytest.approx(100))]
    assert (found[0].target, found[1].target) == ((0.4, 50), None)


@pytest.mark.parametrize(("file", "complaint"), [("a.png", "must end in .svg"), ("none/a.svg", "no directory")])
@pytest.mark.parametrize("command", ["bench", "simulate", "tune"])
def test_file_that_cannot_be_plotted_to_is_refused_before_the_work(
    command: str, file: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_plot_file(tmp_path / file)
    arguments = {"bench": ["http://127.0.0.1:9"], "simulate": ["--pools", "mixed=1xh100-8b"], "tune": ["/no/model"]}
    result = run(command, *arguments[command], "--plot", str(tmp_path / file))
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


def test_simulate_draws_the_requests_of_a_run_and_the_fleets_of_a_comparison(tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    load = ("--pools", "mixed=2xh100-8b", "--request-rate", "20", "--duration", "3", "--plot", str(file))
    result = run("simulate", *load)
    assert result.exit_code == 0, result.output
    found = texts(file.read_text())
    assert any(text.startswith("interactive: ") for text in found)
    assert len(dots(file.read_text())) > 20
    result = run("simulate", *load, "--policy", "seconds,round-robin")
    assert result.exit_code == 0, result.output
    assert {"seconds", "round-robin"} <= set(texts(file.read_text()))
    assert len(dots(file.read_text())) == 2
