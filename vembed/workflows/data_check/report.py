"""A check for people and programs: lines of a terminal, JSON, and one HTML page; and rows as training sees them."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.batch import Composed, pictures_in
from vembed.data.columns import listing
from vembed.data.images import check_image
from vembed.pages.charts import LARGE_INCHES, SERIES, chart_axes, inline_svg, set_ticks
from vembed.pages.page import (
    Cell,
    Facts,
    Figure,
    Heading,
    Note,
    Page,
    Section,
    SideBySide,
    Table,
    command_blocks,
    pairs_table,
)
from vembed.pages.text import capitalised, clip, columns_of, count_text, number_text, one_line, plain
from vembed.text import plural
from vembed.workflows.data_check.source import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from markupsafe import Markup
    from numpy.typing import NDArray

    from vembed.batch import ImageLimits, Item, Side
    from vembed.data.read import DataSource
    from vembed.data.table import Record
    from vembed.models.encoder import Encoder
    from vembed.pages.page import Block
    from vembed.workflows.data_check.check import DataCheck
    from vembed.workflows.data_check.source import Finding

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it
BARS = 30
"""Bars of a chart of lengths."""

TERMINAL_CHARACTERS, PAGE_CHARACTERS, ROW_CHARACTERS = 70, 300, 400
"""Characters of a text in an example on a terminal, in one on the page, and in a row."""

MOST_SHARES = 6
"""Scripts that a line names; the rest are others."""

METHOD = (
    "Texts count as equal when they differ in nothing but case, spaces and punctuation. Nearly equal texts share at "
    "least 80% of their runs of four characters. Scripts are told by Unicode block: they are no languages."
)


def summary(check: DataCheck) -> str:
    """Return the number of kinds of findings, worst first, in words."""
    counts = [(check.count(severity), severity) for severity in SEVERITIES]
    return ", ".join(plural(count, severity) for count, severity in counts if count) or "nothing found"


def size_text(check: DataCheck) -> str:
    """Return the number of rows, queries and documents in words."""
    source = check.source
    parts = [plural(len(source.table), "row"), plural(len(source.queries), "query", "queries")]
    parts.append(plural(len(source.documents), "document"))
    pictures = int((~source.facts.is_text).sum())
    return ", ".join([*parts, *([f"{count_text(pictures)} of them with a picture"] if pictures else [])])


def terminal_lines(check: DataCheck) -> list[str]:
    """Return the check for a terminal: findings with one example each, then the profile."""
    lines = [f"{check.source.name}: {size_text(check)}"]
    width = max((len(count_text(finding.count)) for finding in check.findings), default=0)
    for finding in check.findings:
        share = f" ({finding.share})" if finding.share else ""
        lines.append(f"  {finding.severity:<7}  {count_text(finding.count):>{width}} {finding.title}{share}")
        if finding.examples and finding.severity != "note":
            cells = []
            for cell in filter(None, finding.examples[0]):
                short = clip(cell, TERMINAL_CHARACTERS).short
                # Wide characters take two columns: where more are wide than that, half as many characters are shown.
                if columns_of(short) > 2 * TERMINAL_CHARACTERS:
                    short = clip(cell, TERMINAL_CHARACTERS // 2).short
                cells.append(short)
            lines.append(f"  {'':<7}  {'':>{width}}   {' | '.join(cells)}")
    if not check.findings:
        lines.append("  no errors, no warnings")
    facts = profile_facts(check)
    margin = max((len(name) for name, _ in facts), default=0)
    lines += [f"  {name.lower():<{margin}}  {words}" for name, words in facts]
    lines += [f"  {note}" for note in check.notes]
    return [*lines, summary(check)]


def profile_facts(check: DataCheck) -> list[tuple[str, str]]:
    """Return the profile as names and words."""
    profile, facts = check.profile, []
    for side in profile.lengths:
        least, low, median, high, most = (count_text(value) for value in profile.quantiles(side))
        spread = f"median {median}, 90% from {low} to {high}, all from {least} to {most}"
        facts.append((f"{side.capitalize()}, {profile.unit}", spread))
    facts += [(f"{side.capitalize()}, script", _shares(counts)) for side, counts in profile.scripts.items()]
    if profile.classes:
        largest, smallest = next(iter(profile.classes.items())), min(profile.classes.values())
        sizes = f"{count_text(profile.num_classes)}; the largest has {plural(largest[1], 'row')}"
        if profile.num_classes <= len(profile.classes):
            sizes += f", the smallest {count_text(smallest)}"
        facts.append(("Classes", sizes))
    if profile.grades:
        facts.append(("Grades", _shares(profile.grades, most=12)))
    return facts


def _shares(counts: Mapping[str, int], most: int = MOST_SHARES) -> str:
    total, shown = sum(counts.values()), list(counts.items())[:most]
    words = [f"{name} {_percent(count / total)}" for name, count in shown]
    rest = total - sum(count for _, count in shown)
    return ", ".join([*words, *([f"others {_percent(rest / total)}"] if rest else [])])


def _percent(share: float) -> str:
    # Neither 100% nor 0% where that isn't true to the last row.
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
        "findings": [finding.document() for finding in check.findings],
        "profile": check.profile.document(),
        "notes": list(check.notes),
        "command": command,
    }


def check_page(check: DataCheck, command: str) -> Page:
    """Return the check as a page: the findings, their examples, the profile, and the method."""
    source, profile = check.source, check.profile
    facts = [
        ("Rows", count_text(len(source.table))),
        ("Queries", count_text(len(source.queries))),
        ("Documents", count_text(len(source.documents))),
        *((f"{severity.capitalize()}s", count_text(check.count(severity))) for severity in SEVERITIES),
    ]
    # Examples are a section of their own: the table above them stays short enough to be read at once.
    findings = [Section("findings", "Findings", [Note("No errors and no warnings.")])]
    if check.findings:
        examples = [block for finding in check.findings for block in example_blocks(finding)]
        findings = [
            Section("findings", "Findings", [findings_table(check)]),
            Section("examples", "Examples", examples),
        ]
    figures = [
        Figure(
            f"Length of the {side}",
            partial(draw_lengths, lengths, side=side, unit=profile.unit),
            "The longest 1% stand in the last bar; the table has the numbers.",
        )
        for side, lengths in profile.lengths.items()
    ]
    caption = "Lengths, scripts, classes and grades of distinct texts."
    shape: list[Block] = [SideBySide(figures)] if figures else []
    shape.append(pairs_table("What the data are like", profile_facts(check), caption))
    if profile.classes:
        classes = [(name, plural(count, "row")) for name, count in profile.classes.items()]
        shape.append(pairs_table("Classes", classes, "The largest classes."))
    notes = [Note(note, muted=True) for note in check.notes]
    return Page(
        kind="Data check",
        title=source.name,
        head=[Note(f"{capitalised(summary(check))}."), Facts(facts)],
        sections=[
            *findings,
            Section("profile", "What the data are like", shape),
            Section("method", "How it was checked", [Note(METHOD), *notes, *command_blocks(command)]),
        ],
        document=document(check, command),
    )


def findings_table(check: DataCheck) -> Table:
    """Return all findings, errors in colour and notes muted."""
    return Table(
        ("Severity", "How many", "Share", "What"),
        [
            [
                Cell(finding.severity, tone="worse") if finding.severity == "error" else finding.severity,
                count_text(finding.count),
                finding.share,
                finding.title,
            ]
            for finding in check.findings
        ],
        text_columns=frozenset({0, 3}),
        tones={row: "muted" for row, finding in enumerate(check.findings) if finding.severity == "note"},
        title="Findings",
        caption="The worst first. Errors make the command fail.",
    )


def example_blocks(finding: Finding) -> list[Block]:
    """Return a finding with its advice and a table of its examples."""
    share = f", {finding.share}" if finding.share else ""
    title = f"{capitalised(finding.severity)}: {count_text(finding.count)} {one_line(finding.title)}{share}"
    blocks: list[Block] = [Heading(title), Note(finding.advice)]
    if finding.examples:
        rows = [[clip(cell, PAGE_CHARACTERS).short for cell in example] for example in finding.examples]
        count = len(rows)
        caption = f"{count} of {count_text(finding.count)}" if count < finding.count else "All of them"
        text_columns = frozenset(range(len(finding.heads)))
        blocks.append(Table(finding.heads, rows, text_columns=text_columns, title=title, caption=caption))
    return blocks


def draw_lengths(lengths: NDArray[np.int32], *, side: str, unit: str, name: str, label: str) -> Markup:
    """Draw how long texts are; the longest 1% stand in the last bar."""
    # One text of a million tokens would press all others into the first bar.
    top = max(1.0, float(np.quantile(lengths, 0.99)))
    counts, edges = np.histogram(np.minimum(lengths, top), bins=min(BARS, int(top)), range=(0.0, top))
    with chart_axes(LARGE_INCHES) as (figure, axes):
        axes.stairs(counts, edges, fill=True, color=SERIES, alpha=0.8)
        axes.set(xlabel=unit, ylabel=side)
        set_ticks(axes.xaxis, 6, integer=True)
        set_ticks(axes.yaxis, integer=True)
        return inline_svg(figure, name=name, label=label)


def check_json(page: Page) -> str:
    """Return the check for programs, letters of all scripts as they are."""
    # Not `render_json`, which escapes other scripts: a user reads the examples in this file.
    return json.dumps(plain(page.document), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def shown_rows(source: DataSource, count: int, encoder: Encoder | None) -> Iterator[str]:
    """Yield lines that show the first rows of a data set as training sees them: texts with prompts, sizes of pictures.

    Args:
        encoder: Adds prompts and tokens; None shows the bare texts.

    Raises:
        VembedError: As `DataSource.records`.
    """
    loaded = source.records()
    yield f"{source.path}: {plural(len(loaded.table), 'row')}, {plural(len(loaded.table.items), 'distinct item')}"
    for ours, theirs in loaded.columns.used.items():
        guessed = " (by name)" if {*theirs} <= {*loaded.columns.guessed} else ""
        yield f"  {ours:<15} column {listing(theirs)}{guessed}"
    yield from (f"  {note}" for note in loaded.notes)
    # Numbers of a column that a loss reads are left out where they are its default.
    usual = {column.name: column.default for column in source.loss_needs.columns} if source.loss_needs else {}
    for record in loaded.table.take(range(min(count, len(loaded.table)))):
        yield from ("", record.location, *_item_lines(record, encoder, source.image_limits))
        if record.label is not None:
            yield f"  {'class':<9} {one_line(clip(str(record.label), ROW_CHARACTERS).short)}"
        for column, number in record.columns.items():
            if number != usual.get(column):
                yield f"  {column:<9} {number:g}"


def _item_lines(record: Record, encoder: Encoder | None, limits: ImageLimits) -> Iterator[str]:
    """Yield a line for each item of a row, with its grade."""
    count, documents = len(record.positives), len(record.positives) + len(record.negatives)
    grades = [f"  grade {score:g}" for score in record.scores] or [""] * documents
    parts: tuple[tuple[str, Side, Sequence[Item], Sequence[str]], ...] = (
        ("query", "query", (record.query,), ("",)),
        ("positive", "document", record.positives, grades[:count]),
        ("negative", "document", record.negatives, grades[count:]),
    )
    for name, side, items, grades_of_part in parts:
        for item, grade in zip(items, grades_of_part, strict=True):
            words = []
            for image in pictures_in([item]):
                header = check_image(image, limits)
                words.append(f"[{image.path}, {header.format} {header.width} x {header.height}]")
            text = item if isinstance(item, str) else item.text if isinstance(item, Composed) else ""
            prompt = encoder.prompts.get(side, "") if encoder is not None and isinstance(item, str) else ""
            if text:
                words.append(clip(f"{prompt}{text}", ROW_CHARACTERS).short)
            if encoder is not None and isinstance(item, str):
                features = encoder.featurize([item], side)
                cut = ", cut" if features.num_truncated else ""
                words.append(f" ({plural(int(features.lengths[0]), 'token')}{cut})")
            yield f"  {name:<9} {' '.join(words)}{grade}"
