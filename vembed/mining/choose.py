"""Choose hard negatives among the candidates of a block of queries: a pure function of scores and settings.

Shape legend: B queries, K candidates of each (best first), n negatives of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.vectors.keys import MiningKeys

RULES = ("relative margin", "absolute margin", "lowest score", "highest score")
"""What may leave a candidate out, in the order in which it is asked."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What became of the candidates of a block."""

    places_Bn: NDArray[np.int64]  # which candidates are taken, nearest first; -1 where there are too few
    refused: dict[str, int]  # rule -> candidates in the window that it left out first


def without_excluded(
    scores_BK: NDArray[np.float32], rows_BK: NDArray[np.int64], is_excluded_BK: NDArray[np.bool_], *, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the first candidates that aren't excluded; where a query has fewer, row -1 and score -inf fill up."""
    is_out = is_excluded_BK | (rows_BK < 0)
    order = np.argsort(is_out, axis=1, kind="stable")[:, :depth]
    is_out = np.take_along_axis(is_out, order, axis=1)
    scores = np.where(is_out, np.float32(-np.inf), np.take_along_axis(scores_BK, order, axis=1))
    return scores, np.where(is_out, -1, np.take_along_axis(rows_BK, order, axis=1))


def choose(
    scores_BK: NDArray[np.float32],
    positive_B: NDArray[np.float32],
    priorities_BK: NDArray[np.uint64],
    keys: MiningKeys,
) -> Choice:
    """Choose among candidates of the window.

    Args:
        scores_BK: What the rules look at: the model's score or a teacher's; -inf where there is no candidate.
        positive_B: The same of each query's best positive.
        priorities_BK: The lowest ones are taken where `mine_sampling` is random.
    """
    allowed_BK = np.isfinite(scores_BK)
    refused = {}
    for name, kept_BK in zip(RULES, _kept(scores_BK, positive_B[:, None], keys), strict=True):
        if kept_BK is not None:
            refused[name] = int((allowed_BK & ~kept_BK).sum())
            allowed_BK = allowed_BK & kept_BK
    count = keys.mine_negatives
    places_BK = np.broadcast_to(np.arange(scores_BK.shape[1]), scores_BK.shape)
    if keys.mine_sampling == "random":
        ranked = np.where(allowed_BK, priorities_BK, np.iinfo(np.uint64).max)
    else:
        ranked = np.where(allowed_BK, places_BK, np.iinfo(np.int64).max).astype(np.uint64)
    taken = np.argsort(ranked, axis=1, kind="stable")[:, :count]
    taken = np.where(np.take_along_axis(allowed_BK, taken, axis=1), taken, scores_BK.shape[1])
    taken.sort(axis=1)
    places = np.full((len(scores_BK), count), -1, dtype=np.int64)
    places[:, : taken.shape[1]] = np.where(taken < scores_BK.shape[1], taken, -1)
    return Choice(places, refused)


def _kept(
    scores_BK: NDArray[np.float32], positive_B1: NDArray[np.float32], keys: MiningKeys
) -> tuple[NDArray[np.bool_] | None, ...]:
    """Return what each of `RULES` keeps, None where it isn't asked."""
    relative, absolute = keys.mine_relative_margin, keys.mine_absolute_margin
    return (
        None if relative is None else scores_BK <= relative_limits(positive_B1, relative),
        None if absolute is None else scores_BK <= positive_B1 - np.float32(absolute),
        None if keys.mine_min_score is None else scores_BK >= np.float32(keys.mine_min_score),
        None if keys.mine_max_score is None else scores_BK <= np.float32(keys.mine_max_score),
    )


def relative_limits(positive: NDArray[np.float32], margin: float) -> NDArray[np.float32]:
    """Return the highest scores that a relative margin keeps; below a negative positive it goes further down."""
    size = np.where(np.isfinite(positive), np.abs(positive), 0)
    return (positive - np.float32(margin) * size).astype(np.float32)


def priorities(query_ids_B: NDArray[np.int64], document_ids_BK: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """Return random numbers that depend on the contents of query and document and on the seed alone (splitmix64)."""
    mixed = _mix(query_ids_B.view(np.uint64)[:, None] + np.uint64(seed))
    return _mix(mixed ^ document_ids_BK.view(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
