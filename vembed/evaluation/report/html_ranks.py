"""The part of the page on ranked lists: recall at every depth, and how far right and wrong scores stand apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.charts import draw_recall, draw_scores
from vembed.evaluation.report.html_parts import scroll_table, section
from vembed.evaluation.report.markup import Html, element
from vembed.evaluation.report.ranks import cut_cells, cut_heads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.ranks import Ranks, ScoreSplit

SPLIT_TITLES = {"baseline": "Scores before training", "final": "Scores after training"}


def ranks_section(content: Content) -> Html:
    """Return the section, or nothing where no document was retrieved or judged relevant."""
    ranks = content.ranks
    if not ranks.curves:
        return Html()
    scored = [split for split in ranks.splits if len(split.relevant) or len(split.others)]
    ends = [
        float(end) for split in scored for part in (split.relevant, split.others) if len(part) for end in _ends(part)
    ]
    figures = [_figure(split, reach=(min(ends), max(ends))) for split in scored]
    turned = content.reverse_ranks
    reverse, tables = [], [_table(ranks, label="Recall by k", caption="Mean recall over the queries.")]
    if turned is not None and turned.curves:
        reverse.append(_recall(turned, name="recall-reversed", title="Recall reversed"))
        tables.append(_table(turned, label="Recall by k, reversed", caption="The same, reversed."))
    lead = (
        "Recall is the share of a query's relevant documents among the first k. The scores are those of the retrieved "
        "documents: the less the two shapes overlap, the better a threshold would tell right from wrong."
    )
    return section(
        "ranks",
        "Ranks and scores",
        element("p", lead),
        element(
            "div",
            *(_recall(ranks, name="recall", title="Recall"), *reverse, *figures),
            class_="grid two pairs" if reverse else "grid",
        ),
        element("details", element("summary", "Table of recall by k"), *tables, class_="section"),
    )


def _ends(scores: NDArray[np.float64]) -> tuple[float, float]:
    """Return the lowest and the highest score."""
    return float(scores.min()), float(scores.max())


def _recall(ranks: Ranks, *, name: str, title: str) -> Html:
    """Return the drawing of recall over the depth."""
    title = f"{title} at k = 1 to {len(ranks.curves[0].recall_K)}"
    return element(
        "figure",
        element("p", title, class_="title"),
        draw_recall(ranks.curves, name=name, label=f"{title}. {ranks.summary}"),
        element("figcaption", ranks.summary),
        class_="card",
    )


def _figure(split: ScoreSplit, *, reach: tuple[float, float]) -> Html:
    """Return the drawing of one system's scores."""
    title = SPLIT_TITLES[split.label]
    return element(
        "figure",
        element("p", title, class_="title"),
        draw_scores(split, reach=reach, label=f"{title}, relevant documents against the others. {split.summary}"),
        element("figcaption", split.summary),
        class_="card",
    )


def _table(ranks: Ranks, *, label: str, caption: str) -> Html:
    """Return the recalls as numbers."""
    first, *others = cut_heads(ranks.cuts)
    header = element(
        "tr",
        element("th", first, scope="col"),
        *(element("th", head, scope="col", class_="number") for head in others),
    )
    body = []
    for curve in ranks.curves:
        system, *cells = cut_cells(curve, ranks.cuts)
        numbers = (element("td", cell, class_="number") for cell in cells)
        body.append(element("tr", element("th", system, scope="row"), *numbers))
    return scroll_table(caption, header, body, label=label)
