"""What a run report is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vembed.data.images import ImageLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.significance import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverse:
    """The same systems with documents that search queries.

    Attributes:
        task: The reversed set.
        verdict: Baseline against final.
        baseline: The model before training.
        final: The trained model.
        last: The model of the last step, where `final` is another one.
    """

    task: RetrievalData
    verdict: Verdict
    baseline: EvaluationResult
    final: EvaluationResult
    last: EvaluationResult | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the run's own numbers say about it, and what may be done.

    Attributes:
        cause: A word or two, e.g. "waiting for data".
        sentence: What was seen, with its numbers.
        advice: What to change, with the keys of the configuration.
    """

    cause: str
    sentence: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that a report shows. Values are shown as they are: secrets must be gone before they come here.

    Attributes:
        title: Name of the run.
        verdict: What the run came to; its metric is the one that queries are compared by.
        task: Texts or pictures, and judgements, of the evaluated set.
        baseline: The model before training, on `task`.
        final: The trained model, on `task`.
        bm25: Lexical search on `task`, for orientation.
        steps: Rows of metrics.jsonl, in order. A key that a row lacks is left out of its curve.
        evaluations: (step, metrics on the dev set) in order.
        plan: The plan; its "reasons" are shown first.
        config: The settings as they were given.
        environment: Versions, machine, cores, device.
        data_facts: (label, value): records, duplicates, truncated, skipped.
        command: The command that gives this run again.
        dev_task: Name of the set that `evaluations` are on, where it isn't `task`. Left empty, they are on `task`, and
            the baseline is their step 0; else step 0 is there only if `evaluations` has it.
        image_limits: Which pictures may be decoded for the page.
        last: The model of the last step on `task`, where `final` is another one: an earlier checkpoint.
        reverse: The other direction, where it is measured.
        kept_step: Step that `final` is of, or None where that isn't known.
        last_step: Last step of training, or None where that isn't known.
        findings: What the numbers of the training say about it, most costly first; None where nobody looked.
        performance: Key -> value of what the training took: devices, memory, batch, speed.
    """

    title: str
    verdict: Verdict
    task: RetrievalData
    baseline: EvaluationResult
    final: EvaluationResult
    bm25: EvaluationResult | None
    steps: Sequence[Mapping[str, float]]
    evaluations: Sequence[tuple[int, Mapping[str, float]]]
    plan: Mapping[str, object]
    config: Mapping[str, object]
    environment: Mapping[str, str]
    data_facts: Sequence[tuple[str, str]]
    command: str
    dev_task: str = ""
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    last: EvaluationResult | None = None
    reverse: Reverse | None = None
    kept_step: int | None = None
    last_step: int | None = None
    findings: Sequence[Finding] | None = None
    performance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a report whose verdict speaks of a metric that the results don't have."""
        metric = self.verdict.comparison.metric
        for result in (self.baseline, self.final):
            if metric not in result.per_query:
                known = ", ".join(result.per_query) or "none"
                raise ValueError(
                    f"The verdict is on {metric!r}, which {result.system} on {result.task} has no values of by query; "
                    f"it has: {known}."
                )
