"""A run tells what it learnt: too little, too hastily, or well, from its loss and its dev set alone."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from vembed.config.schema import Config
from vembed.training.run import run_from_config

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = (
    ("ba", "do", "fi", "gu", "ke", "lo", "mi", "na"),
    ("rat", "sel", "ton", "vim", "wus", "zeg", "pol", "hix"),
)
CAUSES = ("little learnt", "learning rate too high", "worse than the untrained model", "loss of 0")


def translations(path: Path) -> str:
    """Write rows whose two texts share no word: every word of a query has a word of another language beside it."""
    rows = [
        {"query": f"{first} {second}", "positive": f"{second[::-1]}o {first[::-1]}e"}
        for first in FIRST
        for second in SECOND
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(folder: Path, mode: str = "train", **keys: object) -> None:
    rows = translations(folder / "rows.jsonl")
    values = {
        "model_name": "builtin:static",
        "data_path": rows,
        "val_data_path": rows,
        "output_dir": str(folder / "out"),
        "batch_size": 32,
        "report_to": "none",
        "bm25": False,
        "num_workers": 0,
    }
    run_from_config(Config.model_validate(values | keys), mode=mode)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learning_rate", "cause"), [(2e-5, "little learnt"), (5e-2, None), (1e3, "learning rate too high")]
)
def test_a_run_without_a_test_set_tells_what_its_learning_rate_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, learning_rate: float, cause: str | None
) -> None:
    with caplog.at_level(logging.INFO, logger="vembed"):
        run(tmp_path, max_steps=40, eval_strategy="steps", eval_steps=20, learning_rate=learning_rate)
    text = "\n".join(record.getMessage() for record in caplog.records)
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    found = [finding["cause"] for finding in report["findings"] if finding["cause"] in CAUSES]
    assert found == ([] if cause is None else [cause]), text
    assert [name for name in CAUSES if f"diagnosis     {name}: " in text] == found


@pytest.mark.parametrize(("learning_rate", "is_told"), [(2e-5, True), (5e-2, False)])
def test_the_plan_tells_of_a_learning_rate_that_is_far_too_low_for_random_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, learning_rate: float, is_told: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="vembed"):
        run(tmp_path, "plan", learning_rate=learning_rate)
    reasons = json.loads((tmp_path / "out" / "plan.json").read_text())["reasons"]
    told = [
        reason for reason in reasons if "builtin:static starts from random weights and hardly learns with it" in reason
    ]
    assert len(told) == is_told
    assert not is_told or "try 0.05 and more epochs" in told[0]
