"""Make the report's three files and write them, each of them whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.pages import html_environment, markdown_environment
from vembed.evaluation.report import charts
from vembed.evaluation.report.comparison import SYMBOLS, sum_table
from vembed.evaluation.report.content import build_content
from vembed.evaluation.report.examples import pictures_of, text_of
from vembed.evaluation.report.machine import render_json
from vembed.evaluation.report.pictures import picture_name
from vembed.evaluation.report.settings import records_table
from vembed.evaluation.report.time_split import NO_FINDINGS, percent_text
from vembed.files import replace_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jinja2 import Environment

    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.data import RunReport


def write_report(folder: Path, report: RunReport) -> None:
    """Write report.json, report.md and report.html; the folder is made where it is missing.

    All three are rendered before the first is written, so that a report that can't be rendered leaves an older one as
    it was. The same report gives the same bytes.

    Raises:
        ValueError: Baseline and final are over different queries.
        OSError: The folder can't be written.
    """
    content = build_content(report)
    files = {
        "report.json": render_json(content),
        "report.md": render_markdown(content),
        "report.html": render_html(content),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        replace_text(folder / name, text)


def render_html(content: Content) -> str:
    """Return one self-contained HTML page: no script, no external file, readable without colour."""
    drawings = {name: function for name, function in vars(charts).items() if name.startswith("draw_")}
    return _render(html_environment(), "report.html.jinja", content, drawings)


def render_markdown(content: Content) -> str:
    """Return the same facts for terminals, pull requests and diffs."""
    return _render(markdown_environment(), "report.md.jinja", content, {"picture_name": picture_name})


def _render(environment: Environment, name: str, content: Content, functions: Mapping[str, object]) -> str:
    return environment.get_template(name).render(
        content=content,
        report=content.report,
        symbols=SYMBOLS,
        pictures_of=pictures_of,
        text_of=text_of,
        sum_table=sum_table,
        records_table=records_table,
        no_findings=NO_FINDINGS,
        percent_text=percent_text,
        **functions,
    )
