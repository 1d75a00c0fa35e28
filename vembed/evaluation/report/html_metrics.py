"""The part of the page with the numbers: every metric of all systems, in each direction that is measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vembed.evaluation.report.charts import draw_interval
from vembed.evaluation.report.comparison import bounds_text, difference_text, row_decimals, share_text, systems_note
from vembed.evaluation.report.content import SYMBOLS
from vembed.evaluation.report.html_parts import Column, section, stacked_row, stacked_table, with_bounds
from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.text import capitalised, metric_text, one_line, plural, signed_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.report.comparison import Comparisons, MetricRow, RecallSums
    from vembed.evaluation.report.content import Content

HITS_NOTE = (
    "hit@k is the share of queries that find a right one among the first k: what the literature on captioned pictures "
    "calls R@k. recall@k is the mean share of what is right that is found."
)


def metrics_section(content: Content) -> Html:
    """Return the metric tables, with the metrics beyond the headline folded away."""
    report = content.report
    share, decisive = share_text(report), report.verdict.comparison.metric
    lead = (
        f"The small numbers are {share} intervals: where a mean would lie with other queries of the same kind. The "
        "interval of the difference comes from the same queries before and after: where it lies on one side of zero, "
        "the difference is more than luck with these queries."
    )
    parts = [element("p", lead)]
    parts += [element("p", note) for note in (systems_note(report), HITS_NOTE if content.reverse else "") if note]
    if content.reverse is None:
        parts.append(_tables(content.metrics, decisive, name="forward"))
        return section("metrics", "Metrics", *parts)
    parts += [
        element("h3", capitalised(content.metrics.direction)),
        _tables(content.metrics, decisive, name="forward"),
        element("h3", f"Reversed: {content.reverse.direction}"),
        _tables(content.reverse, decisive, name="reverse"),
    ]
    if content.sums is not None:
        parts += [element("h3", "Both directions in one number"), _sums(content.sums, share)]
    return section("metrics", "Metrics", *parts)


def _tables(comparisons: Comparisons, decisive: str, *, name: str) -> Html:
    """Return the headline of one direction, and the other metrics folded away."""
    headline = [row for row in comparisons.rows if row.is_headline]
    rest = [row for row in comparisons.rows if not row.is_headline]
    caption = f"Mean over the queries of {one_line(comparisons.scope)}."
    label = f"Metrics, {name} direction" if name == "reverse" else "Metrics of baseline and final model"
    parts = [_table(comparisons, headline, decisive, caption=caption, label=label)]
    if rest:
        more = _table(
            comparisons,
            rest,
            decisive,
            caption="Further metrics and cut-offs, on the same queries.",
            label=f"Further metrics, {name} direction",
        )
        parts.append(
            element("details", element("summary", plural(len(rest), "further metric")), more, class_="section")
        )
    return join(parts)


def _table(comparisons: Comparisons, rows: Sequence[MetricRow], decisive: str, *, caption: str, label: str) -> Html:
    """Return one table of metrics."""
    models = [system for system in comparisons.systems if system.key != "bm25"]
    others = [system for system in comparisons.systems if system.key == "bm25"]
    columns = [
        Column("Metric", is_number=False),
        *(Column(system.head) for system in models),
        Column("Difference"),
        Column("Reading", is_number=False),
        *(Column(system.head) for system in others),
    ]
    reach = _reach(rows)
    body = []
    for row in rows:
        decimals = row_decimals(row)
        numbers = {
            system.key: with_bounds(
                metric_text(row.values.get(system.key), decimals), bounds_text(row.intervals.get(system.key), decimals)
            )
            for system in comparisons.systems
        }
        cells = [
            *(numbers[system.key] for system in models),
            _difference(row, decimals),
            _reading(row, reach=reach),
            *(numbers[system.key] for system in others),
        ]
        tone = "decisive" if row.name == decisive else None
        body.append(stacked_row(columns, one_line(row.name), cells, tone=tone))
    return stacked_table(caption, columns, body, label=label)


def _difference(row: MetricRow, decimals: int) -> Html:
    """Return the difference of baseline and final with its interval."""
    if row.verdict is None:
        return element("span", metric_text(None), class_="value")
    comparison = row.verdict.comparison
    bounds = difference_text(comparison, decimals)
    return with_bounds(signed_text(comparison.difference, decimals), bounds)


def _reading(row: MetricRow, *, reach: float) -> Html:
    """Return what the interval says, drawn and in a word."""
    if row.verdict is None:
        reading, tone = "not compared", "muted"
    else:
        reading, tone = f"{SYMBOLS[row.verdict.word]} {row.verdict.word}", row.verdict.word.replace(" ", "-")
    return element("div", draw_interval(row, reach=reach), element("span", reading), class_=f"reading {tone}")


def _reach(rows: Sequence[MetricRow]) -> float:
    """Return the largest bound of the table's intervals: what its little bars are drawn against."""
    compared = [row.verdict.comparison for row in rows if row.verdict]
    bounds = [abs(bound) for comparison in compared for bound in (comparison.low, comparison.high)]
    return max((bound for bound in bounds if math.isfinite(bound)), default=0.0)


def _sums(sums: RecallSums, share: str) -> Html:
    """Return the sum of recalls of each system."""
    columns = [Column("Sum of recalls", is_number=False), *(Column(system.head) for system in sums.systems)]
    cells = []
    for system in sums.systems:
        found = sums.by_system[system.key]
        cells.append(with_bounds(metric_text(found.value, 1), bounds_text((found.low, found.high), 1)))
    caption = (
        f"rsum: R@1 + R@5 + R@10 of both directions in percent, 600 at best; with {share} intervals, the queries of "
        "each direction drawn apart."
    )
    return stacked_table(caption, columns, [stacked_row(columns, "rsum", cells)], label="Sum of recalls")
