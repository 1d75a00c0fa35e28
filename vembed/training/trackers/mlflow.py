"""MLflow: a run in its database or on its server."""

from __future__ import annotations

import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

from vembed.errors import PreemptedError
from vembed.training.trackers.base import is_picture
from vembed.training.trackers.hosted import PROJECT, HostedTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.training.trackers.base import Cell

ID_TAG = "vembed.run_id"
"""Names the run of an output folder, so that a resumed training finds it."""

FLUSH_SECONDS = 2.0
"""Numbers are sent together: a write of MLflow's database takes as long as a small step."""

MOST_METRICS, MOST_PARAMETERS = 1000, 100
"""What a server takes in one call."""


ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
"""Variables of MLflow, unless the user sets them: by its own it would wait for minutes, and log how it makes tables."""


class MlflowTracker(HostedTracker):
    """Send a run to MLflow; its own variables hold: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the like.

    Names of numbers have "_at_" in place of "@", which MLflow refuses: `evaluation/ndcg_at_10`.
    """

    name = "mlflow"
    advice = "see that MLFLOW_TRACKING_URI answers; MLflow's local database comes with pip install 'vembed[mlflow]'"

    def __init__(self, folder: Path, *, resume_step: int = 0, config: Mapping[str, object] | None = None) -> None:
        for name, value in ENVIRONMENT.items():  # before MLflow is imported
            os.environ.setdefault(name, value)
        super().__init__(folder, resume_step=resume_step, config=config)
        self._client: Any = None
        self._waiting: list[Any] = []
        self._flushed = time.monotonic()

    def open(self, run_id: str) -> Any:
        """Return MLflow's run, named as the output folder."""
        self._client = client = self.package.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        known = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{run_id}'") if self.resume_step else []
        if known:
            client.update_run(known[0].info.run_id, status="RUNNING")
            return known[0]
        own_name = os.environ.get("MLFLOW_RUN_NAME", self.run_name)
        run = client.create_run(experiment, run_name=own_name, tags={ID_TAG: run_id})
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.config.items()}
        parameters = [self.package.entities.Param(key, text) for key, text in texts.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(run.info.run_id, params=parameters[first : first + MOST_PARAMETERS])
        return run

    def place(self, run: Any) -> str:
        """Return the run's name and where it is kept."""
        return f"run {run.info.run_name} ({run.info.run_id}) in {self.package.get_tracking_uri()}"

    def last_steps(self, run: Any) -> dict[str, int]:
        """Return the last step that MLflow has of each group of numbers."""
        steps: dict[str, int] = {}
        for key in run.data.metrics:
            group = key.split("/")[0]
            if group not in steps:
                steps[group] = max(each.step for each in self._client.get_metric_history(run.info.run_id, key))
        return steps

    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step, with those that wait."""
        now = int(time.time() * 1000)
        metric = self.package.entities.Metric
        self._waiting += [metric(metric_name(name), float(value), now, step) for name, value in values.items()]
        if len(self._waiting) >= MOST_METRICS // 2 or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._flush(run)

    def log_text(self, step: int, name: str, text: str) -> None:  # noqa: ARG002 - an artifact has no step
        """Keep a text among the artifacts."""
        self._client_of_run().log_text(self.run.info.run_id, text, f"{name}.txt")

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:  # noqa: ARG002
        """Keep a table among the artifacts, where MLflow shows it; one that is there would be appended to."""
        run_id, file = self.run.info.run_id, f"{name}.json"
        client = self._client_of_run()
        if any(each.path == file for each in client.list_artifacts(run_id)):
            return
        cells = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        client.log_table(run_id, {column: _of_one_kind(found) for column, found in cells.items()}, file)

    def log_file(self, path: Path) -> None:
        """Keep a file among the artifacts."""
        self._client_of_run().log_artifact(self.run.info.run_id, str(path))

    def log_model(self, folder: Path) -> None:
        """Keep the model among the artifacts, as `model/`."""
        self._client_of_run().log_artifacts(self.run.info.run_id, str(folder), "model")

    def finish(self, run: Any) -> None:
        """Send what waits and end the run."""
        self._flush(run)
        stopped = isinstance(self.error, PreemptedError | KeyboardInterrupt)
        status = "FINISHED" if self.error is None else "KILLED" if stopped else "FAILED"
        self._client.set_terminated(run.info.run_id, status)

    def _flush(self, run: Any) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(run.info.run_id, metrics=waiting[first : first + MOST_METRICS])
        self._flushed = time.monotonic()

    def _client_of_run(self) -> Any:
        self._flush(self.run)
        return self._client


def metric_name(name: str) -> str:
    """Return a name that MLflow takes."""
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


def _of_one_kind(cells: Sequence[Cell]) -> list[Cell]:
    """Fill the gaps of a column of pictures: MLflow takes pictures in all of its rows or in none."""
    pictures = [cell for cell in cells if is_picture(cell)]
    if not pictures:
        return list(cells)
    blank = pictures[0].resize((1, 1))
    return [cell if is_picture(cell) else blank for cell in cells]
