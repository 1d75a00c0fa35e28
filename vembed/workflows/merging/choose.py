"""Choose a mixture of models on sets: the one that wins most where it is to, among those that lose nothing elsewhere.

1. Every mixture of a grid is evaluated on the target sets and the guard sets; results that are there are read.
2. The first model is the one whose quality on the guard sets is kept: a mixture that is worse there, by a paired 95%
   interval, is out.
3. Of the others the one with the highest mean metric over the target sets is taken.

The sets that choose must not be those that are reported later: the best of many is flattered by chance.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.evaluation.benchmark.stored import Stored, read_stored, task_key, write_stored
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.judge import compare, guard_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from vembed.data.judged import RetrievalData
    from vembed.evaluation.judge import Comparison
    from vembed.evaluation.results import EvaluationResult
    from vembed.vectors.encode import ItemEncoder
    from vembed.workflows.merging.weights import Method, Mixture

MOST_POINTS = 200
"""Mixtures that a grid may have: each one encodes every set."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A mixture and what it finds."""

    weights: tuple[float, ...]  # one for each model
    targets: tuple[EvaluationResult, ...]
    guards: tuple[EvaluationResult, ...]

    def mean(self, metric: str) -> float:
        """Return the mean metric over the target sets."""
        return fmean(result.metrics[metric] for result in self.targets)


@dataclass(frozen=True, slots=True)
class Choice:
    """All mixtures, and the one that was chosen."""

    metric: str
    points: tuple[Point, ...]  # the first model alone comes first
    chosen: Point

    @property
    def first(self) -> Point:
        """The first model alone."""
        return self.points[0]

    @property
    def most(self) -> Point:
        """The mixture that wins most on the target sets, whatever it loses."""
        return max(self.points, key=lambda point: point.mean(self.metric))

    @property
    def share_kept(self) -> float | None:
        """What the chosen one gains over the first model, by what any gains; None where none gains."""
        gain = self.most.mean(self.metric) - self.first.mean(self.metric)
        return (self.chosen.mean(self.metric) - self.first.mean(self.metric)) / gain if gain > 0 else None

    def loses(self, point: Point) -> bool:
        """Return whether a mixture is worse than the first model on a guard set."""
        pairs = zip(self.first.guards, point.guards, strict=True)
        return any(guard_verdict(before, after, self.metric).word == "worse" for before, after in pairs)

    def differences(self, point: Point) -> tuple[list[Comparison], list[Comparison]]:
        """Return a mixture beside the first model, on each target set and each guard set."""
        sides = ((self.first.targets, point.targets), (self.first.guards, point.guards))
        targets, guards = (
            [compare(before, after, self.metric) for before, after in zip(*side, strict=True)] for side in sides
        )
        return targets, guards


def grid(num_models: int, steps: int) -> list[tuple[float, ...]]:
    """Return every mixture in steps of 1 / steps, the first model alone first.

    Raises:
        ConfigError: They are too many.
    """
    found = sorted(_cuts(num_models, steps), reverse=True)
    if len(found) > MOST_POINTS:
        raise ConfigError(
            f"{num_models} models in steps of 1/{steps} are {len(found)} mixtures, each evaluated on all sets; "
            f"--steps {steps // 2} makes fewer"
        )
    return [tuple(count / steps for count in counts) for counts in found]


def _cuts(num_models: int, steps: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write the steps as a sum of as many counts as there are models."""
    for bars in combinations(range(steps + num_models - 1), num_models - 1):
        edges = (-1, *bars, steps + num_models - 1)
        yield tuple(end - start - 1 for start, end in pairwise(edges))


@dataclass(frozen=True, slots=True)
class Trial:
    """Evaluates mixtures and keeps what comes out."""

    mixture: Mixture
    method: Method
    encode: ItemEncoder  # of the mixture's encoder
    identities: tuple[str, ...]  # hash of each model's weights
    folder: Path  # where results are kept
    metric: str
    poll: Callable[[], None]

    def choose(
        self, weights: Sequence[tuple[float, ...]], targets: Sequence[RetrievalData], guards: Sequence[RetrievalData]
    ) -> Choice:
        """Evaluate every mixture, the first model alone first, and choose one."""
        points = []
        for each in weights:
            found = [self._result(each, task) for task in (*targets, *guards)]
            points.append(Point(each, tuple(found[: len(targets)]), tuple(found[len(targets) :])))
            numbers = "  ".join(f"{result.task} {result.metrics[self.metric]:.4f}" for result in found)
            _log.info("%s  %s", shown_weights(each), numbers)
        every = Choice(self.metric, tuple(points), points[0])
        kept = [point for point in points if not every.loses(point)]
        return Choice(self.metric, tuple(points), max(kept, key=lambda point: point.mean(self.metric)))

    def _result(self, weights: tuple[float, ...], task: RetrievalData) -> EvaluationResult:
        key = {
            **task_key(task, with_texts=True),
            "models": list(self.identities),
            "weights": list(weights),
            "method": self.method,
            "precision": str(self.encode.autocast_dtype or "as loaded"),
        }
        place, system = self.folder / shown_weights(weights) / task.name.replace("/", "-"), "mixture"
        stored, _ = read_stored(place, key, system=system)
        if stored is None:
            self.mixture.take(weights, self.method)
            result = evaluate(self.encode, task, EvaluationOptions(system=system, poll=self.poll))
            stored = Stored(result, cost=None)
            write_stored(place, stored, key)
        return stored.result


def shown_weights(weights: Sequence[float]) -> str:
    """Return weights for people and for folders, e.g. 0.3+0.7."""
    return "+".join(f"{weight:.4g}" for weight in weights)
