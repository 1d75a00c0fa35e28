"""The sets that a run evaluates beside the first one of its verdict: other test sets, and guard sets.

A guard set holds what the model could do before: training should lose nothing on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.evaluation.significance import guard_verdict, mean_verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Verdict

FurtherRole: TypeAlias = Literal["test", "guard"]
SetRole: TypeAlias = Literal["test", "dev", "guard"]
"""A dev set stands for the test set where there is none."""


@dataclass(frozen=True, slots=True)
class FurtherSet:
    """A set that is evaluated before and after training."""

    role: FurtherRole
    number: int  # among the further sets of the run, from 1
    task: RetrievalData

    @property
    def folder(self) -> str:
        """What holds its results, below `evaluation/`."""
        return f"{self.role}-{self.number}"


@dataclass(frozen=True, slots=True)
class SetOutcome:
    """What training did on one set."""

    role: SetRole
    verdict: Verdict  # of a guard set its sentence begins with "forgets" in place of "worse"
    baseline: EvaluationResult
    final: EvaluationResult

    @classmethod
    def of(cls, role: SetRole, baseline: EvaluationResult, final: EvaluationResult, metric: str) -> SetOutcome:
        """Compare the model before and after training, by the metric or by what decides on the set instead."""
        judge = guard_verdict if role == "guard" else verdict
        return cls(role, judge(baseline, final, final.deciding(metric)), baseline, final)

    @property
    def forgets(self) -> bool:
        """Whether the model lost what it is to keep."""
        return self.role == "guard" and self.verdict.word == "worse"

    @property
    def word(self) -> str:
        """The verdict's word: improved, within noise, worse or forgets."""
        return self.verdict.sentence.partition(": ")[0]

    @property
    def line(self) -> str:
        """The set, its numbers and the word, e.g. "scifact/test: ndcg@10 0.645 -> 0.621 (...): forgets"."""
        word, _, numbers = self.verdict.sentence.partition(": ")
        return f"{self.final.task}: {numbers}: {word}"


def overall(outcomes: Sequence[SetOutcome]) -> Verdict:
    """Return the verdict of a run: that of its test set, or of the mean over several that are measured alike."""
    alike = averaged(outcomes)
    first = alike[0].verdict
    if len(alike) == 1:
        return first
    return mean_verdict([(each.baseline, each.final) for each in alike], first.comparison.metric)


def averaged(outcomes: Sequence[SetOutcome]) -> list[SetOutcome]:
    """Return the test sets whose mean decides: those with the metric of the first."""
    first, *more = (each for each in outcomes if each.role != "guard")
    return [first, *(each for each in more if each.verdict.comparison.metric == first.verdict.comparison.metric)]


def headline(decided: Verdict, outcomes: Sequence[SetOutcome]) -> str:
    """Return the line that ends a run: the verdict, and the guard sets on which the model forgets."""
    lost = [each.final.task for each in outcomes if each.forgets]
    return f"{decided.sentence}; forgets on {', '.join(lost)}" if lost else decided.sentence


def worse_than_untrained(evaluations: Sequence[tuple[int, Mapping[str, float]]], metric: str, kept_step: int) -> str:
    """Say that the saved model scores below the untrained one on the dev set; empty where it doesn't.

    Args:
        evaluations: (step, metrics on the dev set); step 0 is the untrained model.
    """
    values = {step: metrics[metric] for step, metrics in evaluations if metric in metrics}
    if kept_step == 0 or not {0, kept_step} <= values.keys() or values[kept_step] >= values[0]:
        return ""
    return (
        f"On the dev set the saved model is worse than the untrained one: {metric} {values[kept_step]:.4f} at step "
        f"{kept_step}, {values[0]:.4f} before training. Try a lower learning_rate or fewer steps."
    )
