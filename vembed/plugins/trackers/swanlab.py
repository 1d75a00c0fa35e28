"""SwanLab: the numbers of a run on its pages, or in files on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vembed.plugins.trackers.hosted import PROJECT, HostedTracker

if TYPE_CHECKING:
    from collections.abc import Mapping


class SwanlabTracker(HostedTracker):
    """Send numbers to SwanLab; its own variables hold: SWANLAB_PROJ_NAME, SWANLAB_MODE=offline and the like."""

    name = package = "swanlab"
    advice = "log in with `swanlab login`, or set SWANLAB_MODE=offline"

    def open(self, run_id: str) -> Any:
        """Return SwanLab's run, named as the output folder."""
        # With "allow" a resumed training continues the run of this id, and a first start makes it.
        return self.service.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            experiment_name=os.environ.get("SWANLAB_EXP_NAME", self.run_name),
            id=run_id,
            resume="allow",
            logdir=str(self.folder),
            config=dict(self.config),
        )

    def send(self, run: Any, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        run.log(dict(values), step=step)
