"""When a run saves, and that 0 means off in the run as in the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kit.runs import NUM_TRAIN, Site, run_keys

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_an_epoch_ends_in_a_checkpoint_and_zero_switches_off(site: Site, tmp_path: Path) -> None:
    keys = site.keys(eval_strategy="no", eval_steps=None, test_data_path=None)
    keys |= {"max_steps": 14, "save_total_limit": 9, "save_strategy": "epoch", "save_steps": 0, "max_grad_norm": 0}
    per_epoch = -(-NUM_TRAIN // 16)
    run = run_keys(tmp_path, keys | {"validate_data": True})
    assert run.code == 0, run.err
    saved = sorted(int(path.name.removeprefix("step-")) for path in (run.folder / "checkpoints").glob("step-*"))
    assert saved == [per_epoch, 2 * per_epoch, 14]
    assert "writes up to" in run.out
    assert "(3 checkpoints together" in run.flat
    assert "validate_data true: all rows are checked before training" in run.flat
    written = (run.folder / "config.yaml").read_text()
    assert "save_steps: null" in written
    assert "max_grad_norm: null" in written
    middle = run.folder / "checkpoints" / f"step-{per_epoch:08}"
    resumed = run_keys(tmp_path, keys | {"max_grad_norm": None, "save_steps": None, "resume": str(middle)})
    assert resumed.code == 0, resumed.err
    assert resumed.same_rows == run.same_rows
