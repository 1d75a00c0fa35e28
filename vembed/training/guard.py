"""Numbers that are not finite: kept out of the weights, and reported with the batch that they came from."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vembed.distributed.signals import alone
from vembed.errors import NonFiniteError
from vembed.files import replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vembed.distributed.signals import Agree

_log = logging.getLogger(__name__)


class NonFiniteGuard:
    """Keep NaN and infinity out of the weights.

    A step whose loss or gradient norm isn't finite leaves `nonfinite-step-N.json` (rows, loss, temperature,
    gradient norm per module) and then stops the run, or is skipped and counted.

    Args:
        policy: "stop", or "skip" for up to `limit` steps of the whole run.
        limit: Steps that may be skipped; one more stops the run. Unused with "stop".
        folder: Where the reports go; made when there is one. None writes none: another rank does.
        agree: Returns True when every rank passes True; called once per step, so that all ranks skip the same steps.

    Attributes:
        skipped: Steps skipped so far; belongs into the checkpoint's state.
    """

    def __init__(
        self,
        policy: Literal["stop", "skip"],
        *,
        limit: int,
        folder: Path | None,
        skipped: int = 0,
        agree: Agree = alone,
    ) -> None:
        self._policy = policy
        self._limit = limit
        self._folder = folder
        self.skipped = skipped
        self._agree = agree

    def accepts(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        rows: Callable[[], Sequence[str]],
        temperature: float | None,
        module_norms: Callable[[], Mapping[str, float]],
    ) -> bool:
        """Return whether the step's gradients may change the weights.

        Args:
            step: Its number, 1 for the first.
            grad_norm: L2 norm over all gradients, before clipping.
            rows: Returns where the rows of the step stand, such as "train.jsonl:12"; called only where something isn't
                finite, as `module_norms`.
            temperature: That of the loss; None where it has none.
            module_norms: Returns module -> L2 norm of its gradients.

        Returns:
            False when the step is to be skipped.

        Raises:
            NonFiniteError: The policy is "stop", or the limit is used up.
        """
        # Both are asked: a loss can overflow while its gradients stay finite, and gradients while the loss does.
        if self._agree(math.isfinite(loss) and math.isfinite(grad_norm)):
            return True

        # All ranks are here, also those whose own numbers are finite: the norms are sums over the shards of all.
        norms = module_norms()
        content = {
            "step": step,
            "loss": _number(loss),
            "grad_norm": _number(grad_norm),
            "temperature": None if temperature is None else _number(temperature),
            "module_grad_norms": {name: _number(norm) for name, norm in norms.items()},
            "rows": list(rows()),
        }
        report = Path(f"nonfinite-step-{step}.json")
        if self._folder is not None:  # else another rank writes: it has the same batch and norms
            report = self._folder / report
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_text(report, json.dumps(content, indent=1, allow_nan=False) + "\n")
            except OSError as error:  # a disk that refuses must not hide the error that is reported
                _log.warning("%s can't be written: %s", report, error)
        numbers = (("the loss", loss), ("the gradient norm", grad_norm))
        parts = [f"{name} is {_number(value)}" for name, value in numbers if not math.isfinite(value)]
        parts = parts or ["another process has a loss or gradient that is not finite"]
        if modules := [name for name, norm in norms.items() if not math.isfinite(norm)]:
            rest = f" and {len(modules) - 3} more modules" if len(modules) > 3 else ""
            parts.append(f"with gradients that are not finite in {', '.join(modules[:3])}{rest}")
        what = f"step {step}: {', '.join(parts)}"

        if self._policy == "stop" or self.skipped >= self._limit:
            if self._policy == "skip":
                what += f", and {self.skipped} steps were skipped before, all that max_skipped_steps allows"
            raise NonFiniteError(
                f"{what}. No weight was changed. The batch is in {report}. Lower learning_rate or max_grad_norm, or "
                f"raise temperature; if the same rows come up again, look at them; or set nonfinite_policy: skip."
            )
        self.skipped += 1
        _log.warning("%s; step skipped (%d of at most %d), see %s", what, self.skipped, self._limit, report)
        return False


def _number(value: float) -> float | str:
    """Return a number as JSON can hold it: "nan", "inf" and "-inf" as strings."""
    return value if math.isfinite(value) else str(value)
