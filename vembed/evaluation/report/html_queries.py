"""The part of the page that people read longest: queries with what was found for them, right and wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.content import TITLES
from vembed.evaluation.report.examples import picture_of, text_of
from vembed.evaluation.report.html_parts import full_text, section, short_text
from vembed.evaluation.report.markup import Html, element
from vembed.evaluation.text import clip, count_text, id_text, metric_text, one_line, plural, signed_text

if TYPE_CHECKING:
    from vembed.batch import Image
    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.examples import Example, Hit

QUERY_CHARACTERS = 300
DOCUMENT_CHARACTERS = 220
CAPTION_CHARACTERS = 110
OPEN_QUERIES = 3
"""Queries of a group that are open; the others are folded away."""


def queries_section(content: Content) -> Html:
    """Return the example queries with what was found for them."""
    lead = (
        "The first results of the trained model. Right: judged relevant for this query. Wrong: not judged relevant, "
        "which a set with few judgements can be mistaken about."
    )
    parts = [element("p", lead)]
    if content.thumbnails.note:
        parts.append(element("p", content.thumbnails.note, class_="muted small"))
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
    shown, kind = (_tile, " tiles") if example.has_picture_results else (_hit, "")
    parts = [
        *_question(content, example),
        element("p", scores, class_="scores muted small"),
        element("ol", *(shown(content, hit, is_missed=False) for hit in example.hits), class_=f"hits{kind}")
        if example.hits
        else element("p", "Nothing was retrieved.", class_="muted small"),
    ]
    if example.missed:
        more = example.num_missed - len(example.missed)
        heading = "Relevant, but further down or missing" + (
            f" ({plural(more, 'more', 'more')} not shown)" if more else ""
        )
        parts.append(element("h5", heading))
        parts.append(
            element("ul", *(shown(content, hit, is_missed=True) for hit in example.missed), class_=f"missed{kind}")
        )
    return element("article", *parts, class_="query card")


def _question(content: Content, example: Example) -> tuple[Html, ...]:
    """Return the query as a heading: its text, its picture, or both."""
    picture, text = picture_of(example.item), text_of(example.item)
    if picture is None:
        return element("h4", short_text(text, QUERY_CHARACTERS)), full_text(text, QUERY_CHARACTERS)
    frame = _picture(content, picture, example.query_id, example.caption)
    if text is None:
        return (element("h4", frame, element("span", "Query picture"), class_="picture"),)
    words = element("span", "Query picture, with: ", short_text(text, QUERY_CHARACTERS))
    return element("h4", frame, words, class_="picture"), full_text(text, QUERY_CHARACTERS)


def _picture(content: Content, picture: Image | None, identifier: str, caption: str = "") -> Html:
    """Return the thumbnail of a picture, or a box where there is none; either is called by the id.

    Whoever doesn't see it hears the id and the text of something that it is relevant to.
    """
    thumbnail = None if picture is None else content.thumbnails.by_picture.get(picture)
    if thumbnail is None:
        reason = "not in the set" if picture is None else "can't be shown"
        return element("span", element("span", f"Picture {reason}: {id_text(identifier)}"), class_="frame empty")
    words = f"{id_text(identifier)}, relevant to: {_clipped(caption)}" if caption else id_text(identifier)
    image = element("img", src=thumbnail.uri, alt=words, width=thumbnail.width, height=thumbnail.height)
    return element("span", image, class_="frame")


def _clipped(caption: str) -> str:
    return clip(caption, CAPTION_CHARACTERS).short


def _mark(hit: Hit, *, is_missed: bool) -> Html:
    """Return the judgement in a symbol and a word."""
    if is_missed:
        return element("span", "○ lower" if hit.rank else "○ missed", class_="mark missed")
    if hit.is_relevant:
        return element("span", "✓ right", class_="mark right")
    return element("span", "✗ wrong", class_="mark wrong")


def _tile(content: Content, hit: Hit, *, is_missed: bool) -> Html:
    """Return one picture of a query's results."""
    text = text_of(hit.item)
    before = f"baseline: rank {count_text(hit.baseline_rank)}" if hit.baseline_rank else "baseline: not retrieved"
    rank = f"rank {count_text(hit.rank)}" if hit.rank else "not retrieved"
    facts = [*([f"score {metric_text(hit.score)}"] if hit.score is not None else []), before]
    heading = element(
        "span",
        element("span", rank, class_="rank") if not is_missed or hit.rank else Html(),
        _mark(hit, is_missed=is_missed),
        class_="place",
    )
    return element(
        "li",
        _picture(content, picture_of(hit.item), hit.document_id, hit.caption),
        heading,
        short_text(text, DOCUMENT_CHARACTERS) if text is not None else Html(),
        *(element("span", fact, class_="meta") for fact in facts),
        element("span", "relevant to ", element("q", _clipped(hit.caption), dir="auto"), class_="meta caption")
        if hit.caption and not hit.is_relevant
        else Html(),
        element("span", id_text(hit.document_id), class_="meta", dir="auto"),
        class_="tile right" if hit.is_relevant and not is_missed else "tile",
    )


def _hit(content: Content, hit: Hit, *, is_missed: bool) -> Html:
    """Return one document of a query in a row."""
    rank = f"rank {count_text(hit.rank)}" if hit.rank else "not retrieved"
    before = f"baseline rank {count_text(hit.baseline_rank)}" if hit.baseline_rank else "baseline: not retrieved"
    score = [f"score {metric_text(hit.score)}"] if hit.score is not None else []
    meta = " · ".join([*([rank] if is_missed else []), *score, before, f"document {id_text(hit.document_id)}"])
    return element(
        "li",
        element("span", "" if is_missed else str(hit.rank), class_="rank"),
        _mark(hit, is_missed=is_missed),
        element("div", *_body(content, hit, meta), class_="body"),
        class_="hit",
    )


def _body(content: Content, hit: Hit, meta: str) -> tuple[Html, ...]:
    """Return the text of a row, or its picture where texts and pictures stand in one list."""
    picture, text = picture_of(hit.item), text_of(hit.item)
    shown = [_picture(content, picture, hit.document_id, hit.caption)] if picture is not None else []
    if picture is not None and text is None:
        return *shown, element("p", meta, class_="meta")
    return *shown, short_text(text, DOCUMENT_CHARACTERS), full_text(text, DOCUMENT_CHARACTERS, label=meta)
