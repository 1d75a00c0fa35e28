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
from functools import cached_property
from itertools import combinations, pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from vembed.errors import ConfigError
from vembed.evaluation.benchmark.stored import read_stored, task_key, write_stored
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.judge import compare, guard_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vembed.data.judged import RetrievalData
    from vembed.evaluation.judge import Comparison
    from vembed.evaluation.results import EvaluationResult
    from vembed.plugins.merge.keys import MergeKeys
    from vembed.plugins.merge.weights import Mixture
    from vembed.vectors.encode import ItemEncoder

MOST_POINTS = 200
"""Mixtures that a grid may have: each one encodes every set."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A mixture and its results."""

    weights: tuple[float, ...]  # one for each model
    targets: tuple[EvaluationResult, ...]
    guards: tuple[EvaluationResult, ...]

    def mean(self, metric: str) -> float:
        """Return the mean metric over the target sets."""
        return fmean(result.metrics[metric] for result in self.targets)


@dataclass(frozen=True)
class Choice:
    """All mixtures, and the one to take."""

    metric: str
    points: tuple[Point, ...]  # the first model alone comes first

    # Found once: each question of a loss is a paired test on every guard set.
    @cached_property
    def chosen(self) -> Point:
        """The best on the target sets of those that lose on no guard set; the first model, where it is as good."""
        kept = [point for point in self.points if not self.loses(point)]
        return max(kept, key=lambda point: point.mean(self.metric))  # the first of equals

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
        """Gain of the chosen one over the first model, as a share of the most that any gains; None where none gains."""
        gain = self.most.mean(self.metric) - self.first.mean(self.metric)
        return (self.chosen.mean(self.metric) - self.first.mean(self.metric)) / gain if gain > 0 else None

    def loses(self, point: Point) -> bool:
        """Return True for a mixture that is worse than the first model on a guard set."""
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
    # Stars and bars: a mixture is a row of `steps` stars cut by `num_models - 1` bars, a model's weight its stars.
    length = steps + num_models - 1
    cuts = ((-1, *bars, length) for bars in combinations(range(length), num_models - 1))
    counts = sorted((tuple(end - start - 1 for start, end in pairwise(edges)) for edges in cuts), reverse=True)
    if len(counts) > MOST_POINTS:
        raise ConfigError(
            f"{num_models} models in steps of 1/{steps} are {len(counts)} mixtures, each evaluated on all sets; "
            f"--steps {steps // 2} makes fewer"
        )
    return [tuple(count / steps for count in mixture) for mixture in counts]


def choose(
    keys: MergeKeys,
    mixture: Mixture,
    encode: ItemEncoder,
    sets: Sequence[RetrievalData],
    *,
    identities: Sequence[str],
    folder: Path,
    poll: Callable[[], None],
) -> Choice:
    """Evaluate every mixture of a grid on sets, and choose one.

    Args:
        encode: Of the mixture's encoder.
        sets: The target sets, then the guard sets.
        identities: Hash of each model's weights, in the order of the mixture.
        folder: Where results are kept, for a start that continues after a stop.

    Raises:
        ConfigError: The grid has too many mixtures.
    """
    points, system = [], "mixture"
    for weights in grid(len(identities), keys.steps):
        results = []
        for task in sets:
            key = {
                **task_key(task, with_texts=True),
                "models": list(identities),
                "weights": list(weights),
                "method": keys.method,
                "precision": str(encode.autocast_dtype or "as loaded"),
            }
            path = folder / shown_weights(weights) / task.name.replace("/", "-")
            # A result is taken again only for the same weights, method, precision and content of the set.
            stored, _ = read_stored(path, key, system=system)
            if stored is None:
                mixture.take(weights, keys.method)
                result = evaluate(encode, task, EvaluationOptions(system=system, poll=poll))
                write_stored(path, result, None, key)
            else:
                result, _ = stored
            results.append(result)
        num_targets = len(keys.targets)
        points.append(Point(weights, tuple(results[:num_targets]), tuple(results[num_targets:])))
        numbers = "  ".join(f"{result.task} {result.metrics[keys.metric]:.4f}" for result in results)
        _log.info("%s  %s", shown_weights(weights), numbers)
    return Choice(keys.metric, tuple(points))


def shown_weights(weights: Sequence[float]) -> str:
    """Return weights for people and for folders, e.g. 0.3+0.7."""
    return "+".join(f"{weight:.4g}" for weight in weights)
