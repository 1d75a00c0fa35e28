"""What stands in the training data and in the evaluation data: queries, and documents that answer them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vembed.data.near import SIMILAR, alike_between
from vembed.workflows.data_check.duplicates import spread
from vembed.workflows.data_check.findings import Finding, alike_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from numpy.typing import NDArray

    from vembed.workflows.data_check.findings import Severity
    from vembed.workflows.data_check.source import Source

HEADS = ("Evaluation row", "Training row", "Alike", "In the evaluation data", "In the training data")


class _Leak(NamedTuple):
    """Pairs of items, one of each set."""

    test: NDArray[np.int64]
    train: NDArray[np.int64]
    similarity: NDArray[np.float64]
    equal: bool


def leaks(train: Source, test: Source) -> tuple[list[Finding], list[str]]:
    """Find queries and documents of the evaluation data among those of the training data; say what wasn't compared."""
    sides = [
        _of_side(
            train,
            test,
            "query",
            ("query", "queries"),
            "The model learns these questions, so the evaluation comes out too good. Drop the rows from the training "
            "data, unless the evaluation asks known questions of new documents on purpose.",
        ),
        _of_side(
            train,
            test,
            "positives",
            ("answer", "answers"),
            "Usual where one corpus serves both, and then no fault. Where the model will meet new documents, drop the "
            "rows: the evaluation comes out too good.",
        ),
    ]
    return [each for findings, _ in sides for each in findings], [note for _, note in sides if note]


def _of_side(
    train: Source, test: Source, column: Literal["query", "positives"], nouns: tuple[str, str], advice: str
) -> tuple[list[Finding], str]:
    ours, theirs = (source.queries if column == "query" else source.positives for source in (train, test))
    noun: str
    severity: Severity
    noun, severity = ("queries", "error") if column == "query" else ("documents", "warning")
    exact = _equal(train, test, ours, theirs)
    near, left_out = _near(train, test, ours, np.setdiff1d(theirs, exact.test))
    look = (
        f"They share at least {SIMILAR:.0%} of their runs of four characters with one there. Look at them: a changed "
        "number or name may make all the difference."
    )
    found: list[tuple[str, Severity, str, str, _Leak]] = [
        (f"leaked_{noun}", severity, "also in the training data", advice, exact),
        (f"near_leaked_{noun}", "warning", "almost in the training data", f"{look} {advice}", near),
    ]
    findings = []
    for kind, level, phrase, words, leak in found:
        one, many = (f"{each} of {test.name} {phrase}" for each in nouns)
        examples = _examples(train, test, column, leak)
        findings.append(Finding(kind, level, len(leak.test), one, many, words, HEADS, examples, len(theirs)))
    note = f"{test.name}, {nouns[1]} nearly in the training data:{left_out}" if left_out else ""
    return [each for each in findings if each.count], note


def _equal(train: Source, test: Source, ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> _Leak:
    """Return items that are equal once normalised."""
    ours = ours[np.argsort(train.facts.normal_I[ours], kind="stable")]
    known, wanted = train.facts.normal_I[ours], test.facts.normal_I[theirs]
    places = np.searchsorted(known, wanted)
    found = np.flatnonzero(np.append(known, 0)[places] == wanted)
    found = found[places[found] < len(known)]
    return _Leak(theirs[found], ours[places[found]], np.ones(len(found)), equal=True)


def _near(train: Source, test: Source, ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> tuple[_Leak, str]:
    """Return texts that are nearly equal, of each of the evaluation data the nearest; and what wasn't compared."""
    ours = ours[train.facts.is_text[ours]]
    theirs = theirs[test.facts.is_text[theirs]]
    bands = np.concatenate([test.facts.bands_BI[:, theirs], train.facts.bands_BI[:, ours]], axis=1)
    texts = _joined(test.normal_texts(theirs), train.normal_texts(ours), len(theirs))
    alike = alike_between(bands, len(theirs), texts)
    _, nearest = np.unique(alike.first_P, return_index=True)  # the most alike come first
    nearest.sort()
    first, second = alike.first_P[nearest], alike.second_P[nearest] - len(theirs)
    return _Leak(theirs[first], ours[second], alike.similarity_P[nearest], equal=False), alike.left_out


def _joined(
    first: Callable[[NDArray[np.int64]], list[str]], second: Callable[[NDArray[np.int64]], list[str]], num_first: int
) -> Callable[[NDArray[np.int64]], list[str]]:
    """Return what gives texts of two sets, the second behind the first."""

    def texts(places: NDArray[np.int64]) -> list[str]:
        is_first = places < num_first
        of_first, of_second = iter(first(places[is_first])), iter(second(places[~is_first] - num_first))
        return [next(of_first if own else of_second) for own in is_first.tolist()]

    return texts


def _examples(train: Source, test: Source, column: Literal["query", "positives"], leak: _Leak) -> list[tuple[str, ...]]:
    shown = spread(len(leak.test))
    ours, theirs = leak.train[shown], leak.test[shown]
    return list(
        zip(
            test.locations(test.first_rows(column, theirs)),
            train.locations(train.first_rows(column, ours)),
            [alike_text(value, equal=leak.equal) for value in leak.similarity[shown].tolist()],
            test.said(theirs),
            train.said(ours),
            strict=True,
        )
    )
