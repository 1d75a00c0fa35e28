"""A run that runs out of memory continues, as planned after the first time, in smaller chunks after the second."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kit.runs import Site, run_keys
from transformers import BertModel

if TYPE_CHECKING:
    from pathlib import Path

KEYS: dict[str, Any] = {
    "torch_dtype": "float64",
    "max_steps": 6,
    "eval_steps": 6,
    "save_steps": 1,
    "save_total_limit": 6,
    "retain": 0,
    "gradient_cache_chunk_size": 12,
}


def limit_memory(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    """Let the encoder's training passes fail as a GPU does when a chunk has more rows."""
    forward = BertModel.forward

    def limited(self: BertModel, *arguments: Any, **named: Any) -> Any:
        if self.training and len(named["input_ids"]) > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, *arguments, **named)

    monkeypatch.setattr(BertModel, "forward", limited)


def test_a_run_out_of_memory_is_repaired_counted_and_resumed_in_the_smaller_chunks(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = site.keys(**KEYS, model_name=str(site.bert_without_dropout))
    undisturbed = run_keys(tmp_path / "undisturbed", keys)
    with monkeypatch.context() as patch:
        limit_memory(patch, 4)
        repaired = run_keys(tmp_path / "repaired", keys)
    assert repaired.code == 0, repaired.err
    repairs = repaired.rows[0]["oom_repairs"]
    assert repairs > 0
    assert [row["oom_repairs"] for row in repaired.rows[1:]] == [repairs, 0, 0, 0, 0]
    assert repaired.out.count("out of memory in chunks of") == 2 * repairs
    assert repaired.out.count("out of memory in a second step") == 1
    assert [row["oom_repairs"] for row in undisturbed.rows] == [0] * 6
    assert repaired.losses == pytest.approx(undisturbed.losses, rel=1e-10)
    assert limits_after(repaired, 1)["rows"] == 12
    assert 1 < limits_after(repaired, 6)["rows"] <= 4
    for step, repeated in ((4, 0), (1, repairs)):  # each resumed run continues as the one that never stopped
        with monkeypatch.context() as patch:
            limit_memory(patch, 4)
            checkpoint = repaired.folder / "checkpoints" / f"step-0000000{step}"
            resumed = run_keys(tmp_path / "repaired", keys | {"resume": str(checkpoint)})
        assert resumed.code == 0, resumed.err
        assert resumed.out.partition("continuing from")[2].count("out of memory in chunks of") == repeated
        assert resumed.same_rows == repaired.same_rows


def limits_after(run: Any, step: int) -> dict[str, Any]:
    state = json.loads((run.folder / f"checkpoints/step-0000000{step}/state.json").read_text())
    limits: dict[str, Any] = state["run"]["step_limits"]
    return limits


def test_without_repair_the_run_ends_with_5_and_advice(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_memory(monkeypatch, 4)
    for name, changes in (
        ("off", {"oom_retry": False}),
        ("whole", {"use_gradient_cache": False, "retain": "auto", "gradient_cache_chunk_size": "auto"}),
    ):
        stopped = run_keys(tmp_path / name, site.keys(**KEYS | changes))
        assert stopped.code == 5
        assert "error: out of memory" in stopped.err
        assert "Traceback" not in stopped.err
