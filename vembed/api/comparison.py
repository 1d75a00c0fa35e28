"""`vembed.compare`: how runs differ, for Python callers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vembed.comparison.compare import RunComparison, compare_runs
from vembed.distributed.lock import hold_output
from vembed.files import home_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.training.finish import RunResult

__all__ = ["RunComparison", "compare"]


def compare(
    runs: Sequence[str | Path | RunResult],
    output: str | Path | None = None,
    *,
    baseline: str | Path | RunResult | None = None,
    metric: str | None = None,
) -> RunComparison:
    """Compare runs: settings and data, metrics with paired tests, curves, time and memory, queries won and lost.

    Args:
        runs: Output folders, patterns such as "runs/*", or what `train` returned.
        output: Folder for compare.html, compare.md and compare.json; None writes nothing.
        baseline: What the others are compared with; None takes the first.
        metric: What to compare by; None takes what the baseline chose its checkpoint by.

    Raises:
        ConfigError: There are fewer than two runs, or one isn't a run.
        MachineError: The output can't be written.
    """
    folders = [_folder(run) for run in runs]
    first = None if baseline is None else _folder(baseline)
    if output is None:
        return compare_runs(folders, None, first, metric=metric)
    with hold_output(home_path(output)):
        return compare_runs(folders, home_path(output), first, metric=metric)


def _folder(run: str | Path | RunResult) -> str | Path:
    return run if isinstance(run, str | Path) else run.output
