"""Findings about texts that come twice, or nearly: in the data, and in the data and its evaluation data.

Texts are equal when they differ in nothing but case, spaces and punctuation: their normalised texts have one hash. They
are nearly equal when they share `SIMILAR` of their runs of four characters: vembed/data/near.py finds such pairs.
Sketches are made once, with the other facts of items, and only the texts of candidates are read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vembed.data.near import SIMILAR, alike_between, alike_within
from vembed.workflows.data_check.source import Finding, alike_text, spread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    from numpy.typing import NDArray

    from vembed.workflows.data_check.source import Severity, Source


def repeats(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of keys that came before, ascending, and for each the position where it came first."""
    order = np.argsort(keys, kind="stable")
    starts = np.append(True, keys[order][1:] != keys[order][:-1])[: len(keys)]
    first = order[np.maximum.accumulate(np.where(starts, np.arange(len(keys)), 0))] if len(keys) else order
    again = np.argsort(order[~starts], kind="stable")
    return order[~starts][again], first[~starts][again]


def near_duplicates(source: Source, side: Literal["query", "positives"]) -> Iterator[Finding]:
    """Find queries, or documents, that are nearly equal to another one."""
    facts, ids_I = source.facts, source.table.items.ids
    numbers = source.queries if side == "query" else source.documents
    numbers = numbers[facts.is_text[numbers]]
    # Of equal texts only the first goes on to the sketches. An item that stands in the table twice is no finding here:
    # `duplicate_pairs` and others tell of it.
    again, first = repeats(facts.normal_I[numbers])
    differ = ids_I[numbers[again]] != ids_I[numbers[first]]
    distinct = np.delete(numbers, again)
    alike = alike_within(facts.bands_BI[:, distinct], source.normal_texts(distinct))
    one = np.concatenate([numbers[first[differ]], distinct[alike.first_P]])
    other = np.concatenate([numbers[again[differ]], distinct[alike.second_P]])
    num_equal = int(differ.sum())
    similarity = np.concatenate([np.ones(num_equal), alike.similarity_P])
    shown = spread(len(one))
    noun, singular = ("queries", "query") if side == "query" else ("documents", "document")
    examples = zip(
        [alike_text(similarity[pair], equal=pair < num_equal) for pair in shown.tolist()],
        source.shown(one[shown]),
        source.shown(other[shown]),
        strict=True,
    )
    yield Finding(
        f"near_duplicate_{noun}",
        "warning",
        len(np.unique(other)),
        f"{singular} that nearly equals another one",
        f"{noun} that nearly equal another one",
        f"They share at least {SIMILAR:.0%} of their runs of four characters, after case, spaces and punctuation "
        f"are dropped. In a batch, the other's {'positive' if side == 'query' else 'query'} is taken for a wrong "
        f"match, which it may not be. Drop copies; keep those that differ in what matters.{alike.left_out}",
        ("Alike", singular.capitalize(), "Nearly equal"),
        list(examples),
        len(numbers),
    )


def leaks(train: Source, test: Source, column: Literal["query", "positives"]) -> tuple[list[Finding], str]:
    """Find queries, or answers, of the evaluation data among those of the training data.

    Returns:
        The findings; and a sentence about what wasn't compared, or "".
    """
    noun: str
    severity: Severity
    if column == "query":
        noun, nouns, severity = "queries", ("query", "queries"), "error"
        ours, theirs = train.queries, test.queries
        advice = (
            "The model learns these questions, so the evaluation comes out too good. Drop the rows from the training "
            "data, unless the evaluation asks known questions of new documents on purpose."
        )
    else:
        noun, nouns, severity = "documents", ("answer", "answers"), "warning"
        ours, theirs = train.positives, test.positives
        advice = (
            "Usual where one corpus serves both, and then no fault. Where the model will meet new documents, drop the "
            "rows: the evaluation comes out too good."
        )
    num_theirs = len(theirs)

    # Equal once normalised. Hashes of both sets are those of this process, so they can be compared.
    by_hash = ours[np.argsort(train.facts.normal_I[ours], kind="stable")]
    known, wanted = train.facts.normal_I[by_hash], test.facts.normal_I[theirs]
    positions = np.searchsorted(known, wanted)
    equal = np.flatnonzero(np.append(known, 0)[positions] == wanted)
    equal = equal[positions[equal] < len(known)]
    exact = theirs[equal], by_hash[positions[equal]], np.ones(len(equal))

    # Nearly equal, of the others: the two sets are one list of texts, those of the evaluation data first.
    theirs = np.setdiff1d(theirs, exact[0])
    theirs = theirs[test.facts.is_text[theirs]]
    ours = ours[train.facts.is_text[ours]]
    of_theirs, of_ours = test.normal_texts(theirs), train.normal_texts(ours)

    def texts(at: NDArray[np.int64]) -> list[str]:
        is_theirs = at < len(theirs)
        their_texts, our_texts = iter(of_theirs(at[is_theirs])), iter(of_ours(at[~is_theirs] - len(theirs)))
        return [next(their_texts if one else our_texts) for one in is_theirs.tolist()]

    bands = np.concatenate([test.facts.bands_BI[:, theirs], train.facts.bands_BI[:, ours]], axis=1)
    alike = alike_between(bands, len(theirs), texts)
    _, nearest = np.unique(alike.first_P, return_index=True)  # of each text one pair: the most alike come first
    nearest.sort()
    near = theirs[alike.first_P[nearest]], ours[alike.second_P[nearest] - len(theirs)], alike.similarity_P[nearest]

    look = (
        f"They share at least {SIMILAR:.0%} of their runs of four characters with one there. Look at them: a changed "
        "number or name may make all the difference."
    )
    kinds: tuple[tuple[str, Severity, str, str], ...] = (
        (f"leaked_{noun}", severity, "also in the training data", advice),
        (f"near_leaked_{noun}", "warning", "almost in the training data", f"{look} {advice}"),
    )
    findings = []
    for (kind, level, phrase, words), (test_items, train_items, similarity) in zip(kinds, (exact, near), strict=True):
        shown = spread(len(test_items))
        examples = zip(
            test.locations(test.first_rows(column, test_items[shown])),
            train.locations(train.first_rows(column, train_items[shown])),
            [alike_text(value, equal=kind == f"leaked_{noun}") for value in similarity[shown].tolist()],
            test.shown(test_items[shown]),
            train.shown(train_items[shown]),
            strict=True,
        )
        one, many = (f"{word} of {test.name} {phrase}" for word in nouns)
        heads = ("Evaluation row", "Training row", "Alike", "In the evaluation data", "In the training data")
        findings.append(Finding(kind, level, len(test_items), one, many, words, heads, list(examples), num_theirs))
    note = f"{test.name}, {nouns[1]} nearly in the training data:{alike.left_out}" if alike.left_out else ""
    return [finding for finding in findings if finding.count], note
