"""The whole comparison: runs read, tested against one of them, and put into sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vembed.comparison.charts import Overlay, overlays
from vembed.comparison.differences import (
    Cost,
    Difference,
    config_differences,
    cost_of,
    data_differences,
    data_sentence,
    environment_differences,
    unknown_keys,
)
from vembed.comparison.pairs import PairVerdict, SetTable, match, pair_verdicts, set_tables
from vembed.comparison.queries import Changes, find_changes, image_limits, load_task
from vembed.comparison.runs import Run, read_runs
from vembed.data.retrieval import RetrievalData
from vembed.errors import ConfigError
from vembed.pages.html import notebook_frame
from vembed.pages.text import one_line
from vembed.redact import redact
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.data.images import ImageLimits


@dataclass(frozen=True)
class RunComparison:
    """How runs differ, and which is better than the first of them, the baseline."""

    metric: str
    runs: tuple[Run, ...]  # the baseline first
    verdicts: tuple[PairVerdict, ...]  # of each run but the baseline
    tables: tuple[SetTable, ...]  # of each set of the baseline
    config: tuple[Difference, ...]
    data: tuple[Difference, ...]
    data_sentence: str
    environment: tuple[Difference, ...]
    costs: tuple[Cost, ...]  # of each run
    overlays: tuple[Overlay, ...]
    changes: tuple[Changes, ...]  # on the set of the baseline's verdict
    task: RetrievalData | None  # of the changes; None where it can't be read any more
    notes: tuple[str, ...]  # what is odd about the runs, one sentence each
    changes_note: str
    image_limits: ImageLimits
    command: str

    @property
    def baseline(self) -> Run:
        """The run that the others are compared with."""
        return self.runs[0]

    @property
    def headline(self) -> str:
        """The verdicts in a sentence."""
        if len(self.verdicts) == 1:
            return self.verdicts[0].sentence
        counts = {word: sum(each.word == word for each in self.verdicts) for word in ("better", "worse")}
        rest = sum(each.word == "no difference" for each in self.verdicts)
        lost = sum(each.word == "not compared" for each in self.verdicts)
        said = [
            f"{counts['better']} better than {one_line(self.baseline.name)}",
            f"{counts['worse']} worse",
            f"{rest} without a difference that can be told",
            *([f"{lost} not compared"] if lost else []),
        ]
        return f"Of {plural(len(self.verdicts), 'run')}, {', '.join(said)}."

    @cached_property
    def html(self) -> str:
        """The comparison as one self-contained page."""
        from vembed.comparison.write import render_html

        return render_html(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.headline}>"

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps its style apart."""
        return notebook_frame(self.html, title=repr(self))


def compare_runs(
    folders: Sequence[Path | str],
    output: Path | None = None,
    baseline: Path | str | None = None,
    *,
    metric: str | None = None,
    command: str = "",
) -> RunComparison:
    """Compare runs and write compare.html, compare.md and compare.json.

    Args:
        folders: Output folders of runs, or patterns such as "runs/*"; finished or not.
        output: Where to write; None writes nothing.
        baseline: The run that the others are compared with; None takes the first finished one.
        metric: What runs are compared by; None takes what the baseline chose its checkpoint by.
        command: That makes this comparison again, without secrets.

    Raises:
        ConfigError: There are fewer than two runs, one isn't a run or is the output, or the baseline can't be compared
            with.
        MachineError: The output can't be written.
    """
    runs, notes = read_runs(folders, baseline)
    if output is not None and output.resolve() in {run.folder.resolve() for run in runs}:
        raise ConfigError(f"the output {redact(str(output))} is a run that is compared; choose another folder")
    if len(runs) < 2:
        only = runs[0]
        report = only.folder / "report" / "report.html"
        raise ConfigError(
            f"comparing takes at least two runs, and there is one: {redact(str(only.folder))}"
            + (f"; what training did to it stands in {redact(str(report))}" if report.is_file() else "")
        )
    runs, more = _baseline_first(runs, is_named=baseline is not None)
    comparison = _compare(runs, _metric(runs[0], metric), [*notes, *more], command)
    if output is not None:
        from vembed.comparison.write import write_comparison

        write_comparison(output, comparison)
    return comparison


def _baseline_first(runs: list[Run], *, is_named: bool) -> tuple[list[Run], list[str]]:
    """Put the baseline first: the run that was named, or the first finished one.

    Raises:
        ConfigError: The named one hasn't finished.
    """
    first = runs[0]
    if first.is_finished:
        return runs, []
    if is_named:
        raise ConfigError(
            f"--baseline {redact(str(first.folder))} can't be compared with: {first.notes[-1]} Resume it first, with "
            f"the command that started it, or name another run"
        )
    other = next((run for run in runs if run.is_finished), None)
    if other is None:
        return runs, ["No run has finished: there are no results to compare yet."]
    note = f"{first.name} hasn't finished, so {other.name} is the baseline."
    return [other, *(run for run in runs if run is not other)], [note]


def _metric(baseline: Run, asked: str | None) -> str:
    """Return what runs are compared by.

    Raises:
        ConfigError: The baseline hasn't the metric that was asked for.
    """
    if not baseline.is_finished:
        return asked or baseline.metric
    final = baseline.sets[0].final
    if asked is not None and asked not in final.per_query:
        known = ", ".join(sorted(final.per_query))
        raise ConfigError(f"{baseline.name} has no metric {asked} by query; it has: {known}")
    return asked or final.deciding(baseline.metric)


def _compare(runs: Sequence[Run], metric: str, notes: Sequence[str], command: str) -> RunComparison:
    baseline, others = runs[0], runs[1:]
    changes, task, changes_note = _changes(baseline, others, metric)
    tables = set_tables(baseline, others, metric)
    return RunComparison(
        metric=metric,
        runs=tuple(runs),
        verdicts=tuple(pair_verdicts(baseline, others, metric, tables)),
        tables=tuple(tables),
        config=tuple(config_differences(runs)),
        data=tuple(data_differences(runs)),
        data_sentence=data_sentence(runs),
        environment=tuple(environment_differences(runs)),
        costs=tuple(map(cost_of, runs)),
        overlays=tuple(overlays(runs, metric)),
        changes=tuple(changes),
        task=task,
        notes=(*notes, *(f"{run.name}: {note}" for run in runs for note in run.notes), *unknown_keys(runs)),
        changes_note=changes_note,
        image_limits=image_limits(baseline),
        command=command,
    )


def _changes(baseline: Run, others: Sequence[Run], metric: str) -> tuple[Sequence[Changes], RetrievalData | None, str]:
    """Return the queries that changed most on the set of the baseline's verdict."""
    if not baseline.is_finished:
        return (), None, ""
    own = baseline.sets[0]
    partners = [(run.name, partner) for run in others if (partner := match(own, run, metric)[0]) is not None]
    if not partners:
        return (), None, ""
    task, why_not = load_task(baseline, own)
    if task is not None and task.grades:
        return (), task, ""  # nothing is searched: no model put a document first
    shown = task or RetrievalData(own.name, {}, {}, {})
    return find_changes(own, partners, shown, metric), task, why_not
