"""Cut the rows of a batch into chunks: sorted by length, packed into rectangles or end to end.

A chunk is what one encoder call sees: a rectangle of `rows x width`, where width is the longest of its rows. Rows that
stand beside rows of their own length cost next to no padding. The order in which rows are encoded can't change a loss
over the whole batch, so pairs need not stay together; the caller scatters the embeddings back by row.

On a CPU a chunk is as wide as its longest row, and where lengths fall fast, in the long tail of a distribution, it ends
before it is full. An accelerator pays for each shape that it hasn't seen: memory in other pieces, kernels chosen or
compiled anew. There chunks come in few shapes: widths from a grid, and for each width one number of rows, by which the
tokens of a batch are shared out; the rows that are left at the end make up half and quarter chunks, the last one filled
up with rows that are there already.

Rows of encoders that take them end to end have no padding: a chunk is as many tokens as the budget allows.

Longest first: memory peaks in the first chunk, so that a batch that doesn't fit fails at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


TOLERATED_WASTE = 0.06
"""A chunk that is at least half full ends where more rows would bring its padding above this share."""


WIDTHS_PER_DOUBLING = 8
"""Widths between a length and its double: at most an eighth of padding, half of that on average."""

SHORT_WIDTHS = 4
"""Widths for rows below a 16th of the longest: many rows in texts, but few of the tokens."""

WANTED_CHUNKS = 80
"""Where a batch makes fewer, rows of too many lengths share a chunk, and it is cut finer: into halves, or quarters."""


LEAST_STEP, STEPS_PER_DOUBLING = 256, 8
"""Tokens of a packed chunk on an accelerator are rounded up to a step: an eighth of the power of two below, at least
LEAST_STEP."""


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """The most that one encoder call may see."""

    rows: int
    tokens: int  # padded ones, rows x width; a single row that is wider is a chunk of its own
    bucketed: bool = False  # whether chunks come in few shapes, as accelerators want them

    def __post_init__(self) -> None:
        if min(self.rows, self.tokens) < 1:
            raise ValueError(f"a chunk budget holds positive numbers, got {self}")

    def most_rows(self, width: int) -> int:
        """Return the most rows of a width."""
        return max(1, min(self.rows, self.tokens // width))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One encoder call."""

    rows: NDArray[np.int64]  # row numbers into the pool's features
    width: int  # padded length of every row; the tokens of all where they lie end to end
    num_spare: int = 0  # how many of its last rows only fill it up; they repeat another one
    packed: bool = False  # whether rows lie end to end

    @property
    def padded_tokens(self) -> int:
        """Size of the rectangle, or of the one row that all rows make."""
        return self.width if self.packed else len(self.rows) * self.width


def plan_chunks(lengths: NDArray[np.int64], budget: ChunkBudget, *, packed: bool = False) -> list[Chunk]:
    """Pack rows into rectangles within the budget, or end to end.

    Args:
        lengths: Tokens of each row, (n,); a row of none counts as one.
        packed: Whether they go end to end.

    Returns:
        Chunks that hold each row exactly once, spare ones left out; widest first, equal lengths keep their order.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = np.maximum(lengths[order], 1)
    if packed:
        return _end_to_end(order, sorted_lengths, budget)
    return (_in_buckets if budget.bucketed else _tight)(order, sorted_lengths, budget)


def _end_to_end(order: NDArray[np.int64], lengths: NDArray[np.int64], budget: ChunkBudget) -> list[Chunk]:
    """Cut rows into chunks that they fill without padding.

    Args:
        lengths: Tokens of each row of `order`, descending.
    """
    ends = np.concatenate([[0], np.cumsum(lengths)])
    chunks = []
    start = 0
    while start < len(order):
        fitting = int(np.searchsorted(ends, ends[start] + budget.tokens, side="right")) - 1 - start
        count = max(1, min(fitting, budget.rows))
        tokens = int(ends[start + count] - ends[start])
        if budget.bucketed:
            step = max(LEAST_STEP, (1 << (tokens.bit_length() - 1)) // STEPS_PER_DOUBLING)
            tokens = max(tokens, min(-(-tokens // step) * step, budget.tokens))
        chunks.append(Chunk(order[start : start + count], tokens, packed=True))
        start += count
    return chunks


def _tight(order: NDArray[np.int64], lengths: NDArray[np.int64], budget: ChunkBudget) -> list[Chunk]:
    """Cut rows into chunks that are as wide as their longest row.

    Args:
        lengths: Tokens of each row of `order`, descending.
    """
    chunks = []
    start = 0
    while start < len(order):
        width = int(lengths[start])
        most = budget.most_rows(width)
        count = min(most, len(order) - start)
        if start + count < len(order):
            count = _without_waste(lengths[start : start + most], least=-(-most // 2))
        chunks.append(Chunk(rows=order[start : start + count], width=width))
        start += count
    return chunks


def _without_waste(widths: NDArray[np.int64], *, least: int) -> int:
    """Return how many of the rows that fit a chunk it takes: where lengths fall fast, the next chunk is cheaper.

    Args:
        widths: Lengths of those rows, descending.
        least: It takes no fewer: a chunk far below its budget would leave the device idle.
    """
    padded = widths[0] * np.arange(1, len(widths) + 1)
    tight = np.flatnonzero(padded <= (1 + TOLERATED_WASTE) * np.cumsum(widths))
    return max(least, int(tight[-1]) + 1)


def _in_buckets(order: NDArray[np.int64], lengths: NDArray[np.int64], budget: ChunkBudget) -> list[Chunk]:
    """Cut rows into chunks of few shapes.

    Args:
        lengths: Tokens of each row of `order`, descending.
    """
    widths = _bucket_widths(lengths)
    if len(order) <= budget.most_rows(int(widths[0])):
        return [Chunk(order, int(widths[0]))]
    if widths[0] != widths[-1]:
        parts = next((each for each in (1, 2) if each * widths.sum() >= WANTED_CHUNKS * budget.tokens), 4)
        budget = replace(budget, tokens=max(1, budget.tokens // parts))
    chunks = []
    start = 0
    while start < len(order):
        width = int(widths[start])
        most = budget.most_rows(width)
        sizes = [most, max(1, most // 2), max(1, most // 4)]
        count = next((size for size in sizes if size <= len(order) - start), sizes[-1])
        rows = order[start : start + count]
        chunks.append(Chunk(np.pad(rows, (0, count - len(rows)), mode="edge"), width, count - len(rows)))
        start += count
    return chunks


def _bucket_widths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the width in which each row is encoded: its length, rounded up to a grid.

    Args:
        lengths: At least one, all positive. Where all are equal, they are the widths.
    """
    if lengths.min() == lengths.max():
        return lengths
    longest = 1 << (int(lengths.max()) - 1).bit_length()  # rounded up to a power of 2
    short = longest // 16
    doubling = 2 ** np.floor(np.log2(lengths)).astype(np.int64)
    steps = np.where(lengths > short, doubling // WIDTHS_PER_DOUBLING, short // SHORT_WIDTHS)
    rounded: NDArray[np.int64] = -(-lengths // np.maximum(steps, 1)) * np.maximum(steps, 1)
    return rounded
