"""The curves of a run as one figure. It needs matplotlib, so nothing imports this module before a plot is asked for."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Plot(Figure):
    """A figure that a notebook shows, whatever matplotlib's backend is."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def draw_curves(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Plot:
    """Draw (step, value) of each curve beside each other."""
    figure = Plot(figsize=(4.5 * len(curves), 3), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None)
        axes.set(xlabel="step", ylabel=name)
        axes.grid(alpha=0.3)
    return figure
