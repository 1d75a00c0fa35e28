"""The pieces that several sections of the page are built of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.markup import Html, element
from vembed.evaluation.report.settings import columns
from vembed.evaluation.report.style import STYLE
from vembed.evaluation.report.text import clip, count_text, one_line, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.evaluation.report.settings import Record

VALUE_CHARACTERS = 2_000
"""Most characters shown of one setting; report.json has all of it."""


SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What the page may do: show itself. A second wall behind the escaping."""


def whole_page(title: str, *parts: Html, style: Html = STYLE) -> str:
    """Return a page that needs no other file.

    Args:
        title: What the window is called.
        parts: What the page shows, in order; a footer follows.
        style: Text of its style sheet.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=SECURITY_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    footer = element("footer", "Written by vembed. This page needs no network and runs no script.")
    return "<!DOCTYPE html>\n" + element("html", head, "\n", element("body", *parts, footer), lang="en") + "\n"


def section(name: str, title: str, *parts: Html) -> Html:
    """Return a section with its heading."""
    return element(
        "section", element("h2", title, id=f"{name}-title"), *parts, id=name, aria_labelledby=f"{name}-title"
    )


def scroll_table(caption: str, header: Html, body: Sequence[Html], *, label: str, kind: str | None = None) -> Html:
    """Return a table in a box of its own, which scrolls where the screen is too narrow."""
    table = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", header),
        element("tbody", *body),
        class_=kind,
    )
    return element(
        "div",
        table,
        class_=f"scroll card {kind}" if kind else "scroll card",
        role="region",
        aria_label=label,
        tabindex=0,
    )


def pairs_table(caption: str, pairs: Sequence[tuple[str, str]], *, label: str) -> Html:
    """Return a table of names and values."""
    header = element("tr", element("th", "Name", scope="col"), element("th", "Value", scope="col"))
    body = [
        element(
            "tr",
            element("th", one_line(name), scope="row"),
            element("td", clip(value, VALUE_CHARACTERS).short, dir="auto"),
        )
        for name, value in pairs
    ]
    return scroll_table(caption, header, body, label=label, kind="pairs")


def records_table(name: str, records: Sequence[Record], *, chosen: str | None) -> Html:
    """Return a table of records, the one whose strategy was chosen marked by a word."""
    names = columns(records)
    header = element("tr", *(element("th", one_line(column.replace("_", " ")), scope="col") for column in names))
    body = []
    for record in records:
        is_chosen = chosen is not None and record.get("strategy") == chosen
        cells = [
            element("td", clip(record.get(column, ""), VALUE_CHARACTERS).short, class_="nowrap") for column in names
        ]
        if is_chosen:
            word = f"✓ {one_line(record['strategy'])} (chosen)"
            cells[names.index("strategy")] = element("td", word, class_="nowrap")
        body.append(element("tr", *cells, class_="chosen" if is_chosen else None))
    title = one_line(name.replace("_", " ")).capitalize()
    return scroll_table(f"{title}.", header, body, label=title, kind="records")


def long_block(text: str, *, label: str) -> Html:
    """Return a text to copy, its line breaks kept."""
    return element("pre", element("code", visible(text)), class_="card", role="region", aria_label=label, tabindex=0)


def short_text(text: str | None, characters: int) -> Html:
    """Return a text on one line, cut to a readable length with an ellipsis."""
    if text is None:
        return element("span", "(the set has no text for this id)", class_="muted")
    return element("span", clip(text, characters).short, dir="auto")


def full_text(text: str | None, characters: int, *, label: str = "") -> Html:
    """Return the whole of a text, folded away under its label, or the label alone where `short_text` shows it all."""
    parts = clip(text or "", characters)
    if parts.full is None:
        return element("p", label, class_="meta") if label else Html()
    left_out = f" … ({count_text(parts.num_left_out)} more characters)" if parts.num_left_out else ""
    return element(
        "details",
        element("summary", f"{label} · " if label else "", element("span", "full text", class_="link"), class_="meta"),
        element("div", parts.full, left_out, class_="full", dir="auto"),
    )
