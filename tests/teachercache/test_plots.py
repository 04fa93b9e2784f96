"""Axes say where they are: a label is at the height or place of its value."""

from __future__ import annotations

import numpy as np
import pytest

from teachercache.views.plots import calibration, histogram, median


def texts(figure) -> list[tuple[float, float, str]]:
    return [(float(n.get("x")), float(n.get("y")), n.text) for n in figure.iter("text") if n.get("x")]


def heights(figure) -> dict[str, float]:
    """Return the height of the grid line of each label in per cent."""
    lines = {float(n.get("y1")) for n in figure.iter("line") if n.get("class") == "grid"}
    found = {text: y - 4 for _, y, text in texts(figure) if text.endswith("%")}
    assert sorted(found.values()) == pytest.approx(sorted(lines))
    return found


@pytest.mark.parametrize("top", [0.055, 0.3, 0.97])
def test_labels_of_shares_are_at_their_share(top):
    values = np.concatenate([np.full(round(1000 * top), 0.5), np.linspace(0, 1, 1000 - round(1000 * top))])
    figure = histogram(values, np.ones(1000), "title", "nats", high=1.0)
    bars = [(float(n.get("height")), n[0].text) for n in figure.iter("rect")]
    tallest, said = max(bars)
    share = float(said.split(": ")[1].rstrip("%"))
    places = heights(figure)
    for label, y in places.items():
        assert (places["0%"] - y) / tallest == pytest.approx(float(label.rstrip("%")) / share, abs=0.02)
    assert len(places) >= 3


def test_the_dashed_line_is_the_weighted_median_and_its_label_too():
    values, weights = np.array([1.0, 2.0, 9.0]), np.array([1.0, 1.0, 5.0])
    assert median(values, weights) == 9.0
    figure = histogram(values, weights, "title", "nats", high=10.0)
    (line,) = (n for n in figure.iter("line") if n.get("class") == "median")
    places = {text: x for x, _, text in texts(figure) if not text.endswith("%") and text != "nats"}
    assert float(line.get("x1")) == pytest.approx(places["8"] + (places["10"] - places["8"]) / 2, abs=0.2)
    assert "median 9 nats" in "".join(figure.itertext())


def test_a_calibrated_teacher_lies_on_the_diagonal():
    figure = calibration([(0.1, 0.1, 5), (0.9, 0.9, 5)], 0.0)
    (even,) = (n for n in figure.iter("line") if n.get("class") == "even")
    x1, y1, x2, y2 = (float(even.get(name)) for name in ("x1", "y1", "x2", "y2"))
    for dot in figure.iter("circle"):
        x, y = float(dot.get("cx")), float(dot.get("cy"))
        assert (x - x1) / (x2 - x1) == pytest.approx((y - y1) / (y2 - y1), abs=0.01)
