"""The part of the page that people read longest: queries with what was found for them, right and wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.content import TITLES
from vembed.evaluation.report.html_parts import full_text, section, short_text
from vembed.evaluation.report.markup import Html, element
from vembed.evaluation.report.text import count_text, id_text, metric_text, one_line, plural, signed_text

if TYPE_CHECKING:
    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.examples import Example, Hit

QUERY_CHARACTERS = 300
DOCUMENT_CHARACTERS = 220
OPEN_QUERIES = 3
"""Queries of a group that are open; the others are folded away."""


def queries_section(content: Content) -> Html:
    """Return the example queries with what was found for them."""
    lead = (
        "The first results of the trained model. Right: judged relevant for this query. Wrong: not judged relevant, "
        "which a set with few judgements can be mistaken about."
    )
    parts = [element("p", lead)]
    for group in content.groups:
        shown, kind = len(group.examples), TITLES[group.kind]
        text = f"{shown} of {plural(group.num_queries, 'query', 'queries')}." if shown else "No query."
        if group.kind == "lowest":
            text += " Those shown above are left out."
        parts += [element("h3", kind), element("p", text, class_="muted small")]
        articles = [_query(content, example) for example in group.examples]
        parts += articles[:OPEN_QUERIES]
        if more := articles[OPEN_QUERIES:]:
            summary = element("summary", plural(len(more), "more query", "more queries"))
            parts.append(element("details", summary, *more, class_="section"))
    return section("queries", "Examples", *parts)


def _query(content: Content, example: Example) -> Html:
    """Return one query with its results and what it missed."""
    metric = one_line(content.report.verdict.comparison.metric)
    scores = (
        f"{metric} {metric_text(example.baseline)} → {metric_text(example.final)} "
        f"({signed_text(example.final - example.baseline)}) · query {id_text(example.query_id)}"
    )
    parts = [
        element("h4", short_text(example.text, QUERY_CHARACTERS)),
        full_text(example.text, QUERY_CHARACTERS),
        element("p", scores, class_="scores muted small"),
        element("ol", *(_hit(hit, is_missed=False) for hit in example.hits), class_="hits")
        if example.hits
        else element("p", "Nothing was retrieved.", class_="muted small"),
    ]
    if example.missed:
        more = example.num_missed - len(example.missed)
        heading = "Relevant, but further down or missing" + (
            f" ({plural(more, 'more', 'more')} not shown)" if more else ""
        )
        parts.append(element("h5", heading))
        parts.append(element("ul", *(_hit(hit, is_missed=True) for hit in example.missed), class_="missed"))
    return element("article", *parts, class_="query card")


def _hit(hit: Hit, *, is_missed: bool) -> Html:
    """Return one document of a query."""
    if is_missed:
        mark = element("span", "○ lower" if hit.rank else "○ missed", class_="mark missed")
    elif hit.is_relevant:
        mark = element("span", "✓ right", class_="mark right")
    else:
        mark = element("span", "✗ wrong", class_="mark wrong")
    rank = f"rank {count_text(hit.rank)}" if hit.rank else "not retrieved"
    before = f"baseline rank {count_text(hit.baseline_rank)}" if hit.baseline_rank else "baseline: not retrieved"
    score = [f"score {metric_text(hit.score)}"] if hit.score is not None else []
    meta = " · ".join([*([rank] if is_missed else []), *score, before, f"document {id_text(hit.document_id)}"])
    return element(
        "li",
        element("span", "" if is_missed else str(hit.rank), class_="rank"),
        mark,
        element(
            "div",
            short_text(hit.text, DOCUMENT_CHARACTERS),
            full_text(hit.text, DOCUMENT_CHARACTERS, label=meta),
            class_="body",
        ),
        class_="hit",
    )
