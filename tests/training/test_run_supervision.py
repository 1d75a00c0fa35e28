"""A loss of a plugin that learns from listed pairs and a column of its own: trained on data in the form of MRPC."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from kit.warm import run_warm

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PLUGIN = '''
import vembed
from vembed.data.columns import ExtraColumn
from vembed.losses.base import ContrastiveLoss
from vembed.losses.registry import LossSection


class ToyKeys(LossSection):
    """Facts of the loss of pairs."""

    name = "toy-pairs"
    takes = ("pairs",)
    memory = "pairs"
    columns = (ExtraColumn("weight", "how much the row counts", least=0),)


@vembed.register_loss
class ToyPairs(ContrastiveLoss):
    """The similarity of a pair is to be its truth."""

    keys = ToyKeys

    def forward(self, q_QE, d_DE, structure):
        rows, documents = structure.listed_P2.unbind(1)
        weights = structure.columns["weight"][rows].to(q_QE.dtype)
        similarity = (q_QE[rows] * d_DE[documents]).sum(1)
        return (weights * (similarity - structure.listed_scores_P.to(q_QE.dtype)) ** 2).sum() / weights.sum()
'''
CONFIG = """
plugins: [toy_pairs]
model_name: MODEL
loss_type: toy-pairs
label_kind: pair
data_path: rows.jsonl
test_data_path: rows.jsonl
batch_size: 16
epochs: 6
learning_rate: 0.05
eval_strategy: 'no'
bm25: false
output_dir: run
num_processes: 1
report_to: none
"""


@pytest.fixture
def folder(tmp_path: Path, bag: Path) -> Path:
    rows = [
        {"sentence1": f"w{row}a w{row}b", "sentence2": f"w{row}c w{row}d", "label": row % 2, "weight": 1 + row % 3}
        for row in range(32)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "toy_pairs.py").write_text(PLUGIN)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("MODEL", str(bag)))
    return tmp_path


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = ["train", "config.yaml", *(("--config_override", *overrides) if overrides else ())]
    return run_warm(["-m", "vembed", *words], cwd=folder, env=os.environ, scratch=folder)


@pytest.mark.slow
def test_cosent_trains_a_model_on_pairs_with_a_truth(folder: Path) -> None:
    done = train(folder, "plugins=[]", "loss_type=cosent")
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])


@pytest.mark.slow
def test_pairs_with_a_truth_and_a_column_of_the_loss_train_a_model(folder: Path) -> None:
    done = train(folder)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    report = (folder / "run/report/report.json").read_text()
    assert "rows.jsonl has 32 judged pairs, and nothing is searched: average precision decides." in report


@pytest.mark.slow
def test_two_processes_see_the_pairs_and_columns_of_the_whole_batch(folder: Path) -> None:
    for processes in (1, 2):
        shares = (f"num_processes={processes}", f"batch_size={16 // processes}")
        done = train(folder, *shares, f"output_dir=run{processes}")
        assert done.returncode == 0, done.stderr
    losses = [
        [json.loads(line)["loss"] for line in (folder / f"run{processes}/metrics.jsonl").read_text().splitlines()]
        for processes in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
