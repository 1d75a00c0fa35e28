"""Each tracker with its own package: what a run tells is read back from where the package keeps it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import PIL.Image
import pytest

from vembed.errors import PreemptedError
from vembed.training.trackers import open_trackers, tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from vembed.training.trackers import Tracker

SECRET = "hf_abcdefghijklmnop123456"
"""In the command line of the run, where a user may have put it."""

COLUMNS = ["query", "query picture", "ndcg@10 after"]


def rows() -> list[list[Any]]:
    picture = PIL.Image.new("RGB", (40, 30), (200, 30, 30))
    return [["a red | ball", picture, 0.5], ["a <b>blue</b> ball", None, 1.0]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output folder as a finished run leaves it; the working directory is above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--config_override", f"model_name=https://me:{SECRET}@host/m"])
    folder = tmp_path / "my-run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "weights.bin").write_bytes(b"w" * 1000)
    (folder / "report.html").write_text("<h1>improved</h1>")
    (folder / "config.yaml").write_text("seed: 3\n")
    return folder


def opened(name: str, folder: Path, *, resume_step: int = 0) -> list[Tracker]:
    return open_trackers(name, folder, resume_step=resume_step, config={"seed": 3, "learning_rate": 1e-4})[1:]


def tell_steps(trackers: list[Tracker], steps: Sequence[int]) -> None:
    for step in steps:
        tell(trackers, "log", step, {"loss": 1 / step})
        tell(trackers, "log_ranks", step, {"loss": [1 / step, float("nan")]})
        if step % 2 == 0:
            tell(trackers, "log_evaluation", step, {"ndcg@10": step / 10})


def tell_end(trackers: list[Tracker], folder: Path) -> None:
    tell(trackers, "log_text", 6, "verdict", "improved: ndcg@10 <1>")
    tell(trackers, "log_result", 6, {"final/ndcg@10": 0.6})
    tell(trackers, "log_table", 6, "examples", COLUMNS, rows())
    tell(trackers, "log_file", folder / "report.html")
    tell(trackers, "log_file", folder / "config.yaml")
    tell(trackers, "log_model", folder / "model")


def tell_all(name: str, folder: Path) -> None:
    """A run of six steps that is stopped after step 4 and continues from a checkpoint of step 2."""
    trackers = opened(name, folder)
    tell(trackers, "log_text", 0, "plan", "plan\n  batch   256")
    tell_steps(trackers, [1, 2, 3, 4])
    tell(trackers, "log_stop", PreemptedError("a signal came"))
    tell(trackers, "close")
    trackers = opened(name, folder, resume_step=2)
    tell_steps(trackers, [3, 4, 5, 6])
    tell_end(trackers, folder)
    tell(trackers, "close")


ALL_STEPS, EVALUATED = [1, 2, 3, 4, 5, 6], [2, 4, 6]


def assert_no_secret(*folders: Path) -> None:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of W&B's transaction log: blocks of 32 KiB that hold parts of records (LevelDB's log)."""
    from wandb.proto import wandb_internal_pb2

    for log in sorted(folder.rglob("*.wandb")):
        data, position, record = log.read_bytes(), 7, b""
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            _, length, kind = struct.unpack("<IHB", data[position : position + 7])
            record += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # whole, or its last part
                yield wandb_internal_pb2.Record.FromString(record)
                record = b""


@pytest.mark.slow
def test_wandb_offline_keeps_a_run_that_reads_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb isn't installed: pip install 'vembed[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(run.parent / "wandb-data"))
    caplog.set_level("INFO")
    tell_all("wandb", run)
    wandb.teardown()  # its service writes what it still holds
    assert "switched off" not in caplog.text
    assert f"offline; send it later with: wandb sync {run}/trackers/wandb/wandb/offline-run-" in caplog.text
    records = list(wandb_records(run / "trackers"))
    started = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(each.project, each.display_name) for each in started} == {("vembed", "my-run")}
    assert {each.run_id for each in started} == {(run / "trackers/wandb/run_id").read_text()}
    config = {each.key: json.loads(each.value_json) for each in started[0].config.update}
    assert config["seed"] == 3
    assert config["learning_rate"] == 1e-4
    history = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["step"] for row in history if "train/loss" in row] == ALL_STEPS
    assert [row["train/loss"] for row in history if "train/loss" in row] == [1 / step for step in ALL_STEPS]
    assert [row["step"] for row in history if "ranks/loss/0" in row] == ALL_STEPS
    assert [(row["step"], row["evaluation/ndcg@10"]) for row in history if "evaluation/ndcg@10" in row] == [
        (step, step / 10) for step in EVALUATED
    ]
    assert [row["result/final/ndcg@10"] for row in history if "result/final/ndcg@10" in row] == [0.6]
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1, 0]
    (table,) = run.rglob("examples_*.table.json")
    told = json.loads(table.read_text())
    assert told["columns"] == COLUMNS
    assert [row[0] for row in told["data"]] == ["a red | ball", "a <b>blue</b> ball"]
    (plan,) = run.rglob("media/html/plan_*.html")
    assert "plan\n  batch   256" in plan.read_text()
    assert [path.read_text() for path in run.rglob("media/html/report_*.html")] == ["<h1>improved</h1>"]
    (page,) = run.rglob("files/vembed/report.html")
    assert (page.parent / "config.yaml").read_text() == "seed: 3\n"
    kept = {each.artifact.type: each.artifact.manifest.contents for each in records if each.HasField("artifact")}
    assert [(each.path, each.local_path) for each in kept["model"]] == [
        ("weights.bin", str(run / "model" / "weights.bin"))
    ]
    (picture,) = [each for each in kept["run_table"] if each.path.endswith(".png")]
    assert PIL.Image.open(picture.local_path).size == (40, 30)
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err
    assert_no_secret(run, run.parent)


@pytest.mark.slow
def test_mlflow_keeps_a_run_in_a_local_database_that_reads_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow isn't installed: pip install 'vembed[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow isn't installed: pip install 'vembed[mlflow]'")
    from vembed.plugins.trackers.mlflow import MlflowTracker

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run.parent / 'ml.db'}")
    caplog.set_level("INFO", logger="vembed")
    tell_all("mlflow", run)
    assert "switched off" not in caplog.text
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("vembed")
    (found,) = client.search_runs([experiment.experiment_id])
    assert f"mlflow  run my-run ({found.info.run_id}) in sqlite:///" in caplog.text
    assert (found.info.run_name, found.info.status) == ("my-run", "FINISHED")
    assert found.data.params == {"seed": "3", "learning_rate": "0.0001"}

    def history(key: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, key)]

    assert history("train/loss") == [(step, 1 / step) for step in ALL_STEPS]
    assert history("ranks/loss/0") == [(step, 1 / step) for step in ALL_STEPS]
    assert history("evaluation/ndcg_at_10") == [(step, step / 10) for step in EVALUATED]
    assert history("result/final/ndcg_at_10") == [(6, 0.6)]

    def text(name: str) -> str:
        from pathlib import Path

        return Path(client.download_artifacts(found.info.run_id, name)).read_text()

    assert text("plan.txt") == "plan\n  batch   256"
    assert text("verdict.txt") == "improved: ndcg@10 <1>"
    assert text("report.html") == "<h1>improved</h1>"
    assert text("config.yaml") == "seed: 3\n"
    assert text("model/weights.bin") == "w" * 1000
    table = json.loads(text("examples.json"))
    assert table["columns"] == COLUMNS
    assert [(row[0], row[2]) for row in table["data"]] == [("a red | ball", 0.5), ("a <b>blue</b> ball", 1.0)]
    picture = client.download_artifacts(found.info.run_id, table["data"][0][1]["filepath"])
    assert PIL.Image.open(picture).size == (40, 30)

    again = opened("mlflow", run, resume_step=6)  # the same command once more
    tell_end(again, run)
    tell(again, "log_stop", PreemptedError("a signal came"))
    tell(again, "close")
    assert history("result/final/ndcg_at_10") == [(6, 0.6)]
    assert len(json.loads(text("examples.json"))["data"]) == 2
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "KILLED"

    killed = MlflowTracker(run.parent / "killed" / "trackers" / "mlflow")
    tell_steps([killed], range(1, 400))  # more than wait to be sent
    resumed = MlflowTracker(run.parent / "killed" / "trackers" / "mlflow", resume_step=100)
    tell_steps([resumed], range(101, 401))
    resumed.close()
    (found,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'killed'")
    for group in ("train", "ranks"):
        key = {"train": "train/loss", "ranks": "ranks/loss/0"}[group]
        assert [step for step, _ in history(key)] == list(range(1, 401)), "what was lost by the kill is sent again"
    assert_no_secret(run.parent)


@pytest.mark.slow
def test_a_server_that_is_gone_is_one_warning_after_a_short_wait(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow isn't installed: pip install 'vembed[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    tell_all("mlflow", run)
    assert (os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"], os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) == ("0", "30")
    warnings = [each.message for each in caplog.records if "switched off" in each.message]
    assert len(warnings) == 2, "one of each start"
    assert "metrics.jsonl has everything (see that MLFLOW_TRACKING_URI answers" in warnings[0]


TRACKIO_READS = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
(record,) = SQLiteStorage.get_run_records("vembed")
name = record["name"]
print(json.dumps({
    "name": name,
    "config": SQLiteStorage.get_run_config("vembed", name),
    "logs": SQLiteStorage.get_logs("vembed", name),
    "artifacts": SQLiteStorage.get_artifacts("vembed"),
}, default=str))
"""


@pytest.mark.slow
def test_trackio_keeps_a_run_in_its_local_database_that_reads_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra trackio isn't installed: pip install 'vembed[trackio]'")
    from trackio.utils import RESERVED_KEYS

    assert not {"plan", "verdict", "results", "examples"} & {*RESERVED_KEYS}
    tell_all("trackio", run)
    assert "switched off" not in caplog.text
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    read = [sys.executable, "-c", TRACKIO_READS]
    done = subprocess.run(read, env=environment, check=True, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["name"].startswith("my-run-")
    assert found["config"]["seed"] == 3
    logs = found["logs"]
    assert [(row["step"], row["train/loss"]) for row in logs if "train/loss" in row] == [
        (step, 1 / step) for step in ALL_STEPS
    ]
    assert [row["step"] for row in logs if "ranks/loss/0" in row] == ALL_STEPS
    assert [row["step"] for row in logs if "evaluation/ndcg@10" in row] == EVALUATED
    assert [row["result/final/ndcg@10"] for row in logs if "result/final/ndcg@10" in row] == [0.6]
    (plan,) = [row["plan"] for row in logs if "plan" in row]
    assert "plan\n  batch   256" in json.dumps(plan, ensure_ascii=False).replace("\\n", "\n")
    (table,) = [row["examples"] for row in logs if "examples" in row]
    assert "a red | ball" in json.dumps(table)
    assert [PIL.Image.open(path).size for path in (tmp_path / "trackio").rglob("*.png")] == [(40, 30)]
    assert {"report.html", "config.yaml", f"{found['name']}-model"} <= {each["name"] for each in found["artifacts"]}
    assert_no_secret(run, tmp_path / "trackio")
