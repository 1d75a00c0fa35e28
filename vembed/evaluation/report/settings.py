"""A plan taken apart for people: reasons, single settings, and lists of records as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from vembed.evaluation.pages import Table
from vembed.evaluation.text import clip, one_line, value_text

Record: TypeAlias = Mapping[str, str]
PlanParts: TypeAlias = tuple[tuple[str, ...], tuple[tuple[str, str], ...], tuple[tuple[str, tuple[Record, ...]], ...]]


def plan_parts(plan: Mapping[str, object]) -> PlanParts:
    """Split a plan into its reasons, (key, value) of single settings, and (key, records) of lists.

    Lists of mappings, such as the candidates, are records of their keys; lists of texts are records of one column.
    """
    reasons: tuple[str, ...] = ()
    settings, tables = [], []
    for key, value in plan.items():
        listed = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
        entries = [value] if listed is None else list(listed)
        records = [_flat(entry) for entry in entries if isinstance(entry, Mapping)]
        texts = [{key: entry} for entry in entries if isinstance(entry, str)]
        if key == "reasons":
            reasons = tuple(value_text("", entry) for entry in entries)
        elif listed and len(entries) in {len(records), len(texts)}:
            tables.append((key, tuple(records or texts)))
        else:
            settings.append((key, value_text(key, value)))
    return reasons, tuple(settings), tuple(tables)


def records_table(records: Sequence[Record], *, characters: int, chosen: str | None = None) -> Table:
    """Return records as a table whose columns stand in the order in which they first appear.

    Args:
        characters: At which length a value is cut.
        chosen: Marks the records that have it as their "strategy", by a word and a class.
    """
    names = list(dict.fromkeys(key for record in records for key in record))
    marked = {row for row, record in enumerate(records) if chosen is not None and record.get("strategy") == chosen}
    return Table(
        [one_line(name.replace("_", " ")) for name in names],
        [
            [
                f"✓ {one_line(record[name])} (chosen)"
                if row in marked and name == "strategy"
                else clip(record.get(name, ""), characters).short
                for name in names
            ]
            for row, record in enumerate(records)
        ],
        words=frozenset(range(len(names))),
        tones=dict.fromkeys(marked, "chosen"),
    )


def _flat(record: Mapping[str, object]) -> Record:
    """Return a record with nested mappings spread over columns; parts of a "bytes..." mapping are bytes."""
    cells: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            is_bytes = "bytes" in str(key)
            for inner, entry in value.items():
                cells[str(inner)] = value_text("bytes" if is_bytes else str(inner), entry)
        elif isinstance(value, bool):
            cells[str(key)] = "yes" if value else "no"  # in a table of many easier to find than a true
        else:
            cells[str(key)] = value_text(str(key), value)
    return cells
