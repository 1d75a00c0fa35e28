"""The report as Markdown: the same facts for terminals, pull requests and diffs.

A user's text must neither become markup nor break a table: `escape` leaves no character that Markdown, its GitHub
dialect or the HTML inside it acts on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.evaluation.pages import escape_markdown as escape
from vembed.evaluation.pages import fenced
from vembed.evaluation.report.comparison import (
    bounds_text,
    difference_text,
    row_decimals,
    share_text,
    systems_note,
)
from vembed.evaluation.report.content import (
    SYMBOLS,
    TITLES,
    dev_metric_names,
    dev_note,
    evaluation_cell,
    evaluation_rows,
    notes,
    reverse_lines,
)
from vembed.evaluation.report.curves import sparkline
from vembed.evaluation.report.examples import picture_of, text_of
from vembed.evaluation.report.pictures import picture_name
from vembed.evaluation.report.ranks import cut_cells, cut_heads
from vembed.evaluation.report.settings import columns, performance_pairs, plan_parts
from vembed.evaluation.report.time_split import NO_FINDINGS, measured_note, percent_text, seconds_text
from vembed.evaluation.text import (
    capitalised,
    clip,
    count_text,
    id_text,
    metric_text,
    plural,
    signed_text,
    value_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vembed.batch import Item
    from vembed.evaluation.report.comparison import Comparisons, MetricRow, RecallSums
    from vembed.evaluation.report.content import Content
    from vembed.evaluation.report.curves import Curve
    from vembed.evaluation.report.examples import Example, Hit
    from vembed.evaluation.report.settings import Record

TEXT_CHARACTERS = 300
VALUE_CHARACTERS = 500


def render_markdown(content: Content) -> str:
    """Return the document."""
    blocks = [
        *_head(content),
        *_metrics(content),
        *_ranks(content),
        *_curves(content),
        *_speed(content),
        *_queries(content),
        *_data(content),
        *_plan(content),
        *_reproduce(content),
    ]
    return "\n\n".join(blocks) + "\n"


def _head(content: Content) -> list[str]:
    """Return title and verdict."""
    verdict = content.report.verdict
    return [
        f"# {escape(content.report.title)}",
        f"**{SYMBOLS[verdict.word]} {verdict.word.upper()}**",
        escape(verdict.sentence),
        *(escape(line) for line in reverse_lines(content)),
        f"Evaluated on {escape(content.metrics.scope)}. Model: {escape(content.report.final.system)}.",
        "Drawings and full texts: [report.html](report.html).",
    ]


def _metrics(content: Content) -> list[str]:
    """Return the metric tables of each direction; the metrics beyond the headline follow in tables of their own."""
    share = share_text(content.report)
    blocks = ["## Metrics"]
    if note := systems_note(content.report):
        blocks.append(escape(note))
    blocks.append(f"In parentheses: the {share} interval.")
    if content.reverse is None:
        return [*blocks, *_metric_tables(content.metrics)]
    blocks += [f"### {escape(capitalised(content.metrics.direction))}", *_metric_tables(content.metrics)]
    blocks += [f"### Reversed: {escape(content.reverse.direction)}", *_metric_tables(content.reverse)]
    return [*blocks, "### Both directions in one number", _sums(content.sums)] if content.sums else blocks


def _metric_tables(comparisons: Comparisons) -> list[str]:
    """Return the headline of one direction, and the other metrics."""
    headline = [row for row in comparisons.rows if row.is_headline]
    rest = [row for row in comparisons.rows if not row.is_headline]
    more = ["#### Further metrics", _metric_table(comparisons, rest)] if rest else []
    return [f"On {escape(comparisons.scope)}.", _metric_table(comparisons, headline), *more]


def _metric_table(comparisons: Comparisons, rows: Sequence[MetricRow]) -> str:
    """Return one table of metrics."""
    models = [system for system in comparisons.systems if system.key != "bm25"]
    others = [system for system in comparisons.systems if system.key == "bm25"]
    heads = ["Metric", *(system.head for system in models), "Difference", "Reading"]
    heads += [system.head for system in others]
    body = []
    for row in rows:
        decimals = row_decimals(row)
        numbers = {
            system.key: _bounded(
                metric_text(row.values.get(system.key), decimals), bounds_text(row.intervals.get(system.key), decimals)
            )
            for system in comparisons.systems
        }
        if row.verdict is None:
            compared = [metric_text(None), "not compared"]
        else:
            comparison = row.verdict.comparison
            difference = signed_text(comparison.difference, decimals)
            compared = [_bounded(difference, difference_text(comparison, decimals))]
            compared.append(f"{SYMBOLS[row.verdict.word]} {row.verdict.word}")
        cells = [numbers[system.key] for system in models] + compared + [numbers[system.key] for system in others]
        body.append([escape(row.name), *cells])
    words = {0, heads.index("Reading")}
    return table(heads, body, numeric=set(range(len(heads))) - words)


def _bounded(number: str, bounds: str) -> str:
    """Return a number with its interval in parentheses."""
    return f"{number} ({bounds})" if bounds else number


def _sums(sums: RecallSums) -> str:
    """Return the sums of recalls."""
    cells = []
    for system in sums.systems:
        found = sums.by_system[system.key]
        cells.append(_bounded(metric_text(found.value, 1), bounds_text((found.low, found.high), 1)))
    heads = ["R@1 + R@5 + R@10 of both, in percent", *(system.head for system in sums.systems)]
    return table(heads, [["rsum", *cells]], numeric=range(1, len(heads)))


def _ranks(content: Content) -> list[str]:
    """Return recall by depth and the scores by judgement, where anything was retrieved."""
    ranks = content.ranks
    if not ranks.curves:
        return []
    body = [cut_cells(curve, ranks.cuts) for curve in ranks.curves]
    heads = cut_heads(ranks.cuts)
    lines = [f"- {split.label}: {split.summary}" for split in ranks.splits]
    blocks = ["## Ranks and scores", table(heads, body, numeric=range(1, len(heads)))]
    turned = content.reverse_ranks
    if turned is not None and turned.curves:
        heads = cut_heads(turned.cuts)
        rows = [cut_cells(curve, turned.cuts) for curve in turned.curves]
        blocks += ["Reversed:", table(heads, rows, numeric=range(1, len(heads)))]
    return [*blocks, "\n".join(lines)]


def _curves(content: Content) -> list[str]:
    """Return each curve as a line of blocks and a sentence, then the dev metrics by step."""
    body = [_curve_cells(curve.title, curve) for curve in content.curves]
    if content.dev is not None and content.dev_metric is not None:
        body.insert(0, _curve_cells(f"Dev {escape(content.dev_metric)}", content.dev))
    blocks = ["## Curves"]
    if body:
        blocks.append(table(["Curve", "Shape", "In words"], body))
    missing = [*content.not_logged, *([] if content.dev else ["Dev metrics"])]
    if missing:
        blocks.append(f"Not logged: {', '.join(missing)}.")
    if content.evaluations:
        names, rows = dev_metric_names(content), evaluation_rows(content)
        kept = content.report.kept_step
        cells = [
            [
                f"✓ {count_text(step)} (kept)" if step == kept else count_text(step),
                *(evaluation_cell(metrics, name) for name in names),
            ]
            for step, metrics in rows
        ]
        note = escape(dev_note(content))
        if len(rows) < len(content.evaluations):
            note += f" {len(rows)} of {count_text(len(content.evaluations))} evaluations, evenly spread."
        heads = ["Step", *(escape(name) for name in names)]
        blocks += ["### Dev metrics by step", note, table(heads, cells, numeric=range(len(heads)))]
    return blocks


def _speed(content: Content) -> list[str]:
    """Return where the time of the training went, what that suggests, and how fast it was."""
    blocks, findings = [], content.report.findings
    if content.time is not None:
        rows = [
            [capitalised(part.spec.name), seconds_text(part.seconds), percent_text(part.share)]
            for part in content.time.parts
        ]
        heads = ["Part of a step", "Mean", "Share"]
        blocks += [escape(content.time.sentence), measured_note(content.time), table(heads, rows, numeric=(1, 2))]
    if findings is not None:
        lines = [
            f"{number}. **{escape(capitalised(finding.cause))}.** {escape(finding.sentence)} {escape(finding.advice)}"
            for number, finding in enumerate(findings, start=1)
        ]
        blocks += ["### What the numbers suggest", "\n".join(lines) if lines else NO_FINDINGS]
    if content.report.performance:
        pairs = performance_pairs(content.report.performance)
        blocks += ["### Performance", pairs_table(pairs)]
    return ["## Speed and health", *blocks] if blocks else []


def _curve_cells(title: str, curve: Curve) -> list[str]:
    """Return one row of the table of curves."""
    return [title, sparkline(curve), escape(curve.summary)]


def _queries(content: Content) -> list[str]:
    """Return how the queries moved, and the examples."""
    blocks = ["## Query by query", escape(content.changes.summary)]
    for group in content.groups:
        blocks.append(f"### {TITLES[group.kind]}")
        if not group.examples:
            blocks.append("No query.")
            continue
        count = f"{len(group.examples)} of {plural(group.num_queries, 'query', 'queries')}."
        blocks.append(f"{count} Those shown above are left out." if group.kind == "lowest" else count)
        metric = escape(content.report.verdict.comparison.metric)
        blocks += [_example(example, metric) for example in group.examples]
    return blocks


def _example(example: Example, metric: str) -> str:
    """Return one query with its results as a list."""
    scores = (
        f"{metric} {metric_text(example.baseline)} → {metric_text(example.final)} "
        f"({signed_text(example.final - example.baseline)}), query {escape(id_text(example.query_id))}"
    )
    lines = [f"**Query:** {_item(example.item, example.query_id)}  ", scores, ""]
    lines += [f"{hit.rank}. {_hit(hit)}" for hit in example.hits] or ["Nothing was retrieved."]
    if example.missed:
        lines += ["", "Relevant, but further down or missing:", ""]
        lines += [
            f"- ○ {'lower' if hit.rank else 'missed'}: {_item(hit.item, hit.document_id)} ({_place(hit)})"
            for hit in example.missed
        ]
    more = example.num_missed - len(example.missed)
    if more:
        lines.append(f"- and {count_text(more)} more")
    return "\n".join(lines)


def _hit(hit: Hit) -> str:
    """Return one document of a result list."""
    mark = "✓ right" if hit.is_relevant else "✗ wrong"
    return f"{mark}: {_item(hit.item, hit.document_id)} ({_place(hit)})"


def _place(hit: Hit) -> str:
    """Return id, score and ranks of a document."""
    rank = f"rank {count_text(hit.rank)}" if hit.rank else "not retrieved"
    before = f"baseline rank {count_text(hit.baseline_rank)}" if hit.baseline_rank else "baseline: not retrieved"
    score = [f"score {metric_text(hit.score)}"] if hit.score is not None else []
    return ", ".join([f"document {escape(id_text(hit.document_id))}", *score, rank, before])


def _item(item: Item | None, identifier: str) -> str:
    """Return a text of the set, clipped, or what a picture is called."""
    picture, text = picture_of(item), text_of(item)
    words = "" if text is None else escape(clip(text, TEXT_CHARACTERS).short)
    if picture is None:
        return "(the set has no text for this id)" if text is None else words
    name = picture_name(picture)
    shown = f"picture {escape(id_text(name))}" if name != identifier else "picture"
    return f"{shown}, with: {words}" if words else shown


def _data(content: Content) -> list[str]:
    """Return the data facts and what was left out."""
    facts = content.report.data_facts
    blocks = ["## Data", pairs_table(facts) if facts else "No data facts were given."]
    found = notes(content.report)
    return [*blocks, "\n".join(f"- {escape(note)}" for note in found)] if found else blocks


def _plan(content: Content) -> list[str]:
    """Return the plan, its reasons first."""
    reasons, settings, tables = plan_parts(content.report.plan)
    blocks = ["## Plan"]
    if reasons:
        blocks.append("\n".join(f"{number}. {escape(reason)}" for number, reason in enumerate(reasons, start=1)))
    if settings:
        blocks.append(pairs_table(settings))
    for name, records in tables:
        blocks += [f"### {escape(name.replace('_', ' ').capitalize())}", _records(records)]
    return blocks if len(blocks) > 1 else [*blocks, "No plan was given."]


def _reproduce(content: Content) -> list[str]:
    """Return command, environment and config."""
    report = content.report
    config = [(key, value_text(key, value)) for key, value in report.config.items()]
    blocks = ["## Reproduce", fenced(report.command)]
    if report.environment:
        blocks += ["### Environment", pairs_table(list(report.environment.items()))]
    return [*blocks, "### Configuration", pairs_table(config)] if config else blocks


def pairs_table(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    return table(
        ["Name", "Value"], [[escape(name), escape(clip(value, VALUE_CHARACTERS).short)] for name, value in pairs]
    )


def _records(records: Sequence[Record]) -> str:
    """Return a table of records."""
    names = columns(records)
    body = [[escape(clip(record.get(name, ""), VALUE_CHARACTERS).short) for name in names] for record in records]
    return table([escape(name.replace("_", " ")) for name in names], body)


def table(heads: Sequence[str], body: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """Return a table of cells that are escaped already; columns of numbers are aligned right."""
    right = set(numeric)
    rule = ["---:" if column in right else "---" for column in range(len(heads))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *body))
