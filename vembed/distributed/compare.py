"""Whether all processes run the same thing: other settings, data or packages on one machine train no one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.distributed.failures import host_name
from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.distributed.ranks import Ranks


def require_equal(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Refuse to go on where processes differ; all ranks call it at the same points.

    Args:
        ranks: The processes.
        facts: What must be the same on each: name for people -> value.

    Raises:
        ConfigError: A process has other facts than the first; it is named, with every difference.
    """
    everyone = ranks.gather_objects((host_name(), dict(facts)))
    first_host, first = everyone[0]
    lines = []
    for rank, (host, own) in enumerate(everyone):
        there, here = f"on rank {rank} ({host})", f"on rank 0 ({first_host})"
        lines += [
            f"\n  {name}: {_show(own.get(name))} {there}, {_show(first.get(name))} {here}"
            for name in {**first, **own}
            if own.get(name) != first.get(name)
        ]
    if lines:
        raise ConfigError(
            f"the processes of this run differ:{''.join(lines)}\nGive every machine the same configuration, data and "
            f"packages"
        )


def _show(value: str | None) -> str:
    return "missing" if value is None else value
