"""The report as one self-contained HTML page: no script, no external file, readable without colour."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vembed.evaluation.report.charts import draw_curve, draw_histogram, draw_interval, draw_shares
from vembed.evaluation.report.content import (
    SYMBOLS,
    dev_metric_names,
    dev_note,
    evaluation_cell,
    evaluation_rows,
    interval_text,
    notes,
    row_decimals,
    scope_text,
)
from vembed.evaluation.report.html_parts import (
    long_block,
    pairs_table,
    records_table,
    scroll_table,
    section,
    whole_page,
)
from vembed.evaluation.report.html_queries import queries_section
from vembed.evaluation.report.html_ranks import ranks_section
from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.report.settings import plan_parts
from vembed.evaluation.report.text import count_text, metric_text, one_line, plural, signed_text, value_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.report.content import Content, MetricRow
    from vembed.evaluation.report.curves import Curve
    from vembed.evaluation.report.data import RunReport


def render_html(content: Content) -> str:
    """Return the page."""
    title = one_line(content.report.title)
    sections = [
        _metrics(content),
        ranks_section(content),
        _curves(content),
        _changes(content),
        queries_section(content),
        _data(content),
        _plan(content),
        _reproduce(content),
    ]
    parts = [_header(content), element("main", join(sections, "\n"))]
    return whole_page(f"{title}: {content.report.verdict.word}", *parts)


def _header(content: Content) -> Html:
    """Return title, verdict, key facts and the way to the sections."""
    report = content.report
    verdict, comparison = report.verdict, report.verdict.comparison
    decimals = row_decimals(content.metrics[0])
    figures = element(
        "div",
        element(
            "p",
            element("span", metric_text(comparison.baseline, decimals), class_="from"),
            element("span", " → ", class_="from"),
            metric_text(comparison.candidate, decimals),
            class_="change",
        ),
        element("p", signed_text(comparison.difference, decimals), class_="difference"),
        element("p", one_line(comparison.metric), class_="muted"),
        class_="figures",
    )
    links = (
        [("metrics", "Metrics"), ("ranks", "Ranks and scores")] if content.ranks.curves else [("metrics", "Metrics")]
    )
    links += [("curves", "Curves"), ("changes", "Query by query"), ("queries", "Examples")]
    links += [("data", "Data"), ("plan", "Plan"), ("reproduce", "Reproduce")]
    return element(
        "header",
        element("p", "Retrieval report", class_="kind"),
        element("h1", one_line(report.title)),
        element(
            "section",
            element("span", f"{SYMBOLS[verdict.word]} {verdict.word}", class_="badge"),
            figures,
            element("p", one_line(verdict.sentence), class_="sentence"),
            class_=f"verdict card {_tone(verdict.word)}",
            aria_label="Verdict",
        ),
        _facts(report),
        element(
            "nav",
            element("ul", *(element("li", element("a", text, href=f"#{target}")) for target, text in links)),
            aria_label="Sections",
        ),
    )


def _facts(report: RunReport) -> Html:
    """Return the few facts that place the verdict."""
    facts = [
        ("Evaluated on", one_line(report.task.name)),
        ("Queries", count_text(report.final.num_queries)),
        ("Documents", count_text(report.final.num_documents)),
        ("Training steps", count_text(max((int(row["step"]) for row in report.steps if "step" in row), default=0))),
        ("Model", one_line(report.final.system)),
    ]
    return element(
        "dl",
        *(element("div", element("dt", label), element("dd", value, dir="auto")) for label, value in facts),
        class_="facts",
    )


def _metrics(content: Content) -> Html:
    """Return the metric table, with the metrics beyond the headline folded away."""
    headline = [row for row in content.metrics if row.is_headline]
    rest = [row for row in content.metrics if not row.is_headline]
    parts = [_metric_table(content, headline, f"Mean over the queries of {scope_text(content.report)}.")]
    if rest:
        more = _metric_table(content, rest, "Further metrics and cut-offs, on the same queries.")
        parts.append(
            element("details", element("summary", plural(len(rest), "further metric")), more, class_="section")
        )
    lead = (
        f"The {_share(content.report)} interval comes from a paired bootstrap over the queries: where it lies on one "
        "side of zero, the difference is more than luck with these queries."
    )
    return section("metrics", "Metrics", element("p", lead), *parts)


def _metric_table(content: Content, rows: Sequence[MetricRow], caption: str) -> Html:
    """Return one table of metrics."""
    has_bm25 = content.report.bm25 is not None
    heads = ["Baseline", "Final", "Difference", f"{_share(content.report)} interval"]
    header = element(
        "tr",
        element("th", "Metric", scope="col"),
        *(element("th", head, scope="col", class_="number") for head in heads),
        element("th", "Reading", scope="col"),
        element("th", "BM25", scope="col", class_="number") if has_bm25 else Html(),
    )
    reach = _reach(rows)
    body = [_metric_row(content, row, reach=reach, has_bm25=has_bm25) for row in rows]
    return scroll_table(caption, header, body, label="Metrics of baseline and final model")


def _metric_row(content: Content, row: MetricRow, *, reach: float, has_bm25: bool) -> Html:
    """Return one row of the metric table."""
    decimals = row_decimals(row)
    if row.verdict is None:
        difference, interval, reading, tone = metric_text(None), metric_text(None), "not compared", "muted"
    else:
        difference = signed_text(row.verdict.comparison.difference, decimals)
        interval = interval_text(row.verdict.comparison, decimals)
        reading, tone = f"{SYMBOLS[row.verdict.word]} {row.verdict.word}", _tone(row.verdict.word)
    decisive = row.name == content.report.verdict.comparison.metric
    numbers = [metric_text(row.baseline, decimals), metric_text(row.final, decimals), difference, interval]
    return element(
        "tr",
        element("th", one_line(row.name), scope="row"),
        *(element("td", number, class_="number") for number in numbers),
        element(
            "td", element("div", draw_interval(row, reach=reach), element("span", reading), class_=f"reading {tone}")
        ),
        element("td", metric_text(row.bm25), class_="number") if has_bm25 else Html(),
        class_="decisive" if decisive else None,
    )


def _reach(rows: Sequence[MetricRow]) -> float:
    """Return the largest bound of the table's intervals: what its little bars are drawn against."""
    compared = [row.verdict.comparison for row in rows if row.verdict]
    bounds = [abs(bound) for comparison in compared for bound in (comparison.low, comparison.high)]
    return max((bound for bound in bounds if math.isfinite(bound)), default=0.0)


def _curves(content: Content) -> Html:
    """Return the dev curve, the training curves, and the table of evaluations."""
    figures = []
    if content.dev is not None and content.dev_metric is not None:
        dot = " The large dot is the highest." if len(content.dev.values_N) > 1 else ""
        note = f"{content.dev.summary} {dev_note(content)}{dot}"
        figures.append(_figure(f"Dev {one_line(content.dev_metric)}", content.dev, name="dev", note=note, marks=True))
    for curve in content.curves:
        note = curve.summary + (" The strong line is a running mean." if curve.mean_N is not None else "")
        title = f"{curve.spec.title}, {curve.spec.unit}" if curve.spec.unit else curve.spec.title
        figures.append(_figure(title, curve, name=curve.spec.key, note=note))
    parts = [element("div", join(figures), class_="grid")] if figures else []
    missing = [*content.not_logged, *([] if content.dev else ["Dev metrics"])]
    if missing:
        parts.append(element("p", f"Not logged: {', '.join(missing)}.", class_="muted"))
    if content.evaluations:
        table = _evaluation_table(content)
        count = plural(len(content.evaluations), "evaluation")
        parts.append(element("details", element("summary", f"Table of {count} on dev"), table, class_="section"))
    return section("curves", "Curves", *parts)


def _figure(title: str, curve: Curve, *, name: str, note: str, marks: bool = False) -> Html:
    """Return one chart with its title and its text."""
    return element(
        "figure",
        element("p", title, class_="title"),
        draw_curve(curve, name=name, label=f"{title} over the steps. {curve.summary}", marks=marks),
        element("figcaption", note),
        class_="card",
    )


def _evaluation_table(content: Content) -> Html:
    """Return the dev metrics by step."""
    names, rows = dev_metric_names(content), evaluation_rows(content)
    header = element(
        "tr",
        element("th", "Step", scope="col", class_="number"),
        *(element("th", one_line(name), scope="col", class_="number") for name in names),
    )
    body = [
        element(
            "tr",
            element("th", count_text(step), scope="row", class_="number"),
            *(element("td", evaluation_cell(metrics, name), class_="number") for name in names),
        )
        for step, metrics in rows
    ]
    caption = dev_note(content)
    if len(rows) < len(content.evaluations):
        caption += f" {len(rows)} of {count_text(len(content.evaluations))} evaluations, evenly spread."
    return scroll_table(caption, header, body, label="Dev metrics by step")


def _changes(content: Content) -> Html:
    """Return how the queries moved: counts and histogram."""
    changes, metric = content.changes, one_line(content.report.verdict.comparison.metric)
    counts = [
        ("improved", "▲", changes.num_improved, "improved"),
        ("unchanged", "=", changes.num_unchanged, "stayed the same"),
        ("worse", "▼", changes.num_worse, "got worse"),
    ]
    legend = element(
        "ul",
        *(
            element(
                "li",
                element("span", symbol, class_=f"swatch {name}", aria_hidden="true"),
                element("span", element("strong", count_text(count)), f" {word}{_percent(count, len(changes.gains))}"),
            )
            for name, symbol, count, word in counts
        ),
        class_="legend",
    )
    shares = draw_shares([(name, count) for name, _, count, _ in counts], label=changes.summary)
    panel = element("div", element("p", changes.summary), shares, legend, class_="card panel")
    if not any(changes.gains):
        return section("changes", "Query by query", panel)
    title = f"How much {metric} changed"
    figure = element(
        "figure",
        element("p", title, class_="title"),
        draw_histogram(changes.gains, label=f"{title}, query by query. {changes.summary}"),
        element("figcaption", "Queries by difference; those that stayed the same are left out."),
        class_="card",
    )
    return section("changes", "Query by query", element("div", figure, panel, class_="grid two"))


def _data(content: Content) -> Html:
    """Return the data facts and what was left out."""
    report = content.report
    parts = [
        pairs_table("What the run was trained on.", report.data_facts, label="Data facts")
        if report.data_facts
        else element("p", "No data facts were given.", class_="muted")
    ]
    found = notes(report)
    if found:
        parts += [element("h3", "Notes on the evaluation"), element("ul", *(element("li", note) for note in found))]
    return section("data", "Data", *parts)


def _plan(content: Content) -> Html:
    """Return the plan, its reasons first."""
    reasons, settings, tables = plan_parts(content.report.plan)
    parts = []
    if reasons:
        parts.append(element("ol", *(element("li", one_line(reason)) for reason in reasons), class_="reasons"))
    if settings:
        parts.append(pairs_table("What was planned.", settings, label="Plan"))
    strategy = content.report.plan.get("strategy")
    chosen = None if strategy is None else value_text("strategy", strategy)
    parts += [records_table(name, records, chosen=chosen) for name, records in tables]
    if not parts:
        parts = [element("p", "No plan was given.", class_="muted")]
    return section("plan", "Plan", *parts)


def _reproduce(content: Content) -> Html:
    """Return command, environment and config."""
    report = content.report
    config = [(key, value_text(key, value)) for key, value in report.config.items()]
    return section(
        "reproduce",
        "Reproduce",
        element("p", "The exact command of this run; one click selects all of it."),
        long_block(report.command, label="Command"),
        element("h3", "Environment"),
        pairs_table("Where it ran.", list(report.environment.items()), label="Environment"),
        element("h3", "Configuration"),
        element(
            "details",
            element("summary", plural(len(config), "setting")),
            pairs_table("The settings as they were given.", config, label="Configuration"),
            class_="section",
        ),
    )


def _tone(word: str) -> str:
    """Return the class of a verdict's word."""
    return word.replace(" ", "-")


def _share(report: RunReport) -> str:
    """Return the confidence of the verdict, e.g. "95%"."""
    return f"{100 * report.verdict.comparison.confidence:g}%"


def _percent(count: int, total: int) -> str:
    """Return the share in parentheses, or nothing without a total."""
    return f" ({100 * count / total:.0f}%)" if total else ""
