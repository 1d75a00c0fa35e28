"""The report of a mining: how many negatives, their scores beside the positives', and those nearest to a positive.

`vembed mine` writes it beside its rows, and a run that mines writes one for every mining.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Composed, Image, pictures_in
from vembed.evaluation.benchmark.names import model_labels
from vembed.pages.charts import distribution_edges, draw_distributions
from vembed.pages.page import (
    Cell,
    Facts,
    Figure,
    Heading,
    Note,
    Page,
    Section,
    SideBySide,
    Table,
    command_blocks,
    pairs_table,
    pictures_on,
)
from vembed.pages.pictures import copies_note, picture_name, small_copies
from vembed.pages.text import clip, count_text, metric_text, number_text
from vembed.text import plural
from vembed.vectors.mining import RULES, relative_limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import ImageLimits, Item
    from vembed.pages.page import Block
    from vembed.vectors.keys import MiningKeys
    from vembed.vectors.mining import Mined, MiningTask

SCHEMA_VERSION = 2  # raised when a key changes its meaning or goes away; a new key doesn't raise it
EXAMPLES, CHARACTERS, QUANTILES = 10, 240, (0.05, 0.5, 0.95)

MARGINS = (0.1, 0.05, 0.0)
"""Relative margins; the mined negatives that each would have left out are counted."""

DOUBT = (
    "A negative that scores near its positive, or above it, may answer the query without a label. Scores can't tell "
    "such answers from hard negatives, so these are counts and not a rate of false negatives. Read the first examples: "
    "they hold the negatives highest above, or least below, their positive."
)


@dataclass(frozen=True)
class MiningReport:
    """The result of a mining with what its report says beside it."""

    task: MiningTask
    mined: Mined
    keys: MiningKeys
    source: Mapping[str, str]  # model, settings, teacher
    notes: Sequence[str]  # of reading the data
    seconds: Mapping[str, float]  # by part of the work
    command: str  # empty inside a run, which has a report of its own

    @cached_property
    def judged_scores(self) -> NDArray[np.float32]:
        """Return the scores (U, n) that margins look at, the teacher's where there is one; NaN without a negative."""
        mined = self.mined
        return np.where(np.isnan(mined.teacher_Un), mined.scores_Un, mined.teacher_Un)

    @cached_property
    def near_positives(self) -> list[tuple[int, int, str]]:
        """Return percents of the positive's score, how many negatives score above, and the option that omits them."""
        positive_U1 = self.mined.positive_U[:, None]
        name = "--relative-margin " if self.command else "mine_relative_margin: "
        return [
            (
                round(100 * (1 - margin)),
                int((self.judged_scores > relative_limits(positive_U1, margin)).sum()),
                f"{name}{margin:g}",
            )
            for margin in MARGINS
        ]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of negatives of each query."""
        counts: NDArray[np.int64] = (self.mined.rows_Un >= 0).sum(axis=1)
        return counts

    @property
    def headline(self) -> str:
        """Return how much was mined and how much of it scores near its positive, in two sentences."""
        counts, wanted = self.counts, self.keys.mine_negatives
        short, none = int((counts < wanted).sum()), int((counts == 0).sum())
        mined = f"{count_text(int(counts.sum()))} hard negatives for {plural(len(counts), 'query', 'queries')}"
        if short:
            fewer = "none" if none == short else f"fewer than {wanted}"
            fewer += f" ({count_text(none)} got none)" if 0 < none < short else ""
            mined += f"; {plural(short, 'query', 'queries')} got {fewer}"
        (percent, count, _), *others = self.near_positives
        by_teacher = " by the teacher" if "teacher" in self.source else ""
        more = "".join(f", {count_text(count)} above {percent}%" for percent, count, _ in others)
        return f"{mined}. {count_text(count)} of them score above {percent}% of their positive{by_teacher}{more}."

    @property
    def scores(self) -> dict[str, NDArray[np.float32]]:
        """Return the scores of the sampled queries by group."""
        mined = self.mined
        # Candidates of the window that a rule left out, or that were behind enough others.
        others = np.isfinite(mined.sample_scores_SK) & ~mined.sample_chosen_SK
        return {
            "positives": mined.positive_U[mined.sample_S],
            "mined": mined.sample_scores_SK[mined.sample_chosen_SK],
            "not taken": mined.sample_scores_SK[others],
        }

    @property
    def refused(self) -> dict[str, int]:
        """Return how many candidates a rule left out, by the first rule that did."""
        return {name: int(count) for name, count in zip(RULES, self.mined.refused_1R[0], strict=True) if count}


@dataclass(frozen=True, slots=True)
class MiningExample:
    """A query with its best positive and its mined negatives."""

    query: Item
    positive: Item
    positive_score: float
    negatives: Sequence[tuple[Item, float, int]]  # item, score, rank


def choose_examples(report: MiningReport) -> list[MiningExample]:
    """Return the queries whose negatives score highest above their positive, then some from all over the data."""
    mined, task = report.mined, report.task
    with_any = np.flatnonzero((mined.rows_Un >= 0).any(axis=1))
    if not len(with_any):
        return []
    # Half of the examples are the most doubtful, half are evenly spaced: these show what is usual.
    leads_U = np.nanmax(report.judged_scores[with_any], axis=1) - mined.positive_U[with_any]
    worst = with_any[np.argsort(-leads_U, kind="stable")[: EXAMPLES // 2]]
    spread = with_any[np.linspace(0, len(with_any) - 1, min(len(with_any), EXAMPLES)).astype(np.int64)]

    examples = []
    for row in list(dict.fromkeys([*worst.tolist(), *spread.tolist()]))[:EXAMPLES]:
        is_there = mined.rows_Un[row] >= 0
        negatives = task.documents.take(mined.rows_Un[row, is_there])
        scores, ranks = report.judged_scores[row, is_there].tolist(), mined.ranks_Un[row, is_there].tolist()
        examples.append(
            MiningExample(
                query=task.queries.take(np.array([row]))[0],
                positive=task.documents.take(mined.positive_rows_U[[row]])[0],
                positive_score=float(mined.positive_U[row]),
                negatives=list(zip(negatives, scores, ranks, strict=True)),
            )
        )
    return examples


def mining_page(report: MiningReport, limits: ImageLimits) -> Page:
    """Return the report of a mining, with the pictures of the examples as far as the limits allow."""
    counts = report.counts
    facts = [
        ("Documents searched", count_text(len(report.task.documents))),
        ("Negatives of a query", f"{counts.mean():.1f} of {report.keys.mine_negatives} on average"),
        ("Queries without any", count_text(int((counts == 0).sum()))),
    ]
    groups = {name: scores for name, scores in report.scores.items() if len(scores)}
    rows = [
        [name, count_text(len(scores)), *(metric_text(float(value)) for value in np.quantile(scores, QUANTILES))]
        for name, scores in groups.items()
    ]
    table = Table(
        ("Scores of", "How many", "5%", "Median", "95%"),
        rows,
        title="Scores",
        caption="Quantiles over a sample of the queries.",
    )
    figure = Figure(
        "Positives, mined negatives and the candidates that were not taken",
        partial(draw_distributions, report.scores, is_large=True),
        "Scores by group; the table has the numbers.",
    )
    scores: list[Block] = [SideBySide([figure, table])]
    if report.refused:
        refused = [(name, count_text(count)) for name, count in report.refused.items()]
        scores.append(pairs_table("Left out", refused, "Candidates that a rule left out, by the first rule that did."))

    total = max(1, int(counts.sum()))
    doubt = Table(
        ("Score above", "Mined negatives", "Share", "Left out by"),
        [
            [f"{percent}% of the positive's", count_text(count), f"{100 * count / total:.1f}%", option]
            for percent, count, option in report.near_positives
        ],
        text_columns=frozenset({0, 3}),
        title="Near their positive",
        caption="Mined negatives by score, and the option that would have left them out.",
    )

    examples = choose_examples(report)
    # Pictures that several examples show are copied once.
    blocks = [block for number, example in enumerate(examples, start=1) for block in example_blocks(example, number)]
    pictures = list(pictures_on(blocks))
    copies = small_copies(pictures, limits)
    intro: list[Block] = [
        Note(
            "The queries whose negatives score highest above their positive first, then some from all over the data: "
            "the positive, and what was mined."
        )
    ]
    if note := copies_note(pictures, copies):
        intro.append(Note(note, muted=True))
    return Page(
        kind="Mined hard negatives",
        title=model_labels([report.source["model"]])[0],
        head=[Note(report.headline), Facts(facts)],
        sections=[
            Section("scores", "Scores", scores),
            Section("doubt", "Near their positive", [Note(DOUBT), doubt]),
            Section("examples", "Examples", [*intro, *blocks]),
            Section("method", "How it was mined", method_blocks(report)),
        ],
        document=mining_document(report, examples),
        copies=copies,
    )


def example_blocks(example: MiningExample, number: int) -> list[Block]:
    """Return a query, and a table of its positive and its negatives."""

    def document(item: Item) -> Cell:
        return Cell(clip(item_text(item), CHARACTERS).short, pictures=list(pictures_in([item])))

    rows: list[list[str | Cell]] = [
        ["positive", document(example.positive), metric_text(example.positive_score), "labelled"]
    ]
    for item, score, rank in example.negatives:
        # Of a negative or zero positive no share says anything.
        share = f"{100 * score / example.positive_score:.0f}%" if example.positive_score > 0 else ""
        rows.append([f"rank {rank}", document(item), metric_text(score), share])
    table = Table(
        ("Rank", "Document", "Score", "Of the positive's"),
        rows,
        text_columns=frozenset({0, 1}),
        tones={0: "chosen"},
        title=f"Example {number}",
    )
    query = clip(item_text(example.query), CHARACTERS).short
    if not (pictures := list(pictures_in([example.query]))):
        return [Heading(query), table]
    return [Heading(query), Table(("Query",), [[Cell(query, pictures=pictures)]], title=f"Query {number}"), table]


def method_blocks(report: MiningReport) -> list[Block]:
    """Return the model and settings, the time, the notes, and the command."""
    prefix = "mine_" if report.command else ""  # a run has keys, and the command options
    settings = [(name.removeprefix(prefix), str(value)) for name, value in report.keys.mining().items()]
    seconds = [(name, f"{number_text(value)} s") for name, value in report.seconds.items()]
    return [
        pairs_table("Settings", [*report.source.items(), *settings], "Model and settings."),
        pairs_table("Time", seconds, "Wall time by part, of the process that wrote this."),
        *(Note(note, muted=True) for note in report.notes),
        *command_blocks(report.command),
    ]


def mining_document(report: MiningReport, examples: Sequence[MiningExample]) -> dict[str, Any]:
    """Return the report for programs, every number unrounded."""
    counts = report.counts
    groups = report.scores
    # The histogram has the edges of the figure, so that a program draws the same one.
    edges = distribution_edges([scores for scores in groups.values() if len(scores)])
    shares = {name: 100 * np.histogram(scores, bins=edges)[0] / max(1, len(scores)) for name, scores in groups.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        **report.source,
        "settings": report.keys.mining(),
        "queries": len(report.task.queries),
        "documents": len(report.task.documents),
        "negatives": int(counts.sum()),
        "queries_with_fewer": int((counts < report.keys.mine_negatives).sum()),
        "queries_with_none": int((counts == 0).sum()),
        "left_out": report.refused,
        "near_positives": [
            {"above_percent": percent, "negatives": count, "left_out_by": option}
            for percent, count, option in report.near_positives
        ],
        "histogram": {"edges": edges.tolist(), **{name: share.tolist() for name, share in shares.items()}},
        "examples": [
            {
                "query": item_text(example.query),
                "positive": item_text(example.positive),
                "positive_score": example.positive_score,
                "negatives": [
                    {"text": item_text(item), "score": score, "rank": rank} for item, score, rank in example.negatives
                ],
            }
            for example in examples
        ],
        "seconds": dict(report.seconds),
        "notes": list(report.notes),
        "command": report.command,
    }


def item_text(item: Item) -> str:
    """Return a text, or the name of a picture's file in brackets; mined rows have the path."""
    if isinstance(item, Composed):
        return " ".join([*(f"[{picture_name(image)}]" for image in item.images), item.text])
    return f"[{picture_name(item)}]" if isinstance(item, Image) else item
