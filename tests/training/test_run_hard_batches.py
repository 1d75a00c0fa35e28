"""Runs whose batches are chosen by what the starting model finds alike."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from warm_process import run_warm

import vembed
from vembed.data.clusters import whole_numbers
from vembed.data.table_writer import RecordWriter
from vembed.errors import ConfigError
from vembed.models.ngram_bag import NgramBag
from vembed.vectors import items as items_module
from vembed.vectors.encode import ItemEncoder, encoding_budget
from vembed.vectors.items import HardVectors

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.data.table import RecordTable
    from vembed.models.encoder import Encoder


def table() -> RecordTable:
    writer = RecordWriter()
    for row in range(30):
        positives = [f"word{row % 7} answer {row}", f"another {row}"][: 1 + row % 2]
        writer.add(f"word{row % 7} query {row // 2}", positives=positives, negatives=["far"], file="a", line=row + 1)
    return writer.finish()


def encoder_of(bag: Path) -> Encoder:
    encoder = vembed.load(str(bag))._encoder
    assert isinstance(encoder, NgramBag)
    return encoder


@pytest.mark.parametrize("block_rows", [65_536, 7])
def test_a_row_has_the_vectors_of_its_query_and_its_first_positive(
    bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(items_module, "BLOCK_ROWS", block_rows)
    encoder, records = encoder_of(bag), table()
    records = records.subset([*range(5, 30), 2])
    encode = ItemEncoder(encoder, encoding_budget(encoder, torch.device("cpu"), 8), torch.device("cpu"))
    hard = HardVectors.of(encoder, records, tmp_path / "vectors", precision="float32")
    made = hard.vectors(encode)
    queries = encode.table([record.query for record in records], "query")
    documents = encode.table([record.positives[0] for record in records], "document")
    sums = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, documents)]
    assert np.array_equal(made, whole_numbers((sums[0] + sums[1]).astype(np.float32)))
    with torch.no_grad():
        next(encoder.parameters()).zero_()  # what is known isn't encoded again
    assert np.array_equal(hard.vectors(encode), made)


def test_a_model_of_several_vectors_is_refused(bag: Path, tmp_path: Path) -> None:
    encoder = encoder_of(bag)
    encoder.multi_vector = True
    with pytest.raises(ConfigError, match="compares one vector of each row"):
        HardVectors.of(encoder, table(), tmp_path, precision="float32")


@pytest.mark.slow
def test_a_run_on_hard_batches_resumes_exactly_even_without_its_vectors(bag: Path, tmp_path: Path) -> None:
    rows = [{"query": f"word{row % 9} w{row}", "positive": f"word{row % 9} v{row}"} for row in range(96)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {
        "model_name": str(bag),
        "data_path": str(tmp_path / "rows.jsonl"),
        "val_data_path": str(tmp_path / "rows.jsonl"),
        "batch_sampling": "hard",
        "batch_size": 16,
        "epochs": 2,
        "learning_rate": 1e-2,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 9,
        "num_processes": 1,
        "bm25": False,
        "report_to": "none",
    }
    folder = tmp_path / "run"
    vembed.train(keys, output_dir=str(folder))
    whole = _losses(folder)
    reasons = json.loads((folder / "plan.json").read_text())["reasons"]
    assert any(each.startswith("batch_sampling hard: before step 1 the starting model encodes 192") for each in reasons)
    for saved in (folder / "checkpoints").iterdir():
        if saved.is_dir() and int(saved.name.partition("-")[2]) != 4:
            saved.rename(tmp_path / saved.name)
    shutil.rmtree(folder / "hard_vectors")
    vembed.train(keys, output_dir=str(folder))
    assert _losses(folder) == whole
    assert len(whole) == 12
    vembed.train(keys, output_dir=str(tmp_path / "random"), batch_sampling="random")
    assert np.mean(whole[:6]) > np.mean(_losses(tmp_path / "random")[:6])


@pytest.mark.slow
def test_two_processes_see_the_batches_of_one(bag: Path, tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 40)):
        rows = [{"query": f"word{row % 9} w{row}", "positive": f"word{row % 9} v{row}"} for row in range(first, 64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(
        f"model_name: {bag}\ndata: [{{path: a.jsonl}}, {{path: b.jsonl, weight: 2}}]\nval_data_path: a.jsonl\n"
        "batch_sampling: hard\nglobal_batch_size: 16\nepochs: 1\nlearning_rate: 1e-2\neval_strategy: 'no'\n"
        "save_strategy: 'no'\nbm25: false\nreport_to: none\n"
    )
    for count in (1, 2):
        words = ["-m", "vembed", "train", "config.yaml", "--config_override", f"num_processes={count}"]
        done = run_warm([*words, f"output_dir=run{count}"], cwd=tmp_path, env=os.environ, scratch=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (_losses(tmp_path / f"run{count}") for count in (1, 2))
    assert len(one) == 6
    assert one == pytest.approx(two, rel=1e-4)


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
