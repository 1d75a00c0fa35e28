"""An index of several vectors for each document: exact MaxSim over all, or over what an approximate index finds."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.late_models import write_bert
from kit.text_models import load_any
from search_cases import DOCUMENTS, FILES, meta_of

import vembed
from vembed.errors import NonFiniteError, PreemptedError
from vembed.pages.text import bytes_text
from vembed.vectors import index, store

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Ragged

CORPUS = {f"d{number}": text for number, text in enumerate(
    f"{verb} {what}, {where}!" for verb in ("sort", "read", "grow") for what in ("a list", "trees", "the train leaves")
    for where in ("in place", "at noon", "x"))}  # fmt: skip
QUERIES = ("sort a list", "trees at noon", "the train")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("several")
    keys = {"pooling_method": "none", "projection_dim": 16, "query_length": 16}
    load_any(write_bert(root / "bert"), **keys).save(root / "model")
    return root / "model"


@pytest.fixture(scope="module")
def several(model: Path) -> Path:
    corpus = model.parent / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in CORPUS.items()))
    vembed.build_index(model, corpus, model.parent / "index")
    return model.parent / "index"


def by_hand(model: Path) -> NDArray[np.float32]:
    loaded = vembed.load(model)
    documents, queries = (
        loaded.encode_multi_vector(CORPUS.values(), "document"),
        loaded.encode_multi_vector(QUERIES, "query"),
    )
    return np.array([[(q @ d.T).max(axis=1).sum() for d in documents] for q in queries], dtype=np.float32)


def test_a_search_ranks_by_maxsim_over_all_documents(model: Path, several: Path) -> None:
    wanted = by_hand(model)
    found = vembed.open_index(several).search(QUERIES, k=len(CORPUS))
    for scores, hits in zip(wanted, found, strict=True):
        order = np.argsort(-scores, kind="stable")
        assert [hit.row for hit in hits] == order.tolist()
        np.testing.assert_allclose([hit.score for hit in hits], scores[order], rtol=1e-5)
    names = {path.name for path in several.iterdir()}
    assert names == (FILES - {"index.faiss"}) | {"offsets.npy"}
    meta = meta_of(several)
    assert (meta["format_version"], meta["num_documents"]) == (3, len(CORPUS))
    vectors = np.load(several / "vectors.npy")
    assert vectors.shape == (meta["num_vectors"], 16)
    assert np.load(several / "offsets.npy")[-1] == meta["num_vectors"] > 3 * len(CORPUS)


def test_the_vectors_of_an_index_are_checked_when_it_is_opened_and_not_at_each_query(
    several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = [], index.check_finite
    monkeypatch.setattr(index, "check_finite", lambda rows, what: (checked.append(what), check(rows, what)))
    opened = vembed.open_index(several)
    assert checked.count("document") == 1
    for query in QUERIES:
        opened.search([query])
    assert checked.count("document") == 1
    assert checked.count("query") == len(QUERIES)
    folder = shutil.copytree(several, tmp_path / "index")
    vectors = np.load(folder / "vectors.npy", mmap_mode="r+")
    vectors[3, 0] = np.nan
    vectors.flush()
    (folder / "checksums.json").unlink()  # as in an index of an earlier version, or of another program
    with pytest.raises(NonFiniteError, match=r"document vectors hold NaN or infinity \(rows 3\)"):
        vembed.open_index(folder)


@pytest.mark.parametrize("factory", ["HNSW32", "IVF4,Flat:nprobe=4"])
def test_candidates_of_an_approximate_index_are_scored_exactly(
    model: Path, several: Path, tmp_path: Path, factory: str
) -> None:
    vembed.build_index(model, several.parent / "corpus.jsonl", tmp_path / "index", index=factory)
    exact, found = (vembed.open_index(folder).search(QUERIES, k=3) for folder in (several, tmp_path / "index"))
    assert [[hit.id for hit in hits] for hits in found] == [[hit.id for hit in hits] for hits in exact]
    for one, other in zip(exact, found, strict=True):
        np.testing.assert_allclose([hit.score for hit in one], [hit.score for hit in other], rtol=1e-6)
    assert (tmp_path / "index" / "index.faiss").is_file()


def test_documents_like_one_begin_with_itself(several: Path) -> None:
    assert vembed.open_index(several).like(4, k=2)[0].row == 4


def test_the_commands_encode_and_search(call: Any, model: Path, several: Path, tmp_path: Path) -> None:
    done = call("encode", model, "--data", several.parent / "corpus.jsonl", "--output", tmp_path / "index")
    size = bytes_text(4 * meta_of(several)["num_vectors"] * 16)
    assert (done.code, f" a document, {size}), 16 dimensions" in done.out) == (0, True)
    assert [path.read_bytes() for path in sorted(several.iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "index").iterdir())
    ]
    found = json.loads(call("search", tmp_path / "index", QUERIES[0], "--json", "-k", "2").out)
    assert [hit["rank"] for hit in found["hits"]] == [1, 2]
    assert found["hits"][0]["score"] == pytest.approx(by_hand(model)[0].max(), rel=1e-5)


def test_broken_offsets_and_another_reading_of_the_model_are_refused(
    model: Path, several: Path, tmp_path: Path
) -> None:
    vembed.build_index(model, several.parent / "corpus.jsonl", tmp_path / "index")
    with pytest.raises(vembed.ConfigError, match="another vector for its first document"):
        vembed.open_index(tmp_path / "index", model=model, topk_tokens=2)
    starts = np.load(tmp_path / "index" / "offsets.npy")
    starts[1] = 0
    np.save(tmp_path / "index" / "offsets.npy", starts)
    with pytest.raises(vembed.ConfigError, match=r"offsets\.npy is damaged"):
        vembed.open_index(tmp_path / "index")
    (tmp_path / "index" / "checksums.json").unlink()  # as in an index of an older version
    with pytest.raises(vembed.ConfigError, match=r"offsets\.npy is broken"):
        vembed.open_index(tmp_path / "index")


def test_an_encoding_of_several_vectors_that_was_stopped_or_damaged_goes_on_to_the_same_bytes(
    model: Path, several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 4)
    corpus, append, lengths = several.parent / "corpus.jsonl", store._Part.append, []
    vembed.build_index(model, corpus, tmp_path / "whole")

    def appending(part: store._Part, vectors: Ragged, **facts: Any) -> None:
        if len(lengths) == 3:
            raise PreemptedError("stopped")
        append(part, vectors, **facts)
        lengths.append(len(vectors.lengths))

    monkeypatch.setattr(store._Part, "append", appending)
    with pytest.raises(PreemptedError):
        vembed.build_index(model, corpus, tmp_path / "index")
    [part] = (tmp_path / ".index.part").glob(".vectors.*.part")
    lines = (part / "blocks.jsonl").read_bytes()
    (part / "blocks.jsonl").write_bytes(lines[:-5])  # in the third block
    lengths[:] = [0] * 4
    vembed.build_index(model, corpus, tmp_path / "index")
    assert lengths[4:] == [4] * 4 + [3], "27 documents, of which two blocks were there"
    names = (FILES - {"index.faiss"}) | {"offsets.npy"}
    assert {path.name for path in (tmp_path / "index").iterdir()} == names
    for name in names:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_options_of_late_interaction_are_kept_with_an_index(model: Path, several: Path, tmp_path: Path) -> None:
    vembed.build_index(vembed.load(model, topk_tokens=3), several.parent / "corpus.jsonl", tmp_path / "index")
    assert meta_of(tmp_path / "index")["model_options"] == {"topk_tokens": 3}
    index = vembed.open_index(tmp_path / "index")
    assert {len(index.index.vector(row)) for row in range(len(CORPUS))} == {3}


@pytest.mark.parametrize("form", ["parquet", "lancedb"])
def test_a_table_of_several_vectors_is_refused_before_anything_is_encoded(
    model: Path, several: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "lancedb":
        pytest.importorskip("lancedb", reason="the extra lancedb isn't installed: pip install 'vembed[lancedb]'")
    monkeypatch.setattr("vembed.workflows.search.build._write_files", None)
    with pytest.raises(vembed.ConfigError, match=f"a {form} table holds one vector for each document"):
        vembed.build_index(
            model, several.parent / "corpus.jsonl", tmp_path / ("v" + ".parquet" * (form == "parquet")), format=form
        )  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_several_vectors_are_not_rescored(call: Any, several: Path) -> None:
    with pytest.raises(vembed.ConfigError, match=r"several vectors .* leave rescored out"):
        vembed.open_index(several, rescored=4)
    refused = call("search", several, "trees", "--rescore", 2)
    assert (refused.code, "leave --rescore" in refused.err) == (2, True)


def test_an_index_of_one_vector_stays_what_programs_before_read(index: Path) -> None:
    meta = meta_of(index)
    assert meta["format_version"] == 2
    assert "num_vectors" not in meta
    assert len(vembed.open_index(index)) == len(DOCUMENTS)


def test_a_model_of_several_vectors_says_where_one_is_needed(model: Path, bag: Path) -> None:
    with pytest.raises(vembed.ConfigError, match="encode_multi_vector returns them"):
        vembed.load(model).encode(["a"], "query")
    [one] = vembed.load(bag).encode_multi_vector(["a"], "query")
    np.testing.assert_array_equal(one, vembed.load(bag).encode(["a"], "query"))
    assert vembed.load(model).encode_multi_vector([], "query") == []
