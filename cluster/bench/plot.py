"""Plots of the trade-off between TTFT and TPOT as SVG, for `crossdock bench`, `simulate` and `tune`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from crossdock.cluster.bench.metrics import Sample, Targets

Point = tuple[float, float]
"""TTFT in seconds and TPOT in milliseconds."""

_WIDTH = 860
_HEIGHT = 540
# The legend has room for three rows.
_LEFT = 74
_RIGHT = 24
_TOP = 98
_BOTTOM = 58
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # by Okabe and Ito
_MOST_POINTS = 2000  # of a series: a file of 200 kB
_LEGEND_COLUMN = 180  # pixels
_NEAR = 5.0  # times the largest value: a target beyond that would press all points into a corner
_X_NAME = "TTFT, seconds (log scale)"
_Y_NAME = "TPOT, milliseconds per token (log scale)"


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour. `labels`: a text beside each; empty: none. `target`: the largest TTFT
    and TPOT that keep a promise, drawn as a rectangle."""

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    is_line: bool = False
    target: Point | None = None


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis from `low` to `high`, drawn from pixel `begin` to pixel `end`."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> "_Axis":
        low = min(values)
        high = max(values)
        room = max((high / low) ** 0.06, 1.25 if high < 1.5 * low else 1.1)
        return cls(low / room, high * room, begin, end)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = log10(value / self.low) / log10(self.high / self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> Iterator[float]:
        """Yield round values, four or more where the axis has less than two decades."""
        decades = log10(self.high / self.low)
        steps: Sequence[float] = (1,) if decades > 3 else (1, 2, 5) if decades > 1 else (1, 1.5, 2, 3, 5, 7)
        if decades < 0.5:
            steps = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
        for exponent in range(floor(log10(self.low)), ceil(log10(self.high)) + 1):
            for step in steps:
                value = float(f"{step}e{exponent}")
                if self.low <= value <= self.high:
                    yield value


def check_plot_file(file: Path | None) -> None:
    """Raise ValueError if no plot can be written to the file later."""
    if file is None:
        return
    if file.suffix != ".svg":
        raise ValueError(f"plot: {str(file)!r} must end in .svg, the format of plots")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"plot: there is no directory {file.absolute().parent}")


def series_of_samples(samples: "Sequence[Sample]", targets: "Targets") -> list[Series]:
    """Return a point for each request that had two tokens or more, by SLO class, or by role where none was asked."""
    names = dict.fromkeys(sample.service_tier or sample.role for sample in samples)
    found = []
    for name in names:
        own = [sample for sample in samples if sample.ok and (sample.service_tier or sample.role) == name]
        points = [(sample.ttft, sample.tpot * 1e3) for sample in own if sample.tpot is not None]
        limits = targets.get(name, {})
        has_target = limits.keys() >= {"ttft", "tpot"}
        target = (limits["ttft"], limits["tpot"] * 1e3) if has_target else None
        found.append(Series(f"{name}: {len(points)} requests", points, target=target))
    return found


def plot(title: str, subtitle: str, series: Sequence[Series]) -> str:
    """Return the plot as the text of an SVG file.

    Raises:
        ValueError: no series has a point.
    """
    shown = [_drawable(each) for each in series]
    points = [point for each in shown for point in each.points]
    targets = [each.target for each in shown if each.target is not None]
    if not points:
        raise ValueError("plot: no request has a first token and a second one, so that there is nothing to plot")
    x = _Axis.of(_with_near([point[0] for point in points], [each[0] for each in targets]), _LEFT, _WIDTH - _RIGHT)
    y = _Axis.of(_with_near([point[1] for point in points], [each[1] for each in targets]), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" font-size="17">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="43" fill="#555">{escape(subtitle)}</text>',
        *_axes(x, y),
    ]
    for number, each in enumerate(shown):
        parts += _drawn(each, _COLOURS[number % len(_COLOURS)], x, y)
    parts += _legend([each.name for each in shown])
    return "\n".join([*parts, "</svg>\n"])


def _drawable(series: Series) -> Series:
    """Return the series with the points that a logarithmic axis has, and at most `_MOST_POINTS`, evenly chosen."""
    kept = [place for place, point in enumerate(series.points) if min(point) > 0 and isfinite(max(point))]
    every = ceil(len(kept) / _MOST_POINTS) or 1
    kept = kept[::every]
    labels = [series.labels[place] for place in kept] if series.labels else ()
    name = f"{series.name}, one of {every} shown" if every > 1 else series.name
    return Series(name, [series.points[place] for place in kept], labels, series.is_line, series.target)


def _with_near(values: Sequence[float], targets: Sequence[float]) -> list[float]:
    """Return the values and the targets that are near enough for an axis to show both."""
    return [*values, *(target for target in targets if min(values) / _NEAR < target < max(values) * _NEAR)]


def _axes(x: _Axis, y: _Axis) -> Iterator[str]:
    foot = _HEIGHT - _BOTTOM
    for value in x.ticks():
        at = f"{x.at(value):.1f}"
        yield f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{foot}" stroke="#e2e2e2"/>'
        yield f'<text x="{at}" y="{foot + 18}" text-anchor="middle">{value:g}</text>'
    for value in y.ticks():
        at = f"{y.at(value):.1f}"
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="#e2e2e2"/>'
        yield f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{value:g}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{foot}H{_WIDTH - _RIGHT}" fill="none" stroke="#333"/>'
    middle = (_TOP + foot) / 2
    yield f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 14}" text-anchor="middle">{_X_NAME}</text>'
    yield f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">{_Y_NAME}</text>'


def _drawn(series: Series, colour: str, x: _Axis, y: _Axis) -> Iterator[str]:
    places = [(x.at(ttft), y.at(tpot)) for ttft, tpot in series.points]
    if series.target is not None:
        across = min(max(x.at(series.target[0]), _LEFT), _WIDTH - _RIGHT)
        up = min(max(y.at(series.target[1]), _TOP), _HEIGHT - _BOTTOM)
        path = f"M{_LEFT} {up:.1f}H{across:.1f}V{_HEIGHT - _BOTTOM}"
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-dasharray="5 4"/>'
    if series.is_line:
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    size, opacity = (4, 1) if len(places) <= 50 else (2.5, 0.5)
    for left, top in places:
        yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{size}" fill="{colour}" fill-opacity="{opacity}"/>'
    for (left, top), label in zip(places, series.labels, strict=False):
        is_right = left > 0.75 * _WIDTH
        side = f'x="{left - 7:.1f}" text-anchor="end"' if is_right else f'x="{left + 7:.1f}"'
        yield f'<text {side} y="{top - 6:.1f}" font-size="11" fill="{colour}">{escape(label)}</text>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    """Yield the names of the series in rows of four above the plot; a series without a name has no entry."""
    for number, name in enumerate(names):
        left = _LEFT + number % 4 * _LEGEND_COLUMN
        top = 62 + number // 4 * 14
        if name:
            yield f'<circle cx="{left + 4}" cy="{top - 4}" r="4" fill="{_COLOURS[number % len(_COLOURS)]}"/>'
            yield f'<text x="{left + 13}" y="{top}" font-size="12">{escape(name)}</text>'
