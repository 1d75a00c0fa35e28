"""Retrieval tasks with pictures: BEIR folders whose rows name files, and rows that become a task."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from vembed.batch import Composed, Image, content_id
from vembed.data.judged import read_beir
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl, WritePicture

TEST = {"role": "test"}


@pytest.fixture
def picture_folder(tmp_path: Path, write_picture: WritePicture) -> Path:
    """A BEIR folder of 2 pictures and a text, searched by a picture and a text."""
    for name, colour in (("a", "red"), ("b", "green"), ("q", "blue")):
        write_picture(f"shop/pics/{name}.png", colour)
    folder = tmp_path / "shop"
    corpus = [
        {"_id": "d1", "title": "", "text": "", "image": "pics/a.png"},
        {"_id": "d2", "text": "", "image": "pics/b.png"},
        {"_id": "d3", "text": "a text", "image": ""},
    ]
    queries = [{"_id": "q1", "text": "", "image": "pics/q.png"}, {"_id": "q2", "text": "green thing", "image": None}]
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    for split in ("train", "test"):
        (folder / f"qrels/{split}.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\nq2\td2\t1\n")
    return folder


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def append(path: Path, row: dict[str, object]) -> None:
    with path.open("a") as handle:
        handle.write(json.dumps(row) + "\n")


def test_a_folder_of_pictures_becomes_a_task(picture_folder: Path) -> None:
    task = read(str(picture_folder), **TEST).judged()
    pics = picture_folder.resolve() / "pics"
    assert task.documents == {"d1": Image(str(pics / "a.png")), "d2": Image(str(pics / "b.png")), "d3": "a text"}
    assert task.queries == {"q1": Image(str(pics / "q.png")), "q2": "green thing"}
    assert task.notes == ()
    assert read_beir(picture_folder, None, "test").data == task


def test_its_train_split_becomes_records(picture_folder: Path) -> None:
    first, second = read(str(picture_folder), "train").records().table
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
        ("corpus", {"_id": "d4", "text": "", "image": "pics/none.png"}, "image: 'pics/none.png': no such file"),
        ("corpus", {"_id": "d4", "text": "", "image": 3}, "image: expected a picture"),
        ("queries", {"_id": "q4", "text": "both", "image": "../../x.png"}, "image: '../../x.png' leads out of"),
        ("queries", {"_id": "q4", "text": 5, "image": "pics/a.png"}, "text: expected text, got the number 5"),
        ("queries", {"_id": "q4", "text": "", "image": "http://host.example/a.png"}, "image: a path that starts with"),
    ],
)
def test_a_bad_picture_is_refused_with_its_line(
    picture_folder: Path, file: str, row: dict[str, object], words: str
) -> None:
    with (picture_folder / "qrels/test.tsv").open("a") as handle:
        handle.write("q4\td1\t1\n")
    append(picture_folder / f"{file}.jsonl", row)
    with pytest.raises(DataError) as caught:
        read(str(picture_folder), **TEST).judged()
    line = 4 if file == "corpus" else 3
    assert f"{file}.jsonl:{line}: {words}" in str(caught.value)


def test_a_picture_beside_a_text_is_one_item_of_both(picture_folder: Path) -> None:
    append(picture_folder / "corpus.jsonl", {"_id": "d4", "title": "A", "text": "red one", "image": "pics/a.png"})
    append(picture_folder / "corpus.jsonl", {"_id": "d5", "title": "A", "image": "pics/a.png"})
    append(picture_folder / "queries.jsonl", {"_id": "q4", "text": "but in red", "image": "pics/q.png"})
    for split in ("train", "test"):
        with (picture_folder / f"qrels/{split}.tsv").open("a") as handle:
            handle.write("q4\td4\t1\n")
    task = read(str(picture_folder), **TEST).judged()
    pics = picture_folder.resolve() / "pics"
    assert task.queries["q4"] == Composed((Image(str(pics / "q.png")),), "but in red")
    assert task.documents["d4"] == Composed((Image(str(pics / "a.png")),), "A red one")
    assert task.documents["d5"] == Composed((Image(str(pics / "a.png")),), "A")
    record = read(str(picture_folder), "train").records().table[2]
    assert (record.query, record.positives) == (task.queries["q4"], (task.documents["d4"],))


def test_a_query_that_nobody_judges_needs_no_picture(picture_folder: Path) -> None:
    append(picture_folder / "queries.jsonl", {"_id": "q9", "text": "", "image": "pics/none.png"})
    assert len(read(str(picture_folder), **TEST).judged().queries) == 2


def test_image_root_serves_a_beir_folder(picture_folder: Path) -> None:
    (picture_folder / "pics").rename(picture_folder.parent / "pics")
    with pytest.raises(DataError, match=f"it is in {picture_folder.parent}: set image_root"):
        read(str(picture_folder), **TEST).judged()
    options = {"role": "test", "keys": DataKeys(image_root=str(picture_folder.parent))}
    assert len(read(str(picture_folder), **options).judged().documents) == 3


def test_rows_with_pictures_become_a_task_by_content(write_jsonl: WriteJsonl, write_picture: WritePicture) -> None:
    for name, colour in (("a", "red"), ("again", "red"), ("b", "green")):
        write_picture(f"{name}.png", colour)
    rows = [
        {"query": "q", "image": "a.png", "negative_images": ["b.png"]},
        {"query": "q", "image": "b.png"},
        {"query": "r", "image": "again.png"},
    ]
    task = read(str(write_jsonl(rows, "test.jsonl")), **TEST).judged()
    assert len(task.documents) == 2, "two files of one content are one document"
    for name, item in task.documents.items():
        assert isinstance(item, Image)
        assert int(name, 16) == content_id(item) % 2**64
    assert sorted(len(grades) for grades in task.qrels.values()) == [1, 2]
    assert task.notes == ("1 row merged into an earlier row of the same query.",)


@pytest.mark.parametrize(
    ("name", "counts", "picture_queries"),
    [
        ("eval_style", (1443, 1443, 1443), False),
        ("eval_concept", (170, 510, 510), False),
        ("eval_image", (170, 1613, 170), True),
    ],
)
def test_emoji_tasks_load(real_data: Path, name: str, counts: tuple[int, int, int], picture_queries: bool) -> None:
    options = {"role": "test", "keys": DataKeys(image_root=str(real_data / "emoji"))}
    task = read(str(real_data / "emoji" / name), **options).judged()
    assert (len(task.queries), len(task.documents), sum(len(grades) for grades in task.qrels.values())) == counts
    assert all(isinstance(item, Image) for item in task.documents.values())
    assert all(isinstance(item, Image) == picture_queries for item in task.queries.values())
