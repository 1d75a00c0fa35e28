"""Records of one global batch become a `ContrastiveBatch`.

Documents stand record by record, positives before negatives. Records of one class (an equal label) are positives of
each other: the query of every one has the positives of all of them, but for a copy of the query itself, which teaches
nothing and which the losses mask.

Shape legend: Q queries, one for each record; D documents; P (query row, document row) pairs.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import ContrastiveBatch
from vembed.data.images import item_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.batch import Item
    from vembed.data.table import Record


def collate(records: Sequence[Record], record_ids: Sequence[int]) -> ContrastiveBatch:
    """Flatten the records of one batch into queries, documents and their positive pairs.

    Args:
        records: In batch order.
        record_ids: Row of each record in the training records.

    Raises:
        ImageError: A picture can't be read any more.
        ValueError: There are no records, or not one id per record.
    """
    if not records or len(records) != len(record_ids):
        msg = f"a batch needs at least one record and one id each: {len(records)} records, {len(record_ids)} ids"
        raise ValueError(msg)
    documents: list[Item] = []
    own_positives: list[range] = []
    listed: list[tuple[int, int]] = []
    own_negatives: list[tuple[int, int]] = []
    for row, record in enumerate(records):
        # Scores go by position over positives, then negatives: the order in which both stand among the documents.
        first = len(documents)
        own_positives.append(range(first, first + len(record.positives)))
        listed += [(row, first + position) for position in range(len(record.scores))]
        documents += record.positives
        own_negatives += [(row, len(documents) + position) for position in range(len(record.negatives))]
        documents += record.negatives

    # Hard negatives and class items repeat within a batch, and hashing a picture reads its file.
    digest = cache(item_id)
    queries = tuple(record.query for record in records)
    query_ids_Q = np.array([digest(query) for query in queries], dtype=np.int64)
    document_ids_D = np.array([digest(document) for document in documents], dtype=np.int64)
    # Classes are numbered as they first occur in the batch, -1 for none: a loss compares them for equality only.
    numbers: dict[str | int, int] = {}
    classes_Q = np.array(
        [-1 if record.label is None else numbers.setdefault(record.label, len(numbers)) for record in records],
        dtype=np.int64,
    )

    by_class: defaultdict[int, list[int]] = defaultdict(list)
    for number, positions in zip(classes_Q.tolist(), own_positives, strict=True):
        by_class[number] += positions  # in batch order: the pairs come out sorted
    of_class = {number: np.array(positions, dtype=np.int64) for number, positions in by_class.items()}
    positives_of = []
    for row, number in enumerate(classes_Q.tolist()):
        row_positives = np.array(own_positives[row], dtype=np.int64)
        if number < 0:
            positives_of.append(row_positives)
            continue
        class_positives = of_class[number]
        is_query = document_ids_D[class_positives] == query_ids_Q[row]
        # A copy of the query among the row's own positives stays: the data say so, and the losses mask it.
        positives_of.append(class_positives[~is_query | np.isin(class_positives, row_positives)])
    query_rows = np.repeat(np.arange(len(records)), [len(rows) for rows in positives_of])

    scores = [score for record in records for score in record.scores]
    return ContrastiveBatch(
        queries=queries,
        documents=tuple(documents),
        positives_P2=np.stack([query_rows, np.concatenate(positives_of)], axis=1),
        query_ids_Q=query_ids_Q,
        document_ids_D=document_ids_D,
        record_ids=tuple(int(record_id) for record_id in record_ids),
        classes_Q=classes_Q if (classes_Q >= 0).any() else None,
        listed_P2=np.array(listed, dtype=np.int64) if listed else None,
        listed_scores_P=np.array(scores, dtype=np.float64) if listed else None,
        negatives_P2=np.array(own_negatives, dtype=np.int64) if own_negatives else None,
        columns={name: np.array([record.columns[name] for record in records]) for name in records[0].columns},
    )
