"""`vembed encode` on pictures: every form that a corpus of pictures has, what is kept of it, what is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
from kit.balls import COLOURS, ball, bomb, caption, write_balls
from search_cases import PICTURE_FILES, meta_of, rows_of

import vembed
from vembed.batch import Image, ImageLimits, Ragged
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.errors import PreemptedError
from vembed.vectors import store
from vembed.workflows.search import build
from vembed.workflows.search.index import SearchIndex
from vembed.workflows.search.thumbnails import THUMBNAIL_BYTES, THUMBNAIL_PIXELS, make_thumbnail

if TYPE_CHECKING:
    from pathlib import Path


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_of_pictures_is_a_corpus_of_its_relative_paths(call: Any, clip: Path, tmp_path: Path) -> None:
    folder = write_balls(tmp_path / "album")
    (folder / "deep").mkdir()
    (folder / "red.png").rename(folder / "deep" / "a: red #1.PNG")
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_bytes(b"no picture either")
    done = call("encode", clip, "--data", folder, "--output", tmp_path / "index")
    assert done.code == 0, done.err
    assert "2 files aren't pictures by their names." in done.out
    assert "4 documents (4 with a picture), 32 dimensions, index Flat" in done.out
    assert {path.name for path in (tmp_path / "index").iterdir()} == PICTURE_FILES
    names = ["blue.png", "deep/a: red #1.PNG", "green.png", "yellow.png"]
    assert rows_of(tmp_path / "index") == [{"id": name, "text": "", "image": name} for name in names]
    assert (meta_of(tmp_path / "index")["num_documents"], meta_of(tmp_path / "index")["num_pictures"]) == (4, 4)
    vectors = np.load(tmp_path / "index" / "vectors.npy")
    np.testing.assert_allclose(
        vectors, vembed.load(clip).encode([folder / name for name in names], "document"), atol=1e-6
    )


def test_a_beir_folder_with_an_image_column_takes_its_paths_from_the_image_root(
    call: Any, clip: Path, balls: Path, tmp_path: Path
) -> None:
    beir = tmp_path / "beir"
    beir.mkdir()
    rows = [{"_id": f"d-{name}", "title": "", "text": "", "image": f"balls/{name}.png"} for name in COLOURS]
    jsonl(beir / "corpus.jsonl", [*rows, {"_id": "t", "title": "A", "text": "text"}])
    refused = call("encode", clip, "--data", beir, "--output", tmp_path / "index")
    assert refused.code == 3
    assert "corpus.jsonl:1, 2, 3" in refused.err
    assert "the first: image: 'balls/red.png': no such file" in refused.err
    words = ("--data", beir, "--output", tmp_path / "index", "--image-root", balls.parent)
    assert call("encode", clip, *words).code == 0
    kept = rows_of(tmp_path / "index")
    assert kept[0] == {"id": "d-red", "text": "", "image": "balls/red.png"}
    assert kept[4] == {"id": "t", "text": "A text"}, "texts and pictures may be mixed"
    assert meta_of(tmp_path / "index")["num_pictures"] == 4
    (hits,) = vembed.open_index(tmp_path / "index").search([caption("blue")], k=1)
    assert hits[0].id == "d-blue"


def test_rows_of_training_data_are_a_corpus_of_their_pictures(clip: Path, balls: Path, tmp_path: Path) -> None:
    rows = [{"query": caption(name), "positive_image": f"{name}.png"} for name in COLOURS]
    data = jsonl(tmp_path / "train.jsonl", [*rows, {"query": "a round thing", "positive_image": "./red.png"}])
    meta = vembed.build_index(clip, data, tmp_path / "index", image_root=balls)
    assert rows_of(tmp_path / "index") == [
        {"id": f"{name}.png", "text": caption(name), "image": f"{name}.png"} for name in COLOURS
    ]
    assert meta.notes == ("1 row repeats an earlier picture.",)


def test_bytes_in_parquet_are_named_by_their_content(clip: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = [{"bytes": ball(name), "path": "image.png"} for name in COLOURS]
    table = pa.table({"image": cells, "caption": [caption(name) for name in COLOURS], "other": [0] * 4})
    pq.write_table(table, tmp_path / "rows.parquet")
    vembed.build_index(clip, tmp_path / "rows.parquet", tmp_path / "index")
    kept = rows_of(tmp_path / "index")
    assert len({row["id"] for row in kept}) == 4, "equal paths of different bytes are different pictures"
    assert [row["text"] for row in kept] == [caption(name) for name in COLOURS]
    (hits,) = vembed.open_index(tmp_path / "index").search([caption("green")], k=1)
    assert hits[0].text == caption("green")


def test_the_built_in_pictures_are_a_corpus_with_captions() -> None:
    documents = list(DataSource("builtin:shapes", "test").documents())
    assert len(documents) == 1000
    assert documents[0].path == "shapes/test/0.png"
    assert isinstance(documents[0].item, Image)
    assert sum(bool(document.caption) for document in documents) > 900
    assert [document.id for document in DataSource("builtin:shapes", "test").documents()] == [
        document.id for document in documents
    ]


def test_a_published_set_is_a_corpus_whose_paths_hold_no_folder_of_this_machine(
    clip: Path, balls: Path, tmp_path: Path
) -> None:
    shutil.copytree(balls, tmp_path / "set" / "flickr30k-images")
    images = [{"filename": f"{name}.png", "split": "test", "sentences": [{"raw": caption(name)}]} for name in COLOURS]
    (tmp_path / "set" / "dataset_flickr30k.json").write_text(json.dumps({"images": images}))
    vembed.build_index(clip, f"flickr30k:{tmp_path / 'set'}", tmp_path / "index")
    assert rows_of(tmp_path / "index")[0] == {
        "id": "red.png", "text": caption("red"), "image": "flickr30k-images/red.png",
    }  # fmt: skip


def test_a_text_column_that_is_named_leaves_the_pictures_alone(clip: Path, balls: Path, tmp_path: Path) -> None:
    rows = [{"id": name, "image": f"{name}.png", "description": caption(name)} for name in COLOURS]
    data = jsonl(tmp_path / "rows.jsonl", rows)
    meta = vembed.build_index(clip, data, tmp_path / "texts", text_column="description")
    assert meta.num_pictures == 0
    meta = vembed.build_index(clip, data, tmp_path / "pictures", image_column="image", image_root=balls)
    assert meta.num_pictures == 4
    with pytest.raises(vembed.DataError, match=r"no column 'picture'.*image_column"):
        vembed.build_index(clip, data, tmp_path / "none", image_column="picture", image_root=balls)


def test_a_picture_beside_a_text_is_one_document_of_both(clip: Path, balls: Path, tmp_path: Path) -> None:
    rows = [{"_id": name, "title": "", "text": caption(name), "image": f"{name}.png"} for name in COLOURS]
    data = jsonl(tmp_path / "corpus.jsonl", rows)
    vembed.build_index(clip, data, tmp_path / "index", image_root=balls)
    assert rows_of(tmp_path / "index")[0] == {"id": "red", "text": caption("red"), "image": "red.png"}
    vectors = np.load(tmp_path / "index" / "vectors.npy")
    model = vembed.load(clip)
    alone = [model.encode([balls / f"{name}.png" for name in COLOURS], "document")]
    alone.append(model.encode([caption(name) for name in COLOURS], "document"))
    both = alone[0] + alone[1]
    np.testing.assert_allclose(vectors, both / np.linalg.norm(both, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("../secret.png", "leads out of"),
        ("link.png", "leads out of"),
        ("https://user:canary@host/x.png", "is an address"),
        ("data:image/png;base64,AAAA", "is an address"),
        ("nothing.png", "no such file"),
        ("text.png", "no picture of a known format"),
        ("empty.png", "the file is empty"),
        ("bomb.png", "are over the limit of 89,478,485"),
        ("cut.png", "can't be decoded"),
        (7, "expected a picture"),
    ],
)
def test_a_picture_that_is_refused_is_named_and_nothing_is_written(
    call: Any, clip: Path, tmp_path: Path, cell: object, message: str
) -> None:
    root = write_balls(tmp_path / "root")
    (tmp_path / "secret.png").write_bytes(ball("red"))
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "text.png").write_text("<script>")
    (root / "empty.png").touch()
    (root / "bomb.png").write_bytes(bomb())
    (root / "cut.png").write_bytes(ball("red", "JPEG")[:-200])
    data = jsonl(tmp_path / "corpus.jsonl", [{"_id": "a", "image": "red.png"}, {"_id": "b", "image": cell}])
    refused = call("encode", clip, "--data", data, "--output", tmp_path / "index", "--image-root", root)
    assert refused.code == 3
    assert message in refused.err
    assert "canary" not in refused.err
    assert "cut.png" in refused.err or "corpus.jsonl:2: image" in refused.err
    assert not [path.name for path in tmp_path.iterdir() if "index" in path.name], "nothing is left"
    jsonl(data, [{"_id": "a", "image": "red.png"}, {"_id": "b", "image": "blue.png"}])
    assert call("encode", clip, "--data", data, "--output", tmp_path / "index", "--image-root", root).code == 0


def test_the_cap_on_pixels_can_be_set(call: Any, clip: Path, balls: Path, tmp_path: Path) -> None:
    words = ("--data", balls, "--output", tmp_path / "index", "--max-image-pixels")
    refused = call("encode", clip, *words, 96 * 64 - 1)
    assert refused.code == 3
    assert "96 x 64 = 6,144 pixels are over the limit of 6,143" in refused.err
    assert call("encode", clip, *words, 96 * 64).code == 0
    assert call("encode", clip, *words, 0).code == 2


def test_a_model_without_a_tower_for_pictures_says_so_before_encoding(
    call: Any, bag: Path, clip: Path, balls: Path, tmp_path: Path
) -> None:
    refused = call("encode", bag, "--data", balls, "--output", tmp_path / "index")
    assert refused.code == 3
    assert "takes texts, and document 'blue.png' is a picture" in refused.err
    data = jsonl(tmp_path / "corpus.jsonl", [{"_id": "two", "image": ["red.png", "blue.png"]}])
    refused = call("encode", clip, "--data", data, "--output", tmp_path / "index", "--image-root", balls)
    assert refused.code == 3
    assert "takes one picture in an item, and document 'two' has 2" in refused.err
    assert call("encode", clip, "--data", balls, "--output", tmp_path / "index").code == 0


def test_a_folder_without_pictures_and_an_image_root_of_a_folder_are_refused(
    call: Any, clip: Path, balls: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    refused = call("encode", clip, "--data", tmp_path / "empty", "--output", tmp_path / "index")
    assert "has no corpus.jsonl and no pictures" in refused.err
    twice = call("encode", clip, "--data", balls, "--output", tmp_path / "index", "--image-root", balls)
    assert "is its own image_root" in twice.err
    assert (refused.code, twice.code) == (3, 3)


def test_a_name_that_is_no_text_is_refused(call: Any, clip: Path, tmp_path: Path) -> None:
    folder = write_balls(tmp_path / "album")
    os.rename(folder / "red.png", os.fsencode(folder) + b"/\xff.png")  # noqa: PTH104 - bytes
    refused = call("encode", clip, "--data", folder, "--output", tmp_path / "index")
    assert refused.code == 3
    assert "not a usable path" in refused.err


# --- thumbnails


def test_equal_inputs_give_equal_bytes_whatever_the_slices(
    clip: Path, balls: Path, picture_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.PICTURE_SLICE_ROWS", 3)
    vembed.build_index(clip, balls, tmp_path / "again")
    for name in PICTURE_FILES - {"vectors.npy", "index.faiss", "checksums.json"}:
        assert (tmp_path / "again" / name).read_bytes() == (picture_index / name).read_bytes(), name
    np.testing.assert_allclose(
        np.load(tmp_path / "again" / "vectors.npy"), np.load(picture_index / "vectors.npy"), atol=1e-6
    )


@pytest.mark.parametrize("num_appended", range(5))
def test_copies_and_vectors_continue_together_after_a_stop_between_any_two_blocks(
    clip: Path, balls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_appended: int
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.PICTURE_SLICE_ROWS", 2)
    vembed.build_index(clip, balls, tmp_path / "whole")
    append, kinds = store._Part.append, []

    def appending(part: store._Part, vectors: Any, **facts: Any) -> None:
        if len(kinds) == num_appended:
            raise PreemptedError("stopped")
        append(part, vectors, **facts)
        kinds.append("copies" if isinstance(vectors, Ragged) else "vectors")

    monkeypatch.setattr(store._Part, "append", appending)
    if num_appended < 4:
        with pytest.raises(PreemptedError):
            vembed.build_index(clip, balls, tmp_path / "index")
        assert kinds == ["vectors", "copies", "vectors", "copies"][:num_appended]
        kinds += [""] * (num_appended + 1 - len(kinds))
    vembed.build_index(clip, balls, tmp_path / "index")
    assert sorted(filter(None, kinds)) == ["copies"] * 2 + ["vectors"] * 2, "every block once"
    for name in PICTURE_FILES:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("name", ["vectors/vectors.npy", "thumbnails/rows.bin", "thumbnails/offsets.npy"])
def test_damage_to_what_was_kept_is_mended(
    clip: Path, balls: Path, picture_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_faiss", lambda *_: (_ for _ in ()).throw(PreemptedError("stopped")))
        with pytest.raises(PreemptedError):
            vembed.build_index(clip, balls, tmp_path / "index")
    path = tmp_path / ".index.part" / name
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    vembed.build_index(clip, balls, tmp_path / "index")
    for name in PICTURE_FILES:
        assert (tmp_path / "index" / name).read_bytes() == (picture_index / name).read_bytes(), name


def test_the_index_shows_and_finds_its_pictures_when_the_originals_are_gone(clip: Path, tmp_path: Path) -> None:
    folder = write_balls(tmp_path / "album")
    vembed.build_index(clip, folder, tmp_path / "index")
    shutil.rmtree(folder)
    searcher = vembed.open_index(tmp_path / "index")
    (hits,) = searcher.search([caption("yellow")], k=1)
    assert (hits[0].id, hits[0].image) == ("yellow.png", "yellow.png")
    copy = PIL.Image.open(io.BytesIO(searcher.index.thumbnail(hits[0].row)))
    assert (copy.format, copy.size, copy.mode) == ("WEBP", (96, 64), "RGB")
    assert np.abs(np.asarray(copy).astype(int)[32, 48] - COLOURS["yellow"]).max() <= 2
    assert searcher.like(hits[0].row, k=1)[0].id == "yellow.png"


def test_a_thumbnail_is_small_upright_and_holds_nothing_but_pixels() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 1000, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    exif[0x010E] = "canary"
    PIL.Image.fromarray(noise).save(buffer, "JPEG", exif=exif, quality=95)
    assert b"canary" in buffer.getvalue()
    thumbnail = make_thumbnail((Image("noise", buffer.getvalue()),), ImageLimits())
    assert len(thumbnail) <= THUMBNAIL_BYTES, "even noise is cut down to size"
    assert b"canary" not in thumbnail
    copy = PIL.Image.open(io.BytesIO(thumbnail))
    assert max(copy.size) <= THUMBNAIL_PIXELS
    assert copy.height > copy.width


def test_a_corpus_that_changes_while_it_is_read_is_refused(
    clip: Path, balls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = jsonl(tmp_path / "c.jsonl", [{"_id": name, "image": f"{name}.png"} for name in COLOURS])
    before = build.write_documents

    def then_change(*arguments: Any) -> tuple[int, int]:
        counts = before(*arguments)
        jsonl(data, [{"_id": name, "image": "red.png"} for name in COLOURS])
        return counts

    monkeypatch.setattr(build, "write_documents", then_change)
    with pytest.raises(vembed.DataError, match="changed while it was read, at document 'green'"):
        vembed.build_index(clip, data, tmp_path / "index", image_root=balls)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", ["thumbnails.bin", "thumbnails.npy", "probe.npy"])
def test_a_damaged_file_is_named(picture_index: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(picture_index, tmp_path / "index")
    path = tmp_path / "index" / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(vembed.ConfigError, match=name):
        SearchIndex(tmp_path / "index")
    path.write_bytes(content)
    assert len(SearchIndex(tmp_path / "index")) == 4


def test_a_thumbnail_that_is_damaged_inside_is_said_and_the_others_are_shown(
    picture_index: Path, tmp_path: Path
) -> None:
    shutil.copytree(picture_index, tmp_path / "index")
    path = tmp_path / "index" / "thumbnails.bin"
    content = path.read_bytes()
    path.write_bytes(b"<script>" + content[8:])
    index = SearchIndex(tmp_path / "index")
    with pytest.raises(vembed.ConfigError, match=r"thumbnails\.bin is damaged"):
        index.thumbnail(0)
    (tmp_path / "index" / "checksums.json").unlink()  # as in an index of an older version
    index = SearchIndex(tmp_path / "index")
    with pytest.raises(vembed.ConfigError, match=r"thumbnails\.bin is broken at document 0"):
        index.thumbnail(0)
    assert index.thumbnail(1) == SearchIndex(picture_index).thumbnail(1) != b""


def test_an_image_processor_that_changed_is_noticed(clip: Path, balls: Path, tmp_path: Path) -> None:
    shutil.copytree(clip, tmp_path / "clip")
    vembed.build_index(tmp_path / "clip", balls, tmp_path / "index")
    probes = np.load(tmp_path / "index" / "probe.npy")
    assert len(probes) == 2, "a picture and a text"
    assert len(vembed.open_index(tmp_path / "index")) == 4
    (tmp_path / "index" / "checksums.json").unlink()  # which would notice the change first
    for row in range(2):
        changed = probes.copy()
        changed[row] = np.roll(changed[row], 1)
        np.save(tmp_path / "index" / "probe.npy", changed)
        with pytest.raises(vembed.ConfigError, match="image processor"):
            vembed.open_index(tmp_path / "index")


def test_columns_are_read_alike_in_all_forms(tmp_path: Path, balls: Path) -> None:
    (tmp_path / "c.csv").write_text("id,image,caption\n1,red.png,a red ball\n2,,\n")
    with pytest.raises(vembed.DataError, match="no column 'text'"):
        list(DataSource(str(tmp_path / "c.csv"), "test", DataKeys(image_root=str(balls))).documents())
    (tmp_path / "c.csv").write_text("id,image,text\n1,red.png,\n2,,a blue ball\n")
    documents = list(DataSource(str(tmp_path / "c.csv"), "test", DataKeys(image_root=str(balls))).documents())
    assert [(document.id, document.path, document.text) for document in documents] == [
        ("1", "red.png", ""), ("2", "", "a blue ball"),
    ]  # fmt: skip
