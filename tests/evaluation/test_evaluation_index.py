"""The FAISS search: equal to an exact search in torch and in numpy, and strict about what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from vembed.errors import ConfigError, NonFiniteError, PreemptedError
from vembed.vectors import index
from vembed.vectors.index import build_index, search, search_index

if TYPE_CHECKING:
    from numpy.typing import NDArray


def vectors(rows: int, dim: int = 16, *, seed: int = 0) -> NDArray[np.float32]:
    table = np.random.default_rng(seed).normal(size=(rows, dim))
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    return table.astype(np.float32)


def torch_search(
    documents: NDArray[np.float32], queries: NDArray[np.float32], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    best = (torch.from_numpy(queries).double() @ torch.from_numpy(documents).double().T).topk(k, dim=1)
    return best.values, best.indices


@pytest.mark.parametrize("query_batch", [1, 7, 1024])
def test_the_flat_index_equals_an_exact_search_in_torch_and_numpy(
    query_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "SLICE_ROWS", 64)  # 300 documents are added in 5 slices, the last one short
    documents, queries = vectors(300), vectors(33, seed=1)
    scores, rows = search(documents, queries, k=10, query_batch=query_batch)
    reference_scores, reference_rows = torch_search(documents, queries, 10)
    np.testing.assert_array_equal(rows, reference_rows.numpy())
    np.testing.assert_array_equal(rows, np.argsort(-(queries.astype(np.float64) @ documents.T), axis=1)[:, :10])
    np.testing.assert_allclose(scores, reference_scores.numpy(), rtol=1e-5, atol=1e-6)
    assert (str(scores.dtype), str(rows.dtype)) == ("float32", "int64")
    assert rows.max() > 255  # the last slice takes part


@pytest.mark.parametrize(("rows", "queries", "k"), [(3000, 33, 101), (3000, 5, 10), (300, 1, 300)])
def test_the_exact_search_is_that_of_a_flat_index_without_its_copy(
    rows: int, queries: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, asked = vectors(rows), vectors(queries, seed=1)
    documents[rows // 2] = documents[7]  # a tie
    wanted = search_index(build_index(documents, "Flat"), asked, k=k)
    monkeypatch.delattr(index, "build_index")
    for got, want in zip(search(documents, asked, k=k), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_vectors_are_not_normalised_behind_the_callers_back() -> None:
    documents = np.array([[1, 0], [3, 0]], dtype=np.float32)
    scores, rows = search(documents, np.array([[2, 0]], dtype=np.float32), k=2)
    assert (scores.tolist(), rows.tolist()) == ([[6.0, 2.0]], [[1, 0]])


def test_any_memory_layout_gives_the_same_hits() -> None:
    documents, queries = vectors(50), vectors(5, seed=1)
    expected = search(documents, queries, k=3)
    for got, want in zip(search(np.asfortranarray(documents), queries[::-1][::-1], k=3), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_k_over_the_corpus_is_clipped_and_every_document_is_ranked_once() -> None:
    scores, rows = search(vectors(4), vectors(3, seed=1), k=10)
    assert scores.shape == rows.shape == (3, 4)
    assert [sorted(row) for row in rows.tolist()] == [[0, 1, 2, 3]] * 3


def test_no_queries_give_no_hits() -> None:
    scores, rows = search(vectors(4), vectors(4)[:0], k=2)
    assert scores.shape == rows.shape == (0, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["document", "query"])
def test_a_vector_that_is_not_finite_is_refused_and_counted(
    side: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "SLICE_ROWS", 8)
    tables = {"document": vectors(30), "query": vectors(30, seed=1)}
    search(tables["document"], tables["query"], k=5)
    tables[side][[3, 9, 10, 11, 20, 29], 2] = value
    with pytest.raises(NonFiniteError, match=rf"^6 of 30 {side} vectors .* \(rows 3, 9, 10, 11, 20, \.\.\.\)"):
        search(tables["document"], tables["query"], k=5)


@pytest.mark.parametrize("factory", ["IVF4,Flat", "HNSW16", "SQ8"])
def test_an_approximate_index_is_trained_and_finds_most_of_the_same(factory: str) -> None:
    documents = vectors(400, 8)
    _, rows = search(documents, documents[:100], k=1, factory=factory)
    assert np.mean(rows[:, 0] == np.arange(100)) > 0.9


def test_an_index_that_finds_fewer_fills_up_with_row_minus_one() -> None:
    _, rows = search(vectors(60, 8), vectors(5, 8, seed=1), k=60, factory="IVF4,Flat")
    assert (rows == -1).any()
    assert (rows[:, 0] >= 0).all()


@pytest.mark.parametrize(("factory", "reason"), [("Flatt", "could not parse"), ("IVF512,Flat", "training points")])
def test_an_index_that_faiss_cannot_build_is_a_config_error_naming_it(factory: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{factory}' for 100 documents of 16 dimensions: .*{reason}"):
        search(vectors(100), vectors(2), k=5, factory=factory)
    search(vectors(100), vectors(2), k=5, factory=factory.replace("Flatt", "Flat").replace("512", "2"))


def test_poll_is_called_before_each_batch_of_queries_and_may_stop_the_search() -> None:
    calls = 0

    def poll() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise PreemptedError("stop")

    search(vectors(20), vectors(30), k=5, query_batch=10, poll=poll)
    assert calls == 3
    with pytest.raises(PreemptedError):
        search(vectors(20), vectors(30), k=5, query_batch=10, poll=poll)


@pytest.mark.parametrize(
    ("documents", "queries", "k"),
    [((5, 4), (2, 3), 1), ((5,), (2, 4), 1), ((0, 4), (2, 4), 1), ((5, 4), (2, 4), 0)],
)
def test_shapes_that_do_not_fit_are_refused(documents: tuple[int, ...], queries: tuple[int, ...], k: int) -> None:
    with pytest.raises(ValueError):
        search(np.ones(documents, dtype=np.float32), np.ones(queries, dtype=np.float32), k=k)
    search(np.ones((5, 4), dtype=np.float32), np.ones((2, 4), dtype=np.float32), k=1)


def test_ties_at_the_cut_are_settled_by_rank_whatever_faiss_keeps() -> None:
    """Coordinates are small whole numbers, so that many scores tie exactly."""
    draw = np.random.default_rng(0)
    documents = draw.integers(-1, 2, size=(400, 6)).astype(np.float32)
    queries = draw.integers(-1, 2, size=(60, 6)).astype(np.float32)
    ranks = draw.permutation(400)
    scores, rows = search(documents, queries, k=10, tie_ranks_D=ranks)
    exact = queries @ documents.T
    expected = np.array([np.lexsort((ranks, -each))[:10] for each in exact])
    assert [set(row) for row in rows.tolist()] == [set(row) for row in expected.tolist()]
    np.testing.assert_array_equal(scores, np.take_along_axis(exact, expected, axis=1))
    np.testing.assert_array_equal(np.take_along_axis(exact, rows, axis=1), scores)
    _, unsettled = search(documents, queries, k=10)
    assert [set(row) for row in unsettled.tolist()] != [set(row) for row in expected.tolist()], "the test can fail"
    for k in (399, 400, 500):
        whole = search(documents, queries, k=k, tie_ranks_D=ranks)[1]
        assert [set(row) for row in whole.tolist()] == [set(np.lexsort((ranks, -each))[:k].tolist()) for each in exact]


def test_equal_vectors_tie_wherever_they_stand() -> None:
    documents, queries = vectors(501, 96), vectors(40, 96, seed=1)
    documents[::7] = documents[3]
    queries[:] = documents[3]
    ranks = np.random.default_rng(2).permutation(501)
    for k in (1, 5, 50):
        _, rows = search(documents, queries, k=k, tie_ranks_D=ranks)
        copies = np.flatnonzero((documents == documents[3]).all(axis=1))
        expected = copies[np.argsort(ranks[copies])][:k]
        assert [sorted(row) for row in rows.tolist()] == [sorted(expected.tolist())] * 40
