"""The report of a mining: what was mined, what it looks like, and how much of it may be wrong; HTML, Markdown, JSON."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from vembed.batch import Composed, Image, pictures_in
from vembed.evaluation.benchmark.names import model_labels
from vembed.evaluation.pages import Table, write_report
from vembed.evaluation.report.charts import BETTER, CURVE_INCHES, INK, WORSE, AxisTicks, chart_axes, inline_svg
from vembed.evaluation.report.pictures import Thumbnails
from vembed.evaluation.text import clip, count_text, metric_text, number_text
from vembed.mining.choose import RULES
from vembed.mining.false_negatives import estimate
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup
    from numpy.typing import NDArray

    from vembed.batch import Item
    from vembed.config.keys.mining import MiningKeys
    from vembed.data.images import ImageLimits
    from vembed.mining.false_negatives import FalseNegatives
    from vembed.mining.mine import Mined
    from vembed.mining.task import MiningTask

TEMPLATE = Path(__file__).parent / "templates" / "mining"
SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
BARS = 40
EXAMPLES = 10
CHARACTERS = 240
QUANTILES = (0.05, 0.5, 0.95)

LIMITS = (
    "The estimate reads scores alone: it takes documents that answer a query without a label to score as labelled ones "
    "do. It is too high where true negatives score as high as positives, and too low where unlabelled answers score "
    "lower than labelled ones, or one query has several; a better teacher helps. The interval is of the sampled "
    "queries only."
)


@dataclass(frozen=True)
class MiningReport:
    """What a report is made of."""

    task: MiningTask
    mined: Mined
    keys: MiningKeys
    source: Mapping[str, str]  # model, settings, teacher
    notes: Sequence[str]  # of reading the data
    seconds: Mapping[str, float]  # by part of the work
    command: str

    @cached_property
    def false_negatives(self) -> FalseNegatives | None:
        """The estimated rate."""
        mined = self.mined
        return estimate(mined.sample_positive_S, mined.sample_scores_SK, mined.sample_chosen_SK)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Negatives of each query."""
        counts: NDArray[np.int64] = (self.mined.rows_Un >= 0).sum(axis=1)
        return counts

    @property
    def headline(self) -> str:
        """What was mined and how good it seems, in two sentences."""
        counts, asked = self.counts, self.keys.mine_negatives
        short, none = int((counts < asked).sum()), int((counts == 0).sum())
        mined = f"{count_text(int(counts.sum()))} hard negatives for {plural(len(counts), 'query', 'queries')}"
        if short:
            fewer = "none" if none == short else f"fewer than {asked}"
            fewer += f" ({count_text(none)} got none)" if 0 < none < short else ""
            mined += f"; {plural(short, 'query', 'queries')} got {fewer}"
        return f"{mined}. {self.rate_text}"

    @property
    def rate_text(self) -> str:
        """The estimate in a sentence."""
        found = self.false_negatives
        if found is None:
            return (
                "How many of them answer their query after all can't be told: too few positives or candidates are near."
            )
        low, high = (f"{100 * value:.1f}" for value in (found.low, found.high))
        return f"Probably {100 * found.rate:.1f}% of them answer their query after all (95% interval {low} to {high}%)."

    @property
    def groups(self) -> dict[str, NDArray[np.float32]]:
        """Scores of the sampled queries, by what they are of."""
        mined = self.mined
        others = np.isfinite(mined.sample_scores_SK) & ~mined.sample_chosen_SK
        return {
            "positives": mined.sample_positive_S,
            "mined": mined.sample_scores_SK[mined.sample_chosen_SK],
            "not taken": mined.sample_scores_SK[others],
        }

    @property
    def refused(self) -> dict[str, int]:
        """Candidates that each rule left out."""
        return {name: int(count) for name, count in zip(RULES, self.mined.refused_1R[0], strict=True) if count}

    @cached_property
    def examples(self) -> list[dict[str, Any]]:
        """Some queries with their positive and negatives: the most doubtful ones, then some from all over."""
        mined, found = self.mined, self.false_negatives
        with_any = np.flatnonzero(mined.sample_chosen_SK.any(axis=1))
        if not len(with_any):
            return []
        spread = with_any[np.linspace(0, len(with_any) - 1, min(len(with_any), EXAMPLES)).astype(np.int64)]
        doubtful: list[int] = []
        if found is not None:
            worst_S = np.where(mined.sample_chosen_SK, found.probabilities_SK, 0.0).max(axis=1)
            doubtful = np.argsort(-worst_S, kind="stable")[: EXAMPLES // 2].tolist()
        return [self._example(place) for place in [*dict.fromkeys([*doubtful, *spread.tolist()])][:EXAMPLES]]

    def _example(self, place: int) -> dict[str, Any]:
        mined, task, found = self.mined, self.task, self.false_negatives
        query = int(mined.sample_S[place])
        positives = task.positives.take(np.array([query])).values[:1]
        columns = np.flatnonzero(mined.sample_chosen_SK[place])
        items = task.documents.take(mined.sample_rows_SK[place, columns])
        asked, positive = task.queries.take(np.array([query]))[0], task.documents.take(positives)[0]
        return {
            "items": [asked, positive, *items],
            "query": _said(asked),
            "positive": _said(positive),
            "positive_score": float(mined.sample_positive_S[place]),
            "negatives": [
                {
                    "text": _said(item),
                    "score": float(mined.sample_scores_SK[place, column]),
                    "rank": int(column) + 1 + self.keys.mine_range_min,
                    "probability": None if found is None else float(found.probabilities_SK[place, column]),
                }
                for item, column in zip(items, columns.tolist(), strict=True)
            ],
        }


def write_mining_report(folder: Path, report: MiningReport, limits: ImageLimits) -> None:
    """Write report.json, report.md and report.html, with the pictures of the examples as far as the limits allow.

    Raises:
        MachineError: The folder can't be written.
    """
    shown = list(pictures_in(item for example in report.examples for item in example["items"]))
    drawings = {"drawing": partial(_draw, report.groups), "copies": Thumbnails.of(shown, limits)}
    write_report(folder, TEMPLATE, _document(report), _shared(report), drawings)


def _document(report: MiningReport) -> dict[str, Any]:
    """Return the report for programs, every number unrounded."""
    found, counts = report.false_negatives, report.counts
    edges, shares = _shares(report.groups)
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
        if found is None
        else {"rate": found.rate, "interval": [found.low, found.high], "limits": LIMITS},
        "histogram": {"edges": edges.tolist(), **{name: each.tolist() for name, each in shares.items()}},
        "examples": [{key: each[key] for key in each if key != "items"} for each in report.examples],
        "seconds": dict(report.seconds),
        "notes": list(report.notes),
        "command": report.command,
    }


def _shared(report: MiningReport) -> dict[str, Any]:
    """Return what the page and the Markdown file both tell."""
    groups = {name: scores for name, scores in report.groups.items() if len(scores)}
    counts, asked = report.counts, report.keys.mine_negatives
    facts = [
        ("Documents searched", count_text(len(report.task.documents))),
        ("Negatives of a query", f"{counts.mean():.1f} of {asked} on average"),
        ("Queries without any", count_text(int((counts == 0).sum()))),
    ]
    rows = [
        [name, count_text(len(each)), *(metric_text(float(value)) for value in np.quantile(each, QUANTILES))]
        for name, each in groups.items()
    ]
    prefix = "mine_" if report.command else ""  # a run has keys, and the command options
    settings = [(name.removeprefix(prefix), str(value)) for name, value in report.keys.mining().items()]
    return {
        "report": report,
        "title": model_labels([report.source["model"]])[0],
        "key_facts": facts,
        "limits": LIMITS,
        "scores": Table(["Scores of", "How many", "5%", "Median", "95%"], rows),
        "refused": [(name, count_text(count)) for name, count in report.refused.items()],
        "examples": [_shown(example) for example in report.examples],
        "seconds": [(name, f"{number_text(value)} s") for name, value in report.seconds.items()],
        "settings": [*report.source.items(), *settings],
    }


def _shown(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example as a table of texts, and its pictures with what each is."""
    positive = clip(example["positive"], CHARACTERS).short
    rows = [[positive, "positive", metric_text(example["positive_score"]), "labelled"]]
    for each in example["negatives"]:
        doubt = "" if each["probability"] is None else f"{100 * each['probability']:.0f}%"
        rows.append([clip(each["text"], CHARACTERS).short, str(each["rank"]), metric_text(each["score"]), doubt])
    names = ["query", *(row[1] if row[1] == "positive" else f"rank {row[1]}" for row in rows)]
    return {
        "pictures": [
            (name, pictures)
            for name, item in zip(names, example["items"], strict=True)
            if (pictures := tuple(pictures_in([item])))
        ],
        "query": clip(example["query"], CHARACTERS).short,
        "table": Table(["Document", "Rank", "Score", "Probably an answer"], rows, tones={0: "chosen"}),
    }


def _said(item: Item) -> str:
    """Return a text, or what a picture is called."""
    if isinstance(item, Composed):
        return " ".join([*(f"[{image.path}]" for image in item.images), item.text])
    return f"[{item.path}]" if isinstance(item, Image) else item


def _shares(groups: Mapping[str, NDArray[np.float32]]) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return edges of bars, and of each group the share in each, in percent."""
    every = np.concatenate([*groups.values(), np.zeros(0)])
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)
    edges = np.linspace(low, high if high > low else low + 1.0, BARS + 1)
    return edges, {
        name: 100 * np.histogram(scores, bins=edges)[0] / max(1, len(scores)) for name, scores in groups.items()
    }


def _draw(groups: Mapping[str, NDArray[np.float32]]) -> Markup:
    """Draw how the scores are spread, each as shares of its own group."""
    edges, shares = _shares(groups)
    looks: dict[str, dict[str, Any]] = {
        "positives": {"fill": True, "color": BETTER, "alpha": 0.75},
        "mined": {"color": WORSE, "linewidth": 1.6},
        "not taken": {"color": INK, "linewidth": 1.0, "linestyle": ":"},
    }
    with chart_axes(CURVE_INCHES) as (figure, axes):
        for name, each in shares.items():
            axes.stairs(each, edges, label=name, **looks[name])
        axes.set_ylim(bottom=0.0)
        axes.set(xlabel="score", ylabel="% of the group")
        for axis, ticks in ((axes.xaxis, 6), (axes.yaxis, 4)):
            axis.set_major_locator(MaxNLocator(ticks))
            axis.set_major_formatter(AxisTicks())
        axes.legend(loc="best")
        label = "Scores of positives, of mined documents and of the other candidates; the table has the numbers."
        return inline_svg(figure, name="scores", label=label)
