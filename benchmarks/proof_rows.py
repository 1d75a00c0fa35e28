"""What a proof finds: a row for each finding, written as JSON lines and as a Markdown table the moment it is known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

State: TypeAlias = Literal["held", "FAILED", "measured", "skipped"]
"""Whether what must be true is; "measured" where there are only figures to read."""

LONGEST_WORDS = 400
"""Most characters of a reason or an error in a row; the log has the whole of an error."""


class Skipped(Exception):  # noqa: N818 - no error: the proof continues
    """This machine, or what is installed on it, can't do a step; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a step runs."""

    device: str  # "cpu" or "cuda"
    folder: Path  # for what it writes

    @property
    def is_small(self) -> bool:
        """Whether shapes are tiny: a CPU shows that the steps work, not how fast a GPU is."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step found in one case."""

    case: str
    figures: dict[str, Any]
    held: bool | None = None  # None where there is nothing that must be true
    why_not: str = ""  # why the case can't run here; empty where it ran

    @property
    def state(self) -> State:
        """The word of its row."""
        if self.why_not:
            return "skipped"
        return "measured" if self.held is None else "held" if self.held else "FAILED"


@dataclass(frozen=True, slots=True)
class Step:
    """One part of the proof."""

    name: str
    run: Callable[[Setting], Iterable[Finding]]
    seconds: int  # about what it takes on a GPU; with less time left it isn't begun
    limit_seconds: int = 240  # it is ended after so long


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the proof."""

    step: str
    case: str
    state: State
    figures: dict[str, Any]
    words: str = ""  # why it was skipped, or what the error was
    seconds: float = 0.0  # since the row before of the same step


class Report:
    """Writes rows into a folder: `rows.jsonl` and `proof.md`, both whole after each row.

    Args:
        folder: Is made where it is missing; a proof in it is replaced.
        title: First line of the table's file.
    """

    def __init__(self, folder: Path, title: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._lines, self._table = folder / "rows.jsonl", folder / "proof.md"
        self._lines.write_text("", "utf-8")
        self._table.write_text(f"# {title}\n\n| step | case | | figures | s |\n|---|---|---|---|---|\n", "utf-8")

    def add(self, row: Row) -> None:
        """Write a row and print it."""
        self.rows.append(row)
        content = {name: getattr(row, name) for name in Row.__slots__}
        with self._lines.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(content, default=str) + "\n")
        said = "; ".join(filter(None, [show_figures(row.figures), row.words[:LONGEST_WORDS]]))
        cells = (row.step, row.case, row.state, said, f"{row.seconds:.1f}")
        with self._table.open("a", encoding="utf-8") as table:
            table.write("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |\n")
        print(f"{row.state:9} {row.step}: {row.case}  {said}", flush=True)

    def close(self) -> int:
        """Write how many rows there are of each state; return the exit code: 1 where something failed."""
        states = [row.state for row in self.rows]
        words: tuple[State, ...] = ("held", "FAILED", "measured", "skipped")
        summary = ", ".join(f"{states.count(word)} {word}" for word in words)
        with self._table.open("a", encoding="utf-8") as table:
            table.write(f"\n{summary}\n")
        print(summary)
        return 1 if "FAILED" in states else 0


def show_figures(figures: dict[str, Any]) -> str:
    """Return figures as words: `name 1.2, other 3`; bytes as GiB, seconds and ratios with three digits."""
    return ", ".join(f"{name.removesuffix('_bytes')} {_show(name, value)}" for name, value in figures.items())


def _show(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"({show_figures(value)})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / (1 << 30):.3g} GiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
