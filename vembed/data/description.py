"""What was read of a source, in a few lines: rows, which column was taken as what, and one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.batch import Composed, Image, pictures_in
from vembed.data.columns import WEIGHT_COLUMN
from vembed.redact import redact
from vembed.text import cut, plural, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Item
    from vembed.data.table import LoadedRecords, Record


def describe(path: str, loaded: LoadedRecords, *, parts: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return what was read of a source of records by label: "data", "columns" (where the source has any), "example".

    Args:
        parts: How many of the loaded rows aren't trained on, by what they are for; None says nothing of it.
    """
    table = loaded.table
    counts = plural(len(table), "row")
    facts = [f"{counts} of {cut(path, 200)}"]
    if parts:
        uses = {"train": len(table) - sum(parts.values()), **parts}
        facts[0] += f": {', '.join(f'{count:,} {use}' for use, count in uses.items())}"
    if loaded.num_invalid:
        facts.append(f"{plural(loaded.num_invalid, 'invalid row')} dropped")
    facts.append(plural(len(table.numbers("negatives")[1]), "hard negative"))
    columns = loaded.columns.text
    said = {"data": "; ".join(facts), **({"columns": columns} if columns else {}), "example": example(table[0])}
    return {name: redact(text) for name, text in said.items()}


def example(record: Record) -> str:
    """Return one record in a line, every text shortened."""
    parts = [f"query {_shown(record.query)}"]
    for name, items in (("positive", record.positives), ("negative", record.negatives)):
        if items:
            more = f" and {len(items) - 1:,} more" if len(items) > 1 else ""
            parts.append(f"{name} {_shown(items[0])}{more}")
    if record.label is not None:
        parts.append(f"label {cut(str(record.label), 40)}")
    parts += ["scores " + ", ".join(f"{score:g}" for score in record.scores[:5])] if record.scores else []
    same = {WEIGHT_COLUMN.name: WEIGHT_COLUMN.default}
    parts += [f"{cut(name, 40)} {number:g}" for name, number in record.columns.items() if same.get(name) != number]
    return ", ".join(parts)


def _shown(item: Item) -> str:
    if isinstance(item, str):
        return quoted(" ".join(item[:200].split()))
    pictures = list(pictures_in([item]))
    shown = f"picture {quoted(pictures[0].path)}" if isinstance(item, Image) or len(pictures) == 1 else "pictures"
    return f"{shown} with {quoted(item.text)}" if isinstance(item, Composed) and item.text else shown
