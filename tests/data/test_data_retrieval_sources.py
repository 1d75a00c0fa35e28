from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vembed.batch import content_id
from vembed.data import judged
from vembed.data.collate import collate
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import DataError
from vembed.evaluation.evaluate import RunBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl

    from vembed.data.judged import RetrievalData

TEST = {"role": "test"}


def relevant_texts(task: RetrievalData) -> dict[str, set[str]]:
    return {
        task.queries[query]: {task.documents[document] for document, grade in grades.items() if grade > 0}
        for query, grades in task.qrels.items()
    }


def test_rows_become_distinct_documents_and_merged_queries(write_jsonl: WriteJsonl) -> None:
    rows = [
        {"query": "q1", "positive": ["a", "b"], "negatives": ["c"], "label": "x"},
        {"query": "q2", "positive": "c", "negatives": ["a", "d"], "label": "x"},
        {"query": " q1 ", "positive": "e ", "negatives": ["a"]},
    ]
    task = read(str(write_jsonl(rows, "test.jsonl")), **TEST).judged()
    assert task.name == "test.jsonl"
    assert sorted(task.documents.values()) == ["a", "b", "c", "d", "e "]
    assert relevant_texts(task) == {"q1": {"a", "b", "e ", "c"}, "q2": {"c", "a", "b"}}
    assert task.notes == (
        "1 row merged into an earlier row of the same query.",
        "All documents of a query's class are relevant to it, but for the query itself.",
    )


def test_what_training_takes_as_positives_is_what_is_relevant(write_jsonl: WriteJsonl) -> None:
    rows = [
        {"query": "mug 7 left", "positive": "mug 7 right", "label": "mug"},  # each stands on both sides
        {"query": "mug 7 right", "positive": "mug 7 left", "label": "mug"},
        {"query": "mug 7 table", "positive": ["mug 7 hand", "mug 7 sink"], "label": "mug", "negatives": ["cup"]},
        {"query": "a cup", "positive": "cup", "label": "cup"},
        {"query": "a copy", "positive": "a copy", "label": "cup"},
        {"query": "a plate", "positive": "plate"},
        {"query": "a fork", "positive": "fork", "label": "7a"},
    ]
    path = str(write_jsonl(rows, "test.jsonl"))
    records = list(read(path, **TEST).records().table)
    batch = collate(records, range(len(records)))
    wanted: dict[object, set[object]] = {}
    for query, document in batch.positives_P2.tolist():
        wanted.setdefault(batch.queries[query], set()).add(batch.documents[document])
    task = read(path, **TEST).judged()
    assert wanted == relevant_texts(task)
    assert wanted["mug 7 left"] == {"mug 7 right", "mug 7 hand", "mug 7 sink"}
    assert wanted["a copy"] == {"cup", "a copy"}, "a row's own positive stays"


def test_a_model_that_ranks_each_class_first_is_perfect(write_jsonl: WriteJsonl) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}", "label": f"class {i % 3}"} for i in range(60)]
    rows += [{"query": f"p{i}", "positive": f"p{i + 3}", "label": f"class {i % 3}"} for i in range(6)]
    task = read(str(write_jsonl(rows, "test.jsonl")), **TEST).judged()
    builder = RunBuilder(task)
    for query_id in builder.query_ids:
        own = {str(row["label"]) for row in rows if row["query"] == task.queries[query_id]}
        of_class = {row["positive"] for row in rows if {row["label"]} == own}
        builder.add(query_id, [(name, float(item in of_class)) for name, item in task.documents.items()])
    metrics = builder.result("by class", seconds=0).metrics
    assert metrics["ndcg@10"] == pytest.approx(1)
    assert metrics["mrr@10"] == 1


def test_of_classes_too_large_to_judge_some_queries_search(
    write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}", "label": "one"} for i in range(40)]
    whole = read(str(write_jsonl(rows, "test.jsonl")), **TEST).judged()
    monkeypatch.setattr(judged, "MOST_CLASS_JUDGEMENTS", 10 * 40 + 39)
    for order in (rows, rows[::-1]):
        task = read(str(write_jsonl(order, "test.jsonl")), **TEST).judged()
        assert sorted(task.queries) == sorted(task.qrels) == sorted(whole.queries)[:10]
        assert task.documents == whole.documents
        assert all(len(grades) == 40 for grades in task.qrels.values())
        assert "10 of 40 queries search" in task.notes[-1]
        assert "1,600 judgements, and 439 are the most" in task.notes[-1]


def test_ids_are_the_content_hash_in_hexadecimal_and_ignore_row_order(write_jsonl: WriteJsonl) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}"} for i in range(20)]
    task = read(str(write_jsonl(rows, "a.jsonl")), **TEST).judged()
    again = read(str(write_jsonl(rows[::-1], "b.jsonl")), **TEST).judged()
    assert (task.queries, task.documents, task.qrels) == (again.queries, again.documents, again.qrels)
    for name, text in task.documents.items():
        assert len(name) == 16
        assert int(name, 16) == content_id(text) % 2**64
    assert min(content_id(text) for text in task.documents.values()) < 0, "a negative hash must be among them"


def test_the_notes_of_reading_are_kept(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{"query": "q", "positive": "p", "id": 1}, "{"])
    task = read(str(path), "test", DataKeys(skip_invalid_records=True, max_invalid_records=1)).judged()
    assert [note.partition(":")[0] for note in task.notes] == ["1 invalid row dropped", "Ignored columns"]


def test_a_beir_folder_is_taken_as_it_is(beir_files: Path) -> None:
    task = read(str(beir_files), **TEST).judged()
    assert set(task.documents) == {"d1", "d2", "d3"}
    assert task.qrels["q1"] == {"d1": 2, "d2": 0}
    mapped = read(str(beir_files), "test", DataKeys(column_mapping={"x": None})).judged()
    assert mapped.notes == ("column_mapping has no effect on a BEIR folder.",)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "*.jsonl", "{0..3}.jsonl", "flickr30k:nowhere"])
def test_what_a_command_was_given_is_named_as_the_command_names_it(name: str, tmp_path: Path) -> None:
    options = {"role": "test", "named": ("--data", "--split")}
    with pytest.raises(DataError, match=r"^--data: "):
        read(f"{tmp_path}/{name}" if ":" not in name else name, **options).judged()


def test_a_split_that_is_not_there_is_named_as_the_command_names_it(tmp_path: Path) -> None:
    rows = '{"query": "a", "positive": "b"}\n'
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "dev.jsonl").write_text(rows)
    options = {"role": "test", "split": "tset", "named": ("--data", "--split")}
    with pytest.raises(DataError, match="Choose one with --split, or name the file in --data"):
        read(str(tmp_path), **options).judged()
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    for part in ("corpus", "queries"):
        (tmp_path / f"{part}.jsonl").touch()
    with pytest.raises(DataError, match=r"Choose one with --split$"):
        read(str(tmp_path), **options).judged()
