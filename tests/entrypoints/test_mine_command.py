"""`vembed mine`: rows that training reads as they are, a report, refusals in words, the same file after kills."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from kit.balls import COLOURS, caption
from kit.runs import environment
from kit.text_models import write_cross_encoder
from mining_cases import made_rows, read_rows, written
from sentence_transformers import CrossEncoder

from vembed.api import model as model_module
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.losses.registry import RunLoss
from vembed.vectors import store as store_module
from vembed.workflows import mining as output_module


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("rows") / "rows.jsonl", made_rows(80))


@pytest.mark.slow
def test_a_cross_encoder_as_teacher_scores_pairs_between_0_and_1_as_the_library_does(
    call: Any, bag: Path, rows: Path, tmp_path: Path
) -> None:
    words = sorted({word for row in made_rows(80) for word in f"{row['query']} {row['positive']}".split()})
    judge, output = write_cross_encoder(tmp_path / "judge", words), tmp_path / "mined.jsonl"
    named = ["--output", output, "--replace", "--relative-margin", "none", "--negatives", "2"]
    done = call("mine", bag, "--data", rows, *named, "--teacher", judge)
    assert done.code == 0, done.err
    row = json.loads(output.read_text("utf-8").splitlines()[4])
    pairs = [[row["query"], document] for document in row["negatives"]]
    library = CrossEncoder(str(judge), device="cpu")
    expected = library.predict(pairs, activation_fn=torch.nn.Sigmoid(), show_progress_bar=False)
    assert row["mined"]["teacher_scores"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert row["mined"]["teacher_scores"] != pytest.approx(row["mined"]["scores"], abs=1e-3), "the model's own"
    assert row["mined"]["teacher"] == str(judge)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_training_reads_the_rows_back_without_a_word_about_where_they_are_from(
    suffix: str, call: Any, bag: Path, rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new" / f"mined{suffix}"
    done = call("mine", bag, "--data", rows, "--output", output, "--relative-margin", "none", "--negatives", "3")
    assert done.code == 0, done.err
    assert "hard negatives for 79 queries" in done.out
    loaded = DataSource(str(output), "train").records()
    assert loaded.notes == ()
    given = list(read_rows(rows).table)
    for before, after in zip(given, loaded.table, strict=True):
        assert (after.query, after.positives) == (before.query, before.positives)
        assert after.negatives[: len(before.negatives)] == before.negatives
        assert len(after.negatives) == len(before.negatives) + 3
        assert len({*after.negatives, *after.positives}) == len(after.negatives) + len(after.positives)
    assert sorted(path.name for path in output.parent.iterdir()) == sorted([output.name, "mined-report"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_weights_labels_and_mapped_columns_come_out_as_they_went_in(
    suffix: str, call: Any, bag: Path, tmp_path: Path
) -> None:
    given = [{**row, "ask": row["query"], "weight": 1 + number % 3} for number, row in enumerate(made_rows(60))]
    for number, row in enumerate(given):
        del row["query"]
        if isinstance(row["positive"], str) and "negatives" not in row:
            row["label"] = int(number % 5 > 0)
    data, output = written(tmp_path / "rows.jsonl", [*given, {"ask": "", "positive": "x"}]), tmp_path / f"mined{suffix}"
    words = ["--data", data, "--output", output, "--relative-margin", "none", "--column-mapping", "ask=query"]
    refused = call("mine", bag, *words, "--label-kind", "pair")
    assert refused.code == 3
    assert "rows.jsonl:61: ask: empty text" in refused.err
    assert refused.err.endswith("Fix the rows, or drop them with --skip-invalid 1\n")
    done = call("mine", bag, *words, "--label-kind", "pair", "--skip-invalid", "1")
    assert done.code == 0, done.err
    options, needs = {"label_kind": "pair", "skip_invalid_records": True}, RunLoss.chosen("cosent", {}).needs()
    before, after = (
        DataSource(str(path), "train", DataKeys(**options, **more), loss=needs).records()
        for path, more in ((data, {"column_mapping": {"ask": "query"}}), (output, {}))
    )
    for one, other in zip(before.table, after.table, strict=True):
        assert (other.query, other.positives, other.columns) == (one.query, one.positives, one.columns)
        assert other.negatives[: len(one.negatives)] == one.negatives
        assert other.scores[: len(one.scores)] == one.scores
        assert len(other.negatives) > len(one.negatives) or (other.negatives == one.negatives and not one.positives)
    assert {record.columns["weight"] for record in after.table} == {1.0, 2.0, 3.0}
    assert any(not record.positives for record in after.table)


def test_grades_are_listed_with_those_of_the_mined(
    call: Any, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.mining.BLOCK_ROWS", 8)
    rows: list[dict[str, Any]] = [{"query": row["query"], "positive": row["positive"]} for row in made_rows(40)[8:]]
    rows[12:] = [{**row, "label": 0.5} for row in rows[12:]]  # the first block has no grade to tell the type by
    data, output = written(tmp_path / "rows.jsonl", rows), tmp_path / "mined.parquet"
    words = ["--data", data, "--output", output, "--relative-margin", "none", "--label-kind", "grade"]
    assert call("mine", bag, *words, "--negatives", "2").code == 0
    loaded = DataSource(str(output), "train", DataKeys(label_kind="grade")).records()
    assert {record.scores for record in loaded.table} == {(), (0.5, 0.0, 0.0)}


GRADED = [
    {
        "query": "a red ball",
        "positive": "one",
        "negatives": ["two"],
        "negative_images": ["blue.png"],
        "label": [3, 1, 2],
    },
    {"query": "a blue ball", "positive": "three", "label": 0},
    {"query": "a green ball", "positive": ["four", "five"], "label": -1},
    {"query": "a green ball", "positive_image": "green.png", "label": 0.5},
    {"query": "a yellow ball", "positive": "six"},
]


@pytest.mark.parametrize("words", [(), ("--replace",)])
def test_every_document_keeps_its_grade_and_what_is_graded_0_is_no_positive(
    words: tuple[str, ...], call: Any, clip: Path, balls: Path, tmp_path: Path
) -> None:
    data, output = written(tmp_path / "rows.jsonl", GRADED), tmp_path / "mined.jsonl"
    options = ["--image-root", balls, "--relative-margin", "none", "--negatives", "20", "--label-kind", "grade"]
    done = call("mine", clip, "--data", data, "--output", output, *options, *words)
    assert done.code == 0, done.err
    keys = DataKeys(label_kind="grade", image_root=str(balls))
    before, after = (DataSource(str(path), "train", keys).records().table for path in (data, output))
    assert sum(not record.positives for record in before) == 2
    for one, other in zip(before, after, strict=True):
        graded, regraded = (
            dict(zip((*each.positives, *each.negatives), each.scores, strict=bool(each.scores)))
            for each in (one, other)
        )
        assert other.positives == one.positives
        if one.positives:
            assert {isinstance(item, str) for item in other.negatives} == {True, False}, "texts and pictures are mined"
            dropped = set(one.negatives) - set(other.negatives)
            assert len(dropped) == len(words) * len(one.negatives)
            kept = {item: grade for item, grade in graded.items() if item not in dropped}
            new = set(other.negatives) - set(one.negatives) if one.scores else set()
            assert regraded == kept | dict.fromkeys(new, 0.0)
        else:
            assert (other.negatives, other.scores) == (one.negatives, one.scores)
    report = json.loads((tmp_path / "mined-report" / "report.json").read_text("utf-8"))
    assert "2 rows without a positive have nothing to mine below and come out as before." in report["notes"]
    refused = call("mine", clip, "--data", data, "--output", tmp_path / "mined.parquet", *options)
    assert refused.code == 2
    assert "rows.jsonl:2 has a grade of 0 or less" in refused.err


def test_a_row_says_where_its_negatives_are_from_and_the_report_says_it_of_all(
    call: Any, bag: Path, rows: Path, tmp_path: Path
) -> None:
    output, corpus = tmp_path / "mined.jsonl", tmp_path / "corpus.txt"
    corpus.write_text("".join(f"a further document {number} of karan\n" for number in range(30)))
    words = ["--data", rows, "--corpus", corpus, "--output", output, "--replace", "--teacher", bag, "--range-max", "20"]
    words += ["--max-score", "1", "--min-score", "0"]
    done = call("mine", bag, *words)
    assert done.code == 0, done.err
    row = json.loads(output.read_text("utf-8").splitlines()[4])
    mined = row["mined"]
    assert len(row["negatives"]) == len(mined["scores"]) == len(mined["ranks"]) == len(mined["teacher_scores"])
    assert mined["model"] == mined["teacher"] == str(bag)
    assert mined["scores"] == sorted(mined["scores"], reverse=True)
    assert max(mined["scores"]) <= 0.95 * mined["positive_score"] + 1e-6
    assert max(mined["ranks"]) <= 20
    assert {"relative_margin=0.05", "min_score=0.0", "max_score=1.0"} <= set(mined["settings"].split())
    assert "absolute_margin" not in mined["settings"], "a limit that there isn't"
    assert not set(made_rows(80)[4]["negatives"]) & set(row["negatives"]), "replaced"
    report = json.loads((tmp_path / "mined-report" / "report.json").read_text("utf-8"))
    assert report["documents"] == 110
    assert report["settings"]["mine_replace"] is True
    assert {"encode documents", "encode queries", "search", "teacher", "choose", "write"} <= report["seconds"].keys()
    page = (tmp_path / "mined-report" / "report.html").read_text("utf-8")
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "| Of the positive's |" in (tmp_path / "mined-report" / "report.md").read_text("utf-8")
    assert " of them score above 90% of their positive by the teacher, " in done.out


def test_the_report_shows_what_pictures_were_mined(call: Any, clip: Path, balls: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    made = [{"query": caption(colour), "positive_image": f"{colour}.png"} for colour in COLOURS]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    done = call("mine", clip, "--data", rows, "--image-root", balls, "--output", tmp_path / "mined.jsonl")
    assert done.code == 0, done.err
    page = (tmp_path / "mined-report" / "report.html").read_text("utf-8")
    shown = set(re.findall(r'<img src="data:image/webp;base64,[^"]+" alt="([^"]+)"', page))
    assert shown == {f"[{colour}.png]" for colour in COLOURS}
    example = json.loads((tmp_path / "mined-report" / "report.json").read_text("utf-8"))["examples"][0]
    assert example.keys() == {"query", "positive", "positive_score", "negatives"}


def test_a_teacher_takes_pictures_as_large_as_the_model_does(
    call: Any, clip: Path, balls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, load = [], model_module.load

    def noted(name: Any, **options: Any) -> Any:
        model = load(name, **options)
        limits.append(model.image_limits.max_pixels)
        return model

    monkeypatch.setattr(model_module, "load", noted)
    rows = [{"query": caption(colour), "positive_image": f"{colour}.png"} for colour in COLOURS]
    words = ["--data", written(tmp_path / "rows.jsonl", rows), "--image-root", balls, "--max-image-pixels", "100000000"]
    done = call("mine", clip, *words, "--output", tmp_path / "mined.jsonl", "--teacher", clip)
    assert done.code == 0, done.err
    assert limits == [100_000_000] * 2


def test_pictures_that_no_row_can_name_are_refused_before_anything_is_encoded(
    call: Any, clip: Path, balls: Path, tmp_path: Path
) -> None:
    made = [{"query": caption(colour), "positive_image": str(balls / f"{colour}.png")} for colour in COLOURS]
    stored = [{"bytes": Path(row["positive_image"]).read_bytes(), "path": "a.png"} for row in made]
    table = pa.table({"query": [row["query"] for row in made], "positive_image": stored})
    pq.write_table(table, tmp_path / "bytes.parquet")
    both = tmp_path / "both.jsonl"
    documents = [{"_id": row["query"], "text": "with a text", "image": row["positive_image"]} for row in made]
    both.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for data, words, message in (
        (tmp_path / "bytes.parquet", (), "bytes.parquet:1 positive_image holds a picture's bytes"),
        (written(tmp_path / "rows.jsonl", made), ("--corpus", both), "a picture with a text"),
    ):
        done = call("mine", clip, "--data", data, "--image-root", balls, "--output", tmp_path / "mined.jsonl", *words)
        assert done.code == 3, done.err
        assert message in done.err
        assert not list(tmp_path.glob("*mining*")), "nothing was encoded"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output", "rows.csv"), "name a file that ends in .jsonl or .parquet"),
        (("--output", "there.jsonl"), "is there; replace it with --overwrite"),
        (("--output", "new.jsonl", "--negatives", "0"), "--negatives: must be >= 1"),
        (("--output", "new.jsonl", "--relative-margin", "1.5"), "--relative-margin: must be <= 1"),
        (("--output", "new.jsonl", "--sampling", "best"), "--sampling:"),
        (("--output", "new.jsonl", "--range-min", "100"), "--range-min 100 skips all candidates"),
        (("--output", "new.jsonl", "--index", "IVF999,Flat"), "--index IVF999,Flat is trained on at least 999"),
        (("--output", f"{'n' * 300}.jsonl"), "File name too long"),
        (("--output", "new.jsonl", "--sampling", "random", "--seed", "-1"), "--seed: must be >= 0, got -1"),
        (("--output", "new.jsonl", "--seed", "0"), "--seed has an effect only with --sampling random"),
        (("--output", "new.jsonl", "--index", "IFV9"), "FAISS can't build the index 'IFV9'"),
        (("--output", "new.jsonl", "--data", "nowhere.jsonl"), "nowhere.jsonl doesn't exist"),
    ],
)
def test_what_can_not_be_done_is_refused_in_words(
    words: tuple[str, ...], message: str, call: Any, bag: Path, rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("someone's")
    done = call("mine", bag, "--data", rows, *words)
    assert done.code in ((5,) if message == "File name too long" else (2, 3))
    assert message in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) in (["there.jsonl"], [".new.jsonl.mining", "there.jsonl"])
    assert (tmp_path / "there.jsonl").read_text() == "someone's"


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
@pytest.mark.parametrize("there", ["report.html", "report.json", "notes.txt", None])
def test_files_at_the_name_of_the_report_that_arent_one_of_mining_stay(
    there: str | None, words: tuple[str, ...], call: Any, bag: Path, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mined-report"
    path = folder if there is None else folder / there
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"schema_version": 1, "mine": "by hand"}')
    done = call("mine", bag, "--data", rows, "--output", tmp_path / "mined.jsonl", *words)
    assert done.code == 2
    assert f"the report goes to {folder}, " in done.err
    assert "choose another --output" in done.err
    assert path.read_text() == '{"schema_version": 1, "mine": "by hand"}'
    assert list(tmp_path.iterdir()) == [folder], "nothing was encoded"


def test_a_former_report_is_replaced_and_files_beside_it_stay(call: Any, bag: Path, rows: Path, tmp_path: Path) -> None:
    words = ["mine", bag, "--data", rows, "--output", tmp_path / "mined.jsonl"]
    folder = tmp_path / "mined-report"
    folder.mkdir()
    (folder / ".report.json.tmp").write_text("{")  # what a kill leaves
    assert call(*words, "--negatives", "2").code == 0
    (folder / "notes.txt").write_text("mine")
    assert call(*words, "--negatives", "3").code == 2, "the rows are there"
    assert json.loads((folder / "report.json").read_text())["settings"]["mine_negatives"] == 2
    assert call(*words, "--negatives", "3", "--overwrite").code == 0
    assert json.loads((folder / "report.json").read_text())["settings"]["mine_negatives"] == 3
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "report.html", "report.json", "report.md"]


def test_an_error_of_the_run_keeps_what_is_done(
    call: Any, bag: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "check_finite", _refuse)
    output = tmp_path / "mined.jsonl"
    assert call("mine", bag, "--data", rows, "--output", output).code == 3
    monkeypatch.undo()
    assert call("mine", bag, "--data", rows, "--output", output).code == 0
    assert not (tmp_path / ".mined.jsonl.mining").exists()


def _refuse(*_: object) -> None:
    from vembed.errors import DataError

    raise DataError("no more")


@pytest.mark.slow
def test_five_kills_leave_the_same_file(bag: Path, tmp_path: Path) -> None:
    rows = written(tmp_path / "rows.jsonl", made_rows(9000))

    def start(output: Path) -> subprocess.Popen[bytes]:
        words = ["mine", bag, "--data", rows, "--output", output, "--sampling", "random"]
        return subprocess.Popen(
            [sys.executable, "-m", "vembed", *map(str, words)], env=environment(), stdout=subprocess.DEVNULL
        )

    assert start(tmp_path / "whole.jsonl").wait(300) == 0
    killed = 0
    work = tmp_path / ".killed.jsonl.mining"
    while not (tmp_path / "killed.jsonl").exists():
        process = start(tmp_path / "killed.jsonl")
        before, deadline = _count(work), time.monotonic() + 300
        while killed < 5 and process.poll() is None and _count(work) <= before and time.monotonic() < deadline:
            time.sleep(0.005)
        if killed < 5:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.wait(300)
    assert killed == 5
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def _count(folder: Path) -> int:
    """Return how many files are whole."""
    return len([*folder.glob("[!.]*")]) if folder.is_dir() else 0


def test_parquet_holds_the_columns_of_all_rows_whatever_the_first_ones_have(
    call: Any, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "BLOCK_ROWS", 16)
    rows = [{name: cell for name, cell in row.items() if name != "negatives"} for row in made_rows(40)]
    rows[30]["negatives"] = ["a negative of a late row"]
    output = tmp_path / "mined.parquet"
    words = ("--relative-margin", "none", "--max-score", "-2")  # nothing is mined
    done = call("mine", bag, "--data", written(tmp_path / "rows.jsonl", rows), "--output", output, *words)
    assert done.code == 0, done.err
    assert list(read_rows(output).table)[30].negatives == ("a negative of a late row",)
