"""Records of one global batch become a `ContrastiveBatch`.

Documents stand record by record, positives before negatives. Records of one class (an equal label) are positives of
each other: each one's query has the positives of all of them, but for a copy of the query itself, which teaches nothing
and which the losses mask.
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
    from vembed.data.records import Record


def collate(records: Sequence[Record], record_ids: Sequence[int]) -> ContrastiveBatch:
    """Flatten records into queries, documents and their positive pairs.

    Args:
        records: The records of one batch, in batch order.
        record_ids: Manifest row of each record, what a report of a bad batch names.

    Returns:
        A batch of `len(records)` queries; `positives_P2` is sorted by query row, then document row, without repeats.

    Raises:
        ImageError: A picture can't be read any more.
        ValueError: There are no records, or not one id per record.
    """
    if not records or len(records) != len(record_ids):
        msg = f"a batch needs at least one record and one id each: {len(records)} records, {len(record_ids)} ids"
        raise ValueError(msg)
    documents: list[Item] = []
    own_positives: list[range] = []
    rows_by_label: defaultdict[str | int, list[int]] = defaultdict(list)
    for row, record in enumerate(records):
        own_positives.append(range(len(documents), len(documents) + len(record.positives)))
        documents += record.positives
        documents += record.negatives
        if record.label is not None:
            rows_by_label[record.label].append(row)

    digest = cache(item_id)  # hard negatives and class items repeat within a batch
    queries = tuple(record.query for record in records)
    query_ids_Q = np.array([digest(query) for query in queries], dtype=np.int64)
    document_ids_D = np.array([digest(document) for document in documents], dtype=np.int64)
    # Rows of a class are in batch order, and so are their documents: the pairs come out sorted.
    by_label = {
        label: np.array([document for row in rows for document in own_positives[row]], dtype=np.int64)
        for label, rows in rows_by_label.items()
    }
    positives_of = []
    for row, record in enumerate(records):
        own = np.array(own_positives[row], dtype=np.int64)
        if record.label is None:
            positives_of.append(own)
            continue
        of_class = by_label[record.label]
        itself = document_ids_D[of_class] == query_ids_Q[row]
        positives_of.append(of_class[~itself | np.isin(of_class, own)])
    query_rows = np.repeat(np.arange(len(records)), [len(rows) for rows in positives_of])
    return ContrastiveBatch(
        queries=queries,
        documents=tuple(documents),
        positives_P2=np.stack([query_rows, np.concatenate(positives_of)], axis=1),
        query_ids_Q=query_ids_Q,
        document_ids_D=document_ids_D,
        record_ids=tuple(int(record_id) for record_id in record_ids),
    )
