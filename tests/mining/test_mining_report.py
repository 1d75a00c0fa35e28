"""The report of a mining: negatives near their positive are counted over all queries, and shown worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from mining_cases import made_rows, read_rows, written

from vembed.api.model import load
from vembed.batch import ImageLimits
from vembed.evaluation.mining_report import MiningReport, mining_page
from vembed.gradcache.chunks import ChunkBudget
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.pages.markdown import render_markdown
from vembed.vectors.encode import ItemEncoder
from vembed.vectors.keys import MiningKeys
from vembed.vectors.mining import EncoderTeacher, Miner, MiningTask

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def encode(bag: Path) -> ItemEncoder:
    return load(bag, device="cpu").item_encoder(256)


@pytest.fixture
def teacher() -> ItemEncoder:
    torch.manual_seed(5)
    other = NgramBag(NgramBagConfig(dimension=64, buckets=4096, max_words=16))
    return ItemEncoder(other, ChunkBudget(64, 10**6), torch.device("cpu"))


def mined(
    folder: Path, encode: ItemEncoder, teacher: ItemEncoder | None = None, *, command: str = "", **keys: Any
) -> MiningReport:
    rows = written(folder / "rows.jsonl", made_rows(60))
    task = MiningTask.of(read_rows(rows).table)
    judge = None if teacher is None else EncoderTeacher.of(teacher, task, folder / "teacher")
    options = MiningKeys(**keys)
    found = Miner(encode, options, folder / "work", teacher=judge).mine(task)
    source = {"model": "m", **({} if teacher is None else {"teacher": "t"})}
    return MiningReport(task, found, options, source, (), {}, command)


@pytest.mark.parametrize("taught", [False, True])
def test_every_negative_near_its_positive_is_counted(
    encode: ItemEncoder, teacher: ItemEncoder, tmp_path: Path, taught: bool
) -> None:
    keys = {"mine_relative_margin": None, "mine_negatives": 6}
    report = mined(tmp_path, encode, teacher if taught else None, command="vembed mine", **keys)
    task, judge = report.task, teacher if taught else encode
    queries = judge.table(task.queries.take(np.arange(len(task.queries))), "query")
    documents = judge.table(task.documents.take(np.arange(len(task.documents))), "document")
    shares, worst = [], (-np.inf, "")
    for query, rows in enumerate(report.mined.rows_Un):
        positives = task.positives.take(np.array([query])).values
        scores = documents @ queries[query]
        best = positives[scores[positives].argmax()]
        for row in rows[rows >= 0]:
            shares.append(scores[row] / scores[best])
            lead = float(scores[row] - scores[best])
            worst = max(worst, (lead, str(task.documents.take(np.array([best]))[0])))
    document = mining_page(report, ImageLimits()).document
    counts = [int((np.array(shares) > percent / 100).sum()) for percent in (90, 95, 100)]
    assert document["near_positives"] == [
        {"above_percent": percent, "negatives": count, "left_out_by": f"--relative-margin {margin}"}
        for percent, count, margin in zip((90, 95, 100), counts, ("0.1", "0.05", "0"), strict=True)
    ]
    assert counts[0] > counts[1] > counts[2] > 0
    assert document["examples"][0]["positive"] == worst[1], "the best positive of the query with the worst negative"
    leads = [
        max(each["score"] for each in example["negatives"]) - example["positive_score"]
        for example in document["examples"][:5]
    ]
    assert leads == sorted(leads, reverse=True)
    assert leads[0] == pytest.approx(worst[0], abs=1e-6)
    by = " by the teacher" if taught else ""
    above = (
        f". {counts[0]} of them score above 90% of their positive{by}, {counts[1]} above 95%, {counts[2]} above 100%."
    )
    assert report.headline.endswith(above)


@pytest.mark.parametrize("margin", [0.1, 0.05, 0.0])
def test_the_option_beside_a_count_leaves_those_out(encode: ItemEncoder, tmp_path: Path, margin: float) -> None:
    report = mined(tmp_path, encode, mine_relative_margin=margin, mine_negatives=6)
    document = mining_page(report, ImageLimits()).document
    (level,) = [
        each for each in document["near_positives"] if each["left_out_by"] == f"mine_relative_margin: {margin:g}"
    ]
    assert level["negatives"] == 0
    assert document["negatives"] > 0


def test_no_rate_is_claimed(encode: ItemEncoder, tmp_path: Path) -> None:
    report = mined(tmp_path, encode, mine_relative_margin=None)
    text = render_markdown(mining_page(report, ImageLimits()))
    assert "| 90% of the positive's |" in text
    assert "not a rate of false negatives" in text
    assert "interval" not in text
    assert "robab" not in text
