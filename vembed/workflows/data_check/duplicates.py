"""What stands in the data more than once: pairs, queries, documents; exactly, or nearly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.data.near import SIMILAR, alike_within
from vembed.workflows.data_check.findings import MOST_EXAMPLES, Finding, alike_text

if TYPE_CHECKING:
    from typing import Literal

    from numpy.typing import NDArray

    from vembed.workflows.data_check.source import Source

_ODD = np.int64(-7046029254386353131)


@dataclass(frozen=True, eq=False)
class Pairs:
    """A query and a document of a row each. Shape legend: P pairs."""

    rows_P: NDArray[np.int64]
    queries_P: NDArray[np.int64]  # numbers of items
    documents_P: NDArray[np.int64]

    @classmethod
    def of(cls, source: Source, column: Literal["positives", "negatives"]) -> Pairs:
        """Return all pairs of a column."""
        rows, documents = source.table.numbers(column)
        return cls(rows, source.table.numbers("query")[1][rows], documents)

    def keys(self, content_I: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a hash of each pair's contents."""
        return pair_keys(content_I[self.queries_P], content_I[self.documents_P])


def pair_keys(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a hash of each pair of hashes."""
    keys: NDArray[np.int64] = (first * _ODD) ^ (second + (first >> 17))
    return keys


def repeats(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of keys that came before, and for each the place where it came first."""
    order = np.argsort(keys, kind="stable")
    starts = np.append(True, keys[order][1:] != keys[order][:-1])[: len(keys)]
    first = order[np.maximum.accumulate(np.where(starts, np.arange(len(keys)), 0))] if len(keys) else order
    again = np.argsort(order[~starts], kind="stable")
    return order[~starts][again], first[~starts][again]


def spread(count: int, most: int = MOST_EXAMPLES) -> NDArray[np.int64]:
    """Return places of a few examples from first to last."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, most)).astype(np.int64))


def exact_duplicates(source: Source) -> list[Finding]:
    """Find pairs that come again, queries with several answers, documents with several queries."""
    ids_I = source.table.items.ids
    pairs = Pairs.of(source, "positives")
    again, first = repeats(pairs.keys(ids_I))
    shown = spread(len(again))
    places = zip(
        source.locations(pairs.rows_P[again[shown]]),
        source.locations(pairs.rows_P[first[shown]]),
        source.said(pairs.queries_P[again[shown]]),
        source.said(pairs.documents_P[again[shown]]),
        strict=True,
    )
    found = [
        Finding(
            "duplicate_pairs",
            "warning",
            len(again),
            "pair that repeats an earlier pair",
            "pairs that repeat an earlier pair",
            "They count double, and a batch with both has one negative less. Keep one of each.",
            ("Row", "First in", "Query", "Positive"),
            list(places),
            len(pairs.rows_P),
        ),
        _itself(source, pairs),
        *_several(source, pairs),
    ]
    return [each for each in found if each.count]


def _itself(source: Source, pairs: Pairs) -> Finding:
    normal_I = source.facts.normal_I
    same = np.flatnonzero(normal_I[pairs.queries_P] == normal_I[pairs.documents_P])
    shown = same[spread(len(same))]
    rows = pairs.rows_P[shown]
    return Finding(
        "query_is_positive",
        "warning",
        len(same),
        "pair whose positive equals its query",
        "pairs whose positive equals its query",
        "Such a pair teaches nothing but copying. Check which columns were read.",
        ("Row", "Query", "Positive"),
        list(
            zip(
                source.locations(rows),
                source.said(pairs.queries_P[shown]),
                source.said(pairs.documents_P[shown]),
                strict=True,
            )
        ),
        len(pairs.rows_P),
    )


def _several(source: Source, pairs: Pairs) -> list[Finding]:
    """Count the queries with several answers, and the documents that answer several queries."""
    ids_I = source.table.items.ids
    _, first = np.unique(pairs.keys(ids_I), return_index=True)
    findings = []
    for kind, single, many_of, advice, heads, one, other in (
        (
            "queries_with_several_positives",
            "query with more than one positive",
            "queries with more than one positive",
            "Fine where all of them answer it. batch_sampling: no_duplicates keeps rows of one query apart.",
            ("Query", "Positives", "One of them", "Another"),
            pairs.queries_P[first],
            pairs.documents_P[first],
        ),
        (
            "documents_of_several_queries",
            "positive that answers more than one query",
            "positives that answer more than one query",
            "Fine where they do. Copies of a document in a batch are masked by content.",
            ("Positive", "Queries", "One of them", "Another"),
            pairs.documents_P[first],
            pairs.queries_P[first],
        ),
    ):
        contents, counts = np.unique(ids_I[one], return_counts=True)
        many = np.flatnonzero(counts > 1)
        most = many[np.argsort(-counts[many], kind="stable")][:MOST_EXAMPLES]
        examples = []
        for place in most.tolist():
            held = np.flatnonzero(ids_I[one] == contents[place])[:2]
            name, (left, right) = source.said(one[held[:1]])[0], source.said(other[held])
            examples.append((name, f"{counts[place]:,}", left, right))
        findings.append(Finding(kind, "note", len(many), single, many_of, advice, heads, examples, len(contents)))
    return findings


def near_duplicates(source: Source, side: Literal["query", "positives"]) -> list[Finding]:
    """Find queries, or documents, that are nearly equal to another one."""
    facts, ids_I = source.facts, source.table.items.ids
    numbers = source.queries if side == "query" else source.documents
    numbers = numbers[facts.is_text[numbers]]
    again, first = repeats(facts.normal_I[numbers])
    differ = ids_I[numbers[again]] != ids_I[numbers[first]]
    distinct = np.delete(numbers, again)
    alike = alike_within(facts.bands_BI[:, distinct], source.normal_texts(distinct))
    one = np.concatenate([numbers[first[differ]], distinct[alike.first_P]])
    other = np.concatenate([numbers[again[differ]], distinct[alike.second_P]])
    similarity = np.concatenate([np.ones(int(differ.sum())), alike.similarity_P])
    if not len(one):
        return []
    shown = spread(len(one))
    noun, where = ("queries", "query") if side == "query" else ("documents", "document")
    return [
        Finding(
            f"near_duplicate_{noun}",
            "warning",
            len(np.unique(other)),
            f"{where} that nearly equals another one",
            f"{noun} that nearly equal another one",
            f"They share at least {SIMILAR:.0%} of their runs of four characters, after case, spaces and punctuation "
            f"are dropped. In a batch, the other's {'positive' if side == 'query' else 'query'} is taken for a wrong "
            f"match, which it may not be. Drop copies; keep those that differ in what matters.{alike.left_out}",
            ("Alike", where.capitalize(), "Nearly equal"),
            list(
                zip(
                    [alike_text(similarity[place], equal=place < differ.sum()) for place in shown.tolist()],
                    source.said(one[shown]),
                    source.said(other[shown]),
                    strict=True,
                )
            ),
            len(numbers),
        )
    ]
