"""Each registered tracker, and one of a plugin, against the contract; stand-ins are the services and their packages."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracker_contract import CONFIG, Service, TrackerContract, tell_end, tell_steps, tell_steps_until_stopped

from vembed.errors import MachineError, PreemptedError
from vembed.registry import TRACKERS
from vembed.training.trackers import JsonlTracker, Tracker, closing, read_rows, register_tracker, tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class Rows(Service):
    """metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self, name: str) -> list[tuple[int, float]]:
        key = name.removeprefix("train/")
        return [(int(row["step"]), row[key]) for row in read_rows(self.path) if key in row]

    def fail(self) -> None:
        raise AssertionError("the run's own record is no service")


class TestJsonl(TrackerContract):
    name = "none"
    groups = ("train",)

    @pytest.fixture
    def service(self, tmp_path: Path) -> Service:
        return Rows(tmp_path / "my-run" / "metrics.jsonl")

    def test_a_service_that_goes_down_is_one_warning_with_advice_and_training_goes_on(
        self, service: Service, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other way round: no run goes on without its record, and no other tracker hides that."""
        trackers = self.opened(folder)

        def refuse(self: JsonlTracker, step: int, values: Mapping[str, float]) -> None:
            raise MachineError("the disk refuses")

        monkeypatch.setattr(JsonlTracker, "log", refuse)
        with pytest.raises(MachineError, match="the disk refuses"):
            tell(trackers, "log", 1, {"loss": 1.0})
        assert len(trackers) == 1
        assert not caplog.records


class EventFiles(Service):
    """TensorBoard's own reader of the folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch

    def numbers(self, name: str) -> list[tuple[int, float]]:
        shown = EventAccumulator(str(self.folder))
        shown.Reload()
        return [(event.step, event.value) for event in shown.Scalars(name)] if name in shown.Tags()["scalars"] else []

    def fail(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        def refuse(*_: object, **__: object) -> None:
            raise OSError("No space left on device")

        self._monkeypatch.setattr(SummaryWriter, "add_scalar", refuse)


class TestTensorBoard(TrackerContract):
    name = "tensorboard"
    package = "torch.utils.tensorboard"
    advice = "see that its folder can be written"

    @pytest.fixture
    def service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
        return EventFiles(tmp_path / "my-run" / "tensorboard", monkeypatch)


class LossTable(Tracker):
    """A plugin's tracker that writes a line per step, and at a resume drops those that come again."""

    name = "loss-table"
    advice = "buy a larger table"
    is_down = False

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        super().__init__(folder, resume_step=resume_step, config=config)
        self._path = folder / "loss.jsonl"
        lines = self._path.read_text().splitlines() if self._path.is_file() else []
        self._rows = [row for row in map(json.loads, lines) if row[0] <= resume_step]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if LossTable.is_down:
            raise ConnectionError("no table")
        self._rows.append([step, dict(values)])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(map(json.dumps, self._rows)))


class Table(Service):
    """The file of the plugin's tracker."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self, name: str) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(step, values[name.removeprefix("train/")]) for step, values in rows]

    def fail(self) -> None:
        LossTable.is_down = True


class TestPlugin(TrackerContract):
    name = "loss-table"
    groups = ("train",)
    advice = "buy a larger table"

    @pytest.fixture
    def service(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
        return Table(tmp_path / "my-run" / "trackers" / "loss-table" / "loss.jsonl")

    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TRACKERS, "_plugins", {})
        monkeypatch.setattr(TRACKERS, "_entries", {**TRACKERS._entries})
        monkeypatch.setattr(LossTable, "is_down", False)
        register_tracker(LossTable)


class Hosted(Service):
    """A stand-in of a service and of its package: `sys.modules` holds it under the package's name.

    Names of numbers are those of the tracker; a run is found again by the id that the tracker gave it.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}  # id -> steps with their numbers
        self.options: list[dict[str, Any]] = []  # of each opening
        self.endings: list[object] = []
        self.told: list[object] = []
        self.kept: list[tuple[str, str]] = []  # kind, name of files and models
        self.is_down = False

    def numbers(self, name: str) -> list[tuple[int, float]]:
        rows = [*self.runs.values()][-1]
        return [(step, values[name]) for step, values in rows if name in values]

    def fail(self) -> None:
        self.is_down = True

    def everything(self) -> str:
        return repr((self.runs, self.options, self.told, self.kept))

    def hear(self, *words: object) -> None:
        if self.is_down:
            raise ConnectionError("the service is down")
        self.told.append(words)

    def start(self, run_id: str, options: dict[str, Any]) -> None:
        self.hear("start", [*sys.argv])  # W&B and SwanLab record the command line
        assert run_id not in self.runs or options.get("resume", "allow") == "allow"
        self.runs.setdefault(run_id, [])
        self.options.append(options)

    def add(self, run_id: str, step: int, values: Mapping[str, object]) -> None:
        self.hear("log", step, values)
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        if numbers:
            self.runs[run_id].append((step, numbers))


class Wandb(Hosted):
    """Steps are numbers among the others, and a run has a folder for files."""

    Html = Image = staticmethod(lambda content, **_: ("shown", content))
    Table = staticmethod(lambda columns, data: (columns, data))
    Settings = dict

    def Artifact(self, name: str, kind: str) -> Any:  # noqa: N802
        return SimpleNamespace(add_file=lambda path, name, **_: self.kept.append(("model", name)))

    def init(self, **options: Any) -> Any:
        run_id = options["id"]
        self.start(run_id, options)

        def log(values: dict[str, object]) -> None:
            step = values.get("step", 0)  # panels of files come without
            assert isinstance(step, int)
            self.add(run_id, step, values)

        def finish(exit_code: int) -> None:
            self.hear("finish")
            self.endings.append(exit_code)

        return SimpleNamespace(
            id=run_id,
            offline=False,
            dir=options["dir"],
            define_metric=lambda name, step_metric=None: self.hear("define", name, step_metric),
            log=log,
            save=lambda path, **_: self.kept.append(("file", path)),
            log_artifact=lambda artifact: self.hear("artifact"),
            finish=finish,
        )


class Swanlab(Hosted):
    """Numbers alone."""

    def init(self, **options: Any) -> Any:
        self.start(options["id"], {**options, "name": options["experiment_name"]})

        def finish() -> None:
            self.hear("finish")
            self.endings.append(0)

        return SimpleNamespace(log=lambda values, step: self.add(options["id"], step, values), finish=finish)


class Trackio(Hosted):
    """Runs are found by their names, and the package ends its one run."""

    Markdown = Image = staticmethod(lambda content: ("shown", content))
    Table = staticmethod(lambda columns, data: (columns, data))

    def init(self, **options: Any) -> Any:
        name = options["name"]
        self.start(name, {**options, "name": name.rpartition("-")[0]})

        def log_artifact(path: str, *, name: str, type: str) -> None:  # noqa: A002
            self.hear("artifact", name)
            self.kept.append((type, name))

        return SimpleNamespace(
            name=name, log=lambda values, step: self.add(name, step, values), log_artifact=log_artifact
        )

    def finish(self) -> None:
        self.hear("finish")
        self.endings.append(0)


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Mlflow(Hosted):
    """A client with calls by the id of MLflow's run, which has that of the output folder as a tag."""

    entities = SimpleNamespace(Param=lambda key, value: (key, value), Metric=Metric)

    def numbers(self, name: str) -> list[tuple[int, float]]:
        return super().numbers(name.replace("@", "_at_"))

    def MlflowClient(self) -> Mlflow:  # noqa: N802
        self.hear("client")
        return self

    def get_tracking_uri(self) -> str:
        return "memory"

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if self.options else None

    def create_experiment(self, name: str) -> str:
        return name

    def _run(self, run_id: str) -> Any:
        names = {name: 0.0 for _, values in self.runs[run_id] for name in values}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id, run_name="r"), data=SimpleNamespace(metrics=names))

    def search_runs(self, experiments: list[str], query: str) -> list[Any]:
        run_id = query.split("'")[1]
        assert query == f"tags.`vembed.run_id` = '{run_id}'"
        return [self._run(run_id)] if run_id in self.runs else []

    def create_run(self, experiment: str, *, run_name: str, tags: dict[str, str]) -> Any:
        run_id = tags["vembed.run_id"]
        self.start(run_id, {"project": experiment, "name": run_name, "config": {}})
        return self._run(run_id)

    def update_run(self, run_id: str, *, status: str) -> None:
        self.hear("update", run_id, status)

    def log_batch(self, run_id: str, metrics: list[Metric] | None = None, params: Any = ()) -> None:
        assert len(metrics or ()) <= 1000
        for metric in metrics or ():
            assert "@" not in metric.key
            self.add(run_id, metric.step, {metric.key: metric.value})
        self.options[-1]["config"] |= {key: json.loads(text) for key, text in params}

    def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
        return [Metric(key, values[key], 0, step) for step, values in self.runs[run_id] if key in values]

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self.hear("text", text)

    def list_artifacts(self, run_id: str) -> list[Any]:
        return []

    def log_table(self, run_id: str, table: dict[str, list[object]], file: str) -> None:
        self.hear("table", table)

    def log_artifact(self, run_id: str, path: str) -> None:
        self.hear("artifact", path)
        self.kept.append(("file", path))

    def log_artifacts(self, run_id: str, path: str, name: str) -> None:
        self.hear("artifacts", path)
        self.kept.append(("model", name))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.hear("end")
        self.endings.append(status)


class HostedContract(TrackerContract):
    """Promises of a tracker that sends to a service."""

    stand_in: type[Hosted]
    takes_model = True
    endings: tuple[object, object] = (0, 0)
    """What the service hears of a run that was stopped and of one that finished."""

    @pytest.fixture
    def service(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
        service = self.stand_in()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, self.name, service)  # type: ignore[arg-type]
            yield service

    def test_a_resumed_training_goes_on_in_the_run_that_it_began(self, service: Hosted, folder: Path) -> None:
        trackers = self.opened(folder)
        with pytest.raises(PreemptedError):
            tell_steps_until_stopped(trackers, [1, 2])
        trackers = self.opened(folder, resume_step=2)
        with closing(trackers):
            tell_steps(trackers, [3])
        assert len(service.runs) == 1
        trackers = self.opened(folder)
        with closing(trackers):
            tell_steps(trackers, [1])
        assert len(service.runs) == 2
        assert service.endings == [*self.endings, self.endings[1]]
        for options in service.options:
            assert {key: options[key] for key in ("project", "name", "config")} == {
                "project": "vembed",
                "name": "my-run",
                "config": CONFIG,
            }

    def test_files_and_the_model_are_kept_where_the_service_takes_them(self, service: Hosted, folder: Path) -> None:
        trackers = self.opened(folder)
        with closing(trackers):
            tell_end(trackers, folder, log_model=True)
        assert len(trackers) == 2
        files = {name.rpartition("/")[2] for kind, name in service.kept if kind == "file"}
        models = [name for kind, name in service.kept if kind == "model"]
        assert files == ({"config.yaml"} if self.takes_model else set())
        assert len(models) == (1 if self.takes_model else 0)


class TestWandb(HostedContract):
    name = package = "wandb"
    stand_in = Wandb
    advice = "log in with `wandb login`"
    endings = (1, 0)


class TestMlflow(HostedContract):
    name = package = "mlflow"
    stand_in = Mlflow
    advice = "see that MLFLOW_TRACKING_URI answers"
    endings = ("KILLED", "FINISHED")

    @pytest.fixture(autouse=True)
    def variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Undo what the tracker sets in the environment."""
        from vembed.plugins.trackers.mlflow import ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("vembed.plugins.trackers.mlflow.FLUSH_SECONDS", 0.0)


class TestTrackio(HostedContract):
    name = package = "trackio"
    stand_in = Trackio
    advice = "see that TRACKIO_SPACE_ID"


class TestSwanlab(HostedContract):
    name = package = "swanlab"
    stand_in = Swanlab
    takes_model = False
    advice = "log in with `swanlab login`"


def test_every_registered_tracker_is_proved() -> None:
    proved = {cls.name for cls in (TestTensorBoard, TestWandb, TestMlflow, TestTrackio, TestSwanlab)}
    assert proved == {name for name in TRACKERS.names() if name not in TRACKERS.plugins()}
