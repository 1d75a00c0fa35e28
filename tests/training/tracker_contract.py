"""The promises of every tracker, as one class of tests. Subclass it with a service, and a tracker is proved:

    class TestMyTracker(TrackerContract):
        name = "my-tracker"

        @pytest.fixture
        def service(self) -> Service: ...

Promise            Checked by
each step once     numbers of every group, read back from the service
resume appends     a run that is stopped after step 4 and goes on from a checkpoint of step 2
a new run is new   the same output folder, trained from step 0 again
failures           a service that goes down: one warning with advice, and metrics.jsonl has every step
secrets            a token in the plan, the command line and a query, searched in all that the service got
missing package    one line with the key to change, before training

Trackers are opened, told and closed as a run does it: `open_trackers`, `track_start`, `tell`, `track_end`, `closing`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import PIL.Image
import pytest

from vembed.batch import Image
from vembed.data.judged import RetrievalData
from vembed.errors import MachineError, PreemptedError
from vembed.evaluation.judge import SetOutcome
from vembed.evaluation.results import EvaluationResult
from vembed.registry import TRACKERS
from vembed.training.finish import RunResult
from vembed.training.trackers import (
    closing,
    open_trackers,
    read_rows,
    refuse_missing_packages,
    tell,
    track_end,
    track_start,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.training.trackers import Tracker

SECRET = "hf_abcdefghijklmnop123456"
CONFIG = {"seed": 3, "learning_rate": 1e-4}


class Service(ABC):
    """What a tracker writes to: a service, a database, a folder. It outlives the processes of a run."""

    @abstractmethod
    def numbers(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of a number, e.g. `train/loss`, in the newest run, in the order of arrival."""

    @abstractmethod
    def fail(self) -> None:
        """Let every later call fail."""

    def everything(self) -> str:
        """Return all that the service got beside the files of the output folder."""
        return ""


class TrackerContract:
    """Promises of a tracker; a subclass says what it is called and gives the service that it writes to."""

    name: str
    """Name in `report_to`."""

    groups = ("train", "ranks", "evaluation", "result")
    """Groups of numbers that it records."""

    package: str | None = None
    """Module whose absence is refused; None without."""

    advice = ""
    """Part of the warning when it fails."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The output folder; a token is in the command line of the run."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--config_override", f"model_name=https://me:{SECRET}@host/m"])
        folder = tmp_path / "my-run"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "weights.bin").write_bytes(b"w" * 1000)
        (folder / "config.yaml").write_text("seed: 3\n")
        return folder

    def opened(self, folder: Path, *, resume_step: int = 0) -> list[Tracker]:
        """Open metrics.jsonl and the tracker, and tell them the plan."""
        trackers = open_trackers(self.name, folder, resume_step=resume_step, config=CONFIG)
        track_start(trackers, resume_step, plan=f"plan\n  model   https://me:{SECRET}@host/m")
        return trackers

    def test_each_step_is_there_once_and_a_resume_appends_to_the_run(
        self, service: Service, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trackers = self.opened(folder)
        with pytest.raises(PreemptedError):
            tell_steps_until_stopped(trackers, [1, 2, 3, 4])
        trackers = self.opened(folder, resume_step=2)
        with closing(trackers):
            tell_steps(trackers, [3, 4, 5, 6])
            tell(trackers, "log_result", 6, {"final/ndcg@10": 0.6})
        assert "switched off" not in caplog.text
        expected = {
            "train/loss": [(step, 1 / step) for step in range(1, 7)],
            "ranks/loss/0": [(step, step / 8) for step in range(1, 7)],
            "ranks/loss/1": [],  # NaN: the process measured nothing
            "ranks/tokens/1": [(step, step / 4) for step in range(1, 7)],
            "evaluation/ndcg@10": [(step, step / 16) for step in (2, 4, 6)],
            "result/final/ndcg@10": [(6, 0.6)],
        }
        for name, numbers in expected.items():
            if name.split("/")[0] in self.groups:
                assert service.numbers(name) == [(step, pytest.approx(value)) for step, value in numbers], name

    def test_a_run_from_the_start_is_a_new_one(self, service: Service, folder: Path) -> None:
        for steps in ([1, 2, 3], [1, 2]):
            trackers = self.opened(folder)
            with closing(trackers):
                tell_steps(trackers, steps)
        assert [step for step, _ in service.numbers("train/loss")] == [1, 2]

    def test_a_number_that_is_not_finite_stops_nothing(
        self, service: Service, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trackers = self.opened(folder)
        with closing(trackers):
            tell(trackers, "log", 1, {"loss": float("nan"), "grad_norm": float("inf"), "epoch": 0.5})
        assert service.numbers("train/epoch") == [(1, 0.5)]
        assert not [record for record in caplog.records if record.levelname == "WARNING"]

    def test_a_service_that_goes_down_is_one_warning_with_advice_and_training_goes_on(
        self, service: Service, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        trackers = self.opened(folder)
        with closing(trackers):
            tell_steps(trackers, [1, 2])
            service.fail()
            tell_steps(trackers, [3, 4])
            tell(trackers, "log_text", 4, "verdict", "improved")
            tell(trackers, "log_model", folder / "model")
        (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
        assert warning.startswith(f"Tracker {self.name} failed and is switched off; training continues")
        assert self.advice in warning
        assert len(trackers) == 1
        assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [1, 2, 3, 4]

    def test_no_secret_reaches_it(self, service: Service, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        trackers = self.opened(folder)
        with closing(trackers):
            tell_steps(trackers, [1, 2])
            tell_end(trackers, folder, log_model=True)
        assert "switched off" not in caplog.text
        if "result" in self.groups:
            assert service.numbers("result/final/ndcg@10") == [(8, pytest.approx(0.625))]
        assert SECRET not in service.everything()
        files = [path for path in folder.parent.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if SECRET.encode() in path.read_bytes()]
        assert SECRET in sys.argv[-1], "the command line is as it was"

    def test_a_missing_package_is_one_line_before_training(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if self.package is None:
            refuse_missing_packages(self.name)  # nothing to miss
            return
        monkeypatch.setitem(sys.modules, self.package, None)
        with pytest.raises(MachineError, match="report_to") as refused:
            TRACKERS.load(self.name)(tmp_path / "my-run" / "trackers" / self.name)
        monkeypatch.setitem(sys.modules, self.name, None)
        with pytest.raises(MachineError, match="report_to") as refused_early:
            refuse_missing_packages([self.name])
        for message in (str(refused.value), str(refused_early.value)):
            assert message.startswith(f"the tracker {self.name} needs a package that is missing")
            assert "pip install" in message
            assert "\n" not in message
        assert not (tmp_path / "my-run").exists()


def tell_steps(trackers: list[Tracker], steps: Sequence[int]) -> None:
    """Tell trackers of steps, of the numbers of two processes, and of an evaluation at every second step."""
    for step in steps:
        tell(trackers, "log", step, {"loss": 1 / step})
        tell(trackers, "log_ranks", step, {"loss": [step / 8, float("nan")], "tokens": [float("nan"), step / 4]})
        if step % 2 == 0:
            tell(trackers, "log_evaluation", step, {"ndcg@10": step / 16})


def tell_steps_until_stopped(trackers: list[Tracker], steps: Sequence[int]) -> None:
    """Tell trackers of steps, and close them as a run does that a signal stops."""
    with closing(trackers):
        tell_steps(trackers, steps)
        raise PreemptedError("a signal came")


def tell_end(trackers: list[Tracker], folder: Path, *, log_model: bool = False) -> None:
    """Tell of a run over two pictures, of which the second is relevant to both queries; a query has a token."""
    for name, colour in (("d1", "red"), ("d2", "blue")):
        PIL.Image.new("RGB", (320, 200), colour).save(folder / f"{name}.png")
    documents = {name: Image(str(folder / f"{name}.png")) for name in ("d1", "d2")}
    queries = {"q1": f"a blue | ball, token={SECRET}", "q2": "blue"}
    task = RetrievalData("balls", queries, documents, {"q1": {"d2": 1}, "q2": {"d2": 1}})
    outcome = SetOutcome.of("test", retrieval(q1=0.25, q2=0.5), retrieval(q1=0.75, q2=0.5), "ndcg@10")
    pairs = SetOutcome.of("test", graded(q1=0.1, q2=0.3), graded(q1=0.4, q2=0.2), "ndcg@10")
    result = RunResult(outcome.verdict, outcome.baseline, outcome.final, None, folder, sets=(outcome, pairs))
    run: Any = SimpleNamespace(
        evaluations=SimpleNamespace(verdict_task=task),
        config=SimpleNamespace(max_image_pixels=10**6, log_model=log_model),
        output=SimpleNamespace(path=folder, model=folder / "model"),
        state=SimpleNamespace(step=8),
        trackers=trackers,
    )
    track_end(run, result)


def retrieval(**values: float) -> EvaluationResult:
    run = {"q1": [("d1", 0.9), ("d2", 0.1)], "q2": [("d1", 0.8), ("d2", 0.7)]}
    metrics = {"ndcg@10": sum(values.values()) / len(values), "recall@1": 0.5}
    per_query = {"ndcg@10": values, "recall@1": values}
    return EvaluationResult("balls", "a model", metrics, per_query, run, len(values), 2)


def graded(**values: float) -> EvaluationResult:
    """Return the result of a set of graded pairs: a rank correlation, and no ndcg."""
    metrics = {"spearman": sum(values.values()) / len(values), "pearson": 0.5}
    return EvaluationResult("pairs", "a model", metrics, {"spearman": values}, {}, len(values), 2)
