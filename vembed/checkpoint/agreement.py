"""How the processes of a run agree, as a plain callable: nothing here or above knows what carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Agree: TypeAlias = Callable[[bool], bool]
"""Takes this process's verdict and returns True when every process says True; all must call it at the same points."""


def alone(ok: bool) -> bool:
    """Agree with oneself: the agreement of a run of one process."""
    return ok
