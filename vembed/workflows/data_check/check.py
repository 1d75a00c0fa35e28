"""Check a data set: read it, look for everything that is wrong, and profile it.

A finding is a function that yields it, with a count of 0 where all is well, and its line in one of the two lists at the
end: `JUDGEMENT_FINDINGS` and `COPY_FINDINGS`. Those about equal and nearly equal texts stand in near.py, those that
need a model in with_model.py.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vembed.batch import pictures_in
from vembed.data.images import ImageError, decode_image
from vembed.data.table import BLOCK_ROWS
from vembed.errors import ExitCode
from vembed.text import plural
from vembed.workflows.data_check.near import leaks, near_duplicates, repeats
from vembed.workflows.data_check.source import (
    LONG_WORDS,
    MOST_EXAMPLES,
    NO_LETTERS,
    SCRIPTS,
    SEVERITIES,
    TRACES,
    Finding,
    Pairs,
    Profile,
    Source,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import ImageLimits, Item
    from vembed.data.read import DataSource
    from vembed.vectors.encode import ItemEncoder
    from vembed.workflows.data_check.source import Severity

LEAST_SIDE = 32
"""Pixels of the shorter side below which a picture is tiny: models see 224 and more."""

SECONDS_BETWEEN_LINES = 10.0
"""Between log lines while pictures are decoded."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DataCheck:
    """Findings and profile of a data set."""

    source: Source
    findings: Sequence[Finding]  # the worst first
    profile: Profile
    notes: Sequence[str]  # of reading, and of what could not be checked

    def count(self, severity: str) -> int:
        """Return how many kinds of findings of a severity there are."""
        return sum(finding.severity == severity for finding in self.findings)

    def exit_code(self, *, strict: bool) -> ExitCode:
        """Return `DATA` where there are errors, or with `strict` warnings; else `OK`."""
        return ExitCode.DATA if self.count("error") or (strict and self.count("warning")) else ExitCode.OK


def check_data(
    data: DataSource,
    against: Sequence[DataSource],
    folder: Path,
    encode: ItemEncoder | None = None,
) -> DataCheck:
    """Check a data set.

    Args:
        against: Evaluation data, whose queries and documents must not be in the data.
        folder: Gets what doesn't fit memory: rows and vectors; the caller removes it.
        encode: Counts tokens, and looks for unlabelled answers.

    Raises:
        VembedError: No row can be read, or the model doesn't take them.
    """
    (folder / "data").mkdir()
    source = Source.read(data, folder / "data")
    notes, findings = list(source.notes), list(broken_rows(source))
    for number, test_data in enumerate(against):
        (folder / f"against-{number}").mkdir()
        label = f"{test_data.path} ({test_data.split})" if test_data.split else test_data.path
        test = Source.read(test_data, folder / f"against-{number}", label)
        notes += [f"{label}: {note}" for note in test.notes]
        queries, left_queries = leaks(source, test, "query")
        answers, left_answers = leaks(source, test, "positives")
        left_out = [note for note in (left_queries, left_answers) if note]
        notes += left_out
        if not (queries or answers or left_out):
            sizes = plural(len(test.queries), "query", "queries"), plural(len(test.positives), "answer")
            notes.append(f"{label}: none of its {sizes[0]} and {sizes[1]} is in the training data.")
        findings += [*broken_rows(test), *queries, *answers]
    for find in JUDGEMENT_FINDINGS:
        findings += find(source)
    findings += check_pictures(source, data.image_limits)
    tokens = None
    cut: list[Finding] = []
    if encode is not None:
        from vembed.workflows.data_check.with_model import false_negatives, token_lengths  # brings torch

        tokens, cut = token_lengths(source, encode)
        if source.table.has_classes:
            notes.append("Rows have classes: unlabelled answers are not looked for among them.")
        else:
            findings += false_negatives(source, encode, folder)
    for find in COPY_FINDINGS:
        findings += find(source)
    findings += odd_texts(source)
    findings += long_texts(source) if encode is None else cut
    # By severity; within one, what spoils a result most was looked for first.
    worst_first = sorted(
        (finding for finding in findings if finding.count), key=lambda finding: SEVERITIES.index(finding.severity)
    )
    return DataCheck(source, worst_first, Profile.of(source, tokens), notes)


def broken_rows(source: Source) -> Iterator[Finding]:
    """Find rows that can't be used; they were met while the data were read."""
    problems = source.problems
    examples = [
        (f"{kind.size:,}", column, where, reason)
        for (column, _), kind in sorted(problems.kinds.items(), key=lambda item: -item[1].size)
        for where, reason in kind.first
    ]
    yield Finding(
        "broken_rows",
        "error",
        problems.count,
        f"row of {source.name} that can't be used",
        f"rows of {source.name} that can't be used",
        "Training refuses the data for them; skip_invalid_records: true drops up to max_invalid_records of them, "
        "but none with a path that leads out of the data.",
        ("Rows alike", "Column", "Row", "Why"),
        examples[:50],
        problems.count + len(source.table),
    )


def contradictory_negatives(source: Source) -> Iterator[Finding]:
    """Find pairs that one row calls positive and another negative; grades of pairs have a finding of their own."""
    if len(source.table.listed[1]):
        return
    positives, negatives, ids_I = source.positive_pairs, source.pairs("negatives"), source.table.items.ids
    # Pairs are compared as hashes of 64 bits, so that no text is read but those of examples; two of a billion different
    # pairs share one with a chance of 3%.
    right, wrong = positives.keys(ids_I), negatives.keys(ids_I)
    both = np.flatnonzero(np.isin(wrong, right))
    if not len(both):
        return
    order = np.argsort(right, kind="stable")
    shown = both[spread(len(both))]
    positive_of = order[np.searchsorted(right[order], wrong[shown])]
    examples = zip(
        source.locations(negatives.rows_P[shown]),
        source.locations(positives.rows_P[positive_of]),
        source.shown(negatives.queries_P[shown]),
        source.shown(negatives.documents_P[shown]),
        strict=True,
    )
    yield Finding(
        "contradictory_negatives",
        "error",
        len(both),
        "hard negative that is a positive of its query in another row",
        "hard negatives that are positives of their query in another row",
        "One row pulls the pair together and another pushes it apart. Drop the wrong one.",
        ("Negative in", "Positive in", "Query", "Document"),
        list(examples),
        len(wrong),
    )


def contradictory_grades(source: Source) -> Iterator[Finding]:
    """Find pairs with two grades."""
    rows, scores = source.table.listed
    if not len(scores):
        return
    # The scores of a row stand in the order of its positives, then its negatives: bring the pairs into that order.
    positives, negatives = source.positive_pairs, source.pairs("negatives")
    rows_P = np.concatenate([positives.rows_P, negatives.rows_P])
    order = np.argsort(rows_P, kind="stable")
    order = order[np.isin(rows_P[order], rows)]
    queries_P = np.concatenate([positives.queries_P, negatives.queries_P])
    documents_P = np.concatenate([positives.documents_P, negatives.documents_P])
    pairs = Pairs(rows_P[order], queries_P[order], documents_P[order])
    again, first = repeats(pairs.keys(source.table.items.ids))
    differ = scores[again] != scores[first]
    again, first = again[differ], first[differ]
    shown = spread(len(again))

    def graded(at: NDArray[np.int64]) -> list[str]:
        locations = source.locations(pairs.rows_P[at])
        return [f"{where}: {score:g}" for where, score in zip(locations, scores[at].tolist(), strict=True)]

    examples = zip(
        graded(again[shown]),
        graded(first[shown]),
        source.shown(pairs.queries_P[again[shown]]),
        source.shown(pairs.documents_P[again[shown]]),
        strict=True,
    )
    yield Finding(
        "contradictory_grades",
        "error",
        len(again),
        "pair with another grade than in an earlier row",
        "pairs with another grade than in an earlier row",
        "Keep one grade for each pair, or their mean.",
        ("Row and grade", "Earlier row", "Query", "Document"),
        list(examples),
        len(scores),
    )


def constant_grades(source: Source) -> Iterator[Finding]:
    """Find grades that are all the same."""
    _, scores = source.table.listed
    if len(scores) and (scores == scores[0]).all():
        yield Finding(
            "constant_grades",
            "warning",
            len(scores),
            f"pair with the grade {scores[0]:g}, and none with another",
            f"pairs with the grade {scores[0]:g}, and none with another",
            "Losses that compare grades learn nothing from one alone. Add pairs with other grades.",
            of=len(scores),
        )


def contradictory_classes(source: Source) -> Iterator[Finding]:
    """Find queries of two classes."""
    # Only a query's first class is compared with the later ones: a query of three classes counts twice.
    classes_N, names = source.table.classes
    labelled = np.flatnonzero(classes_N >= 0)
    queries = source.table.numbers("query")[1]
    again, first = repeats(source.table.items.ids[queries[labelled]])
    again, first = labelled[again], labelled[first]
    differ = classes_N[again] != classes_N[first]
    again, first = again[differ], first[differ]
    shown = spread(len(again))

    def with_class(rows: NDArray[np.int64]) -> list[str]:
        labels = [names[number] for number in classes_N[rows].tolist()]
        return [f"{where}: {label}" for where, label in zip(source.locations(rows), labels, strict=True)]

    examples = zip(with_class(again[shown]), with_class(first[shown]), source.shown(queries[again[shown]]), strict=True)
    yield Finding(
        "contradictory_classes",
        "error",
        len(again),
        "query with another class than in an earlier row",
        "queries with another class than in an earlier row",
        "Rows of one class are positives of each other. Give the query one class.",
        ("Row and class", "Earlier row", "Query"),
        list(examples),
        len(labelled),
    )


def classes_of_one_row(source: Source) -> Iterator[Finding]:
    """Find classes that a single row has."""
    classes_N, names = source.table.classes
    counts = np.bincount(classes_N[classes_N >= 0], minlength=len(names))  # -1 is a row without a class
    alone = np.flatnonzero(counts == 1)
    yield Finding(
        "classes_of_one_row",
        "warning",
        len(alone),
        "class with one row only",
        "classes with one row only",
        "Nothing else of their class can be near them. Add rows, or join classes.",
        ("Class",),
        [(str(names[number]),) for number in alone[spread(len(alone))].tolist()],
        len(names),
    )


def check_pictures(source: Source, limits: ImageLimits) -> Iterator[Finding]:
    """Find pictures that can't be decoded, and tiny ones: every picture is decoded, in threads.

    Headers were checked when the rows were read; only the pixels tell of a file that is cut off.
    """
    items = source.table.items
    numbers = np.flatnonzero(~source.facts.is_text)
    broken: list[tuple[int, str, str]] = []  # item, what it shows, why
    tiny: list[tuple[int, str, str]] = []
    num_pictures, num_broken, num_tiny = len(numbers), 0, 0
    last_line = time.perf_counter()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        # Pictures of tar shards and Parquet come as bytes: a block of them must fit memory.
        for start in range(0, len(numbers), BLOCK_ROWS // 8):
            block = numbers[start : start + BLOCK_ROWS // 8]
            verdicts = pool.map(partial(_picture_verdict, limits=limits), items.at(block))
            for number, (reason, size) in zip(block.tolist(), verdicts, strict=True):
                num_broken += bool(reason)
                num_tiny += bool(size)
                for words, examples in ((reason, broken), (size, tiny)):
                    if words and len(examples) < MOST_EXAMPLES:
                        examples.append((number, source.shown(np.array([number]))[0], words))
            if time.perf_counter() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.perf_counter()
                _log.info("looked at %d of %d pictures", min(start + len(block), num_pictures), num_pictures)

    def located(examples: list[tuple[int, str, str]]) -> list[tuple[str, ...]]:
        places = source.places(np.array([number for number, *_ in examples], dtype=np.int64))
        return [(where, *rest) for where, (_, *rest) in zip(places, examples, strict=True)]

    yield Finding(
        "broken_pictures",
        "error",
        num_broken,
        "picture that can't be decoded",
        "pictures that can't be decoded",
        "Their headers are fine, their pixels are not; training stops at the first of them. Save them again, or "
        "drop the rows.",
        ("Row", "Picture", "Why"),
        located(broken),
        num_pictures,
    )
    yield Finding(
        "tiny_pictures",
        "warning",
        num_tiny,
        f"picture with a side of under {LEAST_SIDE} pixels",
        f"pictures with a side of under {LEAST_SIDE} pixels",
        "Thumbnails, icons and tracking pixels show a model little once they are enlarged. Fetch larger ones, or "
        "drop the rows.",
        ("Row", "Picture", "Pixels"),
        located(tiny),
        num_pictures,
    )


def _picture_verdict(item: Item, limits: ImageLimits) -> tuple[str, str]:
    """Return why an item's pictures can't be decoded, and the size of one that is tiny; empty where all is well."""
    tiny = ""
    for image in pictures_in([item]):
        try:
            width, height = decode_image(image, limits).size
        except ImageError as error:
            return error.reason, ""
        tiny = f"{width} x {height}" if min(width, height) < LEAST_SIDE else tiny
    return "", tiny


def duplicate_pairs(source: Source) -> Iterator[Finding]:
    """Find pairs that come again."""
    pairs = source.positive_pairs
    again, first = repeats(pairs.keys(source.table.items.ids))
    shown = spread(len(again))
    examples = zip(
        source.locations(pairs.rows_P[again[shown]]),
        source.locations(pairs.rows_P[first[shown]]),
        source.shown(pairs.queries_P[again[shown]]),
        source.shown(pairs.documents_P[again[shown]]),
        strict=True,
    )
    yield Finding(
        "duplicate_pairs",
        "warning",
        len(again),
        "pair that repeats an earlier pair",
        "pairs that repeat an earlier pair",
        "They count double, and a batch with both has one negative less. Keep one of each.",
        ("Row", "First in", "Query", "Positive"),
        list(examples),
        len(pairs.rows_P),
    )


def query_is_positive(source: Source) -> Iterator[Finding]:
    """Find pairs whose two texts are equal but for case, spaces and punctuation."""
    pairs, normal_I = source.positive_pairs, source.facts.normal_I
    same = np.flatnonzero(normal_I[pairs.queries_P] == normal_I[pairs.documents_P])
    shown = same[spread(len(same))]
    examples = zip(
        source.locations(pairs.rows_P[shown]),
        source.shown(pairs.queries_P[shown]),
        source.shown(pairs.documents_P[shown]),
        strict=True,
    )
    yield Finding(
        "query_is_positive",
        "warning",
        len(same),
        "pair whose positive equals its query",
        "pairs whose positive equals its query",
        "Such a pair teaches nothing but copying. Check which columns were read.",
        ("Row", "Query", "Positive"),
        list(examples),
        len(pairs.rows_P),
    )


def several_partners(source: Source) -> Iterator[Finding]:
    """Find queries with several answers, and documents that answer several queries."""
    ids_I, pairs = source.table.items.ids, source.positive_pairs
    # Each pair once: a pair that comes again is no second answer.
    _, first = np.unique(pairs.keys(ids_I), return_index=True)
    queries, documents = pairs.queries_P[first], pairs.documents_P[first]
    for kind, one, many, advice, heads, items, partners in (
        (
            "queries_with_several_positives",
            "query with more than one positive",
            "queries with more than one positive",
            "Fine where all of them answer it. batch_sampling: no_duplicates keeps rows of one query apart.",
            ("Query", "Positives", "One of them", "Another"),
            queries,
            documents,
        ),
        (
            "documents_of_several_queries",
            "positive that answers more than one query",
            "positives that answer more than one query",
            "Fine where they do. Copies of a document in a batch are masked by content.",
            ("Positive", "Queries", "One of them", "Another"),
            documents,
            queries,
        ),
    ):
        contents, counts = np.unique(ids_I[items], return_counts=True)
        several = np.flatnonzero(counts > 1)
        most = several[np.argsort(-counts[several], kind="stable")][:MOST_EXAMPLES]
        examples = []  # a pass over all pairs for each example, which are ten at most
        for content in most.tolist():
            held = np.flatnonzero(ids_I[items] == contents[content])[:2]
            name, (left, right) = source.shown(items[held[:1]])[0], source.shown(partners[held])
            examples.append((name, f"{counts[content]:,}", left, right))
        yield Finding(kind, "note", len(several), one, many, advice, heads, examples, len(contents))


def odd_texts(source: Source) -> Iterator[Finding]:
    """Find texts without a letter, and texts with traces of an export or a wrong encoding."""
    facts, used = source.facts, source.texts
    silent = used[facts.scripts_I[used] == SCRIPTS.index(NO_LETTERS)]
    advice = 'Numbers and signs alone say little: often a placeholder ("-", "...") or the wrong column.'
    yield _of_texts(source, "texts_without_letters", "warning", silent, "without a letter", advice, len(used))
    for bit, trace in enumerate(TRACES):
        traced = used[facts.traces_I[used] & (1 << bit) > 0]
        yield _of_texts(source, trace.kind, "warning", traced, trace.phrase, trace.advice, len(used))


def long_texts(source: Source) -> Iterator[Finding]:
    """Find texts that most encoders would cut, the longest first."""
    words_I, used = source.facts.words_I, source.texts
    long = used[words_I[used] > LONG_WORDS]
    long = long[np.argsort(-words_I[long], kind="stable")]
    advice = "Most text encoders read 512 tokens and cut the rest. --model MODEL counts what that model cuts."
    yield _of_texts(source, "long_texts", "note", long, f"of over {LONG_WORDS} words", advice, len(used))


def _of_texts(
    source: Source, kind: str, severity: Severity, numbers: NDArray[np.int64], phrase: str, advice: str, of: int
) -> Finding:
    shown = numbers[spread(len(numbers))]
    words = [f"{count:,}" for count in source.facts.words_I[shown].tolist()]
    # `places` looks through all columns: a text may be a query in one row and a negative in another.
    examples = list(zip(source.places(shown), words, source.shown(shown), strict=True))
    one, many = f"text {phrase}", f"texts {phrase}"
    return Finding(kind, severity, len(numbers), one, many, advice, ("Row", "Words", "Text"), examples, of)


JUDGEMENT_FINDINGS: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    contradictory_grades,
    constant_grades,
    contradictory_negatives,
    contradictory_classes,
    classes_of_one_row,
)
"""Judgements that exclude each other, or say nothing."""

COPY_FINDINGS: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    partial(near_duplicates, side="query"),
    partial(near_duplicates, side="positives"),
    duplicate_pairs,
    query_is_positive,
    several_partners,
)
"""Texts and pairs that come twice."""
