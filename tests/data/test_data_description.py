"""What was read: columns by name, by habit and by mapping, and the lines that tell each of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from vembed.data import table_cache
from vembed.data.columns import listing
from vembed.data.keys import DataKeys
from vembed.data.read import describe, read
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl, WritePicture

    from vembed.data.table import LoadedRecords

GOOD = {"question": "what purrs", "answer": "a cat"}


@pytest.fixture
def png(write_picture: WritePicture) -> Path:
    return write_picture("dot.png")


def loaded(file: Path, **mapping: Any) -> LoadedRecords:
    return read(str(file), "train", DataKeys(column_mapping=mapping)).records()


def test_the_lines_say_how_many_rows_which_columns_and_one_row(write_jsonl: WriteJsonl) -> None:
    rows = [{**GOOD, "question": f"what purrs {number} " * 9, "x": 1, "y": 2} for number in range(300)]
    lines = describe("pets.jsonl", loaded(write_jsonl(rows)), parts={"dev": 15})
    assert lines["data"] == "300 rows of pets.jsonl: 285 train, 15 dev; 0 hard negatives"
    assert lines["columns"] == "question as query, answer as positive; ignored: x, y"
    shown = ("what purrs 0 " * 9)[:60]
    assert lines["example"] == f"query '{shown}...', positive 'a cat'"


def test_dropped_rows_and_an_example_with_all_columns_are_told(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{**GOOD, "negatives": ["a\ndog", "a cow"], "label": "7"}, {**GOOD, "answer": ""}])
    keys = DataKeys(skip_invalid_records=True, label_kind="class")
    lines = describe("p", read(str(path), "train", keys).records())
    assert lines["data"] == "1 row of p; 1 invalid row dropped; 2 hard negatives"
    assert lines["example"] == "query 'what purrs', positive 'a cat', negative 'a dog' and 1 more, label 7"


def test_what_steers_a_terminal_is_shown(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{"query": "\x1b]0;owned\x07", "positive": "p", "\x1b[2J": 1}])
    assert "\x1b" not in "".join(describe("\x1b[2J", loaded(path)).values())


@pytest.mark.parametrize(
    "names",
    [
        *[("bad_answer_1", "bad_answer_2"), ("wrong_a", "wrong_b"), ("neg_1", "neg_2"), ("hard_negative_1", "neg_2")],
        *[("neg_2", "neg_10"), ("hard_negative", "neg_x"), ("negative_a", "negative_b"), ("hard_neg_1", "hard_neg_2")],
        *[("bad_answer", "wrong_answers_2"), ("neg_passages", "negative_text"), ("hard_negatives_1", "neg_doc_2")],
    ],
)
def test_negatives_are_recognised_by_their_names_and_told(write_jsonl: WriteJsonl, names: tuple[str, str]) -> None:
    read = loaded(write_jsonl([{**GOOD, names[1]: "b", names[0]: "a"}]))
    assert read.table[0].negatives == ("a", "b")
    assert "as negatives (by their names)" in describe("p", read)["columns"]
    (note,) = read.notes
    assert note.startswith("Taken by their names: ")
    assert all(name in note for name in names)
    assert loaded(write_jsonl([{**GOOD, names[0]: "a"}]), **{names[0]: None}).table[0].negatives == ()


@pytest.mark.parametrize(
    "row",
    [
        {"neg_score": 0.5, "neg_id": 7, "bad_image_1": "x.png", "wrong_label": 1},
        {"negatives": [], "bad_1": "x"},
        {"negative_images": [], "bad_1": "x"},
        {"badly": "x", "negation": "x", "wrong": "x"},
        {"neg_prob": 0.5, "negative_votes": "12", "neg_logit": "-3.2", "neg_category": "x", "negative_reason": "x"},
        {"wrong_words": "x", "negative_title": "x", "hard_negative_source": "x", "bad_": "x"},
    ],
)
def test_no_column_is_taken_for_negatives_beside_named_ones_or_without_text(
    write_jsonl: WriteJsonl, row: dict[str, Any]
) -> None:
    read = loaded(write_jsonl([{**GOOD, **row}]))
    assert read.table[0].negatives == ()
    assert {*read.columns.ignored} == {*row} - {"negatives", "negative_images"}


def test_rows_that_name_their_negatives_decide_for_those_below(write_jsonl: WriteJsonl) -> None:
    named, other = {**GOOD, "negatives": ["a"]}, {**GOOD, "bad_answer": "b"}
    read = loaded(write_jsonl([named, other, named]))
    assert [read.table[row].negatives for row in range(3)] == [("a",), (), ("a",)]
    assert read.columns.text.endswith("negatives; ignored: bad_answer")
    read = loaded(write_jsonl([other, named | other]))
    assert [read.table[row].negatives for row in range(2)] == [("b",), ("a",)]
    assert read.columns.text.endswith("bad_answer, negatives as negatives (bad_answer by its name)")


def test_an_ignored_column_without_a_name_is_told() -> None:
    assert listing([""]) == "one without a name"
    assert listing([]) == "none"


def test_several_columns_map_to_negatives_as_a_list_or_one_by_one(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{**GOOD, "a": "1", "b": "2", "c": None}])
    for mapping in ({"negatives": ["b", "a", "c"]}, {"b": "negatives", "a": "negatives", "c": "negatives"}):
        read = loaded(path, **mapping)
        assert read.table[0].negatives == ("2", "1")
        assert "b, a, c as negatives" in describe("p", read)["columns"]
    with pytest.raises(DataError, match=r"no row of .* has that column"):
        loaded(path, negatives=["a", "z"])


def test_a_list_of_columns_is_for_negatives_alone(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{**GOOD, "negative": "a", "neg": "b"}])
    with pytest.raises(DataError, match=r"or take both with column_mapping: \{negatives: \[negative, neg\]\}"):
        loaded(path)
    assert loaded(path, negatives=["negative", "neg"]).table[0].negatives == ("a", "b")
    with pytest.raises(ValueError, match="names neg twice"):
        loaded(path, negatives=["neg"], neg="query")


@pytest.mark.parametrize("name", ["file_name", "filename", "filepath", "path"])
@pytest.mark.parametrize("caption", ["text", "caption", "query", "title"])
def test_a_file_beside_a_caption_is_its_picture(write_jsonl: WriteJsonl, png: Path, name: str, caption: str) -> None:
    read = loaded(write_jsonl([{name: png.name, caption: "a dot"}]))
    assert (read.table[0].query, read.table[0].positives[0].path) == ("a dot", str(png))  # type: ignore[union-attr]
    assert f"{name} as positive_image (by its name)" in describe("p", read)["columns"]


def test_a_file_beside_a_pair_of_texts_or_a_named_picture_is_ignored(write_jsonl: WriteJsonl, png: Path) -> None:
    assert loaded(write_jsonl([{**GOOD, "path": "src/a.py"}])).columns.ignored == ("path",)
    row = {"caption": "a dot", "image": png.name, "file_name": "else.png"}
    assert loaded(write_jsonl([row])).columns.ignored == ("file_name",)


def test_two_files_are_not_chosen_from(write_jsonl: WriteJsonl, png: Path) -> None:
    path = write_jsonl([{"caption": "a dot", "path": png.name, "file_name": png.name}])
    with pytest.raises(DataError, match=r"'path' and 'file_name' may both name the picture: say which with"):
        loaded(path)
    assert len(loaded(path, path="positive_image").table) == 1


@pytest.mark.parametrize(
    ("document", "text"), [("text", "T d"), ("passage", "T d"), ("document", "T d"), ("answer", "d")]
)
def test_a_title_goes_before_the_text_of_a_document(write_jsonl: WriteJsonl, document: str, text: str) -> None:
    read = loaded(write_jsonl([{"query": "q", document: "d", "title": "T"}]))
    assert read.table[0].positives == (text,)
    told = "title put before the positive (by its name)" if text == "T d" else "; ignored: title"
    assert told in describe("p", read)["columns"]
    assert loaded(write_jsonl([{"query": "q", document: "d", "title": "T"}]), title=None).table[0].positives == ("d",)


def test_a_mapped_title_is_joined_whatever_the_document_is_called(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{**GOOD, "headline": "T"}, {**GOOD, "headline": None}])
    assert [record.positives for record in loaded(path, headline="title").table] == [("T a cat",), ("a cat",)]
    with pytest.raises(DataError, match="headline: expected text, got int"):
        loaded(write_jsonl([{**GOOD, "headline": 3}]), headline="title")


def test_columns_of_kept_rows_are_told_by_later_starts(
    tmp_path: Path, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(table_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(table_cache, "LEAST_BYTES", 1)
    path = write_jsonl([{**GOOD, "bad_1": "a dog", "x": 1}])
    first, second = (describe("p", loaded(path)) for _ in range(2))
    assert first == second
    assert json.dumps(first["columns"]).count("ignored: x") == 1
