"""The batch of a step: rows of the training records as pools of tokenized rows, and the structure that the loss reads.

1. `open_batches` computes what batches carry beside their rows (embeddings of frozen towers, a teacher's answers) and
   decides who makes them: this process, or workers that run ahead (loading.py).
2. `BatchSource.batch` does all that costs time, on the CPU: it assigns the rows to the ranks, decodes and tokenizes. It
   is a function of (seed, epoch, step) and the rank, so it may run ahead in another process.
3. `pools_of` does the rest in this process, as it needs the encoder: features become the engine's pools.

Every rank knows the whole batch and tokenizes only its own rows. A rank without rows of a modality that the batch holds
encodes a spare one (slot -1), whose embedding is dropped: then all ranks call all towers, which sharded weights need.

Shape legend: Q queries, D documents, N = Q + D items of a batch, queries first; a slot is a row of those N.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vembed.batch import Augmentation, Composed, Features, Image, modality_of
from vembed.data.augment import augmented_record
from vembed.data.collate import collate
from vembed.files import home_path
from vembed.gradcache.chunks import RowAssignment
from vembed.gradcache.engine import Pool
from vembed.gradcache.passes import Passes
from vembed.losses.base import BatchStructure
from vembed.plan.devices import Devices
from vembed.training.data import image_limits, prompted
from vembed.training.loading import BatchLoader
from vembed.training.model import teacher_keys
from vembed.training.refresh import HardBatchRefresh, MiningRefresh, RefreshedBatches
from vembed.vectors.frozen import FrozenItems, find_frozen, is_stored, stored_features, stored_pool
from vembed.vectors.keys import teacher_gives_scores
from vembed.vectors.teacher import TeacherUse, find_teacher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from vembed.batch import ContrastiveBatch, Item, Side
    from vembed.data.sampler import GlobalSampler
    from vembed.data.table import RecordTable
    from vembed.models.encoder import Encoder
    from vembed.training.refresh import Refresh
    from vembed.training.run import Run
    from vembed.vectors.items import ItemVectors
    from vembed.vectors.teacher import Answers, Teacher

CHARACTERS_PER_TOKEN = 4
"""Of English texts. Only the proportion between rows counts, and where a long text is cut."""

PICTURE_CHARACTERS = 1024
"""Cost of each further picture of an item, in characters of text: some hundred tokens."""


class Batches(Protocol):
    """Source of the batches that the loop trains on."""

    def batch(self, number: int) -> FeaturedBatch:
        """Return a batch by its number, counted from 0 over all epochs; an optimizer step takes one or several.

        Raises:
            DataError: A picture can't be read any more.
        """


@dataclass(frozen=True, slots=True)
class FeaturedBatch:
    """A batch as features, without encoder and device, so that a worker can make it."""

    record_ids: tuple[int, ...]  # rows of the training records, of all ranks
    structure: BatchStructure  # on the CPU: losses that stream list cells there, and read nothing back
    num_masked: int | None  # pairs masked as copies; None where the loss masks none
    assignment: RowAssignment  # which slots are on which rank
    parts: tuple[tuple[Features, NDArray[np.int64]], ...]  # this rank's rows of each modality, and their slots
    step_share: float  # of the rows of the optimizer step

    @property
    def num_truncated(self) -> int:
        """Texts of this rank that were cut; a spare row is counted by the rank that owns it."""
        return sum(features.num_truncated for features, slots in self.parts if (slots >= 0).all())


def pools_of(batch: FeaturedBatch, encoder: Encoder) -> tuple[Pool, ...]:
    """Return this rank's rows as the engine cuts them into calls of the encoder, a pool for each modality."""
    return tuple(
        stored_pool(features, slots)
        if is_stored(features)
        else Pool(encoder, encoder.collate, features, slots, encoder.num_vectors(features), encoder.packs)
        for features, slots in batch.parts
    )


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Makes any batch from nothing but its number, counted from 0 over all epochs."""

    records: RecordTable
    sampler: GlobalSampler  # which records make up which batch
    encoder: Encoder
    device: torch.device
    augmentation: Augmentation  # that of the run
    rank: int = 0  # this process among those that share a batch
    world_size: int = 1
    stored: ItemVectors | None = None  # embeddings of items that a frozen tower would encode
    answers: Answers | None = None  # of a teacher, about the records
    counts_masked: bool = False  # whether the loss masks copies
    prompted: tuple[Encoder, ...] = ()  # the encoder with the prompts of each source; empty where all prompt alike
    tells_source: bool = False  # whether each batch comes from one of several sources
    accumulated: int = 1  # most batches of an optimizer step

    def batch(self, number: int) -> FeaturedBatch:
        """Assign the rows of a batch to the ranks, and decode and tokenize those of this rank.

        Raises:
            DataError: A picture can't be read any more.
        """
        # The batch's records. Augmentation depends on (seed, epoch, row), so that every rank sees the same picture.
        rows = self.sampler.rows(number).tolist()
        epoch = number // self.sampler.batches_per_epoch
        records = [
            augmented_record(record, self.augmentation, row=row, epoch=epoch)
            for record, row in zip(self.records.take(rows), rows, strict=True)
        ]
        batch = collate(records, rows)
        num_documents_Q = np.array(
            [len(record.positives) + len(record.negatives) for record in records], dtype=np.int64
        )
        if self.answers is not None:
            batch = self.answers(batch, num_documents_Q)

        # Which rank encodes which row. All ranks compute the same from the batch alone; nothing is exchanged.
        items = (*batch.queries, *batch.documents)
        groups = [slots for _, slots in self.encoder.by_modality(items)]
        assignment = assign_rows(groups, estimated_costs(items, self.encoder.max_length), self.world_size)

        # The features of this rank's rows. Queries and documents of a modality share a pool: they go through one tower
        # and pack tighter together.
        sources_Q = self.records.sources[rows]
        sources_N = np.concatenate([sources_Q, np.repeat(sources_Q, num_documents_Q)])
        parts: list[tuple[Features, NDArray[np.int64]]] = []
        for group in groups:
            slots = group[np.isin(group, assignment.slots[self.rank], assume_unique=True)]
            if len(slots):
                parts.append((self._features(batch, slots, sources_N), slots))
            else:  # a spare row: a rank that doesn't call a sharded tower leaves the others waiting for its shards
                parts.append((self._features(batch, group[:1], sources_N), np.full(1, -1, dtype=np.int64)))

        return FeaturedBatch(
            batch.record_ids,
            BatchStructure.of(batch, source=int(sources_Q[0]) if self.tells_source else None),
            count_masked(batch) if self.counts_masked else None,
            assignment,
            tuple(parts),
            self.sampler.share(number, self.accumulated),
        )

    def _features(self, batch: ContrastiveBatch, slots: NDArray[np.int64], sources_N: NDArray[np.int64]) -> Features:
        """Return the features of items of one modality in the order of their slots, which ascend."""
        items, num_queries = (*batch.queries, *batch.documents), len(batch.queries)
        modality = modality_of(items[slots[0]])
        # Sides apart, as each has prompts and limits of its own; queries have the lower slots.
        both: list[tuple[Side, NDArray[np.int64]]] = [
            ("query", slots[slots < num_queries]),
            ("document", slots[slots >= num_queries]),
        ]
        sides = [(side, side_slots) for side, side_slots in both if len(side_slots)]

        if self.stored is not None and self.stored.holds(modality):  # embeddings are read, nothing is tokenized
            ids_N = np.concatenate([batch.query_ids_Q, batch.document_ids_D])
            vectors = [self.stored.of_kind(modality, side, ids_N[side_slots]) for side, side_slots in sides]
            return stored_features(np.concatenate(vectors))
        if not self.prompted:
            return Features.concat(
                [self.encoder.featurize([items[slot] for slot in side_slots], side) for side, side_slots in sides]
            )

        # The texts of each source get its own prompts, source by source; then the rows go back to the order of slots.
        parts, slots_of_parts = [], []
        for side, side_slots in sides:
            for source in np.unique(sources_N[side_slots]).tolist():
                source_slots = side_slots[sources_N[side_slots] == source]
                parts.append(self.prompted[source].featurize([items[slot] for slot in source_slots], side))
                slots_of_parts.append(source_slots)
        features = Features.concat(parts)
        in_order = features.take(np.argsort(np.concatenate(slots_of_parts)))
        return replace(in_order, num_truncated=features.num_truncated)  # `take` doesn't know which rows were cut


def open_batches(run: Run) -> AbstractContextManager[Batches]:
    """Compute what batches carry beside their rows, and start what makes them: this process, or workers that run ahead.

    Mining and refreshed hard batches change the batches before some epochs. Each is a level around the next one: before
    it computes with the model, the workers inside it end; afterwards they start anew, up to its next epoch.
    """
    config, data, output, plan = run.config, run.data, run.output, run.plan
    encode = run.evaluations.encode
    stored = None if run.frozen is None else run.frozen.stored(encode)
    if run.teacher is not None:
        run.words.doing = "asking the teacher"
    source = replace(batch_source(run, ask(run, run.teacher)), stored=stored)
    run.words.doing = "training"

    works: list[Refresh] = []
    if config.mine != "never":
        works.append(MiningRefresh(config, data, encode, output.mining))
    if run.hard is not None and config.hard_refresh != "once":
        works.append(HardBatchRefresh(config, data, encode, output.hard_vectors, plan.dtype, plan.batch.total))
    num_batches = run.step_batches(plan.steps.total - 1).stop

    def open_level(source: BatchSource, end: int, level: int = 0) -> AbstractContextManager[Batches]:
        end = min(end, num_batches)
        # Mining is the outer level, as it changes the records; hard batches only change which of them meet.
        if level < len(works):

            def open_inner(changed: BatchSource, inner_end: int) -> AbstractContextManager[Batches]:
                return open_level(changed, min(end, inner_end), level + 1)

            return RefreshedBatches(works[level], source, open_inner, run.ranks)
        if source.records is not data.records:  # mined negatives: the teacher may not have been asked about them
            teacher = teacher_of(run, source.records)
            source = replace(source, answers=ask(run, teacher))
        if not plan.num_workers:
            return nullcontext(source)
        return BatchLoader(
            source,
            num_workers=plan.num_workers,
            batches_ahead=plan.batches_ahead,
            num_batches=end,
            pin_memory=config.dataloader_pin_memory,
        )

    return open_level(source, num_batches)


def batch_source(run: Run, answers: Answers | None) -> BatchSource:
    """Return what makes the batches of a run in this process, with a teacher's answers where it has one."""
    config, ranks = run.config, run.ranks
    masks = any("mask_false_negatives" in section.model_fields for section in config.run_loss().sections)
    return BatchSource(
        run.data.records,
        run.sampler,
        run.encoder,
        run.device,
        Augmentation(config.image_augmentation, config.image_flip, config.seed),
        rank=ranks.rank,
        world_size=ranks.world_size,
        answers=answers,
        counts_masked=config.mask_false_negatives and masks,
        prompted=prompted(config, run.encoder),
        tells_source=config.source_batches == "single" and len(config.data or ()) > 1,
        accumulated=run.plan.batch.accumulated,
    )


def frozen_items(run: Run) -> FrozenItems | None:
    """Find the training items whose tower is frozen, so that they are encoded once; None where the search is off."""
    config, plan = run.config, run.plan
    is_only_planned = plan.way.mode is not None and run.sharded is None  # such a model may not fit the device
    if config.embedding_cache == "never" or (is_only_planned and run.device.type != "cpu"):
        return None
    is_shared = config.embedding_cache != "auto"  # the user named a folder
    reason = ""
    if prompted(config, run.encoder):
        reason = "sources of data have prompts of their own"
    elif config.mine_corpus is not None:
        reason = "mine_corpus brings further documents"
    if reason:
        return FrozenItems((), (f"embedding_cache has no effect: {reason}",) if is_shared else ())
    return find_frozen(
        run.encoder,
        run.data.records,
        home_path(config.embedding_cache) if is_shared else run.output.frozen_embeddings,
        is_shared=is_shared,
        epochs=plan.steps.total / plan.steps.per_epoch,
        augments=Augmentation(config.image_augmentation, config.image_flip, config.seed).acts,
        precision=plan.dtype,
        passes=Passes(run.device, run.autocast_dtype),
        sharded=run.sharded,
    )


def teacher_of(run: Run, records: RecordTable, folder: Path | None = None) -> Teacher | None:
    """Return the teacher, not asked yet, for some records; its answers go to `folder` or to the run's own."""
    config = run.config
    if config.teacher_model_name is None:
        return None
    loss = config.run_loss()
    return find_teacher(
        teacher_keys(config, config.teacher_model_name, config.teacher_revision),
        records,
        TeacherUse(loss.reads_teacher(config), teacher_gives_scores(config), loss.score_bounds),
        folder or (run.output.teacher if config.teacher_cache == "auto" else home_path(config.teacher_cache)),
        limits=image_limits(config),
        devices=Devices.of(run.runtime.machine, run.plan.world_size),
    )


def ask(run: Run, teacher: Teacher | None) -> Answers | None:
    """Return the teacher's answers, from disk where they are still true."""
    if teacher is None:
        return None
    return teacher.answers(run.device, run.ranks, run.autocast_dtype, run.stop.poll)


def estimated_costs(items: Sequence[Item], max_length: int | None) -> NDArray[np.int64]:
    """Estimate the relative costs of items before anything is tokenized or decoded; comparable within a modality only.

    Args:
        max_length: Longest text in tokens; None where there is no limit.

    Returns:
        (N,): characters of a text as far as the encoder reads it, plus a constant for each picture after the first.
    """
    longest = np.iinfo(np.int64).max if max_length is None else max_length * CHARACTERS_PER_TOKEN
    texts = [item.text if isinstance(item, Composed) else "" if isinstance(item, Image) else item for item in items]
    lengths_N = np.array([len(text) for text in texts], dtype=np.int64)
    further_N = [len(item.images) - 1 if isinstance(item, Composed) else 0 for item in items]
    costs_N: NDArray[np.int64] = np.minimum(lengths_N, longest)
    return costs_N + PICTURE_CHARACTERS * np.array(further_N, dtype=np.int64)


def assign_rows(groups: Sequence[NDArray[np.int64]], costs_N: NDArray[np.int64], world_size: int) -> RowAssignment:
    """Give every rank rows of about equal cost, from nothing but the batch itself.

    A query and its documents need not stay together, since the loss runs over the whole batch.

    Args:
        groups: Slots of each modality; together every slot once.
        costs_N: Estimated cost of each slot, compared within a group only.

    Returns:
        Numbers of rows that differ between ranks by at most one, in every group and over all.
    """
    if world_size == 1:
        return RowAssignment.alone(len(costs_N))
    owners_N = np.empty(len(costs_N), dtype=np.int64)
    first_rank = 0
    for slots in groups:  # apart: modalities cost differently, and sharded models need like calls on all ranks
        # By falling cost, in laps of one row per rank: the costliest row of a lap goes to the least loaded rank.
        order = slots[np.argsort(-costs_N[slots], kind="stable")]
        num_left = len(order) % world_size
        loads = np.zeros(world_size, dtype=np.int64)
        for lap in order[: len(order) - num_left].reshape(-1, world_size):
            ranks = np.argsort(loads, kind="stable")
            owners_N[lap] = ranks
            loads[ranks] += costs_N[lap]
        # The rest of a group goes to the ranks that the rest of the group before left out.
        owners_N[order[len(order) - num_left :]] = (first_rank + np.arange(num_left)) % world_size
        first_rank = (first_rank + num_left) % world_size
    return RowAssignment(tuple(np.flatnonzero(owners_N == rank) for rank in range(world_size)))


def count_masked(batch: ContrastiveBatch) -> int:
    """Count the (query, document) pairs of a batch that the loss masks as copies, in O(P log P) for P positive pairs.

    A document is masked for a query if its content is that of the query, or of a positive of a query with the same
    content. Explicit positives aren't counted. The result is the number of cells that `false_negative_mask` marks,
    without the Q x D matrix: pairs of contents, each times how often both contents stand in the batch.
    """
    # Equal contents are one: pairs of distinct contents are at most P + min(Q, D), however often each is repeated.
    query_ids, query_rows, query_counts = _contents(batch.query_ids_Q)
    document_ids, document_rows, document_counts = _contents(batch.document_ids_D)
    positives_P2 = np.unique(batch.positives_P2, axis=0)
    known = np.stack([query_rows[positives_P2[:, 0]], document_rows[positives_P2[:, 1]]], axis=1)
    # A document that is the query itself counts too: equal contents have equal ids on both sides.
    _, same_queries, same_documents = np.intersect1d(query_ids, document_ids, assume_unique=True, return_indices=True)
    itself = np.stack([same_queries, same_documents], axis=1)
    related = np.unique(np.concatenate([known, itself]), axis=0)
    return int((query_counts[related[:, 0]] * document_counts[related[:, 1]]).sum()) - len(positives_P2)


def _contents(ids_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct ids (U,), the index of each row's id among them (N,), and how many rows have each (U,)."""
    contents, rows_N, counts = np.unique(ids_N, return_inverse=True, return_counts=True)
    return contents, rows_N.reshape(-1), counts
