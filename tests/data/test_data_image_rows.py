"""Pictures in rows: which column is what, which paths are refused, what a table, a batch and a split make of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_cases import png

from vembed.batch import Image, content_id
from vembed.data.collate import collate
from vembed.data.hold_out import hold_out
from vembed.data.images import ImageError
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.data.sampler import GlobalSampler
from vembed.data.table_writer import BLOB_BYTES, RecordWriter
from vembed.errors import DataError

if TYPE_CHECKING:
    from conftest import WriteJsonl, WritePicture

    from vembed.data.table import LoadedRecords, Record

TRAIN = {"role": "train"}


def read_rows(path: Path, **options: Any) -> LoadedRecords:
    return read(str(path), "train", DataKeys(**options)).records()


def only(path: Path, **options: Any) -> Record:
    (record,) = read_rows(path, **options).table
    return record


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(path, **options)
    return str(caught.value)


@pytest.fixture
def pictures(write_picture: WritePicture) -> dict[str, Image]:
    """Three files of different content in a folder beside the manifest."""
    colours = {"a": "red", "b": "green", "c": "blue"}
    return {name: Image(str(write_picture(f"pics/{name}.png", colour).resolve())) for name, colour in colours.items()}


@pytest.mark.parametrize(
    ("row", "query", "positives", "negatives"),
    [
        ({"query": "q", "positive_image": "pics/a.png"}, "q", ["a"], []),
        ({"query": "q", "image": "pics/a.png"}, "q", ["a"], []),
        ({"caption": "q", "image": "pics/a.png"}, "q", ["a"], []),
        ({"text": "q", "image": "pics/a.png"}, "q", ["a"], []),
        ({"text": "q", "image_path": "pics/a.png"}, "q", ["a"], []),
        ({"image": "pics/a.png", "text": "q", "negatives": []}, "q", ["a"], []),
        ({"query": "q", "positive_image": ["pics/a.png", "pics/b.png"]}, "q", ["a", "b"], []),
        ({"query": "q", "image": "pics/a.png", "negative_image": "pics/b.png"}, "q", ["a"], ["b"]),
        ({"text": "q", "image": "pics/a.png", "negative_images": ["pics/b.png", "pics/c.png"]}, "q", ["a"], ["b", "c"]),
        ({"text": "q", "image": "pics/a.png", "neg": ["t"], "negative_image": "pics/b.png"}, "q", ["a"], ["t", "b"]),
        ({"query_image": "pics/a.png", "positive_image": "pics/b.png"}, "a", ["b"], []),
        ({"anchor_image": "pics/a.png", "positive_image": "pics/b.png"}, "a", ["b"], []),
        ({"query_image": "pics/a.png", "text": "t"}, "a", ["t"], []),
        ({"query_image": "pics/a.png", "positive": ["t", "u"]}, "a", ["t", "u"], []),
        ({"query": None, "query_image": "pics/a.png", "positive": "t", "positive_image": ""}, "a", ["t"], []),
        ({"query": "q", "query_image": None, "positive": [], "positive_image": "pics/a.png"}, "q", ["a"], []),
        ({"query": "q", "positive": "t", "image_caption": "ignored"}, "q", ["t"], []),
    ],
)  # fmt: skip
def test_what_a_row_with_pictures_becomes(
    write_jsonl: WriteJsonl,
    pictures: dict[str, Image],
    row: Any,
    query: str,
    positives: list[str],
    negatives: list[str],
) -> None:
    record = only(write_jsonl([row]))
    assert record.query == pictures.get(query, query)
    assert record.positives == tuple(pictures.get(name, name) for name in positives)
    assert record.negatives == tuple(pictures.get(name, name) for name in negatives)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"query": "pics/a.png", "query_image": "pics/a.png", "positive": "t"},
            "query: names the picture of 'query_image' instead of saying something of it",
        ),
        (
            {"query": "q", "positive": "t", "image": "pics/a.png"},
            "positive: holds a text and 'image' a picture: two positives, or one of both?",
        ),
        ({"caption": "q", "text": "t", "image": "pics/a.png"}, "text: holds a text and 'image' a picture"),
        ({"query": "q", "positive": None, "positive_image": ""}, "positive: holds nothing, nor does 'positive_image'"),
        ({"query": "q", "positive_image": []}, "positive_image: no positives"),
        ({"query": "q", "positive_image": None}, "positive_image: no positives"),
        ({"query_image": None, "positive": "t"}, "query_image: expected a picture, or a list of them, got none"),
        ({"query": "q", "image": [["pics/a.png"], []]}, "image: expected a picture, got an empty list (item 2 of 2)"),
        ({"query": "q", "image": [["pics/a.png", [7]]]}, "image: expected a picture (a path, bytes, or "),
        ({"query": "q", "image": 7}, 'image: expected a picture (a path, bytes, or {"bytes", "path"}), got int'),
        ({"query": "q", "image": {"url": "x"}}, "image: expected a picture: neither 'bytes' nor 'path' holds anything"),
        ({"query": "q", "image": ["pics/a.png", " "]}, "image: empty path of a picture (item 2 of 2)"),
        ({"query": "q", "image": "pics/no.png"}, "image: 'pics/no.png': no such file in "),
        ({"query": "q", "image": "pics"}, "image: 'pics': not a regular file"),
        (
            {"query": "q", "image": "pics/a.png", "negative_image": "pics/again.png"},
            "negative_image: holds the row's own positive: the picture",
        ),
    ],
)
def test_a_broken_row_is_refused_and_its_neighbours_are_not(
    write_jsonl: WriteJsonl, pictures: dict[str, Image], write_picture: WritePicture, row: Any, words: str
) -> None:
    write_picture("pics/again.png", "red")
    good = {"query": "q", "image": "pics/a.png", "negative_image": "pics/b.png"}
    message = refusal(write_jsonl([good, row, good]))
    assert f"train.jsonl:2: {words}" in message
    kept = read_rows(write_jsonl([good, row, good]), skip_invalid_records=True, max_invalid_records=1)
    assert [record.location for record in kept.table] == ["train.jsonl:1", "train.jsonl:3"]
    assert kept.num_invalid == 1


@pytest.mark.parametrize("row", [{"image": "pics/a.png"}, {"query_image": "pics/a.png", "image": "pics/b.png"}])
def test_an_image_without_a_text_query_must_be_named(
    write_jsonl: WriteJsonl, pictures: dict[str, Image], row: dict[str, str]
) -> None:
    message = refusal(write_jsonl([row]))
    assert message.startswith("train.jsonl:1: column 'image' is the positive picture of a text query")
    assert "column_mapping: {image: query_image}" in message
    mapped = only(write_jsonl([{"image": "pics/a.png", "text": "t"}]), column_mapping={"image": "query_image"})
    assert (mapped.query, mapped.positives) == (pictures["a"], ("t",))
    pair = {"query_image": "pics/a.png", "image": "pics/b.png"}
    assert only(write_jsonl([pair]), column_mapping={"image": "positive_image"}).positives == (pictures["b"],)


def test_columns_of_pictures_can_be_dropped_and_must_not_be_rivals(
    write_jsonl: WriteJsonl, pictures: dict[str, Image]
) -> None:
    row = {"query": "q", "positive": "t", "image": "pics/a.png"}
    assert only(write_jsonl([row]), column_mapping={"image": None}).positives == ("t",)
    rivals = {"query": "q", "image": "pics/a.png", "positive_image": "pics/b.png"}
    assert "columns 'image' and 'positive_image' both mean 'positive_image'" in refusal(write_jsonl([rivals]))
    images = {"query": "q", "positive": "t", "images": ["pics/a.png"]}
    assert "train.jsonl:1: column 'images' holds images" in refusal(write_jsonl([images]))
    assert only(write_jsonl([images]), column_mapping={"images": "negative_images"}).negatives == (pictures["a"],)


ESCAPES = [
    ("../secret.png", "leads out of"),
    ("pics/../../secret.png", "leads out of"),
    ("{outside}/secret.png", "leads out of"),
    ("/etc/passwd", "leads out of"),
    ("link.png", "leads out of"),
    ("folder/secret.png", "leads out of"),
    ("http://host.example/x.png", "is an address"),
    ("HTTPS://user:password@host.example/x.png", "is an address"),
    ("file:pics/a.png", "is an address"),
    ("data:image/png;base64,AAAA", "is an address"),
    ("C:/x.png", "is an address"),
    ("pics\\a.png", "write the path with /"),
    ("pics/a.png\0.txt", "NUL"),
]


@pytest.mark.parametrize(("path", "words"), ESCAPES)
@pytest.mark.parametrize("column", ["image", "query_image", "negative_images"])
def test_a_path_out_of_the_root_is_refused_whatever_the_policy(
    tmp_path: Path, write_jsonl: WriteJsonl, write_picture: WritePicture, path: str, words: str, column: str
) -> None:
    write_picture("secret.png")
    for name in "ab":
        write_picture(f"data/pics/{name}.png", "green" if name == "a" else "red")
    (tmp_path / "data/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "data/folder").symlink_to(tmp_path)
    rest = {
        "image": {"query": "q"},
        "query_image": {"positive": "t"},
        "negative_images": {"query": "q", "image": "pics/b.png"},
    }[column]
    path = path.format(outside=tmp_path)
    for options in ({}, {"skip_invalid_records": True, "max_invalid_records": 5}):
        manifest = write_jsonl([{**rest, column: "pics/a.png"}, {**rest, column: path}], "data/rows.jsonl")
        message = refusal(manifest, **options)
        assert f"rows.jsonl:2: {column}: " in message
        assert words in message
        assert "password" not in message
        assert "skip_invalid_records doesn't cover a path" in message
    assert len(read_rows(write_jsonl([{**rest, column: "pics/a.png"}], "data/rows.jsonl")).table) == 1


def test_every_path_that_stays_inside_is_taken(
    tmp_path: Path, write_jsonl: WriteJsonl, pictures: dict[str, Image]
) -> None:
    (tmp_path / "link.png").symlink_to(tmp_path / "pics/a.png")
    (tmp_path / "linked").symlink_to(tmp_path / "pics")
    for path in ("pics/a.png", "./pics/../pics/a.png", str(tmp_path / "pics/a.png"), "link.png", "linked/a.png"):
        assert only(write_jsonl([{"query": "q", "image": path}])).positives == (pictures["a"],)


def test_a_missing_picture_names_image_root(write_jsonl: WriteJsonl) -> None:
    manifest = write_jsonl([{"query": "q", "image": "gone.png"}])
    words = f"no such file in {manifest.parent}; set image_root to the folder that the paths start from"
    assert words in refusal(manifest)


def test_image_root_replaces_the_manifests_folder(
    tmp_path: Path, write_jsonl: WriteJsonl, pictures: dict[str, Image]
) -> None:
    manifest = write_jsonl([{"query": "q", "image": "pics/a.png"}], "rows/train.jsonl")
    assert f"it is in {tmp_path}: set image_root: {tmp_path}" in refusal(manifest)
    assert only(manifest, image_root=str(tmp_path)).positives == (pictures["a"],)
    above = write_jsonl([{"query": "q", "image": "../pics/a.png"}], "rows/train.jsonl")
    assert "leads out of" in refusal(above)
    assert only(above, image_root=str(tmp_path / "pics")).positives == (pictures["a"],)
    assert "isn't a folder" in refusal(manifest, image_root=str(tmp_path / "nowhere"))


def test_every_header_is_checked_before_training_and_skip_counts_it(
    tmp_path: Path, write_jsonl: WriteJsonl, pictures: dict[str, Image]
) -> None:
    (tmp_path / "pics/empty.png").write_bytes(b"")
    (tmp_path / "pics/page.png").write_bytes(b"<html>not found</html>")
    names = ["a", "empty", "b", "page", "none", "c"]
    manifest = write_jsonl([{"query": "q", "image": f"pics/{name}.png"} for name in names])
    message = refusal(manifest)
    assert "3 invalid rows" in message
    assert "train.jsonl:2: image: 'pics/empty.png': the file is empty" in message
    assert "train.jsonl:4: image: 'pics/page.png': no picture of a known format" in message
    assert "train.jsonl:5: image: 'pics/none.png': no such file" in message
    loaded = read_rows(manifest, skip_invalid_records=True, max_invalid_records=3)
    assert [record.positives[0] for record in loaded.table] == [pictures[name] for name in "abc"]
    assert loaded.notes[0].startswith("3 invalid rows dropped: train.jsonl:2: image: ")
    assert "6 x 4 = 24 pixels are over the limit of 23" in refusal(manifest, max_image_pixels=23)


def test_cells_of_csv_hold_paths(tmp_path: Path, pictures: dict[str, Image]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('query,image,negative_images\nq,pics/a.png,\nr,pics/b.png,"[""pics/a.png"", ""pics/c.png""]"\n')
    first, second = read_rows(path).table
    assert (first.positives, first.negatives) == ((pictures["a"],), ())
    assert second.negatives == (pictures["a"], pictures["c"])


@pytest.mark.parametrize("form", ["struct", "raw"])
def test_parquet_holds_the_bytes_of_pictures(tmp_path: Path, pictures: dict[str, Image], form: str) -> None:
    data = [png("red"), png("green")]
    cells: list[Any] = [{"bytes": value, "path": "x.png"} for value in data] if form == "struct" else list(data)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"query": f"q{n}", "image": cell} for n, cell in enumerate(cells)]), path)
    records = list(read_rows(path).table)
    assert [record.positives[0].data for record in records if isinstance(record.positives[0], Image)] == data
    assert records[1].positives[0].path == "rows.parquet:2 image"  # type: ignore[union-attr]
    assert content_id(records[0].positives[0]) == content_id(pictures["a"])
    broken = [{"query": "q", "image": b"x"}, {"query": "q", "image": None}]
    pq.write_table(pa.Table.from_pylist(broken), path)
    message = refusal(path)
    assert "rows.parquet:1: image: the picture's bytes: no picture of a known format" in message
    assert "rows.parquet:2: image: no positives" in message


def test_structs_with_a_path_alone_are_paths(tmp_path: Path, pictures: dict[str, Image]) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"query": "q", "image": {"bytes": None, "path": "pics/a.png"}}]), path)
    assert only(path).positives == (pictures["a"],)
    pq.write_table(pa.Table.from_pylist([{"query": "q", "image": {"bytes": None, "path": "../../x.png"}}]), path)
    assert "leads out of" in refusal(path)


def test_pictures_of_a_hub_set_come_undecoded(monkeypatch: pytest.MonkeyPatch, pictures: dict[str, Image]) -> None:
    features = datasets.Features({"query": datasets.Value("string"), "image": datasets.Image()})
    rows = [
        {"query": f"q{n}", "image": {"bytes": png(colour), "path": None}} for n, colour in enumerate(("red", "blue"))
    ]
    found = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows, features=features)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: found)
    records = list(read("owner/name", **TRAIN).records().table)
    assert [content_id(record.positives[0]) for record in records] == [content_id(pictures[name]) for name in "ac"]
    rows[1]["image"] = {"bytes": None, "path": "pics/a.png"}
    found["train"] = datasets.Dataset.from_list(rows, features=features)
    with pytest.raises(DataError, match="no folder of its own; set image_root"):
        read("owner/name", **TRAIN).records()


def write_table(rows: list[tuple[Any, list[Any], list[Any]]]) -> Any:
    writer = RecordWriter()
    for line, (query, positives, negatives) in enumerate(rows, start=1):
        writer.add(query, positives=positives, negatives=negatives, file="f", line=line)
    return writer.finish()


def test_a_table_gives_pictures_back_and_keeps_equal_bytes_once(pictures: dict[str, Image]) -> None:
    data = bytes(BLOB_BYTES // 4)
    blobs = [Image(f"name:{n}", data + bytes([n % 7])) for n in range(40)]
    rows = [(pictures["a"], [blob, "text"], [pictures["b"]]) for blob in blobs]
    table = write_table(rows)
    assert [(r.query, list(r.positives), list(r.negatives)) for r in table] == rows
    assert table.subset([39, 3]).subset([0])[0].positives[0] == blobs[39]
    assert table.items.num_blobs == 7, "7 different contents among 40 pictures"
    assert write_table([("q", ["p"], [])]).items.num_blobs == 0


def test_fingerprints_are_of_content(pictures: dict[str, Image]) -> None:
    by_path = write_table([("q", [pictures["a"]], [])])
    by_bytes = write_table([("q", [Image("elsewhere", Path(pictures["a"].path).read_bytes())], [])])
    other = write_table([("q", [pictures["b"]], [])])
    assert by_path.fingerprint == by_bytes.fingerprint != other.fingerprint
    assert write_table([("q", [pictures["a"].path], [])]).fingerprint != by_path.fingerprint


def test_a_batch_of_pictures_has_equal_ids_for_equal_content(
    pictures: dict[str, Image], write_picture: WritePicture
) -> None:
    copy = Image(str(write_picture("pics/copy.png", "red")))
    table = write_table([("q", [pictures["a"]], [pictures["b"]]), ("r", [copy], []), (pictures["b"], ["t"], [])])
    rows = GlobalSampler(len(table), batch_size=3, seed=1).rows(0)
    batch = collate(table.take(rows), rows.tolist())
    ids = dict(zip(batch.documents, batch.document_ids_D.tolist(), strict=True))
    assert ids[pictures["a"]] == ids[copy] != ids[pictures["b"]]
    assert ids[pictures["b"]] in batch.query_ids_Q.tolist()
    Path(copy.path).unlink()
    gone = Image(copy.path + ".gone")
    with pytest.raises(ImageError, match=r"copy\.png\.gone: no such file"):
        collate(write_table([("q", [gone], []), ("r", ["t"], [])]).take([0, 1]), [0, 1])


def test_no_picture_is_on_both_sides_of_a_split(write_picture: WritePicture) -> None:
    files = [Image(str(write_picture(f"{n}.png", f"#0000{n:02x}"))) for n in range(40)]
    copies = [Image(str(write_picture(f"copy-{n}.png", f"#0000{n:02x}"))) for n in range(40)]
    rows = [(f"q{n}", [files[n]], []) for n in range(40)] + [(f"r{n}", [copies[n]], []) for n in range(40)]
    split = hold_out(write_table(rows), fraction=0.2)
    assert len(split.held_out_rows) == 16
    assert {row % 40 for row in split.held_out_rows.tolist()}.isdisjoint(row % 40 for row in split.train_rows.tolist())
    backwards = hold_out(write_table(rows[::-1]), fraction=0.2)
    assert (np.sort(79 - backwards.held_out_rows) == split.held_out_rows).all()


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 8248), ("train_image_image.jsonl", 1443)])
def test_emoji_rows_load(real_data: Path, name: str, count: int) -> None:
    table = read_rows(real_data / "emoji" / name).table
    assert len(table) == count
    for record in table:
        (positive,) = record.positives
        assert isinstance(positive, Image)
        assert isinstance(record.query, Image) == (name != "train.jsonl")
