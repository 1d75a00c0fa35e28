"""The report of graded pairs: the measures of each model, their differences, and the similarities of each grade."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.graded import DRAWS, MEASURES, SEED
from vembed.pages.page import SYMBOLS, Cell, Items, Note, Page, Section, Table, command_blocks, pairs_table
from vembed.pages.text import count_text, metric_text, number_text, signed_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.graded import Estimate, PairsOutcome
    from vembed.pages.page import Block

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


def graded_page(outcomes: Sequence[PairsOutcome], facts: Sequence[tuple[str, str]], command: str) -> Page:
    """Return the report of graded pairs.

    Args:
        outcomes: One for each set, at least one.
        facts: System and versions.
    """
    head: list[Block] = []
    sections = []
    for number, outcome in enumerate(outcomes, start=1):
        name, first = outcome.pairs.name, next(iter(outcome.estimates))
        head.append(Note(size_text(outcome), lead=f"{name}:"))
        verdicts = [
            Note(verdict.sentence, lead=f"{model} against {first}:") for model, verdict in outcome.verdicts.items()
        ]
        notes = [Note(note, muted=True) for note in outcome.pairs.notes]
        if verdicts or notes:
            head.append(Items([*verdicts, *notes]))
        sections.append(Section(f"set-{number}", name, [models_table(outcome), grades_table(outcome)]))
    settings = [("Draws of the queries", f"{count_text(DRAWS)}, seed {SEED}"), *facts]
    meanings = [(name, MEANINGS[name]) for name in MEASURES[outcomes[0].pairs.kind]]
    method = Section(
        "method",
        "How it was measured",
        [
            pairs_table("Measures", meanings, "What the numbers mean."),
            Note(LIMITS, muted=True),
            pairs_table("Settings", settings, "Settings and versions."),
            *command_blocks(command),
        ],
    )
    return Page(
        kind="Graded pairs",
        title=", ".join(outcome.pairs.name for outcome in outcomes),
        head=head,
        sections=[*sections, method],
        document={
            "schema_version": SCHEMA_VERSION,
            "sets": [set_document(outcome) for outcome in outcomes],
            "draws": DRAWS,
            "seed": SEED,
            "facts": dict(facts),
            "command": command,
        },
    )


def size_text(outcome: PairsOutcome) -> str:
    """Return the numbers of pairs and queries."""
    pairs = outcome.pairs
    return f"{plural(len(pairs.grade_P), 'pair')} of {plural(len(pairs.queries), 'query', 'queries')}"


def models_table(outcome: PairsOutcome) -> Table:
    """Return the measures of each model and, where there are several, its difference to the first."""

    def measure(estimate: Estimate) -> Cell:
        has_interval = len(outcome.pairs.queries) > 1  # one query says nothing of others
        return Cell(
            metric_text(estimate.value),
            f"{metric_text(estimate.low)} to {metric_text(estimate.high)}" if has_interval else "",
        )

    title, caption = f"Models on {outcome.pairs.name}", "Each model with its 95% interval"
    names = MEASURES[outcome.pairs.kind]
    rows: list[list[str | Cell]] = [
        [model, *map(measure, estimates.values())] for model, estimates in outcome.estimates.items()
    ]
    if not outcome.verdicts:
        return Table(["Model", *names], rows, title=title, caption=f"{caption}.")
    for row, model in zip(rows, outcome.estimates, strict=True):
        if verdict := outcome.verdicts.get(model):
            gap = verdict.comparison
            bounds = f"{signed_text(gap.low)} to {signed_text(gap.high)}" if gap.num_queries > 1 else ""
            reading = Cell(f"{SYMBOLS[verdict.word]} {verdict.word}", tone=verdict.word.replace(" ", "-"))
            row += [Cell(signed_text(gap.difference), bounds), reading]
        else:
            row += ["", ""]
    heads = ["Model", *names, f"Difference in {names[0]}", "Verdict"]
    first = next(iter(outcome.estimates))
    caption = f"{caption}, and its difference to {first} on the same queries."
    return Table(heads, rows, words=frozenset({0, len(heads) - 1}), title=title, caption=caption)


def grades_table(outcome: PairsOutcome) -> Table:
    """Return the similarities of pairs of each grade, or of ranges of grades where there are many."""
    grade_P = outcome.pairs.grade_P
    cuts = np.unique(grade_P)
    if len(cuts) > GRADES_SHOWN:
        cuts = np.unique(np.quantile(grade_P, np.linspace(0.0, 1.0, GRADES_SHOWN + 1))[:-1])
    part_P = np.searchsorted(cuts, grade_P, side="right") - 1
    rows = []
    for part in np.unique(part_P):
        in_part_P = part_P == part
        low, high = float(grade_P[in_part_P].min()), float(grade_P[in_part_P].max())
        name = number_text(low) if low == high else f"{number_text(low)} to {number_text(high)}"
        row: list[str | Cell] = [name, count_text(int(in_part_P.sum()))]
        for similarity_P in outcome.similarities.values():
            least, middle, most = (
                metric_text(float(value)) for value in np.quantile(similarity_P[in_part_P], QUANTILES)
            )
            row.append(Cell(middle, f"{least} to {most}"))
        rows.append(row)
    return Table(
        ["Grade" if outcome.pairs.kind == "grade" else "Label", "Pairs", *outcome.similarities],
        rows,
        title=f"Similarities on {outcome.pairs.name}",
        caption="Similarity of the pairs of each grade: median, and the range that holds 90% of them.",
    )


def set_document(outcome: PairsOutcome) -> dict[str, object]:
    """Return the numbers of one set, unrounded."""
    models = []
    for model, estimates in outcome.estimates.items():
        difference = None
        if verdict := outcome.verdicts.get(model):
            gap = verdict.comparison
            difference = {"value": gap.difference, "low": gap.low, "high": gap.high, "word": verdict.word}
        measures = {
            name: {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            for name, estimate in estimates.items()
        }
        models.append({"model": model, "measures": measures, "difference_to_first": difference})
    pairs = outcome.pairs
    sizes = {"pairs": len(pairs.grade_P), "queries": len(pairs.queries), "documents": len(pairs.documents)}
    return {"name": pairs.name, "label_kind": pairs.kind, **sizes, "models": models, "notes": list(pairs.notes)}
