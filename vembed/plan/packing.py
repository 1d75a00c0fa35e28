"""Whether the rows of an encoder call lie end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from vembed.plan.hardware import Machine
    from vembed.plan.keys import BatchKeys
    from vembed.plan.memory import ModelSize


def plan_packing(keys: BatchKeys, machine: Machine, model: ModelSize) -> tuple[bool, str]:
    """Return whether rows lie end to end, and why.

    Raises:
        ConfigError: The user wants it and the model can't.
    """
    if keys.packing is False:
        return False, "packing false: the rows of a call are padded to the longest; as set"
    if model.why_not_packed:
        if keys.packing is True:
            raise ConfigError(f"packing true: {model.why_not_packed}; set packing: auto")
        return False, f"packing false: {model.why_not_packed}"
    if machine.device != "cpu":
        given = "; as set" if keys.packing is True else ""
        return True, f"packing true: the rows of a call lie end to end instead of being padded to the longest{given}"
    if keys.packing is True:
        return True, (
            "packing true: as set; on a CPU attention weighs all pairs of a call's tokens: a slow reference, which "
            "takes more memory than predicted, as the prediction is of padded rows"
        )
    return False, "packing false: a CPU has no fast operator for rows that lie end to end, so they are padded"
