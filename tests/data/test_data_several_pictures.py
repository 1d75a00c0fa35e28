"""Items of several pictures: how rows, BEIR folders and corpora say them, how they are stored and told apart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_cases import png

from vembed.batch import Composed, Image, ImageLimits, content_id
from vembed.data.images import ImageError, item_id
from vembed.data.read import read
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError
from vembed.training.batches import estimated_costs
from vembed.workflows.search.thumbnails import make_thumbnails, thumbnail_size

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl, WritePicture

    from vembed.data.table import Record


def only(path: Path) -> Record:
    (record,) = read(str(path), "train").records().table
    return record


@pytest.fixture
def pages(write_picture: WritePicture) -> tuple[Image, ...]:
    """Three files of different content in a folder beside the manifest."""
    colours = ("red", "green", "blue")
    return tuple(Image(str(write_picture(f"{name}.png", name).resolve())) for name in colours)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"query": "q", "positive_image": [["red.png", "green.png"], "blue.png"]},
            ("q", [("", "01"), "2"], []),
        ),
        (
            {"query": "q", "image": [["red.png", "green.png"]], "negative_images": [["green.png", "red.png"]]},
            ("q", [("", "01")], [("", "10")]),
        ),
        ({"query": "q", "image": [["red.png"]], "negative_image": [["blue.png"]]}, ("q", ["0"], ["2"])),
        ({"query_image": ["red.png", "green.png"], "positive": "t"}, (("", "01"), ["t"], [])),
        ({"query": "both", "query_image": ["red.png", "green.png"], "positive": "t"}, (("both", "01"), ["t"], [])),
    ],
)
def test_what_a_row_with_lists_of_pictures_becomes(
    write_jsonl: WriteJsonl, pages: tuple[Image, ...], row: Any, wanted: Any
) -> None:
    def item(word: Any) -> Any:
        if isinstance(word, tuple):
            return Composed(tuple(pages[int(digit)] for digit in word[1]), word[0])
        return pages[int(word)] if word.isdigit() else word

    record = only(write_jsonl([row]))
    query, positives, negatives = wanted
    assert record.query == item(query)
    assert record.positives == tuple(map(item, positives))
    assert record.negatives == tuple(map(item, negatives))


def test_bytes_in_nested_lists_of_parquet_are_one_document(tmp_path: Path) -> None:
    document = [{"bytes": png("red"), "path": "a"}, {"bytes": png("blue"), "path": "b"}]
    pq.write_table(pa.Table.from_pylist([{"query": "q", "positive_image": [document]}]), tmp_path / "rows.parquet")
    (positive,) = only(tmp_path / "rows.parquet").positives
    assert content_id(positive) == content_id(Composed((Image("x", png("red")), Image("y", png("blue"))), ""))
    assert isinstance(positive, Composed)
    assert [image.path.rpartition(" ")[2] for image in positive.images] == ["1)", "2)"], "messages tell them apart"


def test_a_path_that_escapes_is_refused_and_a_document_of_its_own_positives_is_no_negative(
    write_jsonl: WriteJsonl, write_picture: WritePicture, pages: tuple[Image, ...]
) -> None:
    write_picture("../secret.png")
    for more, words in (
        ({"image": [["red.png", "../secret.png"]]}, "leads out of"),
        ({"image": [["red.png", "green.png"]], "negative_images": [["red.png", "green.png"]]}, "own positive"),
        ({"image": [["red.png", "none.png"]]}, "no such file"),
    ):
        with pytest.raises(DataError, match=words):
            only(write_jsonl([{"query": "q", **more}]))
    assert len(pages) == 3


def test_a_table_gives_items_of_several_pictures_back_and_tells_them_apart(pages: tuple[Image, ...]) -> None:
    in_memory = Image("n:1", png("red"))
    items = [
        Composed(pages[:2], ""),
        Composed((pages[1], pages[0]), ""),
        Composed((in_memory, pages[2], in_memory), "text"),
        Composed(pages[:1], "text"),
        pages[0],
        "text",
    ]

    def table(rows: list[Any]) -> Any:
        writer = RecordWriter()
        for line, item in enumerate(rows, start=1):
            writer.add(item, positives=[*rows, item], negatives=["no"], file="f", line=line)
        return writer.finish()

    assert [record.query for record in table(items)] == items
    assert [list(record.positives) for record in table(items)] == [[*items, item] for item in items]
    fingerprints = {table([item]).fingerprint for item in items}
    assert len(fingerprints) == len(items)
    moved = Composed((Image("elsewhere", png("red")), Image("there", png("green"))), "")
    assert table([moved]).fingerprint == table(items[:1]).fingerprint


def test_the_picture_of_an_item_that_has_gone_is_the_one_that_is_named(
    tmp_path: Path, pages: tuple[Image, ...]
) -> None:
    gone = Image(str(tmp_path / "gone.png"))
    with pytest.raises(ImageError, match=r"gone\.png"):
        item_id(Composed((pages[0], gone), "text"))


def test_a_list_beside_an_id_is_one_document_of_a_beir_folder_and_of_a_corpus(
    tmp_path: Path, pages: tuple[Image, ...]
) -> None:
    rows = [
        {"_id": "d1", "text": "", "image": ["red.png", "green.png"]},
        {"_id": "d2", "text": "with a text", "image": ["blue.png", "red.png"]},
        {"_id": "d3", "text": "", "image": ["blue.png"]},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    query = {"_id": "q", "text": "", "image": ["green.png", "blue.png"]}
    (tmp_path / "queries.jsonl").write_text(json.dumps(query) + "\n")
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("q\td1\t1\n")
    expected = [Composed(pages[:2], ""), Composed((pages[2], pages[0]), "with a text"), pages[2]]
    task = read(str(tmp_path), "test").judged()
    assert list(task.documents.values()) == expected
    assert task.queries == {"q": Composed(pages[1:], "")}
    documents = list(read(str(tmp_path), "test").documents())
    assert [document.item for document in documents] == expected
    assert [document.path for document in documents] == ["red.png + green.png", "blue.png + red.png", "blue.png"]


def test_rows_without_an_id_are_a_corpus_of_their_documents(write_jsonl: WriteJsonl, pages: tuple[Image, ...]) -> None:
    rows = [{"caption": "c", "image": [["red.png", "green.png"], "blue.png"]}, {"image": [["red.png", "green.png"]]}]
    corpus = read(str(write_jsonl(rows)), "test").documents()
    documents = list(corpus)
    assert [document.item for document in documents] == [Composed(pages[:2], ""), pages[2]]
    assert [document.text for document in documents] == ["c", "c"]
    assert corpus.notes == ("1 row repeats an earlier picture.",)


def test_the_copy_of_several_pictures_shows_them_side_by_side(pages: tuple[Image, ...]) -> None:
    copies = list(make_thumbnails([pages[0], "text", Composed(pages, "")], ImageLimits(), 1))
    assert copies[1] == b""
    (width, height), (wide, high) = thumbnail_size(copies[0]), thumbnail_size(copies[2])
    assert (wide, high) == (3 * width, height)


def test_an_item_of_more_pictures_is_taken_to_cost_more(pages: tuple[Image, ...]) -> None:
    costs = estimated_costs([pages[0], Composed(pages[:2], ""), Composed(pages, "")], max_length=None)
    assert costs[0] < costs[1] < costs[2]
