"""The words and numbers that the page, the Markdown file and the terminal share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from vembed.pages.text import metric_text, number_text, one_line, signed_text

if TYPE_CHECKING:
    from vembed.evaluation.benchmark.stored import Cost
    from vembed.evaluation.leaderboard.content import Board, Row, Standing, SumRow, VariantRow

SMALLEST_P = 0.001

NOTHING = "\N{EN DASH}"  # where a system would be compared with itself


def p_text(p_value: float | None) -> str:
    """Return a p-value, e.g. "0.043", "< 0.001", or a dash where there is no test."""
    if p_value is None:
        return NOTHING
    return f"< {SMALLEST_P}" if p_value < SMALLEST_P else f"{p_value:.3f}"


def difference_text(row: Standing | VariantRow) -> str:
    """Return the difference to what a row is compared with, or a dash where that is the row itself."""
    return NOTHING if row.p_value is None else signed_text(row.difference)


def reading(cell: Standing) -> str:
    """Return what the test says about one system on one set."""
    if cell.p_value is None:
        return "best"
    return "behind the best" if cell.is_behind else "not significantly below the best"


def mark(cell: Standing) -> str:
    """Return the same as one character."""
    if cell.p_value is None:
        return "★"
    return "▼" if cell.is_behind else "≈"


LEGEND = "★ best on the set; ≈ not significantly below it (p ≥ 0.05); ▼ significantly below it (p < 0.05)."


def interval(low: float, high: float) -> str:
    """Return an interval, e.g. "0.612 to 0.678"."""
    return f"{metric_text(low)} to {metric_text(high)}"


SUM_HEADS = tuple(f"{side} R@{k}" for side in ("Forward", "Reversed") for k in (1, 5, 10))
SUM_NOTE = Markup(
    "R@k is the share of queries, in percent, that find a right one among the first k (hit@k); rsum adds up all six, "
    "600 at best. Forward is the set as it was given, reversed its documents searching its queries."
)


def sum_cells(row: SumRow) -> list[str]:
    """Return the recalls of both directions, their sum, and its interval."""
    return [
        *(metric_text(value, 1) for value in (*row.forward, *row.reverse)),
        metric_text(row.total.value, 1),
        f"{metric_text(row.total.low, 1)} to {metric_text(row.total.high, 1)}",
    ]


def mean_cells(row: Row) -> tuple[str, str]:
    """Return the mean of a system and its interval, or dashes where it isn't over all sets."""
    return (metric_text(row.mean), interval(row.low, row.high)) if row.is_whole else (NOTHING, NOTHING)


def cell_text(cell: Standing | None) -> str:
    """Return a value and its mark, or a dash where the system wasn't evaluated."""
    return NOTHING if cell is None else f"{metric_text(cell.value)} {mark(cell)}"


def milliseconds(value: float) -> str:
    """Return a duration in three significant digits."""
    return number_text(float(f"{value:.3g}"))


def latencies(cost: Cost) -> tuple[str, str, str]:
    """Return the milliseconds of half, 95 and 99 of 100 queries."""
    found = (cost.milliseconds_per_query, cost.milliseconds_p95, cost.milliseconds_p99)
    p50, p95, p99 = map(milliseconds, found)
    return p50, p95, p99


def size(value: float) -> str:
    """Return bytes per document in four significant digits, without a unit."""
    return number_text(float(f"{value:.4g}"))


def stored_size(cost: Cost) -> str:
    """Return the bytes per document of a form, and behind a plus those that rescoring reads."""
    full = f" + {size(cost.rescoring_bytes)}" if cost.rescoring_bytes else ""
    return f"{size(cost.bytes_per_document)}{full}"


COST_NOTE = (
    "Latency is of one query at a time on one thread, after a warm-up, without encoding it: half, 95 and 99 of 100 "
    "queries took no longer. Bytes behind a plus are those of full vectors that rescoring reads; they may lie on disk."
)


def headline(board: Board) -> str:
    """Return the leaderboard in a sentence."""
    first, *others = board.rows
    if not first.is_whole:
        return f"No system was evaluated on all {len(board.tasks)} sets."
    over = "" if len(board.tasks) == 1 else f" over {len(board.tasks)} sets"
    sentence = f"{one_line(first.system)}: {board.metric} {metric_text(first.mean)}{over}"
    if not others:
        return f"{sentence}; nothing to compare it with."
    even = [row for row in others if row.is_whole and not any(cell.is_behind for cell in row.cells)]
    if even:
        count = "1 system is" if len(even) == 1 else f"{len(even)} systems are"
        return f"{sentence}; {count} significantly behind the best on no set."
    return f"{sentence}; every other system is significantly behind the best on at least one set."
