"""`vembed encode` on texts: the folder that it writes, the corpora that it takes, what it refuses and leaves behind."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.runs import environment
from search_cases import DOCUMENTS, FILES, meta_of, write_corpus

import vembed
from vembed import files
from vembed.vectors import store
from vembed.workflows.search import build

if TYPE_CHECKING:
    from pathlib import Path


def test_the_folder_holds_vectors_ids_index_and_meta(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    import faiss

    folder = tmp_path / "deep" / "index"
    done = call("encode", bag, "--data", corpus, "--output", folder)
    assert done.code == 0, done.err
    assert "4 documents, 64 dimensions, index Flat" in done.out
    assert {path.name for path in folder.iterdir()} == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["index"], "nothing is left beside it"
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, vembed.load(bag).encode(DOCUMENTS.values(), "document"))
    rows = [json.loads(line) for line in (folder / "ids.jsonl").read_text().splitlines()]
    assert {row["id"]: row["text"] for row in rows} == DOCUMENTS
    flat = faiss.read_index(str(folder / "index.faiss"))
    np.testing.assert_array_equal(flat.reconstruct_n(0, 4), vectors)
    meta = meta_of(folder)
    assert meta["model"]["name"] == str(bag)
    assert re.fullmatch(r"[0-9a-f]{64}", meta["model"]["weights_sha256"])
    assert (meta["model"]["dimension"], meta["model"]["similarity"], meta["num_documents"]) == (64, "cosine", 4)
    assert (meta["vembed_version"], meta["side"], meta["factory"]) == (vembed.__version__, "document", "Flat")


def test_equal_inputs_give_equal_bytes(bag: Path, corpus: Path, index: Path, tmp_path: Path) -> None:
    vembed.build_index(vembed.load(bag), corpus, tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (index / name).read_bytes(), name


def test_slices_change_nothing(
    bag: Path, corpus: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 3)
    vembed.build_index(bag, corpus, tmp_path / "sliced")
    for name in FILES:
        assert (tmp_path / "sliced" / name).read_bytes() == (index / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["beir", "csv", "tsv", "parquet", "json", "txt", "gz"])
def test_every_kind_of_corpus_gives_the_same_documents(kind: str, bag: Path, tmp_path: Path) -> None:
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = {"1": "red apples", "2": "the train, at noon", "3": "apple pie"}
    path = tmp_path / {"beir": "corpus.jsonl", "gz": "corpus.jsonl.gz"}.get(kind, f"corpus.{kind}")
    if kind == "beir":
        write_corpus(path, documents)
        path = tmp_path
    elif kind == "gz":
        path.write_bytes(gzip.compress(write_corpus(tmp_path / "c", documents).read_bytes()))
    elif kind == "parquet":
        table = {"docid": [int(name) for name in documents], "passage": list(documents.values()), "other": [0] * 3}
        pq.write_table(pa.table(table), path)
    elif kind == "json":
        path.write_text(json.dumps([{"id": name, "title": None, "content": text} for name, text in documents.items()]))
    elif kind == "txt":
        path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(documents.values()).encode())
    else:
        cells = [("id", "text"), *documents.items()]
        line = '{}\t"{}"' if kind == "tsv" else '{},"{}"'
        path.write_text("\n".join(line.format(*row) for row in cells))
    vembed.build_index(bag, path, tmp_path / "index")
    rows = [json.loads(line) for line in (tmp_path / "index" / "ids.jsonl").read_text().splitlines()]
    assert {row["id"]: row["text"] for row in rows} == documents


@pytest.mark.slow
def test_a_built_in_set_is_a_corpus(bag: Path, tmp_path: Path) -> None:
    assert vembed.build_index(bag, "builtin:stdlib-code", tmp_path / "index").num_documents > 100


def test_a_missing_column_is_told_once_with_the_number_of_its_rows(call: Any, bag: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(f'{{"key": {number}, "text": "a"}}\n' for number in range(50)) + '{"_id": 1, "text": ""}\n')
    refused = call("encode", bag, "--data", path, "--output", tmp_path / "x")
    assert refused.code == 3
    assert refused.err.count("no column '_id', 'id'") == 1
    assert "50 invalid rows" in refused.err
    assert "  c.jsonl:1, 2, 3 and 47 more rows: " in refused.err
    assert refused.err.count("more") == 1


def test_titles_columns_and_empty_texts(call: Any, bag: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"key": 7, "title": "Pie", "body": "with apples"}\n\n{"key": 8, "body": ""}\n')
    refused = call("encode", bag, "--data", path, "--output", tmp_path / "x")
    assert refused.code == 3
    assert "c.jsonl:1: no column '_id', 'id'" in refused.err
    assert "--id-column" in refused.err
    near = call("encode", bag, "--data", path, "--output", tmp_path / "x", "--id-column", "key", "--text-column", "bdy")
    assert "did you mean 'body'" in near.err
    taken = call(
        "encode", bag, "--data", path, "--output", tmp_path / "x", "--id-column", "key", "--text-column", "body"
    )
    assert taken.code == 0, taken.err
    assert "1 document has neither a title nor a text." in taken.out
    rows = [json.loads(line) for line in (tmp_path / "x" / "ids.jsonl").read_text().splitlines()]
    assert rows == [{"id": "7", "text": "Pie with apples"}, {"id": "8", "text": ""}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"_id": "a", "text": ', "c.jsonl:2: bad JSON"),
        ('{"_id": "d1", "text": "b"}', "c.jsonl:2: _id: 'd1' is given twice"),
        ('{"_id": "a", "text": null}', "c.jsonl:2: text: missing"),
        ('{"_id": "a", "text": 3}', "c.jsonl:2: text: expected text, got int"),
        ('{"_id": 1.5, "text": "b"}', "c.jsonl:2: _id: missing, or neither"),
        ('{"_id": "a", "text": "nul \\u0000"}', "c.jsonl:2: text: holds a NUL byte"),
        ('{"_id": "a", "text": "b", "image": "c.png"}', "c.jsonl:2: image: 'c.png': no such file"),
    ],
)
def test_a_broken_row_is_named_and_nothing_is_written(
    call: Any, bag: Path, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(f'{{"_id": "d1", "text": "a"}}\n{line}\n')
    refused = call("encode", bag, "--data", path, "--output", tmp_path / "index")
    assert refused.code == 3
    assert message in refused.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.jsonl"]
    path.write_text('{"_id": "d1", "text": "a"}\n')
    assert call("encode", bag, "--data", path, "--output", tmp_path / "index").code == 0


def test_what_is_no_corpus_is_refused(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "a.bin").write_text("x")
    for data, message in {
        tmp_path / "empty.txt": "holds no documents",
        tmp_path / "a.bin": "unknown kind of file",
        tmp_path: "has no corpus.jsonl",
        corpus.with_name("korpus.jsonl"): "did you mean 'corpus.jsonl'",
        "https://user:canary@host/x": "is an address",
    }.items():
        refused = call("encode", bag, "--data", data, "--output", tmp_path / "index")
        assert refused.code == 3
        assert message in refused.err
        assert "canary" not in refused.err
    assert not (tmp_path / "index").exists()


def test_an_index_is_replaced_only_when_asked_and_other_files_never(
    call: Any, bag: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    assert call("encode", bag, "--data", corpus, "--output", folder).code == 0
    before = (folder / "meta.json").read_bytes()
    refused = call("encode", bag, "--data", corpus, "--output", folder, "--index", "HNSW32")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert (folder / "meta.json").read_bytes() == before
    assert call("encode", bag, "--data", corpus, "--output", folder, "--index", "HNSW32", "--overwrite").code == 0
    assert meta_of(folder)["factory"] == "HNSW32"
    (folder / "notes").mkdir()
    (folder / "notes" / "queries.txt").write_text("years of work")
    (folder / "README.md").write_text("mine")
    (folder / "thumbnails.bin").write_bytes(b"of an earlier index")
    assert call("encode", bag, "--data", corpus, "--output", folder, "--overwrite").code == 0
    assert {path.name for path in folder.iterdir()} == FILES | {"notes", "README.md"}
    assert (folder / "notes" / "queries.txt").read_text() == "years of work"
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    other = call("encode", bag, "--data", corpus, "--output", tmp_path / "thesis", "--overwrite")
    assert other.code == 2
    assert "holds other files" in other.err
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error in faiss::write_index: write error in index.faiss: 4 != 8 (No space left on device)"),
        Exception("No space left on device (os error 28)"),
    ],
    ids=["Python", "faiss", "tokenizers"],
)
def test_a_failed_replacement_leaves_the_old_index(
    call: Any, bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder = tmp_path / "index"
    vembed.build_index(bag, corpus, folder)
    before = {name: (folder / name).read_bytes() for name in FILES}

    def full(path: Path) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files, "fsync_path", full)
        refused = call("encode", bag, "--data", corpus, "--output", folder, "--overwrite")
    assert refused.code == 5
    assert "the index can't be written: [Errno 28] No space left on device. Free some space" in refused.err
    assert {name: (folder / name).read_bytes() for name in FILES} == before
    assert f"what is encoded is kept in {tmp_path / '.index.part'}, and the same command continues" in refused.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [".index.part", "index"]
    assert call("search", folder, "apple").code == 0
    monkeypatch.setattr(store._Part, "append", None)  # nothing is encoded again
    done = call("encode", bag, "--data", corpus, "--output", folder, "--overwrite")
    assert (done.code, [path.name for path in tmp_path.iterdir()]) == (0, ["index"]), done.err


def test_an_index_isnt_written_to_through_the_links_that_a_kill_left(
    bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmtree = tmp_path / "index", shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if path.name == ".index.part":
            raise KeyboardInterrupt
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(build.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            vembed.build_index(bag, corpus, folder)
    before = {name: (folder / name).read_bytes() for name in FILES}
    (tmp_path / "other.txt").write_text("one text\n")
    monkeypatch.setattr(store._Part, "append", None)  # the next encoding fails
    with pytest.raises(TypeError):
        vembed.build_index(bag, tmp_path / "other.txt", folder, overwrite=True)
    assert {name: (folder / name).read_bytes() for name in FILES} == before


def test_a_half_built_index_of_an_earlier_version_is_begun_anew(
    bag: Path, corpus: Path, index: Path, tmp_path: Path
) -> None:
    vembed.build_index(bag, corpus, tmp_path / "index")
    part = tmp_path / ".index.part"
    part.mkdir()
    for name in FILES:
        (part / name).hardlink_to(tmp_path / "index" / name)  # that version might be killed with such links
    (part / "journal.jsonl").write_text('{"key": {}}\n')
    other = tmp_path / "other.txt"
    other.write_text("one text\n")
    with pytest.raises(vembed.DataError):
        vembed.build_index(bag, tmp_path / "nothing.txt", tmp_path / "index", overwrite=True)
    for name in FILES:
        assert (tmp_path / "index" / name).read_bytes() == (index / name).read_bytes(), name
    vembed.build_index(bag, other, tmp_path / "index", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "other.txt"]


def test_a_disk_that_fills_up_is_told_as_the_indexs_and_what_is_encoded_stays(
    call: Any, bag: Path, corpus: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 2)
    append, num_rows = store._Part.append, []

    def full(part: store._Part, vectors: Any, **facts: Any) -> None:
        if num_rows:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(part, vectors, **facts)
        num_rows.append(len(vectors))

    words = ("encode", bag, "--data", corpus, "--output", tmp_path / "index")
    with monkeypatch.context() as patch:
        patch.setattr(store._Part, "append", full)
        refused = call(*words)
    assert refused.code == 5
    assert "index: the index can't be written: [Errno 28] No space left on device. Free some space" in refused.err
    assert f"what is encoded is kept in {tmp_path / '.index.part'}, and the same command continues" in refused.out
    done = call(*words)
    assert (done.code, "resuming after what an earlier start encoded" in done.out) == (0, True)
    for name in FILES:
        assert (tmp_path / "index" / name).read_bytes() == (index / name).read_bytes(), name


def test_a_disk_that_is_too_small_is_said_before_encoding(
    bag: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"_id": "long", "text": "many words " * 500}) + "\n" + corpus.read_text())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(store._Part, "append", None)  # nothing is encoded
    with pytest.raises(vembed.MachineError, match="has 1,000 B free, and vectors and index need "):
        vembed.build_index(bag, long, tmp_path / "index")
    monkeypatch.undo()
    vembed.build_index(bag, long, tmp_path / "index")


def test_an_unknown_factory_is_refused_before_encoding(call: Any, bag: Path, corpus: Path, tmp_path: Path) -> None:
    refused = call("encode", bag, "--data", corpus, "--output", tmp_path / "index", "--index", "Flit")
    assert refused.code == 2
    assert "Flit" in refused.err
    assert not (tmp_path / "index").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_encoding_that_a_signal_ends_goes_on_to_the_same_bytes(
    call: Any, bag: Path, tmp_path: Path, number: signal.Signals
) -> None:
    corpus = tmp_path / "big.txt"
    corpus.write_text("\n".join(f"document number {number} about apples and trains" for number in range(100_000)))
    (tmp_path / "out").mkdir()
    words = ("--data", corpus, "--output", tmp_path / "out" / "i")
    process = subprocess.Popen(
        [sys.executable, "-m", "vembed", "encode", bag, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path,
    )  # fmt: skip

    def num_blocks() -> int:
        written = (tmp_path / "out" / ".i.part").glob(".vectors.*.part/blocks.jsonl")
        return max((path.read_text().count("\n") - 1 for path in written), default=0)

    try:
        deadline = 2400
        while num_blocks() < 3 and deadline:
            deadline -= 1
            try:
                process.wait(0.02)
                break
            except subprocess.TimeoutExpired:
                continue
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (75 if number == signal.SIGTERM else -9), err
    assert number == signal.SIGKILL or "what is encoded is kept, and the same command continues" in err
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == [".i.part"]
    done = call("encode", bag, *words)
    assert "resuming after what an earlier start encoded" in done.out
    vembed.build_index(bag, corpus, tmp_path / "whole")
    for name in FILES:
        assert (tmp_path / "out" / "i" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["i"]


def test_cut_texts_are_counted(call: Any, bag: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text(f"short\n{'word ' * 17}\n")
    done = call("encode", bag, "--data", path, "--output", tmp_path / "index")
    assert "1 texts are longer than the 16 tokens" in done.out
    assert meta_of(tmp_path / "index")["num_truncated"] == 1


def test_what_a_crash_between_two_renames_left_comes_back_before_the_next_replacement(tmp_path: Path) -> None:
    output, old = tmp_path / "index", tmp_path / ".index.old"
    for crashed in ("before the second rename", "before the entries of others moved"):
        old.mkdir()
        (old / "meta.json").write_text("old")
        (old / "mine.txt").write_text(crashed)
        if crashed != "before the second rename":
            (output / "mine.txt").unlink()
        with files.new_folder(output, keeps={"mine.txt"}.__contains__) as folder:
            (folder / "meta.json").write_text("new")
        assert {path.name: path.read_text() for path in output.iterdir()} == {"meta.json": "new", "mine.txt": crashed}
        assert [path.name for path in tmp_path.iterdir()] == ["index"]
