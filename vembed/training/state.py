"""What a run knows of itself between two steps: all of it is in every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from vembed.gradcache.memory import StepLimits  # noqa: TC001 - the shape that a state is read as
from vembed.json_text import fit

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class RunState:
    """The counters of a run.

    Randomness isn't among them: order, dropout and initialisation are functions of (seed, step), so there is no
    generator to restore.
    """

    step: int = 0  # optimizer steps done; skipped ones count
    # Best dev metric of a trained model so far, None before the first one. The untrained model doesn't count: a run
    # that only makes it worse must say so, and not hand it back.
    best_metric: float | None = None
    best_step: int = 0  # step that it was reached at
    stale_evaluations: int = 0  # evaluations since then
    evaluated_step: int = -1  # step of the last evaluation: a run that was stopped in one does it again
    skipped_steps: int = 0  # steps whose numbers weren't finite
    num_truncated: int = 0  # over-long texts that training has cut
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (step, dev metrics), in order
    # what the engine's next step may hold in memory; None where memory never ran out
    step_limits: StepLimits | None = None
    stopped: str | None = None  # why a callback ended the training
    learning_rate: float | None = None  # set by a callback, in place of the schedule's

    def record(self, metrics: Mapping[str, float], metric: str) -> bool:
        """Take in an evaluation of the present step.

        Args:
            metric: The one that decides; higher is better. A tie keeps the earlier step.

        Returns:
            Whether the present weights are the best trained ones so far.
        """
        self.evaluated_step = self.step
        self.evaluations.append((self.step, dict(metrics)))
        if self.step == 0:
            return False
        if self.best_metric is None or metrics[metric] > self.best_metric:
            self.best_metric, self.best_step, self.stale_evaluations = metrics[metric], self.step, 0
            return True
        self.stale_evaluations += 1
        return False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote.

        Raises:
            KeyError: It lacks the evaluations.
            ValueError: A value is of another type.
        """
        return fit(cls, {**content, "evaluations": content["evaluations"]}, where="state.json: run")
