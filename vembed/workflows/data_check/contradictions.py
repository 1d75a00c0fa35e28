"""What two rows say differently of the same thing: a positive that is a negative elsewhere, grades, classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.workflows.data_check.duplicates import Pairs, repeats, spread
from vembed.workflows.data_check.findings import Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vembed.workflows.data_check.source import Source


def contradictions(source: Source) -> list[Finding]:
    """Find judgements that exclude each other."""
    positives, negatives = Pairs.of(source, "positives"), Pairs.of(source, "negatives")
    scored = _grades(source, positives, negatives)
    found = [*scored, *([] if scored else _judgements(source, positives, negatives)), *_classes(source)]
    return [each for each in found if each.count]


def _judgements(source: Source, positives: Pairs, negatives: Pairs) -> list[Finding]:
    """Find pairs that one row calls positive and another negative."""
    ids_I = source.table.items.ids
    right, wrong = positives.keys(ids_I), negatives.keys(ids_I)
    both = np.flatnonzero(np.isin(wrong, right))
    if not len(both):
        return []
    order = np.argsort(right, kind="stable")
    shown = both[spread(len(both))]
    place = order[np.searchsorted(right[order], wrong[shown])]
    return [
        Finding(
            "contradictory_negatives",
            "error",
            len(both),
            "hard negative that is a positive of its query in another row",
            "hard negatives that are positives of their query in another row",
            "One row pulls the pair together and another pushes it apart. Drop the wrong one.",
            ("Negative in", "Positive in", "Query", "Document"),
            list(
                zip(
                    source.locations(negatives.rows_P[shown]),
                    source.locations(positives.rows_P[place]),
                    source.said(negatives.queries_P[shown]),
                    source.said(negatives.documents_P[shown]),
                    strict=True,
                )
            ),
            len(wrong),
        )
    ]


def _grades(source: Source, positives: Pairs, negatives: Pairs) -> list[Finding]:
    """Find pairs with two grades, and grades that are all the same; nothing where the data have none."""
    rows, scores = source.table.listed
    if not len(scores):
        return []
    listed = [np.concatenate(parts) for parts in zip(*(_columns(each) for each in (positives, negatives)), strict=True)]
    order = np.argsort(listed[0], kind="stable")  # of each row its positives, then its negatives
    order = order[np.isin(listed[0][order], rows)]
    pairs = Pairs(*(column[order] for column in listed))
    again, first = repeats(pairs.keys(source.table.items.ids))
    differ = scores[again] != scores[first]
    again, first = again[differ], first[differ]
    shown = spread(len(again))
    examples = zip(
        _graded(source, pairs, again[shown], scores),
        _graded(source, pairs, first[shown], scores),
        source.said(pairs.queries_P[again[shown]]),
        source.said(pairs.documents_P[again[shown]]),
        strict=True,
    )
    constant = int((scores == scores[0]).all()) * len(scores)
    return [
        Finding(
            "contradictory_grades",
            "error",
            len(again),
            "pair with another grade than in an earlier row",
            "pairs with another grade than in an earlier row",
            "Keep one grade for each pair, or their mean.",
            ("Row and grade", "Earlier row", "Query", "Document"),
            list(examples),
            len(scores),
        ),
        Finding(
            "constant_grades",
            "warning",
            constant,
            f"pair with the grade {scores[0]:g}, and none with another",
            f"pairs with the grade {scores[0]:g}, and none with another",
            "Losses that compare grades learn nothing from one alone. Add pairs with other grades.",
            of=len(scores),
        ),
    ]


def _columns(pairs: Pairs) -> tuple[NDArray[np.int64], ...]:
    return pairs.rows_P, pairs.queries_P, pairs.documents_P


def _graded(source: Source, pairs: Pairs, places: NDArray[np.int64], scores: NDArray[np.float64]) -> list[str]:
    locations = source.locations(pairs.rows_P[places])
    return [f"{where}: {score:g}" for where, score in zip(locations, scores[places].tolist(), strict=True)]


def _classes(source: Source) -> list[Finding]:
    """Find queries of two classes, and classes of one row."""
    classes_N, names = source.table.classes
    labelled = np.flatnonzero(classes_N >= 0)
    if not len(labelled):
        return []
    queries = source.table.numbers("query")[1]
    again, first = repeats(source.table.items.ids[queries[labelled]])
    again, first = labelled[again], labelled[first]
    differ = classes_N[again] != classes_N[first]
    again, first = again[differ], first[differ]
    shown = spread(len(again))

    def shown_class(rows: NDArray[np.int64]) -> list[str]:
        labels = [names[number] for number in classes_N[rows].tolist()]
        return [f"{where}: {label}" for where, label in zip(source.locations(rows), labels, strict=True)]

    counts = np.bincount(classes_N[labelled], minlength=len(names))
    alone = np.flatnonzero(counts == 1)
    return [
        Finding(
            "contradictory_classes",
            "error",
            len(again),
            "query with another class than in an earlier row",
            "queries with another class than in an earlier row",
            "Rows of one class are positives of each other. Give the query one class.",
            ("Row and class", "Earlier row", "Query"),
            list(
                zip(
                    shown_class(again[shown]),
                    shown_class(first[shown]),
                    source.said(queries[again[shown]]),
                    strict=True,
                )
            ),
            len(labelled),
        ),
        Finding(
            "classes_of_one_row",
            "warning",
            len(alone),
            "class with one row only",
            "classes with one row only",
            "Nothing else of their class can be near them. Add rows, or join classes.",
            ("Class",),
            [(str(names[number]),) for number in alone[spread(len(alone))].tolist()],
            len(names),
        ),
    ]
