"""The table of runs: what a report says, and scaling against the run of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "performance_table.py"

ROW: dict[str, Any] = {
    "model": "bert",
    "strategy": "ddp",
    "device": "H100",
    "processes": 1,
    "dtype": "bfloat16",
    "global_batch_size": 4096,
    "peak_memory_bytes": 3 << 30,
    "device_memory_bytes": 80 << 30,
    "step_seconds": 1.5,
    "samples_per_second": 2730.0,
    "tokens_per_second": 100000.0,
}


def write_run(folder: Path, **changes: Any) -> Path:
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "report.json").write_text(json.dumps({"performance": ROW | changes}))
    return folder


def show(*folders: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), *map(str, folders)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_runs_stand_beside_each_other_and_scale_against_the_one_of_one_process(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    four = write_run(tmp_path / "four", processes=4, tokens_per_second=380000.0)
    other = write_run(tmp_path / "other", processes=4, model="clip")
    done = show(one, four, other)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[3].endswith("| 380,000 | 95% |")
    assert "4 x H100" in lines[3]
    assert "3.00 of 80 GiB" in lines[3]
    assert lines[2].endswith("|  |"), "one process scales against nothing"
    assert lines[4].endswith("|  |"), "another model is no reference"


def test_a_folder_without_a_report_is_named(tmp_path: Path) -> None:
    done = show(tmp_path)
    assert done.returncode == 1
    assert "report.json: no such file" in done.stderr
