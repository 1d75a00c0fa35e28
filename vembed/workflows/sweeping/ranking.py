"""The order of a sweep's trials: by their dev metric, with the difference to the best and whether noise explains it.

A difference is paired over the dev set's queries. All trials are compared with the same best one, so the intervals are
widened until all of them hold together at 95% (Bonferroni: each at 1 - 5% / (trials - 1)). They speak of other queries,
not of other training seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from vembed.errors import DataError
from vembed.evaluation.judge import CONFIDENCE, compare
from vembed.workflows.sweeping.trials import best_of, dev_metric, dev_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.judge import Comparison
    from vembed.workflows.sweeping.trials import Outcome

Word: TypeAlias = str
"""best, within noise, worse, shorter, or failed."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A trial in its place among the others."""

    outcome: Outcome
    word: Word
    to_best: Comparison | None = None  # the trial against the best one, on the same dev queries


def rank(outcomes: Sequence[Outcome], metric: str) -> list[Ranked]:
    """Return the trials, the best first: those of fewer steps behind, and those that failed last.

    Raises:
        DataError: Two trials were evaluated on different queries.
    """
    metric = dev_metric(outcomes, metric)
    full = [each for each in outcomes if each.dev is not None and "max_steps" not in each.trial.overrides]
    short = [each for each in outcomes if each.dev is not None and "max_steps" in each.trial.overrides]
    best = best_of(full, metric)
    ranked = []
    for each in sorted(full, key=lambda each: (-dev_value(each, metric), each is not best)):
        if each is best:
            ranked.append(Ranked(each, "best"))
            continue
        assert best is not None
        assert best.dev is not None
        assert each.dev is not None
        confidence = 1 - (1 - CONFIDENCE) / (len(full) - 1)
        try:
            comparison = compare(best.dev, each.dev, metric, confidence=confidence)
        except ValueError as error:
            raise DataError(f"{each.folder} can't be compared with {best.folder}: {error}") from error
        ranked.append(Ranked(each, "worse" if comparison.high < 0 else "within noise", comparison))
    short.sort(key=lambda each: (-each.trial.steps, -dev_value(each, metric)))
    failed = [each for each in outcomes if each.dev is None]
    return [*ranked, *(Ranked(each, "shorter") for each in short), *(Ranked(each, "failed") for each in failed)]


def chosen_lines(ranked: Sequence[Ranked], metric: str, *, has_test: bool) -> list[str]:
    """Say which trial was chosen by what, and what its verdict is worth."""
    finished = [each for each in ranked if each.word in ("best", "within noise", "worse")]
    if not finished:
        return ["no trial finished: nothing is chosen"]
    best = finished[0].outcome
    assert best.dev is not None
    equals = sum(each.word == "within noise" for each in finished)
    lines = [f"chosen by {metric} on the dev set {best.dev.task} alone: {best.trial.values}"]
    if equals:
        lines.append(f"noise explains its difference to {equals} of the {len(finished) - 1} others")
    lines.append(f"its verdict: {best.sentence}")
    lines += [f"caveat: {caveat}" for caveat in best.caveats]
    if has_test:
        lines.append(
            f"one of {len(ranked)} was chosen on the dev set, so its dev value flatters it; the test set had no "
            f"part in the choice"
        )
        if len(finished) > 1:
            lines.append(
                "the comparison shows the best trials on the test set too: it chooses nothing, and to take another "
                "trial for its test result would be a choice on the test set"
            )
    else:
        lines.append(
            f"the verdict is on the dev set that chose one of {len(ranked)}, which flatters it; give test_data_path "
            f"for one that counts"
        )
    lines.append(f"model: {best.folder / 'model'}")
    return lines
