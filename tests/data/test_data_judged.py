"""Judged sets: BEIR folders, with and without pictures, and rows that become a task."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kit.rows import Jsonl, Paint, load

from vembed.batch import Composed, Image, content_id
from vembed.data import judged
from vembed.data.collate import collate
from vembed.data.judged import RetrievalData, find_split
from vembed.data.keys import DataKeys, Role
from vembed.data.read import DataSource
from vembed.errors import DataError
from vembed.evaluation.evaluate import RunBuilder

QRELS = "query-id\tcorpus-id\tscore\n"


def judged_set(path: Path | str, role: Role = "test", split: str | None = None, **keys: Any) -> RetrievalData:
    return DataSource(str(path), role, DataKeys(**keys), split=split).judged()


def append(path: Path, *rows: dict[str, object] | str) -> None:
    """Add rows, as JSON or as they are."""
    with path.open("a") as handle:
        handle.writelines(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def beir_refusal(folder: Path, split: str | None = "test") -> str:
    with pytest.raises(DataError) as caught:
        judged_set(folder, split=split)
    return str(caught.value)


def test_a_beir_folder_becomes_a_task(beir_files: Path) -> None:
    task = judged_set(beir_files)
    assert task.name == "tiny/test"
    assert task.documents == {"d1": "Red a red thing", "d2": "a blue thing", "d3": "Green"}
    assert task.queries == {"q1": "which is red", "q2": "which is blue"}
    assert task.qrels == {"q1": {"d1": 2, "d2": 0}, "q2": {"d2": 1}}
    assert task.notes == ()


def test_scifact_has_its_published_counts(real_data: Path) -> None:
    task = judged_set(real_data / "scifact")
    assert (len(task.documents), len(task.queries)) == (5183, 300)
    assert sum(len(grades) for grades in task.qrels.values()) == 339
    assert task.queries.keys() == task.qrels.keys()
    train = load(real_data / "scifact").table
    assert (len(train), sum(len(record.positives) for record in train)) == (809, 919)


@pytest.mark.parametrize(
    ("names", "split", "role", "expected"),
    [
        *[("train dev test", None, "train", "train"), ("train dev test", None, "validation", "dev")],
        *[("train validation", None, "validation", "validation"), ("train val", None, "validation", "val")],
        *[("train dev test", None, "test", "test"), ("train dev test", "train", "test", "train")],
        *[("test", None, "validation", "test"), ("all", None, "train", "all")],
        *[("train test", None, "validation", DataError), ("train test", "tset", "test", DataError)],
        *[("test", "dev", "validation", DataError), ("test", None, "train", DataError)],
        *[("test_unseen", None, "train", DataError), ("", None, "test", DataError)],
    ],
)
def test_which_split_is_read(
    tmp_path: Path, names: str, split: str | None, role: Role, expected: str | type[DataError]
) -> None:
    (tmp_path / "qrels").mkdir()
    for name in names.split():
        (tmp_path / f"qrels/{name}.tsv").write_text(QRELS)
    if isinstance(expected, str):
        chosen, notes = find_split(tmp_path, split, role, "split")
        assert (chosen, bool(notes)) == (expected, names in ("test", "all"))
    else:
        with pytest.raises(expected):
            find_split(tmp_path, split, role, "split")


def test_test_judgements_are_trained_on_only_when_named(beir_files: Path) -> None:
    (beir_files / "qrels/train.tsv").unlink()
    (beir_files / "train.jsonl").write_text('{"query": "q", "positive": "p"}\n')
    with pytest.raises(DataError, match=r"data_path: .*train\.jsonl"):
        load(beir_files)
    assert len(load(beir_files, split="test").table) == 2


def test_broken_rows_of_a_folder_to_train_on_are_dropped_where_that_is_asked_for(beir_files: Path) -> None:
    with (beir_files / "corpus.jsonl").open("a") as file:
        file.write("{bad\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl:4: bad JSON"):
        load(beir_files)
    kept = load(beir_files, skip_invalid_records=True, max_invalid_records=1)
    assert (len(kept.table), kept.num_invalid) == (1, 1)


def test_a_folder_whose_only_answered_query_is_broken_says_why_it_holds_no_rows(beir_files: Path) -> None:
    (beir_files / "queries.jsonl").write_text('{"_id": "q2", "text": 5}\n')
    with pytest.raises(DataError, match=r"holds no rows: .*queries\.jsonl:1: text: expected text"):
        load(beir_files, skip_invalid_records=True, max_invalid_records=10)


def test_a_split_without_a_relevant_document_says_so(beir_files: Path) -> None:
    (beir_files / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t0\n")
    with pytest.raises(DataError, match=r"tiny/train\): no judged query has a relevant document"):
        load(beir_files)


def test_qrels_without_a_header_or_in_trec_columns_are_the_same(beir_files: Path) -> None:
    expected = judged_set(beir_files).qrels
    for text in (
        "q1\td1\t2\nq1\td2\t0\nq2\td2\t1\n",
        "q1 0 d1 2\nq1 0 d2 0\n\nq2 0 d2 1\n",
        "\ufeffquery-id\tcorpus-id\tscore\r\nq1\td1\t2\r\nq1\td2\t0\r\nq2\td2\t1\r\n",
    ):
        (beir_files / "qrels/test.tsv").write_text(text, newline="")
        assert judged_set(beir_files).qrels == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("q1\td3\thigh", "test.tsv:5: score 'high' is not a whole number"),
        ("q1\td3\t2147483647", "test.tsv:5: score '2147483647' is over 1,000,000"),
        ("q1\td3\t0.5", "test.tsv:5: score '0.5'"),
        (f"q1\td3\t{10**30}", "test.tsv:5: score '1000000"),
        ("q1\td3", "test.tsv:5: 2 columns"),
        ("q1\t\t1", "test.tsv:5: an empty id"),
        ("q1\td1\t1", "test.tsv:5: query 'q1' judges document 'd1' twice, with grades 2 and 1"),
    ],
)
def test_bad_judgements_are_refused_with_their_line(beir_files: Path, line: str, words: str) -> None:
    path = beir_files / "qrels/test.tsv"
    before = path.read_text()
    path.write_text(f"{before}{line}\n")
    assert words in beir_refusal(beir_files)
    path.write_text(f"{before}q1\td3\t1\n")
    assert judged_set(beir_files).qrels["q1"]["d3"] == 1


def test_repeated_and_negative_judgements_are_counted(beir_files: Path) -> None:
    append(beir_files / "qrels/test.tsv", "q1\td1\t2\nq2\td1\t-1")
    task = judged_set(beir_files)
    assert task.qrels["q2"] == {"d2": 1, "d1": 0}
    assert "1 judgement is given twice in the qrels." in task.notes
    assert "1 negative grade counts as 0." in task.notes


def test_judged_ids_that_are_missing_are_counted(beir_files: Path) -> None:
    append(beir_files / "qrels/test.tsv", "q1\td9\t1\nq9\td1\t1\nq3\td8\t1")
    task = judged_set(beir_files)
    assert task.qrels == {"q1": {"d1": 2, "d2": 0}, "q2": {"d2": 1}}
    assert "1 judged query is missing from the queries: q9." in task.notes
    assert "2 judged documents are missing from the corpus: d9, d8." in task.notes
    assert "1 query is left without a judged document and isn't searched." in task.notes, "q3"


def test_judgements_of_another_corpus_are_refused(beir_files: Path) -> None:
    (beir_files / "qrels/test.tsv").write_text(QRELS + "q1\tx1\t1\nq2\tx2\t1\n")
    assert "no judgement of tiny/qrels/test.tsv has both its query and its document" in beir_refusal(beir_files)


def test_a_query_judged_not_relevant_only_is_kept_for_evaluation_and_left_out_of_training(beir_files: Path) -> None:
    (beir_files / "qrels/train.tsv").write_text(QRELS + "q1\td1\t0\nq2\td2\t1\nq2\td3\t2\nq2\td1\t0\n")
    assert judged_set(beir_files, "train").qrels["q1"] == {"d1": 0}
    loaded = load(beir_files)
    (record,) = loaded.table
    assert (record.query, record.positives, record.negatives) == (
        "which is blue",
        ("a blue thing", "Green"),
        ("Red a red thing",),
    )
    assert record.location == "queries.jsonl:2"
    assert "1 query has no relevant document and is left out." in loaded.notes


def test_blank_documents_of_a_folder_are_neither_positives_nor_negatives(beir_files: Path) -> None:
    append(beir_files / "corpus.jsonl", {"_id": "d4", "title": "", "text": " "})
    (beir_files / "qrels/train.tsv").write_text(QRELS + "q1\td4\t1\nq2\td2\t1\nq2\td4\t2\nq3\td1\t1\nq3\td4\t0\n")
    loaded = load(beir_files)
    assert [(record.positives, record.negatives) for record in loaded.table] == [
        (("a blue thing",), ()),
        (("Red a red thing",), ()),
    ]
    assert "1 judged document is blank: no row has it." in loaded.notes
    assert "1 query has no relevant document and is left out." in loaded.notes
    (beir_files / "qrels/train.tsv").write_text(QRELS + "q1\td4\t1\n")
    with pytest.raises(DataError, match="no judged query has a relevant document"):
        load(beir_files)


@pytest.mark.parametrize(
    ("file", "row", "words"),
    [
        ("corpus", {"_id": "d1", "text": "again"}, "corpus.jsonl:4: _id: 'd1' is given twice"),
        ("corpus", {"text": "x"}, "corpus.jsonl:4: _id: missing"),
        ("corpus", {"_id": True, "text": "x"}, "corpus.jsonl:4: _id: missing, or neither"),
        ("corpus", {"_id": "d4"}, "corpus.jsonl:4: text: missing"),
        ("corpus", {"_id": "d4", "title": 3, "text": "x"}, "corpus.jsonl:4: title: expected text, got int"),
        ("corpus", {"_id": "d4", "text": "a\0b"}, "corpus.jsonl:4: text: holds a NUL byte"),
        ("corpus", {"_id": "d4", "text": "", "image": "a.png"}, "corpus.jsonl:4: image: 'a.png': no such file"),
        ("queries", {"_id": "q2", "text": "again"}, "queries.jsonl:4: _id: 'q2' is given twice"),
    ],
)
def test_bad_rows_are_refused_with_their_line(beir_files: Path, file: str, row: dict[str, object], words: str) -> None:
    append(beir_files / f"{file}.jsonl", row)
    assert words in beir_refusal(beir_files)


def test_a_judged_query_must_have_text_and_another_need_not(beir_files: Path) -> None:
    append(beir_files / "queries.jsonl", {"_id": "q4", "text": " "}, {"_id": "q5", "text": "", "image": "none.png"})
    assert len(judged_set(beir_files).queries) == 2
    append(beir_files / "qrels/test.tsv", "q4\td1\t1")
    assert "queries.jsonl:4: text: blank text" in beir_refusal(beir_files)


def test_whole_numbers_are_ids_and_empty_documents_are_counted(beir_files: Path) -> None:
    append(beir_files / "corpus.jsonl", {"id": 7, "title": None, "text": ""})
    append(beir_files / "qrels/test.tsv", "q2\t7\t1")
    task = judged_set(beir_files)
    assert task.documents["7"] == ""
    assert task.qrels["q2"] == {"d2": 1, "7": 1}
    assert task.notes == ("1 document has neither a title nor a text.",)


def test_parts_may_be_gzipped_and_must_be_there(beir_files: Path) -> None:
    corpus = beir_files / "corpus.jsonl"
    (beir_files / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    assert len(judged_set(beir_files).documents) == 3
    (beir_files / "corpus.jsonl.gz").unlink()
    assert "has no corpus.jsonl" in beir_refusal(beir_files)


# Pictures


@pytest.fixture
def picture_folder(tmp_path: Path, paint: Paint) -> Path:
    """A BEIR folder of 2 pictures and a text, searched by a picture and a text."""
    for name, colour in (("a", "red"), ("b", "green"), ("q", "blue")):
        paint(f"shop/pics/{name}.png", colour)
    folder = tmp_path / "shop"
    corpus = [
        {"_id": "d1", "title": "", "text": "", "image": "pics/a.png"},
        {"_id": "d2", "text": "", "image": "pics/b.png"},
        {"_id": "d3", "text": "a text", "image": ""},
    ]
    queries = [{"_id": "q1", "text": "", "image": "pics/q.png"}, {"_id": "q2", "text": "green thing", "image": None}]
    append(folder / "corpus.jsonl", *corpus)
    append(folder / "queries.jsonl", *queries)
    (folder / "qrels").mkdir()
    for split in ("train", "test"):
        (folder / f"qrels/{split}.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\nq2\td2\t1\n")
    return folder


def test_a_folder_of_pictures_becomes_a_task(picture_folder: Path) -> None:
    task = judged_set(picture_folder)
    pics = picture_folder.resolve() / "pics"
    assert task.documents == {"d1": Image(str(pics / "a.png")), "d2": Image(str(pics / "b.png")), "d3": "a text"}
    assert task.queries == {"q1": Image(str(pics / "q.png")), "q2": "green thing"}
    assert task.notes == ()


def test_its_train_split_becomes_records(picture_folder: Path) -> None:
    first, second = load(picture_folder).table
    pics = picture_folder.resolve() / "pics"
    assert (first.query, first.positives, first.negatives) == (
        Image(str(pics / "q.png")),
        (Image(str(pics / "a.png")),),
        (Image(str(pics / "b.png")),),
    )
    assert (second.query, second.positives) == ("green thing", (Image(str(pics / "b.png")),))


@pytest.mark.parametrize(
    ("file", "row", "words"),
    [
        ("corpus", {"_id": "d4", "text": 5, "image": "pics/a.png"}, "text: expected text, got int"),
        ("corpus", {"_id": "d4", "text": "both", "image": "pics/none.png"}, "image: 'pics/none.png': no such file"),
        ("corpus", {"_id": "d4", "text": "", "image": "../../x.png"}, "image: '../../x.png' leads out of"),
        ("corpus", {"_id": "d4", "text": "", "image": 3}, "image: expected a picture"),
        ("queries", {"_id": "q4", "text": "both", "image": "../../x.png"}, "image: '../../x.png' leads out of"),
        ("queries", {"_id": "q4", "text": "", "image": "http://host.example/a.png"}, "image: a path that starts with"),
    ],
)
def test_a_bad_picture_is_refused_with_its_line(
    picture_folder: Path, file: str, row: dict[str, object], words: str
) -> None:
    append(picture_folder / "qrels/test.tsv", "q4\td1\t1")
    append(picture_folder / f"{file}.jsonl", row)
    with pytest.raises(DataError) as caught:
        judged_set(picture_folder)
    line = 4 if file == "corpus" else 3
    assert f"{file}.jsonl:{line}: {words}" in str(caught.value)


def test_a_picture_beside_a_text_is_one_item_of_both(picture_folder: Path) -> None:
    append(picture_folder / "corpus.jsonl", {"_id": "d4", "title": "A", "text": "red one", "image": "pics/a.png"})
    append(picture_folder / "corpus.jsonl", {"_id": "d5", "title": "A", "image": "pics/a.png"})
    append(picture_folder / "queries.jsonl", {"_id": "q4", "text": "but in red", "image": "pics/q.png"})
    for split in ("train", "test"):
        append(picture_folder / f"qrels/{split}.tsv", "q4\td4\t1")
    task = judged_set(picture_folder)
    pics = picture_folder.resolve() / "pics"
    assert task.queries["q4"] == Composed((Image(str(pics / "q.png")),), "but in red")
    assert task.documents["d4"] == Composed((Image(str(pics / "a.png")),), "A red one")
    assert task.documents["d5"] == Composed((Image(str(pics / "a.png")),), "A")
    record = load(picture_folder).table[2]
    assert (record.query, record.positives) == (task.queries["q4"], (task.documents["d4"],))


def test_image_root_serves_a_beir_folder(picture_folder: Path) -> None:
    (picture_folder / "pics").rename(picture_folder.parent / "pics")
    with pytest.raises(DataError, match=f"it is in {picture_folder.parent}: set image_root"):
        judged_set(picture_folder)
    assert len(judged_set(picture_folder, image_root=str(picture_folder.parent)).documents) == 3


def test_rows_with_pictures_become_a_task_by_content(jsonl: Jsonl, paint: Paint) -> None:
    for name, colour in (("a", "red"), ("again", "red"), ("b", "green")):
        paint(f"{name}.png", colour)
    rows = [
        {"query": "q", "image": "a.png", "negative_images": ["b.png"]},
        {"query": "q", "image": "b.png"},
        {"query": "r", "image": "again.png"},
    ]
    task = judged_set(jsonl(rows, "test.jsonl"))
    assert len(task.documents) == 2, "two files of one content are one document"
    for name, item in [*task.documents.items(), *task.queries.items()]:
        assert (len(name), int(name, 16)) == (16, content_id(item) % 2**64)
    assert sorted(len(grades) for grades in task.qrels.values()) == [1, 2]
    assert task.notes == ("1 row merged into an earlier row of the same query.",)
    again = judged_set(jsonl(rows[::-1], "other.jsonl"))
    assert (task.queries, [*task.documents], task.qrels) == (again.queries, [*again.documents], again.qrels)


@pytest.mark.parametrize(
    ("name", "counts", "picture_queries"),
    [
        ("eval_style", (1443, 1443, 1443), False),
        ("eval_concept", (170, 510, 510), False),
        ("eval_image", (170, 1613, 170), True),
    ],
)
def test_emoji_tasks_load(real_data: Path, name: str, counts: tuple[int, int, int], picture_queries: bool) -> None:
    task = judged_set(real_data / "emoji" / name, image_root=str(real_data / "emoji"))
    assert (len(task.queries), len(task.documents), sum(len(grades) for grades in task.qrels.values())) == counts
    assert all(isinstance(item, Image) for item in task.documents.values())
    assert all(isinstance(item, Image) == picture_queries for item in task.queries.values())


# Rows that become a task


def relevant_texts(task: RetrievalData) -> dict[str, set[str]]:
    return {
        task.queries[query]: {task.documents[document] for document, grade in grades.items() if grade > 0}
        for query, grades in task.qrels.items()
    }


def test_rows_become_distinct_documents_and_merged_queries(jsonl: Jsonl) -> None:
    rows = [
        {"query": "q1", "positive": ["a", "b"], "negatives": ["c"], "label": "x"},
        {"query": "q2", "positive": "c", "negatives": ["a", "d"], "label": "x"},
        {"query": " q1 ", "positive": "e ", "negatives": ["a"]},
    ]
    task = judged_set(jsonl(rows, "test.jsonl"))
    assert task.name == "test.jsonl"
    assert sorted(task.documents.values()) == ["a", "b", "c", "d", "e "]
    assert relevant_texts(task) == {"q1": {"a", "b", "e ", "c"}, "q2": {"c", "a", "b"}}
    assert task.notes == (
        "1 row merged into an earlier row of the same query.",
        "All documents of a query's class are relevant to it, but for the query itself.",
    )


def test_what_training_takes_as_positives_is_what_is_relevant(jsonl: Jsonl) -> None:
    rows = [
        {"query": "mug 7 left", "positive": "mug 7 right", "label": "mug"},  # each stands on both sides
        {"query": "mug 7 right", "positive": "mug 7 left", "label": "mug"},
        {"query": "mug 7 table", "positive": ["mug 7 hand", "mug 7 sink"], "label": "mug", "negatives": ["cup"]},
        {"query": "a cup", "positive": "cup", "label": "cup"},
        {"query": "a copy", "positive": "a copy", "label": "cup"},
        {"query": "a plate", "positive": "plate"},
        {"query": "a fork", "positive": "fork", "label": "7a"},
    ]
    path = str(jsonl(rows, "test.jsonl"))
    records = list(load(path, "test").table)
    batch = collate(records, range(len(records)))
    wanted: dict[object, set[object]] = {}
    for query, document in batch.positives_P2.tolist():
        wanted.setdefault(batch.queries[query], set()).add(batch.documents[document])
    task = judged_set(path)
    assert wanted == relevant_texts(task)
    assert wanted["mug 7 left"] == {"mug 7 right", "mug 7 hand", "mug 7 sink"}
    assert wanted["a copy"] == {"cup", "a copy"}, "a row's own positive stays"


def test_a_model_that_ranks_each_class_first_is_perfect(jsonl: Jsonl) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}", "label": f"class {i % 3}"} for i in range(60)]
    rows += [{"query": f"p{i}", "positive": f"p{i + 3}", "label": f"class {i % 3}"} for i in range(6)]
    task = judged_set(jsonl(rows, "test.jsonl"))
    builder = RunBuilder(task)
    for query_id in builder.query_ids:
        own = {str(row["label"]) for row in rows if row["query"] == task.queries[query_id]}
        of_class = {row["positive"] for row in rows if {row["label"]} == own}
        builder.add(query_id, [(name, float(item in of_class)) for name, item in task.documents.items()])
    metrics = builder.result("by class", seconds=0).metrics
    assert metrics["ndcg@10"] == pytest.approx(1)
    assert metrics["mrr@10"] == 1


def test_of_classes_too_large_to_judge_some_queries_search(jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"query": f"q{i}", "positive": f"p{i}", "label": "one"} for i in range(40)]
    whole = judged_set(jsonl(rows, "test.jsonl"))
    monkeypatch.setattr(judged, "MOST_CLASS_JUDGEMENTS", 10 * 40 + 39)
    for order in (rows, rows[::-1]):
        task = judged_set(jsonl(order, "test.jsonl"))
        assert sorted(task.queries) == sorted(task.qrels) == sorted(whole.queries)[:10]
        assert task.documents == whole.documents
        assert all(len(grades) == 40 for grades in task.qrels.values())
        assert "10 of 40 queries search" in task.notes[-1]
        assert "1,600 judgements, and 439 are the most" in task.notes[-1]


def test_the_notes_of_reading_are_kept(jsonl: Jsonl) -> None:
    path = jsonl([{"query": "q", "positive": "p", "id": 1}, "{"])
    task = judged_set(path, skip_invalid_records=True, max_invalid_records=1)
    assert [note.partition(":")[0] for note in task.notes] == ["1 invalid row dropped", "Ignored columns"]


def test_a_column_mapping_has_no_effect_on_a_beir_folder(beir_files: Path) -> None:
    assert judged_set(beir_files, column_mapping={"x": None}).notes == (
        "column_mapping has no effect on a BEIR folder.",
    )


@pytest.mark.parametrize("name", ["nowhere.jsonl", "*.jsonl", "{0..3}.jsonl", "flickr30k:nowhere"])
def test_what_a_command_was_given_is_named_as_the_command_names_it(name: str, tmp_path: Path) -> None:
    options = {"role": "test", "user_names": ("--data", "--split")}
    with pytest.raises(DataError, match=r"^--data: "):
        DataSource(f"{tmp_path}/{name}" if ":" not in name else name, **options).judged()


def test_a_split_that_is_not_there_is_named_as_the_command_names_it(tmp_path: Path) -> None:
    rows = '{"query": "a", "positive": "b"}\n'
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "dev.jsonl").write_text(rows)
    options = {"role": "test", "split": "tset", "user_names": ("--data", "--split")}
    with pytest.raises(DataError, match="Choose one with --split, or name the file in --data"):
        DataSource(str(tmp_path), **options).judged()
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    for part in ("corpus", "queries"):
        (tmp_path / f"{part}.jsonl").touch()
    with pytest.raises(DataError, match=r"Choose one with --split$"):
        DataSource(str(tmp_path), **options).judged()
