"""Ways to put the rows of an epoch into batches, other than at random: without repeats, and by class.

Each takes the generator of (seed, epoch) and the sizes that batches would have at random, and returns what each batch
holds. Nothing else goes in, so that the batches of a step are the same on every rank and after every resume.

Repeats are taken apart by exchanging rows, all at once instead of row by row:

1. Rows stand in random order. A row repeats when an earlier one of its batch holds the same content.
2. For every row that repeats a few random places are looked at, and it changes places with a row that fits where it
   stood, as it fits there; or else with one where only it fits, which is then the one that repeats.
3. What still repeats after some rounds is left out of the epoch: no arrangement may exist, and a later epoch draws
   anew. A content that more rows hold than there are batches loses those at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vembed.batch import ranges
from vembed.errors import DataError
from vembed.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vembed.data.table import RecordTable

ROUNDS = 20
"""Of exchanging rows that repeat, without a gain of 1%, until the rest is left out."""

TRIES, LEAST_TRIES = 20_000, 4
"""Places that a round looks at for all rows that repeat, and at least for each."""

LEAST_ROWS = 2
"""Rows that a batch keeps, even where they repeat: alone a row has no in-batch negatives."""


class EpochBatches(NamedTuple):
    """What the batches of an epoch hold."""

    rows: NDArray[np.int64]  # batch after batch
    starts: NDArray[np.int64]  # batch i is rows[starts[i]:starts[i + 1]]; one more entry than there are batches


class Arrangement(Protocol):
    """A way to put the rows of an epoch into batches."""

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return the batches of an epoch.

        Args:
            rows: What the epoch takes; a row may come more than once.
            generator: Of the seed and the epoch.
            starts: First place of each batch at random, and the end of the last one.
        """

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Say what comes of it, one plain sentence each.

        Args:
            first: Batches of the first epoch.
            num_rows: What that epoch took.
        """


class AtRandom:
    """Rows in random order."""

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return one permutation, cut."""
        return EpochBatches(rows[generator.permutation(len(rows))], starts)

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:  # noqa: ARG002
        """Say nothing: the plan says how rows divide into batches."""
        return ()


class Contents(NamedTuple):
    """Which contents each of n units holds: unit i has numbers[starts[i]:starts[i + 1]], none twice."""

    numbers: NDArray[np.int64]  # of contents, counted from 0
    starts: NDArray[np.int64]

    @classmethod
    def of_pairs(cls, units: NDArray[np.int64], contents: NDArray[np.int64], num_units: int) -> Contents:
        """Collect (unit, content) pairs in any order; those that stand twice count once."""
        _, numbers = np.unique(contents, return_inverse=True)
        pairs = np.unique(units * (int(numbers.max(initial=0)) + 1) + numbers)
        owners, numbers = np.divmod(pairs, int(numbers.max(initial=0)) + 1)
        return cls(numbers, np.searchsorted(owners, np.arange(num_units + 1)))

    @classmethod
    def of_records(cls, records: RecordTable) -> Contents:
        """Collect the queries and positives of records, by content."""
        queries, positives = records.numbers("query"), records.numbers("positives")
        rows, items = (np.concatenate(parts) for parts in zip(queries, positives, strict=True))
        return cls.of_pairs(rows, records.items.ids[items], len(records))

    def take(self, units: NDArray[np.int64]) -> Contents:
        """Return some units, in that order, with nothing but contents that several units hold."""
        counts = np.diff(self.starts)[units]
        numbers = self.numbers[ranges(self.starts[units], counts)]
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
        """Return the rows in random order, repeats taken apart."""
        order = rows[generator.permutation(len(rows))]
        return apart(order, self.contents.take(order), starts, generator)

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Say what is left out."""
        num_left = num_rows - len(first.rows)
        left = f"; the first epoch leaves {plural(num_left, 'row')} out for it" if num_left else ""
        return (f"batch_sampling no_duplicates: no query and no positive comes twice in a batch{left}.",)


@dataclass(frozen=True, slots=True)
class ByClass:
    """Some classes in each batch, with as many rows of each.

    The rows of a class are dealt in random order into groups; the last one is filled up from the first. As many groups
    come into an epoch as hold the rows of one, so that the number of steps stays; the others wait for their turn.
    """

    classes: NDArray[np.int64]  # of each row, numbered from 0
    per_class: int  # rows of each class in a batch

    @classmethod
    def of_records(cls, records: RecordTable, per_class: int, batch_size: int, *, single: bool = False) -> ByClass:
        """Number the classes of records.

        Args:
            single: Whether every batch is of one source.

        Raises:
            DataError: A record has no class, or there are too few classes for a batch.
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
        if not len(records.numbers("negatives")[1]):
            for source in np.unique(sources).tolist():
                _refuse_uneven(np.bincount(classes[sources == source]), per_class, batch_size)
        return cls(classes, per_class)

    def batches(
        self, rows: NDArray[np.int64], generator: np.random.Generator, starts: NDArray[np.int64]
    ) -> EpochBatches:
        """Return groups of rows of one class, no class twice in a batch."""
        dealt_rows, group_starts, classes = self._groups(rows, generator)
        num_batches, wanted = len(starts) - 1, int(np.diff(starts).max()) // self.per_class
        drawn = generator.permutation(len(classes))
        drawn = drawn[_nth_of_its_kind(classes[drawn]) < num_batches][: num_batches * wanted]
        in_order = generator.permutation(int(classes.max()) + 1)[classes[drawn]]
        dealt = drawn[np.argsort(in_order, kind="stable")]
        batch_of = np.arange(len(dealt)) % num_batches  # groups of one class stand in a row: each gets another batch
        groups = dealt[np.argsort(batch_of, kind="stable")]
        sizes = np.diff(group_starts)[groups]
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        firsts = np.searchsorted(np.sort(batch_of, kind="stable"), np.arange(num_batches + 1))
        return EpochBatches(dealt_rows[ranges(group_starts[groups], sizes)], ends[firsts])

    def _groups(
        self, rows: NDArray[np.int64], generator: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of all groups, where each group begins (and the last one ends), and the class of each."""
        shuffled = rows[generator.permutation(len(rows))]
        shuffled = shuffled[np.argsort(self.classes[shuffled], kind="stable")]
        sizes = np.bincount(self.classes[rows])
        firsts = np.cumsum(sizes) - sizes
        counts = -(-sizes // self.per_class)
        classes = np.repeat(np.arange(len(sizes)), counts)
        lengths = np.minimum(self.per_class, sizes)[classes]
        nth = ranges(np.zeros(len(sizes), dtype=np.int64), counts) * self.per_class
        within = ranges(nth, lengths) % np.repeat(sizes[classes], lengths)
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        return shuffled[within + np.repeat(firsts[classes], lengths)], starts, classes

    def notes(self, first: EpochBatches, num_rows: int) -> tuple[str, ...]:
        """Say how many classes there are, and which have too few rows."""
        sizes = np.bincount(self.classes)
        few = int((sizes < self.per_class).sum())
        largest = int(np.diff(first.starts).max())
        said = (
            f"batch_sampling classes: up to {largest:,} rows a batch, {self.per_class} of each class, of "
            f"{len(sizes):,} classes; the first epoch takes {len(np.unique(first.rows)):,} of {num_rows:,} rows."
        )
        notes = [said]
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


def _refuse_uneven(sizes: NDArray[np.int64], per_class: int, batch_size: int) -> None:
    """Refuse classes of so many rows that most batches hold a single one.

    Groups of one class stand in different batches, and batches differ by a group at most: the others make up for the
    largest class, or leave it alone.
    """
    num_batches = -(-int(sizes.sum()) // batch_size)
    groups = int(np.minimum(-(-sizes // per_class), num_batches).sum())
    lone = 2 * num_batches - groups
    if 2 * lone > num_batches:
        raise DataError(
            f"batch_sampling classes: about {lone:,} of {num_batches:,} batches would hold one class alone, and rows "
            f"of one class are no negatives of each other: the largest has {sizes.max():,} of {sizes.sum():,} rows. "
            f"Raise the batch size, leave rows of that class out, or set batch_sampling to random"
        )


def shuffled(parts: Sequence[EpochBatches], generator: np.random.Generator) -> EpochBatches:
    """Return the batches of several parts in random order."""
    rows = np.concatenate([part.rows for part in parts])
    sizes = np.concatenate([np.diff(part.starts) for part in parts])
    firsts = np.cumsum(sizes) - sizes
    order = generator.permutation(len(sizes))
    return EpochBatches(rows[ranges(firsts[order], sizes[order])], np.concatenate([[0], np.cumsum(sizes[order])]))


def apart(
    order: NDArray[np.int64], contents: Contents, starts: NDArray[np.int64], generator: np.random.Generator
) -> EpochBatches:
    """Return the batches of units with no content twice in one; what doesn't fit is left out.

    Args:
        order: Units in random order, perhaps more than the batches hold.
        contents: Of the units in that order.
        starts: First place of each batch, and the end of the last one.
    """
    num_batches = len(starts) - 1
    owners = np.repeat(np.arange(len(order)), np.diff(contents.starts))
    kept = np.ones(len(order), dtype=np.bool_)
    kept[owners[_nth_of_its_kind(contents.numbers) >= num_batches]] = False
    kept[np.flatnonzero(~kept)[: max(0, LEAST_ROWS * num_batches - int(kept.sum()))]] = True
    places = np.cumsum(kept) - 1
    pairs = _Pairs(places[owners[kept[owners]]], contents.numbers[kept[owners]])
    order = order[kept]
    if len(order) < starts[-1]:  # spread evenly, so that no batch is empty
        starts = np.arange(num_batches + 1) * len(order) // num_batches
    return _exchanged(order, pairs, starts, generator)


class _Pairs(NamedTuple):
    """Which unit holds which content, in the order of the units."""

    units: NDArray[np.int64]
    contents: NDArray[np.int64]

    def of(self, units: NDArray[np.int64]) -> _Pairs:
        """Return the pairs of every content that one of some units holds."""
        touched = np.zeros(int(self.contents.max(initial=0)) + 1, dtype=np.bool_)
        touched[self.contents[np.isin(self.units, units)]] = True
        chosen = touched[self.contents]
        return _Pairs(self.units[chosen], self.contents[chosen])

    def repeats(self, batch_of: NDArray[np.int64], num_batches: int) -> NDArray[np.int64]:
        """Return the units that hold a content which an earlier unit of their batch holds, ascending."""
        keys, units = self._keys(batch_of, num_batches)
        return np.unique(units[1:][keys[1:] == keys[:-1]])

    def fits(
        self, units: NDArray[np.int64], batches: NDArray[np.int64], batch_of: NDArray[np.int64], num_batches: int
    ) -> NDArray[np.bool_]:
        """Return whether none of a unit's contents stands in the batch beside it, for each unit."""
        keys, _ = self._keys(batch_of, num_batches)
        firsts = np.searchsorted(self.units, units)
        counts = np.searchsorted(self.units, units, side="right") - firsts
        wanted = np.repeat(batches, counts) * self._most + self.contents[ranges(firsts, counts)]
        at = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
        stands = keys[at] == wanted if len(keys) else np.zeros(len(wanted), dtype=np.bool_)
        found: NDArray[np.bool_] = (
            np.bincount(np.repeat(np.arange(len(units)), counts)[stands], minlength=len(units)) == 0
        )
        return found

    @property
    def _most(self) -> int:
        return int(self.contents.max(initial=0)) + 1

    def _keys(self, batch_of: NDArray[np.int64], num_batches: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (batch, content) of every pair in a batch as one number, ascending, and the units of the pairs."""
        batches = batch_of[self.units]
        keys = batches * self._most + self.contents
        order = np.argsort(keys, kind="stable")
        order = order[: int((batches < num_batches).sum())]
        return keys[order], self.units[order]


def _exchanged(
    order: NDArray[np.int64], pairs: _Pairs, starts: NDArray[np.int64], generator: np.random.Generator
) -> EpochBatches:
    """Exchange units until nothing repeats; beyond the last batch is room for what is left out."""
    num_batches, num_units = len(starts) - 1, len(order)
    batch_at = np.searchsorted(starts, np.arange(num_units), side="right") - 1
    unit_at, place_of = np.arange(num_units), np.arange(num_units)
    repeats = pairs.repeats(batch_at, num_batches)
    best_unit_at, best, rounds_left = unit_at.copy(), repeats, ROUNDS
    while len(repeats) and rounds_left:
        rounds_left -= 1
        batch_of = batch_at[place_of]
        places = generator.integers(num_units, size=(len(repeats), max(LEAST_TRIES, TRIES // len(repeats))))
        others = unit_at[places]
        near = pairs.of(np.concatenate([repeats, others.reshape(-1)]))
        home = np.broadcast_to(batch_of[repeats][:, None], places.shape)
        goes = np.broadcast_to(repeats[:, None], places.shape)
        fits = near.fits(goes.reshape(-1), batch_at[places].reshape(-1), batch_of, num_batches)
        fits &= ~np.isin(others.reshape(-1), repeats)
        swaps = fits & near.fits(others.reshape(-1), home.reshape(-1), batch_of, num_batches)
        rank = (fits.astype(np.int64) + swaps).reshape(places.shape)
        chosen = rank.argmax(axis=1)
        movers = np.flatnonzero(rank[np.arange(len(repeats)), chosen])
        targets, first = np.unique(places[movers, chosen[movers]], return_index=True)
        movers = repeats[movers[first]]
        left = place_of[movers]
        unit_at[left], unit_at[targets] = unit_at[targets], movers.copy()
        place_of[unit_at] = np.arange(num_units)
        repeats = pairs.repeats(batch_at[place_of], num_batches)
        if len(repeats) < len(best):
            rounds_left = ROUNDS if len(repeats) < 0.99 * len(best) else rounds_left
            best_unit_at, best = unit_at.copy(), repeats
    leaves = np.zeros(num_units, dtype=np.bool_)
    leaves[best] = True
    stays = ~leaves[best_unit_at[: starts[-1]]]
    least = min(LEAST_ROWS, int(np.diff(starts).min()))
    for batch in np.flatnonzero(np.add.reduceat(stays, starts[:-1]) < least).tolist():
        stays[starts[batch] : starts[batch] + least] = True
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(stays)])
    return EpochBatches(order[best_unit_at[: starts[-1]][stays]], before[starts])


def _nth_of_its_kind(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each number how often it stands before."""
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers, minlength=1)
    nth = np.empty(len(numbers), dtype=np.int64)
    nth[order] = ranges(np.zeros(len(counts), dtype=np.int64), counts)
    return nth
