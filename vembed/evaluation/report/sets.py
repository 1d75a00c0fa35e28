"""The sets of a run side by side: test sets, their mean, and guard sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.pages import Cell, Table
from vembed.evaluation.report.comparison import (
    MetricRow,
    bars_reach,
    difference_cell,
    mean_cell,
    reading_cell,
)
from vembed.evaluation.sets import averaged
from vembed.evaluation.significance import mean_interval
from vembed.evaluation.text import count_text, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.report.data import RunReport
    from vembed.evaluation.sets import SetOutcome
    from vembed.evaluation.significance import Verdict

HEADS = ("Set", "Use", "Queries", "Baseline", "Final", "Difference", "Reading")


def sets_table(report: RunReport) -> Table | None:
    """Return a row for each set, and one for the mean over several test sets; None where there is one set."""
    if len(report.sets) < 2:
        return None
    guards = [each for each in report.sets if each.role == "guard"]
    tests = [each for each in report.sets if each.role != "guard"]
    several = len({each.verdict.comparison.metric for each in report.sets}) > 1
    rows: list[tuple[MetricRow, str, str]] = [
        (_row([each], each.verdict, named=several), each.role, each.word) for each in tests
    ]
    if report.overall is not None and len(alike := averaged(report.sets)) > 1:
        rows.append((_row(alike, report.overall, named=several), "mean", report.overall.word))
    rows += [(_row([each], each.verdict, named=several), each.role, each.word) for each in guards]
    reach = bars_reach([row for row, _, _ in rows])
    body: list[list[str | Cell]] = [
        [
            one_line(row.name),
            use,
            "" if row.verdict is None else count_text(row.verdict.comparison.num_queries),
            mean_cell(row, "baseline"),
            mean_cell(row, "final"),
            difference_cell(row),
            reading_cell(row, reach=reach, called=word),
        ]
        for row, use, word in rows
    ]
    tones = {place: "decisive" for place, (_, use, _) in enumerate(rows) if use == "mean"}
    return Table(HEADS, body, words=frozenset({0, 1, 6}), tones=tones)


def _row(outcomes: Sequence[SetOutcome], verdict: Verdict, *, named: bool) -> MetricRow:
    """Return one set, or the mean over several, as a row, with the name of its metric where sets have several."""
    comparison, metric = verdict.comparison, outcomes[0].verdict.comparison.metric
    name = outcomes[0].final.task if len(outcomes) == 1 else f"mean of {len(outcomes)} test sets"
    results = {"baseline": [each.baseline for each in outcomes], "final": [each.final for each in outcomes]}
    return MetricRow(
        name=f"{name} ({metric})" if named else name,
        values={"baseline": comparison.baseline, "final": comparison.candidate},
        intervals={
            "baseline": mean_interval(results["baseline"], metric),
            "final": mean_interval(results["final"], metric),
        },
        verdict=verdict,
        is_headline=True,
    )
