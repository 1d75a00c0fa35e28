"""trackio: a run in a local database that `trackio show` opens, or in a Hugging Face Space."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vembed.plugins.trackers.hosted import PROJECT, HostedTracker
from vembed.training.trackers import is_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vembed.training.trackers import Cell


class TrackioTracker(HostedTracker):
    """Send a run to trackio; its own variables hold: TRACKIO_DIR, TRACKIO_SPACE_ID and the like."""

    name = package = "trackio"
    advice = "see that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is right; without both, trackio writes on this machine"

    def open(self, run_id: str) -> Any:
        """Return trackio's run, named as the output folder and its id."""
        return self.service.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{self.run_name}-{run_id[:8]}",  # trackio finds a run again by its name
            config=dict(self.config),
            resume="allow",
            embed=False,  # a notebook gets no frame of its pages
        )

    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        run.log(dict(values), step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Show a text, with its columns aligned."""
        self.run.log({name: self.service.Markdown(f"```\n{text}\n```")}, step=step)

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Show a table, with its pictures."""
        cells = [[self.service.Image(cell) if is_picture(cell) else cell for cell in row] for row in rows]
        self.run.log({name: self.service.Table(columns=list(columns), data=cells)}, step=step)

    def log_file(self, path: Path) -> None:
        """Keep a file as an artifact of its name."""
        self.run.log_artifact(str(path), name=path.name, type="file")

    def log_model(self, folder: Path) -> None:
        """Keep the model as an artifact."""
        self.run.log_artifact(str(folder), name=f"{self.run.name}-model", type="model")

    def finish(self, run: Any) -> None:  # noqa: ARG002 - trackio knows its one run, and would finish it again at exit
        """Finish the run."""
        self.service.finish()
