"""The stamp of a run: what it is made of, compared before a checkpoint of it is trained on.

This module finds the differences; which of them are harmless is the trainer's to judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vembed.checkpoint.format import JSON

ABSENT: Final = "(absent)"
"""Stands for the value of a key that only one of two stamps has."""


@dataclass(frozen=True, slots=True)
class StampDifference:
    """One key in which a checkpoint and the present run differ.

    Attributes:
        key: Where, dotted through mappings: `strategy`, `config.learning_rate`.
        saved: The checkpoint's value.
        current: The present run's value.
    """

    key: str
    saved: JSON
    current: JSON

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.saved)} in the checkpoint, {_shown(self.current)} in this run"


def check_stamp(saved: Mapping[str, JSON], current: Mapping[str, JSON]) -> list[StampDifference]:
    """Compare the stamp of a checkpoint with that of the present run.

    Args:
        saved: The checkpoint's, as it came back from JSON.
        current: The run's own; a tuple equals the list that JSON makes of it.

    Returns:
        The differences in the order of the checkpoint's keys, then the keys that only the run has. Numbers are equal
        by value (1 and 1.0), a bool only to a bool.
    """
    before, now = dict(_flat(saved)), dict(_flat(json.loads(json.dumps(current))))
    return [
        StampDifference(key, before.get(key, ABSENT), now.get(key, ABSENT))
        for key in [*before, *(key for key in now if key not in before)]
        if key not in before or key not in now or not _same(before[key], now[key])
    ]


def _flat(stamp: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """Yield dotted keys and their values; an empty mapping is a value."""
    for key, value in stamp.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same(left: JSON, right: JSON) -> bool:
    """Return whether two JSON values are equal, telling True from 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _shown(value: JSON) -> str:
    return ABSENT if value == ABSENT else json.dumps(value)
