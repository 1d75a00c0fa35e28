"""`vembed evaluate MODEL ... --mteb NAME ...`: each model on benchmarks and tasks of MTEB instead of --data."""

from __future__ import annotations

import gc
from statistics import fmean
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from vembed.distributed.lock import hold_output
from vembed.entrypoints.command import quiet_libraries
from vembed.entrypoints.options import AddedOptions
from vembed.errors import ExitCode
from vembed.files import home_path
from vembed.section import Name, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WITHOUT_EFFECT = (
    *("metric", "bm25", "bm25_language", "dims", "quantize", "rescore", "index", "both_directions"),
    *("split", "label_kind", "image_root", "no_keep_vectors"),
)
"""Options of the command that mean nothing to MTEB, which brings its data and its metrics."""


class MtebOptions(AddedOptions):
    """Options of `vembed evaluate` for MTEB."""

    mteb: list[Name] | None = option(
        None,
        "MTEB benchmarks or tasks instead of --data, e.g. NanoBEIR; needs vembed[mteb]",
        metavar="NAME",
        one_of="sets!",
    )

    @override
    def run(self, options: Any) -> int | None:
        if self.mteb is None:
            return None
        # Refusals first: a wrong command leaves no folder behind, and costs no import of MTEB, which takes 10 s.
        reason = "--mteb measures as MTEB does"
        options.refuse_beside(reason, WITHOUT_EFFECT)
        options.refuse_word_models(reason)
        options.refuse_unread_code()
        with hold_output(options.output):
            return self._evaluate(options)

    def _evaluate(self, options: Any) -> int:
        """Evaluate the models one after the other, print a table, and leave MTEB's own files in the output."""
        quiet_libraries()
        import vembed
        from vembed.evaluation.benchmark.names import model_labels
        from vembed.plugins.mteb.model import find_tasks, run_tasks

        labels = model_labels(options.models)
        tasks = find_tasks(self.mteb or ())
        folder = home_path(options.output) / "mteb"
        # By model, not by task: a model is loaded once, and only one is in memory.
        scores: dict[str, list[tuple[str, str, float]]] = {}
        for name, label in zip(options.models, labels, strict=True):
            model = vembed.load(name, **options.load_options())
            scores[label] = []
            for task, measure, value in run_tasks(model, tasks, folder, batch_size=options.batch_size):
                print(f"{label} on {task}: {measure} {value:.4f}", flush=True)
                scores[label].append((task, measure, value))
            del model
            gc.collect()  # two large models don't fit at once
        print("\n" + "\n".join(scores_table(scores)))
        print(f"\nwritten to {folder / 'results'}, in the form of MTEB's results repository")
        return ExitCode.OK


def scores_table(scores: Mapping[str, Sequence[tuple[str, str, float]]]) -> list[str]:
    """Return the lines of a table: a task in a line, a model in a column, and the mean of all tasks.

    Args:
        scores: Model -> task, measure and value of each of its results, the tasks in one order.
    """
    from vembed.pages.page import Table
    from vembed.pages.terminal import table_lines
    from vembed.pages.text import metric_text

    lines, measures = [], set()
    for row in zip(*scores.values(), strict=True):
        task, measure, _ = row[0]
        measures.add(measure)
        lines.append([task, measure, *(metric_text(value) for *_, value in row)])
    if len(lines) > 1:
        means = [metric_text(fmean(value for *_, value in column)) for column in scores.values()]
        lines.append([f"mean of {len(lines)} tasks", measures.pop() if len(measures) == 1 else "", *means])
    return table_lines(Table(["task", "measure", *scores], lines, text_columns=frozenset({0, 1})))
