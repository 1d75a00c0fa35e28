"""The retrieval task as data: queries, a corpus and relevance judgements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vembed.batch import Item


@dataclass(frozen=True, slots=True)
class RetrievalData:
    """One retrieval task.

    Attributes:
        name: For people, e.g. "scifact/test".
        queries: Query id -> text or picture.
        documents: Document id -> text (title, one space, text) or picture.
        qrels: Query id -> document id -> graded relevance (0 is judged and not relevant).
        notes: What was left out or is unusual, one plain sentence each.
    """

    name: str
    queries: Mapping[str, Item]
    documents: Mapping[str, Item]
    qrels: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()
