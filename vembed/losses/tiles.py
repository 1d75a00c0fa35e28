"""Tiles of the similarity matrix: logits forth and gradients back, so that the Q x D matrix never exists.

A tile costs one product forth and two back. Its logits are computed again on the way back instead of being kept:

    S = s q d^T (this tile)        dq += s G d        dd += s G^T q        with G = dL/dS

Matryoshka prefixes, each normalised as a search over cut embeddings would do it, come from the same products: the
blocks between two prefixes accumulate, and each prefix divides by its norms,

    S_m = s dot_m / (|q_:m| |d_:m|)        A_m = s G_m / (|q_:m| |d_:m|)
    d(block b of q) = sum over m >= b of A_m d_b  -  q_b sum over m >= b of rowsum(G_m S_m) / |q_:m|^2

and d likewise, so that any number of prefixes costs the products of the longest one.

Memory: O(tile + (Q + D) E), the last being the gradients. Products are accumulated in at least float32.
Shape legend: Q queries of this rank, D documents of all ranks, E embedding dim, K prefixes, R x C cells of a tile.
Source: Kusupati et al., 2022, "Matryoshka Representation Learning".
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.linalg import vector_norm
from torch.nn.functional import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from vembed.losses.cells import CellMap, Tile
    from vembed.losses.filters import TileFilter
    from vembed.losses.keys import PrefixKeys

DEFAULT_TILE_SIZE = 1024
"""Rows and columns of a tile: 4 MB of float32, so that a few of them stay in the caches of one core."""

NORM_EPSILON = 1e-12
"""A shorter vector is divided by this instead of its norm: zero stays zero."""


# Prefixes, over the whole matrix --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Lengths at which an embedding is cut and trained; their losses are averaged with weights."""

    dims: tuple[int, ...]  # ascending
    weights: tuple[float, ...]  # one for each length; they sum to 1, so that gradient norms stay those of one loss

    @classmethod
    def of_keys(cls, keys: PrefixKeys) -> Prefixes | None:
        """Return the prefixes of a loss's keys; None where they ask for the embeddings as they are."""
        return None if keys.mrl_dims is None else cls.of(keys.mrl_dims, keys.mrl_weights)

    @classmethod
    def of(cls, dims: Sequence[int], weights: Sequence[float] | None = None) -> Prefixes:
        """Sort lengths and normalise their weights, in the same order; None weighs all alike.

        Raises:
            ValueError: They can't be trained: none, the same twice, not positive, or not as many weights.
        """
        raw = [1.0] * len(dims) if weights is None else list(weights)
        if not dims or min(dims) < 1 or len(set(dims)) < len(dims):
            raise ValueError(f"prefixes are different positive lengths, got {list(dims)}")
        if len(raw) != len(dims) or min(raw) <= 0:
            raise ValueError(f"{len(dims)} prefixes need as many positive weights, got {raw}")
        total = sum(raw)
        pairs = sorted(zip(dims, raw, strict=True))
        return cls(tuple(dim for dim, _ in pairs), tuple(weight / total for _, weight in pairs))


def weighted_similarities(q_QE: Tensor, d_DE: Tensor, prefixes: Prefixes | None) -> Iterator[tuple[float, Tensor]]:
    """Yield the weight and the whole similarity matrix (Q, D) of each prefix; None is the embeddings as they are."""
    if prefixes is None:
        yield 1.0, q_QE @ d_DE.T
        return
    for dim, weight in zip(prefixes.dims, prefixes.weights, strict=True):
        q, d = (normalize(side[:, :dim], dim=-1, eps=NORM_EPSILON) for side in (q_QE, d_DE))
        yield weight, q @ d.T


def pair_similarity(q_PE: Tensor, d_PE: Tensor, dim: int | None) -> Tensor:
    """Return the similarity of each query with the document of the same row (P,); None takes embeddings as they are."""
    if dim is not None:
        q_PE, d_PE = (normalize(side[:, :dim], dim=-1, eps=NORM_EPSILON) for side in (q_PE, d_PE))
    return (q_PE * d_PE).sum(dim=1)


# Tiles ----------------------------------------------------------------------------------------------------------------


class EmbeddingGradients(NamedTuple):
    """Gradients of the embeddings, to which each tile adds its part."""

    dq_QE: Tensor  # dL/dq (Q, E)
    dd_DE: Tensor  # dL/dd (D, E), this rank's share of it
    row_moments_KQ: Tensor  # rowsum(G S) of each prefix, for the part of a gradient along the prefix
    column_moments_KD: Tensor  # the same over columns


class SimilarityTiles:
    """Logits of tiles, and the way back from their gradients to the embeddings.

    Args:
        q_QE: Queries of this rank (Q, E).
        d_DE: Documents of all ranks (D, E).
        scale: Factor on the similarities.
        longest: Largest |q| times largest |d|; 1 for prefixes, which have unit length.

    Attributes:
        num_prefixes: K; 1 without prefixes.
        row_vectors: Most vectors of a query, which are rows of the products.
        largest_logit: Bound of |logit| by the Cauchy-Schwarz inequality.
        dtype: Type of logits and gradients, at least float32.
        rows_only: Whether the columns get no gradients, since each of them is a row as well, here or on another rank.
        filter: Masks further cells by their similarity (filters.py).
    """

    def __init__(
        self,
        q_QE: Tensor,
        d_DE: Tensor,
        cell_map: CellMap,
        *,
        scale: float,
        longest: float = math.inf,
        prefixes: Prefixes | None,
        tile_size: int,
    ) -> None:
        self.cell_map, self.scale, self.largest_logit = cell_map, scale, scale * longest
        self.dtype, self.device = torch.promote_types(q_QE.dtype, torch.float32), q_QE.device
        self.tile_size, self.row_vectors = tile_size, 1
        self.num_prefixes = 1 if prefixes is None else len(prefixes.dims)
        self.filter: TileFilter | None = None
        self.rows_only = False
        self._q, self._d, self._prefixes = q_QE, d_DE, prefixes
        self._scratch: dict[str, Tensor] = {}
        self._inverse_norms: list[tuple[Tensor, Tensor]] = []  # 1 / |q_:m| (Q,) and 1 / |d_:m| (D,) of each prefix
        for dim in prefixes.dims if prefixes is not None else ():
            norms = (vector_norm(side[:, :dim], dim=1, dtype=self.dtype) for side in (q_QE, d_DE))
            q_Q, d_D = (norms_N.clamp_min(NORM_EPSILON).reciprocal() for norms_N in norms)
            self._inverse_norms.append((q_Q, d_D))

    @property
    def has_prefixes(self) -> bool:
        """True where the embeddings are cut and normalised."""
        return self._prefixes is not None

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the logits' type on their device."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def scratch(self, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialised memory for a tile, the same for the same name: an allocation each would cost more."""
        # The last tiles of a strip are narrower: they take a part of the memory of the others.
        size = shape[0] * shape[1]
        if name not in self._scratch or self._scratch[name].numel() < size:
            self._scratch[name] = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        return self._scratch[name][:size].view(shape)

    def row_blocks(self, height: int | None = None) -> Iterator[slice]:
        """Cut this rank's rows into blocks; None makes tiles square."""
        # Rows of several vectors make taller products: fewer of them fit the height of a tile.
        step = height or max(1, self.tile_size // self.row_vectors)
        for start in range(0, self.cell_map.num_rows, step):
            yield slice(start, min(start + step, self.cell_map.num_rows))

    def of_rows(self, rows: slice) -> Iterator[Tile]:
        """Return the tiles of a row block, left to right."""
        return self.cell_map.strip(rows.start, rows.stop, self.tile_size)

    def exclude(self, prefix: int, tile: Tile, logits_RC: Tensor) -> None:
        """Put -inf into the logits of a tile that are no negatives, positives included."""
        if self.filter is not None:
            self.filter.leave_out(prefix, tile, self, logits_RC)
        logits_RC.view(-1)[tile.excluded] = -math.inf

    def logits(self, tile: Tile, name: str = "logits") -> Iterator[Tensor]:
        """Yield the logits of a tile (R, C), one prefix after the other, in the same memory."""
        if self._prefixes is None:
            yield self.plain_logits(tile, name)
            return
        for prefix in range(self.num_prefixes):
            dot_RC = self._dot(tile, prefix)
            yield self._scaled(dot_RC, tile, prefix, self.scratch(name, tile.shape))

    def plain_logits(self, tile: Tile, name: str = "logits") -> Tensor:
        """Return the logits of a tile (R, C) without prefixes, in memory of that name."""
        q_RE, d_CE = self._of(tile)
        logits_RC = self.scratch(name, tile.shape)
        # The scale is a factor of the product, which spares a pass over the tile.
        return torch.addmm(logits_RC, q_RE, d_CE.T, beta=0, alpha=self.scale, out=logits_RC)

    def backward_plain(
        self,
        tile: Tile,
        gradient_RC: Tensor,
        out: EmbeddingGradients,
        name: str = "logits",  # noqa: ARG002
    ) -> None:
        """Add dL/dlogits of a tile to the gradients of the embeddings, without prefixes.

        Args:
            name: The memory that `plain_logits` put its logits into; MaxSim keeps the winners beside it.
        """
        q_RE, d_CE = self._of(tile)
        _add_product(out.dq_QE[tile.rows], gradient_RC, d_CE, self.scale)
        if not self.rows_only:
            _add_product(out.dd_DE[tile.columns], gradient_RC.T, q_RE, self.scale)

    def backward(self, tile: Tile, differentiate: Callable[[int, Tensor], None], out: EmbeddingGradients) -> None:
        """Compute the logits of a tile, have them turned into their gradients, and add those to the embeddings'.

        Args:
            differentiate: Turns the logits (R, C) of a prefix into dL/dlogits, in place.
        """
        if self._prefixes is None:
            matrix_RC = self.plain_logits(tile)
            differentiate(0, matrix_RC)
            self.backward_plain(tile, matrix_RC, out)
            return
        for prefix in range(self.num_prefixes):
            dot_RC = self._dot(tile, prefix)
            matrix_RC = self._scaled(dot_RC, tile, prefix, self.scratch(f"gradient {prefix}", tile.shape))
            differentiate(prefix, matrix_RC)
            self._scaled(matrix_RC, tile, prefix, matrix_RC)  # G_m becomes A_m
            # A_m dot_m = G_m S_m, as the norms of both cancel: its sums are the moments for `finish`.
            moments_RC = torch.mul(matrix_RC, dot_RC, out=self.scratch("logits", tile.shape))
            out.row_moments_KQ[prefix, tile.rows] += moments_RC.sum(1)
            out.column_moments_KD[prefix, tile.columns] += moments_RC.sum(0)
        q_RE, d_CE = self._of(tile)
        for prefix in reversed(range(self.num_prefixes)):
            # The block between two prefixes is in all longer ones: its factor is the sum of their A.
            block, matrix_RC = self._block(prefix), self.scratch(f"gradient {prefix}", tile.shape)
            if prefix + 1 < self.num_prefixes:
                matrix_RC += self.scratch(f"gradient {prefix + 1}", tile.shape)
            _add_product(out.dq_QE[tile.rows, block], matrix_RC, d_CE[:, block])
            if not self.rows_only:
                _add_product(out.dd_DE[tile.columns, block], matrix_RC.T, q_RE[:, block])

    def cell_logits(self, prefix: int, cells: tuple[Tensor, Tensor]) -> Tensor:
        """Return the logits of single cells of a prefix (N,), where few cells matter and a tile would be a waste.

        Args:
            cells: Row and column of each cell (N,).
        """
        logits = [torch.linalg.vecdot(q_NE, d_NE) for _, _, q_NE, d_NE in self._cell_blocks(prefix, cells)]
        logits_N = torch.cat(logits).mul_(self.scale)
        if self._prefixes is not None:
            inverse_q, inverse_d = self._inverse_norms[prefix]
            logits_N *= inverse_q[cells[0]] * inverse_d[cells[1]]
        return logits_N

    def backward_cells(
        self, prefix: int, cells: tuple[Tensor, Tensor], gradients_N: Tensor, out: EmbeddingGradients
    ) -> None:
        """Add dL/dlogits of single cells of a prefix to the gradients, in a fixed order: N rows of E on each side.

        Args:
            cells: Row and column of each cell (N,).
        """
        done = 0  # cells of the blocks before
        for rows, columns, q_NE, d_NE in self._cell_blocks(prefix, cells):
            slopes_N = self.scale * gradients_N[done : done + len(rows)]
            done += len(rows)
            if self._prefixes is not None:
                inverse_q, inverse_d = self._inverse_norms[prefix]
                slopes_N *= inverse_q[rows] * inverse_d[columns]
                moments_N = slopes_N * torch.linalg.vecdot(q_NE, d_NE)
                out.row_moments_KQ[prefix].index_put_((rows,), moments_N, accumulate=True)
                out.column_moments_KD[prefix].index_put_((columns,), moments_N, accumulate=True)
            # On CUDA accumulating `index_put_` sorts the rows first: unlike `index_add_` it adds in the same order.
            # A CPU does so within `sums_in_one_order` of the loss stage.
            dim = q_NE.shape[1]
            out.dq_QE[:, :dim].index_put_((rows,), d_NE.mul_(slopes_N[:, None]), accumulate=True)
            out.dd_DE[:, :dim].index_put_((columns,), q_NE.mul_(slopes_N[:, None]), accumulate=True)

    def _cell_blocks(
        self, prefix: int, cells: tuple[Tensor, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield rows, columns and copies of both sides of some cells at a time: the copies stay as large as a tile."""
        dim = None if self._prefixes is None else self._prefixes.dims[prefix]
        q_QE, d_DE = self._q[:, :dim], self._d[:, :dim]
        at_once = max(1, self.tile_size**2 // q_QE.shape[1])
        for rows, columns in zip(*(values.split(at_once) for values in cells), strict=True):
            # Indexing copies, so that the caller may write into both even where the type stays.
            yield rows, columns, q_QE[rows].to(self.dtype), d_DE[columns].to(self.dtype)

    def finish(self, out: EmbeddingGradients) -> Tensor:
        """Take the part along each prefix out of the gradients, after the last tile, and return dL/d(log scale)."""
        if self._prefixes is None:  # every logit is s <q, d>, so that the sum of G S is that of <q, dq>
            parts = zip(self._q.split(self.tile_size), out.dq_QE.split(self.tile_size), strict=True)
            return torch.stack([(q.to(self.dtype) * dq).sum() for q, dq in parts]).sum()
        sides = ((self._q, out.dq_QE, out.row_moments_KQ), (self._d, out.dd_DE, out.column_moments_KD))
        for side, (z_NE, gradient_NE, moments_KN) in enumerate(sides[: 1 if self.rows_only else 2]):
            along_N = self.zeros(len(z_NE))
            # From the longest prefix down: dims of a block lie in this prefix and in all longer ones.
            for prefix in reversed(range(self.num_prefixes)):
                inverse_N = self._inverse_norms[prefix][side]
                # Where epsilon stands in for the norm, the norm isn't differentiated.
                longer = inverse_N < self.zeros(1).fill_(NORM_EPSILON).reciprocal()
                along_N += torch.where(longer, moments_KN[prefix] * inverse_N**2, 0.0)
                block = self._block(prefix)
                gradient_NE[:, block].addcmul_(z_NE[:, block].to(self.dtype), along_N[:, None], value=-1)
        return out.row_moments_KQ.sum()

    def _of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the embeddings of a tile's rows and columns, in the type of the logits."""
        return self._q[tile.rows].to(self.dtype), self._d[tile.columns].to(self.dtype)

    def _block(self, prefix: int) -> slice:
        """Return the dims that a prefix has and the one before has not."""
        assert self._prefixes is not None
        dims = self._prefixes.dims
        return slice(dims[prefix - 1] if prefix else 0, dims[prefix])

    def _dot(self, tile: Tile, prefix: int) -> Tensor:
        """Add the block of a prefix to the dot products of the prefixes before it."""
        q_RE, d_CE = self._of(tile)
        block, dot_RC = self._block(prefix), self.scratch("dot", tile.shape)
        # beta 0 ignores what the scratch memory held, NaN as well.
        return torch.addmm(dot_RC, q_RE[:, block], d_CE[:, block].T, beta=min(prefix, 1), out=dot_RC)

    def _scaled(self, matrix_RC: Tensor, tile: Tile, prefix: int, out_RC: Tensor) -> Tensor:
        """Multiply by the scale over both norms."""
        inverse_q, inverse_d = self._inverse_norms[prefix]
        torch.mul(matrix_RC, self.scale * inverse_q[tile.rows, None], out=out_RC)
        return out_RC.mul_(inverse_d[tile.columns])


def _add_product(target: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Add a matrix product to a target in place; torch's FLOP counter, which tests use, doesn't see `addmm_`."""
    torch.addmm(target, left, right, alpha=factor, out=target)


def longest_row(z_NE: Tensor) -> Tensor:
    """Return the largest norm of the rows, a scalar on their device; 0 where there are none."""
    dtype = torch.promote_types(z_NE.dtype, torch.float32)
    if not len(z_NE):  # a rank without queries
        return z_NE.new_zeros((), dtype=dtype)
    norms_N: Tensor = vector_norm(z_NE, dim=1, dtype=dtype)
    return norms_N.max()


def read_numbers(*scalars: Tensor) -> list[float]:
    """Return scalars as numbers in one copy, for which the program waits until the device has caught up."""
    dtype = functools.reduce(torch.promote_types, [scalar.dtype for scalar in scalars])
    numbers: list[float] = torch.stack([scalar.detach().to(dtype) for scalar in scalars]).tolist()
    return numbers
