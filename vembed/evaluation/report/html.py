"""The report as one self-contained HTML page: no script, no external file, readable without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.charts import draw_histogram, draw_shares
from vembed.evaluation.report.comparison import row_decimals
from vembed.evaluation.report.content import SYMBOLS, notes, reverse_lines, tells_speed
from vembed.evaluation.report.html_curves import curves_section
from vembed.evaluation.report.html_metrics import metrics_section
from vembed.evaluation.report.html_parts import MAIN_ID, long_block, pairs_table, records_table, section, whole_page
from vembed.evaluation.report.html_queries import queries_section
from vembed.evaluation.report.html_ranks import ranks_section
from vembed.evaluation.report.html_speed import speed_section
from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.report.settings import plan_parts
from vembed.evaluation.text import count_text, metric_text, one_line, plural, signed_text, value_text

if TYPE_CHECKING:
    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.data import RunReport


def render_html(content: Content) -> str:
    """Return the page."""
    title = one_line(content.report.title)
    sections = [
        _verdict(content),
        _facts(content.report),
        _contents(content),
        metrics_section(content),
        ranks_section(content),
        curves_section(content),
        speed_section(content),
        _changes(content),
        queries_section(content),
        _data(content),
        _plan(content),
        _reproduce(content),
    ]
    header = element("header", element("p", "Retrieval report", class_="kind"), element("h1", title))
    main = element("main", join(sections, "\n"), id=MAIN_ID, tabindex=-1)
    return whole_page(f"{title}: {content.report.verdict.word}", header, main)


def _verdict(content: Content) -> Html:
    """Return the verdict: its word, the numbers, its sentence, and a line on the other direction."""
    report = content.report
    verdict, comparison = report.verdict, report.verdict.comparison
    decimals = row_decimals(content.metrics.rows[0])
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
    heading = element(
        "h2",
        element("span", "Verdict: ", class_="unseen"),
        element("span", f"{SYMBOLS[verdict.word]} {verdict.word}", class_="badge"),
        id="verdict-title",
    )
    return element(
        "section",
        heading,
        figures,
        element("p", one_line(verdict.sentence), class_="sentence"),
        *(element("p", line, class_="sentence other") for line in reverse_lines(content)),
        class_=f"verdict card {verdict.word.replace(' ', '-')}",
        id="verdict",
        aria_labelledby="verdict-title",
    )


def _contents(content: Content) -> Html:
    """Return the way to the sections."""
    links = [("metrics", "Metrics"), *([("ranks", "Ranks and scores")] if content.ranks.curves else [])]
    links += [
        ("curves", "Curves"),
        *([("speed", "Speed")] if tells_speed(content) else []),
        ("changes", "Query by query"),
        ("queries", "Examples"),
    ]
    links += [("data", "Data"), ("plan", "Plan"), ("reproduce", "Reproduce")]
    items = (element("li", element("a", text, href=f"#{target}")) for target, text in links)
    return element("nav", element("ul", *items), aria_label="Sections")


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


def _percent(count: int, total: int) -> str:
    """Return the share in parentheses, or nothing without a total."""
    return f" ({100 * count / total:.0f}%)" if total else ""
