"""Indexes that an earlier version wrote are opened and searched; their files lie in indexes_of_before/."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vembed.batch import Ragged
from vembed.workflows.search.index import SearchIndex

FOLDERS = sorted((Path(__file__).parent / "indexes_of_before").iterdir())


def test_each_kind_of_index_is_there() -> None:
    kinds = {(json.loads((folder / "meta.json").read_text())["factory"], folder.name) for folder in FOLDERS}
    assert kinds == {
        ("Flat", "flat"), ("HNSW4", "hnsw"), ("binary", "binary"), ("int8", "int8"), ("Flat", "several"),
    }  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_index_of_before_finds_each_document_by_its_vector(folder: Path) -> None:
    index = SearchIndex(folder)
    assert [index.document(row).id for row in range(len(index))] == ["d1", "d2", "d3"]
    for row in range(len(index)):
        vector = index.vector(row)
        several = folder.name == "several"
        query = Ragged(vector, np.array([0, len(vector)])) if several else vector[None]
        hits = index.search(query, k=3)[0]
        assert hits[0].row == row
        assert hits[0].score == pytest.approx(len(vector) if several else 1.0, abs=1e-5), "unit vectors"
        documents = [np.atleast_2d(index.vector(other)) for other in range(len(index))]
        scores = sorted(((np.atleast_2d(vector) @ d.T).max(axis=1).sum() for d in documents), reverse=True)
        assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-5), "ranked by the full vectors"
