"""MLflow: a run in its database or on its server."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

from vembed.errors import PreemptedError
from vembed.plugins.trackers.hosted import PROJECT, HostedTracker
from vembed.training.trackers import is_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.training.trackers import Cell

ID_TAG = "vembed.run_id"
"""Tag with the id of an output folder's run, by which a resumed training finds it: MLflow makes ids of its own."""

FLUSH_SECONDS = 2.0
"""Longest wait of a number; they are sent together, as a write of MLflow's database takes as long as a small step."""

MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""Most that a server takes in one call."""

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
"""Variables of MLflow, unless the user sets them: its defaults wait for minutes, and log how it makes tables."""


class MlflowTracker(HostedTracker):
    """Send a run to MLflow; its own variables hold: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the like.

    Names of numbers have "_at_" in place of "@", which MLflow refuses: `evaluation/ndcg_at_10`.
    """

    name = package = "mlflow"
    advice = "see that MLFLOW_TRACKING_URI answers; MLflow's local database comes with pip install 'vembed[mlflow]'"

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        for name, value in ENVIRONMENT.items():  # before MLflow is imported
            os.environ.setdefault(name, value)
        super().__init__(folder, resume_step=resume_step, config=config)
        self._client: Any = None
        self._waiting: list[Any] = []  # numbers that aren't sent yet
        self._flushed_at = time.monotonic()

    def open(self, run_id: str) -> Any:
        """Return MLflow's run, named as the output folder."""
        self._client = client = self.service.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if existing is None else existing.experiment_id
        # By a tag: a start that ended before its first step has an id and no run.
        known = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run_id}'") if self.resume_step else []
        if known:
            client.update_run(known[0].info.run_id, status="RUNNING")
            return known[0]
        run_name = os.environ.get("MLFLOW_RUN_NAME", self.run_name)
        run = client.create_run(experiment, run_name=run_name, tags={ID_TAG: run_id})
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.config.items()}
        parameters = [self.service.entities.Param(key, text) for key, text in texts.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(run.info.run_id, params=parameters[first : first + MOST_PARAMETERS])
        return run

    def location(self, run: Any) -> str:
        """Return the run's name and where it is kept."""
        return f"run {run.info.run_name} ({run.info.run_id}) in {self.service.get_tracking_uri()}"

    def last_steps(self, run: Any) -> dict[str, int]:
        """Return the last step that MLflow has of each group of numbers: sent.json counts those that waited, too."""
        steps: dict[str, int] = {}
        for key in run.data.metrics:
            group = key.split("/")[0]
            if group not in steps:  # a call of the server for each group; its numbers come together, so one will do
                history = self._client.get_metric_history(run.info.run_id, key)
                steps[group] = max(metric.step for metric in history)
        return steps

    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step, with those that wait."""
        now = int(time.time() * 1000)  # MLflow counts milliseconds
        for name, value in values.items():
            allowed_name = re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))
            self._waiting.append(self.service.entities.Metric(allowed_name, float(value), now, step))
        if len(self._waiting) >= MOST_METRICS // 2 or time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._flush(run)

    def log_text(self, step: int, name: str, text: str) -> None:  # noqa: ARG002 - an artifact has no step
        """Keep a text among the artifacts."""
        self._flushed_client().log_text(self.run.info.run_id, text, f"{name}.txt")

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:  # noqa: ARG002
        """Keep a table among the artifacts, where MLflow shows it."""
        run_id, file = self.run.info.run_id, f"{name}.json"
        client = self._flushed_client()
        if any(artifact.path == file for artifact in client.list_artifacts(run_id)):
            return  # MLflow would append the rows to the table that an earlier start left
        table: dict[str, list[Cell]] = {}
        for index, column in enumerate(columns):
            cells = [row[index] for row in rows]
            pictures = [cell for cell in cells if is_picture(cell)]
            if pictures:  # MLflow takes pictures in all rows of a column or in none: a dot fills the gaps
                blank = pictures[0].resize((1, 1))
                cells = [cell if is_picture(cell) else blank for cell in cells]
            table[column] = cells
        client.log_table(run_id, table, file)

    def log_file(self, path: Path) -> None:
        """Keep a file among the artifacts."""
        self._flushed_client().log_artifact(self.run.info.run_id, str(path))

    def log_model(self, folder: Path) -> None:
        """Keep the model among the artifacts, as `model/`."""
        self._flushed_client().log_artifacts(self.run.info.run_id, str(folder), "model")

    def finish(self, run: Any) -> None:
        """Send what waits and end the run."""
        self._flush(run)
        # A signal and Ctrl-C are no failure: such a run continues when the command is given again.
        stopped = isinstance(self.error, PreemptedError | KeyboardInterrupt)
        status = "FINISHED" if self.error is None else "KILLED" if stopped else "FAILED"
        self._client.set_terminated(run.info.run_id, status)

    def _flush(self, run: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(run.info.run_id, metrics=waiting[first : first + MOST_METRICS])
        self._flushed_at = time.monotonic()

    def _flushed_client(self) -> Any:
        """Return the client, once it sent what waits: an upload may take long, and numbers are watched meanwhile."""
        self._flush(self.run)
        return self._client
