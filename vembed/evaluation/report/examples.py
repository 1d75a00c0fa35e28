"""Choosing the queries that tell most about a run: improved most, got worse, and still lowest.

A query stands in one group only. Order and choice depend on values and ids alone, never on the order of a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.batch import Composed, pictures_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vembed.batch import Image, Item
    from vembed.data.retrieval import RetrievalData
    from vembed.evaluation.result import EvaluationResult

GROUP_QUERIES = 5
TOP_DOCUMENTS = 5
MISSED_DOCUMENTS = 2

GroupKind: TypeAlias = Literal["improved", "worse", "lowest"]

TITLES: dict[GroupKind, str] = {
    "improved": "Improved most",
    "worse": "Got worse",
    "lowest": "Lowest scores now",
}


@dataclass(frozen=True, slots=True)
class Hit:
    """A document in or missing from a result list."""

    document_id: str
    item: Item | None  # None: the task doesn't have it
    is_relevant: bool  # judged relevant (grade above 0)
    score: float | None  # of the trained model; None: not retrieved
    rank: int | None  # from 1 in the trained model's list; None: not retrieved
    baseline_rank: int | None  # the same in the baseline's list
    caption: str = ""  # of a picture, the text of a query that it is relevant to, for those who don't see it


@dataclass(frozen=True, slots=True)
class Example:
    """One query with what was found for it."""

    query_id: str
    item: Item | None  # None: the task doesn't have it
    baseline: float  # the metric before training
    final: float  # and after
    hits: tuple[Hit, ...]  # the first documents of the trained model's list, best first
    missed: tuple[Hit, ...]  # relevant but not among `hits`, best ranked first, at most `MISSED_DOCUMENTS`
    num_missed: int  # how many there are in all
    caption: str = ""  # of a picture, the text of a document that is relevant to it

    @property
    def has_picture_results(self) -> bool:
        """Whether every document that is shown is a picture: a grid then shows more than a list."""
        items = [hit.item for hit in (*self.hits, *self.missed)]
        return any(map(pictures_of, items)) and not any(isinstance(item, str) for item in items)


@dataclass(frozen=True, slots=True)
class Group:
    """Examples of one kind, the most telling first."""

    kind: GroupKind
    examples: tuple[Example, ...]
    num_queries: int  # of that kind, shown or not; for "lowest" those that no other group shows

    @property
    def title(self) -> str:
        """What the group is called."""
        return TITLES[self.kind]


def choose_examples(
    task: RetrievalData, baseline: EvaluationResult, final: EvaluationResult, metric: str
) -> tuple[Group, ...]:
    """Choose the queries to show: three groups in the order improved, worse, lowest, each perhaps empty."""
    pairs = paired_values(baseline, final, metric)
    gains = {query_id: after - before for query_id, (before, after) in pairs.items()}
    improved = sorted((i for i in gains if gains[i] > 0), key=lambda i: (-gains[i], i))
    worse = sorted((i for i in gains if gains[i] < 0), key=lambda i: (gains[i], i))
    shown = {*improved[:GROUP_QUERIES], *worse[:GROUP_QUERIES]}
    lowest = sorted((i for i in pairs if i not in shown), key=lambda i: (pairs[i][1], i))

    captions = picture_captions(task)

    def group(kind: GroupKind, ids: Sequence[str]) -> Group:
        examples = tuple(example_of(i, task, (baseline, final), pairs[i], captions) for i in ids[:GROUP_QUERIES])
        return Group(kind, examples, len(ids))

    return group("improved", improved), group("worse", worse), group("lowest", lowest)


def paired_values(baseline: EvaluationResult, final: EvaluationResult, metric: str) -> dict[str, tuple[float, float]]:
    """Return (before, after) of each query that has a finite value in both results, by query id in order."""
    before, after = baseline.per_query[metric], final.per_query[metric]
    return {
        query_id: (float(before[query_id]), float(after[query_id]))
        for query_id in sorted(before.keys() & after.keys())
        if math.isfinite(before[query_id]) and math.isfinite(after[query_id])
    }


def example_of(
    query_id: str,
    task: RetrievalData,
    results: tuple[EvaluationResult, EvaluationResult],
    values: tuple[float, float],
    captions: Mapping[str, str],
) -> Example:
    """Collect what is shown of one query."""
    baseline, final = results
    ranked = final.run.get(query_id, ())
    judged = task.qrels.get(query_id, {})
    ranks, baseline_ranks = _ranks(ranked), _ranks(baseline.run.get(query_id, ()))
    scores = dict(ranked)

    def hits(document_ids: Iterable[str]) -> tuple[Hit, ...]:
        return tuple(
            Hit(
                document_id=document_id,
                item=task.documents.get(document_id),
                is_relevant=judged.get(document_id, 0) > 0,
                score=scores.get(document_id),
                rank=ranks.get(document_id),
                baseline_rank=baseline_ranks.get(document_id),
                caption=captions.get(document_id, ""),
            )
            for document_id in document_ids
        )

    top = [document_id for document_id, _ in ranked[:TOP_DOCUMENTS]]
    missed = sorted(
        (document_id for document_id, grade in judged.items() if grade > 0 and document_id not in top),
        key=lambda document_id: (ranks.get(document_id, math.inf), document_id),
    )
    return Example(
        query_id=query_id,
        item=task.queries.get(query_id),
        baseline=values[0],
        final=values[1],
        hits=hits(top),
        missed=hits(missed[:MISSED_DOCUMENTS]),
        num_missed=len(missed),
        caption=_query_caption(task, query_id),
    )


def shown_pictures(examples: Iterable[Example]) -> list[Image]:
    """Return the pictures that examples show, in order, one that stands twice named twice."""
    items = [
        item
        for example in examples
        for item in (example.item, *(hit.item for hit in (*example.hits, *example.missed)))
        if item is not None
    ]
    return list(pictures_in(items))


def pictures_of(item: Item | None) -> list[Image]:
    """Return the pictures of an item, none where it is a text or the task doesn't have it."""
    return [] if item is None else list(pictures_in([item]))


def text_of(item: Item | None) -> str | None:
    """Return the text of an item, or None where it has none."""
    return (item.text or None) if isinstance(item, Composed) else item if isinstance(item, str) else None


def picture_captions(task: RetrievalData) -> dict[str, str]:
    """Return for each document that is a picture the text of the first query, by id, that it is relevant to."""
    captions: dict[str, str] = {}
    for query_id in sorted(task.qrels):
        text = text_of(task.queries.get(query_id))
        for document_id, grade in task.qrels[query_id].items() if text else ():
            if grade > 0 and document_id not in captions and pictures_of(task.documents.get(document_id)):
                captions[document_id] = text or ""
    return captions


def _query_caption(task: RetrievalData, query_id: str) -> str:
    """Return the text of the first document, by id, that is relevant to a picture, or nothing."""
    if not pictures_of(task.queries.get(query_id)):
        return ""
    relevant = sorted(name for name, grade in task.qrels.get(query_id, {}).items() if grade > 0)
    return next((text for name in relevant if (text := text_of(task.documents.get(name)))), "")


def _ranks(ranked: Sequence[tuple[str, float]]) -> Mapping[str, int]:
    """Return the rank of each document from 1."""
    return {document_id: rank for rank, (document_id, _) in enumerate(ranked, start=1)}
