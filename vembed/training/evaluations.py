"""The evaluations of a run: before step 1, while it trains, and of the model that is kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vembed.data.run_data import further_role
from vembed.distributed.ranks import Ranks
from vembed.errors import MachineError, NonFiniteError
from vembed.evaluation.bm25 import evaluate_bm25, why_no_bm25
from vembed.evaluation.evaluate import EvaluationOptions, encode_directions, search_task
from vembed.evaluation.judge import SetOutcome
from vembed.evaluation.report.vectors import build_geometry
from vembed.evaluation.results import read_evaluation, write_evaluation
from vembed.redact import redact
from vembed.text import plural
from vembed.training.progress import LABEL_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from vembed.data.judged import RetrievalData
    from vembed.data.overlap import Overlap
    from vembed.evaluation.judge import SetRole
    from vembed.evaluation.keys import Bm25Language
    from vembed.evaluation.report.vectors import Geometry
    from vembed.evaluation.results import EvaluationResult
    from vembed.vectors.encode import ItemEncoder

_log = logging.getLogger(__name__)

FINAL = "final"
"""The result of the kept model on the verdict's set, whose vectors the report shows."""

REVERSED_SUFFIX = "-reversed"
"""Suffix of the folder of a result whose queries are the set's documents."""


@dataclass(frozen=True, slots=True)
class Directions:
    """One system on one set."""

    forward: EvaluationResult  # its queries search its documents
    reverse: EvaluationResult | None = None  # its documents search its queries; None where that isn't measured
    geometry: Geometry | None = None  # where its vectors lie; None where nobody looked


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluates the encoder as it stands and keeps what comes out.

    All ranks encode; the first one searches, scores and writes, and tells the others what came of it.
    """

    encode: ItemEncoder
    dev: RetrievalData | None  # set that chooses the best checkpoint; None when nothing is chosen
    test: RetrievalData | None  # set of the verdict; None makes it the dev set
    folder: Path
    metric: str  # the metric that checkpoints and the verdict are judged by
    poll: Callable[[], None]  # called while searching, on the first rank alone; raises to stop
    bm25_language: Bm25Language | None  # of the BM25 that is evaluated beside the model; None: it isn't
    # Whether the untrained and the trained model are measured in reverse too, on the verdict's set; evaluations in
    # between never are.
    both_directions: bool = False
    # Measured before and after training, besides: folder of the results -> set.
    further: Mapping[str, RetrievalData] = field(default_factory=dict)
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)  # set -> what the training rows share with it
    ranks: Ranks = field(default_factory=Ranks)  # who takes part. All must make the same calls.
    _said: set[str] = field(default_factory=set)

    @property
    def verdict_task(self) -> RetrievalData:
        """The set that the verdict is on."""
        task = self.test or self.dev
        assert task is not None, "a run has a dev set or a test set"
        return task

    def require_baseline(self) -> None:
        """Refuse to continue with a trained model where the result of the untrained one is gone.

        Raises:
            MachineError: It can't be measured any more.
        """
        names = ["step-0" if self.test is None else "baseline"]
        names += [f"baseline{REVERSED_SUFFIX}"] if self.both_directions else []
        names += [f"{folder}/baseline" for folder in self.further]
        for name in names:
            if not self._is_there(name):
                raise MachineError(
                    f"{self.folder / name} is gone, and the model is no longer the untrained one that it was of; put "
                    f"it back, or start anew with resume=never overwrite_output_dir=true"
                )

    def baseline(self) -> EvaluationResult:
        """Return the result of the untrained model on the verdict's set, and measure it on the further ones.

        On resuming they are read back.
        """
        for folder, task in self.further.items():
            self._once(f"{folder}/baseline", task)
        # Without a test set the verdict is on the dev set, whose evaluation of step 0 is the baseline too. It is copied
        # under that name, so that whoever reads the folder finds a baseline in either case.
        reversed_name = self._reversed_name("baseline")
        if self.test is not None:
            return self._once("baseline", self.test, reversed_name)
        result = self._once("step-0", self.verdict_task, reversed_name)
        if self.ranks.is_first:
            write_evaluation(self.folder / "baseline", result)
        return result

    def baseline_reversed(self) -> EvaluationResult | None:
        """Return the result of the untrained model in reverse, which `baseline` wrote; None where it isn't measured."""
        return self._read(f"baseline{REVERSED_SUFFIX}") if self.both_directions else None

    def at_step(self, step: int) -> EvaluationResult:
        """Evaluate on the dev set after a step; step 0 is the untrained model."""
        assert self.dev is not None
        if step == 0:
            return self._once("step-0", self.dev)
        return self._evaluate(f"step-{step}", self.dev).forward

    def final(self) -> Directions:
        """Evaluate the kept model on the verdict's set."""
        return self._evaluate(FINAL, self.verdict_task, self._reversed_name(FINAL))

    def outcomes(self) -> tuple[SetOutcome, ...]:
        """Evaluate the kept model on the further sets."""
        outcomes = []
        for folder, task in self.further.items():
            final = self._evaluate(f"{folder}/final", task).forward
            outcomes.append(self._outcome(folder, further_role(folder), self._read(f"{folder}/baseline"), final))
        return tuple(outcomes)

    def verdict_outcome(self, baseline: EvaluationResult, final: EvaluationResult) -> SetOutcome:
        """Compare the untrained and the kept model on the verdict's set."""
        role: SetRole = "dev" if self.test is None else "test"
        return self._outcome(role, role, baseline, final)

    def _outcome(self, name: str, role: SetRole, baseline: EvaluationResult, final: EvaluationResult) -> SetOutcome:
        overlap = self.overlaps.get(name)
        trained, near = (overlap.trained, overlap.near or ()) if overlap else ((), ())
        return SetOutcome.of(role, baseline, final, self.metric, trained=trained, near=near)

    def last(self, step: int) -> Directions | None:
        """Evaluate the model of the last step on the verdict's set, where another one is kept.

        Args:
            step: The last step, which the dev set may have been evaluated after.

        Returns:
            Its results; None where its numbers aren't finite: what is kept is another model.
        """
        # Where the dev set gives the verdict, its evaluation after the last step is this result. It isn't in reverse.
        evaluated = f"step-{step}"
        if self.test is None and not self.both_directions and self._is_there(evaluated):
            return Directions(self._read(evaluated))
        try:
            return self._evaluate("last", self.verdict_task, self._reversed_name("last"))
        except NonFiniteError as error:
            _log.warning("the model of the last step, which isn't kept, has no result: %s", error)
            return None

    def bm25(self) -> EvaluationResult | None:
        """Evaluate BM25 on the verdict's set, as a reference line; None where it isn't wanted or can't be."""
        language = self.bm25_language
        if language is None:
            return None
        if reason := why_no_bm25(self.verdict_task):
            _log.info("%-*s  %s", LABEL_COLUMNS, "bm25", reason)
            return None

        def evaluate() -> EvaluationResult:
            result = evaluate_bm25(self.verdict_task, language=language, poll=self.poll)
            write_evaluation(self.folder / "bm25", result)
            self._say("bm25", result)
            return result

        return self.ranks.from_first(evaluate)

    def _reversed_name(self, name: str) -> str | None:
        return f"{name}{REVERSED_SUFFIX}" if self.both_directions else None

    def _is_there(self, name: str) -> bool:
        return self.ranks.from_first((self.folder / name / "metrics.json").is_file)

    def _read(self, name: str) -> EvaluationResult:
        return self.ranks.from_first(lambda: read_evaluation(self.folder / name))

    def _once(self, name: str, task: RetrievalData, reversed_name: str | None = None) -> EvaluationResult:
        """Evaluate the untrained model, unless a run that is resumed did so before."""
        names = [name] if reversed_name is None else [name, reversed_name]
        if not all(map(self._is_there, names)):
            return self._evaluate(name, task, reversed_name).forward
        results = [self._read(folder) for folder in names]
        for folder, result in zip(names, results, strict=True):
            if folder not in self._said:  # the baseline without a test set is the dev set's result of step 0
                self._say(folder, result)
        return results[0]

    def _evaluate(self, name: str, task: RetrievalData, reversed_name: str | None = None) -> Directions:
        """Evaluate the present model and write what comes out; in reverse too, where that has a name."""
        options = EvaluationOptions(system=redact(self.encode.encoder.name), poll=self.poll)
        # All ranks encode, each its share; the vectors meet on the first one, which alone searches and writes.
        tasks = encode_directions(self.encode, task, options, both=reversed_name is not None)

        def search() -> Directions:
            results = [search_task(task, options) for task in tasks]
            # The vectors are dropped with this block; the report's maps are drawn from them.
            geometry = build_geometry(tasks[0]) if name == FINAL else None
            for folder, result in zip((name, reversed_name), results, strict=False):
                if folder is not None:
                    write_evaluation(self.folder / folder, result)
                    self._say(folder, result)
            return Directions(results[0], results[1] if len(results) > 1 else None, geometry)

        return self.ranks.from_first(search)

    def _say(self, name: str, result: EvaluationResult) -> None:
        wanted = dict.fromkeys([result.deciding(self.metric), "ndcg@10", "recall@10", "mrr@10"])
        shown = (metric for metric in wanted if metric in result.metrics)
        numbers = "  ".join(f"{metric} {result.metrics[metric]:.4f}" for metric in shown)
        label = "  reversed" if name.endswith(REVERSED_SUFFIX) else name
        _log.info("%-*s  %s  %s", LABEL_COLUMNS, label, numbers, result.task)
        self._said.add(name)
        # Sizes and notes of a set are the same at each of its evaluations: the first one says them.
        sizes = f"{plural(result.num_queries, 'query', 'queries')}, {plural(result.num_documents, 'document')}"
        for note in (f"{result.task}: {sizes}", *result.notes):
            if note not in self._said:
                self._said.add(note)
                _log.info("%-*s  %s", LABEL_COLUMNS, "", note)
