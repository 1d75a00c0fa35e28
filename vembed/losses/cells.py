"""Positives, negatives and masked cells of the similarity matrix: by definition, and listed tile by tile.

A document is a positive of a query where the data pair the two. It is masked, neither positive nor negative, where its
content is that of another positive of the query's content, or that of the query itself: pushing it away would push
the positive away. Identity is by content, since embeddings of equal texts differ under dropout.

Rows of equal content form a group. A query group knows the document groups that hold a positive of it, and the one
that repeats the query: the cells of these pairs of groups are no negatives, and the positives are among them. So a tile
is listed in the time and memory of such cells, about one for each query, and no Q x D mask ever exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vembed.batch import ranges
from vembed.device import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.losses.base import BatchStructure

    Integers = NDArray[np.int64]

MOST_CELLS_AT_ONCE = 1 << 19
"""Cells of a row block that are listed together, at most; more are listed tile by tile (16 MB of indices each)."""


# The definition, over the whole matrix --------------------------------------------------------------------------------


def positive_mask(structure: BatchStructure) -> Tensor:
    """Return which document is a positive of which query, bool (Q, D)."""
    return _mask(structure, structure.positives_P2)


def own_negatives_mask(structure: BatchStructure) -> Tensor:
    """Return which document is a hard negative of which query's own row, bool (Q, D)."""
    return _mask(structure, structure.negatives_P2)


def _mask(structure: BatchStructure, pairs_P2: Tensor | None) -> Tensor:
    shape, device = (structure.num_queries, structure.num_documents), structure.positives_P2.device
    mask_QD = torch.zeros(shape, dtype=torch.bool, device=device)
    if pairs_P2 is not None:
        mask_QD[pairs_P2.unbind(dim=1)] = True
    return mask_QD


def false_negative_mask(structure: BatchStructure, positive_QD: Tensor) -> Tensor:
    """Return which cells are neither positive nor negative, bool (Q, D)."""
    query_groups_Q, document_groups_D = structure.query_groups_Q, structure.document_groups_D
    pair_queries, pair_documents = structure.positives_P2.unbind(dim=1)
    related = torch.zeros_like(positive_QD)  # (query group, document group): there are no more groups than rows
    related[query_groups_Q[pair_queries], document_groups_D[pair_documents]] = True
    itself_QD = structure.query_ids_Q[:, None] == structure.document_ids_D[None, :]
    # A positive that repeats the query, or another positive, stays one: the data say so.
    return (related[query_groups_Q][:, document_groups_D] | itself_QD) & ~positive_QD


# The same, tile by tile -----------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A block of the similarity matrix. Cells are numbered row * width + column within it."""

    rows: slice  # its queries, counted from this rank's first
    columns: slice  # its documents
    pairs: Tensor  # numbers of the positive pairs in it, int64
    pair_cells: Tensor  # their cells, int64
    excluded: Tensor  # cells that are no negatives, positives included, int64
    own_negative_cells: Tensor  # those of each query's own hard negatives, int64; empty without `with_own_negatives`

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


class CellMap:
    """Index of the positives and the excluded cells of this rank's rows.

    Args:
        structure: Positives and identities of the whole batch, all ranks.
        rows: This rank's queries.
        mask_false_negatives: Whether copies of positives, and of the query, are no negatives.
        device: Where the lists of cells go; None is where the structure is.
        with_own_negatives: Whether tiles list the hard negatives of each query's own row.

    Attributes:
        num_rows: Queries of this rank.
        num_columns: Documents of all ranks.
        pair_rows: Row of each positive pair of this rank, ascending.
        pair_columns: Its document.
    """

    def __init__(
        self,
        structure: BatchStructure,
        rows: range,
        *,
        mask_false_negatives: bool,
        device: torch.device | None = None,
        with_own_negatives: bool = False,
    ) -> None:
        self.num_rows, self.num_columns = len(rows), structure.num_documents
        self._device = device or structure.positives_P2.device
        # A pair is one integer, query * D + document: sorted, unique and searchable. int64 holds 3e9 x 3e9.
        pair_keys = np.unique(_numpy(structure.positives_P2) @ np.array([self.num_columns, 1]))
        queries, documents = np.divmod(pair_keys, self.num_columns)
        inside = slice(*np.searchsorted(queries, [rows.start, rows.stop]))
        self._pair_rows, self._pair_columns = queries[inside] - rows.start, documents[inside]
        self.pair_rows, self.pair_columns = self._tensor(self._pair_rows), self._tensor(self._pair_columns)
        own_N2 = np.zeros((0, 2), dtype=np.int64)
        if with_own_negatives and structure.negatives_P2 is not None:
            own_N2 = np.unique(_numpy(structure.negatives_P2), axis=0)
            own_N2 = own_N2[(own_N2[:, 0] >= rows.start) & (own_N2[:, 0] < rows.stop)]
        self._own_rows, self._own_columns = own_N2[:, 0] - rows.start, own_N2[:, 1]

        # Pairs of groups that are no negatives. Without masks each row is a group of its own, and these are the pairs.
        self._query_groups, self._document_groups = np.arange(structure.num_queries), np.arange(self.num_columns)
        self._related = pair_keys
        if mask_false_negatives:
            self._query_groups = _numpy(structure.query_groups_Q)
            self._document_groups = _numpy(structure.document_groups_D)
            _, repeated, repeating = np.intersect1d(  # a document that repeats the query itself
                _numpy(structure.query_ids_Q), _numpy(structure.document_ids_D), return_indices=True
            )
            queries, documents = np.concatenate([queries, repeated]), np.concatenate([documents, repeating])
            self._related = np.unique(self._query_groups[queries] * self.num_columns + self._document_groups[documents])
        self._row_groups = self._query_groups[rows.start : rows.stop]
        # Both as compressed rows: the document groups of query group g are _related_documents[starts[g]:starts[g + 1]],
        # the documents of document group h are _column_order[starts[h]:starts[h + 1]].
        related_queries, self._related_documents = np.divmod(self._related, self.num_columns)
        self._related_starts = np.searchsorted(related_queries, np.arange(structure.num_queries + 1))
        sizes = np.bincount(self._document_groups, minlength=self.num_columns)
        self._column_starts = np.concatenate([[0], np.cumsum(sizes)])
        self._column_order = np.argsort(self._document_groups, kind="stable")
        # (group, column) as one ascending integer: the columns of a group within a tile are found by two searches.
        self._column_keys = self._document_groups[self._column_order] * self.num_columns + self._column_order
        totals = np.concatenate([[0], np.cumsum(sizes[self._related_documents])])[self._related_starts]
        self._excluded_per_row = np.diff(totals)[self._row_groups]

    def pairs_of(self, rows: slice) -> slice:
        """Return the positive pairs of some rows."""
        first, last = np.searchsorted(self._pair_rows, [rows.start, rows.stop])
        return slice(int(first), int(last))

    def are_negatives(self, cells_P2: Integers) -> NDArray[np.bool_]:
        """Return which of some (query of the whole batch, document) are neither positive nor masked, (P,)."""
        queries, documents = cells_P2.T
        # By groups, as masks go by content; without masks each row is a group of its own, and these are the pairs.
        keys = self._query_groups[queries] * self.num_columns + self._document_groups[documents]
        return ~np.isin(keys, self._related)

    def strip(self, start: int, stop: int, width: int) -> Iterator[Tile]:
        """Cut rows start to stop into tiles, left to right."""
        rows = slice(start, stop)
        inside = self.pairs_of(rows)
        pair_rows, pair_columns = self._pair_rows[inside] - start, self._pair_columns[inside]
        pairs_of = _split_by_tile(pair_columns, width, self.num_columns)
        first, last = np.searchsorted(self._own_rows, [start, stop])
        own_rows, own_columns = self._own_rows[first:last] - start, self._own_columns[first:last]
        own_negatives_of = _split_by_tile(own_columns, width, self.num_columns)
        # All tiles of a strip are listed together, which sorts its cells once. A batch of copies excludes nearly every
        # cell: then the tiles are listed one by one, so that their indices fit in memory.
        excluded_of = None
        if self._excluded_per_row[start:stop].sum() <= MOST_CELLS_AT_ONCE:
            row_N, column_N = self._excluded(start, stop, None)
            excluded_of = [(row_N[some], column_N[some]) for some in _split_by_tile(column_N, width, self.num_columns)]
        for index, (pairs, own) in enumerate(zip(pairs_of, own_negatives_of, strict=True)):
            left = index * width
            right = min(left + width, self.num_columns)
            row_N, column_N = self._excluded(start, stop, (left, right)) if excluded_of is None else excluded_of[index]
            yield Tile(
                rows=rows,
                columns=slice(left, right),
                pairs=self._tensor(pairs + inside.start),
                pair_cells=self._tensor(pair_rows[pairs] * (right - left) + pair_columns[pairs] - left),
                excluded=self._tensor(row_N * (right - left) + column_N - left),
                own_negative_cells=self._tensor(own_rows[own] * (right - left) + own_columns[own] - left),
            )

    def _excluded(self, start: int, stop: int, columns: tuple[int, int] | None) -> tuple[Integers, Integers]:
        """List the excluded cells of some rows, of all columns or some: row from `start`, and column, of each.

        Rows of one query group share their excluded columns. A pair of groups therefore excludes the product of its
        rows with its documents, and the cells of all products are numbered in one go, without a loop.
        """
        groups = self._row_groups[start:stop]
        row_order = np.argsort(groups, kind="stable")
        present, row_starts, heights = np.unique(groups[row_order], return_index=True, return_counts=True)
        # The related document groups of each present query group, one after the other, and which one owns them.
        counts = self._related_starts[present + 1] - self._related_starts[present]
        related = self._related_documents[ranges(self._related_starts[present], counts)]
        owner = np.repeat(np.arange(len(present)), counts)
        if columns is None:
            lows, highs = self._column_starts[related], self._column_starts[related + 1]
        else:  # within a group documents ascend, so those of a range of columns are neighbours
            lows, highs = (np.searchsorted(self._column_keys, related * self.num_columns + edge) for edge in columns)
        widths = highs - lows
        sizes = widths * heights[owner]
        product = np.repeat(np.arange(len(related)), sizes)  # the product that each cell is of
        nth_row, nth_column = np.divmod(ranges(np.zeros_like(sizes), sizes), widths[product])
        return row_order[row_starts[owner[product]] + nth_row], self._column_order[lows[product] + nth_column]

    def _tensor(self, values: Integers) -> Tensor:
        return to_device(torch.from_numpy(values), self._device)


def _split_by_tile(columns: Integers, width: int, num_columns: int) -> list[Integers]:
    """Return the numbers of the entries in each tile of a row block."""
    tiles = columns // width
    order = np.argsort(tiles, kind="stable")
    return np.split(order, np.searchsorted(tiles[order], np.arange(1, -(-num_columns // width))))


def _numpy(values: Tensor) -> Integers:
    array: Integers = values.cpu().numpy()
    return array
