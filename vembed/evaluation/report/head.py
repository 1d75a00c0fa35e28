"""The top of a run's report: the verdict, what it was measured on, and a summary to paste into a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.judge import headline, interval_text, warnings_text, worse_than_untrained
from vembed.evaluation.report.comparison import verdict_decimals
from vembed.pages.page import Code, Facts, Fold, VerdictBlock
from vembed.pages.text import capitalised, count_text, metric_text, one_line, signed_text, value_text
from vembed.text import plural

if TYPE_CHECKING:
    from vembed.evaluation.report.inputs import RunReport
    from vembed.evaluation.report.run_report import ReportNumbers
    from vembed.pages.page import Block

SUMMARY_METRICS = 3
"""Metrics in the summary beside the one that decides."""


def head_blocks(report: RunReport, numbers: ReportNumbers) -> list[Block]:
    """Return the blocks before the first section."""
    verdict = report.final_verdict
    comparison = verdict.comparison
    decimals = verdict_decimals(verdict)
    remarks = remarks_of(report, numbers)
    others = max(0, sum(outcome.role != "guard" for outcome in report.sets) - 1)
    summary = [*summary_lines(report, numbers), *remarks]
    return [
        VerdictBlock(
            word=verdict.word,
            before=metric_text(comparison.baseline, decimals),
            after=metric_text(comparison.candidate, decimals),
            change=signed_text(comparison.difference, decimals),
            metric=comparison.metric,
            interval=interval_text(verdict.word, comparison) + warnings_text(report.sets),
            sentence=headline(verdict, report.sets),
            remarks=remarks,
        ),
        Facts(
            [
                ("Evaluated on", report.task.name + (f" and {plural(others, 'other test set')}" if others else "")),
                ("Queries of the first set" if others else "Queries", count_text(report.final.num_queries)),
                ("Documents of the first set" if others else "Documents", count_text(report.final.num_documents)),
                ("Training steps", count_text(num_steps(report))),
                ("Model", report.final.system),
            ]
        ),
        Fold(
            "Summary to paste into a chat (one click selects it)",
            [Code("\n".join(map(one_line, summary)), "Summary")],
            is_open=True,
            html_only=True,
        ),
    ]


def remarks_of(report: RunReport, numbers: ReportNumbers) -> list[str]:
    """Return what to know beside the verdict: worse than untrained, caveats, guard sets, the other direction."""
    remarks: list[str] = []
    if report.dev_task and report.kept_step is not None:  # a dev set of its own, whose step 0 is the untrained model
        warning = worse_than_untrained(report.evaluations, report.checkpoint_metric, report.kept_step)
        if warning:
            remarks.append(warning)
    remarks += [f"{capitalised(caveat)}." for caveat in report.caveats]
    remarks += [f"Guard set {outcome.line}" for outcome in report.sets if outcome.role == "guard"]
    if report.reverse is not None:
        remarks.append(f"Reversed, {report.reverse.task.direction}: {report.reverse.verdict.sentence}")
    if sums := numbers.recall_sums:
        before, after = (metric_text(sums[key].value, 1) for key in ("baseline", "final"))
        remarks.append(f"Both directions: rsum {before} -> {after} of 600")
    return remarks


def summary_lines(report: RunReport, numbers: ReportNumbers) -> list[str]:
    """Return the result, further metrics, and the settings that matter most, a line each."""
    # The first row is the deciding metric, which is in the headline.
    further = [row for row in numbers.forward.rows if row.is_headline][1 : 1 + SUMMARY_METRICS]
    metrics = ", ".join(
        f"{row.name} {metric_text(row.values.get('baseline'))} -> {metric_text(row.values.get('final'))}"
        for row in further
    )
    settings = [report.final.system, f"{count_text(num_steps(report))} steps"]
    if batch := report.plan.get("global_batch_size"):
        settings.append(f"batch {batch}")
    chosen = [key for key in ("learning_rate", "loss_type") if key in report.config]
    settings += [f"{key} {value_text(key, report.config[key])}" for key in chosen]
    return [
        f"{report.title}: {headline(report.final_verdict, report.sets)}",
        f"On {report.task.name}: {metrics}" if metrics else f"On {report.task.name}",
        ", ".join(settings),
    ]


def num_steps(report: RunReport) -> int:
    """Return the last step that was logged, 0 where none was."""
    return max((int(row["step"]) for row in report.steps if "step" in row), default=0)
