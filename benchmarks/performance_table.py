"""Put the performance of finished runs into one table: `python benchmarks/performance_table.py RUN [RUN ...]`.

A run is an output folder; what is shown stands in its report/report.json. Where one of the runs is of one process,
the others of the same model are compared with it: scaling is tokens per second and process over those of the one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADS = (
    "Run", "Model", "Strategy", "Devices", "Dtype", "Batch", "Memory per device", "Step", "Samples/s", "Tokens/s",
    "Scaling",
)  # fmt: skip


def read_performance(folder: Path) -> dict[str, Any]:
    """Return what a run took.

    Args:
        folder: Its output folder.

    Raises:
        SystemExit: There is no report, or one without these numbers.
    """
    path = folder / "report" / "report.json"
    if not path.is_file():
        raise SystemExit(f"{path}: no such file; a run writes it at its end")
    performance: dict[str, Any] = json.loads(path.read_text("utf-8")).get("performance", {})
    if "step_seconds" not in performance:
        raise SystemExit(f"{path} holds no times of steps: it is of an older version, or no step was trained")
    return performance


def scaling(run: dict[str, Any], runs: list[dict[str, Any]]) -> float | None:
    """Return the speed of one process of a run over that of the same model alone, or None where nobody knows.

    Args:
        run: The run.
        runs: All of them.
    """
    same = ("model", "device", "dtype")
    alone = [each for each in runs if each["processes"] == 1 and all(each[key] == run[key] for key in same)]
    if not alone or run["processes"] == 1:
        return None
    best = max(float(each["tokens_per_second"]) for each in alone)
    return float(run["tokens_per_second"]) / int(run["processes"]) / best


def table(names: list[str], runs: list[dict[str, Any]]) -> str:
    """Return the table in Markdown.

    Args:
        names: Of the runs.
        runs: What each of them took.
    """
    lines = [HEADS, tuple("---" for _ in HEADS)]
    for name, run in zip(names, runs, strict=True):
        efficiency = scaling(run, runs)
        lines.append(
            (
                name,
                str(run["model"]),
                str(run["strategy"]),
                f"{run['processes']} x {run['device']}",
                str(run["dtype"]),
                f"{run['global_batch_size']:,}",
                f"{run['peak_memory_bytes'] / (1 << 30):.2f} of {run['device_memory_bytes'] / (1 << 30):.0f} GiB",
                f"{run['step_seconds']:.3g} s",
                f"{run['samples_per_second']:,.1f}",
                f"{run['tokens_per_second']:,.0f}",
                "" if efficiency is None else f"{efficiency:.0%}",
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    folders = [Path(word) for word in sys.argv[1:]]
    print(table([str(folder) for folder in folders], [read_performance(folder) for folder in folders]))
