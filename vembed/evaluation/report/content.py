"""What the three forms of a report share: computed once, so that they can't disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.pages import Table
from vembed.evaluation.report.comparison import (
    forward_comparisons,
    recall_sums,
    reverse_comparisons,
    systems_note,
    verdict_decimals,
)
from vembed.evaluation.report.curves import (
    OPTIONAL_CURVES,
    STEP_CURVES,
    Curve,
    dev_curve,
    evenly_spread,
    source_curves,
    sparkline,
    step_curve,
)
from vembed.evaluation.report.embedding_map import EmbeddingMap, near_pictures
from vembed.evaluation.report.examples import Group, choose_examples, paired_values, shown_pictures
from vembed.evaluation.report.pictures import Thumbnails
from vembed.evaluation.report.ranks import Ranks, build_ranks
from vembed.evaluation.report.sets import sets_table
from vembed.evaluation.report.settings import PlanParts, plan_parts
from vembed.evaluation.report.time_split import TimeSplit, split_time
from vembed.evaluation.sets import headline, worse_than_untrained
from vembed.evaluation.text import count_text, finite, metric_text, number_text, one_line, signed_text, value_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.evaluation.directions import RecallSum
    from vembed.evaluation.report.comparison import Comparisons, SystemKey
    from vembed.evaluation.report.data import RunReport
    from vembed.evaluation.significance import Verdict

LARGE_CURVES = ("loss", "learning_rate", "grad_norm")

MAX_EVALUATION_ROWS = 30
"""Most rows of the table of dev metrics; the curve and report.json have the rest."""


@dataclass(frozen=True, slots=True)
class Content:
    """A report with everything that is derived from it."""

    report: RunReport
    metrics: Comparisons  # of the direction that the verdict is on
    reverse: Comparisons | None  # of the other direction, where it is measured
    sums: Mapping[SystemKey, RecallSum]  # recalls of both directions in one number; empty where there is none
    dev_metric: str | None  # of the dev curve; None without evaluations
    evaluations: tuple[tuple[int, Mapping[str, float]], ...]  # on dev by step; the baseline is step 0 on the same set
    dev: Curve | None
    marked_step: int | None  # of the dev curve: the kept checkpoint, or where that isn't known the highest
    curves: tuple[Curve, ...]  # step curves that have values; of the optional ones those that vary
    not_logged: tuple[str, ...]  # titles of the curves that have no values
    gains: tuple[float, ...]  # final minus baseline in the verdict's metric, of each compared query
    groups: tuple[Group, ...]  # example queries
    thumbnails: Thumbnails  # of the pictures of the examples
    ranks: Ranks
    reverse_ranks: Ranks | None
    time: TimeSplit | None  # where the time of the steps went, where it was logged
    notes: tuple[str, ...]  # what was left out or clipped in the evaluation
    plan: PlanParts
    map: EmbeddingMap | None  # where the vectors lie after training; None where the run had none

    @property
    def verdict(self) -> Verdict:
        """The verdict of the run."""
        return self.report.overall or self.report.verdict

    @property
    def headline(self) -> str:
        """The verdict as a sentence, with what the model forgets."""
        return headline(self.verdict, self.report.sets)

    @property
    def interval_line(self) -> str:
        """What the verdict's block says below its numbers: the interval, and the guard sets on which it forgets."""
        _, _, numbers = one_line(self.headline).partition("(")
        interval, _, lost = numbers.rpartition(")")
        words = interval.partition(", ")[2] or one_line(self.headline)
        return f"{words}{lost}"

    @property
    def summary(self) -> str:
        """A few lines of plain text that say what came of the run, to be pasted anywhere."""
        report, shown = self.report, [row for row in self.metrics.rows if row.is_headline][1:4]
        others = [
            f"{row.name} {metric_text(row.values.get('baseline'))} -> {metric_text(row.values.get('final'))}"
            for row in shown
        ]
        facts = dict(self.facts)
        setting = {key: report.config[key] for key in ("learning_rate", "loss_type") if key in report.config}
        batch = report.plan.get("global_batch_size")
        run = [facts["Model"], f"{facts['Training steps']} steps", *([f"batch {batch}"] if batch else [])]
        lines = [
            f"{one_line(report.title)}: {one_line(self.headline)}",
            f"On {facts['Evaluated on']}: {', '.join(others)}" if others else f"On {facts['Evaluated on']}",
            ", ".join([*run, *(f"{key} {value_text(key, value)}" for key, value in setting.items())]),
        ]
        return "\n".join([*lines, *self.guard_lines, *self.reverse_lines])

    @property
    def num_large(self) -> int:
        """Of the curves, how many are drawn large: loss, learning rate and gradient norm."""
        return sum(curve.spec.key in LARGE_CURVES for curve in self.curves)

    @property
    def guard_lines(self) -> list[str]:
        """What the verdict's block says of the dev set, where it disagrees, and of each guard set."""
        guards = [f"Guard set {one_line(each.line)}" for each in self.report.sets if each.role == "guard"]
        report = self.report
        if not report.dev_task or report.kept_step is None:
            return guards
        lost = worse_than_untrained(report.evaluations, report.verdict.comparison.metric, report.kept_step)
        return [lost, *guards] if lost else guards

    @property
    def sets(self) -> Table | None:
        """All sets beside each other, where there are several."""
        return sets_table(self.report)

    @property
    def sets_note(self) -> str:
        """What the table of sets shows."""
        measures = dict.fromkeys(one_line(each.verdict.comparison.metric) for each in self.report.sets)
        return (
            f"{' or '.join(measures)} before and after training. Each interval speaks of one set; they aren't "
            f"corrected for their number."
        )

    @property
    def share(self) -> str:
        """The confidence of the intervals, e.g. "95%"."""
        return f"{100 * self.report.verdict.comparison.confidence:g}%"

    @property
    def systems_note(self) -> str:
        """Which checkpoint is which; empty where that isn't known."""
        return systems_note(self.report)

    @property
    def decimals(self) -> int:
        """Decimals of the verdict's numbers."""
        return verdict_decimals(self.verdict)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The few facts that place the verdict."""
        report = self.report
        num_steps = max((int(row["step"]) for row in report.steps if "step" in row), default=0)
        return [
            ("Evaluated on", one_line(report.task.name)),
            ("Queries", count_text(report.final.num_queries)),
            ("Documents", count_text(report.final.num_documents)),
            ("Training steps", count_text(num_steps)),
            ("Model", one_line(report.final.system)),
        ]

    @property
    def links(self) -> list[tuple[str, str]]:
        """(id, title) of the sections of the page."""
        return [
            ("metrics", "Metrics"),
            *([("queries", "Examples")] if self.groups else []),
            ("changes", "Query by query"),
            *([("vectors", "Embedding map")] if self.map is not None else []),
            ("curves", "Curves"),
            *([("ranks", "Ranks and scores")] if self.ranks.recalls_K else []),
            *([("speed", "Speed")] if self.tells_speed else []),
            ("data", "Data"),
            ("plan", "Plan"),
            ("reproduce", "Reproduce"),
        ]

    @property
    def reverse_lines(self) -> list[str]:
        """What the verdict's block says of the other direction."""
        reverse = self.report.reverse
        if reverse is None:
            return []
        lines = [f"Reversed, {reverse.task.direction}: {one_line(reverse.verdict.sentence)}"]
        if self.sums:
            before, after = (metric_text(self.sums[key].value, 1) for key in ("baseline", "final"))
            lines.append(f"Both directions: rsum {before} -> {after} of 600")
        return lines

    @property
    def dev_title(self) -> str:
        """Title of the dev curve."""
        return f"Dev {one_line(self.dev_metric or '')}"

    @property
    def dev_note(self) -> str:
        """Which set the dev metrics are on, and where step 0 comes from."""
        where = self.report.dev_task or self.report.task.name
        has_start = bool(self.evaluations) and self.evaluations[0][0] == 0
        return f"On {where}; {'step 0 is the baseline' if has_start else 'no step 0 was given'}."

    @property
    def mark_note(self) -> str:
        """Which point of the dev curve is marked; empty where none is."""
        if self.marked_step is None or self.dev is None or len(self.dev.values_N) < 2:
            return ""
        if self.report.kept_step is None:
            return f"The large dot is the highest, step {count_text(self.marked_step)}."
        return f"The large dot is step {count_text(self.marked_step)}, the checkpoint that was kept."

    @property
    def curve_table(self) -> Table:
        """All curves as rows of blocks and sentences."""
        rows = [[curve.title, sparkline(curve), curve.summary] for curve in self.curves]
        if self.dev is not None:
            rows.insert(0, [self.dev_title, sparkline(self.dev), self.dev.summary])
        return Table(("Curve", "Shape", "In words"), rows, words=frozenset({0, 1, 2}))

    @property
    def evaluation_table(self) -> Table:
        """The dev metrics by step, the kept one marked by a word."""
        names, kept = dev_metric_names(self), self.report.kept_step
        rows, tones = [], {}
        for row, (step, metrics) in enumerate(evenly_spread(self.evaluations, MAX_EVALUATION_ROWS)):
            is_kept = step == kept
            if is_kept:
                tones[row] = "chosen"
            values = (metric_text(finite(metrics[name]) if name in metrics else None) for name in names)
            rows.append([f"✓ {count_text(step)} (kept)" if is_kept else count_text(step), *values])
        return Table(["Step", *(one_line(name) for name in names)], rows, words=frozenset(), tones=tones)

    @property
    def evaluation_note(self) -> str:
        """What the table of dev metrics is on, and which rows it has."""
        num_evaluations = len(self.evaluations)
        num_rows = min(num_evaluations, MAX_EVALUATION_ROWS)
        if num_rows == num_evaluations:
            return self.dev_note
        return f"{self.dev_note} {num_rows} of {count_text(num_evaluations)} evaluations, evenly spread."

    @property
    def change_counts(self) -> dict[str, int]:
        """How many queries moved up, not at all, or down in the verdict's metric."""
        improved, worse = sum(gain > 0 for gain in self.gains), sum(gain < 0 for gain in self.gains)
        return {"improved": improved, "unchanged": len(self.gains) - improved - worse, "worse": worse}

    @property
    def changes(self) -> str:
        """The same in a sentence."""
        gains, metric = self.gains, self.report.verdict.comparison.metric
        improved, unchanged, worse = (count_text(count) for count in self.change_counts.values())
        summary = (
            f"Of {plural(len(gains), 'query', 'queries')}, {improved} improved, {unchanged} stayed the same and "
            f"{worse} got worse in {metric}."
        )
        left_out = len(self.report.final.per_query[metric]) - len(gains)
        if left_out:
            summary += f" {plural(left_out, 'query has', 'queries have')} no finite value in both results, left out."
        if self.report.task.grades:
            summary += " A query's value is the measure over all pairs, and how its own pairs move it."
        if gains:
            summary += f" Largest gain {signed_text(max(0.0, *gains))}, largest loss {signed_text(min(0.0, *gains))}."
        return summary

    @property
    def tells_speed(self) -> bool:
        """Whether anything is known of how the training ran."""
        return self.time is not None or self.report.findings is not None or bool(self.report.performance)

    @property
    def performance(self) -> list[tuple[str, str]]:
        """What the training took; a unit that a value shows isn't said twice."""
        found = self.report.performance
        return [
            (
                key.removesuffix("_bytes").replace("_", " "),
                number_text(value) if type(value) is float else value_text(key, value),
            )
            for key, value in found.items()
        ]

    @property
    def config(self) -> list[tuple[str, str]]:
        """The settings as they were given."""
        return [(key, value_text(key, value)) for key, value in self.report.config.items()]

    @property
    def strategy(self) -> str | None:
        """The strategy that the plan chose."""
        strategy = self.report.plan.get("strategy")
        return None if strategy is None else value_text("strategy", strategy)


def build_content(report: RunReport) -> Content:
    """Compute what all forms of the report show.

    Raises:
        ValueError: Baseline and final are over different queries.
    """
    metric = report.verdict.comparison.metric
    evaluations = _evaluations(report)
    dev_metric = _dev_metric(report.evaluations, metric)
    pairs = paired_values(report.baseline, report.final, metric)
    searches = not report.task.grades
    groups = choose_examples(report.task, report.baseline, report.final, metric) if searches else ()
    curves = {spec.title: step_curve(report.steps, spec) for spec in STEP_CURVES}
    optional = [step_curve(report.steps, spec) for spec in (*source_curves(report.steps), *OPTIONAL_CURVES)]
    dev = None if dev_metric is None else dev_curve(evaluations, dev_metric)
    missing = [title for title, curve in curves.items() if curve is None]
    metrics, reverse = forward_comparisons(report), reverse_comparisons(report)
    turned = report.reverse
    return Content(
        report=report,
        metrics=metrics,
        reverse=reverse,
        sums=recall_sums(metrics, reverse),
        dev_metric=dev_metric,
        evaluations=evaluations,
        dev=dev,
        marked_step=_marked_step(report, dev),
        curves=(
            *(curve for curve in curves.values() if curve is not None),
            *(curve for curve in optional if curve is not None and curve.varies),
        ),
        not_logged=tuple(missing if dev is not None else [*missing, "Dev metrics"]),
        gains=tuple(after - before for before, after in pairs.values()),
        groups=groups,
        thumbnails=Thumbnails.of(
            [*shown_pictures(each for group in groups for each in group.examples), *near_pictures(report)],
            report.image_limits,
        ),
        map=EmbeddingMap.of(report),
        ranks=build_ranks(report.task, report.baseline, report.final, report.bm25),
        reverse_ranks=None if turned is None else build_ranks(turned.task, turned.baseline, turned.final, None),
        time=split_time(report.steps),
        notes=_notes(report),
        plan=plan_parts(report.plan),
    )


def _evaluations(report: RunReport) -> tuple[tuple[int, Mapping[str, float]], ...]:
    """Return the dev evaluations in step order, with the baseline as step 0 where it is on the same set."""
    rows = sorted(report.evaluations, key=lambda row: row[0])
    if rows and rows[0][0] > 0 and not report.dev_task:
        rows.insert(0, (0, report.baseline.metrics))
    return tuple(rows)


def _dev_metric(evaluations: Sequence[tuple[int, Mapping[str, float]]], preferred: str) -> str | None:
    """Return the verdict's metric where the evaluations have it, else the first that the last evaluation has."""
    if any(preferred in metrics for _, metrics in evaluations):
        return preferred
    return next((name for _, metrics in reversed(evaluations) for name in metrics), None)


def _marked_step(report: RunReport, dev: Curve | None) -> int | None:
    """Return the step of the dev curve to mark."""
    if dev is None:
        return None
    if report.kept_step is None:
        return int(dev.steps_N[dev.values_N.argmax()])
    return report.kept_step if report.kept_step in dev.steps_N else None


def _notes(report: RunReport) -> tuple[str, ...]:
    """Return what was left out or clipped, each sentence once."""
    found, reverse = dict.fromkeys(report.task.notes), report.reverse
    for result in (report.baseline, report.final, report.bm25):
        found |= dict.fromkeys(result.notes if result else ())
    for result in (reverse.baseline, reverse.final) if reverse else ():
        found |= dict.fromkeys(f"Reversed: {note}" for note in result.notes)
    return tuple(found)


def dev_metric_names(content: Content) -> tuple[str, ...]:
    """Return the metrics that the table of evaluations shows: the dev metric, then the headline, at most six."""
    found = dict.fromkeys(name for _, metrics in content.report.evaluations for name in metrics)
    names = dict.fromkeys([content.dev_metric or "", *(name for name in HEADLINE if name in found), *found])
    return tuple(name for name in names if name in found)[:6]
