"""The report of graded pairs: what each model reaches, how models differ, and how similar pairs of each grade are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.evaluation.graded import DRAWS, MEASURES, SEED
from vembed.evaluation.pages import write_report
from vembed.pages.page import Cell, Table
from vembed.pages.text import count_text, metric_text, number_text, signed_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.graded import Estimate, PairsOutcome

TEMPLATE = Path(__file__).parent / "templates" / "graded"
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
GRADES_SHOWN = 8
QUANTILES = (0.05, 0.5, 0.95)

MEANINGS = {
    "spearman": "Spearman's rank correlation of similarity and grade: 1 is the order of the grades, 0 is chance.",
    "average precision": "Mean precision at each pair that belongs together; by chance it is their share of the pairs.",
    "ROC AUC": "How often a pair that belongs together is more similar than one that doesn't; 0.5 is chance.",
}

LIMITS = (
    "The intervals come from drawing the queries again, each with all its pairs; the models are measured on the same "
    "draws. They speak of other queries of the same kind, not of other training runs, and aren't corrected for the "
    "number of models."
)


@dataclass(frozen=True, slots=True)
class PairsReport:
    """What a report is made of."""

    outcomes: Sequence[PairsOutcome]  # one for each set
    facts: Sequence[tuple[str, str]]  # system, versions
    command: str

    @property
    def lines(self) -> list[str]:
        """Return what a terminal is told."""
        return [line for outcome in self.outcomes for line in _lines(outcome)]


def write_pairs_report(folder: Path, report: PairsReport) -> None:
    """Write report.json, report.md and report.html.

    Raises:
        MachineError: The folder can't be written.
    """
    write_report(folder, TEMPLATE, _document(report), _shared(report), {})


def size_text(outcome: PairsOutcome) -> str:
    """Return how many pairs and queries there are."""
    pairs = outcome.pairs
    return f"{plural(len(pairs.grade_P), 'pair')} of {plural(len(pairs.queries), 'query', 'queries')}"


def _lines(outcome: PairsOutcome) -> list[str]:
    lines = [f"{outcome.pairs.name}: {size_text(outcome)}", *(f"  {note}" for note in outcome.pairs.notes)]
    for model, estimates in outcome.estimates.items():
        said = [
            f"{name} {metric_text(each.value)}{_bounds_text(outcome, each, ' (95% interval {})')}"
            for name, each in estimates.items()
        ]
        lines.append(f"  {model}: {', '.join(said)}")
    return [*lines, *(f"  {sentence}" for sentence in _sentences(outcome))]


def _sentences(outcome: PairsOutcome) -> list[str]:
    """Return how each model compares with the first."""
    first = next(iter(outcome.estimates))
    return [f"{model} against {first}: {verdict.sentence}" for model, verdict in outcome.verdicts.items()]


def _bounds_text(outcome: PairsOutcome, estimate: Estimate, form: str = "{}") -> str:
    """Return an interval, or nothing where one query says nothing of others."""
    if len(outcome.pairs.queries) < 2:
        return ""
    return form.format(f"{metric_text(estimate.low)} to {metric_text(estimate.high)}")


def _document(report: PairsReport) -> dict[str, Any]:
    """Return the report for programs, every number unrounded."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sets": [_numbers(outcome) for outcome in report.outcomes],
        "draws": DRAWS,
        "seed": SEED,
        "facts": dict(report.facts),
        "command": report.command,
    }


def _numbers(outcome: PairsOutcome) -> dict[str, Any]:
    models = []
    for model, estimates in outcome.estimates.items():
        measures = {name: {"value": e.value, "low": e.low, "high": e.high} for name, e in estimates.items()}
        difference = None
        if verdict := outcome.verdicts.get(model):
            found = verdict.comparison
            difference = {"value": found.difference, "low": found.low, "high": found.high, "word": verdict.word}
        models.append({"model": model, "measures": measures, "difference_to_first": difference})
    pairs = outcome.pairs
    sizes = {"pairs": len(pairs.grade_P), "queries": len(pairs.queries), "documents": len(pairs.documents)}
    return {"name": pairs.name, "label_kind": pairs.kind, **sizes, "models": models, "notes": list(pairs.notes)}


def _shared(report: PairsReport) -> dict[str, Any]:
    """Return what the page and the Markdown file both tell."""
    names = MEASURES[report.outcomes[0].pairs.kind]
    sets = [
        {
            "name": outcome.pairs.name,
            "size": size_text(outcome),
            "models": _models(outcome),
            "sentences": _sentences(outcome),
            "grades": _grades(outcome),
            "notes": outcome.pairs.notes,
        }
        for outcome in report.outcomes
    ]
    return {
        "report": report,
        "sets": sets,
        "first": next(iter(report.outcomes[0].estimates)),
        "limits": LIMITS,
        "meanings": [(name, MEANINGS[name]) for name in names],
        "settings": [("Draws of the queries", f"{count_text(DRAWS)}, seed {SEED}"), *report.facts],
    }


def _models(outcome: PairsOutcome) -> Table:
    names = MEASURES[outcome.pairs.kind]
    rows: list[list[str | Cell]] = []
    for model, estimates in outcome.estimates.items():
        row: list[str | Cell] = [model]
        row += [Cell(metric_text(each.value), _bounds_text(outcome, each)) for each in estimates.values()]
        if verdict := outcome.verdicts.get(model):
            found = verdict.comparison
            bounds = f"{signed_text(found.low)} to {signed_text(found.high)}" if found.num_queries > 1 else ""
            row += [Cell(signed_text(found.difference), bounds), verdict.word]
        else:
            row += ["", ""]
        rows.append(row)
    heads = ["Model", *names, f"Difference in {names[0]}", "Verdict"]
    return Table(heads, rows, words=frozenset({0, len(heads) - 1}))


def _grades(outcome: PairsOutcome) -> Table:
    """Return the similarities of pairs of each grade, or of ranges of grades where there are many."""
    grade_P, shown = outcome.pairs.grade_P, []
    cuts = np.unique(grade_P)
    if len(cuts) > GRADES_SHOWN:
        cuts = np.unique(np.quantile(grade_P, np.linspace(0.0, 1.0, GRADES_SHOWN + 1))[:-1])
    part_P = np.searchsorted(cuts, grade_P, side="right") - 1
    for part in np.unique(part_P):
        own = part_P == part
        low, high = float(grade_P[own].min()), float(grade_P[own].max())
        name = number_text(low) if low == high else f"{number_text(low)} to {number_text(high)}"
        row: list[str | Cell] = [name, count_text(int(own.sum()))]
        for each in outcome.similarities.values():
            least, middle, most = (metric_text(float(value)) for value in np.quantile(each[own], QUANTILES))
            row.append(Cell(middle, f"{least} to {most}"))
        shown.append(row)
    return Table(["Grade" if outcome.pairs.kind == "grade" else "Label", "Pairs", *outcome.similarities], shown)
