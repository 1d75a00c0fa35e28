"""Weights & Biases: the numbers of a run on its pages, or in files for `wandb sync`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vembed.training.trackers.hosted import PROJECT, HostedTracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class WandbTracker(HostedTracker):
    """Send numbers to Weights & Biases; its own variables hold: WANDB_PROJECT, WANDB_MODE=offline and the like.

    Steps are a metric of their own: those that a resumed run does again are sent again, with the same numbers.
    """

    name = "wandb"

    def open(self, run_id: str) -> Any:
        """Return the run of Weights & Biases, named as the output folder."""
        run = self.package.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", self.folder.absolute().parents[1].name),
            id=run_id,
            resume="allow",
            dir=str(self.folder),
            config=dict(self.config),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        run.log({"step": step, **values})
