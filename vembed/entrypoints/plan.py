"""`vembed plan CONFIG`: the same as `vembed train CONFIG --plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.entrypoints import train

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str], *, program: str) -> int:
    """Print the plan of a run and return the exit code.

    Args:
        arguments: Words behind the program's name, as `vembed train` takes them.
        program: How the program was called, for its help.
    """
    return train.main([*arguments, "--plan"], program=program)
