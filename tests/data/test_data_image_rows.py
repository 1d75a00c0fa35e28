"""Pictures in rows: which column is what, which paths are refused; items of a picture and a text, or of several."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.rows import Jsonl, Paint, load, only, png, refusal, table_of

from vembed.batch import Composed, Image, ImageLimits, content_id
from vembed.data.collate import collate
from vembed.data.hold_out import hold_out
from vembed.data.images import ImageError, item_id
from vembed.data.read import DataSource
from vembed.data.sampler import GlobalSampler
from vembed.errors import DataError
from vembed.training.batches import estimated_costs
from vembed.workflows.search.thumbnails import make_thumbnails, thumbnail_size


@pytest.fixture
def pictures(paint: Paint) -> dict[str, Image]:
    """Three files of different content in a folder beside the manifest."""
    colours = {"a": "red", "b": "green", "c": "blue"}
    return {name: Image(str(paint(f"pics/{name}.png", colour).resolve())) for name, colour in colours.items()}


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
    jsonl: Jsonl, pictures: dict[str, Image], row: Any, query: str, positives: list[str], negatives: list[str]
) -> None:
    record = only(jsonl([row]))
    assert record.query == pictures.get(query, query)
    assert record.positives == tuple(pictures.get(name, name) for name in positives)
    assert record.negatives == tuple(pictures.get(name, name) for name in negatives)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"query": "pics/a.png", "query_image": "pics/a.png", "positive": "t"}, "query: names the picture"),
        ({"query": "q", "positive": "t", "image": "pics/a.png"}, "positive: holds a text and 'image' a picture"),
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
        ({"query": "q", "image": "pics/a.png", "negative_image": "pics/again.png"}, "negative_image: holds the"),
    ],
)
def test_a_broken_row_is_refused_and_its_neighbours_are_not(
    jsonl: Jsonl, pictures: dict[str, Image], paint: Paint, row: Any, words: str
) -> None:
    paint("pics/again.png", "red")
    good = {"query": "q", "image": "pics/a.png", "negative_image": "pics/b.png"}
    message = refusal(jsonl([good, row, good]))
    assert f"train.jsonl:2: {words}" in message
    kept = load(jsonl([good, row, good]), skip_invalid_records=True, max_invalid_records=1)
    assert [record.location for record in kept.table] == ["train.jsonl:1", "train.jsonl:3"]
    assert kept.num_invalid == 1


@pytest.mark.parametrize("row", [{"image": "pics/a.png"}, {"query_image": "pics/a.png", "image": "pics/b.png"}])
def test_an_image_without_a_text_query_must_be_named(
    jsonl: Jsonl, pictures: dict[str, Image], row: dict[str, str]
) -> None:
    message = refusal(jsonl([row]))
    assert message.startswith("train.jsonl:1: column 'image' is the positive picture of a text query")
    assert "column_mapping: {image: query_image}" in message
    mapped = only(jsonl([{"image": "pics/a.png", "text": "t"}]), column_mapping={"image": "query_image"})
    assert (mapped.query, mapped.positives) == (pictures["a"], ("t",))
    pair = {"query_image": "pics/a.png", "image": "pics/b.png"}
    assert only(jsonl([pair]), column_mapping={"image": "positive_image"}).positives == (pictures["b"],)


def test_columns_of_pictures_can_be_dropped_and_must_not_be_rivals(jsonl: Jsonl, pictures: dict[str, Image]) -> None:
    row = {"query": "q", "positive": "t", "image": "pics/a.png"}
    assert only(jsonl([row]), column_mapping={"image": None}).positives == ("t",)
    rivals = {"query": "q", "image": "pics/a.png", "positive_image": "pics/b.png"}
    assert "columns 'image' and 'positive_image' both mean 'positive_image'" in refusal(jsonl([rivals]))
    images = {"query": "q", "positive": "t", "images": ["pics/a.png"]}
    assert "train.jsonl:1: column 'images' holds images" in refusal(jsonl([images]))
    assert only(jsonl([images]), column_mapping={"images": "negative_images"}).negatives == (pictures["a"],)


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
    tmp_path: Path, jsonl: Jsonl, paint: Paint, path: str, words: str, column: str
) -> None:
    paint("secret.png")
    for name in "ab":
        paint(f"data/pics/{name}.png", "green" if name == "a" else "red")
    (tmp_path / "data/link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "data/folder").symlink_to(tmp_path)
    rest = {
        "image": {"query": "q"},
        "query_image": {"positive": "t"},
        "negative_images": {"query": "q", "image": "pics/b.png"},
    }[column]
    path = path.format(outside=tmp_path)
    for options in ({}, {"skip_invalid_records": True, "max_invalid_records": 5}):
        manifest = jsonl([{**rest, column: "pics/a.png"}, {**rest, column: path}], "data/rows.jsonl")
        message = refusal(manifest, **options)
        assert f"rows.jsonl:2: {column}: " in message
        assert words in message
        assert "password" not in message
        assert "skip_invalid_records doesn't cover a path" in message
    assert len(load(jsonl([{**rest, column: "pics/a.png"}], "data/rows.jsonl")).table) == 1


def test_every_path_that_stays_inside_is_taken(tmp_path: Path, jsonl: Jsonl, pictures: dict[str, Image]) -> None:
    (tmp_path / "link.png").symlink_to(tmp_path / "pics/a.png")
    (tmp_path / "linked").symlink_to(tmp_path / "pics")
    for path in ("pics/a.png", "./pics/../pics/a.png", str(tmp_path / "pics/a.png"), "link.png", "linked/a.png"):
        assert only(jsonl([{"query": "q", "image": path}])).positives == (pictures["a"],)


def test_image_root_replaces_the_manifests_folder(tmp_path: Path, jsonl: Jsonl, pictures: dict[str, Image]) -> None:
    manifest = jsonl([{"query": "q", "image": "pics/a.png"}], "rows/train.jsonl")
    assert f"it is in {tmp_path}: set image_root: {tmp_path}" in refusal(manifest)
    assert only(manifest, image_root=str(tmp_path)).positives == (pictures["a"],)
    above = jsonl([{"query": "q", "image": "../pics/a.png"}], "rows/train.jsonl")
    assert "leads out of" in refusal(above)
    assert only(above, image_root=str(tmp_path / "pics")).positives == (pictures["a"],)
    assert "isn't a folder" in refusal(manifest, image_root=str(tmp_path / "nowhere"))


def test_every_header_is_checked_before_training_and_skip_counts_it(
    tmp_path: Path, jsonl: Jsonl, pictures: dict[str, Image]
) -> None:
    (tmp_path / "pics/empty.png").write_bytes(b"")
    (tmp_path / "pics/page.png").write_bytes(b"<html>not found</html>")
    names = ["a", "empty", "b", "page", "none", "c"]
    manifest = jsonl([{"query": "q", "image": f"pics/{name}.png"} for name in names])
    message = refusal(manifest)
    assert "3 invalid rows" in message
    assert "train.jsonl:2: image: 'pics/empty.png': the file is empty" in message
    assert "train.jsonl:4: image: 'pics/page.png': no picture of a known format" in message
    assert "train.jsonl:5: image: 'pics/none.png': no such file" in message
    loaded = load(manifest, skip_invalid_records=True, max_invalid_records=3)
    assert [record.positives[0] for record in loaded.table] == [pictures[name] for name in "abc"]
    assert loaded.notes[0].startswith("3 invalid rows dropped: train.jsonl:2: image: ")
    assert "6 x 4 = 24 pixels are over the limit of 23" in refusal(manifest, max_image_pixels=23)


def test_cells_of_csv_hold_paths(tmp_path: Path, pictures: dict[str, Image]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('query,image,negative_images\nq,pics/a.png,\nr,pics/b.png,"[""pics/a.png"", ""pics/c.png""]"\n')
    first, second = load(path).table
    assert (first.positives, first.negatives) == ((pictures["a"],), ())
    assert second.negatives == (pictures["a"], pictures["c"])


@pytest.mark.parametrize("form", ["struct", "raw"])
def test_parquet_holds_the_bytes_of_pictures(tmp_path: Path, pictures: dict[str, Image], form: str) -> None:
    data = [png("red"), png("green")]
    cells: list[Any] = [{"bytes": value, "path": "x.png"} for value in data] if form == "struct" else list(data)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"query": f"q{n}", "image": cell} for n, cell in enumerate(cells)]), path)
    records = list(load(path).table)
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
    records = list(load("owner/name").table)
    assert [content_id(record.positives[0]) for record in records] == [content_id(pictures[name]) for name in "ac"]
    rows[1]["image"] = {"bytes": None, "path": "pics/a.png"}
    found["train"] = datasets.Dataset.from_list(rows, features=features)
    with pytest.raises(DataError, match="no folder of its own; set image_root"):
        load("owner/name")


def test_a_batch_of_pictures_has_equal_ids_for_equal_content(pictures: dict[str, Image], paint: Paint) -> None:
    copy = Image(str(paint("pics/copy.png", "red")))
    table = table_of([("q", [pictures["a"]], [pictures["b"]]), ("r", [copy], []), (pictures["b"], ["t"], [])])
    rows = GlobalSampler(len(table), batch_size=3, seed=1).rows(0)
    batch = collate(table.take(rows), rows.tolist())
    ids = dict(zip(batch.documents, batch.document_ids_D.tolist(), strict=True))
    assert ids[pictures["a"]] == ids[copy] != ids[pictures["b"]]
    assert ids[pictures["b"]] in batch.query_ids_Q.tolist()
    Path(copy.path).unlink()
    gone = Image(copy.path + ".gone")
    with pytest.raises(ImageError, match=r"copy\.png\.gone: no such file"):
        collate(table_of([("q", [gone], []), ("r", ["t"], [])]).take([0, 1]), [0, 1])


def test_no_picture_is_on_both_sides_of_a_split(paint: Paint) -> None:
    files = [Image(str(paint(f"{n}.png", f"#0000{n:02x}"))) for n in range(40)]
    copies = [Image(str(paint(f"copy-{n}.png", f"#0000{n:02x}"))) for n in range(40)]
    rows = [(f"q{n}", [files[n]], []) for n in range(40)] + [(f"r{n}", [copies[n]], []) for n in range(40)]
    train_rows, held_out_rows, _ = hold_out(table_of(rows), fraction=0.2)
    assert len(held_out_rows) == 16
    assert {row % 40 for row in held_out_rows.tolist()}.isdisjoint(row % 40 for row in train_rows.tolist())
    _, backwards, _ = hold_out(table_of(rows[::-1]), fraction=0.2)
    assert (np.sort(79 - backwards) == held_out_rows).all()


# A picture and a text in one


def test_a_query_text_beside_a_query_picture_makes_one_query_of_both(
    tmp_path: Path, jsonl: Jsonl, pictures: dict[str, Image]
) -> None:
    expected = Composed((pictures["a"],), "but in blue")
    row = {"query": "but in blue", "query_image": "pics/a.png", "positive_image": "pics/c.png"}
    assert only(jsonl([row])).query == expected
    renamed = {"caption": "but in blue", "anchor_image": ["pics/a.png"], "positive_image": "pics/c.png"}
    assert only(jsonl([renamed])).query == expected
    (tmp_path / "rows.csv").write_text("query,query_image,positive_image\nbut in blue,pics/a.png,pics/c.png\n")
    assert only(tmp_path / "rows.csv").query == expected
    assert only(jsonl([{**row, "query": " "}])).query == pictures["a"], "a blank text is none"
    assert only(jsonl([{**row, "query_image": None}])).query == "but in blue"
    bytes_row = {"query": "but in blue", "query_image": png("red"), "positive_image": png("blue")}
    pq.write_table(pa.Table.from_pylist([bytes_row]), tmp_path / "rows.parquet")
    assert content_id(only(tmp_path / "rows.parquet").query) == content_id(expected)


def test_a_composed_query_that_escapes_or_is_broken_is_refused(
    tmp_path: Path, jsonl: Jsonl, paint: Paint, pictures: dict[str, Image]
) -> None:
    paint("../secret.png")
    row = {"query": "but in blue", "positive_image": "pics/c.png"}
    assert only(jsonl([{**row, "query_image": "pics/a.png"}])).query == Composed((pictures["a"],), "but in blue")
    for path, words in (("../secret.png", "leads out of"), ("pics/none.png", "no such file")):
        assert words in refusal(jsonl([{**row, "query_image": path}]))
    assert "over the limit of 23" in refusal(jsonl([{**row, "query_image": "pics/a.png"}]), max_image_pixels=23)


# Several pictures


@pytest.fixture
def pages(paint: Paint) -> tuple[Image, ...]:
    """Three files of different content in a folder beside the manifest."""
    colours = ("red", "green", "blue")
    return tuple(Image(str(paint(f"{name}.png", name).resolve())) for name in colours)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"query": "q", "positive_image": [["red.png", "green.png"], "blue.png"]}, ("q", [("", "01"), "2"], [])),
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
    jsonl: Jsonl, pages: tuple[Image, ...], row: Any, wanted: Any
) -> None:
    def item(word: Any) -> Any:
        if isinstance(word, tuple):
            return Composed(tuple(pages[int(digit)] for digit in word[1]), word[0])
        return pages[int(word)] if word.isdigit() else word

    record = only(jsonl([row]))
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
    jsonl: Jsonl, paint: Paint, pages: tuple[Image, ...]
) -> None:
    paint("../secret.png")
    for more, words in (
        ({"image": [["red.png", "../secret.png"]]}, "leads out of"),
        ({"image": [["red.png", "green.png"]], "negative_images": [["red.png", "green.png"]]}, "own positive"),
        ({"image": [["red.png", "none.png"]]}, "no such file"),
    ):
        with pytest.raises(DataError, match=words):
            only(jsonl([{"query": "q", **more}]))
    assert len(pages) == 3


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
    task = DataSource(str(tmp_path), "test").judged()
    assert list(task.documents.values()) == expected
    assert task.queries == {"q": Composed(pages[1:], "")}
    documents = list(DataSource(str(tmp_path), "test").documents())
    assert [document.item for document in documents] == expected
    assert [document.path for document in documents] == ["red.png + green.png", "blue.png + red.png", "blue.png"]


def test_rows_without_an_id_are_a_corpus_of_their_documents(jsonl: Jsonl, pages: tuple[Image, ...]) -> None:
    rows = [{"caption": "c", "image": [["red.png", "green.png"], "blue.png"]}, {"image": [["red.png", "green.png"]]}]
    corpus = DataSource(str(jsonl(rows)), "test").documents()
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
