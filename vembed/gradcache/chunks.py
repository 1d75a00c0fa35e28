"""From the rows of a batch to encoder calls: rows to ranks, rows to chunks, chunks to calls.

`RowAssignment`: the loss runs over the global batch, so that which rank encodes which row can't change it; queries and
their documents need not stay together.

`plan_chunks`: a chunk is what one encoder call sees: a rectangle of `rows x width`, where width is the longest of its
rows. Rows that stand beside rows of their own length cost next to no padding. The order in which rows are encoded can't
change a loss over the whole batch, so pairs need not stay together; the caller scatters the embeddings back by row.

On a CPU a chunk is as wide as its longest row, and where lengths fall fast, in the long tail of a distribution, it ends
before it is full. An accelerator pays for each shape that it hasn't seen: memory in other pieces, kernels chosen or
compiled anew. There chunks come in few shapes: widths from a grid, and for each width one number of rows, by which the
tokens of a batch are shared out; the rows that are left at the end make up half and quarter chunks, the last one filled
up with rows that are there already.

Rows of encoders that take them end to end have no padding: a chunk is as many tokens as the budget allows.

Longest first: memory peaks in the first chunk, so that a batch that doesn't fit fails at once.

`plan_calls`: a call is a chunk of one pool, with the positions of its vectors and whether its graph is kept. A spare
row is one that no loss sees: its embedding is thrown away and its gradient is zero. It is there where a rank must call
an encoder that it has no rows for, or as often as the others do (`equal_calls`).

Shape legend: N rows of the batch of all ranks, V embedding vectors of this rank (one for each row, or several with
token-level encoders), E dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import ranges
from vembed.device import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Features
    from vembed.distributed.ranks import Ranks
    from vembed.gradcache.passes import RngState

TOLERATED_WASTE = 0.06
"""A chunk that is at least half full ends where more rows would bring its padding above this share."""

WIDTHS_PER_DOUBLING = 8
"""Widths between a length and its double: at most an eighth of padding, half of that on average."""

SHORT_WIDTHS = 4
"""Widths for rows below a 16th of the longest: many rows in texts, but few of the tokens."""

WANTED_CHUNKS, LEAST_TOKENS = 80, 16_384
"""A batch that makes fewer chunks is cut finer, as rows of too many lengths would share one: its budget is halved once
or twice, but not below LEAST_TOKENS, where the host is slower than a fast device. For a chunk of 4,000 tokens of
BERT-base (encode, encode again, backward) an H200 works 14 ms and the host takes 53; quarters of 16,384 tokens pad 8%
less."""

LEAST_STEP, STEPS_PER_DOUBLING = 256, 8
"""Tokens of a packed chunk on an accelerator are rounded up to a step: an eighth of the power of two below, at least
LEAST_STEP."""


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """The rows of each rank."""

    # for each rank its rows of [queries; documents], ascending, int64; together each row exactly once
    slots: tuple[NDArray[np.int64], ...]

    @classmethod
    def alone(cls, num_rows: int) -> RowAssignment:
        """Give every row to the only rank."""
        return cls((np.arange(num_rows, dtype=np.int64),))

    @property
    def counts(self) -> list[int]:
        """Rows of each rank."""
        return [len(rows) for rows in self.slots]

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return sum(self.counts)

    @property
    def rank_order(self) -> NDArray[np.int64]:
        """The rows as a gather puts them: those of rank 0 first."""
        return np.concatenate(self.slots)

    def positions(self, rank: int, counts_N: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the position of each row's first vector among the vectors of a rank, (N,); -1 for the rows of others.

        Args:
            counts_N: Vectors of each row; None where every row has one.
        """
        rows = self.slots[rank]
        positions_N = np.full(self.num_rows, -1, dtype=np.int64)
        positions_N[rows] = np.arange(len(rows)) if counts_N is None else np.cumsum(counts_N[rows]) - counts_N[rows]
        return positions_N

    def block_positions(self) -> NDArray[np.int64]:
        """Return the position of each row of the batch, (N,), where each rank has a block as large as the largest."""
        positions_N = np.empty(self.num_rows, dtype=np.int64)
        for rank, rows in enumerate(self.slots):
            positions_N[rows] = rank * max(self.counts) + np.arange(len(rows))
        return positions_N

    def of_vectors(self, counts_N: NDArray[np.int64]) -> RowAssignment:
        """Return the assignment of the vectors, where row i has `counts_N[i]` of them and row i + 1 follows row i."""
        starts_N = np.cumsum(counts_N) - counts_N
        return RowAssignment(tuple(ranges(starts_N[rows], counts_N[rows]) for rows in self.slots))


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
    # Stable, so that the chunks of a batch depend on nothing but its lengths: the replay of a run cuts them alike.
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
        # A row that is longer than the budget is a chunk of its own.
        fitting = int(np.searchsorted(ends, ends[start] + budget.tokens, side="right")) - 1 - start
        count = max(1, min(fitting, budget.rows))
        tokens = int(ends[start + count] - ends[start])
        if budget.bucketed:
            # The only shape that kernels see is the number of tokens: round it up to one of 8 for each doubling.
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
            # Where lengths fall fast the next chunk is cheaper: stop at the last row up to which padding is tolerated.
            # Half of the budget is taken in any case, as a chunk far below it would leave the device idle.
            fitting = lengths[start : start + most]
            padded = width * np.arange(1, len(fitting) + 1)
            tolerated = np.flatnonzero(padded <= (1 + TOLERATED_WASTE) * np.cumsum(fitting))
            count = max(-(-most // 2), int(tolerated[-1]) + 1)
        chunks.append(Chunk(rows=order[start : start + count], width=width))
        start += count
    return chunks


def _in_buckets(order: NDArray[np.int64], lengths: NDArray[np.int64], budget: ChunkBudget) -> list[Chunk]:
    """Cut rows into chunks of few shapes.

    Args:
        lengths: Tokens of each row of `order`, descending.
    """
    widths = _bucket_widths(lengths)
    if len(order) <= budget.most_rows(int(widths[0])):
        return [Chunk(order, int(widths[0]))]
    if widths[0] != widths[-1]:  # rows of one length have nothing to gain from smaller chunks
        # Where chunks are few, each one spans many lengths: smaller ones pad less.
        tokens = budget.tokens
        for _ in range(2):
            if tokens >= 2 * LEAST_TOKENS and WANTED_CHUNKS * tokens > widths.sum():
                tokens //= 2
        budget = replace(budget, tokens=tokens)
    chunks = []
    start = 0
    while start < len(order):
        width = int(widths[start])
        most = budget.most_rows(width)
        sizes = [most, max(1, most // 2), max(1, most // 4)]
        count = next((size for size in sizes if size <= len(order) - start), sizes[-1])
        rows = order[start : start + count]
        # Only the last chunk of a batch can have too few rows: spare ones repeat its last row, so the shape is known.
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
    # Steps grow with the length, so that the share of padding is bounded and the number of shapes grows by the log of
    # the longest only: 8 widths for each doubling down to a 16th of it, and 4 for all that is shorter.
    longest = 1 << (int(lengths.max()) - 1).bit_length()  # rounded up to a power of 2
    short = longest // 16
    doubling = 2 ** np.floor(np.log2(lengths)).astype(np.int64)
    steps = np.where(lengths > short, doubling // WIDTHS_PER_DOUBLING, short // SHORT_WIDTHS)
    rounded: NDArray[np.int64] = -(-lengths // np.maximum(steps, 1)) * np.maximum(steps, 1)
    return rounded


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of a batch that go through one encoder."""

    encode: Callable[[dict[str, Tensor]], Tensor]  # inputs of a chunk -> (rows, E), or (vectors, E) with num_vectors
    collate: Callable[[Features, NDArray[np.int64], int], dict[str, Tensor]]  # features, row numbers, width -> inputs
    features: Features  # ragged, on the CPU
    slots: NDArray[np.int64]  # place of each row's embedding in [queries; documents]; -1 for a spare row
    num_vectors: NDArray[np.int64] | None = None  # vectors of each row, which come out row after row; None: one each
    packs: bool = False  # whether `collate` lays the rows of a chunk end to end


@dataclass(slots=True)
class Call:
    """One chunk on its way through the step."""

    pool: Pool
    chunk: Chunk
    positions: Tensor  # of its vectors among this rank's, int64, on the device; spare rows are left out
    vectors: Tensor | None = None  # numbers of these among its vectors, int64, on the device; None: all of them
    retained: bool = False  # whether its graph is kept from pass 1
    frozen: bool = False  # whether its encoder needs no gradient; known after pass 1
    rng: RngState | None = None  # random state at its first time
    graph: Tensor | None = None  # its embeddings with their graph, while it is retained

    @property
    def is_spare(self) -> bool:
        """True where no loss sees any of its rows."""
        return len(self.positions) == 0

    def inputs(self) -> dict[str, Tensor]:
        """Return the inputs of its encoder, on the CPU."""
        return self.pool.collate(self.pool.features, self.chunk.rows, self.chunk.width)

    def kept(self, z: Tensor) -> Tensor:
        """Return the embeddings that the loss sees."""
        return z if self.vectors is None else z[self.vectors]

    def gradient(self, u_VE: Tensor, z: Tensor) -> Tensor:
        """Return the gradient of each embedding: zero for spare rows."""
        if self.vectors is None:
            return u_VE[self.positions]
        return torch.zeros_like(z).index_copy_(0, self.vectors, u_VE[self.positions])


def vector_counts(
    pools: Sequence[Pool], assignment: RowAssignment, ranks: Ranks, device: torch.device
) -> NDArray[np.int64] | None:
    """Return the vectors of each row of the batch, (N,); None where every row has one.

    One collective where there are several ranks and rows have several vectors: a rank knows the counts of its own rows.
    """
    if all(pool.num_vectors is None for pool in pools):
        return None
    counts_N = np.ones(assignment.num_rows, dtype=np.int64)
    for pool in pools:
        if pool.num_vectors is not None:
            is_real = pool.slots >= 0
            counts_N[pool.slots[is_real]] = pool.num_vectors[is_real]
    if not ranks.is_one:
        local = torch.from_numpy(counts_N[assignment.slots[ranks.rank]]).to(device)
        counts_N[assignment.rank_order] = ranks.gather_rows(local, assignment.counts).cpu().numpy()
    return counts_N


def plan_calls(
    pools: Sequence[Pool],
    positions_N: NDArray[np.int64],
    budget: ChunkBudget,
    device: torch.device,
    *,
    retain: float,
    retain_tokens: int | None = None,
) -> list[Call]:
    """Cut pools into calls and say which are retained; the smaller of the two limits wins.

    A tower that turns out to be frozen has no graphs to keep, but its calls count: less memory is taken than was meant.

    Args:
        positions_N: First vector of each row of the batch among this rank's.
        retain: Share of the padded tokens whose graphs are kept, 0 to 1.
        retain_tokens: Most padded tokens whose graphs are kept, whatever the batch; None for no such limit.
    """
    calls: list[Call] = []
    for pool in pools:
        for chunk in plan_chunks(pool.features.lengths, budget, packed=pool.packs):
            slots = pool.slots[chunk.rows]  # a copy: rows that fill the chunk up are marked as spare ones in it
            slots[len(slots) - chunk.num_spare :] = -1
            is_real = slots >= 0
            positions = positions_N[slots[is_real]]
            if pool.num_vectors is not None:  # from rows to their vectors
                counts = pool.num_vectors[chunk.rows]
                positions = ranges(positions, counts[is_real])
                is_real = np.repeat(is_real, counts)
            vectors = None if is_real.all() else to_device(torch.from_numpy(np.flatnonzero(is_real)), device)
            calls.append(Call(pool, chunk, to_device(torch.from_numpy(positions), device), vectors))
    # What fits one chunk as a whole needs no replay, though two towers see it in two calls.
    if fit_one_chunk(calls, budget):
        retain, retain_tokens = 1.0, None
    # The last calls are retained, so that fewer calls without a graph run beside graphs that wait for pass 2.
    kept, num_tokens = 0, sum(call.chunk.padded_tokens for call in calls)
    for call in reversed(calls):
        # A call keeps its graph where that brings the share nearer to what was asked for, and fits.
        tokens = call.chunk.padded_tokens
        nearer = kept + tokens / 2 <= retain * num_tokens
        call.retained = nearer and (retain_tokens is None or kept + tokens <= retain_tokens)
        if not call.retained:
            break  # no gaps: a graph before this call would wait beside it
        kept += tokens
    return calls


def fit_one_chunk(calls: Sequence[Call], budget: ChunkBudget) -> bool:
    """Return whether all rows of a rank together fit the limits of one chunk."""
    num_rows = sum(len(call.chunk.rows) for call in calls)
    num_tokens = sum(call.chunk.padded_tokens for call in calls)
    return num_rows <= budget.rows and num_tokens <= budget.tokens


def equal_calls(calls: Sequence[Call], pools: Sequence[Pool], ranks: Ranks, device: torch.device) -> list[Call]:
    """Return as many calls of each pool as the rank that makes the most, of which the fewest of any are retained.

    Each missing one is a spare call of one row, the shortest. They come first, so that what is retained last is the
    rank's own. One collective, whatever the number of pools.

    Args:
        calls: Those of this rank, pool by pool, at least one of each.
        pools: The pools, in the same order on every rank.
    """
    calls_of_pools = [[call for call in calls if call.pool is pool] for pool in pools]
    # The maximum of minus the retained calls is their minimum: both travel in one collective.
    numbers = [[len(of_pool), -sum(call.retained for call in of_pool)] for of_pool in calls_of_pools]
    agreed = ranks.max_(torch.tensor(numbers, device=device)).tolist()
    together: list[Call] = []
    for pool, of_pool, (number, minus_retained) in zip(pools, calls_of_pools, agreed, strict=True):
        nowhere = torch.empty(0, dtype=torch.int64, device=device)  # its one vector goes nowhere, its gradient is zero
        shortest = int(pool.features.lengths.argmin())
        # In a rectangle the row has the width of its chunk, the narrowest one: the model sees no other shape.
        width = int(pool.features.lengths[shortest]) if pool.packs else min(call.chunk.width for call in of_pool)
        spare_chunk = Chunk(rows=np.array([shortest]), width=width, packed=pool.packs)
        spare = [Call(pool, spare_chunk, nowhere, nowhere) for _ in range(number - len(of_pool))]
        together += [*spare, *of_pool]
        # Pass 2 takes retained calls first, and each call is a collective: ranks must retain alike, from the end.
        for number_from_last, call in enumerate(reversed([*spare, *of_pool])):
            call.retained = number_from_last < -minus_retained
    return together
