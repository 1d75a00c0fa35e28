"""gradient_accumulation_steps: a step is the mean over the rows of several batches, and ends with its epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from kit.runs import Site, run_keys, run_killed, word_pairs, write_config, write_rows
from kit.several_ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 84
PER_ROW = {"loss_type": "triplet", "triplet_negatives": "listed"}
"""A loss that is a mean over rows, whatever stands beside them in a batch."""


def keys_of(site: Site, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of two epochs over 84 rows, each with a hard negative, in float64."""
    pairs = word_pairs()
    rows = [{**row, "negatives": [pairs[number - 1]["positive"]]} for number, row in enumerate(pairs[:NUM_ROWS])]
    settings = {
        "model_name": str(site.bert_without_dropout),
        "torch_dtype": "float64",
        "data_path": str(write_rows(folder / "rows.jsonl", rows)),
        "max_steps": None,
        "epochs": 2,
        "eval_strategy": "no",
        "eval_steps": None,
        "num_workers": 0,
        "warmup_steps": 0,
        "temperature": None,
    }
    return site.keys(**settings | PER_ROW | changes)


# Batches of a step: 3 + 3 + 3 + 2, the last of 8 and 4 rows; 5 + 5 + 1, the last of 4 rows; all 11.
@pytest.mark.parametrize(("accumulated", "steps_per_epoch"), [(3, 4), (5, 3), (100, 1)])
def test_a_step_is_the_mean_over_its_rows_and_an_epoch_ends_with_its_rows(
    site: Site, tmp_path: Path, accumulated: int, steps_per_epoch: int
) -> None:
    at_once = run_keys(tmp_path / "1", keys_of(site, tmp_path, batch_size=min(8 * accumulated, NUM_ROWS)))
    keys = keys_of(site, tmp_path, batch_size=8, gradient_accumulation_steps=accumulated)
    added_up = run_keys(tmp_path / "n", keys)
    assert (at_once.code, added_up.code) == (0, 0), at_once.err + added_up.err
    assert len(added_up.rows) == len(at_once.rows) == 2 * steps_per_epoch
    assert added_up.losses == pytest.approx(at_once.losses, abs=1e-10)
    norms = [[row["grad_norm"] for row in run.rows] for run in (added_up, at_once)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-8)
    assert added_up.losses[-1] < added_up.losses[0]
    epochs = [row["epoch"] for row in added_up.rows]
    assert epochs == sorted(epochs)
    assert (epochs[steps_per_epoch - 1], epochs[-1]) == (1.0, 2.0)
    assert epochs[0] == min(accumulated, 11) / 11
    plan = json.loads((added_up.folder / "plan.json").read_text("utf-8"))
    assert (plan["steps"], plan["steps_per_epoch"]) == (2 * steps_per_epoch, steps_per_epoch)
    assert plan["gradient_accumulation_steps"] == min(accumulated, 11)


def test_each_batch_of_a_step_has_negatives_of_its_own(site: Site, tmp_path: Path) -> None:
    """At a learning rate of next to nothing, the loss of a step is the mean of the losses of its batches."""
    keys = keys_of(site, tmp_path, batch_size=8, learning_rate=1e-30, weight_decay=0.0)
    keys |= {"loss_type": "infonce", "epochs": 1}
    del keys["triplet_negatives"]
    single = run_keys(tmp_path / "single", keys)
    added_up = run_keys(tmp_path / "3", keys | {"gradient_accumulation_steps": 3})
    assert (single.code, added_up.code) == (0, 0), single.err + added_up.err
    assert len(set(single.losses)) == 11
    sizes = [*[8] * 10, 4]
    parts = [range(3), range(3, 6), range(6, 9), range(9, 11)]
    expected = [sum(single.losses[i] * sizes[i] for i in part) / sum(sizes[i] for i in part) for part in parts]
    assert added_up.losses == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_a_run_killed_behind_a_shorter_step_resumes_exactly(site: Site, tmp_path: Path) -> None:
    keys = keys_of(site, tmp_path, batch_size=8, gradient_accumulation_steps=3, save_steps=1)
    whole = run_keys(tmp_path / "whole", keys)
    config = write_config(tmp_path / "killed", keys)
    run_killed(config, before=5)  # step 4 ended the first epoch
    again = run_keys(tmp_path / "killed", keys)
    assert (whole.code, again.code) == (0, 0), again.err
    assert len(whole.rows) == 8
    assert again.same_rows == whole.same_rows


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(site: Site, tmp_path: Path) -> None:
    keys = keys_of(site, tmp_path, batch_size=None, global_batch_size=8, gradient_accumulation_steps=3)
    one = run_keys(tmp_path / "1", keys)
    two = run_ranks(write_config(tmp_path / "2", keys))
    assert (one.code, two.code) == (0, 0), two.err
    assert len(one.rows) == 8
    assert two.losses == pytest.approx(one.losses, abs=1e-10)
    assert [row["epoch"] for row in two.rows] == [row["epoch"] for row in one.rows]
