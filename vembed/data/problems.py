"""What happens to invalid rows: collect them all, then refuse the file or drop them within a budget.

Without a budget any invalid row refuses the source, after all of it was read. With one, so many rows are dropped,
counted and named, and one more refuses the source. A path that leads out of the data is never dropped.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from pathlib import PurePath
from typing import NamedTuple

from vembed.errors import DataError
from vembed.text import cut, plural

MAX_LISTED = 20
MAX_LISTED_IN_NOTE = 3
MAX_PLACES = 3
MAX_KINDS = 1_000
MOST_SHOWN = 2_000
"""Characters of what is listed of one row."""

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b\d[\d,.]*")
"""What differs from row to row in a reason: quoted values and numbers."""


_NOT_UTF8 = {
    ".csv": "not valid UTF-8",
    ".tsv": "not valid UTF-8",
    ".jsonl": "invalid UTF-8",  # the other words are of an escape that was cut in two
    ".txt": "invalid UTF-8",
}
"""End of the name of a file that iconv can read -> what the reason of a row that isn't UTF-8 begins with."""

_MISSING = "missing"
"""What the reason of a missing column begins with; what else it says differs from row to row."""


class Kind(NamedTuple):
    """The rows with which the same is wrong, but for what differs from row to row."""

    size: int
    first: list[tuple[str, str]]  # (`file:line`, reason) of the first few
    is_same: bool  # whether all have one reason to the letter

    def line(self, column: str, num_rows: int | None) -> str:
        """Return what is wrong in one line: "t.csv:3, 7, 9 and 41 more rows: query: empty text"."""
        where, reason = self.first[0]
        if self.size == num_rows and self.size > 1:
            where = f"all {num_rows:,} rows, the first {where}"
        elif self.size > 1:
            more = f" and {plural(self.size - len(self.first), 'more row')}" if self.size > len(self.first) else ""
            where = _places([place for place, _ in self.first]) + more + ("" if self.is_same else ", the first")
        return cut(f"{where}: {f'{cut(column)}: ' if column else ''}{reason}", MOST_SHOWN)


@lru_cache(maxsize=256)  # a file of a million bad lines has few reasons, and each costs as much as reading a line
def _in_general(reason: str) -> tuple[str, str]:
    """Return a reason as it is shown, and without what differs from row to row."""
    reason = cut(reason, MOST_SHOWN) or _MISSING
    return reason, _MISSING if reason.startswith(_MISSING) else _VARIABLE.sub("...", reason)


class ProblemLog:
    """Count the invalid rows of one source by what is wrong with them; keep the first few of each kind.

    Args:
        skips: Most invalid rows that may be dropped; None refuses the source for any.

    Attributes:
        kinds: By (column, reason without what differs from row to row), in the order met.
    """

    def __init__(self, skips: int | None = None) -> None:
        self._skips = skips
        self.kinds: dict[tuple[str, str], Kind] = {}
        self._num_never_dropped = 0
        self.count = 0

    @property
    def refused(self) -> bool:
        """Whether the source is lost already, so that its valid rows need not be kept."""
        return self.count > (self._skips or 0) or self._num_never_dropped > 0

    def lists_missing(self, column: str) -> bool:
        """Return whether the next row without a column will be shown, so that its reason is worth finding words for."""
        return (column, _MISSING) not in self.kinds

    def add(self, where: str, reason: str, *, column: str | None = None, may_drop: bool = True) -> None:
        """Note one invalid row.

        Args:
            where: `file:line`.
            reason: Empty for a missing column after the first row without it.
            column: The column at fault, None for the row as a whole.
            may_drop: Whether it may be dropped; False refuses the source.
        """
        self.count += 1
        self._num_never_dropped += not may_drop
        reason, general = _in_general(reason)
        name = (column or "", general)
        if name not in self.kinds and len(self.kinds) >= MAX_KINDS:
            name = ("", "other problems")
        known = self.kinds.get(name, Kind(0, [], is_same=True))
        is_same = known.is_same and (general == _MISSING or not known.first or known.first[0][1] == reason)
        first = known.first if len(known.first) >= MAX_PLACES else [*known.first, (where, reason)]
        self.kinds[name] = Kind(known.size + 1, first, is_same)

    def check(self, source: str, num_rows: int | None = None) -> None:
        """Refuse the source when its invalid rows are over the budget.

        Args:
            num_rows: Of the source, valid or not.

        Raises:
            DataError: With the first problems and how many there are.
        """
        if self.refused:
            raise DataError(f"{self.listing(source, num_rows)}\n{self._fix(num_rows)}")

    def notes(self) -> tuple[str, ...]:
        """Return a sentence about the rows that were dropped, or nothing."""
        if not self.count:
            return ()
        lines = [kind.line(column, None) for (column, _), kind in islice(self.kinds.items(), MAX_LISTED_IN_NOTE)]
        rest = "; ..." if len(self.kinds) > MAX_LISTED_IN_NOTE else ""
        return (f"{plural(self.count, 'invalid row')} dropped: {'; '.join(lines)}{rest}.",)

    def listing(self, source: str, num_rows: int | None = None) -> str:
        """Return what is wrong, a line for each kind, and how many rows there are."""
        lines = [f"{plural(self.count, 'invalid row')} in {source}:"]
        listed = list(islice(self.kinds.items(), MAX_LISTED))
        lines += [f"  {kind.line(column, num_rows)}" for (column, _), kind in listed]
        if (rest := self.count - sum(kind.size for _, kind in listed)) > 0:
            lines.append(f"  ... and {plural(rest, 'more row')}")
        return "\n".join(lines)

    def _fix(self, num_rows: int | None) -> str:
        if self._num_never_dropped:
            return "Fix the rows: a path that leads out of the data refuses the source, whatever the policy."
        encoding = self._encoding()
        if self.count == num_rows:
            return f"Fix the rows{encoding}."
        if self._skips is not None:
            return f"That is more than max_invalid_records: {self._skips}; fix the rows{encoding} or raise it."
        return (
            f"Fix the rows{encoding}, or drop them with skip_invalid_records: true, max_invalid_records: {self.count}"
        )

    def _encoding(self) -> str:
        """Return how a text file becomes UTF-8, in brackets, where one isn't; else nothing."""
        for kind in self.kinds.values():
            where, reason = kind.first[0]
            file = where.rpartition(":")[0]
            suffix = PurePath(file).suffix
            if suffix in _NOT_UTF8 and reason.startswith(_NOT_UTF8[suffix]):
                return f" (save {file} as UTF-8, e.g. iconv -f latin1 -t utf-8 {file} > new{suffix})"
        return ""


class AllProblems(ProblemLog):
    """Drop all invalid rows whatever their number, for a check of the data."""

    @property
    def refused(self) -> bool:
        """The source is never lost."""
        return False


def _places(places: list[str]) -> str:
    """Return some `file:line`s in a row, a file once: "a.csv:3, 7, b.csv:1"."""
    shown, last = [], ""
    for place in places:
        file, colon, line = place.rpartition(":")
        shown.append(line if colon and file == last else place)
        last = file
    return ", ".join(shown)
