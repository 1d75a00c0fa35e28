"""The evaluations of a run: before step 1, while it trains, and of the model that is kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vembed.errors import MachineError
from vembed.evaluation.bm25 import evaluate_bm25, why_no_bm25
from vembed.evaluation.evaluator import EvaluationOptions, evaluate
from vembed.evaluation.store import read_evaluation, write_evaluation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.encode import ItemEncoder
    from vembed.evaluation.result import EvaluationResult

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluates the encoder as it stands and keeps what comes out.

    Attributes:
        encode: The encoder.
        dev: Set that chooses the best checkpoint; None when nothing is chosen.
        test: Set of the verdict; None makes it the dev set.
        folder: Where results are written.
        metric: The metric that checkpoints and the verdict are judged by.
        poll: Called in long loops; raises to stop.
        with_bm25: Whether BM25 is evaluated beside the model.
    """

    encode: ItemEncoder
    dev: RetrievalData | None
    test: RetrievalData | None
    folder: Path
    metric: str
    poll: Callable[[], None]
    with_bm25: bool
    _said: set[str] = field(default_factory=set)

    @property
    def verdict_task(self) -> RetrievalData:
        """The set that the verdict is on."""
        task = self.test or self.dev
        assert task is not None, "a run has a dev set or a test set"
        return task

    def require_baseline(self) -> None:
        """Refuse to go on with a trained model where the result of the untrained one is gone.

        Raises:
            MachineError: It can't be measured any more.
        """
        name = "step-0" if self.test is None else "baseline"
        if not (self.folder / name / "metrics.json").is_file():
            raise MachineError(
                f"{self.folder / name} is gone, and the model is no longer the untrained one that it was of; put it "
                f"back, or start anew with resume=never overwrite_output_dir=true"
            )

    def baseline(self) -> EvaluationResult:
        """Return the result of the untrained model on the verdict's set. On resuming it is read back."""
        if self.test is None:
            result = self.at_step(0)
            write_evaluation(self.folder / "baseline", result)
            return result
        return self._once("baseline", self.test)

    def at_step(self, step: int) -> EvaluationResult:
        """Evaluate on the dev set after a step; step 0 is the untrained model."""
        assert self.dev is not None
        if step == 0:
            return self._once("step-0", self.dev)
        return self._evaluate(f"step-{step}", self.dev)

    def final(self) -> EvaluationResult:
        """Evaluate the kept model on the verdict's set."""
        return self._evaluate("final", self.verdict_task)

    def bm25(self) -> EvaluationResult | None:
        """Evaluate BM25 on the verdict's set, as a reference line; None where it isn't wanted or can't be."""
        if not self.with_bm25:
            return None
        if reason := why_no_bm25(self.verdict_task):
            _log.info("%-12s %s", "bm25", reason)
            return None
        result = evaluate_bm25(self.verdict_task, poll=self.poll)
        write_evaluation(self.folder / "bm25", result)
        self._say("bm25", result)
        return result

    def _once(self, name: str, task: RetrievalData) -> EvaluationResult:
        """Evaluate the untrained model, unless a run that is resumed did so before."""
        if not (self.folder / name / "metrics.json").is_file():
            return self._evaluate(name, task)
        result = read_evaluation(self.folder / name)
        self._say(name, result)
        return result

    def _evaluate(self, name: str, task: RetrievalData) -> EvaluationResult:
        options = EvaluationOptions(system=self.encode.encoder.name, poll=self.poll)
        result = evaluate(self.encode, task, options)
        write_evaluation(self.folder / name, result)
        self._say(name, result)
        return result

    def _say(self, name: str, result: EvaluationResult) -> None:
        wanted = dict.fromkeys([self.metric, "ndcg@10", "recall@10", "mrr@10"])
        numbers = "  ".join(f"{metric} {result.metrics[metric]:.4f}" for metric in wanted)
        _log.info("%-12s %s  (%s, %d queries)", name, numbers, result.task, result.num_queries)
        for note in result.notes:
            if note not in self._said:
                self._said.add(note)
                _log.info("%-12s %s", "", note)
