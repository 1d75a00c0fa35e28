"""What a label says: a class, the truth of a pair or a grade; numbers beside two texts are never guessed at."""

import json
from typing import Any

import numpy as np
import pytest
from kit.rows import Jsonl, Paint, load, only, refusal

from vembed.data.collate import collate
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.data.table import RecordTable
from vembed.errors import DataError

PAIRS = [
    {"sentence1": "a cat sits", "sentence2": "a cat is sitting", "label": 1},
    {"sentence1": "it rains", "sentence2": "the sun shines", "label": 0},
    {"sentence1": "they sing", "sentence2": "they dance", "label": 0},
]
"""The form of MRPC, PAWS and QQP."""


def read_rows(jsonl: Jsonl, rows: list[Any], kind: str = "auto", **more: Any) -> RecordTable:
    return load(jsonl(rows), label_kind=kind, **more).table


def refused(jsonl: Jsonl, rows: list[Any], kind: str = "auto", **more: Any) -> str:
    return refusal(jsonl(rows), label_kind=kind, **more)


def graded(scores: list[Any], column: str = "score") -> list[dict[str, Any]]:
    return [{"query": f"q{n}", "positive": f"p{n}", column: score} for n, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (PAIRS, "train.jsonl:1: label holds 0 and 1 beside two texts"),
        ([{"query": "q", "positive": "p"}, *PAIRS[1:]], "train.jsonl:2: label holds 0 beside two texts"),
        (graded([3, 3]), "train.jsonl:1: score holds 3 beside two texts"),
        (graded([4.2, 0.5, 1]), "train.jsonl:1: score holds 0.5, 1 and 4.2 beside two texts"),
        (graded(list(range(9)), "label"), "label holds 0, 1, 2, 3, 4, ... beside two texts"),
        (graded(["0", "1", "0"], "label"), "train.jsonl:1: label holds 0 and 1 beside two texts"),
        (graded(["4.2", "-1e0"]), "train.jsonl:1: score holds -1 and 4.2 beside two texts"),
        (graded(["NaN"]), ""),
        ([json.dumps(graded([1.0])[0]).replace("1.0", "NaN")], "score holds nan beside two texts"),
        (graded([10**400]), "score holds inf beside two texts"),
    ],
)
def test_numbers_beside_two_texts_are_refused_with_the_choices(jsonl: Jsonl, rows: list[Any], words: str) -> None:
    if not words:
        assert [record.label for record in read_rows(jsonl, rows)] == ["NaN"], "texts are classes"
        return
    for role_options in ({}, {"skip_invalid_records": True}):
        message = refused(jsonl, rows, **role_options)
        assert words in message
        assert all(f"\n  {kind} " in message for kind in ("class", "pair", "grade"))
        assert "set label_kind" in message.lower()
    column = "score" if "score" in words else "label"
    assert f"column_mapping: {{{column}: null}}" in message
    assert len(read_rows(jsonl, rows, column_mapping={column: None})) == len(rows)
    with pytest.raises(DataError, match="which can mean three things"):
        DataSource(str(jsonl(rows)), "test").judged()


def test_all_files_of_a_source_are_judged_together(jsonl: Jsonl) -> None:
    folder = jsonl(PAIRS[:1], "rows/a.jsonl").parent
    jsonl(PAIRS[1:], "rows/b.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl:1: label holds 0 and 1 beside two texts"):
        DataSource(str(folder), "train").records()


@pytest.mark.parametrize("label", ["spam", "cat", "c12", "1f600", "1, 2"])
@pytest.mark.parametrize("column", ["label", "score"])
def test_texts_that_are_no_numbers_are_classes_unasked(jsonl: Jsonl, column: str, label: str) -> None:
    (record,) = read_rows(jsonl, [{"query": "q", "positive": "p", column: label}])
    assert record.label == label


def test_numbers_that_are_written_as_texts_say_what_label_kind_says(jsonl: Jsonl) -> None:
    rows = graded(["0", "1", " 1 "], "label")
    assert "class  it names the row's class, a number or a text" in refused(jsonl, rows)
    assert [record.label for record in read_rows(jsonl, rows, "class")] == ["0", "1", " 1 "]
    for kind in ("pair", "grade"):
        assert [record.scores for record in read_rows(jsonl, rows, kind)] == [(0.0,), (1.0,), (1.0,)]


@pytest.mark.parametrize("beside", ["two texts", "a picture"])
def test_true_and_false_are_no_classes_unasked(jsonl: Jsonl, paint: Paint, beside: str) -> None:
    paint("a.png")
    query = {"query_image": "a.png"} if beside == "a picture" else {"query": "q"}
    rows = [{**query, "positive": f"p{n}", "label": n == 0} for n in range(2)]
    words = f"label holds false and true beside {beside}, which can mean three things"
    assert f"train.jsonl:1: {words}" in refused(jsonl, rows)
    (cell,) = query.values()
    path = jsonl([f"{next(iter(query))},positive,label", f"{cell},p0,True", f"{cell},p1, FALSE"], "rows.csv")
    with pytest.raises(DataError, match=f"rows.csv:2: {words}"):
        load(path, label_kind="auto")
    assert [record.scores for record in load(path, label_kind="pair").table] == [(1.0,), (0.0,)]


def test_whole_numbers_beside_a_picture_are_classes_and_others_are_not(jsonl: Jsonl, paint: Paint) -> None:
    for name in "ab":
        paint(f"{name}.png")
    pictures = {"query_image": "a.png", "positive_image": "b.png"}
    (record,) = read_rows(jsonl, [{**pictures, "label": 7}])
    assert record.label == 7
    (record,) = read_rows(jsonl, [{"query": "q", "image": "b.png", "label": 1.0}])
    assert record.label == 1
    assert "label holds 0.5 beside a picture" in refused(jsonl, [{**pictures, "label": 0.5}])
    assert "score holds 1 beside a picture" in refused(jsonl, [{**pictures, "score": 1}])


def test_class_says_that_numbers_are_classes(jsonl: Jsonl) -> None:
    table = read_rows(jsonl, PAIRS, "class")
    assert [record.label for record in table] == [1, 0, 0]
    batch = collate(table.take([0, 1, 2]), [0, 1, 2])
    assert batch.positives_P2.tolist() == [[0, 0], [1, 1], [1, 2], [2, 1], [2, 2]]
    assert batch.listed_P2 is None
    for value, words in ((2**63, "64 bits"), (0.5, "not the number 0.5"), (True, "not true"), ([1], "not a list")):
        assert words in refused(jsonl, graded([value], "label"), "class")


def test_pair_lists_every_pair_with_its_truth_and_non_pairs_are_no_positives(jsonl: Jsonl) -> None:
    table = read_rows(jsonl, [*PAIRS, {"query": "plain", "positive": "row"}], "pair")
    assert [(record.label, record.scores) for record in table] == [(None, (1.0,)), *[(None, (0.0,))] * 2, (None, ())]
    batch = collate(table.take([0, 1, 2, 3]), [0, 1, 2, 3])
    assert batch.documents == ("a cat is sitting", "the sun shines", "they dance", "row")
    assert batch.positives_P2.tolist() == [[0, 0], [3, 3]]
    assert batch.classes_Q is None
    assert batch.listed_P2 is not None
    assert batch.listed_scores_P is not None
    assert batch.listed_P2.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.listed_scores_P.tolist() == [1.0, 0.0, 0.0]


def test_hard_negatives_of_a_pair_are_non_pairs(jsonl: Jsonl) -> None:
    rows = [{"query": "q", "positive": ["a", "b"], "negatives": ["n"], "label": truth} for truth in (True, False)]
    true, false = read_rows(jsonl, rows, "pair")
    assert (true.positives, true.negatives, true.scores) == (("a", "b"), ("n",), (1.0, 1.0, 0.0))
    assert (false.positives, false.negatives, false.scores) == ((), ("a", "b", "n"), (0.0, 0.0, 0.0))


@pytest.mark.parametrize("value", [2, 0.5, "2", [1], float("inf")])
def test_the_truth_of_a_pair_is_one_or_zero(jsonl: Jsonl, value: Any) -> None:
    message = refused(jsonl, graded([value], "label"), "pair")
    assert "train.jsonl:1: label: with label_kind: pair it is 1 (the two belong together) or 0" in message


def test_grades_keep_their_numbers(jsonl: Jsonl) -> None:
    table = read_rows(jsonl, graded([4.5, 0, -1.25, None]), "grade")
    assert [record.scores for record in table] == [(4.5,), (0.0,), (-1.25,), ()]
    assert [len(record.positives) for record in table] == [1, 0, 0, 1]
    batch = collate(table.take([0, 2]), [0, 2])
    assert batch.listed_scores_P is not None
    assert np.array_equal(batch.listed_scores_P, [4.5, -1.25])
    assert "it is a number, higher is closer, not 'high'" in refused(jsonl, graded(["high"]), "grade")
    negatives = [{**graded([1.0])[0], "negatives": ["n"]}]
    assert "score: a row with one grade has no negatives: give a list" in refused(jsonl, negatives, "grade")


def test_a_row_may_list_a_grade_for_each_of_its_documents(jsonl: Jsonl) -> None:
    row = {"query": "q", "positive": ["p", "r"], "negatives": ["n"]}
    (record,) = read_rows(jsonl, [{**row, "score": [7, -1.5, -8]}], "grade")
    assert record.scores == (7.0, -1.5, -8.0)
    assert (len(record.positives), len(record.negatives)) == (2, 1), "the teacher doesn't move documents"
    assert "lists 2 grades for the 3 documents" in refused(jsonl, [{**row, "score": [7, 1]}], "grade")
    assert "it is a number, higher is closer, not 'high'" in refused(jsonl, [{**row, "score": [7, 1, "high"]}], "grade")
    assert "it is 1 (the two belong together) or 0" in refused(jsonl, [{**row, "score": [1, 1, 0]}], "pair")
    path = jsonl(["query,positive,negative,label", 'q,p,n,"[2, 1.5]"'], "rows.csv")
    assert [record.scores for record in load(path, label_kind="grade").table] == [(2.0, 1.5)]


def test_csv_holds_truth_and_grades_too(jsonl: Jsonl) -> None:
    path = jsonl(["sentence1,sentence2,label", "a,b, 1 ", "c,d,0", "e,f,"], "rows.csv")
    assert [record.scores for record in load(path, label_kind="pair").table] == [(1.0,), (0.0,), ()]
    digits = "9" * 5000
    many = jsonl(["query,positive,label", f"q,p,{digits}"], "many.csv")
    for kind, words in (("auto", "holds inf beside two texts"), ("pair", "it is 1"), ("grade", "it is a number")):
        assert words in refusal(many, label_kind=kind)
    assert only(many, label_kind="class").label == digits
    path.write_text(path.read_text().replace("0", "2.5e0"))
    assert [record.scores for record in load(path, label_kind="grade").table] == [(1.0,), (2.5,), ()]


def test_only_pairs_that_belong_together_are_relevant(jsonl: Jsonl) -> None:
    rows = [*PAIRS, {"sentence1": "it rains", "sentence2": "it pours", "label": 1}]
    for kind in ("pair", "grade"):
        task = DataSource(str(jsonl(rows)), "test", DataKeys(label_kind=kind)).judged()  # type: ignore[arg-type]
        assert sorted(task.queries.values()) == ["a cat sits", "it rains"]
        assert sorted(task.documents.values()) == sorted(str(row["sentence2"]) for row in rows)
        assert sorted(len(grades) for grades in task.qrels.values()) == [1, 1]
        assert "1 query has no document that belongs to it and isn't searched." in task.notes
    with pytest.raises(DataError, match="no query has a document that belongs to it"):
        DataSource(str(jsonl(PAIRS[1:])), "test", DataKeys(label_kind="pair")).judged()
