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
        if key == "reasons":
            reasons = (value,) if isinstance(value, str) else _texts(value)
        elif _is_records(value):
            assert isinstance(value, Sequence)
            tables.append((key, tuple(_flat(record) for record in value)))
        elif _is_texts(value):
            tables.append((key, tuple({key: text} for text in _texts(value))))
        else:
            settings.append((key, value_text(key, value)))
    return reasons, tuple(settings), tuple(tables)


def records_table(records: Sequence[Record], *, characters: int, chosen: str | None = None) -> Table:
    """Return records as a table whose columns stand in the order in which they first appear.

    Args:
        records: What to show.
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


def _texts(value: object) -> tuple[str, ...]:
    """Return the entries of a list as texts."""
    if isinstance(value, Sequence):
        return tuple(value_text("", entry) for entry in value)
    return (value_text("", value),)


def _is_records(value: object) -> bool:
    """Return whether a value is a list of mappings."""
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0
    return is_list and all(isinstance(entry, Mapping) for entry in value)  # type: ignore[attr-defined]


def _is_texts(value: object) -> bool:
    """Return whether a value is a list of texts."""
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0
    return is_list and all(isinstance(entry, str) for entry in value)  # type: ignore[attr-defined]


def _cell(key: str, value: object) -> str:
    """Return a value of a record; in a table of many, a yes is easier to find than a true."""
    return ("yes" if value else "no") if isinstance(value, bool) else value_text(key, value)


def _flat(record: Mapping[str, object]) -> Record:
    """Return a record with nested mappings spread over columns; parts of a "bytes..." mapping are bytes."""
    cells: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            is_bytes = "bytes" in str(key)
            for inner, entry in value.items():
                cells[str(inner)] = value_text("bytes" if is_bytes else str(inner), entry)
        else:
            cells[str(key)] = _cell(str(key), value)
    return cells
