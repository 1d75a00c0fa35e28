"""Rows of several vectors: exact MaxSim equals a double loop, alone and on two ranks, in a benchmark too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from vembed.batch import Features, Ragged, texts_of
from vembed.data.judged import RetrievalData
from vembed.distributed.ranks import Ranks
from vembed.errors import ConfigError, NonFiniteError, PreemptedError
from vembed.evaluation.benchmark.variants import REFERENCE, build_searcher, check_model, plan_variants, time_queries
from vembed.evaluation.evaluate import EvaluationOptions, evaluate
from vembed.evaluation.graded import GradedPairs
from vembed.models.encoder import Encoder
from vembed.vectors import index
from vembed.vectors.encode import ItemEncoder, encoding_budget
from vembed.vectors.index import search_maxsim

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kit.ranks import RankPool
    from numpy.typing import NDArray

    from vembed.batch import Item, Side

DIM = 5


class Letters(Encoder):
    """Each letter of a text is a vector: several for each row, as many as it has letters."""

    multi_vector = True

    def __init__(self) -> None:
        super().__init__()
        self.name, self.dimension, self.max_length = "letters", DIM, None
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Embedding.from_pretrained(torch.randn(256, DIM, generator=generator))

    @classmethod
    def load(cls, files: Any, texts: Iterable[str] = ()) -> Letters:
        raise AssertionError

    def towers(self) -> Any:
        return ()

    def featurize(self, items: Sequence[Item], side: Side) -> Features:
        letters = Ragged.from_rows([list(text.encode()) for text in texts_of(items)])
        return Features({"letters": letters}, letters.lengths)

    def num_vectors(self, features: Features) -> NDArray[np.int64]:
        return features.lengths

    def collate(self, features: Features, rows: NDArray[np.int64], width: int) -> dict[str, torch.Tensor]:
        return {"letters": torch.from_numpy(features.columns["letters"].take(rows).values.astype(np.int64))}

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.normalize(self.table(inputs["letters"]), dim=-1)

    def save(self, folder: object) -> None:
        raise AssertionError

    def describe(self) -> dict[str, str]:
        return {}


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
    with pytest.raises(ConfigError, match="an index holds one vector per row"):
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
    with pytest.raises(ConfigError, match="letters gives several vectors for each row: training and"):
        encoder_of().table(["a"], "query")
    check_model((REFERENCE,), "letters", Letters())
    with pytest.raises(ConfigError, match="--dims, --quantize, --index: letters gives several vectors"):
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
