"""What trackers are told beside the numbers of each step: the plan, and at the end results, examples, files, model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vembed.batch import ImageLimits
from vembed.evaluation.metrics import HEADLINE
from vembed.evaluation.report.examples import choose_examples, pictures_of, text_of
from vembed.evaluation.sets import headline
from vembed.pages.pictures import small_copy
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vembed.batch import Item
    from vembed.evaluation.report.examples import Group, Hit
    from vembed.training.finish import RunResult
    from vembed.training.run import Run
    from vembed.training.trackers.base import Cell, Tracker

FILES = ("report/report.html", "report/report.json", "config.yaml", "plan.json", "metrics.jsonl", "train.log")
"""What is kept of the output folder, as far as it is there."""

CELL_CHARACTERS = 1_000
"""Most characters of a text in a table."""


@contextmanager
def closing(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Close trackers at the end of the block, and tell them where an error ends it."""
    try:
        yield
    except BaseException as error:
        for tracker in trackers:
            tracker.log_stop(error)
        raise
    finally:
        for tracker in trackers:
            tracker.close()


def track_start(trackers: Sequence[Tracker], step: int, *, plan: str) -> None:
    """Tell the trackers the plan, so that a run shows up before its first step."""
    for tracker in trackers:
        tracker.log_text(step, "plan", redact(plan))


def track_end(run: Run, result: RunResult) -> None:
    """Tell the trackers what came of the run, and give them its files, and the model where the user wants that."""
    if not run.trackers:
        return
    task, step = run.evaluations.verdict_task, run.state.step
    groups = () if task.grades else choose_examples(task, result.baseline, result.final, result.metric)
    columns, rows = _examples_table(groups, result.metric, ImageLimits(max_pixels=run.config.max_image_pixels))
    for tracker in run.trackers:
        tracker.log_text(step, "verdict", redact(headline(result.verdict, result.sets)))
        tracker.log_result(step, _values(result))
        tracker.log_table(step, "results", *_results_table(result))
        if rows:
            tracker.log_table(step, "examples", columns, rows)
        for path in (run.output.path / name for name in FILES):
            if path.is_file():
                tracker.log_file(path)
        if run.config.log_model:
            tracker.log_model(run.output.model)


def _values(result: RunResult) -> dict[str, float]:
    """Return the main metrics of each set before and after; those of the first set have plain names."""
    values: dict[str, float] = {}
    for number, outcome in enumerate(result.sets):
        of_set = f"{outcome.role}-{number}/" if number else ""
        names = {*HEADLINE, outcome.verdict.comparison.metric}
        for name, found in (("baseline", outcome.baseline), ("final", outcome.final)):
            values |= {f"{of_set}{name}/{metric}": value for metric, value in found.metrics.items() if metric in names}
    return values


def _results_table(result: RunResult) -> tuple[Sequence[str], list[list[Cell]]]:
    """Return a row for each metric of each set."""
    rows: list[list[Cell]] = []
    for outcome in result.sets:
        before, after = outcome.baseline.metrics, outcome.final.metrics
        rows += [
            [redact(outcome.final.task), outcome.role, name, before[name], after[name], after[name] - before[name]]
            for name in after
            if name in before
        ]
    return ("set", "role", "metric", "before", "after", "difference"), rows


def _examples_table(
    groups: Sequence[Group], metric: str, limits: ImageLimits
) -> tuple[Sequence[str], list[list[Cell]]]:
    """Return a row for each example query; a column that no row fills is left out."""
    rows: list[dict[str, Cell]] = []
    for title, example in ((group.title, example) for group in groups for example in group.examples):
        found = example.hits[0] if example.hits else None
        relevant = next((hit for hit in (*example.hits, *example.missed) if hit.is_relevant), None)
        rows.append(
            {
                "kind": title,
                "query id": redact(example.query_id),
                **_shown("query", example.item, limits),
                f"{metric} before": example.baseline,
                f"{metric} after": example.final,
                **_shown("relevant", relevant.item if relevant else None, limits),
                "rank before": _rank(relevant.baseline_rank if relevant else None),
                "rank after": _rank(relevant.rank if relevant else None),
                **_shown("found first", found.item if found else None, limits),
                "found first is": _judgement(found),
            }
        )
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if any(row[name] is not None for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


def _shown(name: str, item: Item | None, limits: ImageLimits) -> dict[str, Cell]:
    """Return the text and the first picture of an item."""
    text, pictures = text_of(item), pictures_of(item)
    cut = None if text is None else redact(text)[:CELL_CHARACTERS]
    return {name: cut, f"{name} picture": small_copy(pictures[0], limits) if pictures else None}


def _rank(rank: int | None) -> str:
    return "not found" if rank is None else str(rank)


def _judgement(hit: Hit | None) -> str:
    return "" if hit is None else "relevant" if hit.is_relevant else "not relevant"
