"""Cut the rows of a batch into chunks: sorted by length, packed into rectangles.

A chunk is what one encoder call sees: a rectangle of `rows x width`, where width is the longest of its rows. Rows that
stand beside rows of their own length cost next to no padding. The order in which rows are encoded can't change a loss
over the whole batch, so pairs need not stay together; the caller scatters the embeddings back by row.

Where lengths fall fast, in the long tail of a distribution, a chunk ends before it is full.

Longest first: memory peaks in the first chunk, so that a batch that doesn't fit fails at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


TOLERATED_WASTE = 0.06
"""A chunk that is at least half full ends where more rows would bring its padding above this share."""


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """The most that one encoder call may see."""

    rows: int
    tokens: int  # padded ones, rows x width; a single row that is wider is a chunk of its own
    width_multiple: int = (
        1  # widths are rounded up to it: 8 suits tensor cores, 1 a CPU; rows of no tokens have width 1
    )

    def __post_init__(self) -> None:
        if min(self.rows, self.tokens, self.width_multiple) < 1:
            raise ValueError(f"a chunk budget holds positive numbers, got {self}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One encoder call."""

    rows: NDArray[np.int64]  # row numbers into the pool's features
    width: int  # padded length of every row

    @property
    def padded_tokens(self) -> int:
        """Size of the rectangle."""
        return len(self.rows) * self.width


def plan_chunks(lengths: NDArray[np.int64], budget: ChunkBudget) -> list[Chunk]:
    """Pack rows into rectangles within the budget.

    Args:
        lengths: Tokens of each row, (n,).

    Returns:
        Chunks that hold each row exactly once, widest first; equal lengths keep their order.
    """
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    rounded = -(-sorted_lengths // budget.width_multiple) * budget.width_multiple
    widths = np.where(sorted_lengths > 0, rounded, 1)
    chunks = []
    start = 0
    while start < len(order):
        width = int(widths[start])
        most = max(1, min(budget.rows, budget.tokens // width))
        count = min(most, len(order) - start)
        if start + count < len(order):
            count = _without_waste(widths[start : start + most], least=-(-most // 2))
        chunks.append(Chunk(rows=order[start : start + count], width=width))
        start += count
    return chunks


def _without_waste(widths: NDArray[np.int64], *, least: int) -> int:
    """Return how many of the rows that fit a chunk it takes: where lengths fall fast, the next chunk is cheaper.

    Args:
        widths: Rounded lengths of those rows, descending.
        least: It takes no fewer: a chunk far below its budget would leave the device idle.
    """
    padded = widths[0] * np.arange(1, len(widths) + 1)
    tight = np.flatnonzero(padded <= (1 + TOLERATED_WASTE) * np.cumsum(widths))
    return max(least, int(tight[-1]) + 1)
