"""Plots as inline SVG, in the page's colours: a histogram and a calibration curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt

from teachercache.views.page import tag

Floats = npt.NDArray[np.floating]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 220, 56, 12, 10, 42  # SVG units
BINS = 40


def median(values: Floats, weights: Floats) -> float:
    """Return the value below which half of the weight lies."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def histogram(
    values: Floats, weights: Floats, title: str, unit: str, *, low: float = 0.0, high: float | None = None
) -> Element:
    """Draw the weighted shares of values [N]. Without `high`, the last bin holds all beyond the 99.5th percentile."""
    middle = median(values, weights)
    high = float(np.quantile(values, 0.995)) if high is None else high
    high = high if high > low else low + 1.0
    counts, edges = np.histogram(np.clip(values, low, high), bins=BINS, range=(low, high), weights=weights)
    share = counts / counts.sum()
    top = float(share.max())
    x, y, frame = _axes((low, high), (0.0, top), unit, "share of rows" if unit != "tokens" else "share of records")
    bars = []
    for value, a, b in zip(share.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        box = {"x": f"{x(a):.1f}", "y": f"{y(value):.1f}", "height": f"{y(0) - y(value):.1f}"}
        width = f"{max(x(b) - x(a) - 1, 0.5):.1f}"
        said = tag("title", f"{a:.3g} to {b:.3g} {unit}: {value:.1%}")
        bars.append(tag("rect", said, class_="bar", width=width, **box))
    at = f"{x(min(max(middle, low), high)):.1f}"
    line = tag("line", class_="median", x1=at, x2=at, y1=TOP, y2=f"{y(0):.1f}")
    return _figure(
        title, f"median {middle:.3g}{'' if unit == 'probability' else f' {unit}'}, dashed", [*frame, *bars, line]
    )


def calibration(points: Sequence[tuple[float, float, int]], error: float) -> Element:
    """Draw (mean probability of the best token, share of rows where it followed, rows) of each bin against the diagonal."""
    x, y, frame = _axes((0.0, 1.0), (0.0, 1.0), "probability of the best token", "it followed")
    even = tag("line", class_="even", x1=f"{x(0)}", y1=f"{y(0)}", x2=f"{x(1)}", y2=f"{y(1)}")
    curve = tag("polyline", class_="curve", points=" ".join(f"{x(p):.1f},{y(hit):.1f}" for p, hit, _ in points))
    dots = [
        tag(
            "circle", tag("title", f"probability {p:.2f}: followed in {hit:.1%} of {rows:,} rows"),
            class_="dot", cx=f"{x(p):.1f}", cy=f"{y(hit):.1f}", r=4,
        )
        for p, hit, rows in points
    ]  # fmt: skip
    return _figure("Calibration", f"{error:.1%} from the diagonal on average", [*frame, even, curve, *dots])


def _axes(
    across: tuple[float, float], up: tuple[float, float], name: str, side: str
) -> tuple[Callable[[float], float], Callable[[float], float], list[Element]]:
    """Return the two scales, and the grid with its labels: those of the left side are per cent."""

    def x(value: float) -> float:
        return LEFT + (value - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - up[0]) / (up[1] - up[0]) * (HEIGHT - TOP - BOTTOM)

    frame = []
    for tick in _ticks(*up):
        at = f"{y(tick):.1f}"
        frame.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at))
        frame.append(tag("text", f"{100 * tick:g}%", x=LEFT - 6, y=f"{y(tick) + 4:.1f}", text_anchor="end"))
    for tick in _ticks(*across):
        frame.append(tag("text", f"{tick:,g}", x=f"{x(tick):.1f}", y=HEIGHT - BOTTOM + 17, text_anchor="middle"))
    turned = f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
    frame.append(tag("text", side, transform=turned, text_anchor="middle"))
    frame.append(tag("text", name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 5, text_anchor="middle"))
    return x, y, frame


def _ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers in [low, high]."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _figure(title: str, said: str, shapes: list[Element]) -> Element:
    picture = tag("svg", *shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title}: {said}")
    return tag("figure", tag("figcaption", title, tag("span", said)), picture)
