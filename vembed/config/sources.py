"""Settings and problems with the place they come from, before anything is known about their validity."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vembed.errors import ConfigError

MAX_LINES = 100
"""Problems listed; the others are counted."""


class Refused(Exception):  # noqa: N818
    """A text that can't be read, as a whole or in one value; `line` is 0 where none is to blame."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


class Place(NamedTuple):
    """Where a setting was written; places sort in reading order, the file before the overrides."""

    layer: int  # 0 for the file, 1 for overrides
    number: int  # line in the file (0 for the file as a whole), or position of the override
    label: str  # what a message says: `configs/a.yaml:7` or `override learning_rate=-1`

    @property
    def source(self) -> str:
        """`file:line`, or the word "override"."""
        return self.label if self.layer == 0 else "override"


class Entry(NamedTuple):
    """A key with its value as it was written."""

    name: str  # the key or alias
    value: object  # what the file's or the override's syntax makes of it
    place: Place
    part: str | None = None  # for an override `name.part=value`, the name within the mapping
    part_places: Mapping[str, Place] = {}  # for a mapping, where each of its own keys stands


class Problem(NamedTuple):
    """One thing to fix."""

    place: Place
    text: str  # what is wrong, why, and the fix
    subject: str | None = None  # the key, left out where the place names it already

    def __str__(self) -> str:
        """Return the line that a user reads."""
        named = self.subject is not None and self.place.layer == 0
        return f"{self.place.label}: {self.subject}: {self.text}" if named else f"{self.place.label}: {self.text}"


class Layer(NamedTuple):
    """What one source says."""

    entries: list[Entry] | None  # None when it can't be read as a whole
    problems: list[Problem]


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise all problems in one error, in reading order, if there is any.

    Raises:
        ConfigError: One line for each problem.
    """
    lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=lambda problem: problem.place[:2])))
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more problems"]
    if lines:
        raise ConfigError("\n".join(lines))
