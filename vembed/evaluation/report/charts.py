"""Draw curves as inline SVG that takes its colours from the page, so that one drawing serves light and dark.

matplotlib draws in placeholder colours; each is then replaced by a CSS variable of the page. Nothing that a user wrote
enters a drawing: titles and names stand in the HTML around it.
"""

from __future__ import annotations

import io
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from vembed.evaluation.text import MINUS, number_text, signed_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Locator
    from numpy.typing import NDArray

    from vembed.evaluation.report.comparison import MetricRow
    from vembed.evaluation.report.curves import Curve
    from vembed.evaluation.report.ranks import ScoreSplit
    from vembed.evaluation.report.time_split import TimeSplit

INK, LINE, SERIES, BETTER, WORSE = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
OTHER_SERIES = ("#0a0b06", "#0a0b07", "#0a0b08")
"""Further series of one drawing; the page that holds it gives them their colours."""

PAGE_COLOURS = {
    INK: "currentColor",
    LINE: "var(--line)",
    SERIES: "var(--series)",
    BETTER: "var(--better)",
    WORSE: "var(--worse)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(OTHER_SERIES, start=2)},
}
CURVE_INCHES, LARGE_INCHES, HISTOGRAM_INCHES, SPLIT_INCHES = (3.9, 2.1), (5.2, 2.8), (5.2, 2.5), (5.2, 3.2)
"""Width and height, such that labels are about as large as small print where the drawing stands."""

LOG_RANGE = 50.0
"""Ratio of highest to lowest value from which a positive curve gets a logarithmic axis."""

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vembed",
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "figure.facecolor": "none",
    "lines.linewidth": 1.6,
}

FEW_POINTS = 3
"""Points up to which a curve is drawn as dots alone: a line through them would look like a trend."""

MAX_MARKS = 40
"""Most points of a curve that each have a mark."""

BARS = 40
"""Bars of the histogram over the whole range."""

RECALL_TICKS = (1, 2, 5, 10, 20, 50, 100)


def draw_curve(
    curve: Curve,
    *,
    name: str,
    label: str,
    marked_step: int | None = None,
    is_metric: bool = False,
    is_large: bool = False,
) -> Markup:
    """Draw one curve over the steps.

    Args:
        name: Prefix of the ids in the drawing: a word of ours, another one for each drawing of a page.
        label: What a screen reader says in place of the drawing.
        marked_step: Step of a point that gets a large mark and a line down to its step.
        is_metric: Values lie between 0 and 1 and are few: each gets a mark, and the axis is linear from 0.
    """
    with chart_axes(LARGE_INCHES if is_large else CURVE_INCHES) as (figure, axes):
        values_N = curve.values_N / curve.spec.divisor
        is_few = len(values_N) <= FEW_POINTS
        faint = curve.mean_N is not None
        axes.plot(
            curve.steps_N,
            values_N,
            color=SERIES,
            alpha=0.35 if faint else 1.0,
            linewidth=0.9 if faint else 1.6,
            linestyle="" if is_few else "-",
            marker="o" if is_few or (is_metric and len(values_N) <= MAX_MARKS) else "",
            markersize=4.0,
            clip_on=False,
        )
        if curve.mean_N is not None:
            axes.plot(curve.steps_N, curve.mean_N / curve.spec.divisor, color=SERIES, clip_on=False)
        if marked_step is not None and len(values_N) > 1:
            value = values_N[curve.steps_N == marked_step][0]
            axes.axvline(marked_step, color=BETTER, linewidth=1.0, linestyle=(0, (3, 3)))
            axes.plot(marked_step, value, color=BETTER, marker="o", markersize=7.5, clip_on=False)
        if is_metric:
            set_ticks(axes.yaxis, MaxNLocator(4))
            axes.set_ylim(bottom=min(0.0, float(values_N.min())))
        else:
            scale_axis(axes, values_N)
        _step_axis(axes)
        return inline_svg(figure, name=name, label=label)


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("step")
    set_ticks(axes.xaxis, MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))


def set_ticks(axis: Axis, locator: Locator) -> None:
    """Put ticks where the locator says, labelled in our way."""
    axis.set_major_locator(locator)
    axis.set_major_formatter(AxisTicks())


def scale_axis(axes: Axes, values_N: np.ndarray) -> None:
    """Choose a logarithmic axis for positive values of a wide range; give a constant curve some room."""
    low, high = float(values_N.min()), float(values_N.max())
    if low > 0 and high / low > LOG_RANGE and len(values_N) > 2:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(tick_text))
    else:
        set_ticks(axes.yaxis, MaxNLocator(4))
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            room = abs(high) * 0.5 or 1.0
            axes.set_ylim(low - room, high + room)


def tick_text(value: float, _: int | None = None) -> str:
    """Return the label of a tick of a logarithmic axis."""
    return number_text(float(f"{value:.10g}"))


class AxisTicks(Formatter):
    """Labels of one axis in one form: all as powers of ten where one would be, with the same decimals."""

    def __call__(self, value: float, _: int | None = None) -> str:
        """Return the label of a tick that stands alone."""
        return tick_text(value)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the labels of all ticks."""
        shown = [float(f"{value:.10g}") for value in values]
        sizes = [abs(value) for value in shown if value]
        if not sizes:
            return ["0"] * len(shown)
        exponent = math.floor(math.log10(max(sizes)))
        if exponent < -3 or exponent > 6:
            mantissas = _alike([value / 10.0**exponent for value in shown])
            return [
                f"{text}e{exponent}".replace("-", MINUS) if value else "0"
                for text, value in zip(mantissas, shown, strict=True)
            ]
        return [text.replace("-", MINUS) for text in _alike(shown)]


def _alike(values: Sequence[float]) -> list[str]:
    """Return numbers with as many decimals as the one that needs most of them, at most 4; 0 has none."""
    decimals = max(len(f"{value:.4f}".rstrip("0").partition(".")[2]) for value in values)
    return [f"{value:,.{decimals}f}" if value else "0" for value in values]


def draw_histogram(gains: Sequence[float], *, label: str) -> Markup:
    """Draw how many queries changed by how much; queries that didn't change are left out.

    At least one of the gains, final minus baseline of each query, must not be 0.
    """
    changed_N = np.array([gain for gain in gains if gain], dtype=np.float64)
    reach = float(np.abs(changed_N).max())
    edges = np.linspace(-reach, reach, BARS + 1)
    counts, _ = np.histogram(changed_N, bins=edges)
    with chart_axes(HISTOGRAM_INCHES) as (figure, axes):
        width = edges[1] - edges[0]
        half = BARS // 2
        axes.bar(edges[:half], counts[:half], width * 0.86, align="edge", color=WORSE, linewidth=0)
        axes.bar(edges[half:-1] + width * 0.14, counts[half:], width * 0.86, align="edge", color=BETTER, linewidth=0)
        axes.axvline(0.0, color=INK, linewidth=0.8)
        axes.set(xlim=(-reach * 1.03, reach * 1.03), xlabel="final minus baseline", ylabel="queries")
        axes.xaxis.set_major_locator(MaxNLocator(5, symmetric=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_text(value, 2)))
        set_ticks(axes.yaxis, MaxNLocator(4, integer=True))
        return inline_svg(figure, name="histogram", label=label)


def draw_recall(recalls_K: Mapping[str, NDArray[np.float64]], *, name: str, label: str) -> Markup:
    """Draw recall over the cut-off, one line for each system, told apart by dashes as well as by colour."""
    looks = {"final": (SERIES, "-", 2.0), "baseline": (INK, "--", 1.4), "BM25": (INK, ":", 1.6)}
    with chart_axes(CURVE_INCHES) as (figure, axes):
        count = max(map(len, recalls_K.values()))
        for system in sorted(recalls_K, key=list(looks).index):
            colour, dashes, width = looks[system]
            (line,) = axes.plot(np.arange(1, count + 1), recalls_K[system], dashes, label=system)
            line.set(color=colour, linewidth=width, marker="o" if count == 1 else "")
        axes.set_xscale("log")
        axes.set_xticks([cut for cut in RECALL_TICKS if cut <= count])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(AxisTicks())
        axes.set(ylim=(0.0, 1.03), xlabel="k, documents looked at")
        set_ticks(axes.yaxis, FixedLocator([0.0, 0.25, 0.5, 0.75, 1.0]))
        axes.legend(loc="best")
        return inline_svg(figure, name=name, label=label)


def draw_scores(split: ScoreSplit, *, reach: tuple[float, float], label: str) -> Markup:
    """Draw how the scores of relevant documents and of the others are spread, each as shares of its own group.

    Args:
        split: The scores, at least one of them.
        reach: Lowest and highest score of the axis, the same for every drawing that is compared.
    """
    low, high = reach if reach[1] > reach[0] else (reach[0] - 0.5, reach[1] + 0.5)
    edges = np.linspace(low, high, BARS + 1)
    with chart_axes(CURVE_INCHES) as (figure, axes):
        for scores, name in ((split.relevant, "relevant"), (split.others, "others")):
            if not len(scores):
                continue
            shares = 100 * np.histogram(scores, bins=edges)[0] / len(scores)
            if name == "relevant":
                axes.stairs(shares, edges, fill=True, color=BETTER, alpha=0.75, label=name)
            else:
                axes.stairs(shares, edges, color=WORSE, linewidth=1.6, linestyle="-", label=name)
        axes.set_ylim(bottom=0.0)
        axes.set(xlim=(low, high), xlabel="score", ylabel="% of the group")
        set_ticks(axes.xaxis, MaxNLocator(6))
        set_ticks(axes.yaxis, MaxNLocator(4))
        axes.legend(loc="best")
        return inline_svg(figure, name=f"scores-{split.label}", label=label)


PART_LOOKS = {
    "data_seconds": (WORSE, 0.85),
    "encode_seconds": (SERIES, 0.9),
    "wait_seconds": (INK, 0.65),
    "loss_seconds": (SERIES, 0.45),
    "reduce_seconds": (BETTER, 0.85),
    "update_seconds": (BETTER, 0.4),
    "": (INK, 0.2),
}
"""Colour and opacity of each part of a step."""


def draw_time_split(split: TimeSplit, *, label: str) -> Markup:
    """Draw the seconds of a step, its parts one on the other, over the steps."""
    with chart_axes(SPLIT_INCHES) as (figure, axes):
        steps_N = split.steps_N
        width = float(steps_N[1] - steps_N[0]) if len(steps_N) > 1 else 1.0
        below_N = np.zeros(len(steps_N))
        for part in split.parts:
            colour, alpha = PART_LOOKS[part.key]
            bars = axes.bar(steps_N, part.course_N, width, bottom=below_N, color=colour, linewidth=0, label=part.name)
            for bar in bars:
                bar.set_alpha(alpha)
            below_N = below_N + part.course_N
        axes.set(xlim=(float(steps_N[0]) - width / 2, float(steps_N[-1]) + width / 2), ylabel="seconds")
        _step_axis(axes)
        set_ticks(axes.yaxis, MaxNLocator(4))
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=2)
        return inline_svg(figure, name="time", label=label)


@contextmanager
def chart_axes(inches: tuple[float, float]) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure with one pair of axes in our settings, whatever the user's own matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(SETTINGS)
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def inline_svg(figure: Figure, *, name: str, label: str) -> Markup:
    """Return the figure as an inline element: no size, no metadata, page colours, ids of its own.

    Its style sheet goes too: inside a page it would match every element of the page.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = buffer.getvalue()
    drawing = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", drawing[drawing.index("<svg") :], flags=re.DOTALL
    )
    opening, body = drawing.split(">", 1)
    view_box = re.search(r'viewBox="([^"]+)"', opening)
    assert view_box is not None
    body = body.rsplit("</svg>", 1)[0].replace("xlink:href", "href")
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    for placeholder, colour in PAGE_COLOURS.items():
        body = body.replace(placeholder, colour)
    body = re.sub(r"\n\s*", "\n", body)
    drawn = Markup(body)  # noqa: S704  # matplotlib's, of our own words and numbers
    return Markup('<svg viewBox="{}" role="img" aria-label="{}" class="chart">{}</svg>').format(
        view_box.group(1), label, drawn
    )


def draw_interval(row: MetricRow, *, reach: float) -> Markup:
    """Draw the interval of a difference as a bar around zero; the numbers stand beside it, so it is decoration.

    Args:
        row: The metric; without a finite interval only the zero line is drawn.
        reach: Difference at the right end of the drawing; minus it at the left.
    """
    marks = Markup('<path d="M4 5v6M4 8h92M96 5v6" class="scale"></path>')
    marks += Markup('<line x1="50" x2="50" y1="1" y2="15" class="zero"></line>')
    if row.verdict is not None and reach > 0:
        comparison = row.verdict.comparison
        low, middle, high = (
            50 + 46 * value / reach for value in (comparison.low, comparison.difference, comparison.high)
        )
        if all(math.isfinite(place) for place in (low, middle, high)):
            marks += Markup('<line x1="{:.2f}" x2="{:.2f}" y1="8" y2="8" class="span"></line>').format(low, high)
            marks += Markup('<circle cx="{:.2f}" cy="8" r="3.2"></circle>').format(middle)
    word = row.verdict.word.replace(" ", "-") if row.verdict else "none"
    return Markup('<svg viewBox="0 0 100 16" class="interval {}" aria-hidden="true">{}</svg>').format(word, marks)


def draw_shares(counts: Mapping[str, int], *, label: str) -> Markup:
    """Draw the count of each class as a part of one bar."""
    total = sum(counts.values())
    parts, start = Markup(), 0.0
    for name, count in counts.items():
        width = 100 * count / total if total else 0.0
        parts += Markup('<rect x="{:.3f}" y="0" width="{:.3f}" height="8" class="{}"></rect>').format(
            start, width, name
        )
        start += width
    opening = Markup('<svg viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{}" class="shares">')
    return opening.format(label) + parts + Markup("</svg>")
