"""gradient_accumulation_steps: the mean of several batches makes one step, each batch with negatives of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from command_cases import Site, run_keys, word_pairs, write_rows

if TYPE_CHECKING:
    from pathlib import Path


def keys_of(site: Site, **changes: Any) -> dict[str, Any]:
    settings = {"model_name": str(site.bert_without_dropout), "torch_dtype": "float64", "eval_strategy": "no"}
    return site.keys(**settings | {"eval_steps": None, "save_steps": None} | changes)


def test_accumulating_the_same_batch_changes_nothing_as_its_mean_is_itself(site: Site, tmp_path: Path) -> None:
    """16 records in batches of 16: every batch holds the same rows, in another order."""
    rows = write_rows(tmp_path / "rows.jsonl", word_pairs()[:16])
    keys = keys_of(site, data_path=str(rows), max_steps=4)
    once = run_keys(tmp_path / "1", keys)
    thrice = run_keys(tmp_path / "3", keys | {"gradient_accumulation_steps": 3})
    assert (once.code, thrice.code) == (0, 0), once.err + thrice.err
    assert once.losses[3] < once.losses[0]
    assert thrice.losses == pytest.approx(once.losses, abs=1e-10)
    assert [row["grad_norm"] for row in thrice.rows] == pytest.approx([row["grad_norm"] for row in once.rows], rel=1e-8)
    assert [row["num_chunks"] for row in thrice.rows] == [3 * row["num_chunks"] for row in once.rows]
    for run, said in ((thrice, "x 3 accumulated = 48"), (once, "x 1 accumulated = 16")):
        assert any(said in reason for reason in json.loads((run.folder / "plan.json").read_text())["reasons"])


@pytest.mark.slow
def test_the_batches_of_a_step_follow_each_other_and_none_is_lost_on_resuming(site: Site, tmp_path: Path) -> None:
    """At a learning rate of next to nothing, the loss of a step is the mean of the losses of its batches."""
    keys = keys_of(site, batch_size=8, learning_rate=1e-30, weight_decay=0.0)
    single = run_keys(tmp_path / "single", keys | {"max_steps": 12})
    paired = keys | {"gradient_accumulation_steps": 2, "max_steps": 6}
    whole = run_keys(tmp_path / "pairs", paired)
    expected = [(one + other) / 2 for one, other in zip(single.losses[::2], single.losses[1::2], strict=True)]
    assert len(set(single.losses)) == 12
    assert whole.losses == pytest.approx(expected, abs=1e-12)
    stopped = run_keys(tmp_path / "stopped", paired | {"save_steps": 3, "num_workers": 0})
    last = stopped.folder / "checkpoints" / "step-00000006"
    assert last.is_dir()
    again = run_keys(tmp_path / "stopped", paired | {"save_steps": 3, "resume": str(last.with_name("step-00000003"))})
    assert again.code == 0, again.err
    assert again.same_rows == whole.same_rows
