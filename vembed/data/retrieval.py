"""The retrieval task as data: queries, a corpus and relevance judgements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.batch import MODALITY_WORDS, modality_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vembed.batch import Item, Modality

PairKind: TypeAlias = Literal["grade", "pair"]
"""What is said of pairs: how close the two are, or whether they belong together."""

REVERSED = "reversed"
"""Last word of the name of a set whose documents ask."""


@dataclass(frozen=True, slots=True)
class RetrievalData:
    """One retrieval task."""

    name: str  # for people, e.g. "scifact/test"
    queries: Mapping[str, Item]  # query id -> text, picture, or both in one
    documents: Mapping[str, Item]  # document id -> text (title, one space, text), picture, or both in one
    qrels: Mapping[str, Mapping[str, int]]  # query id -> document id -> graded relevance (0 is judged and not relevant)
    notes: tuple[str, ...] = ()  # what was left out or is unusual, one plain sentence each
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)  # query id -> never ranked for it
    candidates: Mapping[str, frozenset[str]] = field(default_factory=dict)  # query id -> all that it ranks
    cutoffs: tuple[int, ...] = ()  # cut-offs that the literature reports the set at, beside the usual ones
    # Where the set is of graded pairs: query id -> document id -> grade (1 and 0 of kind "pair"). Nothing is searched
    # then: the order of all pairs by similarity is compared with that by grade.
    grades: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kind: PairKind = "grade"

    @property
    def crosses_modalities(self) -> bool:
        """Whether texts search pictures or pictures search texts, on either side nothing else: both ways are asked.

        A set that ranks a few named candidates for each query has no other way round.
        """
        sides = [_modalities(self.queries.values()), _modalities(self.documents.values())]
        return sorted(sides, key=sorted) == [{"image"}, {"text"}] and not self.candidates and not self.grades

    @property
    def direction(self) -> str:
        """What searches what, in words, e.g. "texts search pictures"."""
        asking, found = (_words(_modalities(side.values())) for side in (self.queries, self.documents))
        return f"{asking} search {found}"

    def reversed(self) -> RetrievalData:
        """Return the task the other way round: documents ask for the queries that they are relevant to.

        Ids are kept and judgements are turned round with their grades. Queries without a relevant document aren't
        searched, as no number of this task is about them (a corpus of captions then holds those of its split alone);
        documents that are relevant to no query don't ask.
        """
        asked = {query for query, grades in self.qrels.items() if any(grade > 0 for grade in grades.values())}
        documents = {query: item for query, item in self.queries.items() if query in asked}
        qrels: dict[str, dict[str, int]] = {}
        for query in documents:
            for document, grade in self.qrels[query].items():
                qrels.setdefault(document, {})[query] = grade
        asking = {document for document, grades in qrels.items() if any(grade > 0 for grade in grades.values())}
        queries = {document: item for document, item in self.documents.items() if document in asking}
        silent = len(self.documents) - len(queries)
        return RetrievalData(
            name=f"{self.name} {REVERSED}",
            queries=queries,
            documents=documents,
            qrels={document: qrels[document] for document in queries},
            notes=(f"{silent} of {len(self.documents)} documents are relevant to no query: they don't ask.",)
            if silent
            else (),
            excluded={
                document: frozenset(query for query in documents if document in self.excluded.get(query, ()))
                for document in (queries if self.excluded else ())
            },
            candidates={
                document: frozenset(query for query in documents if document in self.candidates.get(query, {document}))
                for document in (queries if self.candidates else ())
            },
            cutoffs=self.cutoffs,
        )


def _modalities(items: Iterable[Item]) -> set[Modality]:
    """Return what kinds of items there are."""
    return {modality_of(item) for item in items}


def _words(modalities: set[Modality]) -> str:
    """Return the kinds of items of one side in words."""
    return " and ".join(MODALITY_WORDS[modality][1] for modality in sorted(modalities, reverse=True))
