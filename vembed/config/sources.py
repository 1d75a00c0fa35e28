"""Settings and problems with the place they come from, before anything is known about their validity."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vembed.errors import ConfigError

MAX_DEPTH = 8
"""Nested lists and mappings; no key needs more than two."""

MAX_NODES = 2_000
"""Keys and values of a file; bounds the time that parsing and explaining them can take."""

MAX_LINES = 100
"""Problems listed; the others are counted."""


class Refused(Exception):  # noqa: N818
    """A text that can't be read, as a whole or in one value.

    Attributes:
        line: 1-based, or 0 where no line is to blame.
        text: What is wrong and the fix.
    """

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(frozen=True, slots=True)
class FileItem:
    """A key of the outermost mapping of a file.

    Attributes:
        name: The key.
        value: Scalars, lists and dicts.
        line: Line of the key.
        part_lines: Line of each key of a mapping value.
    """

    name: str
    value: object
    line: int
    part_lines: Mapping[str, int] = field(default_factory=dict)


class Place(NamedTuple):
    """Where a setting was written; places sort in reading order, the file before the overrides.

    Attributes:
        layer: 0 for the file, 1 for overrides.
        number: Line in the file (0 for the file as a whole), or position of the override.
        label: What a message says: `configs/a.yaml:7` or `override learning_rate=-1`.
    """

    layer: int
    number: int
    label: str

    @property
    def source(self) -> str:
        """`file:line`, or the word "override"."""
        return self.label if self.layer == 0 else "override"


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value as it was written.

    Attributes:
        name: The key or alias as written.
        value: What the file's or the override's syntax makes of it.
        place: Where it stands.
        part: For an override `name.part=value`, the name within the mapping.
        part_places: For a mapping, where each of its own keys stands.
    """

    name: str
    value: object
    place: Place
    part: str | None = None
    part_places: Mapping[str, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to fix.

    Attributes:
        place: Where it was written.
        text: What is wrong, why, and the fix.
        subject: The key, left out where the place names it already.
    """

    place: Place
    text: str
    subject: str | None = None

    def __str__(self) -> str:
        """Return the line that a user reads."""
        named = self.subject is not None and self.place.layer == 0
        return f"{self.place.label}: {self.subject}: {self.text}" if named else f"{self.place.label}: {self.text}"


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise all problems in one error, if there is any.

    Args:
        problems: In any order.

    Raises:
        ConfigError: One line for each problem, in reading order.
    """
    lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=lambda problem: problem.place[:2])))
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more problems"]
    if lines:
        raise ConfigError("\n".join(lines))
