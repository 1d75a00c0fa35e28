"""A run that runs out of memory goes on in smaller chunks, and stays there after a stop."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from command_cases import Site, run_keys
from transformers import BertModel

if TYPE_CHECKING:
    from pathlib import Path

KEYS: dict[str, Any] = {
    "torch_dtype": "float64",
    "max_steps": 6,
    "eval_steps": 6,
    "save_steps": 2,
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
    assert repaired.out.count("out of memory in chunks of") == repaired.rows[0]["oom_repairs"] > 0
    assert [row["oom_repairs"] for row in repaired.rows[1:]] == [0] * 5
    assert [row["oom_repairs"] for row in undisturbed.rows] == [0] * 6
    assert repaired.losses == pytest.approx(undisturbed.losses, rel=1e-10)
    state = json.loads((repaired.folder / "checkpoints/step-00000006/state.json").read_text())
    rows, _ = state["run"]["smaller_chunk"]
    assert 1 < rows <= 4
    with monkeypatch.context() as patch:
        limit_memory(patch, 4)
        resumed = run_keys(
            tmp_path / "repaired", keys | {"resume": str(repaired.folder / "checkpoints" / "step-00000004")}
        )
    assert resumed.code == 0, resumed.err
    assert "out of memory in chunks of" not in resumed.out.partition("going on from")[2]
    assert [row["oom_repairs"] for row in resumed.rows[1:]] == [0] * 5
    assert resumed.same_rows == repaired.same_rows


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
