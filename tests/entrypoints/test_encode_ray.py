"""Encoding on workers of Ray gives what one process gives."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from search_cases import write_corpus

import vembed
from vembed.errors import ConfigError, DataError
from vembed.plugins.ray import encode_with_ray
from vembed.workflows.search.build import DocumentSpans, Written
from vembed.workflows.search.output import PARQUET
from vembed.workflows.search.tables import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORDS = ("apple", "train", "list", "river", "lamp", "noon", "pie", "green", "sort", "tree", "fox", "leaves")
MANY = {f"d{n}": " ".join(WORDS[(n * k + k) % 12] for k in range(1 + n % 20)) for n in range(2000)}


def test_what_ray_cannot_do_is_refused(
    call: Any, bag: Path, clip: Path, balls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    words = ("encode", bag, "--data", corpus, "--output", tmp_path / "index")
    assert "--ray-workers is for --ray" in call(*words, "--ray-workers", 2).err
    assert "--ray-workers: must be >= 1, got 0" in call(*words, "--ray", "--ray-workers", 0).err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        missing = call(*words, "--ray")
    assert (missing.code, 'pip install "vembed[ray]"' in missing.err) == (2, True)
    with pytest.raises(ConfigError, match=r"ray encodes texts, and .* has 4 pictures"):
        vembed.build_index(clip, balls, tmp_path / "pictures", ray="")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_slices_are_found_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a\nbb\nccc\n")
    spans = DocumentSpans(tmp_path / "lines", Written(0, [2, 3], [0, 0], ()))
    assert [spans.take(np.array(rows)) for rows in ([0, 1], [2])] == [[(0, 5)], [(5, 9)]]
    assert spans.take(np.array([0, 1, 2])) == [(0, 9)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="the extra ray isn't installed: pip install 'vembed[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_two_workers_make_the_table_of_one_process(
    call: Any, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vembed.workflows.search.build.SLICE_ROWS", 256)
    many = write_corpus(tmp_path / "many.jsonl", MANY)
    meta = vembed.build_index(bag, many, tmp_path / "one")
    assert meta.num_truncated == 400
    done = call("encode", bag, "--data", many, "--output", tmp_path / "two.parquet", "--ray", "--ray-workers", 2)
    assert done.code == 0, done.err
    assert "2,000 documents, 64 dimensions, Parquet" in done.out
    assert "400 texts are longer" in done.out
    one, two = vembed.open_index(tmp_path / "one"), vembed.open_index(tmp_path / "two.parquet")
    assert [two.index.document(row) for row in range(2000)] == [one.index.document(row) for row in range(2000)]
    assert two.search(["apple trees", "noon"], 20) == one.search(["apple trees", "noon"], 20)
    table = unpacked(tmp_path / "two.parquet", PARQUET)
    ours, theirs = (np.load(folder / "vectors.npy") for folder in (tmp_path / "one", table))
    np.testing.assert_allclose(theirs, ours, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_dies_is_started_again_and_an_error_is_told_as_ours(tmp_path: Path) -> None:
    documents, died = tmp_path / "ids.jsonl", tmp_path / "died"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "bb", "ccc", "refused")))
    refusal = DataError("a row of ours")

    def make() -> Any:  # in here, so that a worker needs no file of the tests
        def encode(items: list[str], side: str) -> Any:
            if items == ["bb"] and not died.exists():
                died.touch()
                os._exit(1)
            if items == ["refused"]:
                raise refusal
            return np.array([[len(items[0])]], np.float32)

        encode.num_truncated = {"document": 0}  # type: ignore[attr-defined]
        return encode

    spans = [(0, 14), (14, 29), (29, 45), (45, 65)]
    found = encode_with_ray(num_workers=2)(make, documents, spans, "document", lambda: None)
    assert [next(found).vectors.tolist() for _ in range(3)] == [[[1.0]], [[2.0]], [[3.0]]]
    with pytest.raises(DataError, match=r"^a row of ours$"):
        next(found)
    assert died.exists()
