"""Jinja2 environments in which a text of a user is shown as it is, in HTML and in Markdown, whatever it holds.

Every value that a template shows passes one finaliser: characters that can't be seen become escapes (`text.visible`),
then the text is escaped for its form. What is markup already is a `Markup`: made by a macro, by `markdown_table` and
`fenced` below, or by our own drawings. Templates stand in `templates/` beside this file and in rooms of their own.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup

from vembed.errors import MachineError
from vembed.evaluation.text import capitalised, clip, count_text, id_text, metric_text, one_line, plain, signed_text
from vembed.files import replace_text
from vembed.text import plural, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

TEMPLATES = Path(__file__).parent / "templates"

_INLINE_PICTURE = re.compile(r"data:image/webp;base64,[A-Za-z0-9+/]+={0,2}")

_ENTITIES = {"&": "&amp;", "<": "&lt;", "|": "&#124;", "`": "&#96;", "\\": "&#92;", "$": "&#36;"}
_ACTIVE = re.compile(
    r"[&<|`\\$*\[\]~#]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # inside a word an underscore is only a letter
    r"|:(?=//)|(?i:(?<=www)\.)|@(?!\d+(?![\w.]))"  # GitHub's bare links and mentions; not ndcg@10
)
_BLOCK_START = re.compile(r"^(?:[-+](?=[ -]|$)|[=>]|\d{1,9}(?=[.)](?: |$)))")


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of a table with its interval, or a reading of it."""

    text: str
    bounds: str = ""  # the interval, shown small
    drawing: Markup | None = None  # stands before the text, on HTML pages only
    tone: str = ""  # class of the reading, on HTML pages only


@dataclass(frozen=True, slots=True)
class Table:
    """A table for a page and for Markdown; the first cell of a row names the row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: frozenset[int] = frozenset({0})  # columns that aren't numbers
    tones: Mapping[int, str] = field(default_factory=dict)  # row -> its class, on HTML pages only


@cache
def html_environment(*folders: Path) -> Environment:
    """Return the environment of HTML pages, which looks for templates in the folders first, then in the shared one."""
    environment = _environment(folders, _shown)
    environment.filters["picture_source"] = picture_source
    return environment


@cache
def markdown_environment(*folders: Path) -> Environment:
    """Return the environment of Markdown files.

    Autoescape is on here too: it makes `Markup` of what macros and blocks return. HTML escaping itself never acts,
    since the finaliser has made `Markup` of every text before.
    """
    environment = _environment(folders, _shown_in_markdown)
    environment.globals |= {"table": markdown_table, "pairs_table": markdown_pairs}
    environment.filters["fenced"] = fenced
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


def _environment(folders: Sequence[Path], finalize: Callable[[object], str]) -> Environment:
    environment = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.globals["plural"] = plural
    texts = (capitalised, clip, count_text, id_text, metric_text, one_line, signed_text)
    environment.filters |= {function.__name__: function for function in texts}
    return environment


def _shown(value: object) -> str:
    """Make a text or a whole number ready to be shown; anything else is a slip of the template.

    Raises:
        TypeError: None, a float, a list: what it should read as is for the content to decide.
    """
    if isinstance(value, Undefined):
        return str(value)  # raises and names what is missing
    if isinstance(value, Markup):
        return Markup(visible(value))  # noqa: S704  # it was markup before, and the escapes hold no active character
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError(f"A page shows texts and whole numbers, and {value!r} is neither: make it a text first.")


def _shown_in_markdown(value: object) -> Markup:
    """Make a value ready to be shown in Markdown."""
    return escape_markdown(_shown(value))


def notebook_frame(page: str, *, title: str) -> str:
    """Return a page for a notebook, in a frame that keeps its style apart and runs nothing."""
    style = "width: 100%; height: 40rem; border: 0"
    return f'<iframe sandbox title="{html.escape(title)}" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def picture_source(uri: str) -> str:
    """Return the `src` of a picture that holds the picture itself.

    Raises:
        ValueError: It is an address.
    """
    if not _INLINE_PICTURE.fullmatch(uri):
        raise ValueError("The src of a picture is the picture itself, not an address.")
    return uri


def escape_markdown(text: str) -> Markup:
    """Return a text on one line that Markdown shows as it is: no link, code, HTML, math, cell, list, heading.

    Neither Markdown, its GitHub dialect nor the HTML inside it acts on a character of the result.
    """
    if isinstance(text, Markup):
        return text
    line = _ACTIVE.sub(lambda match: _inert(match.group()), one_line(text))
    start = _BLOCK_START.match(line)
    if start is not None:
        place = start.end() if start.group().isdigit() else 0
        line = f"{line[:place]}&#{ord(line[place])};{line[place + 1 :]}"
    return Markup(line)  # noqa: S704  # escaped above


def _inert(character: str) -> str:
    """Return one active character in a form that is only shown."""
    if character in _ENTITIES:
        return _ENTITIES[character]
    if character == "@":
        return "@<!-- -->"  # addresses are linked after entities are decoded: only a break in the text keeps them apart
    return f"&#{ord(character)};" if character in ":." else f"\\{character}"


def markdown_table(table: Table) -> Markup:
    """Return a table in Markdown, each cell escaped unless it is `Markup`; columns of numbers are aligned right."""
    rule = ["---" if column in table.words else "---:" for column in range(len(table.heads))]
    rows = [[_markdown_cell(cell) for cell in row] for row in (table.heads, *table.rows)]
    rows.insert(1, [Markup(each) for each in rule])  # noqa: S704  # ours
    return Markup("\n").join(Markup("| {} |").format(Markup(" | ").join(row)) for row in rows)


def _markdown_cell(cell: str | Cell) -> Markup:
    if isinstance(cell, Cell):
        return escape_markdown(f"{cell.text} ({cell.bounds})" if cell.bounds else cell.text)
    return escape_markdown(cell)


def markdown_pairs(pairs: Iterable[tuple[str, str]], characters: int = 500) -> Markup:
    """Return a Markdown table of names and values, each value cut at so many characters."""
    rows = [(name, clip(value, characters).short) for name, value in pairs]
    return markdown_table(Table(("Name", "Value"), rows, words=frozenset({0, 1})))


def fenced(text: str, language: str = "text") -> Markup:
    """Return a text as a Markdown code block whose fence is longer than any run of backticks in it."""
    shown = visible(text)
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{shown}\n{fence}")  # noqa: S704  # nothing ends the block before its fence
