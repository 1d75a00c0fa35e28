"""The inputs of a run's report: results before and after training, logged numbers, plan and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vembed.batch import ImageLimits
from vembed.evaluation.judge import overall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.judged import RetrievalData
    from vembed.evaluation.judge import SetOutcome, Verdict
    from vembed.evaluation.report.vectors import Geometry
    from vembed.evaluation.results import EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverse:
    """The results of the task turned round: documents search for the queries that they answer."""

    task: RetrievalData  # the reversed task
    verdict: Verdict  # baseline against final
    baseline: EvaluationResult
    final: EvaluationResult
    last: EvaluationResult | None = None  # the model of the last step, where `final` is an earlier one


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the numbers of a run say about it, and what to do about it."""

    cause: str  # a word or two, e.g. "waiting for data"
    sentence: str  # what was seen, with its numbers
    advice: str  # what to change, with the keys of the configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that a report shows. It is shown as it is: the caller has removed secrets."""

    # The run
    title: str
    command: str  # repeats the run
    config: Mapping[str, object]  # the settings as they were given
    environment: Mapping[str, str]  # versions, machine, cores, device
    plan: Mapping[str, object]  # `Plan.to_json`; its "reasons" are shown first

    # The verdict: `final_verdict` is the one that is shown
    verdict: Verdict  # on `task`, the first test set; queries are compared by its metric
    sets: Sequence[SetOutcome] = ()  # test sets, that of `task` first, then guard sets
    caveats: Sequence[str] = ()  # reasons to trust the verdict less, a clause each

    # The evaluation
    task: RetrievalData  # queries, documents and judgements of the first test set
    baseline: EvaluationResult  # the model before training, on `task`
    final: EvaluationResult  # the trained model, on `task`
    # The model of the last step on `task`. None where that is `final`, or where it couldn't be evaluated.
    last: EvaluationResult | None = None
    bm25: EvaluationResult | None  # lexical search on `task`, to compare with; None where it wasn't run
    reverse: Reverse | None = None  # the other direction, where it is measured
    geometry: Geometry | None = None  # vectors of `task` after training
    image_limits: ImageLimits = field(default_factory=ImageLimits)  # which pictures may be decoded for the page

    # The training
    # Rows of metrics.jsonl, NaN where a number wasn't finite; a row without a key adds no point to its curve.
    steps: Sequence[Mapping[str, float]]
    evaluations: Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics on the dev set), in order
    dev_task: str = ""  # name of the dev set; "" where it is `task`, with the baseline as step 0
    dev_metric: str = ""  # metric that chose the checkpoint; "" where it is that of the verdict
    kept_step: int | None = None  # the step of `final`; None where it isn't known
    last_step: int | None = None  # the last step; None where it isn't known
    findings: Sequence[Finding] | None = None  # diagnosis of the training's numbers; None where none was made
    performance: Mapping[str, object] = field(default_factory=dict)  # devices, memory and speed

    # The data
    data_facts: Sequence[tuple[str, str]]  # (label, value): records, duplicates, truncated, skipped
    data_hashes: Mapping[str, str] = field(default_factory=dict)  # "training", "dev", ... -> hash of the content

    def __post_init__(self) -> None:
        """Refuse a verdict on a metric that the results don't have."""
        for result in (self.baseline, self.final):
            if self.metric not in result.per_query:
                known = ", ".join(result.per_query) or "none"
                raise ValueError(
                    f"The verdict is on {self.metric!r}, which {result.system} on {result.task} has no values of by "
                    f"query; it has: {known}."
                )

    @property
    def metric(self) -> str:
        """Name of the metric that `verdict` is on."""
        return self.verdict.comparison.metric

    @property
    def checkpoint_metric(self) -> str:
        """Name of the metric that chose the checkpoint: a dev set of another kind than `task` has one of its own."""
        return self.dev_metric or self.metric

    @property
    def final_verdict(self) -> Verdict:
        """The verdict of the run, not only of `task`: on the mean over the test sets that are measured as `task`."""
        return overall(self.sets) if self.sets else self.verdict

    @property
    def evaluation_notes(self) -> list[str]:
        """Notes on what was left out or cut in the evaluations, each sentence once."""
        notes = [*self.task.notes]
        for result in (self.baseline, self.last, self.final, self.bm25):
            if result is not None:
                notes += result.notes
        if self.reverse is not None:
            for turned in (self.reverse.baseline, self.reverse.last, self.reverse.final):
                if turned is not None:
                    notes += [f"Reversed: {note}" for note in turned.notes]
        for outcome in self.sets[1:]:  # the first is `task`
            for result in (outcome.baseline, outcome.final):
                notes += [f"{result.task}: {note}" for note in result.notes]
        return list(dict.fromkeys(notes))  # baseline and final leave out the same queries
