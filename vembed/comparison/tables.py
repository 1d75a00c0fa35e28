"""The tables of a comparison, for its page, its Markdown file and the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vembed.comparison.differences import COST_HEADS
from vembed.evaluation.report.comparison import difference_cell, largest_bound, mean_cell, reading_cell
from vembed.evaluation.report.examples import pictures_of, text_of
from vembed.evaluation.significance import CONFIDENCE
from vembed.pages.page import Cell, Table
from vembed.pages.pictures import picture_name
from vembed.pages.terminal import table_lines
from vembed.pages.text import DASH, clip, metric_text, one_line, p_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.batch import Item
    from vembed.comparison.compare import RunComparison
    from vembed.comparison.differences import Difference
    from vembed.comparison.pairs import Line, PairWord, SetTable
    from vembed.comparison.queries import Changes
    from vembed.comparison.runs import Run
    from vembed.evaluation.report.examples import Example
    from vembed.evaluation.significance import VerdictWord

NAME_CHARACTERS = 40
VALUE_CHARACTERS = 160
INTERVAL = f"{100 * CONFIDENCE:g}% interval"

WORDS: dict[PairWord, VerdictWord] = {"better": "improved", "worse": "worse", "no difference": "within noise"}


def metrics_table(table: SetTable, metric: str, baseline: Run) -> Table:
    """Return every run on a set in one metric, tested against the baseline."""
    lines = table.lines[metric]
    reach = largest_bound([line.row for line in lines])
    is_corrected = any(line.corrected != line.p_value for line in lines)
    rows = []
    for line in lines:
        compared = line.row.verdict is not None
        tests = [line.p_value, *([line.corrected] if is_corrected else [])]
        rows.append(
            [
                _run_name(line.name),
                mean_cell(line.row, "final"),
                difference_cell(line.row) if compared else DASH,
                *map(p_text, tests),
                _reading(line, reach) if compared else _without_test(line, baseline),
            ]
        )
    heads = ["Run", one_line(metric), "Difference", "p", *(["p (Holm)"] if is_corrected else []), "Reading"]
    tones = {place: "decisive" for place, line in enumerate(lines) if line.name == baseline.name}
    return Table(heads, rows, words=frozenset({0, len(heads) - 1}), tones=tones)


def _reading(line: Line, reach: float) -> Cell:
    """Return what the corrected test says, drawn and in words; of the untrained model what its interval says."""
    verdict = line.row.verdict
    if verdict is None or line.word == "not compared":
        return reading_cell(line.row, reach=reach)
    return reading_cell(replace(line.row, verdict=replace(verdict, word=WORDS[line.word])), reach=reach, word=line.word)


def _without_test(line: Line, baseline: Run) -> str:
    return "baseline" if line.name == baseline.name else line.why_not


def differences_table(found: Sequence[Difference], runs: Sequence[Run], head: str) -> Table:
    """Return what differs, a column for each run."""
    rows = [[clip(each.name, VALUE_CHARACTERS).short, *(_value(value) for value in each.values)] for each in found]
    heads = [head, *(_run_name(run.name) for run in runs)]
    return Table(heads, rows, words=frozenset(range(len(heads))))


def costs_table(comparison: RunComparison) -> Table:
    """Return what each run took, a column for each."""
    cells = [cost.cells for cost in comparison.costs]
    rows = [[head, *(column[place] for column in cells)] for place, head in enumerate(COST_HEADS)]
    return Table(["", *(_run_name(run.name) for run in comparison.runs)], rows)


def changes_table(comparison: RunComparison, changes: Changes) -> Table:
    """Return the most changed queries of a run, with what each model put first."""
    rows = [
        [
            _item(change.run.item, change.run.query_id),
            f"{metric_text(change.run.baseline)} → {metric_text(change.run.final)}",
            *(_first(example, has_texts=comparison.task is not None) for example in (change.baseline, change.run)),
        ]
        for change in (*changes.won, *changes.lost)
    ]
    heads = ["Query", comparison.metric, *(f"{name} put first" for name in (comparison.baseline.name, changes.run))]
    return Table(heads, rows, words=frozenset({0, 2, 3}))


def _first(example: Example, *, has_texts: bool) -> str:
    if not example.hits:
        return "nothing"
    hit = example.hits[0]
    mark = ("✓ " if hit.is_relevant else "✗ ") if has_texts else ""
    return f"{mark}{_item(hit.item, hit.document_id)}"


def _item(item: Item | None, identifier: str) -> str:
    """Return a text, or what stands for a picture."""
    shown = text_of(item) or next(map(picture_name, pictures_of(item)), identifier)
    return clip(shown, VALUE_CHARACTERS).short


def terminal_lines(comparison: RunComparison) -> list[str]:
    """Return the short table and the verdicts that end the command."""
    lines = []
    for table in comparison.tables:
        found = metrics_table(table, table.metric, comparison.baseline)
        _, metric, difference, *others = found.heads
        heads = ["", metric, INTERVAL, difference.lower(), INTERVAL, *others]
        body = [_flat(row) for row in found.rows]
        shown = table_lines(Table(heads, body, words=frozenset({0, len(heads) - 1})))
        lines += [f"{one_line(table.name)} ({table.role} set)", *shown, ""]
    return [*lines, *(each.sentence for each in comparison.verdicts)]


def _flat(row: Sequence[str | Cell]) -> list[str]:
    """Return a row with the intervals of its two numbers in columns of their own."""
    name, *cells = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
    value, difference, *others = cells
    numbers = [part for cell in (value, difference) for part in (cell.text, cell.bounds)]
    return [name.text, *numbers, *(cell.text for cell in others)]


def _run_name(name: str) -> str:
    return clip(name, NAME_CHARACTERS).short


def _value(value: str) -> str:
    return clip(value, VALUE_CHARACTERS).short
