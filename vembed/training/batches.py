"""The batch of a step, as the engine takes it: pools of tokenized rows and the structure of the batch.

It is made in two parts. `BatchSource.features` does all that costs time, on the CPU: it deals the rows to the ranks,
counts, decodes and tokenizes. It is a function of (seed, epoch, step) and the rank, so it may run ahead in another
process. `BatchSource.prepared` does what must happen in this one: the encoder comes in.

Every rank knows the whole batch and tokenizes its own rows of it. A rank that has no row of a modality which the batch
holds gets a spare one (slot -1): all ranks then call all towers, and what comes of it is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vembed.batch import Composed, Features, Image, modality_of
from vembed.data.collate import collate
from vembed.gradcache.engine import Pool
from vembed.gradcache.row_assignment import RowAssignment
from vembed.losses.base import BatchStructure
from vembed.training.frozen import is_stored, stored_features, stored_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch, Item, Side
    from vembed.data.augment import Augmenter
    from vembed.data.records import RecordTable
    from vembed.data.sampler import GlobalSampler
    from vembed.models.encoder import Encoder
    from vembed.training.stored import StoredVectors
    from vembed.training.teacher import Answers


CHARACTERS_PER_TOKEN = 4
"""Of English texts. Only the proportion between rows counts, and where a text is cut."""

PICTURE_CHARACTERS = 1024
"""What a further picture of an item costs beside the texts: some hundred tokens."""


class Batches(Protocol):
    """Where the loop gets its batches from."""

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""

    def batch(self, step: int) -> PreparedBatch:
        """Return the batch of a step, counted from 0.

        Raises:
            DataError: A picture can't be read any more.
        """


@dataclass(frozen=True, slots=True)
class FeaturedBatch:
    """A batch as features, without an encoder and without a device.

    `parts` are this rank's rows of one modality each, and where those belong in [queries; documents], int64; -1 for a
    spare row.
    """

    record_ids: tuple[int, ...]  # rows of the training records, all ranks'
    structure: BatchStructure  # on the CPU: losses that stream list cells there, and read nothing back
    num_masked: int | None  # pairs that are no negatives as they are copies; None where the loss masks none
    assignment: RowAssignment  # which rows are whose
    parts: tuple[tuple[Features, NDArray[np.int64]], ...]


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Everything that a step needs."""

    featured: FeaturedBatch  # the rows of all ranks
    pools: tuple[Pool, ...]  # this rank's; what goes through one tower shares a pool, so that it packs tighter

    @property
    def structure(self) -> BatchStructure:
        """What the loss knows of the batch."""
        return self.featured.structure

    @property
    def assignment(self) -> RowAssignment:
        """Which rows are whose."""
        return self.featured.assignment

    @property
    def num_truncated(self) -> int:
        """Over-long texts of this rank that were cut; spare rows are another rank's to count."""
        return sum(pool.features.num_truncated for pool in self.pools if (pool.slots >= 0).all())


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Makes the batch of any step from nothing but the step's number."""

    records: RecordTable
    sampler: GlobalSampler  # which records make up which step
    encoder: Encoder
    device: torch.device
    augmenter: Augmenter
    rank: int = 0  # this process among those that share a batch
    world_size: int = 1
    stored: StoredVectors | None = None  # embeddings of what a frozen tower would encode, or None
    answers: Answers | None = None  # what a teacher says of the records, or None
    counts_masked: bool = False  # whether the loss masks copies
    prompted: tuple[Encoder, ...] = ()  # for the texts of each source, where sources have prompts of their own
    tells_source: bool = False  # whether each batch is of one of several sources

    def batch(self, step: int) -> PreparedBatch:
        """Return the batch of a step, counted from 0.

        Raises:
            DataError: A picture can't be read any more.
        """
        return self.prepared(self.features(step))

    def features(self, step: int) -> FeaturedBatch:
        """Deal the rows of a step to the ranks, and decode and tokenize those of this rank.

        Raises:
            DataError: A picture can't be read any more.
        """
        rows = self.sampler.rows(step).tolist()
        epoch = step // self.sampler.steps_per_epoch
        records = [
            self.augmenter.record(record, row=row, epoch=epoch)
            for record, row in zip(self.records.take(rows), rows, strict=True)
        ]
        batch = collate(records, rows)
        if self.answers is not None:
            own_documents = [len(record.positives) + len(record.negatives) for record in records]
            batch = self.answers.fill(batch, np.array(own_documents, dtype=np.int64))
        items = (*batch.queries, *batch.documents)
        groups = [places for _, places in self.encoder.by_modality(items)]
        assignment = assign_rows(groups, estimated_costs(items, self.encoder.max_length), self.world_size)
        sources_N = np.zeros(len(items), dtype=np.int64)
        if self.prompted:
            sources_Q = self.records.sources[rows]
            num_documents_Q = [len(record.positives) + len(record.negatives) for record in records]
            sources_N = np.concatenate([sources_Q, np.repeat(sources_Q, num_documents_Q)])
        own = [self._own_part(batch, group, assignment, sources_N) for group in groups]
        num_masked = count_masked(batch) if self.counts_masked else None
        structure = BatchStructure.of(batch, source=int(self.records.sources[rows[0]]) if self.tells_source else None)
        return FeaturedBatch(batch.record_ids, structure, num_masked, assignment, tuple(own))

    def prepared(self, featured: FeaturedBatch) -> PreparedBatch:
        """Give features to the encoder."""
        encoder = self.encoder
        pools = tuple(
            stored_pool(features, slots)
            if is_stored(features)
            else Pool(encoder, encoder.collate, features, slots, encoder.num_vectors(features), encoder.packs)
            for features, slots in featured.parts
        )
        return PreparedBatch(featured, pools)

    def _own_part(
        self,
        batch: ContrastiveBatch,
        group: NDArray[np.int64],
        assignment: RowAssignment,
        sources_N: NDArray[np.int64],
    ) -> tuple[Features, NDArray[np.int64]]:
        """Return this rank's rows of one modality: what shares a tower is packed together, queries and documents alike.

        Args:
            group: Places of the items of the modality in [queries; documents].
            sources_N: Source of each of those.
        """
        slots = group[np.isin(group, assignment.slots[self.rank], assume_unique=True)]
        if not len(slots):
            return self._features(batch, group[:1], sources_N), np.full(1, -1, dtype=np.int64)
        return self._features(batch, slots, sources_N), slots

    def _features(self, batch: ContrastiveBatch, places: NDArray[np.int64], sources_N: NDArray[np.int64]) -> Features:
        """Return the features of items of one modality, or their embeddings where those are stored."""
        num_queries, items = len(batch.queries), (*batch.queries, *batch.documents)
        ids_N = np.concatenate([batch.query_ids_Q, batch.document_ids_D])
        modality = modality_of(items[places[0]])
        sides: list[tuple[Side, NDArray[np.int64]]] = [
            ("query", places[places < num_queries]),
            ("document", places[places >= num_queries]),
        ]
        if self.stored is not None and self.stored.holds(modality):
            found = [(self.stored.tables[modality, side], ids_N[own]) for side, own in sides if len(own)]
            return stored_features(np.concatenate([table.take(ids) for table, ids in found]))
        if not self.prompted:
            parts = [self.encoder.featurize([items[place] for place in own], side) for side, own in sides if len(own)]
            return Features.concat(parts)
        alike = [
            (self.prompted[source], side, own[sources_N[own] == source])
            for side, own in sides
            for source in np.unique(sources_N[own]).tolist()
        ]
        features = Features.concat(
            [encoder.featurize([items[place] for place in own], side) for encoder, side, own in alike]
        )
        order = np.argsort(np.concatenate([own for _, _, own in alike]))  # as they stand in the batch
        return replace(features.take(order), num_truncated=features.num_truncated)


def estimated_costs(items: Sequence[Item], max_length: int | None) -> NDArray[np.int64]:
    """Return what items of one modality cost beside each other, before anything is tokenized or decoded.

    Args:
        max_length: Longest text in tokens; None where there is no limit.

    Returns:
        (n,): characters of a text as far as it is read, and more for each further picture; pictures cost alike.
    """
    longest = np.iinfo(np.int64).max if max_length is None else max_length * CHARACTERS_PER_TOKEN
    lengths = [len(_text(item)) for item in items]
    further = [len(item.images) - 1 if isinstance(item, Composed) else 0 for item in items]
    costs: NDArray[np.int64] = np.minimum(np.array(lengths, dtype=np.int64), longest)
    return costs + PICTURE_CHARACTERS * np.array(further, dtype=np.int64)


def assign_rows(groups: Sequence[NDArray[np.int64]], costs_N: NDArray[np.int64], world_size: int) -> RowAssignment:
    """Give every rank rows of equal cost, from nothing but the batch itself.

    The loss runs over the whole batch, so that queries and their documents need not stay together. Every rank holds the
    records and assigns alike; nothing is exchanged.

    1. The rows of each modality are assigned apart: they cost differently, and sharded models need like calls on all
       ranks.
    2. Sorted by estimated cost, they go out in laps of a row for each rank; in each lap the longest one goes to the
       rank that has least so far.
    3. What is left over for the last lap of one modality goes to the ranks that the one before left out.

    Args:
        groups: Rows of each modality; together every row once.
        costs_N: Estimated cost of each row, compared within a group only.

    Returns:
        Counts differ by at most one in every group and over all.
    """
    if world_size == 1:
        return RowAssignment.alone(len(costs_N))
    owners_N = np.empty(len(costs_N), dtype=np.int64)
    first = 0
    for rows in groups:
        order = rows[np.argsort(-costs_N[rows], kind="stable")]
        num_left = len(order) % world_size
        loads = np.zeros(world_size, dtype=np.int64)
        for lap in order[: len(order) - num_left].reshape(-1, world_size):
            ranks = np.argsort(loads, kind="stable")
            owners_N[lap] = ranks
            loads[ranks] += costs_N[lap]
        owners_N[order[len(order) - num_left :]] = (first + np.arange(num_left)) % world_size
        first = (first + num_left) % world_size
    return RowAssignment(tuple(np.flatnonzero(owners_N == rank) for rank in range(world_size)))


def _text(item: Item) -> str:
    if isinstance(item, Composed):
        return item.text
    return "" if isinstance(item, Image) else item


def count_masked(batch: ContrastiveBatch) -> int:
    """Return how many (query, document) pairs of a batch the loss masks as copies; what a filter finds isn't counted.

    A document is masked for a query when it repeats the content of a positive of that query, or of an equal one, or the
    query itself; explicit positives aren't counted. Pairs are counted by content, times how often each content stands
    in the batch: what `false_negative_mask` marks, in O(P log P) for P positive pairs.
    """
    query_ids, query_rows, query_counts = _contents(batch.query_ids_Q)
    document_ids, document_rows, document_counts = _contents(batch.document_ids_D)
    positives_P2 = np.unique(batch.positives_P2, axis=0)
    known = np.stack([query_rows[positives_P2[:, 0]], document_rows[positives_P2[:, 1]]], axis=1)
    _, same_queries, same_documents = np.intersect1d(query_ids, document_ids, assume_unique=True, return_indices=True)
    itself = np.stack([same_queries, same_documents], axis=1)
    related = np.unique(np.concatenate([known, itself]), axis=0)
    return int((query_counts[related[:, 0]] * document_counts[related[:, 1]]).sum()) - len(positives_P2)


def _contents(ids_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct contents, which of them each row has, and how many rows have each."""
    contents, rows_N, counts = np.unique(ids_N, return_inverse=True, return_counts=True)
    return contents, rows_N.reshape(-1), counts
