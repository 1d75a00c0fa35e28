"""Positives and masked cells of the similarity matrix, listed tile by tile: no matrix of them ever exists.

Both follow from identities. Rows with equal content form a group; a query group knows the document groups that hold
one of its positives, and the one that repeats the query itself. Cells of known pairs of groups are no negatives. The
explicit positives are among them. Listing the cells of a tile takes time and memory in their number, usually about one
for each query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vembed.batch import ranges
from vembed.losses.base import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure

    Integers = NDArray[np.int64]

MOST_CELLS_AT_ONCE = 1 << 19
"""Masked cells of one strip that are listed together; more are listed tile by tile (16 MB of indices each time)."""


class Tile(NamedTuple):
    """A block of the similarity matrix."""

    rows: slice  # its queries, counted from this rank's first
    columns: slice  # its documents
    pairs: Tensor  # which positive pairs lie in it, int64
    pair_cells: Tensor  # where: row * width + column within the tile, int64
    excluded: Tensor  # cells that are no negatives, positives included, int64
    named: Tensor  # cells of the hard negatives of each query's own row, int64; empty where nobody asked for them

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


class CellMap:
    """Knows which cells of this rank's rows are positives and which are no negatives.

    Args:
        structure: Positives and identities of the whole batch, all ranks.
        rows: Which of its queries are this rank's.
        mask_false_negatives: Whether copies of positives, and of the query, are no negatives.
        device: Where the lists of cells go; None is where the structure is.
        with_named: Whether tiles list the hard negatives of each query's own row.

    Attributes:
        num_rows: Queries of this rank.
        num_columns: Documents of all ranks.
        pair_rows: Row of each positive pair of this rank, ascending.
        pair_columns: Its document.
        num_wanted: Documents that are some query's positive, over all ranks.
    """

    def __init__(
        self,
        structure: BatchStructure,
        rows: range,
        *,
        mask_false_negatives: bool,
        device: torch.device | None = None,
        with_named: bool = False,
    ) -> None:
        self.num_rows, self.num_columns = len(rows), structure.num_documents
        self._device = device or structure.positives_P2.device
        keys = np.unique(_numpy(structure.positives_P2) @ np.array([self.num_columns, 1]))
        queries, documents = np.divmod(keys, self.num_columns)
        self.num_wanted = len(np.unique(documents))
        mine = slice(*np.searchsorted(queries, [rows.start, rows.stop]))
        self._pair_rows, self._pair_columns = queries[mine] - rows.start, documents[mine]
        self.pair_rows, self.pair_columns = self._tensor(self._pair_rows), self._tensor(self._pair_columns)
        named_N2 = np.zeros((0, 2), dtype=np.int64)
        if with_named and structure.negatives_P2 is not None:
            named_N2 = np.unique(_numpy(structure.negatives_P2), axis=0)
        named_N2 = named_N2[(named_N2[:, 0] >= rows.start) & (named_N2[:, 0] < rows.stop)]
        self._named_rows, self._named_columns = named_N2[:, 0] - rows.start, named_N2[:, 1]
        query_groups = np.arange(structure.num_queries)
        document_groups = np.arange(self.num_columns)
        known = keys
        if mask_false_negatives:
            query_groups, document_groups = _numpy(structure.query_groups_Q), _numpy(structure.document_groups_D)
            known = _known_groups(structure, query_groups, document_groups, queries, documents)
        self._known, self._groups = known, (query_groups, document_groups)
        self._row_groups = query_groups[rows.start : rows.stop]
        known_queries, self._known_documents = np.divmod(known, self.num_columns)
        self._known_starts = np.searchsorted(known_queries, np.arange(structure.num_queries + 1))
        self._column_order = np.argsort(document_groups, kind="stable")
        self._column_keys = document_groups[self._column_order] * self.num_columns + self._column_order
        sizes = np.bincount(document_groups, minlength=self.num_columns)
        self._column_starts = np.concatenate([[0], np.cumsum(sizes)])
        totals = np.concatenate([[0], np.cumsum(sizes[self._known_documents])])[self._known_starts]
        self._excluded_per_row = np.diff(totals)[self._row_groups]

    def pairs_of(self, rows: slice) -> slice:
        """Return which positive pairs lie in some rows."""
        first, last = np.searchsorted(self._pair_rows, [rows.start, rows.stop])
        return slice(int(first), int(last))

    def are_negatives(self, cells_P2: Integers) -> NDArray[np.bool_]:
        """Return which of some (query of the whole batch, document) are neither positive nor masked, (P,)."""
        queries, documents = cells_P2.T
        known = self._groups[0][queries] * self.num_columns + self._groups[1][documents]
        return ~np.isin(known, self._known)

    def strip(self, start: int, stop: int, width: int) -> Iterator[Tile]:
        """Cut rows start to stop into tiles, left to right."""
        inside = self.pairs_of(slice(start, stop))
        pair_rows, pair_columns = self._pair_rows[inside] - start, self._pair_columns[inside]
        pairs_of = _split_by_tile(pair_columns, width, self.num_columns)
        first, last = np.searchsorted(self._named_rows, [start, stop])
        named_rows, named_columns = self._named_rows[first:last] - start, self._named_columns[first:last]
        named_of = _split_by_tile(named_columns, width, self.num_columns)
        listed = None
        if self._excluded_per_row[start:stop].sum() <= MOST_CELLS_AT_ONCE:
            rows, columns = self._excluded(start, stop, None)
            listed = [(rows[some], columns[some]) for some in _split_by_tile(columns, width, self.num_columns)]
        for index, (pairs, named) in enumerate(zip(pairs_of, named_of, strict=True)):
            left = index * width
            right = min(left + width, self.num_columns)
            rows, columns = self._excluded(start, stop, (left, right)) if listed is None else listed[index]
            yield Tile(
                rows=slice(start, stop),
                columns=slice(left, right),
                pairs=self._tensor(pairs + inside.start),
                pair_cells=self._tensor(pair_rows[pairs] * (right - left) + pair_columns[pairs] - left),
                excluded=self._tensor(rows * (right - left) + columns - left),
                named=self._tensor(named_rows[named] * (right - left) + named_columns[named] - left),
            )

    def _excluded(self, start: int, stop: int, columns: tuple[int, int] | None) -> tuple[Integers, Integers]:
        """List the cells that are no negatives, as rows counted from `start` and columns.

        Rows of one group share their columns, so a known pair of groups is a product of rows and columns.
        """
        groups = self._row_groups[start:stop]
        row_order = np.argsort(groups, kind="stable")
        present, row_starts, heights = np.unique(groups[row_order], return_index=True, return_counts=True)
        counts = self._known_starts[present + 1] - self._known_starts[present]
        known = self._known_documents[ranges(self._known_starts[present], counts)]
        owner = np.repeat(np.arange(len(present)), counts)
        if columns is None:
            lows, highs = self._column_starts[known], self._column_starts[known + 1]
        else:
            lows, highs = (np.searchsorted(self._column_keys, known * self.num_columns + edge) for edge in columns)
        widths = highs - lows
        sizes = widths * heights[owner]
        product = np.repeat(np.arange(len(known)), sizes)
        nth_row, nth_column = np.divmod(ranges(np.zeros_like(sizes), sizes), widths[product])
        return (
            row_order[row_starts[owner[product]] + nth_row],
            self._column_order[lows[product] + nth_column],
        )

    def _tensor(self, values: Integers) -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def _known_groups(
    structure: BatchStructure, query_groups: Integers, document_groups: Integers, queries: Integers, documents: Integers
) -> Integers:
    """Return the pairs of groups that are no negatives, as sorted keys: query group * D + document group."""
    num_columns = structure.num_documents
    _, same_queries, same_documents = np.intersect1d(
        _numpy(structure.query_ids_Q), _numpy(structure.document_ids_D), return_indices=True
    )
    rows, columns = np.concatenate([queries, same_queries]), np.concatenate([documents, same_documents])
    return np.unique(query_groups[rows] * num_columns + document_groups[columns])


def _split_by_tile(columns: Integers, width: int, num_columns: int) -> list[Integers]:
    """Return for each tile of a strip which entries lie in it."""
    tiles = columns // width
    order = np.argsort(tiles, kind="stable")
    return np.split(order, np.searchsorted(tiles[order], np.arange(1, -(-num_columns // width))))


def _numpy(values: Tensor) -> Integers:
    array: Integers = values.cpu().numpy()
    return array
