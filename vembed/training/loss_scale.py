"""The loss scale of float16 training: a number in this process, the same on every rank.

torch's GradScaler keeps it on the device and looks for overflows in the gradients that a rank holds. Here the global
gradient norm tells of them: it is known before any weight changes, and all ranks have the same one, whatever each of
them holds of the gradients and wherever.

Source: Micikevicius et al., 2018, "Mixed Precision Training"; the numbers are those of torch's GradScaler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.checkpoint.format import JSON

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
"""The scale doubles after so many steps in a row without an overflow."""

LEAST_SCALE = 1.0
"""Below this, float16 gradients overflow without any scaling: the run is broken, not merely badly scaled."""


class LossScale:
    """The factor on all gradients of a step.

    Args:
        enabled: Without, it is 1 and stays so.

    Attributes:
        value: The factor, a power of two: it rounds nothing.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = FIRST_SCALE if enabled else 1.0
        self._good_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Halve it after an overflow, and double it after long enough without one."""
        if not self.enabled:
            return
        self._good_steps = 0 if overflowed else self._good_steps + 1
        if overflowed:
            self.value = max(LEAST_SCALE, self.value / 2)
        elif self._good_steps == GROWTH_STEPS:
            self.value, self._good_steps = 2 * self.value, 0

    def state(self) -> dict[str, JSON]:
        """Return what to save, by the names that torch's GradScaler gives it; nothing without scaling."""
        return {"scale": self.value, "_growth_tracker": self._good_steps} if self.enabled else {}

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Go on from what `state` returned."""
        if not self.enabled:
            return
        scale, good_steps = state["scale"], state["_growth_tracker"]
        assert isinstance(scale, float | int)
        assert isinstance(good_steps, int)
        self.value, self._good_steps = float(scale), good_steps
