"""Cheaper forms of vectors: equal to plain numpy, refused where they can't be, and their cost told truly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import faiss
import numpy as np
import pytest

from vembed.errors import ConfigError
from vembed.evaluation.benchmark.variants import (
    REFERENCE,
    build_searcher,
    check_model,
    check_sizes,
    plan_variants,
    size_note,
    time_queries,
    truncated,
)
from vembed.models.tables import NgramBag, NgramBagConfig
from vembed.vectors.index import codes_per_dimension, scales_per_dimension

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.evaluation.benchmark.variants import Variant


def unit(rows: int, dim: int, *, seed: int = 0) -> NDArray[np.float32]:
    table = np.random.default_rng(seed).normal(size=(rows, dim))
    table[:, 0] += 1.5  # dimensions of unlike spread and mean, as real embeddings have
    table[:, 1] *= 0.05
    return (table / np.linalg.norm(table, axis=1, keepdims=True)).astype(np.float32)


def model_of(dimension: int) -> NgramBag:
    return NgramBag(NgramBagConfig(dimension=dimension, buckets=16))


def form(**wanted: object) -> Variant:
    """Return the variant with the given attributes."""
    variants = plan_variants(dims=(12, 8), precisions=("int8", "binary"), indexes=("HNSW32", "IVF4,Flat:nprobe=4"))
    (found,) = [
        each
        for each in variants
        if all(getattr(each, name) == value for name, value in ({"dimension": None} | wanted).items())
    ]
    return found


def test_the_plan_crosses_dims_with_precisions_and_adds_the_indexes() -> None:
    names = [each.name for each in plan_variants(dims=(64, 128, 64), precisions=("int8",), indexes=("HNSW32", "Flat"))]
    assert names == ["exact", "int8", "128 dims", "128 dims, int8", "64 dims", "64 dims, int8", "HNSW32"]
    assert plan_variants() == (REFERENCE,)
    folders = [each.folder for each in plan_variants(indexes=("IVF4,Flat", "IVF4_Flat", "PQ8"))]
    assert len(set(folders)) == 4  # two index strings that make the same folder name are kept apart
    with pytest.raises(ConfigError):
        plan_variants(dims=(0,))


@pytest.mark.parametrize("dim", [12, 20, 64, 256])  # FAISS takes other code for multiples of 8 and 16
def test_truncated_vectors_are_those_of_numpy(dim: int) -> None:
    documents, queries = unit(300, dim), unit(20, dim, seed=1)
    kept = documents[:, :8].astype(np.float64)
    kept /= np.linalg.norm(kept, axis=1, keepdims=True)
    np.testing.assert_allclose(truncated(documents, 8), kept, atol=1e-6)
    assert truncated(np.array([[0, 0, 0, 1], [1, 0, 0, 0]], np.float32), 2).tolist() == [[0, 0], [1, 0]], "zero stays"
    kept_queries = queries[:, :8].astype(np.float64)
    kept_queries /= np.linalg.norm(kept_queries, axis=1, keepdims=True)
    variant = form(dimension=8, precision="float32")
    scores, rows = build_searcher(documents, variant).search(queries, k=10)
    reference = kept_queries @ kept.T
    np.testing.assert_array_equal(rows, np.argsort(-reference, axis=1)[:, :10])
    np.testing.assert_allclose(scores, -np.sort(-reference, axis=1)[:, :10], atol=1e-5)


@pytest.mark.parametrize("dim", [5, 16, 20, 64, 256])
def test_int8_is_symmetric_rounding_by_dimension_and_scores_the_restored_numbers(dim: int) -> None:
    documents, queries = unit(300, dim), unit(20, dim, seed=1)
    documents[:, 2] = 0.0  # a dimension without any spread
    scales = np.abs(documents).max(axis=0) / 127
    scales[2] = 1.0
    np.testing.assert_allclose(scales_per_dimension(documents), scales, rtol=1e-6)
    codes = codes_per_dimension(documents, scales_per_dimension(documents))
    np.testing.assert_array_equal(codes, np.rint(documents / scales_per_dimension(documents)))
    assert codes.dtype == np.int8
    assert np.abs(codes.astype(int)).max() == 127
    reference = queries.astype(np.float64) @ (codes * scales_per_dimension(documents).astype(np.float64)).T
    scores, rows = build_searcher(documents, form(precision="int8")).search(queries, k=10)
    np.testing.assert_array_equal(rows, np.argsort(-reference, axis=1)[:, :10])
    np.testing.assert_allclose(scores, -np.sort(-reference, axis=1)[:, :10], atol=1e-5)
    exact, _ = build_searcher(documents, REFERENCE).search(queries, k=10)
    assert not np.array_equal(scores, exact)  # it did round


@pytest.mark.parametrize("dim", [5, 12, 16, 64])  # filled up to whole bytes, or not
def test_binary_ranks_by_the_inner_product_of_signs(dim: int) -> None:
    documents, queries = unit(200, dim), unit(20, dim, seed=1)
    signs, query_signs = np.where(documents > 0, 1, -1), np.where(queries > 0, 1, -1)
    reference = query_signs @ signs.T
    scores, rows = build_searcher(documents, form(precision="binary")).search(queries, k=10)
    np.testing.assert_array_equal(scores, -np.sort(-reference, axis=1)[:, :10])
    np.testing.assert_array_equal(np.take_along_axis(reference, rows, axis=1), scores)


def test_dims_and_precision_combine() -> None:
    documents, queries = unit(200, 20), unit(20, 20, seed=1)
    small, small_queries = truncated(documents, 12), truncated(queries, 12)
    for precision in ("int8", "binary"):
        both = build_searcher(documents, form(dimension=12, precision=precision)).search(queries, k=5)
        one = build_searcher(small, form(precision=precision)).search(small_queries, k=5)
        np.testing.assert_array_equal(both[0], one[0])


def test_an_index_that_looks_at_every_list_is_exact() -> None:
    documents, queries = unit(300, 16), unit(20, 16, seed=1)
    _, exact = build_searcher(documents, REFERENCE).search(queries, k=10)
    _, every = build_searcher(documents, form(index="IVF4,Flat:nprobe=4")).search(queries, k=10)
    np.testing.assert_array_equal(every, exact)
    (one_list,) = plan_variants(indexes=("IVF4,Flat",))[1:]
    _, fewer = build_searcher(documents, one_list).search(queries, k=10)
    assert not np.array_equal(fewer, exact)


@pytest.mark.parametrize(("dimension", "precision"), [(None, "binary"), (None, "int8"), (12, "binary"), (8, "float32")])
def test_rescoring_ranks_candidates_by_the_full_vectors(dimension: int | None, precision: str) -> None:
    documents, queries = unit(400, 20), unit(30, 20, seed=1)
    documents[7] = documents[3]  # equal scores are ranked as exact search does
    plans = plan_variants(dims=(12, 8), precisions=("int8", "binary"), rescored=(3, 40))
    cheap, few, all_of_them = (
        build_searcher(documents, each) for each in plans if (each.dimension, each.precision) == (dimension, precision)
    )
    exact_scores, exact = build_searcher(documents, REFERENCE).search(queries, k=10)
    scores, rows = all_of_them.search(queries, k=10)  # 400 candidates are all documents
    np.testing.assert_array_equal(rows, exact)
    np.testing.assert_array_equal(scores, exact_scores)
    _, without = cheap.search(queries, k=10)
    _, some = few.search(queries, k=10)
    candidates = cheap.search(queries, k=30)[1]

    def found(rows: NDArray[np.int64]) -> float:
        return float(np.mean([np.isin(one, other).mean() for one, other in zip(exact, rows, strict=True)]))

    assert all(np.isin(one, other).all() for one, other in zip(some, candidates, strict=True))
    assert found(without) < found(some) <= 1
    assert (cheap.rescoring_bytes, few.rescoring_bytes) == (0, 80)
    assert few.bytes_per_document == cheap.bytes_per_document < 80


def test_rescoring_needs_a_cheaper_form_and_is_a_form_of_its_own() -> None:
    names = [
        each.name for each in plan_variants(dims=(64,), precisions=("binary",), rescored=(4,), indexes=("HNSW32",))
    ]
    assert names == [
        "exact", "binary", "binary, 4x rescored", "64 dims", "64 dims, 4x rescored", "64 dims, binary",
        "64 dims, binary, 4x rescored", "HNSW32",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="--rescore"):
        plan_variants(rescored=(4,))
    with pytest.raises(ConfigError):
        plan_variants(precisions=("int8",), rescored=(0,))


def test_bytes_per_document_follow_from_dims_and_bits_and_an_index_adds_to_them() -> None:
    documents = unit(300, 16)
    size = {
        (each.dimension, each.precision, each.index): build_searcher(documents, each).bytes_per_document
        for each in plan_variants(dims=(12,), precisions=("int8", "binary"), indexes=("HNSW32",))
    }
    assert size[None, "float32", "Flat"] == 64
    assert size[12, "float32", "Flat"] == 48
    assert (size[None, "int8", "Flat"], size[12, "int8", "Flat"]) == (16, 12)
    assert (size[None, "binary", "Flat"], size[12, "binary", "Flat"]) == (2, 2)
    assert size[None, "float32", "HNSW32"] > 64 + 32 * 4
    index = faiss.index_factory(16, "HNSW32", faiss.METRIC_INNER_PRODUCT)
    index.add(documents)
    assert size[None, "float32", "HNSW32"] == len(faiss.serialize_index(index)) / 300


def test_latency_is_positive_over_the_timed_queries_and_leaves_the_threads_as_they_were() -> None:
    before = faiss.omp_get_max_threads()
    searcher = build_searcher(unit(300, 16), REFERENCE)
    few = time_queries(searcher, unit(7, 16), k=10)
    assert 0 < few.p50 <= few.p95 <= few.p99
    assert (few.num_timed, time_queries(searcher, unit(1250, 16), k=100).num_timed) == (7, 1000)
    assert faiss.omp_get_max_threads() == before


def test_more_dimensions_than_the_model_has_are_refused_with_its_number() -> None:
    variants = plan_variants(dims=(8, 24, 32))
    with pytest.raises(ConfigError, match=r"--dims 24,32: tiny has 16 dimensions; give at most 16"):
        check_model(variants, "tiny", model_of(16))
    check_model(variants, "larger", model_of(32))


def test_an_index_that_faiss_does_not_know_is_refused_before_there_are_vectors() -> None:
    for wrong, right in (("IVF4,Flatt", "IVF4,Flat"), ("IVF4,Flat:nprob=2", "IVF4,Flat:nprobe=2"), ("PQ3", "PQ4")):
        with pytest.raises(ConfigError, match=wrong.partition(":")[0]):
            check_model(plan_variants(indexes=(wrong,)), "tiny", model_of(16))
        check_model(plan_variants(indexes=(right,)), "tiny", model_of(16))


def test_an_index_with_more_lists_than_documents_is_refused_with_one_that_fits() -> None:
    variants = plan_variants(indexes=("IVF256,Flat:nprobe=8",))
    with pytest.raises(ConfigError, match=r"at least 256 documents, small has 200; use IVF4,Flat:nprobe=8"):
        check_sizes(variants, "small", 200)
    check_sizes(variants, "larger", 256)
    check_sizes(plan_variants(indexes=("IVF4,Flat",)), "small", 200)
    with pytest.raises(ConfigError, match=r"PQ4: it is trained on at least 256 documents"):
        check_sizes(plan_variants(indexes=("PQ4",)), "small", 200)
    check_sizes(plan_variants(indexes=("PQ4x4",)), "small", 200)


def test_few_documents_for_each_list_are_told() -> None:
    (variant,) = plan_variants(indexes=("IVF16,Flat",))[1:]
    note = size_note(variant, 16 * 39 - 1)
    assert note is not None
    assert "advises 624 documents" in note
    assert size_note(variant, 16 * 39) is None
    assert size_note(REFERENCE, 1) is None
