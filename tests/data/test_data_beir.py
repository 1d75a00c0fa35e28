from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import pytest

from vembed.data.judged import find_split, read_beir
from vembed.data.read import read
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.data.keys import Role

QRELS = "query-id\tcorpus-id\tscore\n"


def refusal(folder: Path, split: str | None = "test") -> str:
    with pytest.raises(DataError) as caught:
        read_beir(folder, split, "test")
    return str(caught.value)


def append(path: Path, row: dict[str, object]) -> None:
    with path.open("a") as handle:
        handle.write(json.dumps(row) + "\n")


def test_a_folder_becomes_a_task(beir_files: Path) -> None:
    task = read_beir(beir_files, None, "test").data
    assert task.name == "tiny/test"
    assert task.documents == {"d1": "Red a red thing", "d2": "a blue thing", "d3": "Green"}
    assert task.queries == {"q1": "which is red", "q2": "which is blue"}
    assert task.qrels == {"q1": {"d1": 2, "d2": 0}, "q2": {"d2": 1}}
    assert task.notes == ()


def test_scifact_has_its_published_counts(real_data: Path) -> None:
    task = read_beir(real_data / "scifact", None, "test").data
    assert (len(task.documents), len(task.queries)) == (5183, 300)
    assert sum(len(grades) for grades in task.qrels.values()) == 339
    assert task.queries.keys() == task.qrels.keys()
    train = read(str(real_data / "scifact"), "train").records().table
    assert (len(train), sum(len(record.positives) for record in train)) == (809, 919)


@pytest.mark.parametrize(
    ("names", "split", "role", "expected"),
    [
        (["train", "dev", "test"], None, "train", "train"),
        (["train", "dev", "test"], None, "validation", "dev"),
        (["train", "validation"], None, "validation", "validation"),
        (["train", "val"], None, "validation", "val"),
        (["train", "dev", "test"], None, "test", "test"),
        (["train", "dev", "test"], "train", "test", "train"),
        (["test"], None, "validation", "test"),
        (["all"], None, "train", "all"),
    ],
)
def test_which_split_is_read(tmp_path: Path, names: list[str], split: str | None, role: Role, expected: str) -> None:
    (tmp_path / "qrels").mkdir()
    for name in names:
        (tmp_path / f"qrels/{name}.tsv").write_text(QRELS)
    chosen, notes = find_split(tmp_path, split, role)
    assert chosen == expected
    assert bool(notes) == (names in (["test"], ["all"]))


@pytest.mark.parametrize(
    ("names", "split", "role", "words"),
    [
        (["train", "test"], None, "validation", "has no split 'dev' or 'val' or 'validation'; it has: test, train"),
        (["train", "test"], "tset", "test", "did you mean 'test'"),
        (["test"], "dev", "validation", "has no split 'dev'"),
        (["test"], None, "train", "Choose one with data_split"),
        (["test_unseen"], None, "train", "Choose one with data_split"),
        ([], None, "test", "has no judgements"),
    ],
)
def test_a_split_that_is_not_there(tmp_path: Path, names: list[str], split: str | None, role: Role, words: str) -> None:
    (tmp_path / "qrels").mkdir()
    for name in names:
        (tmp_path / f"qrels/{name}.tsv").write_text(QRELS)
    with pytest.raises(DataError) as caught:
        find_split(tmp_path, split, role)
    assert words in str(caught.value)


def test_test_judgements_are_trained_on_only_when_named(beir_files: Path) -> None:
    (beir_files / "qrels/train.tsv").unlink()
    (beir_files / "train.jsonl").write_text('{"query": "q", "positive": "p"}\n')
    with pytest.raises(DataError, match=r"data_path: .*train\.jsonl"):
        read(str(beir_files), "train").records()
    assert len(read(str(beir_files), "train", split="test").records().table) == 2


def test_qrels_without_a_header_or_in_trec_columns_are_the_same(beir_files: Path) -> None:
    expected = read_beir(beir_files, None, "test").data.qrels
    for text in (
        "q1\td1\t2\nq1\td2\t0\nq2\td2\t1\n",
        "q1 0 d1 2\nq1 0 d2 0\n\nq2 0 d2 1\n",
        "\ufeffquery-id\tcorpus-id\tscore\r\nq1\td1\t2\r\nq1\td2\t0\r\nq2\td2\t1\r\n",
    ):
        (beir_files / "qrels/test.tsv").write_text(text, newline="")
        assert read_beir(beir_files, None, "test").data.qrels == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("q1\td3\thigh", "test.tsv:5: score 'high' is not a whole number"),
        ("q1\td3\t0.5", "test.tsv:5: score '0.5'"),
        ("q1\td3", "test.tsv:5: 2 columns"),
        ("q1\t\t1", "test.tsv:5: an empty id"),
        ("q1\td1\t1", "test.tsv:5: query 'q1' judges document 'd1' twice, with grades 2 and 1"),
    ],
)
def test_bad_judgements_are_refused_with_their_line(beir_files: Path, line: str, words: str) -> None:
    path = beir_files / "qrels/test.tsv"
    before = path.read_text()
    path.write_text(f"{before}{line}\n")
    assert words in refusal(beir_files)
    path.write_text(f"{before}q1\td3\t1\n")
    assert read_beir(beir_files, None, "test").data.qrels["q1"]["d3"] == 1


def test_repeated_and_negative_judgements_are_counted(beir_files: Path) -> None:
    with (beir_files / "qrels/test.tsv").open("a") as handle:
        handle.write("q1\td1\t2\nq2\td1\t-1\n")
    task = read_beir(beir_files, None, "test").data
    assert task.qrels["q2"] == {"d2": 1, "d1": 0}
    assert "1 judgement stands twice in the qrels." in task.notes
    assert "1 negative grade counts as 0." in task.notes


def test_judged_ids_that_are_missing_are_counted(beir_files: Path) -> None:
    with (beir_files / "qrels/test.tsv").open("a") as handle:
        handle.write("q1\td9\t1\nq9\td1\t1\nq3\td8\t1\n")
    task = read_beir(beir_files, None, "test").data
    assert task.qrels == {"q1": {"d1": 2, "d2": 0}, "q2": {"d2": 1}}
    assert "1 judged query is missing from the queries: q9." in task.notes
    assert "2 judged documents are missing from the corpus: d9, d8." in task.notes


def test_judgements_of_another_corpus_are_refused(beir_files: Path) -> None:
    (beir_files / "qrels/test.tsv").write_text(QRELS + "q1\tx1\t1\nq2\tx2\t1\n")
    assert "no judgement of tiny/qrels/test.tsv has both its query and its document" in refusal(beir_files)


def test_a_query_judged_not_relevant_only_is_kept_for_evaluation_and_left_out_of_training(beir_files: Path) -> None:
    (beir_files / "qrels/train.tsv").write_text(QRELS + "q1\td1\t0\nq2\td2\t1\nq2\td3\t2\nq2\td1\t0\n")
    assert read_beir(beir_files, "train", "train").data.qrels["q1"] == {"d1": 0}
    loaded = read(str(beir_files), "train").records()
    (record,) = loaded.table
    assert (record.query, record.positives, record.negatives) == (
        "which is blue",
        ("a blue thing", "Green"),
        ("Red a red thing",),
    )
    assert record.location == "queries.jsonl:2"
    assert "1 query has no relevant document and is left out." in loaded.notes


@pytest.mark.parametrize(
    ("file", "row", "words"),
    [
        ("corpus", {"_id": "d1", "text": "again"}, "corpus.jsonl:4: _id: 'd1' stands twice"),
        ("corpus", {"text": "x"}, "corpus.jsonl:4: _id: missing"),
        ("corpus", {"_id": True, "text": "x"}, "corpus.jsonl:4: _id: missing, or neither"),
        ("corpus", {"_id": "d4"}, "corpus.jsonl:4: text: missing"),
        ("corpus", {"_id": "d4", "title": 3, "text": "x"}, "corpus.jsonl:4: title: expected text, got int"),
        ("corpus", {"_id": "d4", "text": "a\0b"}, "corpus.jsonl:4: text: holds a NUL byte"),
        ("corpus", {"_id": "d4", "text": "", "image": "a.png"}, "corpus.jsonl:4: image: 'a.png': no such file"),
        ("queries", {"_id": "q2", "text": "again"}, "queries.jsonl:4: _id: 'q2' stands twice"),
    ],
)
def test_bad_rows_are_refused_with_their_line(beir_files: Path, file: str, row: dict[str, object], words: str) -> None:
    append(beir_files / f"{file}.jsonl", row)
    assert words in refusal(beir_files)


def test_a_judged_query_must_have_text_and_another_need_not(beir_files: Path) -> None:
    append(beir_files / "queries.jsonl", {"_id": "q4", "text": " "})
    assert len(read_beir(beir_files, None, "test").data.queries) == 2
    with (beir_files / "qrels/test.tsv").open("a") as handle:
        handle.write("q4\td1\t1\n")
    assert "queries.jsonl:4: text: blank text" in refusal(beir_files)


def test_whole_numbers_are_ids_and_empty_documents_are_counted(beir_files: Path) -> None:
    append(beir_files / "corpus.jsonl", {"id": 7, "title": None, "text": ""})
    with (beir_files / "qrels/test.tsv").open("a") as handle:
        handle.write("q2\t7\t1\n")
    task = read_beir(beir_files, None, "test").data
    assert task.documents["7"] == ""
    assert task.qrels["q2"] == {"d2": 1, "7": 1}
    assert task.notes == ("1 document has neither a title nor a text.",)


def test_parts_may_be_gzipped_and_must_be_there(beir_files: Path) -> None:
    corpus = beir_files / "corpus.jsonl"
    (beir_files / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    assert len(read_beir(beir_files, None, "test").data.documents) == 3
    (beir_files / "corpus.jsonl.gz").unlink()
    assert "has no corpus.jsonl" in refusal(beir_files)
