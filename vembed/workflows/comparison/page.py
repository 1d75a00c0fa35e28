"""The page of a comparison: verdicts, metrics, differences, curves of several runs in one drawing, costs, queries.

A section of the page is a function that returns it; the command prints the tables of its metrics.

A noisy curve is drawn as its running mean, with the values themselves faint behind it while there are few runs; nothing
is left out but points that can't be told apart, of which each stretch keeps its lowest and highest.
Shape legend: N points.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from vembed.evaluation.judge import CONFIDENCE, LEVEL
from vembed.evaluation.report.comparison import difference_cell, largest_bound, mean_cell, reading_cell
from vembed.evaluation.report.curves import STEP_CURVES, dev_curve, sparkline, step_curve, thinned_rows
from vembed.evaluation.report.examples import ranking_item
from vembed.evaluation.report.speed import seconds_text
from vembed.pages.charts import (
    SERIES_COLOURS,
    SERIES_MARKERS,
    chart_axes,
    inline_svg,
    scale_axis,
    series_mark,
    set_ticks,
)
from vembed.pages.page import (
    SYMBOLS,
    Cell,
    Figure,
    Fold,
    Heading,
    Note,
    NoteList,
    Page,
    Ranking,
    Section,
    SideBySide,
    Table,
    command_blocks,
    pairs_table,
    pictures_on,
)
from vembed.pages.pictures import copies_note, small_copies
from vembed.pages.terminal import table_lines
from vembed.pages.text import (
    DASH,
    bytes_text,
    clip,
    count_text,
    finite,
    metric_text,
    number_text,
    one_line,
    p_text,
    signed_text,
)
from vembed.redact import redact
from vembed.text import plural, show_duration
from vembed.workflows.comparison.runs import NOT_KNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from markupsafe import Markup

    from vembed.evaluation.judge import VerdictWord
    from vembed.evaluation.report.curves import Curve
    from vembed.evaluation.report.examples import Example
    from vembed.pages.page import Block, Mark, RowTone
    from vembed.workflows.comparison.compare import Line, PairWord, RunComparison, SetTable
    from vembed.workflows.comparison.runs import Run, RunCost

SCHEMA_VERSION = 1  # raised when a key changes its meaning or goes away; a new key doesn't raise it

NAME_CHARACTERS, VALUE_CHARACTERS = 40, 160
"""Most characters of a run's name at the head of a column, and of a setting."""

MOST_NAMED = 3
"""Runs that the title names beside the baseline."""

OPEN_QUERIES = 2
"""Queries of a kind that aren't folded away."""

WORDS: dict[PairWord, VerdictWord] = {"better": "improved", "worse": "worse", "no difference": "within noise"}

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

OVERLAY_INCHES = (5.2, 2.9)

FEW_RUNS = 4
"""Most runs whose values are drawn faint behind their running means, and whose curves have a shape in Markdown."""

MOST_POINTS, FEWEST_POINTS, ALL_POINTS = 300, 60, 1500
"""Points of a curve on a page of few and of many runs, and of all curves of a drawing together, about."""

MARKS = 6
"""Marks along a curve, which tell it from others without its colour."""


def comparison_page(comparison: RunComparison) -> Page:
    """Return the page of a comparison."""
    baseline, *others = [one_line(run.name) for run in comparison.runs]
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    queries = queries_section(comparison)
    # Small copies share one budget of bytes, so they are made once the whole page is known.
    pictures = list(pictures_on(queries.blocks)) if queries is not None else []
    copies = small_copies(pictures, comparison.image_limits)
    if queries is not None and (note := copies_note(pictures, copies)):
        queries = replace(queries, blocks=[queries.blocks[0], Note(note, muted=True), *queries.blocks[1:]])
    sections = [
        metrics_section(comparison),
        differences_section(comparison),
        curves_section(comparison),
        Section("costs", "Time and memory", [costs_table(comparison)]),
        queries,
        method_section(comparison),
    ]
    return Page(
        kind="Runs compared",
        title=f"{', '.join(others[:MOST_NAMED])}{more} against {baseline}",
        head=head_blocks(comparison),
        sections=[section for section in sections if section is not None],
        document=comparison_document(comparison),
        copies=copies,
    )


def head_blocks(comparison: RunComparison) -> list[Block]:
    """Return the verdict on each run, and the notes."""
    verdicts = []
    for verdict in comparison.verdicts:
        reading = WORDS.get(verdict.word)
        symbol, tone = ("○", "") if reading is None else (SYMBOLS[reading], reading.replace(" ", "-"))
        verdicts.append(Note(verdict.sentence, lead=f"{symbol} {verdict.word}", tone=tone))
    blocks: list[Block] = [NoteList(verdicts, layout="cards")]
    if comparison.notes:
        blocks.append(NoteList([Note(note, muted=True) for note in comparison.notes]))
    return blocks


def metrics_section(comparison: RunComparison) -> Section | None:
    """Return a table of every set in the metric that decides there, the other metrics folded away."""
    if not comparison.tables:
        return None
    share = f"{100 * CONFIDENCE:g}%"
    blocks: list[Block] = [
        Note(f"The chosen model of each run beside that of the baseline; the small numbers are {share} intervals.")
    ]
    for table in comparison.tables:
        title = set_title(table)
        scope = f"{plural(table.num_queries, 'query', 'queries')}, {plural(table.num_documents, 'document')}"
        scope += f", content {table.content[:12]}" if table.content else ""
        caption = f"{scope}; differences to {one_line(comparison.baseline.name)}."
        decisive = metrics_table(table, table.metric, comparison.baseline)
        blocks += [Heading(title), replace(decisive, title=title, caption=caption)]
        blocks += [Note(note, muted=True) for note in table.notes]
        further: list[Block] = [
            replace(
                metrics_table(table, metric, comparison.baseline),
                title=f"{title}, {metric}",
                caption=f"{metric}, on the same queries.",
            )
            for metric in table.lines
            if metric != table.metric
        ]
        if further:
            blocks.append(Fold(plural(len(further), "further metric"), further))
    return Section("metrics", "Metrics", blocks)


def set_title(table: SetTable) -> str:
    """Return the name of a set with its role."""
    return f"{one_line(table.name)} ({table.role} set)"


def metrics_table(table: SetTable, metric: str, baseline: Run) -> Table:
    """Return every run on a set in one metric, tested against the baseline."""
    lines = table.lines[metric]
    reach = largest_bound([line.row for line in lines])  # one scale for all bars of the table
    is_corrected = any(line.corrected != line.p_value for line in lines)
    rows: list[list[str | Cell]] = []
    for line in lines:
        tests = [line.p_value, *([line.corrected] if is_corrected else [])]
        reading: str | Cell = "baseline" if line.name == baseline.name else line.why_not
        if (verdict := line.row.verdict) is not None:
            if line.word == "not compared":  # the untrained model isn't tested: its interval says how it reads
                reading = reading_cell(line.row, reach=reach)
            else:
                row = replace(line.row, verdict=replace(verdict, word=WORDS[line.word]))
                reading = reading_cell(row, reach=reach, word=line.word)
        rows.append(
            [
                clip(line.name, NAME_CHARACTERS).short,
                mean_cell(line.row, "final"),
                DASH if line.row.verdict is None else difference_cell(line.row),
                *map(p_text, tests),
                reading,
            ]
        )
    heads = ["Run", one_line(metric), "Difference", "p", *(["p (Holm)"] if is_corrected else []), "Reading"]
    tones: dict[int, RowTone] = {row: "decisive" for row, line in enumerate(lines) if line.name == baseline.name}
    return Table(heads, rows, text_columns=frozenset({0, len(heads) - 1}), tones=tones)


def terminal_lines(comparison: RunComparison) -> list[str]:
    """Return the metrics that decide, and the verdicts that end the command."""
    lines = []
    for table in comparison.tables:
        lines.append(f"{set_title(table)}; {100 * CONFIDENCE:g}% intervals in brackets")
        lines += [*table_lines(metrics_table(table, table.metric, comparison.baseline)), ""]
    return [*lines, *(verdict.sentence for verdict in comparison.verdicts)]


def differences_section(comparison: RunComparison) -> Section:
    """Return the settings, the data, versions and hardware that differ, a column for each run."""
    nothing = "Nothing differs that was recorded."
    parts: list[tuple[str, str, str, str, Mapping[str, tuple[str, ...]]]] = [
        ("Settings", "Setting", "Only settings that differ, with what auto became.", nothing, comparison.config),
        ("Data", "What", comparison.data_sentence, comparison.data_sentence, comparison.data),
        ("Versions and hardware", "What", "Only what differs.", nothing, comparison.environment),
    ]
    blocks: list[Block] = []
    for title, head, caption, without, differences in parts:
        blocks.append(Heading(title))
        if not differences:
            blocks.append(Note(without))
            continue
        rows = [
            [clip(text, VALUE_CHARACTERS).short for text in (name, *values)] for name, values in differences.items()
        ]
        heads = [head, *_run_heads(comparison)]
        words = frozenset(range(len(heads)))
        blocks.append(Table(heads, rows, words, title=title, caption=caption, layout="scroll"))
    return Section("differences", "Differences", blocks)


def _run_heads(comparison: RunComparison) -> list[str]:
    return [clip(run.name, NAME_CHARACTERS).short for run in comparison.runs]


def costs_table(comparison: RunComparison) -> Table:
    """Return what each run took, a column for each; what was planned stands small."""

    def duration(seconds: float) -> str:
        return seconds_text(seconds) if seconds < 60 else show_duration(seconds)

    def shown(value: float | None, show: Callable[[float], str], planned: float | None = None) -> Cell:
        text = NOT_KNOWN if value is None else show(value)
        return Cell(text, "" if planned is None else f"planned {show(planned)}")

    def steps(cost: RunCost) -> str:
        planned = cost.steps_planned
        of = "" if planned in (None, cost.steps_done) else f" of {count_text(planned or 0)}"
        return f"{count_text(cost.steps_done)}{of}"

    def batch(cost: RunCost) -> str:
        return "" if cost.global_batch_size is None else count_text(cost.global_batch_size)

    # A row is a fact and a column a run: facts are few and known, runs may be many, and the table scrolls sideways.
    lines: dict[str, Callable[[RunCost], str | Cell]] = {
        "Device": lambda cost: cost.device,
        "Strategy x processes": lambda cost: " x ".join(filter(None, (cost.strategy, str(cost.processes or "")))),
        "Global batch": batch,
        "Steps": steps,
        "Time in steps": lambda cost: shown(cost.step_seconds, duration, cost.planned_step_seconds),
        "Time in evaluation": lambda cost: shown(cost.evaluation_seconds, duration),
        "Samples/s": lambda cost: shown(cost.samples_per_second, number_text),
        "Tokens/s": lambda cost: shown(cost.tokens_per_second, number_text),
        "Memory at the peak": lambda cost: shown(cost.peak_bytes, bytes_text, cost.planned_bytes),
    }
    rows = [[head, *map(cell, comparison.costs)] for head, cell in lines.items()]
    heads = ["", *_run_heads(comparison)]
    return Table(heads, rows, title="Time and memory", caption=COST_WORDS, layout="scroll")


@dataclass(frozen=True, slots=True)
class Overlay:
    """One kind of curve of all runs that have it."""

    title: str
    is_metric: bool
    curves: tuple[tuple[int, Curve], ...]  # number of the run, its curve
    seconds: tuple[Mapping[int, float], ...]  # of each run: step -> seconds of training until then
    words: str  # what is drawn, what was smoothed, and which runs are missing

    @property
    def has_seconds(self) -> bool:
        """Return True where every curve can be drawn over seconds."""
        return all(self.seconds[run] for run, _ in self.curves)

    @property
    def shape(self) -> str:
        """Return few curves as rows of block characters on one scale, each behind the mark of its run."""
        if len(self.curves) > FEW_RUNS:
            return ""
        lowest = min(float(curve.values_N.min()) for _, curve in self.curves)
        highest = max(float(curve.values_N.max()) for _, curve in self.curves)
        rows = (f"{series_mark(run)[1]} {sparkline(curve, reach=(lowest, highest))}" for run, curve in self.curves)
        return "  ".join(rows)


def overlays(comparison: RunComparison) -> list[Overlay]:
    """Return training loss, dev metric and learning rate, without those that no run has."""
    runs = comparison.runs
    seconds = tuple(seconds_at(run.rows) for run in runs)
    known = {name for run in runs for _, metrics in run.evaluations for name in metrics}
    # A dev set of graded pairs logs its own metrics; the first by name stands for them.
    metric = comparison.metric if comparison.metric in known else min(known, default=comparison.metric)
    loss, rate = (spec for spec in STEP_CURVES if spec.key in ("loss", "learning_rate"))
    kinds: list[tuple[str, list[Curve | None]]] = [
        (loss.title, [step_curve(run.rows, loss) for run in runs]),
        (f"Dev {metric}", [dev_curve(run.evaluations, metric) for run in runs]),
        (rate.title, [step_curve(run.rows, rate) for run in runs]),
    ]
    made = []
    for title, all_curves in kinds:
        curves = tuple((number, curve) for number, curve in enumerate(all_curves) if curve is not None)
        if not curves:
            continue
        # Everything that a reader could take from the drawing wrongly is said below it.
        sentences = []
        if any(curve.mean_N is not None for _, curve in curves):
            faint = "; the values themselves are faint" if len(curves) <= FEW_RUNS else ""
            sentences.append(f"The line is the mean over 5% of a run's steps around each{faint}.")
        if title.startswith("Dev "):
            sentences.append("The axis doesn't begin at 0.")
        changing = sorted(comparison.config.keys() & {"loss_type", "temperature", "global_batch_size"})
        if title == loss.title and changing:
            sentences.append(f"Heights can't be compared between runs that differ in {', '.join(changing)}.")
        missing = [run.name for run, curve in zip(runs, all_curves, strict=True) if curve is None]
        if missing:
            sentences.append(f"Without {', '.join(missing)}, which logged none.")
        made.append(Overlay(title, title.startswith("Dev "), curves, seconds, " ".join(sentences)))
    return made


def seconds_at(rows: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Return how long training had taken after each step, evaluations left out; empty where that wasn't logged."""
    # Time of training, so that runs with more evaluations don't look slower.
    steps = [finite(row.get("step_seconds")) for row in rows]
    if not rows or not np.isfinite(steps).all():
        return {}
    return {0: 0.0, **dict(zip((int(row["step"]) for row in rows), accumulate(steps), strict=True))}


def curves_section(comparison: RunComparison) -> Section | None:
    """Return the curves of all runs laid over each other, over steps and over seconds, with one legend."""
    kinds = overlays(comparison)
    if not kinds:
        return None
    # One legend for all figures: a run has the same colour and mark in each.
    legend = []
    for number, run in enumerate(comparison.runs):
        tone, character = series_mark(number)
        legend.append(Note(run.name, lead=character, tone=tone))
    figures = []
    for overlay in kinds:
        draw = partial(draw_overlay, overlay)
        figures.append(Figure(f"{overlay.title}, over steps", draw, overlay.words, overlay.shape))
        if overlay.has_seconds:
            draw = partial(draw_overlay, overlay, over_seconds=True)
            figures.append(Figure(f"{overlay.title}, over seconds", draw, overlay.words))
    return Section("curves", "Curves", [NoteList(legend, layout="across"), SideBySide(figures)])


def draw_overlay(overlay: Overlay, *, over_seconds: bool = False, name: str, label: str) -> Markup:
    """Draw the curves of all runs, over steps or over seconds."""
    count = len(overlay.curves)
    # The size of the page: a point is about 20 bytes of SVG.
    limit = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // count))
    with chart_axes(OVERLAY_INCHES) as (figure, axes):
        drawn = []
        for run, curve in overlay.curves:
            seconds = overlay.seconds[run]
            rows_N = thinned_rows(curve.values_N, limit)
            across_N = curve.steps_N[rows_N]
            if over_seconds:  # an evaluation at a step that wasn't logged has no second
                rows_N = np.array([row for row in rows_N if int(curve.steps_N[row]) in seconds], dtype=np.int64)
                across_N = np.array([seconds[int(step)] for step in curve.steps_N[rows_N]])
            colour, marker = SERIES_COLOURS[run % len(SERIES_COLOURS)], SERIES_MARKERS[run % len(SERIES_MARKERS)][0]
            values_N = curve.values_N[rows_N] / curve.spec.divisor
            line_N = values_N if curve.mean_N is None else curve.mean_N[rows_N] / curve.spec.divisor
            if curve.mean_N is not None and count <= FEW_RUNS:
                axes.plot(across_N, values_N, color=colour, alpha=0.22, linewidth=0.8)
                drawn.append(values_N)
            # Marks of runs that lie on each other stand apart: each run begins at another point.
            every = 1 if len(line_N) <= 2 * MARKS else len(line_N) // MARKS
            axes.plot(across_N, line_N, color=colour, marker=marker, markersize=4.5, markevery=(run % every, every))
            drawn.append(line_N)
        if overlay.is_metric:
            set_ticks(axes.yaxis)
        else:
            scale_axis(axes, np.concatenate(drawn))
        axes.set_xlabel("seconds of training" if over_seconds else "step")
        set_ticks(axes.xaxis, 5, integer=not over_seconds)
        return inline_svg(figure, name=name, label=label)


def queries_section(comparison: RunComparison) -> Section | None:
    """Return the queries that each run wins and loses most, the first of each kind open."""
    if not comparison.changes:
        return None
    blocks: list[Block] = [
        Note(
            f"Queries of {one_line(comparison.tables[0].name)} that changed most in {comparison.metric}, and what each "
            f"model put first."
        )
    ]
    if comparison.changes_note:
        blocks.append(Note(comparison.changes_note, muted=True))
    for changes in comparison.changes:
        same = changes.num_queries - changes.num_won - changes.num_lost
        blocks += [
            Heading(f"{one_line(changes.run)} against {one_line(comparison.baseline.name)}"),
            Note(
                f"Of {plural(changes.num_queries, 'query', 'queries')} {count_text(changes.num_won)} won, "
                f"{count_text(changes.num_lost)} lost, {count_text(same)} the same.",
                muted=True,
            ),
        ]
        for kind, queries, count in (("Won", changes.won, changes.num_won), ("Lost", changes.lost, changes.num_lost)):
            rankings = [change_ranking(comparison, changes.run, *examples) for examples in queries]
            if rankings:
                title = f"{kind} most by {one_line(changes.run)} ({count_text(count)})"
                blocks += [Heading(title), *rankings[:OPEN_QUERIES]]
            if more := rankings[OPEN_QUERIES:]:
                blocks.append(Fold(plural(len(more), "more query", "more queries"), more))
    return Section("queries", "Queries won and lost", blocks)


def change_ranking(comparison: RunComparison, run: str, example: Example, of_baseline: Example) -> Ranking:
    """Return a query with the document that each of two models put first.

    Args:
        example: The query with the document of the run.
        of_baseline: The same query with that of the baseline.
    """
    results = []
    gain = signed_text(example.final - example.baseline)
    numbers = [f"{comparison.metric} {metric_text(example.baseline)} → {metric_text(example.final)} ({gain})"]
    for name, hits in ((comparison.baseline.name, of_baseline.hits), (run, example.hits)):
        if not hits:
            numbers.append(f"{one_line(name)} retrieved nothing")
            continue
        hit = hits[0]
        mark: Mark = "" if comparison.task is None else "right" if hit.is_relevant else "wrong"
        results.append(replace(ranking_item(hit.document_id, hit), label=f"{one_line(name)} put first", mark=mark))
    return Ranking(query=replace(ranking_item(example.query_id, example), numbers=numbers), results=results)


def method_section(comparison: RunComparison) -> Section:
    """Return how runs are tested, where they lie, and the command."""
    folders = [(run.name, redact(str(run.folder))) for run in comparison.runs]
    blocks = [Note(METHOD), pairs_table("Runs", folders, "The runs."), *command_blocks(comparison.command)]
    return Section("method", "How it was compared", blocks)


def comparison_document(comparison: RunComparison) -> dict[str, object]:
    """Return the comparison for programs, every number unrounded."""
    names = [run.name for run in comparison.runs]

    def by_run(differences: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
        return {name: dict(zip(names, values, strict=True)) for name, values in differences.items()}

    def line(shown: Line) -> dict[str, object]:
        verdict = shown.row.verdict
        return {
            "run": shown.name,
            "value": shown.row.values.get("final"),
            "interval": shown.row.intervals.get("final"),
            "against_baseline": None if verdict is None else asdict(verdict.comparison),
            "p_value": shown.p_value,
            "p_value_corrected": shown.corrected,
            "word": shown.word,
            "not_compared": shown.why_not or None,
        }

    def queries(changed: Sequence[tuple[Example, Example]]) -> list[dict[str, object]]:
        return [
            {"query": example.query_id, "baseline": example.baseline, "run": example.final} for example, _ in changed
        ]

    return {
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
                "settings": run.settings,
                "cost": asdict(cost),
            }
            for run, cost in zip(comparison.runs, comparison.costs, strict=True)
        ],
        "verdicts": [
            {**asdict(verdict), "verdict": asdict(verdict.verdict.comparison) if verdict.verdict else None}
            for verdict in comparison.verdicts
        ],
        "sets": [
            {
                "name": table.name,
                "metric": table.metric,
                "role": table.role,
                "content": table.content or None,
                "num_queries": table.num_queries,
                "num_documents": table.num_documents,
                "metrics": {metric: [line(shown) for shown in lines] for metric, lines in table.lines.items()},
                "notes": list(table.notes),
            }
            for table in comparison.tables
        ],
        "differences": {
            "settings": by_run(comparison.config),
            "data": by_run(comparison.data),
            "environment": by_run(comparison.environment),
        },
        "queries": [
            {
                "run": changes.run,
                "num_queries": changes.num_queries,
                "num_won": changes.num_won,
                "num_lost": changes.num_lost,
                "won": queries(changes.won),
                "lost": queries(changes.lost),
            }
            for changes in comparison.changes
        ],
        "notes": list(comparison.notes),
        "command": comparison.command,
    }
