"""The part of the page on the training itself: where its time went, what that suggests, how fast it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.report.charts import draw_time_split
from vembed.evaluation.report.html_parts import Column, pairs_table, section, stacked_row, stacked_table
from vembed.evaluation.report.markup import Html, element
from vembed.evaluation.report.settings import performance_pairs
from vembed.evaluation.report.time_split import NO_FINDINGS, measured_note, percent_text, seconds_text
from vembed.evaluation.text import capitalised, one_line

if TYPE_CHECKING:
    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.time_split import TimeSplit


def speed_section(content: Content) -> Html:
    """Return the split of the time, the findings and the performance, as far as there are any."""
    parts = []
    if content.time is not None:
        split = content.time
        figure = element(
            "figure",
            element("p", "Seconds of a step, by part", class_="title"),
            draw_time_split(split, label=f"Seconds of a step by part, over the steps. {split.sentence}"),
            element("figcaption", split.sentence),
            class_="card",
        )
        parts.append(element("div", figure, _table(split), class_="grid two"))
    parts += _findings(content)
    if content.report.performance:
        pairs = performance_pairs(content.report.performance)
        parts += [element("h3", "Performance"), pairs_table("What the training took.", pairs, label="Performance")]
    return section("speed", "Speed and health", *parts) if parts else Html()


def _table(split: TimeSplit) -> Html:
    columns = [Column("Part of a step", is_number=False), Column("Mean"), Column("Share")]
    rows = [
        stacked_row(
            columns, capitalised(part.spec.name), [seconds_text(part.seconds), percent_text(part.share)], tone=None
        )
        for part in split.parts
    ]
    return stacked_table(measured_note(split), columns, rows, label="Seconds of a step")


def _findings(content: Content) -> list[Html]:
    findings = content.report.findings
    if findings is None:
        return []
    heading = element("h3", "What the numbers suggest")
    if not findings:
        return [heading, element("p", NO_FINDINGS)]
    items = [
        element(
            "li",
            element("strong", f"{capitalised(one_line(finding.cause))}. "),
            f"{one_line(finding.sentence)} ",
            element("span", one_line(finding.advice), class_="muted"),
        )
        for finding in findings
    ]
    return [heading, element("ol", *items, class_="reasons")]
