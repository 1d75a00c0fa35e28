"""Exact search, of one vector a row or of several by MaxSim: equal to plain loops, strict about what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from kit.bare_encoder import BareEncoder

from vembed.batch import Features, Ragged, texts_of
from vembed.data.judged import RetrievalData
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, NonFiniteError, PreemptedError
from vembed.evaluation.benchmark.variants import REFERENCE, build_searcher, check_model, plan_variants, time_queries
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.graded import GradedPairs
from vembed.vectors import index
from vembed.vectors.encode import ItemEncoder, encoding_budget
from vembed.vectors.index import build_index, read_faiss, search, search_index, search_maxsim, write_faiss

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kit.ranks import RankPool
    from numpy.typing import NDArray

    from vembed.batch import Item, Side


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
    assert [found.shape for found in search(vectors(4), vectors(4)[:0], k=2)] == [(0, 2)] * 2, "of no queries"


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


def test_an_approximate_index_is_trained_and_finds_most_of_the_same() -> None:
    documents = vectors(400, 8)
    for factory in ("IVF4,Flat", "HNSW16", "SQ8"):
        _, rows = search(documents, documents[:100], k=1, factory=factory)
        assert np.mean(rows[:, 0] == np.arange(100)) > 0.9, factory
    _, rows = search(vectors(60, 8), vectors(5, 8, seed=1), k=60, factory="IVF4,Flat")
    assert (rows == -1).any(), "where it finds fewer"
    assert (rows[:, 0] >= 0).all()


@pytest.mark.parametrize("factory", ["IVF16,Flat:nprobe=8", "IVF16,Flat:nprobe=8,max_codes=40", "HNSW8:efSearch=4"])
def test_an_index_that_is_read_back_searches_as_the_one_that_was_written(factory: str, tmp_path: Path) -> None:
    documents, queries, path = vectors(1000), vectors(50, seed=1), tmp_path / "index.faiss"
    built = build_index(documents, factory)
    write_faiss(built, path)
    rows = search_index(built, queries, k=10)[1]
    np.testing.assert_array_equal(search_index(read_faiss(path, factory), queries, k=10)[1], rows)
    plain = build_index(documents, factory.partition(":")[0])
    assert (search_index(plain, queries, k=10)[1] != rows).any(), "the settings matter"


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


# --- rows of several vectors


DIM = 5


class Letters(BareEncoder):
    """Each letter of a text is a vector: several for each row, as many as it has letters."""

    multi_vector = True

    def __init__(self) -> None:
        super().__init__(DIM)
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Embedding.from_pretrained(torch.randn(256, DIM, generator=generator))

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        letters = Ragged.from_rows([list(text.encode()) for text in texts_of(items)])
        return Features({"letters": letters}, letters.lengths)

    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        return features.lengths

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, torch.Tensor]:
        return {"letters": torch.from_numpy(features.columns["letters"].take(rows).values.astype(np.int64))}

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.normalize(self.table(inputs["letters"]), dim=-1)


TASK = RetrievalData(
    name="words",
    queries={"q1": "cat", "q2": "horse", "q3": "a dog and a bird"},
    documents={
        str(number): word for number, word in enumerate(["arc", "shore", "catch", "dog", "bird dog", "x", "zy"])
    },
    qrels={"q1": {"2": 1}, "q2": {"1": 1}, "q3": {"4": 1}},
)


def encoder_of(ranks: Ranks | None = None) -> ItemEncoder:
    encoder, device = Letters(), torch.device("cpu")
    return ItemEncoder(encoder, encoding_budget(encoder, device, 3), device, ranks=ranks or Ranks())


def random_rows(seed: int, counts: Sequence[int]) -> Ragged:
    values = np.random.default_rng(seed).standard_normal((sum(counts), DIM)).astype(np.float32)
    return Ragged(values, np.concatenate([[0], np.cumsum(counts)]))


def by_double_loop(documents: Ragged, queries: Ragged) -> NDArray[np.float64]:
    def rows(ragged: Ragged) -> list[NDArray[np.float64]]:
        return np.split(ragged.values.astype(np.float64), ragged.offsets[1:-1])

    return np.array([[(q @ d.T).max(axis=1).sum() for d in rows(documents)] for q in rows(queries)])


@pytest.mark.parametrize("merged", [1, 3, 2048])
@pytest.mark.parametrize(("query_vectors", "document_vectors"), [(1024, 4096), (1, 1), (4, 7)])
def test_scores_and_ranks_equal_a_double_loop(
    query_vectors: int, document_vectors: int, merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MERGED_DOCUMENTS", merged)
    monkeypatch.setattr(index, "QUERY_VECTORS", query_vectors)
    monkeypatch.setattr(index, "DOCUMENT_VECTORS", document_vectors)
    documents, queries = random_rows(0, [3, 1, 9, 2, 2, 5, 1, 4]), random_rows(1, [1, 4, 2, 6])
    wanted = by_double_loop(documents, queries)
    scores_Qk, rows_Qk = search_maxsim(documents, queries, k=5)
    order = np.argsort(-wanted, axis=1)[:, :5]
    np.testing.assert_array_equal(rows_Qk, order)
    np.testing.assert_allclose(scores_Qk, np.take_along_axis(wanted, order, axis=1), rtol=1e-5)
    assert search_maxsim(documents, queries, k=100)[1].shape == (4, 8)


def test_graded_pairs_are_as_similar_as_a_search_finds_them() -> None:
    queries, documents, encode = list(TASK.queries.values()), list(TASK.documents.values()), encoder_of()
    query_P, document_P = np.divmod(np.arange(len(queries) * len(documents)), len(documents))
    pairs = GradedPairs("words", "grade", queries, documents, query_P, document_P, np.zeros(len(query_P)))
    vectors = encode(documents, "document"), encode(queries, "query")
    assert isinstance(vectors[0], Ragged)
    assert isinstance(vectors[1], Ragged)
    np.testing.assert_allclose(pairs.similarities(encode), by_double_loop(*vectors).ravel(), rtol=1e-5)


def test_of_equal_scores_the_first_document_is_kept_whatever_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Ragged(np.ones((6, DIM), dtype=np.float32), np.arange(7))
    queries = random_rows(1, [2])
    for block in (1, 2, 100):
        monkeypatch.setattr(index, "DOCUMENT_VECTORS", block)
        monkeypatch.setattr(index, "MERGED_DOCUMENTS", block)
        assert search_maxsim(documents, queries, k=3)[1].tolist() == [[0, 1, 2]]


def test_what_cannot_be_searched_is_refused() -> None:
    rows = random_rows(0, [2, 3])
    bad = Ragged(np.where(np.arange(5)[:, None] == 1, np.nan, rows.values), rows.offsets)
    with pytest.raises(NonFiniteError, match="1 of 5 document vectors"):
        search_maxsim(bad, rows, k=1)
    with pytest.raises(ValueError, match="query row 1 has no vector"):
        search_maxsim(rows, Ragged(rows.values, np.array([0, 5, 5])), k=1)

    def poll() -> None:
        raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        search_maxsim(rows, rows, k=1, poll=poll)


def test_documents_are_checked_once_and_queries_at_each_search(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = [], index.check_finite
    monkeypatch.setattr(index, "check_finite", lambda rows, what: (checked.append(what), check(rows, what)))
    documents, queries = random_rows(0, [3, 1, 2]), random_rows(1, [2, 1])
    searcher = build_searcher(documents, REFERENCE)
    for _ in range(3):
        np.testing.assert_array_equal(searcher.search(queries, k=2), search_maxsim(documents, queries, k=2))
    assert checked.count("query") == 6
    assert checked.count("document") == 1 + 3
    bad = Ragged(np.where(np.arange(3)[:, None] == 1, np.inf, queries.values), queries.offsets)
    with pytest.raises(NonFiniteError, match="1 of 3 query vectors"):
        searcher.search(bad, k=1)
    with pytest.raises(NonFiniteError, match="1 of 3 document vectors"):
        build_searcher(bad, REFERENCE)


def wanted_run() -> dict[str, list[str]]:
    encode = encoder_of()
    documents, queries = encode(list(TASK.documents.values()), "document"), encode(list(TASK.queries.values()), "query")
    assert isinstance(documents, Ragged)
    assert isinstance(queries, Ragged)
    assert documents.lengths.tolist() == [len(text) for text in TASK.documents.values()]  # type: ignore[arg-type]
    order = np.argsort(-by_double_loop(documents, queries), axis=1, kind="stable")
    names = list(TASK.documents)
    return {query: [names[row] for row in rows] for query, rows in zip(TASK.queries, order, strict=True)}


def test_an_encoder_of_several_vectors_is_evaluated_by_maxsim() -> None:
    result = evaluate(encoder_of(), TASK, EvaluationOptions(system="letters"))
    assert {query: [document for document, _ in hits] for query, hits in result.run.items()} == wanted_run()
    assert result.metrics["hit@1"] > 0
    with pytest.raises(ConfigError):
        evaluate(encoder_of(), TASK, EvaluationOptions(system="letters", index_factory="HNSW32"))


def vectors_of_a_rank(rank: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    texts = [text for text in TASK.documents.values() for _ in range(3)]
    vectors = encoder_of(Ranks.of_this_process())(texts, "document")
    assert isinstance(vectors, Ragged)
    return vectors.values, vectors.offsets


def test_the_first_of_two_ranks_has_the_vectors_of_one(two_ranks: RankPool) -> None:
    texts = [text for text in TASK.documents.values() for _ in range(3)]
    alone = encoder_of()(texts, "document")
    assert isinstance(alone, Ragged)
    values, offsets = two_ranks.run(vectors_of_a_rank)[0]
    np.testing.assert_array_equal(offsets, alone.offsets)
    np.testing.assert_array_equal(values, alone.values)


def test_who_holds_one_vector_for_each_row_refuses_several() -> None:
    with pytest.raises(ConfigError, match="letters"):
        encoder_of().table(["a"], "query")
    check_model((REFERENCE,), "letters", Letters())
    with pytest.raises(ConfigError, match="--dims"):
        check_model(plan_variants(dims=(2,)), "letters", Letters())


def test_a_benchmark_times_and_counts_maxsim() -> None:
    encode = encoder_of()
    documents, queries = encode(list(TASK.documents.values()), "document"), encode(list(TASK.queries.values()), "query")
    searcher = build_searcher(documents, REFERENCE)
    letters = sum(len(text) for text in TASK.documents.values())  # type: ignore[arg-type,misc]
    assert searcher.bytes_per_document == pytest.approx(4 * DIM * letters / len(TASK.documents))
    timing = time_queries(searcher, queries, k=3)
    assert timing.p50 > 0
    assert timing.num_timed == len(TASK.queries)
