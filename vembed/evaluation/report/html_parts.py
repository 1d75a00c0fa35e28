"""The pieces that several sections of the page are built of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.evaluation.report.markup import Html, element, join
from vembed.evaluation.report.style import STYLE
from vembed.evaluation.text import clip, one_line, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

VALUE_CHARACTERS = 2_000
"""Most characters shown of one setting; report.json has all of it."""


SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What the page may do: show itself. A second wall behind the escaping."""


MAIN_ID = "main"
"""Where the link for keyboards leads to: every page's `main` has this id."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table whose rows become small lists on a narrow screen.

    Attributes:
        head: What it is called.
        is_number: Numbers stand at the right.
    """

    head: str
    is_number: bool = True


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
    skip = element("a", "Skip to the results", href=f"#{MAIN_ID}", class_="skip")
    footer = element("footer", "Written by vembed. This page needs no network and runs no script.")
    return "<!DOCTYPE html>\n" + element("html", head, "\n", element("body", skip, *parts, footer), lang="en") + "\n"


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


def with_bounds(number: str, bounds: str) -> Html:
    """Return a number with its interval in small under it; nothing under it where there is none."""
    under = element("span", bounds, class_="bounds") if bounds else Html()
    return join([element("span", number, class_="value"), under])


def stacked_row(columns: Sequence[Column], title: str, cells: Sequence[str], *, tone: str | None = None) -> Html:
    """Return a row of a stacked table.

    Args:
        columns: All columns; the first is that of the title.
        title: Cell that names the row.
        cells: The others, in order.
        tone: Class of the row.
    """
    # A table whose parts are laid out as something else is none for screen readers, unless the roles say so.
    body = [
        element("td", cell, class_="number" if column.is_number else None, data_label=column.head, role="cell")
        for column, cell in zip(columns[1:], cells, strict=True)
    ]
    return element("tr", element("th", title, scope="row", role="rowheader"), *body, class_=tone, role="row")


def stacked_table(caption: str, columns: Sequence[Column], rows: Sequence[Html], *, label: str) -> Html:
    """Return a table that a narrow screen shows row by row, each cell behind the head of its column."""
    heads = (
        element("th", column.head, scope="col", class_="number" if column.is_number else None, role="columnheader")
        for column in columns
    )
    table = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *heads, role="row"), role="rowgroup"),
        element("tbody", *rows, role="rowgroup"),
        class_="stack",
        role="table",
    )
    return element("div", table, class_="scroll card", role="region", aria_label=label, tabindex=0)


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


def long_block(text: str, *, label: str) -> Html:
    """Return a text to copy, its line breaks kept."""
    return element("pre", element("code", visible(text)), class_="card", role="region", aria_label=label, tabindex=0)
