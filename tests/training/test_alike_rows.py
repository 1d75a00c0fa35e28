"""Rows that are all alike teach nothing: the run refuses them before anything trains, or tells a loss of 0 early."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from vembed.config.schema import Config
from vembed.errors import DataError
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("ato", "emi", "ulu", "isk", "oru", "anz")]


def pairs(count: int = 24, **columns: Sequence[object]) -> list[dict[str, object]]:
    """Return rows of texts, with further columns whose values repeat."""
    rows: list[dict[str, object]] = [
        {"query": f"which {WORDS[number]}", "positive": f"the {WORDS[number]}"} for number in range(count)
    ]
    for name, values in columns.items():
        for number, row in enumerate(rows):
            row[name] = values[number % len(values)]
    return rows


def written(path: Path, rows: Sequence[Mapping[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(folder: Path, mode: Any = "plan", **keys: object) -> None:
    """Plan a run, or train it."""
    values = {
        "model_name": "builtin:static",
        "output_dir": str(folder / "out"),
        "batch_size": 8,
        "report_to": "none",
        "bm25": False,
        "num_workers": 0,
        "test_data_path": written(folder / "test.jsonl", pairs()),
    }
    run_from_config(Config.model_validate(values | keys), mode=mode)


GRADED = {"label_kind": "grade", "loss_type": "cosent"}
TRUTH = {"label_kind": "pair", "loss_type": "cosent"}
CLASSES = {"label_kind": "class"}


@pytest.mark.parametrize(
    ("columns", "differing", "keys", "sentence"),
    [
        (
            {"score": [3.5]},
            {"score": [3.5, 1.0]},
            GRADED,
            (
                "all 24 rows have the same label, 3.5 (column score), so no pair is closer than another and nothing "
                "can be learnt; map the column of the labels with column_mapping: {COLUMN: label}, or drop this one "
                "with column_mapping: {score: null} and set loss_type: infonce"
            ),
        ),
        ({"label": [1]}, {"label": [1, 0]}, TRUTH, "have the same label, 1 (column label)"),
        ({"label": [0]}, {"label": [1, 0]}, TRUTH, "have the same label, 0 (column label)"),
        (
            {"label": ["shell"]},
            {"label": ["shell", "files"]},
            CLASSES,
            "all 24 rows are of one class, 'shell' (column label), so every document is a positive of every query",
        ),
        (
            {"positive": ["See the manual."]},
            {"positive": ["See the manual.", "Ask somebody."]},
            {},
            "all 24 rows have the same positive, 'See the manual.' (column positive), so no document is a negative",
        ),
    ],
)
def test_rows_that_are_all_alike_are_refused_with_file_column_and_cure(
    tmp_path: Path,
    columns: dict[str, list[object]],
    differing: dict[str, list[object]],
    keys: dict[str, object],
    sentence: str,
) -> None:
    path = written(tmp_path / "rows.jsonl", pairs(**columns))
    with pytest.raises(DataError) as refused:
        run(tmp_path, data_path=path, **keys)
    assert str(refused.value).startswith(f"{path}: ")
    assert sentence in str(refused.value)
    run(tmp_path, data_path=written(tmp_path / "fit.jsonl", pairs(**differing)), eval_strategy="no", **keys)


def test_a_source_may_be_alike_where_batches_mix_it_with_others(tmp_path: Path) -> None:
    rows = {"ones": pairs(label=[1]), "zeros": pairs(label=[0])}
    data = [{"path": written(tmp_path / f"{name}.jsonl", lines)} for name, lines in rows.items()]
    run(tmp_path, data=data, **TRUTH)
    with pytest.raises(DataError, match=r"ones\.jsonl: all 24 rows have the same label"):
        run(tmp_path, data=data, source_batches="single", **TRUTH)


@pytest.mark.slow
@pytest.mark.parametrize(("margin", "is_told"), [(1e-6, True), (1.0, False)])
def test_a_loss_of_0_is_told_at_step_10_and_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, margin: float, is_told: bool
) -> None:
    """Query and positive are the same text, so that every triplet meets a small margin from the start."""
    rows = [{"query": word, "positive": word} for word in WORDS]
    keys = {"data_path": written(tmp_path / "rows.jsonl", rows), "loss_type": "triplet", "triplet_margin": margin}
    with caplog.at_level(logging.INFO, logger="vembed"):
        run(tmp_path, "train", **keys, max_steps=12, learning_rate=1e-3, logging_steps=5)
    lines = [record.getMessage() for record in caplog.records]
    shown = [place for place, line in enumerate(lines) if "loss of 0: The loss was 0 in each of the" in line]
    ten = [place for place, line in enumerate(lines) if line.startswith(("step 10/12", "step 12/12"))]
    assert len(ten) == 2
    assert len(shown) == 2 * is_told
    if is_told:
        assert ten[0] < shown[0] < ten[1] < shown[1]
        assert "each of the 10 steps so far" in lines[shown[0]]
        assert caplog.records[shown[0]].levelno == logging.WARNING
        assert "margin" in lines[shown[0] + 1]
