"""Vectors as Parquet, LanceDB or few bits are searched as the index is, and an encoding that broke off continues."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.balls import write_balls
from kit.runs import environment
from search_cases import FILES, PICTURE_FILES, write_corpus

import vembed
from vembed.errors import PreemptedError
from vembed.vectors import store
from vembed.workflows.search import build
from vembed.workflows.search.build import CorpusItems
from vembed.workflows.search.output import table_format

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ("apple", "train", "list", "river", "lamp", "noon", "pie", "green", "sort", "tree", "fox", "leaves")
MANY = {f"d{n}": f"{one} {two}" for n, (one, two) in enumerate((a, b) for a in WORDS for b in WORDS)}


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "many.jsonl", MANY)


def hits_of(call: Any, place: Path, *words: object) -> Any:
    done = call("search", place, "apple trees", "-k", 20, "--json", *words)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("form", ["parquet", "lancedb"])
def test_a_table_answers_as_the_index_does(call: Any, bag: Path, many: Path, tmp_path: Path, form: str) -> None:
    if form == "lancedb":
        pytest.importorskip("lancedb", reason="the extra lancedb isn't installed: pip install 'vembed[lancedb]'")
    place = tmp_path / ("v.parquet" if form == "parquet" else "lance")
    words = ("encode", bag, "--data", many, "--output", place, "--format", form)
    done = call(*words)
    assert done.code == 0, done.err
    assert "144 documents, 64 dimensions, " + {"parquet": "Parquet", "lancedb": "LanceDB"}[form] in done.out
    vembed.build_index(bag, many, tmp_path / "index")
    assert hits_of(call, place) == hits_of(call, tmp_path / "index")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["index", "many.jsonl", place.name])
    if form == "parquet":
        table = pq.read_table(place)
    else:
        import lancedb

        table = lancedb.connect(place).open_table("documents").to_arrow()
    assert table.column("id").to_pylist() == list(MANY)
    assert table.column("text").to_pylist() == list(MANY.values())
    stored = np.stack(table.column("vector").to_pylist()).astype(np.float32)
    np.testing.assert_array_equal(stored, np.load(tmp_path / "index" / "vectors.npy"))
    meta = json.loads(table.schema.metadata[b"vembed"])
    assert (meta["model"]["dimension"], meta["side"], table.schema.metadata[b"normalised"]) == (64, "document", b"true")
    assert "holds vectors; replace them with --overwrite" in call(*words).err
    assert call(*words, "--overwrite").code == 0


def test_a_table_of_pictures_has_them_too(clip: Path, balls: Path, tmp_path: Path) -> None:
    vembed.build_index(clip, balls, tmp_path / "index")
    vembed.build_index(clip, balls, tmp_path / "b.parquet", format="parquet")
    ours, theirs = vembed.open_index(tmp_path / "index"), vembed.open_index(tmp_path / "b.parquet")
    for row in range(len(ours)):
        assert ours.index.document(row) == theirs.index.document(row)
        assert ours.index.thumbnail(row) == theirs.index.thumbnail(row)
    assert ours.search([balls / "red.png"], 3) == theirs.search([balls / "red.png"], 3)


def test_what_is_no_table_of_ours_is_refused(call: Any, bag: Path, many: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "other.parquet")
    assert "holds no vectors of vembed encode" in call("search", tmp_path / "other.parquet", "x").err
    (tmp_path / "text.parquet").write_text("no")
    assert "can't be read as Parquet" in call("search", tmp_path / "text.parquet", "x").err
    wrong = call("encode", bag, "--data", many, "--output", tmp_path / "dir", "--format", "parquet")
    assert (wrong.code, "a Parquet file's name ends in .parquet" in wrong.err) == (2, True)
    vembed.build_index(bag, many, tmp_path / "v.parquet", format="parquet")
    table = pq.read_table(tmp_path / "v.parquet")
    pq.write_table(table.slice(0, 100), tmp_path / "v.parquet")
    assert "the table is cut or was changed" in call("search", tmp_path / "v.parquet", "x").err
    assert table_format(tmp_path) is None


@pytest.mark.parametrize("bits", ["int8", "binary"])
def test_an_index_of_few_bits_is_ranked_by_the_full_vectors(
    call: Any, bag: Path, many: Path, tmp_path: Path, bits: str
) -> None:
    vembed.build_index(bag, many, tmp_path / "exact")
    vembed.build_index(bag, many, tmp_path / "few", index=bits)
    assert hits_of(call, tmp_path / "few", "--rescore", 8) == hits_of(call, tmp_path / "exact")  # 160 of 144
    index = vembed.open_index(tmp_path / "few").index
    vectors = np.load(tmp_path / "exact" / "vectors.npy")
    rescored, plain = (
        vembed.open_index(tmp_path / "few", rescored=each).search(["apple trees"], 5)[0] for each in (4, 0)
    )
    query = vembed.load(bag).encode(["apple trees"], "query")
    for hit in rescored:
        assert hit.score == pytest.approx(float(query[0] @ vectors[hit.row]), abs=1e-6)
    assert [hit.score for hit in plain] != [hit.score for hit in rescored]
    assert len(index) == 144
    small, large = ((tmp_path / name / "index.faiss").stat().st_size for name in ("few", "exact"))
    assert small < large / 2
    assert "--rescore: must be >= 0" in call("search", tmp_path / "few", "x", "--rescore", -1).err


def test_an_encoding_goes_on_behind_its_last_whole_slice(
    bag: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 20)
    vembed.build_index(bag, many, tmp_path / "whole")
    append, appended = store._Part.append, []

    def killed(part: store._Part, vectors: Any, **facts: Any) -> None:
        if len(appended) == 3:
            raise PreemptedError("stopped")
        append(part, vectors, **facts)
        appended.append(len(vectors))

    monkeypatch.setattr(store._Part, "append", killed)
    with pytest.raises(PreemptedError):
        vembed.build_index(bag, many, tmp_path / "index")
    part = tmp_path / ".index.part"
    [begun] = part.glob(".vectors.*.part")
    with (begun / "vectors.npy").open("ab") as file, (begun / "blocks.jsonl").open("a") as lines:
        file.write(b"half a slice")
        lines.write('{"bytes": 5120, "num_trunc')
    monkeypatch.setattr(
        store._Part, "append", lambda *given, **facts: (append(*given, **facts), appended.append(len(given[1])))
    )
    vembed.build_index(bag, many, tmp_path / "index")
    assert appended == [20, 20, 20, 20, 20, 20, 20, 4]
    for name in FILES:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not part.exists()


def test_an_error_and_a_row_that_was_changed_cost_the_slices_from_there_on(
    bag: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 20)
    append, encoded = store._Part.append, []

    def failing(part: store._Part, vectors: Any, **facts: Any) -> None:
        if len(encoded) == 4:
            raise RuntimeError("the driver is gone")
        append(part, vectors, **facts)
        encoded.append(len(vectors))

    with monkeypatch.context() as patch:
        patch.setattr(store._Part, "append", failing)
        with pytest.raises(RuntimeError, match="the driver is gone"):
            vembed.build_index(bag, many, tmp_path / "index")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(many.read_text() + '{"_id": "d0", "text": "the second of its id"}\n')
    with pytest.raises(vembed.DataError, match="is given twice"):
        vembed.build_index(bag, broken, tmp_path / "index")
    many = write_corpus(tmp_path / "many.jsonl", MANY | {"d65": "other words"})
    take = CorpusItems.take
    monkeypatch.setattr(CorpusItems, "take", lambda self, rows: (encoded.append(len(rows)), take(self, rows))[1])
    vembed.build_index(bag, many, tmp_path / "index")
    assert encoded == [20, 20, 20, 20, 20, 20, 20, 20, 4], "three of the four slices stand before document 65"
    vembed.build_index(bag, many, tmp_path / "whole")
    for name in FILES:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_slices_of_another_corpus_or_damaged_ones_are_made_again(
    bag: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 20)
    vembed.build_index(bag, many, tmp_path / "whole")
    for damage in ("bytes", "corpus"):
        with monkeypatch.context() as patch:
            patch.setattr(build, "write_faiss", lambda *_: (_ for _ in ()).throw(PreemptedError("stopped")))
            with pytest.raises(PreemptedError):
                vembed.build_index(bag, many, tmp_path / damage)
        if damage == "bytes":
            with (tmp_path / ".bytes.part" / "vectors" / "vectors.npy").open("r+b") as file:
                file.seek(4000)
                file.write(b"damaged!")
        else:
            many = write_corpus(tmp_path / "many.jsonl", MANY | {"d0": "other words"})
            vembed.build_index(bag, many, tmp_path / "whole", overwrite=True)
        vembed.build_index(bag, many, tmp_path / damage)
        for name in FILES:
            assert (tmp_path / damage / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["paths", "bytes", "root"])
def test_slices_of_a_picture_that_was_replaced_are_made_again(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    names = ["red", "blue", "green"]
    albums = [write_balls(tmp_path / album) for album in ("album", "other")]
    shutil.copyfile(albums[1] / "yellow.png", albums[1] / "green.png")

    def write_rows(album: Path) -> Path:
        cells = [{"bytes": (album / f"{name}.png").read_bytes(), "path": "a.png"} for name in names]
        pq.write_table(pa.table({"_id": names, "image": cells}), tmp_path / "rows.parquet")
        return tmp_path / "rows.parquet"

    if kind == "bytes":
        data = write_rows(albums[0])
    else:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps({"_id": name, "image": f"{name}.png"}) + "\n" for name in names))
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_faiss", lambda *_: (_ for _ in ()).throw(PreemptedError("stopped")))
        with pytest.raises(PreemptedError):
            vembed.build_index(clip, data, tmp_path / "index", image_root=albums[0])
    root = albums[1] if kind == "root" else albums[0]
    if kind == "paths":
        shutil.copyfile(albums[1] / "green.png", albums[0] / "green.png")
    elif kind == "bytes":
        write_rows(albums[1])
    for name in ("index", "whole"):
        vembed.build_index(clip, data, tmp_path / name, image_root=root)
    for name in PICTURE_FILES:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.slow
def test_two_processes_make_the_index_of_one(call: Any, bag: Path, many: Path, tmp_path: Path) -> None:
    vembed.build_index(bag, many, tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "vembed"]
    done = subprocess.run(
        [*command, "encode", str(bag), "--data", str(many), "--output", str(tmp_path / "two")],
        env={**environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("144 documents") == 1
    one, two = (np.load(tmp_path / name / "vectors.npy") for name in ("one", "two"))
    np.testing.assert_allclose(one, two, atol=1e-6)
    assert (tmp_path / "one" / "ids.jsonl").read_bytes() == (tmp_path / "two" / "ids.jsonl").read_bytes()
    ours, theirs = (hits_of(call, tmp_path / name)["hits"] for name in ("one", "two"))
    assert [hit["id"] for hit in ours] == [hit["id"] for hit in theirs]
