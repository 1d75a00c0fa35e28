"""Hold rows out for validation, without a query or positive on both sides and without regard to the order of the rows.

1. Rows that share a query or a positive are linked; linked rows form a component. Links chain: rows 1 and 2 share a
   query, 2 and 3 a positive, so 1 and 3 are never on different sides. Queries are shared regardless of case, spaces and
   punctuation. The document of a pair that is graded 0 or lower counts as a positive, unless too few rows could be held
   out then.
2. Components are ordered by their smallest content hash, as good as random and the same wherever rows stand.
3. Components are taken whole, in that order, while they fit; one that is too large is passed over.
4. Where nobody gave a test set, what was taken is divided once more, in the same way, into a dev set and a test set, as
   long as each resolves a difference that matters (`divide`).

Held-out queries search their own documents among some that are trained on: finding one of 15 documents is easy for any
model. A training document of a held-out class would be a right answer and is left out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vembed.data.images import content_name
from vembed.data.judged import task_from_records
from vembed.data.overlap import letter_sums
from vembed.data.table import ItemColumn
from vembed.errors import DataError
from vembed.text import plural

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.data.judged import RetrievalData
    from vembed.data.table import RecordTable

SHARE, MOST_ROWS = 0.05, 1000
"""Share of a large set that is held out, at most so many rows."""

LARGEST_SHARE, ENOUGH_ROWS = 0.2, 100
"""Of a small set more is held out: up to so many rows, at most this share."""

FEWEST_DOCUMENTS = 1000
"""Documents that held-out queries search at least: their own are filled up with those of training rows."""

SPREAD = 0.23
"""Standard deviation over queries of the difference of two models' nDCG@10: 0.18 to 0.26 in measured runs."""

COARSE = 0.03
"""Difference of nDCG@10 from which it is worth saying that a dev set can't resolve it."""

ENOUGH_QUERIES = math.ceil((2 * SPREAD / COARSE) ** 2)
"""Queries that resolve `COARSE`: 236."""

BLOCK_IDS = 65_536
"""Ids that are compared at a time."""

MIN_TRAIN_ROWS = 2
FIX = "give val_data_path, or set eval_strategy: no"


def hold_out(
    table: RecordTable, *, fraction: float | None = None, limit: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Split off rows for validation: the same content gives the same split, whatever the order of the rows.

    No text or picture that is a query or a positive on one side is a query or a positive on the other, and no query
    differs from one of the other side in case, spaces and punctuation alone. Of pairs graded 0 or lower the documents
    are apart as well, where that leaves at least half of the rows that are wanted.

    Args:
        fraction: Largest share of the rows to hold out, above 0 and below 1; None takes more of small sets.
        limit: Most rows to hold out.

    Returns:
        The rows to train on and those to validate on, both ascending; and notes on what was held out, a plain sentence
        each.

    Raises:
        DataError: Nothing can be held out, or too little would be left to train on.
        ImageError: A picture can't be read any more.
        ValueError: An argument is outside its range.
    """
    if not 0 < (fraction or 0.5) < 1 or (limit or 1) < 1:
        msg = f"fraction must lie between 0 and 1, and limit be at least 1: {fraction}, {limit}"
        raise ValueError(msg)
    num_rows = len(table)

    def part(share: float) -> int:
        return math.floor(round(share * num_rows, 9))  # 0.29 * 100 is 28.999999999999996

    if fraction is not None:
        wanted = part(fraction)
    else:  # as many as tell models apart
        wanted = min(MOST_ROWS, max(part(SHARE), min(ENOUGH_ROWS, part(LARGEST_SHARE))))
    budget = min(wanted, num_rows - MIN_TRAIN_ROWS, limit or num_rows)
    if budget < 1:
        msg = f"too few rows to train and to validate on ({plural(num_rows, 'record')}): {FIX}"
        raise DataError(msg)
    low_graded = table.lists("positives")[0] == 0  # a pair graded 0 or lower has its document among the negatives
    chosen = _choose(*_components(table, low_graded), budget)
    # Linking by the documents of low grades as well can chain nearly all rows of graded pairs into one component (few
    # documents, every query graded against many). Where that leaves less than half, they may stand on both sides.
    if low_graded.any() and 2 * int(chosen.sum()) < budget:
        linked_less = _choose(*_components(table), budget)
        if linked_less.sum() > chosen.sum():
            chosen = linked_less
    if not chosen.any():
        msg = (
            f"no rows can be held out for validation: every group of rows that share a query or a positive has over "
            f"{plural(budget, 'row')} ({budget / num_rows:.0%} of {num_rows:,}): {FIX}"
        )
        raise DataError(msg)
    count = int(chosen.sum())
    apart = "query or positive" if _share_items(table, chosen) else "text"
    notes = [f"{count:,} of {num_rows:,} rows held out for validation; no {apart} is on both sides."]
    if count < budget:
        notes.append(f"That is {budget - count:,} fewer than asked for: rows that share a text stay together.")
    return np.flatnonzero(~chosen), np.flatnonzero(chosen), tuple(notes)


def divide(table: RecordTable, held_out_rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Divide held-out rows in two equal parts, one that chooses a checkpoint and one that gives the verdict on it.

    No text or picture is a query or a positive in both.

    Returns:
        The rows of both parts, ascending; None where one has fewer than `ENOUGH_QUERIES` queries.
    """
    if len(held_out_rows) < 2 * ENOUGH_QUERIES:
        return None
    held_out = table.subset(held_out_rows)
    try:
        dev, test, _ = hold_out(held_out, fraction=0.5)
    except DataError:  # all rows hang together
        return None
    queries = held_out.items.ids[held_out.numbers("query")[1]]
    if min(len(np.unique(queries[rows])) for rows in (dev, test)) < ENOUGH_QUERIES:
        return None
    return held_out_rows[dev], held_out_rows[test]


def held_out_task(
    table: RecordTable,
    train_rows: NDArray[np.int64],
    held_out_rows: NDArray[np.int64],
    label_kind: str = "auto",
    *,
    name: str = "held out",
) -> RetrievalData:
    """Return held-out rows as a task; where they search, documents are filled up with those of training rows.

    Raises:
        DataError: No held-out row has a positive.
        ImageError: A picture can't be read any more.
    """
    held_out = table.subset(held_out_rows)
    task = task_from_records(held_out, name, label_kind)
    missing = FEWEST_DOCUMENTS - len(task.documents)
    if task.grades or missing <= 0:
        return task
    # A document of a held-out row's class answers its query: such training rows give none.
    classes, _ = table.classes
    held_out_classes = classes[held_out_rows]
    train_rows = train_rows[~np.isin(classes[train_rows], held_out_classes[held_out_classes >= 0])]
    train = table.subset(train_rows)
    held_out_items = np.concatenate([held_out.numbers(column)[1] for column in get_args(ItemColumn)])
    ids = table.items.ids.view(np.uint64)
    # The contents with the smallest hashes, `missing` of them. Positives are separate from negatives here, and of both
    # only as many as can be needed are kept, because `np.unique` of all takes several times as long as one sort.
    kept = []
    for column in ("positives", "negatives"):
        _, numbers = train.lists(column)
        in_order = ids[numbers]
        in_order.sort()
        is_first = np.ones(len(in_order), dtype=np.bool_)
        np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
        first = in_order[is_first][: missing + len(held_out_items)]
        kept.append(numbers[ids[numbers] <= first.max(initial=0)])
    numbers = np.concatenate(kept)
    distinct, places = np.unique(ids[numbers], return_index=True)
    others = numbers[places[~np.isin(distinct, ids[held_out_items])]][:missing]
    added = {content_name(item): item for item in table.items.at(others)}
    if not added:
        return task
    count = plural(len(task.documents), "document")
    queries = f"the {name.replace('held out', 'held-out')} queries"
    note = f"{queries} search their own {count} and {len(added):,} of training."
    return replace(task, documents={**added, **task.documents}, notes=(*task.notes, note))


def resolution_notes(num_queries: int) -> tuple[str, ...]:
    """Return which differences so few queries can't resolve, in words; nothing where they resolve what matters."""
    # Two standard errors of the mean difference over the queries.
    least = 2 * SPREAD / math.sqrt(max(1, num_queries))
    if least < COARSE:
        return ()
    size = plural(num_queries, "query", "queries")
    return (f"the dev set has {size}: differences under about {least:.2f} nDCG@10 can't be told from chance.",)


def _share_items(table: RecordTable, chosen: NDArray[np.bool_]) -> bool:
    """Return whether a text or picture stands in rows of both sides, hard negatives included."""
    columns: tuple[ItemColumn, ...] = get_args(ItemColumn)
    train, held_out = (table.subset(np.flatnonzero(side)) for side in (~chosen, chosen))
    ids = table.items.ids
    # `np.isin` would sort both sides, seconds for a million rows; only the few held-out ids need an order.
    held_out_ids = np.unique(np.concatenate([ids[held_out.numbers(column)[1]] for column in columns]))

    def holds_one(numbers_B: NDArray[np.int64]) -> bool:
        ids_B = ids[numbers_B]
        nearest_B = np.minimum(np.searchsorted(held_out_ids, ids_B), len(held_out_ids) - 1)
        return bool((held_out_ids[nearest_B] == ids_B).any())

    # A column and a block at a time, so that copies stay small beside a million rows.
    return any(
        holds_one(numbers_B)
        for column in columns
        for numbers_B in np.array_split(train.numbers(column)[1], len(train) // BLOCK_IDS + 1)
    )


def _components(
    table: RecordTable, by_negatives: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the component of each row, numbered from 0, and the smallest content hash of each component.

    Args:
        by_negatives: Which rows are also linked by their negatives, shape (rows,); None links none so.
    """
    linking = [table.numbers("query"), table.numbers("positives")]
    if by_negatives is not None and by_negatives.any():
        of_row, numbers = table.numbers("negatives")
        linking.append((of_row[by_negatives[of_row]], numbers[by_negatives[of_row]]))
    rows, items = (np.concatenate(parts) for parts in zip(*linking, strict=True))
    hashes = table.items.ids[items].view(np.uint64)
    num_items = len(hashes)
    alike_rows, alike_hashes = _queries_alike(table)
    rows, hashes = np.concatenate([rows, alike_rows]), np.concatenate([hashes, alike_hashes])

    # Union-find over the contents that several rows hold. Python loops over those alone: most contents stand in one row
    # only and link nothing, and for a million rows a loop over all of them would take seconds.
    in_order = np.sort(hashes)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    content_of = np.searchsorted(repeated, hashes)
    several = np.flatnonzero(np.append(repeated, np.uint64(0))[content_of] == hashes)
    linked, places = np.unique(rows[several], return_inverse=True)
    parent = list(range(len(linked)))  # of linked rows; the root of a component is its first row
    first_row: dict[int, int] = {}
    for content, row in zip(content_of[several].tolist(), places.tolist(), strict=True):
        a, b = _root(parent, row), _root(parent, first_row.setdefault(content, row))
        parent[max(a, b)] = min(a, b)
    roots = np.arange(len(table))
    roots[linked] = linked[[_root(parent, row) for row in range(len(linked))]]
    component_of = (np.cumsum(roots == np.arange(len(roots))) - 1)[roots]
    smallest = np.full(int(component_of.max()) + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    # Of whole contents alone: which rows are taken depends on spellings only where some are alike.
    np.minimum.at(smallest, component_of[rows[:num_items]], hashes[:num_items])
    return component_of.astype(np.int64), smallest


def _queries_alike(table: RecordTable) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return (row, number of its query without case, spaces and punctuation) of texts that others may equal so."""
    query_N, items = table.numbers("query")[1], table.items
    blocks = [(block_M, letter_sums(texts_M)) for block_M, texts_M in items.text_blocks(np.unique(query_N))]
    if not blocks:
        return query_N[:0], np.empty(0, dtype=np.uint64)
    numbers_M, sums_M = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    # Texts that are equal so have equal sums. Few others have: only those that share a sum are made plain, which takes
    # ten times as long, and still no Python string.
    _, sum_of_M, counts = np.unique(sums_M, return_inverse=True, return_counts=True)
    shared = numbers_M[counts[sum_of_M] > 1]
    plain = []
    for _, texts in items.text_blocks(shared):
        words = pc.replace_substring_regex(pc.utf8_normalize(texts, "NFKC"), r"[^\pL\pM\pN]+", " ")
        words = pc.utf8_upper(pc.utf8_trim_whitespace(words))
        plain.append(pc.if_else(pc.equal(words, ""), texts, words))  # "?!" and "..." are not the same text
    codes = pa.chunked_array(plain, pa.large_string()).combine_chunks().dictionary_encode().indices.to_numpy()
    rows = np.flatnonzero(np.isin(query_N, shared))
    return rows, codes[np.searchsorted(shared, query_N[rows])].astype(np.uint64)


def _root(parent: list[int], row: int) -> int:
    while parent[row] != row:
        parent[row] = parent[parent[row]]  # halve the path: later look-ups are short
        row = parent[row]
    return row


def _choose(component_of: NDArray[np.int64], smallest: NDArray[np.uint64], budget: int) -> NDArray[np.bool_]:
    """Return which rows to hold out: whole components by their smallest hash, never more than `budget` rows."""
    sizes = np.bincount(component_of, minlength=len(smallest))
    taken = np.zeros(len(smallest), dtype=np.bool_)
    left = budget
    for component in np.argsort(smallest, kind="stable").tolist():
        if sizes[component] <= left:
            taken[component] = True
            left -= int(sizes[component])
            if not left:
                break
    return taken[component_of]
