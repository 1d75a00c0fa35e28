"""What a run report is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vembed.data.images import ImageLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.report.geometry import Geometry
    from vembed.evaluation.result import EvaluationResult
    from vembed.evaluation.sets import SetOutcome
    from vembed.evaluation.significance import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Reverse:
    """The same systems with documents that search queries."""

    task: RetrievalData  # the reversed set
    verdict: Verdict  # baseline against final
    baseline: EvaluationResult
    final: EvaluationResult
    last: EvaluationResult | None = None  # the model of the last step, where `final` is another one


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the run's own numbers say about it, and what may be done."""

    cause: str  # a word or two, e.g. "waiting for data"
    sentence: str  # what was seen, with its numbers
    advice: str  # what to change, with the keys of the configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that a report shows. Values are shown as they are: secrets must be gone before they come here."""

    title: str
    verdict: Verdict  # on `task`; its metric is the one that queries are compared by
    task: RetrievalData  # texts or pictures, and judgements, of the evaluated set
    baseline: EvaluationResult  # the model before training, on `task`
    final: EvaluationResult  # the trained model, on `task`
    bm25: EvaluationResult | None  # lexical search on `task`, for orientation
    steps: Sequence[Mapping[str, float]]  # rows of metrics.jsonl, in order; a key that a row lacks leaves its curve
    evaluations: Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics on the dev set) in order
    plan: Mapping[str, object]  # its "reasons" are shown first
    config: Mapping[str, object]  # the settings as they were given
    environment: Mapping[str, str]  # versions, machine, cores, device
    data_facts: Sequence[tuple[str, str]]  # (label, value): records, duplicates, truncated, skipped
    command: str  # gives this run again
    data_hashes: Mapping[str, str] = field(
        default_factory=dict
    )  # "training", "dev", "test", ... -> hash of its content
    dev_task: str = ""  # the set of `evaluations` where it isn't `task`; empty: `task`, with the baseline as step 0
    image_limits: ImageLimits = field(default_factory=ImageLimits)  # which pictures may be decoded for the page
    last: EvaluationResult | None = None  # the model of the last step on `task`, where `final` is an earlier one
    reverse: Reverse | None = None  # the other direction, where it is measured
    overall: Verdict | None = None  # of the mean over several test sets; None: `verdict`
    sets: Sequence[SetOutcome] = ()  # test sets, that of `task` first, then guard sets
    kept_step: int | None = None  # step that `final` is of; None: not known
    last_step: int | None = None  # last step of training; None: not known
    findings: Sequence[Finding] | None = None  # what the numbers of the training say; None: nobody looked
    performance: Mapping[str, object] = field(default_factory=dict)  # what the training took: devices, memory, speed
    geometry: Geometry | None = None  # where the vectors of `task` lie after training

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
