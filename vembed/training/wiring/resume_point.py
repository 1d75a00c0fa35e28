"""Where a run continues from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vembed.checkpoint.manager import CheckpointManager
from vembed.training.saving import PARTS, check_shape
from vembed.training.trackers.jsonl import read_rows
from vembed.training.wiring.early import accepted_differences, refuse_other_place
from vembed.training.wiring.planning import check_decisions

if TYPE_CHECKING:
    from vembed.checkpoint.contents import LoadedCheckpoint
    from vembed.config.schema import Config
    from vembed.distributed.runtime import Runtime
    from vembed.training.output import OutputFolder

_log = logging.getLogger(__name__)


def resume_point(config: Config, runtime: Runtime, output: OutputFolder) -> LoadedCheckpoint | None:
    """Return the checkpoint to continue from, after checking that it is of this configuration."""
    if config.resume == "never":
        return None
    manager = CheckpointManager(output.checkpoints, keep_last=config.save_total_limit, ranks=runtime.ranks)
    source: Literal["auto"] | Path = "auto" if config.resume == "auto" else Path(config.resume)
    checkpoint = manager.load(source, required=[*PARTS, "run", "updater"], check=_check)
    if checkpoint is None:
        lost = len(read_rows(output.path / "metrics.jsonl")) if runtime.ranks.is_first else 0
        if lost:
            _log.warning("%s: no checkpoint of the %d steps that it tells of; they are done again", output.path, lost)
        return None
    refuse_other_place(checkpoint.path, output)
    saved = checkpoint.stamp["config"]
    assert isinstance(saved, dict)
    for difference in accepted_differences(checkpoint.path, saved, config):
        _log.info("resume: %s was %r and is %r now", difference.key, difference.old, difference.new)
    _log.info("resume: continuing from %s", checkpoint.path)
    return checkpoint


def _check(checkpoint: LoadedCheckpoint) -> None:
    check_shape(checkpoint)
    check_decisions(checkpoint)
