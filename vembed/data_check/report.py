"""A check for people and programs: lines of a terminal, JSON, and one HTML page."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from vembed.data_check.findings import SEVERITIES
from vembed.evaluation.pages import html_environment, write_pages
from vembed.pages.charts import CURVE_INCHES, SERIES, axis_labels, chart_axes, inline_svg
from vembed.pages.page import Table
from vembed.pages.text import clip, columns_of, count_text, number_text, one_line, plain
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from markupsafe import Markup
    from numpy.typing import NDArray

    from vembed.data_check.check import DataCheck
    from vembed.data_check.findings import Finding

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
TEMPLATES = Path(__file__).parent / "templates"
BARS = 30
TERMINAL_CHARACTERS = 70
"""Of each text of an example in the terminal."""

MOST_SHARES = 6


def summary(check: DataCheck) -> str:
    """Return how many kinds of findings there are, worst first."""
    counts = [(check.count(severity), severity) for severity in SEVERITIES]
    said = ", ".join(plural(count, severity) for count, severity in counts if count)
    return said or "nothing found"


def size_text(check: DataCheck) -> str:
    """Return how much was read."""
    source = check.source
    parts = [plural(len(source.table), "row"), plural(len(source.queries), "query", "queries")]
    parts.append(plural(len(source.documents), "document"))
    pictures = int((~source.facts.is_text).sum())
    return ", ".join([*parts, *([f"{count_text(pictures)} of them with a picture"] if pictures else [])])


def terminal_lines(check: DataCheck) -> list[str]:
    """Return what the terminal says: findings with one example each, then what the data are like."""
    lines = [f"{check.source.name}: {size_text(check)}"]
    width = max((len(count_text(each.count)) for each in check.findings), default=0)
    for each in check.findings:
        share = f" ({each.share})" if each.share else ""
        lines.append(f"  {each.severity:<7}  {count_text(each.count):>{width}} {each.title}{share}")
        if each.examples and each.severity != "note":
            cells = " | ".join(_short(cell) for cell in each.examples[0] if cell)
            lines.append(f"  {'':<7}  {'':>{width}}   {cells}")
    if not check.findings:
        lines.append("  no errors, no warnings")
    facts = profile_facts(check)
    margin = max((len(name) for name, _ in facts), default=0)
    lines += [f"  {name.lower():<{margin}}  {words}" for name, words in facts]
    lines += [f"  {note}" for note in check.notes]
    return [*lines, summary(check)]


def _short(cell: str) -> str:
    shown = clip(cell, TERMINAL_CHARACTERS).short
    return shown if columns_of(shown) <= 2 * TERMINAL_CHARACTERS else clip(cell, TERMINAL_CHARACTERS // 2).short


def profile_facts(check: DataCheck) -> list[tuple[str, str]]:
    """Return what the data are like, as names and words."""
    profile, facts = check.profile, []
    for side in profile.lengths:
        least, low, median, high, most = (count_text(value) for value in profile.quantiles(side))
        said = f"median {median}, 90% from {low} to {high}, all from {least} to {most}"
        facts.append((f"{side.capitalize()}, {profile.unit}", said))
    facts += [(f"{side.capitalize()}, script", _shares(each)) for side, each in profile.scripts.items()]
    if profile.classes:
        largest, smallest = next(iter(profile.classes.items())), min(profile.classes.values())
        said = f"{count_text(profile.num_classes)}; the largest has {plural(largest[1], 'row')}"
        if profile.num_classes <= len(profile.classes):
            said += f", the smallest {count_text(smallest)}"
        facts.append(("Classes", said))
    if profile.grades:
        facts.append(("Grades", _shares(profile.grades, most=12)))
    return facts


def _shares(counts: Mapping[str, int], most: int = MOST_SHARES) -> str:
    total, shown = sum(counts.values()), list(counts.items())[:most]
    words = [f"{name} {_percent(count / total)}" for name, count in shown]
    rest = total - sum(count for _, count in shown)
    return ", ".join([*words, *([f"others {_percent(rest / total)}"] if rest else [])])


def _percent(share: float) -> str:
    if 0.999 <= share < 1:
        return "over 99.9%"
    return f"{number_text(float(f'{100 * share:.3g}'))}%" if share >= 0.0005 else "under 0.1%"


def document(check: DataCheck, command: str) -> dict[str, Any]:
    """Return the check for programs."""
    source = check.source
    return {
        "schema_version": SCHEMA_VERSION,
        "data": source.name,
        "rows": len(source.table),
        "queries": len(source.queries),
        "documents": len(source.documents),
        **{f"{severity}s": check.count(severity) for severity in SEVERITIES},
        "findings": [each.document() for each in check.findings],
        "profile": check.profile.document(),
        "notes": list(check.notes),
        "command": command,
    }


def write_json(path: Path, check: DataCheck, command: str) -> None:
    """Write the check for programs.

    Raises:
        MachineError: The file can't be written.
    """
    text = json.dumps(plain(document(check, command)), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_pages(path.parent, {path.name: text}, "check")


def write_html(path: Path, check: DataCheck, command: str) -> None:
    """Write the check as one page.

    Raises:
        MachineError: The file can't be written.
    """
    overview = [[each.severity, count_text(each.count), each.share, each.title] for each in check.findings]
    tones = {row: each.severity for row, each in enumerate(check.findings)}
    facts = [
        ("Rows", count_text(len(check.source.table))),
        ("Queries", count_text(len(check.source.queries))),
        ("Documents", count_text(len(check.source.documents))),
        *((severity.capitalize() + "s", count_text(check.count(severity))) for severity in SEVERITIES),
    ]
    page = html_environment(TEMPLATES).get_template("data_check.html.jinja")
    shown = {
        "check": check,
        "summary": summary(check),
        "key_facts": facts,
        "overview": Table(("Severity", "How many", "Share", "What"), overview, words=frozenset({0, 3}), tones=tones),
        "findings": [_shown(each) for each in check.findings],
        "facts_of_data": profile_facts(check),
        "lengths": [
            (side, partial(_draw_lengths, side, each, check.profile.unit))
            for side, each in check.profile.lengths.items()
        ],
        "classes": [(name, plural(count, "row")) for name, count in check.profile.classes.items()],
        "command": command,
    }
    write_pages(path.parent, {path.name: page.render(shown)}, "check")


def _shown(finding: Finding) -> dict[str, Any]:
    """Return a finding as texts and a table."""
    rows = [[clip(cell, 300).short for cell in example] for example in finding.examples]
    share = f", {finding.share}" if finding.share else ""
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "title": f"{count_text(finding.count)} {one_line(finding.title)}{share}",
        "advice": finding.advice,
        "table": Table(finding.heads, rows, words=frozenset(range(len(finding.heads)))) if rows else None,
        "caption": f"{len(rows)} of {count_text(finding.count)}" if len(rows) < finding.count else "All of them",
    }


def _draw_lengths(side: str, lengths: NDArray[np.int32], unit: str) -> Markup:
    """Draw how long texts are; the longest 1% stand in the last bar."""
    top = max(1.0, float(np.quantile(lengths, 0.99)))
    counts, edges = np.histogram(np.minimum(lengths, top), bins=min(BARS, int(top)), range=(0.0, top))
    with chart_axes(CURVE_INCHES) as (figure, axes):
        axes.stairs(counts, edges, fill=True, color=SERIES, alpha=0.8)
        axes.set(xlabel=unit, ylabel=side)
        for axis, ticks in ((axes.xaxis, 6), (axes.yaxis, 4)):
            axis.set_major_locator(MaxNLocator(ticks, integer=True))
            axis.set_major_formatter(axis_labels())
        return inline_svg(figure, name=f"lengths-{side}", label=f"Lengths of the {side}; the table has the numbers.")
