"""The part of the page with the curves: dev metric and training numbers over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.charts import draw_curve
from vembed.evaluation.report.content import dev_metric_names, dev_note, evaluation_cell, evaluation_rows, mark_note
from vembed.evaluation.report.html_parts import scroll_table, section
from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.text import count_text, one_line, plural

if TYPE_CHECKING:
    from vembed.evaluation.report.content import Content


def curves_section(content: Content) -> Html:
    """Return the dev curve, the training curves, and the table of evaluations."""
    figures = []
    if content.dev is not None and content.dev_metric is not None:
        note = " ".join(filter(None, (content.dev.summary, dev_note(content), mark_note(content))))
        title = f"Dev {one_line(content.dev_metric)}"
        drawing = draw_curve(
            content.dev,
            name="dev",
            label=f"{title} over the steps. {content.dev.summary} {mark_note(content)}".strip(),
            marked_step=content.marked_step,
            is_metric=True,
        )
        figures.append(_figure(title, drawing, note=note))
    for curve in content.curves:
        note = curve.summary + (" The strong line is a running mean." if curve.mean_N is not None else "")
        title = curve.title
        drawing = draw_curve(curve, name=curve.spec.key, label=f"{title} over the steps. {curve.summary}")
        figures.append(_figure(title, drawing, note=note))
    parts = [element("div", join(figures), class_="grid")] if figures else []
    missing = [*content.not_logged, *([] if content.dev else ["Dev metrics"])]
    if missing:
        parts.append(element("p", f"Not logged: {', '.join(missing)}.", class_="muted"))
    if content.evaluations:
        table = _evaluation_table(content)
        count = plural(len(content.evaluations), "evaluation")
        parts.append(element("details", element("summary", f"Table of {count} on dev"), table, class_="section"))
    return section("curves", "Curves", *parts)


def _figure(title: str, drawing: Html, *, note: str) -> Html:
    """Return one chart with its title and its text."""
    return element("figure", element("p", title, class_="title"), drawing, element("figcaption", note), class_="card")


def _evaluation_table(content: Content) -> Html:
    """Return the dev metrics by step, the kept one marked by a word."""
    names, rows = dev_metric_names(content), evaluation_rows(content)
    header = element(
        "tr",
        element("th", "Step", scope="col", class_="number"),
        *(element("th", one_line(name), scope="col", class_="number") for name in names),
    )
    body = []
    for step, metrics in rows:
        is_kept = step == content.report.kept_step
        label = f"✓ {count_text(step)} (kept)" if is_kept else count_text(step)
        cells = [element("td", evaluation_cell(metrics, name), class_="number") for name in names]
        head = element("th", label, scope="row", class_="number")
        body.append(element("tr", head, *cells, class_="chosen" if is_kept else None))
    caption = dev_note(content)
    if len(rows) < len(content.evaluations):
        caption += f" {len(rows)} of {count_text(len(content.evaluations))} evaluations, evenly spread."
    return scroll_table(caption, header, body, label="Dev metrics by step")
