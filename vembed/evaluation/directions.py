"""Evaluate a set in both directions, its queries searching its documents and the other way round, encoding it once.

The documents that ask in the reversed set are documents of the set, and what they search are its judged queries. Their
vectors are the same unless the encoder treats the two sides differently: by a prompt, which shows in the features that
it makes of an item. Only then is a side encoded again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.evaluator import EncodedTask, encode_task, encoded, search_task
from vembed.evaluation.run import RunBuilder
from vembed.evaluation.significance import RecallSum, recall_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.batch import Features, Item, Side
    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.evaluator import EvaluationOptions
    from vembed.evaluation.report.vectors import Geometry
    from vembed.evaluation.result import EvaluationResult
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import ItemEncoder

SAMPLE_ITEMS = 16
"""Items whose features are compared between the sides: a prompt shows in each."""

COUNTED_ITEMS = 1024
"""Items that are tokenized at a time to count those that are cut."""


@dataclass(frozen=True, slots=True)
class Directions:
    """One system on one set."""

    forward: EvaluationResult  # its queries search its documents
    reverse: EvaluationResult | None = None  # its documents search its queries; None where that isn't measured
    geometry: Geometry | None = None  # where its vectors lie; None where nobody looked


def recall_sums(baseline: Directions, final: Directions) -> tuple[RecallSum, RecallSum] | None:
    """Return `recall_sum` before and after training, or None where one of them lacks a cut-off or a direction."""
    sums = [recall_sum(each.forward, each.reverse) if each.reverse else None for each in (baseline, final)]
    before, after = sums
    return (before, after) if before and after else None


def encode_directions(
    encode: ItemEncoder, task: RetrievalData, options: EvaluationOptions, *, both: bool
) -> tuple[EncodedTask, ...]:
    """Encode a set for one direction or for both: the part that needs the encoder, which several ranks do together.

    Returns:
        One direction or both, the given one first.

    Raises:
        DataError: The set has nothing to search or to score.
    """
    forward = encode_task(encode, task, options)
    if not both:
        return (forward,)
    started = time.perf_counter()
    turned = task.reversed()
    builder = RunBuilder(turned, ks=options.ks, depth=options.depth)
    documents = list(task.documents.values())
    queries = [task.queries[query_id] for query_id in forward.builder.query_ids]
    if sides_agree(encode.encoder, documents):
        asking, rows = forward.documents, asking_rows(task, turned)
    else:
        asking, rows = encoded(encode, list(turned.queries.values()), "query"), None
    searched = forward.queries if sides_agree(encode.encoder, queries) else encoded(encode, queries, "document")
    return forward, EncodedTask(turned, builder, searched, asking, time.perf_counter() - started, rows)


def search_directions(tasks: Sequence[EncodedTask], options: EvaluationOptions) -> Directions:
    """Search what `encode_directions` made, and score it.

    Raises:
        NonFiniteError: An embedding holds NaN or infinity.
    """
    found = [search_task(each, options) for each in tasks]
    return Directions(found[0], found[1] if len(found) > 1 else None)


def asking_rows(task: RetrievalData, turned: RetrievalData) -> NDArray[np.int64]:
    """Return the rows of a set's documents that ask in the reversed set, in its order."""
    return np.array([row for row, name in enumerate(task.documents) if name in turned.queries], dtype=np.int64)


def sides_agree(encoder: Encoder, items: Sequence[Item]) -> bool:
    """Return whether an encoder makes the same of items whether they are queries or documents.

    Args:
        items: Items of one side of a set; a few of each modality are looked at.
    """
    for _, places in encoder.by_modality(items):
        sample = [items[place] for place in places[:: max(1, len(places) // SAMPLE_ITEMS)][:SAMPLE_ITEMS]]
        asked, found = (encoder.featurize(sample, side) for side in ("query", "document"))
        if not _equal(asked, found):
            return False
    return True


def _equal(one: Features, other: Features) -> bool:
    """Return whether two features are bit for bit the same."""
    if one.columns.keys() != other.columns.keys() or one.per_row.keys() != other.per_row.keys():
        return False
    pairs = [(one.lengths, other.lengths)]
    for name, column in one.columns.items():
        pairs += [(column.values, other.columns[name].values), (column.offsets, other.columns[name].offsets)]
    pairs += [(values, other.per_row[name]) for name, values in one.per_row.items()]
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def count_truncated(encoder: Encoder, items: Sequence[Item], side: Side) -> int:
    """Return how many texts are longer than an encoder takes; nothing is encoded, and pictures are passed over."""
    texts = [item for item in items if isinstance(item, str)]
    return sum(
        encoder.featurize(texts[start : start + COUNTED_ITEMS], side).num_truncated
        for start in range(0, len(texts), COUNTED_ITEMS)
    )
