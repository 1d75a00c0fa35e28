"""Describe in a few lines what was read of a source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.batch import Composed, pictures_in
from vembed.data.columns import WEIGHT_COLUMN
from vembed.redact import redact
from vembed.text import cut, plural, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Item
    from vembed.data.table import LoadedRecords, Record


def describe_source(path: str, loaded: LoadedRecords, *, parts: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return lines on what was read, by label: "data", "columns" (where the source has any) and "example".

    Args:
        path: The source, as the user named it.
        parts: Use ("dev", "test") -> number of rows held out for it; None where all rows are trained on.
    """
    table = loaded.table
    rows = f"{plural(len(table), 'row')} of {cut(path, 200)}"
    if parts:
        uses = {"train": len(table) - sum(parts.values()), **parts}
        rows += f": {', '.join(f'{count:,} {use}' for use, count in uses.items())}"
    facts = [rows]
    if loaded.num_invalid:
        facts.append(f"{plural(loaded.num_invalid, 'invalid row')} dropped")
    _, negatives_M = table.numbers("negatives")  # one number per hard negative of any row
    facts.append(plural(len(negatives_M), "hard negative"))
    lines = {"data": "; ".join(facts)}
    if columns := loaded.columns.text:
        lines["columns"] = columns
    lines["example"] = example(table[0])
    return {name: redact(text) for name, text in lines.items()}


def example(record: Record) -> str:
    """Return one record in a line, every text shortened."""

    def shown(item: Item) -> str:
        if isinstance(item, str):
            return quoted(" ".join(item[:200].split()))
        pictures = list(pictures_in([item]))
        words = f"picture {quoted(pictures[0].path)}" if len(pictures) == 1 else "pictures"
        return f"{words} with {quoted(item.text)}" if isinstance(item, Composed) and item.text else words

    parts = [f"query {shown(record.query)}"]
    for name, items in (("positive", record.positives), ("negative", record.negatives)):
        if items:
            more = f" and {len(items) - 1:,} more" if len(items) > 1 else ""
            parts.append(f"{name} {shown(items[0])}{more}")
    if record.label is not None:
        parts.append(f"label {cut(str(record.label), 40)}")
    if record.scores:
        more = f" and {len(record.scores) - 5:,} more" if len(record.scores) > 5 else ""
        parts.append("scores " + ", ".join(f"{score:g}" for score in record.scores[:5]) + more)
    for name, number in record.columns.items():
        if (name, number) != (WEIGHT_COLUMN.name, WEIGHT_COLUMN.default):  # a row that counts once needs no word
            parts.append(f"{cut(name, 40)} {number if isinstance(number, int) else format(number, 'g')}")
    return ", ".join(parts)
