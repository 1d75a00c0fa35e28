"""MaxSim against plain loops and plain autograd: search over a corpus and over candidates, and gradients of the loss.

Random unit vectors of 128 dims; documents have 30 to 330 vectors, queries 32. Each way must find the same.

    OMP_NUM_THREADS=1 python benchmarks/maxsim.py
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from measure import measure

from vembed.batch import Ragged
from vembed.losses.base import BatchStructure, MultiVectors
from vembed.losses.colbert import ColbertLoss
from vembed.losses.streamed import StreamedBatch
from vembed.vectors.index import search_maxsim

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

DIM, QUERY_VECTORS = 128, 32


def main() -> None:
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--candidates", type=int, default=100, help="documents of each query, in the second case")
    parser.add_argument("--batch", type=int, default=128, help="queries and documents of the loss")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    documents = _rows(rng, rng.integers(30, 331, arguments.documents))
    queries = _rows(rng, np.full(arguments.queries, QUERY_VECTORS))
    some = [np.sort(rng.permutation(arguments.documents)[: arguments.candidates]) for _ in range(arguments.queries)]
    _compare(
        f"{arguments.queries} queries, {arguments.documents} documents",
        {
            "blocks": lambda: float(search_maxsim(documents, queries, k=10)[0].sum()),
            "loop over documents": lambda: _best(_by_document(documents, queries)),
            "loop over pairs": lambda: _best(_by_pair(documents, queries)),
        },
    )
    _compare(
        f"the same, {arguments.candidates} candidates for each query",
        {
            "blocks": lambda: sum(
                float(search_maxsim(documents.take(rows), _one(queries, place), k=10)[0].sum())
                for place, rows in enumerate(some)
            ),
            "loop over pairs": lambda: sum(
                _best(_by_pair(documents.take(rows), _one(queries, place))) for place, rows in enumerate(some)
            ),
        },
    )
    _compare(
        f"the loss of {arguments.batch} queries and as many documents of 180 vectors",
        {
            "streamed": functools.partial(_streamed, *_batch(arguments.batch)),
            "plain autograd": functools.partial(_autograd, *_batch(arguments.batch)),
        },
    )


def _compare(title: str, ways: dict[str, Callable[[], float]]) -> None:
    print(f"\n{title}\n| way | CPU time | memory beside the vectors | check |\n|---|---|---|---|")
    for name, call in ways.items():
        found = measure(call, torch.device("cpu"))
        print(
            f"| {name} | {found.cpu_seconds:.2f} s | {found.peak_bytes / 1e6:.0f} MB | {found.value:.4f} |", flush=True
        )


def _rows(rng: np.random.Generator, counts: NDArray[np.int64]) -> Ragged:
    values = rng.standard_normal((counts.sum(), DIM), dtype=np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return Ragged(values, np.concatenate([[0], np.cumsum(counts)]))


def _one(rows: Ragged, place: int) -> Ragged:
    return rows.take(np.array([place]))


def _best(scores_QD: NDArray[np.float32]) -> float:
    """Return the sum of the ten largest scores of each query."""
    return float(-np.sort(-scores_QD, axis=1)[:, :10].sum())


def _by_document(documents: Ragged, queries: Ragged) -> NDArray[np.float32]:
    best = [(queries.values @ row.T).max(axis=1) for row in np.split(documents.values, documents.offsets[1:-1])]
    scores: NDArray[np.float32] = np.add.reduceat(np.stack(best, axis=1), queries.offsets[:-1], axis=0)
    return scores


def _by_pair(documents: Ragged, queries: Ragged) -> NDArray[np.float32]:
    rows = np.split(documents.values, documents.offsets[1:-1])
    asked = np.split(queries.values, queries.offsets[1:-1])
    return np.array([[(query @ row.T).max(axis=1).sum() for row in rows] for query in asked], dtype=np.float32)


def _batch(size: int) -> tuple[MultiVectors, MultiVectors, BatchStructure]:
    """Return queries and documents of a batch of pairs."""
    generator, rows = torch.Generator().manual_seed(0), torch.arange(size)
    sides = []
    for count in (QUERY_VECTORS, 180):
        values = torch.randn(size * count, DIM, generator=generator)
        sides.append(MultiVectors(torch.nn.functional.normalize(values, dim=1), torch.full((size,), count)))
    structure = BatchStructure(torch.stack([rows, rows], dim=1), rows, rows + size, rows, rows)
    return sides[0], sides[1], structure


def _streamed(q: MultiVectors, d: MultiVectors, structure: BatchStructure) -> float:
    """Return the norm of the gradients."""
    counts = q.counts_R.numpy(), d.counts_R.numpy()
    batch = StreamedBatch(q.values_VE, d.values_VE, structure, counts=counts)
    found = ColbertLoss(temperature=0.05).gradients(batch)
    return float(torch.linalg.vector_norm(torch.stack([found.dq_QE.norm(), found.dd_DE.norm()])))


def _autograd(q: MultiVectors, d: MultiVectors, structure: BatchStructure) -> float:
    leaves = q.values_VE.requires_grad_(), d.values_VE.requires_grad_()
    dq, dd = torch.autograd.grad(ColbertLoss(temperature=0.05)(q, d, structure), leaves)
    return float(torch.linalg.vector_norm(torch.stack([dq.norm(), dd.norm()])))


if __name__ == "__main__":
    main()
