"""The plan on the report's page: its reasons, its settings, and the strategies that it compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vembed.pages.page import Note, NoteList, Section, Table, pairs_table
from vembed.pages.text import value_text

if TYPE_CHECKING:
    from vembed.pages.page import Block

NOT_AT_ONCE = "never at once"
"""Column of a candidate's memory: bytes of parts that don't exist at the same time, which the total leaves out."""

PEAK_CAPTION = "The total is that of a step's worst moment: the parts, less the bytes that are never there at once."
"""Caption of a table that has this column."""


def plan_section(plan: Mapping[str, object]) -> Section:
    """Return the reasons of the plan, its settings, and the strategies that were compared."""
    reasons, settings, tables = plan_parts(plan)
    blocks: list[Block] = []
    if reasons:
        blocks.append(NoteList([Note(reason) for reason in reasons], ordered=True))
    if settings:
        blocks.append(pairs_table("Plan", settings, "The settings of the plan."))
    blocks += [records_table(name, rows) for name, rows in tables]
    return Section("plan", "Plan", blocks or [Note("No plan was given.", muted=True)])


def plan_parts(
    plan: Mapping[str, object],
) -> tuple[list[str], list[tuple[str, str]], list[tuple[str, list[dict[str, str]]]]]:
    """Split a plan into its reasons, its settings as (key, value), and its tables as (key, records).

    Lists of mappings, such as the candidates, are records of their keys; lists of texts are records of one column.
    """
    reasons: list[str] = []
    settings: list[tuple[str, str]] = []
    records: list[tuple[str, list[dict[str, str]]]] = []
    for key, value in plan.items():
        entries = list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
        if key == "reasons":
            reasons = [value_text("", entry) for entry in ([value] if entries is None else entries)]
        elif entries and all(isinstance(entry, Mapping) for entry in entries):
            records.append((key, [_flat(entry) for entry in entries]))
        elif entries and all(isinstance(entry, str) for entry in entries):
            records.append((key, [{key: entry} for entry in entries]))
        else:
            settings.append((key, value_text(key, value)))
    return reasons, settings, records


def _flat(record: Mapping[str, object]) -> dict[str, str]:
    """Return a record with nested mappings spread over columns; parts of a "bytes..." mapping are bytes."""
    # `value_text` shows bytes for a key that ends in "bytes", which the names of the parts don't: they are given one.
    cells: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            format_key = "bytes" if "bytes" in str(key) else ""
            for inner, entry in value.items():
                if format_key and inner == "apart" and isinstance(entry, int):
                    # plan.json holds it as a negative part, so that the parts add up to the total. No size is negative.
                    cells[NOT_AT_ONCE] = value_text(format_key, -entry)
                else:
                    cells[str(inner)] = value_text(format_key or str(inner), entry)
        elif isinstance(value, bool):
            cells[str(key)] = "yes" if value else "no"  # in a table of many easier to find than a true
        else:
            cells[str(key)] = value_text(str(key), value)
    return cells


def records_table(key: str, records: Sequence[Mapping[str, str]]) -> Table:
    """Return records of the plan as a table whose columns stand in the order in which they first appear."""
    # Records may lack keys of others: a candidate that doesn't fit has no speed.
    names = list(dict.fromkeys(name for record in records for name in record))
    # Several candidates have the strategy of the chosen one, e.g. with and without gradient checkpointing.
    marked = {row for row, record in enumerate(records) if record.get("recommended") == "yes"}
    rows = [
        [
            f"✓ {record[name]} (chosen)" if row in marked and name == "strategy" else record.get(name, "")
            for name in names
        ]
        for row, record in enumerate(records)
    ]
    return Table(
        [name.replace("_", " ") for name in names],
        rows,
        text_columns=frozenset(range(len(names))),
        tones=dict.fromkeys(marked, "chosen"),
        title=key.replace("_", " ").capitalize(),
        caption=PEAK_CAPTION if NOT_AT_ONCE in names else "",
    )
