"""What happens to invalid rows: collect them all, then refuse the file or drop them within a budget.

Without a budget any invalid row refuses the source, after all of it was read. With one, so many rows are dropped,
counted and named, and one more refuses the source. A path that leads out of the data is never dropped.
"""

from __future__ import annotations

import re

from vembed.errors import DataError
from vembed.text import cut

MAX_LISTED = 20
MAX_LISTED_IN_NOTE = 3
MAX_KINDS = 1_000
MOST_SHOWN = 2_000
"""Characters of what is listed of one row."""

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\b\d[\d,.]*")
"""What differs from row to row in a reason: quoted values and numbers."""


class ProblemLog:
    """Count the invalid rows of one source; keep the first few.

    Args:
        skips: Most invalid rows that may be dropped; None refuses the source for any.
    """

    def __init__(self, skips: int | None = None) -> None:
        self._skips = skips
        self._listed: list[str] = []
        self._alike: dict[str, list[int]] = {}  # reason -> its line in the list, and how many rows it stands for
        self._num_never_dropped = 0
        self.count = 0

    @property
    def refused(self) -> bool:
        """Whether the source is lost already, so that its valid rows need not be kept."""
        return self.count > (self._skips or 0) or self._num_never_dropped > 0

    @property
    def lists_next(self) -> bool:
        """Whether the next invalid row will be shown, so that its reason is worth finding words for."""
        return len(self._listed) < MAX_LISTED

    def add_alike(self, where: str, reason: str) -> None:
        """Note a row with what is usually wrong in every row of a file: listed once, with how many rows there are."""
        if reason in self._alike:
            self.count += 1
            self._alike[reason][1] += 1
        else:
            if self.lists_next:
                self._alike[reason] = [len(self._listed), 1]
            self.add(where, reason)

    def add(self, where: str, reason: str, *, column: str | None = None, may_drop: bool = True) -> None:
        """Note one invalid row.

        Args:
            where: `file:line`.
            column: The column at fault, None for the row as a whole.
            may_drop: Whether it may be dropped; False refuses the source.
        """
        self.count += 1
        self._num_never_dropped += not may_drop
        if self.lists_next:
            self._listed.append(cut(f"{where}: {f'{cut(column)}: ' if column else ''}{reason}", MOST_SHOWN))

    def check(self, source: str) -> None:
        """Refuse the source when its invalid rows are over the budget.

        Raises:
            DataError: With the first problems and how many there are.
        """
        if self.refused:
            raise DataError(f"{self.listing(source)}\n{self._fix()}")

    def notes(self) -> tuple[str, ...]:
        """Return a sentence about the rows that were dropped, or nothing."""
        if not self.count:
            return ()
        rest = "; ..." if self.count > MAX_LISTED_IN_NOTE else ""
        return (f"{plural(self.count, 'invalid row')} dropped: {'; '.join(self._listed[:MAX_LISTED_IN_NOTE])}{rest}.",)

    def listing(self, source: str) -> str:
        """Return the first problems, one a line, and how many there are."""
        lines = [f"{plural(self.count, 'invalid row')} in {source}:"]
        lines += [f"  {problem}" for problem in self._listed]
        for place, rows in self._alike.values():
            lines[1 + place] += f" (and {plural(rows - 1, 'row')} alike)" if rows > 1 else ""
        told = len(self._listed) + sum(rows - 1 for _, rows in self._alike.values())
        if self.count > told:
            lines.append(f"  ... and {self.count - told:,} more")
        return "\n".join(lines)

    def _fix(self) -> str:
        if self._num_never_dropped:
            return "Fix the rows: a path that leads out of the data refuses the source, whatever the policy."
        if self._skips is not None:
            return f"That is more than max_invalid_records: {self._skips}; fix the rows or raise it."
        return f"Fix the rows, or drop them with skip_invalid_records: true, max_invalid_records: {self.count}"


class AllProblems(ProblemLog):
    """Drop all invalid rows whatever their number, and keep what is wrong with them by kind, for a check of the data.

    Attributes:
        kinds: (column, reason without what differs from row to row) -> number of rows, and the first few as
            (`file:line`, reason).
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[tuple[str, str], tuple[int, list[tuple[str, str]]]] = {}

    @property
    def refused(self) -> bool:
        """The source is never lost."""
        return False

    def add_alike(self, where: str, reason: str) -> None:
        """Note a row as any other."""
        self.add(where, reason)

    def add(self, where: str, reason: str, *, column: str | None = None, may_drop: bool = True) -> None:
        """Note one invalid row, and count its kind."""
        super().add(where, reason, column=column, may_drop=may_drop)
        reason = cut(reason or "missing", MOST_SHOWN)
        general = "missing" if reason.startswith("missing") else _VARIABLE.sub("...", reason)
        kind = (column or "", general)
        if kind not in self.kinds and len(self.kinds) >= MAX_KINDS:
            kind = ("", "other problems")
        count, first = self.kinds.get(kind, (0, []))
        self.kinds[kind] = (count + 1, first if len(first) >= MAX_LISTED_IN_NOTE else [*first, (where, reason)])

    def listing(self, source: str) -> str:
        """Return the first row of each kind, the most frequent first, and how many there are."""
        lines = [f"{plural(self.count, 'invalid row')} in {source}:"]
        for (column, _), (count, first) in sorted(self.kinds.items(), key=lambda each: -each[1][0])[:MAX_LISTED]:
            where, reason = first[0]
            more = f" (and {plural(count - 1, 'row')} alike)" if count > 1 else ""
            lines.append(f"  {where}: {f'{cut(column)}: ' if column else ''}{reason}{more}")
        return "\n".join(lines)


def plural(count: int, noun: str, many: str | None = None) -> str:
    """Return a count with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"
