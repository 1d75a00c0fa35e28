"""Rows whose query is a picture and a text in one: what they become, how they are stored, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_cases import png

from vembed.batch import Composed, Image, content_id
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl, WritePicture

    from vembed.batch import Item
    from vembed.data.table import Record, RecordTable


def only(path: Path) -> Record:
    (record,) = read(str(path), "train").records().table
    return record


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(str(path), "train", DataKeys(**options)).records()
    return str(caught.value)


def write_table(rows: list[tuple[Item, list[Item], list[Item]]]) -> RecordTable:
    writer = RecordWriter()
    for line, (query, positives, negatives) in enumerate(rows, start=1):
        writer.add(query, positives=positives, negatives=negatives, file="f", line=line)
    return writer.finish()


@pytest.fixture
def pictures(write_picture: WritePicture) -> dict[str, Image]:
    """Three files of different content in a folder beside the manifest."""
    colours = {"a": "red", "b": "green", "c": "blue"}
    return {name: Image(str(write_picture(f"pics/{name}.png", colour).resolve())) for name, colour in colours.items()}


def test_a_query_text_beside_a_query_picture_makes_one_query_of_both(
    tmp_path: Path, write_jsonl: WriteJsonl, pictures: dict[str, Image]
) -> None:
    expected = Composed((pictures["a"],), "but in blue")
    row = {"query": "but in blue", "query_image": "pics/a.png", "positive_image": "pics/c.png"}
    assert only(write_jsonl([row])).query == expected
    renamed = {"caption": "but in blue", "anchor_image": ["pics/a.png"], "positive_image": "pics/c.png"}
    assert only(write_jsonl([renamed])).query == expected
    (tmp_path / "rows.csv").write_text("query,query_image,positive_image\nbut in blue,pics/a.png,pics/c.png\n")
    assert only(tmp_path / "rows.csv").query == expected
    assert only(write_jsonl([{**row, "query": " "}])).query == pictures["a"], "a blank text is none"
    assert only(write_jsonl([{**row, "query_image": None}])).query == "but in blue"
    bytes_row = {"query": "but in blue", "query_image": png("red"), "positive_image": png("blue")}
    pq.write_table(pa.Table.from_pylist([bytes_row]), tmp_path / "rows.parquet")
    assert content_id(only(tmp_path / "rows.parquet").query) == content_id(expected)


def test_a_table_gives_composed_items_back_and_tells_their_content_apart(pictures: dict[str, Image]) -> None:
    texts = ["1:\0p", "", " spaced ", "c7:x", "ünï"]
    items = [Composed((image,), text) for text in texts for image in (pictures["a"], Image("n:1", png("red")))]
    rows = [(item, [pictures["b"], item], [pictures["c"]]) for item in items]
    table = write_table(rows)
    assert [(record.query, list(record.positives), list(record.negatives)) for record in table] == rows
    by_path, by_bytes = (write_table([(item, ["p"], [])]).fingerprint for item in items[:2])
    assert by_path == by_bytes
    others = [Composed((pictures["b"],), texts[0]), Composed((pictures["a"],), "other"), pictures["a"], texts[1]]
    assert len({by_path, *(write_table([(item, ["p"], [])]).fingerprint for item in others)}) == 5


def test_a_composed_query_that_escapes_or_is_broken_is_refused(
    tmp_path: Path, write_jsonl: WriteJsonl, write_picture: WritePicture, pictures: dict[str, Image]
) -> None:
    write_picture("../secret.png")
    row = {"query": "but in blue", "positive_image": "pics/c.png"}
    assert only(write_jsonl([{**row, "query_image": "pics/a.png"}])).query == Composed((pictures["a"],), "but in blue")
    for path, words in (("../secret.png", "leads out of"), ("pics/none.png", "no such file")):
        assert words in refusal(write_jsonl([{**row, "query_image": path}]))
    assert "over the limit of 23" in refusal(write_jsonl([{**row, "query_image": "pics/a.png"}]), max_image_pixels=23)
