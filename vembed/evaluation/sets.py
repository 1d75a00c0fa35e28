"""The sets that a run evaluates beside the first one of its verdict: other test sets, and guard sets.

A guard set holds what the model could do before: training should lose nothing on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.evaluation.significance import guard_verdict, mean_verdict, verdict
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Verdict

SetRole: TypeAlias = Literal["test", "dev", "guard"]
"""A dev set stands for the test set where there is none."""


@dataclass(frozen=True, slots=True)
class SetOutcome:
    """What training did on one set."""

    role: SetRole
    verdict: Verdict  # of a guard set its sentence begins with "forgets" in place of "worse"
    baseline: EvaluationResult
    final: EvaluationResult
    trained: frozenset[str] = frozenset()  # queries that training rows hold with an answer
    near: frozenset[str] = frozenset()  # further queries that nearly equal such ones

    @classmethod
    def of(
        cls,
        role: SetRole,
        baseline: EvaluationResult,
        final: EvaluationResult,
        metric: str,
        *,
        trained: Collection[str] = (),
        near: Collection[str] = (),
    ) -> SetOutcome:
        """Compare the model before and after training, by the metric or by what decides on the set instead."""
        judge = guard_verdict if role == "guard" else verdict
        judged = judge(baseline, final, final.deciding(metric))
        return cls(role, judged, baseline, final, frozenset(trained), frozenset(near))

    @property
    def unseen(self) -> SetOutcome | None:
        """The outcome on the queries that were neither trained on nor nearly so; None where no query is left."""
        seen = self.trained | self.near
        baseline, final = self.baseline.without(seen), self.final.without(seen)
        return SetOutcome.of(self.role, baseline, final, self.verdict.comparison.metric) if final.num_queries else None

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


def caveats(outcomes: Sequence[SetOutcome], num_choices: int) -> tuple[str, ...]:
    """Return what takes from the worth of a verdict, one sentence each: queries that were trained on, a choice.

    Args:
        num_choices: Checkpoints that the set of the verdict chose one of.
    """
    found = []
    for outcome in outcomes:
        if not outcome.trained | outcome.near:
            continue
        counts = [(len(outcome.trained), "trained on with an answer"), (len(outcome.near), "nearly trained on")]
        told = " and ".join(f"{count:,} {'was' if count == 1 else 'were'} {words}" for count, words in counts if count)
        left = outcome.unseen
        without = f"without them {left.verdict.sentence}" if left else "no other is left to judge by"
        of = f"of {plural(outcome.final.num_queries, 'query', 'queries')} of {outcome.final.task}"
        found.append(f"{of}, {told}; {without}")
    alike = averaged(outcomes)
    if len(alike) > 1 and any(each.trained | each.near for each in alike):
        unseen = [left for each in alike if (left := each.unseen) is not None]
        found += [f"all test sets without such queries: {overall(unseen).sentence}"] if unseen else []
    if num_choices > 1:
        found.append(
            f"the verdict is on the dev set that chose one of {num_choices} checkpoints, which flatters it; give "
            f"test_data_path for one that counts"
        )
    return tuple(found)


def headline(decided: Verdict, outcomes: Sequence[SetOutcome]) -> str:
    """Return the line that ends a run: the verdict, what was trained on of its sets, what the model forgets."""
    line = decided.sentence
    if num_trained := sum(len(each.trained) for each in outcomes if each.role != "guard"):
        line += f"; trained on {num_trained:,} of these queries"
    lost = [each.final.task for each in outcomes if each.forgets]
    return f"{line}; forgets on {', '.join(lost)}" if lost else line


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
