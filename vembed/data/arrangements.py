"""Ways to put the rows of an epoch into batches: at random, without repeats, by class, and as hard batches.

Each takes the generator of (seed, epoch) and the sizes that batches would have at random, and returns what each batch
holds. Nothing else goes in, so that the batches of a step are the same on every rank and after every resume. The order
of draws from the generator is part of that: another one changes the batches of every run.

Without repeats (`WithoutRepeats`): rows are exchanged, all at once instead of row by row.

1. Rows stand in random order. A row repeats when an earlier one of its batch holds the same content.
2. For every row that repeats a few random positions are looked at, and it changes places with a row that fits where it
   stood, as it fits there; or else with one where only it fits, which is then the one that repeats.
3. What still repeats after some rounds is left out of the epoch: no arrangement may exist, and a later epoch draws
   anew. A content that more rows hold than there are batches loses those at once.

Hard batches (`HardBatches`): rows whose vectors lie close together are hard negatives of each other.

1. Each epoch the rows are halved again and again, down to batches: two random rows, the second far from the first, span
   a direction, and rows are split by where they lie along it. Other directions make other batches in the next epoch.
2. In a batch, a row that is nearer to an earlier one than a cap is its duplicate rather than its negative: such rows
   change places among each other, and what still is too near after some rounds is left out of the epoch.

Vectors are whole numbers so small that every product of two is exact in float32, in whatever order a machine adds: all
ranks and all machines cut alike.

Shape legend: N records, n rows of an epoch, E dimension of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vembed.batch import ranges
from vembed.errors import DataError
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from vembed.data.table import RecordTable

EXCHANGE_ROUNDS = 20
"""Rounds of exchanging rows that repeat, without a gain of 1%, until the rest is left out."""

TRIES, LEAST_TRIES = 20_000, 4
"""Positions that a round looks at for all rows that repeat, and at least for one."""

LEAST_ROWS = 2
"""Rows that a batch keeps, even where they repeat: alone a row has no in-batch negatives."""

VECTOR_LENGTH = 1024
"""Length of a vector as whole numbers: sums of products of two differences of such stay below 2^24, where float32 is
exact."""

FAR_CANDIDATES = 64
"""Rows among which the one farthest from the first is looked for."""

MOVE_ROUNDS = 4
"""Rounds in which rows that are too near to another change places."""

TINY = float(np.finfo(np.float32).tiny)

BLOCK_ROWS = 65_536
"""Rows that are multiplied at a time: 256 MiB as float32 at dimension 1,024."""


class EpochBatches(NamedTuple):
    """Rows of an epoch, batch after batch."""

    rows: NDArray[np.int64]  # batch after batch
    starts: NDArray[np.int64]  # batch i is rows[starts[i]:starts[i + 1]]; one more entry than there are batches


class Arrangement(Protocol):
    """A way to put the rows of an epoch into batches."""

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return the batches of an epoch.

        Args:
            rows: Rows that the epoch takes; a row may come more than once.
            generator: Of the seed and the epoch.
            starts: First position of each batch at random, and the end of the last one.
        """

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Return the effect in words, one plain sentence each.

        Args:
            first: Batches of the first epoch.
            num_rows: Rows that its batches hold at random, without those of a last batch that is left out.
        """


class AtRandom:
    """Rows in random order."""

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return one permutation, cut."""
        return EpochBatches(rows[generator.permutation(len(rows))], starts)

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:  # noqa: ARG002
        """Return none: the plan says how rows divide into batches."""
        return ()


class Contents(NamedTuple):
    """Contents of n rows, none twice in a row: row i has numbers[starts[i]:starts[i + 1]]."""

    numbers: NDArray[np.int64]  # of contents, counted from 0
    starts: NDArray[np.int64]  # (n + 1,)

    @classmethod
    def of_pairs(cls, rows: NDArray[np.int64], contents: NDArray[np.int64], num_rows: int) -> Contents:
        """Collect (row, content) pairs in any order; those that come twice count once."""
        # Contents are hashes of 64 bits; numbered from 0, a pair is one int64, and one sort orders and thins all pairs.
        _, numbers = np.unique(contents, return_inverse=True)
        num_contents = int(numbers.max(initial=0)) + 1
        owners, numbers = np.divmod(np.unique(rows * num_contents + numbers), num_contents)
        return cls(numbers, np.searchsorted(owners, np.arange(num_rows + 1)))

    @classmethod
    def of_records(cls, records: RecordTable) -> Contents:
        """Collect the queries and positives of records, by content."""
        queries, positives = records.numbers("query"), records.numbers("positives")
        rows, items = (np.concatenate(parts) for parts in zip(queries, positives, strict=True))
        return cls.of_pairs(rows, records.items.ids[items], len(records))

    def take(self, rows: NDArray[np.int64]) -> Contents:
        """Return some rows, in that order, with nothing but contents that several rows hold."""
        counts = np.diff(self.starts)[rows]
        numbers = self.numbers[ranges(self.starts[rows], counts)]
        shared = np.bincount(numbers, minlength=1)[numbers] > 1
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(shared)])
        return Contents(numbers[shared], before[np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])])


@dataclass(frozen=True, slots=True)
class WithoutRepeats:
    """No query and no positive twice in a batch: a copy would be masked, and teach nothing."""

    contents: Contents  # of all rows

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return the rows in random order, repeats taken apart; what doesn't fit is left out."""
        order = rows[generator.permutation(len(rows))]
        contents = self.contents.take(order)
        num_batches = len(starts) - 1
        owners = np.repeat(np.arange(len(order)), np.diff(contents.starts))
        # A content of more rows than there are batches can't be spread: those beyond the number of batches go now,
        # and spare the exchange rounds that can't succeed. Some stay where batches would else be too small.
        kept = np.ones(len(order), dtype=np.bool_)
        kept[owners[_occurrences_before(contents.numbers) >= num_batches]] = False
        kept[np.flatnonzero(~kept)[: max(0, LEAST_ROWS * num_batches - int(kept.sum()))]] = True
        new_positions = np.cumsum(kept) - 1
        pairs = _Pairs(new_positions[owners[kept[owners]]], contents.numbers[kept[owners]])
        order = order[kept]
        if len(order) < starts[-1]:  # spread evenly, so that no batch is empty
            starts = np.arange(num_batches + 1) * len(order) // num_batches
        return _exchanged(order, pairs, starts, generator)

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Return how many rows are left out, in words."""
        num_left = num_rows - len(first.rows)
        left = f"; the first epoch leaves {plural(num_left, 'row')} out for it" if num_left else ""
        return (f"batch_sampling no_duplicates: no query and no positive comes twice in a batch{left}.",)


@dataclass(frozen=True, slots=True)
class ByClass:
    """Some classes in each batch, with as many rows of each.

    The rows of a class are dealt in random order into groups; the last one is filled up from the first. As many groups
    come into an epoch as hold the rows of one, so that the number of steps stays; the others wait for their turn.
    """

    classes: NDArray[np.int64]  # (N,) class of each record, numbered from 0
    per_class: int  # rows of each class in a batch

    @classmethod
    def of_records(cls, records: RecordTable, per_class: int, batch_size: int, *, single: bool = False) -> ByClass:
        """Number the classes of records.

        Args:
            single: Every batch is of one source, so that each source needs enough classes.

        Raises:
            DataError: A record has no class, there are too few classes for a batch, or one class has so many rows that
                most batches hold it alone.
        """
        classes, _ = records.classes
        without = np.flatnonzero(classes < 0)
        if len(without):
            raise DataError(
                f"{records[int(without[0])].location}: batch_sampling classes needs the class of every row, and this "
                f"one has no label; add the column label, with label_kind: class for numbers"
            )
        wanted, sources = batch_size // per_class, records.sources if single else np.zeros_like(classes)
        fewest = min(len(np.unique(classes[sources == source])) for source in np.unique(sources).tolist())
        if fewest < wanted:
            whose = "the smallest of the sources has" if single else "the data have"
            raise DataError(
                f"batch_sampling classes: a batch of {batch_size} with {per_class} rows of each class holds {wanted} "
                f"classes, and {whose} {fewest}; lower the batch size to {per_class * fewest}, or "
                f"raise samples_per_class to {-(-batch_size // fewest)}"
            )
        if len(records.numbers("negatives")[1]):
            return cls(classes, per_class)
        for source in np.unique(sources).tolist():
            # Groups of one class stand in different batches, and batches differ by a group at most: the groups of other
            # classes make up for the largest one, or leave it alone in a batch, where no row has a negative.
            sizes = np.bincount(classes[sources == source])
            num_batches = -(-int(sizes.sum()) // batch_size)
            groups = int(np.minimum(-(-sizes // per_class), num_batches).sum())
            lone = 2 * num_batches - groups
            if 2 * lone > num_batches:
                raise DataError(
                    f"batch_sampling classes: about {lone:,} of {num_batches:,} batches would hold one class alone, "
                    f"and rows of one class are no negatives of each other: the largest has {sizes.max():,} of "
                    f"{sizes.sum():,} rows. Raise the batch size, leave rows of that class out, or set batch_sampling "
                    f"to random"
                )
        return cls(classes, per_class)

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return groups of rows of one class, no class twice in a batch."""
        # Deal the rows of each class, in random order, into groups of `per_class`. A class of 10 rows makes 3 groups of
        # 4: the last one wraps around and takes the class's first 2 rows again. A class of 3 rows is one group of 3.
        dealt = rows[generator.permutation(len(rows))]
        dealt = dealt[np.argsort(self.classes[dealt], kind="stable")]
        class_sizes = np.bincount(self.classes[rows])
        class_firsts = np.cumsum(class_sizes) - class_sizes
        num_groups = -(-class_sizes // self.per_class)
        group_classes = np.repeat(np.arange(len(class_sizes)), num_groups)
        group_sizes = np.minimum(self.per_class, class_sizes)[group_classes]
        group_firsts = ranges(np.zeros(len(class_sizes), dtype=np.int64), num_groups) * self.per_class
        within_class = ranges(group_firsts, group_sizes) % np.repeat(class_sizes[group_classes], group_sizes)
        group_rows = dealt[within_class + np.repeat(class_firsts[group_classes], group_sizes)]
        group_starts = np.cumsum(group_sizes) - group_sizes

        # Draw the groups of the epoch. A class in more groups than batches would meet itself: it waits with the rest.
        num_batches, wanted = len(starts) - 1, int(np.diff(starts).max()) // self.per_class
        drawn = generator.permutation(len(group_classes))
        drawn = drawn[_occurrences_before(group_classes[drawn]) < num_batches][: num_batches * wanted]
        # Deal them to the batches like cards, class after class: the groups of a class, which are at most as many as
        # batches, stand in a row and so go to different batches.
        in_order = generator.permutation(int(group_classes.max()) + 1)[group_classes[drawn]]
        cards = drawn[np.argsort(in_order, kind="stable")]
        batch_of = np.arange(len(cards)) % num_batches
        groups = cards[np.argsort(batch_of, kind="stable")]
        sizes = group_sizes[groups]
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        firsts = np.searchsorted(np.sort(batch_of, kind="stable"), np.arange(num_batches + 1))
        return EpochBatches(group_rows[ranges(group_starts[groups], sizes)], ends[firsts])

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:  # noqa: ARG002
        """Return the number of classes, and how many have too few rows, in words."""
        sizes = np.bincount(self.classes)
        few = int((sizes < self.per_class).sum())
        largest = int(np.diff(first.starts).max())
        num_taken, num_records = len(np.unique(first.rows)), len(self.classes)
        taken = (
            f"batch_sampling classes: up to {largest:,} rows a batch, {self.per_class} of each class, of "
            f"{len(sizes):,} classes; the first epoch takes {num_taken:,} of {num_records:,} rows."
        )
        notes = [taken]
        if few:
            notes.append(f"{plural(few, 'class', 'classes')} with fewer rows than that: all of them come.")
        classes, begins = self.classes[first.rows], first.starts[:-1]
        lone = int((np.maximum.reduceat(classes, begins) == np.minimum.reduceat(classes, begins)).sum())
        if lone:
            notes.append(
                f"{lone:,} of {len(begins):,} batches of the first epoch hold one class alone, as no class comes twice "
                f"in a batch: their rows have no negatives but hard ones."
            )
        return tuple(notes)


def whole_numbers(vectors_NE: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return vectors of unit length, or none at all, as whole numbers."""
    precise = vectors_NE.astype(np.float64)
    lengths = np.sqrt(np.square(precise).sum(axis=1, keepdims=True))
    whole: NDArray[np.int16] = np.rint(VECTOR_LENGTH * precise / np.maximum(lengths, TINY)).astype(np.int16)
    return whole


@dataclass(frozen=True, slots=True)
class HardBatches:
    """Batches of rows whose vectors lie close together, up to a cap.

    Cost of an epoch: N * E products for each of log2(batches) halvings, and N * batch size * E for the cap.
    """

    vectors_NE: NDArray[np.int16]  # of every record, as `whole_numbers` makes them
    cap: float  # cosine similarity above which two rows share no batch

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return clusters of rows, in random order."""
        order = generator.permutation(rows)[: starts[-1]]
        stack = [(0, len(starts) - 1)]  # ranges of batches that are still to be halved
        while stack:
            first, last = stack.pop()
            if last - first < 2:
                continue
            part = order[starts[first] : starts[last]]  # a view: the rows of these batches, to be sorted in place
            one = self._float(part[:1])[0]
            others = self._float(part[generator.integers(len(part), size=FAR_CANDIDATES)])
            direction = others[np.argmin(others @ one)] - one
            blocks = [part[start : start + BLOCK_ROWS] for start in range(0, len(part), BLOCK_ROWS)]
            along = np.concatenate([self._float(block) @ direction for block in blocks])
            part[:] = part[np.argsort(along, kind="stable")]
            middle = (first + last) // 2
            stack += [(first, middle), (middle, last)]

        # Move the rows that are too near to another one of their batch among each other. Only batches that had such
        # rows are looked at again: nothing moves into the others.
        too_near = dict(self._too_near(order, starts, range(len(starts) - 1)))
        for _ in range(MOVE_ROUNDS):
            moved = generator.permutation(np.concatenate([np.zeros(0, dtype=np.int64), *too_near.values()]))
            order[moved] = order[np.roll(moved, 1)]
            too_near = dict(self._too_near(order, starts, sorted(too_near)))
        kept = np.ones(len(order), dtype=np.bool_)
        for batch, positions in too_near.items():
            room = int(starts[batch + 1] - starts[batch]) - LEAST_ROWS
            kept[positions[: max(0, room)]] = False
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(kept)])
        return shuffled([EpochBatches(order[kept], ends[starts])], generator)

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Return how near the rows of a batch are, in words, from up to about 50 batches."""
        sizes = np.diff(first.starts)
        nearest = []
        for batch in range(0, len(sizes), max(1, len(sizes) // 50)):
            vectors = self._float(first.rows[first.starts[batch] : first.starts[batch + 1]])
            # A row is no neighbour of itself: its product is pushed below every other one.
            products = vectors @ vectors.T - 2 * VECTOR_LENGTH**2 * np.eye(len(vectors), dtype=np.float32)
            nearest.append(float(products.max(axis=1).mean() / VECTOR_LENGTH**2))
        left = num_rows - len(first.rows)
        verb = "is" if left == 1 else "are"
        more = f"; {plural(left, 'row')} too near to another {verb} left out of the first epoch" if left else ""
        mean = f"the nearest other row of a row's batch has a mean cosine similarity of {np.mean(nearest):.2f}"
        return (f"batch_sampling hard: {mean}{more}.",)

    def _float(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.vectors_NE[rows].astype(np.float32)

    def _too_near(
        self, order: NDArray[np.int64], starts: NDArray[np.int64], suspects: Iterable[int]
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield batches and the positions in `order` of their rows that are too near to an earlier row."""
        for batch in suspects:
            begin, end = int(starts[batch]), int(starts[batch + 1])
            vectors = self._float(order[begin:end])
            near = np.triu(vectors @ vectors.T > self.cap * VECTOR_LENGTH**2, 1)
            # A row that has to go itself keeps no later one out: of a chain of near rows every second one may stay.
            late: list[int] = []
            for position in np.flatnonzero(near.any(axis=0)).tolist():
                if np.delete(near[:, position], late).any():
                    late.append(position)
            if late:
                yield batch, begin + np.array(late, dtype=np.int64)


def shuffled(parts: Sequence[EpochBatches], generator: np.random.Generator) -> EpochBatches:
    """Return the batches of several parts in random order."""
    rows = np.concatenate([part.rows for part in parts])
    sizes = np.concatenate([np.diff(part.starts) for part in parts])
    firsts = np.cumsum(sizes) - sizes
    order = generator.permutation(len(sizes))
    return EpochBatches(rows[ranges(firsts[order], sizes[order])], np.concatenate([[0], np.cumsum(sizes[order])]))


class _Pairs(NamedTuple):
    """Contents of the rows in an order, as (position, content) pairs, ascending by position."""

    positions: NDArray[np.int64]
    contents: NDArray[np.int64]

    def of(self, positions: NDArray[np.int64]) -> _Pairs:
        """Return the pairs of every content that a row at one of some positions holds."""
        touched = np.zeros(int(self.contents.max(initial=0)) + 1, dtype=np.bool_)
        touched[self.contents[np.isin(self.positions, positions)]] = True
        chosen = touched[self.contents]
        return _Pairs(self.positions[chosen], self.contents[chosen])

    def repeats(self, batch_of: NDArray[np.int64], num_batches: int) -> NDArray[np.int64]:
        """Return the rows that hold a content which an earlier row of their batch holds, ascending."""
        keys, positions = self._keys(batch_of, num_batches)
        return np.unique(positions[1:][keys[1:] == keys[:-1]])

    def fits(
        self, rows: NDArray[np.int64], batches: NDArray[np.int64], batch_of: NDArray[np.int64], num_batches: int
    ) -> NDArray[np.bool_]:
        """Return for each row whether the batch beside it holds none of the row's contents."""
        keys, _ = self._keys(batch_of, num_batches)
        firsts = np.searchsorted(self.positions, rows)
        counts = np.searchsorted(self.positions, rows, side="right") - firsts
        wanted = np.repeat(batches, counts) * self._num_contents + self.contents[ranges(firsts, counts)]
        at = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
        stands = keys[at] == wanted if len(keys) else np.zeros(len(wanted), dtype=np.bool_)
        none_stands: NDArray[np.bool_] = (
            np.bincount(np.repeat(np.arange(len(rows)), counts)[stands], minlength=len(rows)) == 0
        )
        return none_stands

    @property
    def _num_contents(self) -> int:
        return int(self.contents.max(initial=0)) + 1

    def _keys(self, batch_of: NDArray[np.int64], num_batches: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (batch, content) of every pair in a batch as one number, ascending, and the rows of the pairs."""
        batches = batch_of[self.positions]
        keys = batches * self._num_contents + self.contents
        order = np.argsort(keys, kind="stable")
        order = order[: int((batches < num_batches).sum())]  # rows beyond the last batch sort to the end
        return keys[order], self.positions[order]


def _exchanged(
    order: NDArray[np.int64], pairs: _Pairs, starts: NDArray[np.int64], generator: np.random.Generator
) -> EpochBatches:
    """Exchange rows until nothing repeats; positions beyond the last batch are room for what is left out.

    A row is named by its position in `order`, which never changes; `row_at` and `position_of` say where rows are now,
    and are inverse to each other. Cost of a round: one sort of all pairs to find what repeats, and two of the pairs
    that share a content with a row that moves.
    """
    num_batches, num_rows = len(starts) - 1, len(order)
    batch_at = np.searchsorted(starts, np.arange(num_rows), side="right") - 1  # num_batches: beyond the last one
    row_at, position_of = np.arange(num_rows), np.arange(num_rows)
    repeats = pairs.repeats(batch_at, num_batches)
    best_row_at, best, rounds_left = row_at.copy(), repeats, EXCHANGE_ROUNDS
    while len(repeats) and rounds_left:
        rounds_left -= 1
        batch_of = batch_at[position_of]
        # (R, T): T random positions for each of R rows that repeat, fewer the more rows there are.
        positions = generator.integers(num_rows, size=(len(repeats), max(LEAST_TRIES, TRIES // len(repeats))))
        others = row_at[positions]
        near = pairs.of(np.concatenate([repeats, others.reshape(-1)]))
        home = np.broadcast_to(batch_of[repeats][:, None], positions.shape)
        goes = np.broadcast_to(repeats[:, None], positions.shape)
        fits = near.fits(goes.reshape(-1), batch_at[positions].reshape(-1), batch_of, num_batches)
        fits &= ~np.isin(others.reshape(-1), repeats)  # those move themselves
        swaps = fits & near.fits(others.reshape(-1), home.reshape(-1), batch_of, num_batches)
        # 2: both fit where the other stood. 1: the row that repeats fits, and the other will repeat in its stead, which
        # helps where that one is easier to move. 0: no exchange.
        rank = (fits.astype(np.int64) + swaps).reshape(positions.shape)
        chosen = rank.argmax(axis=1)
        movers = np.flatnonzero(rank[np.arange(len(repeats)), chosen])
        # Exchanges of a round happen at once, so a position takes part in one of them only. Two that fit alone may
        # still put the same content into one batch: the next round sees that as a repeat.
        targets, first = np.unique(positions[movers, chosen[movers]], return_index=True)
        movers = repeats[movers[first]]
        left = position_of[movers]
        row_at[left], row_at[targets] = row_at[targets], movers.copy()
        position_of[row_at] = np.arange(num_rows)
        repeats = pairs.repeats(batch_at[position_of], num_batches)
        if len(repeats) < len(best):
            rounds_left = EXCHANGE_ROUNDS if len(repeats) < 0.99 * len(best) else rounds_left
            best_row_at, best = row_at.copy(), repeats

    leaves = np.zeros(num_rows, dtype=np.bool_)
    leaves[best] = True
    stays = ~leaves[best_row_at[: starts[-1]]]
    least = min(LEAST_ROWS, int(np.diff(starts).min()))
    for batch in np.flatnonzero(np.add.reduceat(stays, starts[:-1]) < least).tolist():
        stays[starts[batch] : starts[batch] + least] = True
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(stays)])
    return EpochBatches(order[best_row_at[: starts[-1]][stays]], before[starts])


def _occurrences_before(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each number how often it stands before: [5, 7, 5, 5] gives [0, 0, 1, 2]."""
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=1)
    before = np.empty(len(numbers), dtype=np.int64)
    before[order] = ranges(np.zeros(len(counts), dtype=np.int64), counts)
    return before
