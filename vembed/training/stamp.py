"""Refuse to continue a run from the checkpoint of another run.

A checkpoint's stamp says what its run is made of. Whether the work may be spread over other processes is the user's
word (`resume_elastic`), since the arithmetic then adds up in another order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vembed.checkpoint.format import JSON
    from vembed.checkpoint.tensors import LoadedCheckpoint

ELASTIC_KEYS = ("strategy", "mode", "sharding_factor", "world_size")
"""Keys of how the work is spread: other values give the same sums, added up in another order."""

LATER_KEYS = ("teacher",)
"""Parts of a run's identity that its checkpoints once didn't have; one without says nothing of them."""

_log = logging.getLogger(__name__)


def refuse_other_run(checkpoint: LoadedCheckpoint, identity: Mapping[str, JSON], *, elastic: bool) -> None:
    """Refuse a checkpoint of another run, or of the same one spread otherwise where that isn't wanted.

    Args:
        checkpoint: What is to be gone on from.
        identity: What the present run is made of.
        elastic: Whether the work may be spread in another way; that is told.

    Raises:
        ConfigError: The message shows each difference.
    """
    identity = {key: value for key, value in identity.items() if key in checkpoint.stamp or key not in LATER_KEYS}
    saved = {key: value for key, value in checkpoint.stamp.items() if key in identity}
    differences = stamp_differences(saved, identity)
    spread = [difference for key, difference in differences.items() if key in ELASTIC_KEYS]
    if len(spread) < len(differences):
        raise ConfigError(
            f"{checkpoint.path} belongs to another run:{_listed(differences.values())}\nResume with the "
            f"same settings, choose another output_dir, or start anew with resume=never overwrite_output_dir=true"
        )
    if spread and not elastic:
        raise ConfigError(
            f"{checkpoint.path} was saved with other processes or another strategy:{_listed(spread)}\nSet "
            f"resume_elastic=true to continue: the global batches stay the same, the numbers agree to rounding and no "
            f"longer bit for bit. Or resume with the settings above that saved it"
        )
    for line in spread:
        _log.info("resume_elastic: %s", line)


def stamp_differences(saved: Mapping[str, JSON], current: Mapping[str, JSON]) -> dict[str, str]:
    """Compare the stamp of a checkpoint with that of the present run.

    Args:
        saved: The checkpoint's, as it came back from JSON.
        current: The run's own; a tuple equals the list that JSON makes of it.

    Returns:
        Dotted key -> a sentence with both values, in the order of the checkpoint's keys, then the keys that only the
        run has. Numbers are equal by value (1 and 1.0), a bool only to a bool.
    """
    before, now = dict(_flat(saved)), dict(_flat(json.loads(json.dumps(current))))
    return {
        key: f"{key}: {_shown(before, key)} in the checkpoint, {_shown(now, key)} in this run"
        for key in before | now
        if key not in before
        or key not in now
        or before[key] != now[key]
        or isinstance(before[key], bool) != isinstance(now[key], bool)  # True is not 1
    }


def _flat(stamp: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """Yield dotted keys and their values; an empty mapping is a value."""
    for key, value in stamp.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(stamp: Mapping[str, JSON], key: str) -> str:
    return json.dumps(stamp[key]) if key in stamp else "(absent)"


def _listed(differences: Iterable[str]) -> str:
    return "".join(f"\n  {difference}" for difference in differences)
