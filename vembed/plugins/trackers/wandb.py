"""Weights & Biases: a run on its pages, or in files for `wandb sync`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.plugins.trackers.hosted import PROJECT, HostedTracker
from vembed.training.trackers import is_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vembed.training.trackers import Cell


class WandbTracker(HostedTracker):
    """Send a run to Weights & Biases; its own variables hold: WANDB_PROJECT, WANDB_MODE=offline and the like."""

    name = package = "wandb"
    advice = "log in with `wandb login`, or set WANDB_MODE=offline and send the run later with `wandb sync`"

    def open(self, run_id: str) -> Any:
        """Return the run of Weights & Biases, named as the output folder."""
        # Its capture of the console is off unless WANDB_CONSOLE asks for it: train.log has the lines, without secrets.
        defaults = {"console": "off", "quiet": True}
        settings = {name: value for name, value in defaults.items() if f"WANDB_{name.upper()}" not in os.environ}
        run = self.service.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self.run_name),
            id=run_id,
            resume="allow",
            dir=str(self.folder),
            config=dict(self.config),
            settings=self.service.Settings(**settings),
        )
        # The step is a number of ours, because W&B drops what comes with a step below its last: the numbers of a step
        # come in several calls, and a resumed run may be behind.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def location(self, run: Any) -> str:
        """Return the command that sends an offline run; of others W&B prints the address."""
        return f"offline; send it later with: wandb sync {Path(run.dir).parent}" if run.offline else ""

    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        run.log({"step": step, **values})

    def log_text(self, step: int, name: str, text: str) -> None:
        """Show a text as a panel, with its columns aligned."""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self.run.log({"step": step, name: self.service.Html(f"<pre>{escaped}</pre>")})

    def log_table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Show a table, with its pictures."""
        cells = [[self.service.Image(cell) if is_picture(cell) else cell for cell in row] for row in rows]
        self.run.log({"step": step, name: self.service.Table(columns=list(columns), data=cells)})

    def log_file(self, path: Path) -> None:
        """Keep a copy under the run's files; a page is a panel too."""
        run = self.run
        copy = Path(run.dir) / "vembed" / path.name  # W&B has a config.yaml of its own
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        run.save(str(copy), base_path=run.dir, policy="now")
        if path.suffix == ".html":
            run.log({path.stem: self.service.Html(path.read_text("utf-8"), inject=False)})

    def log_model(self, folder: Path) -> None:
        """Keep the model as an artifact; offline it is read from its folder when the run is synced."""
        run = self.run
        # Not copied to W&B's cache, which would take the size of the model once more.
        artifact = self.service.Artifact(f"model-{run.id}", "model")
        for path in sorted(entry for entry in folder.rglob("*") if entry.is_file()):  # add_dir would print a line
            artifact.add_file(str(path), str(path.relative_to(folder)), policy="immutable", skip_cache=True)
        run.log_artifact(artifact)

    def finish(self, run: Any) -> None:
        """Finish the run, as failed where an error ended it."""
        run.finish(exit_code=0 if self.error is None else 1)
