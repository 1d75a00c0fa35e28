"""What `vembed encode` may replace, which form an output has, and how a table is told when it can't be searched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vembed
from vembed.workflows.search import build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def table(bag: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file of texts that the tests only read."""
    path: Path = tmp_path_factory.mktemp("table") / "v.parquet"
    vembed.build_index(bag, corpus, path, format="parquet")
    return path


def with_facts(table: Path, path: Path, **changes: object) -> Path:
    """Write a table anew, with other facts in its metadata."""
    rows = pq.read_table(table)
    facts = json.loads(rows.schema.metadata[b"vembed"]) | changes
    pq.write_table(rows.replace_schema_metadata({"vembed": json.dumps(facts)}), path)
    return path


def test_a_parquet_file_of_the_user_is_never_replaced(
    call: Any, bag: Path, corpus: Path, table: Path, tmp_path: Path
) -> None:
    docs = tmp_path / "docs.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "text": ["one", "two"]}), docs)
    before = docs.read_bytes()
    for data in (docs, corpus):
        for words in ((), ("--overwrite",)):
            refused = call("encode", bag, "--data", data, "--output", docs, *words)
            assert refused.code == 2
            assert "holds vectors" not in refused.err
            assert ("holds the corpus itself" if data == docs else "didn't write") in refused.err
    assert docs.read_bytes() == before
    own = tmp_path / "own.parquet"  # ids and texts: a corpus, too
    own.write_bytes(table.read_bytes())
    with pytest.raises(vembed.ConfigError, match="holds the corpus itself"):
        vembed.build_index(bag, own, own, overwrite=True)
    assert own.read_bytes() == table.read_bytes()


def test_a_lancedb_folder_with_other_tables_is_never_replaced(bag: Path, corpus: Path, tmp_path: Path) -> None:
    lancedb = pytest.importorskip("lancedb", reason="the extra lancedb isn't installed: pip install 'vembed[lancedb]'")
    vembed.build_index(bag, corpus, tmp_path / "ours", format="lancedb")
    vembed.build_index(bag, corpus, tmp_path / "ours", format="lancedb", overwrite=True)
    lancedb.connect(tmp_path / "ours").create_table("thesis", pa.table({"a": [1]}))
    lancedb.connect(tmp_path / "foreign").create_table("documents", pa.table({"a": [1]}))
    (tmp_path / "broken" / "documents.lance").mkdir(parents=True)
    for name in ("ours", "foreign", "broken"):
        with pytest.raises(vembed.ConfigError, match="holds other files"):
            vembed.build_index(bag, corpus, tmp_path / name, format="lancedb", overwrite=True)
    assert lancedb.connect(tmp_path / "ours").open_table("thesis").count_rows() == 1
    assert lancedb.connect(tmp_path / "foreign").open_table("documents").count_rows() == 1
    with pytest.raises(vembed.DataError, match="can't be read as LanceDB"):
        vembed.open_index(tmp_path / "broken")


def test_a_format_that_is_unknown_or_that_the_name_contradicts_is_refused(
    call: Any, bag: Path, corpus: Path, tmp_path: Path
) -> None:
    for name, form, message in (
        ("v.parquet", "Parquet", "the format 'Parquet' is unknown; choose one of index, parquet, lancedb"),
        ("vectors", "parquet", r"a Parquet file's name ends in \.parquet"),
        ("v.parquet", "index", r"v\.parquet names a Parquet file; leave format out"),
    ):
        with pytest.raises(vembed.ConfigError, match=message):
            vembed.build_index(bag, corpus, tmp_path / name, format=form)  # type: ignore[arg-type]
    refused = call("encode", bag, "--data", corpus, "--output", tmp_path / "v.parquet", "--format", "index")
    assert (refused.code, "leave --format out" in refused.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_table_is_written_without_the_faiss_index_that_it_never_holds(
    bag: Path, corpus: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_any_index", None)
        vembed.build_index(bag, corpus, tmp_path / "v.parquet", format="parquet", index="int8")
    kept = json.loads(pq.read_schema(tmp_path / "v.parquet").metadata[b"vembed"])
    assert kept["file_bytes"].keys() == {"vectors.npy", "ids.jsonl"}
    searched = vembed.open_index(tmp_path / "v.parquet")
    assert searched.index.meta.factory == "int8"
    assert searched.search(["apple"], 4) == vembed.open_index(index).search(["apple"], 4)


@pytest.mark.parametrize("name", ["index", "v.parquet"])
def test_an_index_of_more_clusters_than_documents_is_refused_before_encoding(
    bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(build, "_write_vectors", None)
    with pytest.raises(vembed.ConfigError, match=r"index IVF8,Flat is trained on at least 8 documents, and .* has 4;"):
        vembed.build_index(bag, corpus, tmp_path / name, index="IVF8,Flat")
    assert not list(tmp_path.iterdir())


def test_messages_about_a_table_name_it_and_not_where_it_was_unpacked(bag: Path, clip: Path, table: Path) -> None:
    with pytest.raises(vembed.ConfigError, match=rf"^{table} was made by "):
        vembed.open_index(table, model=clip)
    assert vembed.open_index(table, model=bag).index.meta.num_documents == 4


def test_a_table_of_a_later_format_or_a_damaged_one_is_told_by_its_name(table: Path, tmp_path: Path) -> None:
    later = with_facts(table, tmp_path / "later.parquet", format_version=9, model={}, file_bytes=None)
    with pytest.raises(vembed.ConfigError, match=rf"^{later}: format version 9 .* update vembed"):
        vembed.open_index(later)
    less = tmp_path / "less.parquet"
    pq.write_table(pq.read_table(table).drop_columns(["vector"]), less)
    damaged = tmp_path / "damaged.parquet"
    content = bytearray(table.read_bytes())
    content[100:400] = bytes(300)
    damaged.write_bytes(content)
    for path in (less, damaged):
        with pytest.raises(vembed.ConfigError, match=rf"^{path} is broken: .*; encode the corpus again$"):
            vembed.open_index(path)
    other = with_facts(table, tmp_path / "other.parquet", num_documents=3)
    with pytest.raises(vembed.ConfigError, match=rf"^{other}: ids\.jsonl is broken: 4 lines for 3 documents"):
        vembed.open_index(other)
    rows = pq.read_table(table)
    texts = pa.array([text.replace("apple", "applf") for text in rows["text"].to_pylist()])
    bent = tmp_path / "bent.parquet"
    pq.write_table(rows.set_column(1, "text", texts).replace_schema_metadata(rows.schema.metadata), bent)
    with pytest.raises(vembed.ConfigError, match=rf"^{bent} is broken: .*another ids\.jsonl than was written"):
        vembed.open_index(bent)
