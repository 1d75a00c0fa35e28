"""What several processes tell of themselves: in metrics.jsonl, in TensorBoard, and in the report's table of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from kit.runs import ROOT, Site, run_process, write_config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_two_processes_show_their_numbers_and_how_far_they_lie_apart(site: Site, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = site.keys(num_processes=2, batch_size=8, report_to="tensorboard", logging_steps=4, eval_strategy="no")
    outcome = run_process(write_config(tmp_path, keys | {"eval_steps": None}))
    assert outcome.code == 0, outcome.err
    told = {row["step"] for row in outcome.rows if "scaling_efficiency" in row}
    assert told == {1, 4, 8}, "once in a logging interval"
    for row in outcome.rows:
        assert row["wait_seconds"] > 0
        assert row["reduce_seconds"] > 0
        if row["step"] in told:
            assert 0 < row["scaling_efficiency"] < 1
            assert 1 <= row["token_imbalance"] < 2
            assert row["slowest_rank"] in (0, 1)
    shown = EventAccumulator(str(outcome.folder / "tensorboard"))
    shown.Reload()
    losses = [[event.value for event in shown.Scalars(f"ranks/loss/{rank}")] for rank in range(2)]
    assert losses[0] != losses[1]
    for step, *of_ranks in zip((1, 4, 8), *losses, strict=True):
        loss = outcome.rows[step - 1]["loss"]
        assert sum(of_ranks) / 2 == pytest.approx(loss, rel=1e-5), "the loss is the mean of the ranks'"
    assert all(event.value > 1e7 for event in shown.Scalars("ranks/peak_memory_bytes/1"))
    report = json.loads((outcome.folder / "report" / "report.json").read_text())
    assert report["performance"]["processes"] == 2
    assert 0 < report["performance"]["scaling_efficiency"] < 1
    script = ROOT / "benchmarks" / "performance_table.py"
    words = [sys.executable, str(script), str(outcome.folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "| 2 x the CPU |" in done.stdout
