"""Jinja environments of the pages that are still templates of their own: leaderboard, comparison, sweep, card.

They go with these templates, once their writers build a `vembed.pages.page.Page`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vembed.errors import MachineError
from vembed.files import replace_text
from vembed.pages import html, markdown
from vembed.pages.page import Table
from vembed.pages.text import capitalised, clip, count_text, id_text, one_line, plain
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TEMPLATES = Path(__file__).parent / "templates"
FILTERS = {function.__name__: function for function in (capitalised, clip, count_text, id_text, one_line)}


@cache
def html_environment(*folders: Path) -> Environment:
    """Return the environment of HTML pages, which looks for templates in the folders first, then in the shared ones."""
    environment = html.environment(*folders, TEMPLATES)
    environment.filters |= FILTERS
    return environment


@cache
def markdown_environment(*folders: Path) -> Environment:
    """Return the environment of Markdown files; its finaliser has escaped every text before autoescape looks at it."""
    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: _escaped(html.finalize(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters |= FILTERS | {"fenced": fenced}
    environment.globals |= {"plural": plural, "table": table, "pairs_table": pairs}
    return environment


def write_report(
    folder: Path,
    template: Path,
    document: Mapping[str, object],
    shared: Mapping[str, object],
    drawings: Mapping[str, object],
    *,
    name: str = "report",
) -> None:
    """Render NAME.json, NAME.md and NAME.html, then write them, each whole or not at all.

    Args:
        folder: Made where it is missing.
        template: Path of the templates without `.md.jinja` and `.html.jinja`.
        document: The report for programs, every number unrounded.
        shared: What the page and the Markdown file both tell.
        drawings: What the page alone shows.

    Raises:
        MachineError: The folder can't be written.
    """
    page, text = (
        make(template.parent).get_template(f"{template.name}.{form}.jinja")
        for make, form in ((html_environment, "html"), (markdown_environment, "md"))
    )
    files = {
        f"{name}.json": json.dumps(plain(document), indent=2, allow_nan=False) + "\n",
        f"{name}.md": text.render(shared),
        f"{name}.html": page.render(shared, **drawings),
    }
    write_pages(folder, files, "report")


def write_pages(folder: Path, files: Mapping[str, str], what: str) -> None:
    """Write named files, each whole or not at all; the folder is made where it is missing.

    Raises:
        MachineError: The folder can't be written; the message calls the files by `what`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise MachineError(f"{folder}: the {what} can't be written: {error}; free some space there") from error


def _escaped(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(markdown.escape(text))  # noqa: S704  # escaped for Markdown


def fenced(text: str, language: str = "text") -> Markup:
    """Return a text as a code block."""
    return Markup(markdown.fenced(text, language))  # noqa: S704  # nothing ends the block before its fence


def table(shown: Table) -> Markup:
    """Return a table in Markdown."""
    return Markup(markdown.markdown_table(shown))  # noqa: S704  # its cells are escaped


def pairs(shown: Iterable[tuple[str, str]], characters: int = markdown.CELL_CHARACTERS) -> Markup:
    """Return names and values as a table in Markdown, each value cut at so many characters."""
    rows = [(name, clip(value, characters).short) for name, value in shown]
    return table(Table(("Name", "Value"), rows, words=frozenset({0, 1})))
