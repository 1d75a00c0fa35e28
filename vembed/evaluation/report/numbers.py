"""The numbers of a report, computed once from a `RunReport` for its page and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.evaluation.report.comparison import forward_comparisons, recall_sums, reverse_comparisons
from vembed.evaluation.report.curves import run_curves
from vembed.evaluation.report.examples import choose_examples, paired_values
from vembed.evaluation.report.ranks import build_ranks
from vembed.evaluation.report.speed import split_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.judge import Estimate
    from vembed.evaluation.report.comparison import Comparisons, SystemKey
    from vembed.evaluation.report.curves import RunCurves
    from vembed.evaluation.report.examples import Group
    from vembed.evaluation.report.inputs import RunReport
    from vembed.evaluation.report.ranks import Ranks
    from vembed.evaluation.report.speed import TimeSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportNumbers:
    """The numbers computed from a `RunReport`, in the order of the sections that show them."""

    forward: Comparisons  # all systems in all metrics
    reverse: Comparisons | None  # the same for the other direction; None where it isn't measured
    recall_sums: Mapping[SystemKey, Estimate]  # of both directions; empty where one wasn't measured
    groups: Sequence[Group]  # the queries that are shown as examples
    gains: Sequence[float]  # final minus baseline in `report.metric`, of each query with a finite value in both
    curves: RunCurves
    ranks: Ranks
    reverse_ranks: Ranks | None
    time_split: TimeSplit | None

    @classmethod
    def of(cls, report: RunReport) -> ReportNumbers:
        """Compute the numbers of a report.

        Raises:
            ValueError: Baseline and final are over different queries.
        """
        forward, reverse = forward_comparisons(report), reverse_comparisons(report)
        groups: Sequence[Group] = ()
        if not report.task.grades:  # a set of graded pairs has no ranked documents to show
            groups = choose_examples(report.task, report.baseline, report.final, report.metric)
        pairs = paired_values(report.baseline, report.final, report.metric)
        reverse_ranks = None
        if (turned := report.reverse) is not None:
            reverse_ranks = build_ranks(turned.task, turned.baseline, turned.final, bm25=None)
        return cls(
            forward=forward,
            reverse=reverse,
            recall_sums=recall_sums(forward, reverse),
            groups=groups,
            gains=[after - before for before, after in pairs.values()],
            curves=run_curves(report),
            ranks=build_ranks(report.task, report.baseline, report.final, report.bm25),
            reverse_ranks=reverse_ranks,
            time_split=split_time(report.steps),
        )
