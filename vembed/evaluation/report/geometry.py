"""Where the vectors of a set lie: a map of a sample in two dimensions, and documents that are nearly the same.

The map shows the two directions in which the sample varies most (PCA). Everything follows from vectors and ids alone.

Shape legend: N rows of the sample, E embedding dim, D documents that are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import Ragged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Side
    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.evaluator import EncodedTask

MAP_QUERIES, MAP_DOCUMENTS = 100, 200
"""Most points of a map: more hide each other, and each costs bytes of the page."""

NEAR_COSINE = 0.98
"""Two documents whose vectors are closer than this are nearly the same to the model."""

COMPARED_DOCUMENTS, BLOCK_ROWS, SHOWN_PAIRS = 4_000, 500, 8


@dataclass(frozen=True, slots=True)
class Point:
    """An item on the map."""

    side: Side
    identifier: str
    x: float  # 0 to 1
    y: float  # 0 to 1, from the top


@dataclass(frozen=True, slots=True)
class Geometry:
    """What is shown of the vectors of a set."""

    points: tuple[Point, ...]  # documents first, so that queries lie over them
    spread: float  # share of the sample's variance that the map shows
    pairs: tuple[tuple[str, str, float], ...]  # ids of documents that are nearly the same and their cosine, best first
    num_pairs: int
    num_compared: int  # documents that were compared with each other


def build_geometry(encoded: EncodedTask) -> Geometry | None:
    """Return the map and the near-duplicates of an encoded set; None for rows of several vectors or too few of them."""
    documents, queries = encoded.documents, encoded.queries
    if isinstance(documents, Ragged) or isinstance(queries, Ragged) or len(documents) + len(queries) < 3:
        return None
    document_ids, query_ids = list(encoded.task.documents), list(encoded.builder.query_ids)
    query_rows = _spread(len(query_ids), MAP_QUERIES)
    document_rows = _mapped_documents(encoded.task, [query_ids[row] for row in query_rows], document_ids)
    sample_NE = np.concatenate([_unit(documents[document_rows]), _unit(queries[query_rows])])
    places_N2, spread = project(sample_NE)
    ids = [("document", document_ids[row]) for row in document_rows] + [("query", query_ids[row]) for row in query_rows]
    points = tuple(
        Point("query" if side == "query" else "document", name, round(float(x), 4), round(float(y), 4))
        for (side, name), (x, y) in zip(ids, places_N2, strict=True)
    )
    compared = _spread(len(document_ids), COMPARED_DOCUMENTS)
    pairs, num_pairs = near_pairs(_unit(documents[compared]), [document_ids[row] for row in compared])
    return Geometry(points, round(spread, 4), pairs, num_pairs, len(compared))


def project(rows_NE: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the rows in the two directions of their largest variance, each scaled to 0 to 1, and its share.

    Shape: rows_NE (N, E) -> (N, 2).
    """
    centred_NE = rows_NE - rows_NE.mean(axis=0)
    left_NK, strengths_K, directions_KE = np.linalg.svd(centred_NE, full_matrices=False)
    signs_K = np.sign(directions_KE[np.arange(len(directions_KE)), np.abs(directions_KE).argmax(axis=1)])
    places_N2 = np.zeros((len(rows_NE), 2))
    kept = min(2, len(strengths_K))
    places_N2[:, :kept] = (left_NK * strengths_K * signs_K)[:, :kept]
    total = float((strengths_K**2).sum())
    low_2, reach_2 = places_N2.min(axis=0), np.ptp(places_N2, axis=0)
    scaled_N2 = np.where(reach_2 > 0, (places_N2 - low_2) / np.where(reach_2 > 0, reach_2, 1.0), 0.5)
    return scaled_N2, float((strengths_K[:2] ** 2).sum()) / total if total > 0 else 0.0


def near_pairs(rows_DE: NDArray[np.float64], ids: Sequence[str]) -> tuple[tuple[tuple[str, str, float], ...], int]:
    """Return the closest pairs of unit rows over `NEAR_COSINE`, a row in one only, and how many there are."""
    best: list[tuple[float, int, int]] = []
    count = 0
    for row, column, cosine in _near_blocks(rows_DE):
        count += len(row)
        first_R = np.lexsort((column, row, -cosine.round(6)))
        found = zip(cosine[first_R].round(6).tolist(), row[first_R].tolist(), column[first_R].tolist(), strict=True)
        best += _disjoint(found)
    kept = _disjoint(sorted(best, key=lambda pair: (-pair[0], *pair[1:])))
    return tuple((ids[row], ids[column], min(1.0, cosine)) for cosine, row, column in kept), count


def _disjoint(pairs: Iterable[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Return the first pairs that share no row, at most `SHOWN_PAIRS`."""
    kept: list[tuple[float, int, int]] = []
    used: set[int] = set()
    for cosine, row, column in pairs:
        if len(kept) == SHOWN_PAIRS:
            break
        if not {row, column} & used:
            kept.append((cosine, row, column))
            used |= {row, column}
    return kept


def _near_blocks(
    rows_DE: NDArray[np.float64],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]]:
    """Yield rows, later columns and cosines of near pairs, a block of rows at a time."""
    single_DE = rows_DE.astype(np.float32)
    for start in range(0, len(single_DE), BLOCK_ROWS):
        cosines = single_DE[start : start + BLOCK_ROWS] @ single_DE[start:].T
        row, column = np.nonzero(np.triu(cosines > NEAR_COSINE, k=1))
        yield row + start, column + start, cosines[row, column].astype(np.float64)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = np.asarray(rows, dtype=np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12), dtype=np.float64)


def _spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most so many rows, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _mapped_documents(task: RetrievalData, query_ids: Sequence[str], document_ids: Sequence[str]) -> list[int]:
    """Return rows of documents: one that is relevant to each query on the map, then others, evenly spread."""
    rows = {name: row for row, name in enumerate(document_ids)}
    relevant = (relevant_to(task.qrels, name) for name in query_ids)
    found = dict.fromkeys(rows[name] for name in relevant if name in rows)
    found |= dict.fromkeys(_spread(len(document_ids), MAP_DOCUMENTS).tolist())
    return sorted(list(found)[:MAP_DOCUMENTS])


def relevant_to(qrels: Mapping[str, Mapping[str, int]], query_id: str) -> str | None:
    """Return the first document, by id, that is relevant to a query."""
    return min((name for name, grade in qrels.get(query_id, {}).items() if grade > 0), default=None)
