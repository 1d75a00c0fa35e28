"""The half of `vembed evaluate` that runs benchmarks and tasks of MTEB: `vembed evaluate MODEL --mteb NanoBEIR`."""

from __future__ import annotations

import gc
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.entrypoints.command import quiet_libraries
from vembed.errors import ExitCode
from vembed.files import home_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.api.mteb import TaskScore
    from vembed.entrypoints.evaluate import EvaluateOptions

RESULTS_FOLDER = "mteb"


def evaluate_mteb(options: EvaluateOptions) -> int:
    """Evaluate each model on MTEB's tasks, print a table, and leave MTEB's own files in the output."""
    quiet_libraries()
    from vembed.api.model import load
    from vembed.api.mteb import find_tasks, run_tasks
    from vembed.evaluation.benchmark.names import model_labels

    labels = model_labels(options.models)
    tasks = find_tasks(options.mteb or ())
    folder = home_path(options.output) / RESULTS_FOLDER
    found: dict[str, list[TaskScore]] = {}
    for name, label in zip(options.models, labels, strict=True):
        model = load(name, **options.load_options())
        found[label] = []
        for score in run_tasks(model, tasks, folder, batch_size=options.batch_size):
            print(f"{label} on {score.task}: {score.measure} {score.value:.4f}", flush=True)
            found[label].append(score)
        del model
        gc.collect()  # two large models don't fit at once
    print("\n" + "\n".join(_table(found)))
    print(f"\nwritten to {folder / 'results'}, in the form of MTEB's results repository")
    return ExitCode.OK


def _table(found: Mapping[str, Sequence[TaskScore]]) -> list[str]:
    """Return the lines of a table: a task in a line, a model in a column, and the mean of all tasks."""
    from vembed.pages.page import Table
    from vembed.pages.terminal import table_lines
    from vembed.pages.text import metric_text

    rows = list(zip(*found.values(), strict=True))
    measures = {score.measure for each in rows for score in each[:1]}
    lines = [[each[0].task, each[0].measure, *(metric_text(score.value) for score in each)] for each in rows]
    if len(rows) > 1:
        means = [metric_text(fmean(score.value for score in scores)) for scores in found.values()]
        lines.append([f"mean of {len(rows)} tasks", measures.pop() if len(measures) == 1 else "", *means])
    return table_lines(Table(["task", "measure", *found], lines, words=frozenset({0, 1})))
