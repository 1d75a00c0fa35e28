"""Write the report's three files, each of them whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.content import build_content
from vembed.evaluation.report.html import render_html
from vembed.evaluation.report.machine import render_json
from vembed.evaluation.report.markdown import render_markdown
from vembed.files import replace_text

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.evaluation.report.data import RunReport


def write_report(folder: Path, report: RunReport) -> None:
    """Write report.json, report.md and report.html.

    All three are rendered before the first is written, so that a report that can't be rendered leaves an older one as
    it was. The same report gives the same bytes.

    Args:
        folder: Where they go; made where it is missing. Files of an older report are replaced.
        report: What to report.

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
