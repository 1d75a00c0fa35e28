"""Waiting for the first rank, which alone searches, writes and reports: for as long as it lives, whatever the timeout.

A collective can't tell work from a hang, so it has a timeout. Where one rank is known to work alone, the others ask the
store instead, and meet in a collective only when it is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_ways: list[Callable[[], None]] = []
"""How this process waits; empty where nothing watches the others, as in a run of one process."""


def wait_with(way: Callable[[], None] | None) -> None:
    """Set how this process waits for the first rank.

    Args:
        way: Called on every rank at the same points; returns once the first rank has called it too. None: not at all.
    """
    _ways[:] = [] if way is None else [way]


def await_first() -> None:
    """Wait until the first rank gets here too; all ranks call it at the same points."""
    for way in _ways:
        way()
