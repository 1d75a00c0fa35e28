"""The report of a mining: how many negatives, their scores beside the positives', and how much of it may be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Composed, Image, pictures_in
from vembed.evaluation.benchmark.names import model_labels
from vembed.mining.choose import RULES
from vembed.mining.false_negatives import estimate
from vembed.pages.charts import distribution_edges, draw_distributions
from vembed.pages.page import (
    Cell,
    Facts,
    Figure,
    Heading,
    Note,
    Page,
    Row,
    Section,
    Table,
    command_blocks,
    pairs_table,
    pictures_on,
)
from vembed.pages.pictures import copies_note, picture_name, small_copies
from vembed.pages.text import clip, count_text, metric_text, number_text
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.data.images import ImageLimits
    from vembed.mining.false_negatives import FalseNegatives
    from vembed.mining.mine import Mined
    from vembed.mining.task import MiningTask
    from vembed.pages.page import Block
    from vembed.vectors.keys import MiningKeys

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
EXAMPLES, CHARACTERS, QUANTILES = 10, 240, (0.05, 0.5, 0.95)

LIMITS = (
    "The estimate reads scores alone: it takes documents that answer a query without a label to score as labelled ones "
    "do. It is too high where true negatives score as high as positives, and too low where unlabelled answers score "
    "lower than labelled ones, or one query has several; a better teacher helps. The interval is of the sampled "
    "queries only."
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
    def false_negatives(self) -> FalseNegatives | None:
        """Return the estimated rate, which takes a while."""
        return estimate(self.mined.sample_positive_S, self.mined.sample_scores_SK, self.mined.sample_chosen_SK)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of negatives of each query."""
        counts: NDArray[np.int64] = (self.mined.rows_Un >= 0).sum(axis=1)
        return counts

    @property
    def headline(self) -> str:
        """Return how much was mined and how good it seems, in two sentences."""
        counts, wanted = self.counts, self.keys.mine_negatives
        short, none = int((counts < wanted).sum()), int((counts == 0).sum())
        mined = f"{count_text(int(counts.sum()))} hard negatives for {plural(len(counts), 'query', 'queries')}"
        if short:
            fewer = "none" if none == short else f"fewer than {wanted}"
            fewer += f" ({count_text(none)} got none)" if 0 < none < short else ""
            mined += f"; {plural(short, 'query', 'queries')} got {fewer}"
        rate = self.false_negatives
        if rate is None:
            return (
                f"{mined}. How many of them answer their query after all can't be told: too few positives or "
                f"candidates are near."
            )
        low, high = (f"{100 * value:.1f}" for value in (rate.low, rate.high))
        return (
            f"{mined}. Probably {100 * rate.rate:.1f}% of them answer their query after all (95% interval {low} to "
            f"{high}%)."
        )

    @property
    def scores(self) -> dict[str, NDArray[np.float32]]:
        """Return the scores of the sampled queries by group."""
        mined = self.mined
        others = np.isfinite(mined.sample_scores_SK) & ~mined.sample_chosen_SK
        return {
            "positives": mined.sample_positive_S,
            "mined": mined.sample_scores_SK[mined.sample_chosen_SK],
            "not taken": mined.sample_scores_SK[others],
        }

    @property
    def refused(self) -> dict[str, int]:
        """Return how many candidates a rule left out, by the first rule that did."""
        return {name: int(count) for name, count in zip(RULES, self.mined.refused_1R[0], strict=True) if count}


@dataclass(frozen=True, slots=True)
class MiningExample:
    """A query with a positive and its mined negatives."""

    query: Item
    positive: Item
    positive_score: float
    negatives: Sequence[tuple[Item, float, int, float | None]]  # item, score, rank, probability that it is an answer


def choose_examples(report: MiningReport) -> list[MiningExample]:
    """Return the most doubtful of the sampled queries, then some from all over the data."""
    mined, task, rate = report.mined, report.task, report.false_negatives
    with_any = np.flatnonzero(mined.sample_chosen_SK.any(axis=1))
    if not len(with_any):
        return []
    spread = with_any[np.linspace(0, len(with_any) - 1, min(len(with_any), EXAMPLES)).astype(np.int64)]
    doubtful: list[int] = []
    if rate is not None:
        worst_S = np.where(mined.sample_chosen_SK, rate.probabilities_SK, 0.0).max(axis=1)
        doubtful = np.argsort(-worst_S, kind="stable")[: EXAMPLES // 2].tolist()

    examples = []
    for row in list(dict.fromkeys([*doubtful, *spread.tolist()]))[:EXAMPLES]:
        query = mined.sample_S[row : row + 1]
        columns = np.flatnonzero(mined.sample_chosen_SK[row])
        negatives = task.documents.take(mined.sample_rows_SK[row, columns])
        examples.append(
            MiningExample(
                query=task.queries.take(query)[0],
                positive=task.documents.take(task.positives.take(query).values[:1])[0],
                positive_score=float(mined.sample_positive_S[row]),
                negatives=[
                    (
                        item,
                        float(mined.sample_scores_SK[row, column]),
                        column + 1 + report.keys.mine_range_min,
                        None if rate is None else float(rate.probabilities_SK[row, column]),
                    )
                    for item, column in zip(negatives, columns.tolist(), strict=True)
                ],
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
    scores: list[Block] = [Row([figure, table])]
    if report.refused:
        refused = [(name, count_text(count)) for name, count in report.refused.items()]
        scores.append(pairs_table("Left out", refused, "Candidates that a rule left out, by the first rule that did."))

    examples = choose_examples(report)
    blocks = [block for number, example in enumerate(examples, start=1) for block in example_blocks(example, number)]
    pictures = list(pictures_on(blocks))
    copies = small_copies(pictures, limits)
    intro: list[Block] = [
        Note(
            "The most doubtful of the sampled queries first, then some from all over the data: the positive, and what "
            "was mined."
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
            Section("doubt", "False negatives", [Note(LIMITS)]),
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
    for item, score, rank, probability in example.negatives:
        doubt = "" if probability is None else f"{100 * probability:.0f}%"
        rows.append([f"rank {rank}", document(item), metric_text(score), doubt])
    table = Table(
        ("Rank", "Document", "Score", "Probably an answer"),
        rows,
        words=frozenset({0, 1}),
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
    counts, rate = report.counts, report.false_negatives
    groups = report.scores
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
        "false_negatives": None
        if rate is None
        else {"rate": rate.rate, "interval": [rate.low, rate.high], "limits": LIMITS},
        "histogram": {"edges": edges.tolist(), **{name: share.tolist() for name, share in shares.items()}},
        "examples": [
            {
                "query": item_text(example.query),
                "positive": item_text(example.positive),
                "positive_score": example.positive_score,
                "negatives": [
                    {"text": item_text(item), "score": score, "rank": rank, "probability": probability}
                    for item, score, rank, probability in example.negatives
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
