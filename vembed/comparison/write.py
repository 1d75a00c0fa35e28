"""Write the comparison's three files, each of them whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.comparison.charts import FEW_RUNS, draw_overlay
from vembed.comparison.differences import resolved
from vembed.comparison.pairs import LEVEL
from vembed.comparison.tables import WORDS, changes_table, costs_table, differences_table, metrics_table
from vembed.evaluation.pages import html_environment, markdown_environment, write_pages
from vembed.evaluation.report.examples import pictures_of, shown_pictures, text_of
from vembed.evaluation.significance import CONFIDENCE
from vembed.pages.page import SYMBOLS
from vembed.pages.pictures import copies_note, small_copies
from vembed.pages.text import plain
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from markupsafe import Markup

    from vembed.comparison.charts import Overlay
    from vembed.comparison.compare import RunComparison
    from vembed.comparison.pairs import Line, SetTable
    from vembed.comparison.queries import Changes

TEMPLATES = Path(__file__).parent / "templates"

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

METHOD = (
    f"Two runs are compared on the same queries, each query's value in one against its value in the other. Intervals "
    f"hold the mean difference in {100 * CONFIDENCE:g}% of samples of such queries (Student's t), and p is of the same "
    f"test. With several comparisons p is corrected for their number (Holm). A difference counts where the corrected p "
    f"is below {LEVEL}. Nothing here speaks of other training seeds."
)

COST_WORDS = (
    "Samples and tokens per second are over all steps but the first. Memory at the peak was measured, on a CPU for the "
    "whole process with Python and its libraries. Planned is what the plan predicted for one device: the tensors of a "
    "step in which every row has the greatest length (or, where the model has none, the mean length of the data), "
    "without Python and its libraries; and, where it knows the device's speed, the time of as many steps."
)


def write_comparison(folder: Path, comparison: RunComparison) -> None:
    """Write compare.json, compare.md and compare.html.

    Raises:
        MachineError: The folder can't be written.
    """
    files = {
        "compare.json": render_json(comparison),
        "compare.md": render_markdown(comparison),
        "compare.html": comparison.html,
    }
    write_pages(folder, files, "comparison")


def render_html(comparison: RunComparison) -> str:
    """Return the comparison as one self-contained page."""
    examples = [
        example
        for changes in comparison.changes
        for change in (*changes.won, *changes.lost)
        for example in (change.run, change.baseline)
    ]
    pictures = shown_pictures(examples)
    copies = small_copies(pictures, comparison.image_limits)
    template = html_environment(TEMPLATES).get_template("comparison.html.jinja")
    return template.render(
        _shared(comparison),
        copies=copies,
        copies_note=copies_note(pictures, copies),
        drawings=_drawings(comparison),
    )


def render_markdown(comparison: RunComparison) -> str:
    """Return the same facts for terminals, pull requests and diffs."""
    template = markdown_environment(TEMPLATES).get_template("comparison.md.jinja")
    return template.render(_shared(comparison), changes_table=partial(changes_table, comparison))


def render_json(comparison: RunComparison) -> str:
    """Return the comparison for programs: every number unrounded."""
    names = [run.name for run in comparison.runs]
    document = {
        "schema_version": SCHEMA_VERSION,
        "baseline": comparison.baseline.name,
        "metric": comparison.metric,
        "confidence": CONFIDENCE,
        "significance_level": LEVEL,
        "headline": comparison.headline,
        "runs": [
            {
                "name": run.name,
                "folder": redact(str(run.folder)),
                "finished": run.is_finished,
                "notes": list(run.notes),
                "settings": resolved(run),
                "cost": asdict(cost),
            }
            for run, cost in zip(comparison.runs, comparison.costs, strict=True)
        ],
        "verdicts": [
            {**asdict(each), "verdict": asdict(each.verdict.comparison) if each.verdict else None}
            for each in comparison.verdicts
        ],
        "sets": [_set(table) for table in comparison.tables],
        "differences": {
            "settings": {each.name: dict(zip(names, each.values, strict=True)) for each in comparison.config},
            "data": {each.name: dict(zip(names, each.values, strict=True)) for each in comparison.data},
            "environment": {each.name: dict(zip(names, each.values, strict=True)) for each in comparison.environment},
        },
        "queries": [_changes(changes) for changes in comparison.changes],
        "notes": list(comparison.notes),
        "command": comparison.command,
    }
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def _set(table: SetTable) -> Mapping[str, object]:
    return {
        "name": table.name,
        "metric": table.metric,
        "role": table.role,
        "content": table.content or None,
        "num_queries": table.num_queries,
        "num_documents": table.num_documents,
        "metrics": {metric: [_line(line) for line in lines] for metric, lines in table.lines.items()},
        "notes": list(table.notes),
    }


def _line(line: Line) -> Mapping[str, object]:
    verdict = line.row.verdict
    return {
        "run": line.name,
        "value": line.row.values.get("final"),
        "interval": line.row.intervals.get("final"),
        "against_baseline": None if verdict is None else asdict(verdict.comparison),
        "p_value": line.p_value,
        "p_value_corrected": line.corrected,
        "word": line.word,
        "not_compared": line.why_not or None,
    }


def _changes(changes: Changes) -> Mapping[str, object]:
    def listed(kind: str) -> list[Mapping[str, object]]:
        return [
            {"query": each.run.query_id, "baseline": each.run.baseline, "run": each.run.final}
            for each in getattr(changes, kind)
        ]

    return {
        "run": changes.run,
        "num_queries": changes.num_queries,
        "num_won": changes.num_won,
        "num_lost": changes.num_lost,
        "won": listed("won"),
        "lost": listed("lost"),
    }


def _shared(comparison: RunComparison) -> dict[str, object]:
    """Return what the page and the Markdown file both tell."""
    runs = comparison.runs
    differing = [
        ("Settings", "Only settings that differ, with what auto became.", comparison.config),
        ("Data", comparison.data_sentence, comparison.data),
        ("Versions and hardware", "Only what differs.", comparison.environment),
    ]
    return {
        "comparison": comparison,
        "metrics": partial(metrics_table, baseline=comparison.baseline),
        "differing": [
            (
                title,
                words,
                differences_table(found, runs, "Setting" if title == "Settings" else "What") if found else None,
            )
            for title, words, found in differing
        ],
        "costs": costs_table(comparison),
        "costs_words": COST_WORDS,
        "folders": [(run.name, redact(str(run.folder))) for run in runs],
        "tones": {word: verdict.replace(" ", "-") for word, verdict in WORDS.items()} | {"not compared": "none"},
        "symbols": {word: SYMBOLS[verdict] for word, verdict in WORDS.items()} | {"not compared": "○"},
        "method": METHOD,
        "text_of": text_of,
        "pictures_of": pictures_of,
    }


def _drawings(comparison: RunComparison) -> list[tuple[str, str, list[tuple[str, Markup]]]]:
    """Return title, words, and the drawings of each kind of curve."""
    found = []
    for overlay in comparison.overlays:
        axes = [("over steps", False), *([("over seconds", True)] if overlay.has_seconds else [])]
        label = f"{overlay.title} of {len(overlay.curves)} runs"
        drawn = [
            (f"{overlay.title}, {words}", draw_overlay(overlay, over_seconds=seconds, label=f"{label}, {words}"))
            for words, seconds in axes
        ]
        found.append((overlay.title, curve_words(comparison, overlay), drawn))
    return found


def curve_words(comparison: RunComparison, overlay: Overlay) -> str:
    """Say what is drawn, what was smoothed and which runs are missing."""
    said = []
    if overlay.is_smoothed:
        faint = "; the values themselves are faint" if len(overlay.curves) <= FEW_RUNS else ""
        said.append(f"The line is the mean over 5% of a run's steps around each{faint}.")
    differing = {each.name for each in comparison.config} & {"loss_type", "temperature", "global_batch_size"}
    if overlay.is_metric:
        said.append("The axis doesn't begin at 0.")
    if overlay.key == "loss" and differing:
        said.append(f"Heights can't be compared between runs that differ in {', '.join(sorted(differing))}.")
    there = {place for place, _ in overlay.curves}
    missing = [run.name for place, run in enumerate(comparison.runs) if place not in there]
    if missing:
        said.append(f"Without {', '.join(missing)}, which logged none.")
    return " ".join(said)
