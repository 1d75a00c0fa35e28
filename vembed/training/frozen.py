"""Embeddings of a frozen tower: each item is encoded once, and read from disk in every step.

A tower without trainable weights and without dropout makes the same of an item in every epoch, where the item itself
isn't changed at random.

1. `find_frozen` looks which kinds of items go through such a tower: it encodes one of each, and sees whether the result
   needs a gradient and whether a random number was drawn.
2. `FrozenItems.stored` encodes every distinct item of the training records, before the first step, and writes the
   vectors to a file; where a file of a run before is still true, nothing is encoded. All ranks encode, the first one
   writes, all read the same file.
3. `StoredEmbeddings.features` is a batch's view of the file, which is mapped into memory. A stored row costs no tokens,
   and neither tokenizer, image decoder nor tower is called for it.

A file is true while the frozen weights, the model's settings, the items, what tokenizer or image processor make of a
sample, the side and the precision are those of its key; its hash tells whether it is damaged. Items are known by
`content_id`: what looks the same is one item.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from vembed.batch import MODALITY_WORDS, Features, Modality, Side, content_id, modality_of
from vembed.errors import MachineError
from vembed.evaluation.array_file import FREE_SHARE, ArrayFile
from vembed.evaluation.index import check_finite
from vembed.evaluation.provenance import digest, features_digest, model_key
from vembed.gradcache.calls import Pool, Retention, plan_calls
from vembed.gradcache.chunking import ChunkBudget
from vembed.gradcache.replay import RngState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from vembed.batch import Item
    from vembed.data.records import Record, RecordTable
    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.encode import ItemEncoder
    from vembed.evaluation.provenance import Key
    from vembed.gradcache.calls import Passes
    from vembed.models.encoder import Encoder

BLOCK_ROWS = 8192
"""Items that are encoded, gathered and written at a time."""

SAMPLE_ITEMS = 16
"""Items of which the key holds what tokenizer or image processor make."""

STORED = "stored"
"""Name of the features that are embeddings already."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrozenSide:
    """The distinct items of one kind and side."""

    modality: Modality
    side: Side
    ids_U: NDArray[np.int64]  # their identities, ascending, int64
    # where each was found first: number of the record, place among its query, positives and negatives
    places_U2: NDArray[np.int64]
    dimension: int  # E
    key: Key  # what their embeddings are made of

    @property
    def num_bytes(self) -> int:
        """Size of the embeddings."""
        return 4 * len(self.ids_U) * self.dimension

    def file(self, folder: Path) -> ArrayFile:
        """Return the file: each key has its own, so that runs can share a folder."""
        name = f"{self.modality.replace('+', '-')}-{self.side}-{digest(self.key)[:16]}"
        return ArrayFile(folder, name, "the embeddings of a frozen tower", "set embedding_cache to never")


@dataclass(frozen=True, slots=True)
class StoredEmbeddings:
    """Embeddings that batches read."""

    # identities, ascending, and their embeddings (U, E) of each kind and side
    tables: Mapping[tuple[Modality, Side], tuple[NDArray[np.int64], NDArray[np.float32]]]

    def holds(self, modality: Modality) -> bool:
        """Return whether items of a kind are here, on either side."""
        return any(kind == modality for kind, _ in self.tables)

    def features(self, modality: Modality, side: Side, ids_R: NDArray[np.int64]) -> Features:
        """Return the embeddings of items of the training records as features of no tokens."""
        ids_U, vectors_UE = self.tables[modality, side]
        rows = np.searchsorted(ids_U, ids_R)
        assert (ids_U[rows] == ids_R).all(), "every item of the training records was encoded"
        return Features({}, np.zeros(len(ids_R), dtype=np.int64), {STORED: np.asarray(vectors_UE[rows])})


def stored_pool(features: Features, slots: NDArray[np.int64]) -> Pool:
    """Return rows whose embeddings are known as the engine takes them."""
    return Pool(_read_stored, _collate_stored, features, slots)


def is_stored(features: Features) -> bool:
    """Return whether features are embeddings already."""
    return STORED in features.per_row


def _collate_stored(features: Features, rows: NDArray[np.int64], width: int) -> dict[str, Tensor]:  # noqa: ARG001
    return {STORED: torch.from_numpy(np.ascontiguousarray(features.per_row[STORED][rows]))}


def _read_stored(inputs: dict[str, Tensor]) -> Tensor:
    return inputs[STORED]


@dataclass(frozen=True, slots=True)
class FrozenItems:
    """What of the training records is encoded once."""

    sides: tuple[FrozenSide, ...]  # the items; none where nothing is
    notes: tuple[str, ...]  # why, one plain sentence each
    records: RecordTable  # where the items are
    folder: Path

    def stored(self, encode: ItemEncoder) -> StoredEmbeddings | None:
        """Return the embeddings, from disk where they are still true, else encoded now; None where nothing is frozen.

        Args:
            encode: Encodes them, on all ranks; its weights may be sharded.

        Raises:
            DataError: A picture can't be read any more.
            MachineError: The embeddings can't be written.
            NonFiniteError: An embedding holds NaN or infinity.
        """
        if not self.sides:
            return None
        tables = {}
        for side in self.sides:
            self._make(side, encode)
            _refuse_unseen(side.file(self.folder), encode.ranks)
            tables[side.modality, side.side] = side.ids_U, side.file(self.folder).read(mapped=True)
        return StoredEmbeddings(tables)

    def _make(self, own: FrozenSide, encode: ItemEncoder) -> None:
        """Leave a true file."""
        ranks, file, kind = encode.ranks, own.file(self.folder), MODALITY_WORDS[own.modality][1]
        is_there, reason = ranks.from_first(lambda: self._look(own))
        if is_there:
            _log.info("embeddings of %d frozen %s unchanged, read from %s", len(own.ids_U), kind, file.array)
            return
        again = f" again ({reason})" if reason else ""
        _log.info("encoding %d %s of a frozen tower%s: %s", len(own.ids_U), kind, again, file.array)
        started, before = time.perf_counter(), encode.num_truncated[own.side]
        blocks = self._blocks(own, encode)
        if ranks.is_first:
            shape = len(own.ids_U), own.dimension
            file.write(own.key, shape, blocks, lambda: {"seconds": time.perf_counter() - started})
        else:
            for _ in blocks:
                pass
        num_truncated = sum(ranks.gather_objects(encode.num_truncated[own.side] - before))  # all wait: it is whole now
        cut = f", {num_truncated} were longer than the model takes and were cut" if num_truncated else ""
        _log.info("%d %s encoded in %.1f s%s", len(own.ids_U), kind, time.perf_counter() - started, cut)

    def _look(self, own: FrozenSide) -> tuple[bool, str]:
        content, reason = own.file(self.folder).check(own.key, rows=len(own.ids_U))
        return content is not None, reason

    def _blocks(self, own: FrozenSide, encode: ItemEncoder) -> Iterator[NDArray[np.float32]]:
        """Encode in blocks; only the first rank has all vectors."""
        for start in range(0, len(own.ids_U), BLOCK_ROWS):
            vectors_NE = encode.table(_take(self.records, own.places_U2[start : start + BLOCK_ROWS]), own.side)
            if encode.ranks.is_first:
                check_finite(vectors_NE, own.side)
            yield vectors_NE


def _refuse_unseen(file: ArrayFile, ranks: Ranks) -> None:
    """Refuse a folder that another machine doesn't see."""
    seen = ranks.gather_objects(file.array.is_file())
    if not all(seen):
        raise MachineError(
            f"{file.array}: process 0 sees this file and process {seen.index(False)} doesn't; the folder must be on a "
            f"file system that all machines share, or {file.advice}"
        )


def find_frozen(
    encoder: Encoder,
    records: RecordTable,
    folder: Path,
    *,
    is_shared: bool,
    epochs: float,
    augments: bool,
    precision: str,
    passes: Passes,
    sharded: ShardedEncoder | None = None,
) -> FrozenItems:
    """Return what of the training records is encoded once.

    Args:
        encoder: As it will be trained.
        is_shared: Whether the user named the folder: runs share it, so that everything frozen is kept there.
        epochs: How often this run sees its records.
        augments: Whether pictures are changed at random.
        precision: What the encoder computes in.
        passes: Encode as the steps will.
        sharded: The handle of an encoder whose weights the ranks share; all of them must call this.
    """
    reasons = _unfit(encoder)
    if reasons:
        return FrozenItems((), reasons if is_shared else (), records, folder)
    items = _Items()
    for row, record in enumerate(records):
        items.add(row, record)
    sides: list[FrozenSide] = []
    notes: list[str] = []
    model: Key = {}
    for modality in sorted({kind for kind, _ in items.first}):
        own = [side for side in get_args(Side) if (modality, side) in items.first]
        samples = {side: _take(records, items.places(modality, side)[:1])[0] for side in own}
        is_frozen, is_random = _probe(encoder, samples, passes)
        if sharded is not None:
            sharded.abandon()
            sharded.reshard()
        if not is_frozen:
            continue
        reason = _why_not(items, modality, is_random=is_random, augments=augments, epochs=epochs, is_shared=is_shared)
        if reason:
            notes.append(f"embedding_cache: no weight behind the {MODALITY_WORDS[modality][1]} trains, but {reason}")
            continue
        model = model or model_key(encoder, frozen_only=True)
        key = {**model, "precision": precision}
        sides += [_side(encoder, records, items, (modality, side), key) for side in own]
    if not sides and not notes and is_shared:
        notes.append("embedding_cache has no effect: every tower of the model trains")
    sides, room = _with_room(sides, folder, is_shared=is_shared)
    return FrozenItems(tuple(sides), (*notes, *room), records, folder)


def _unfit(encoder: Encoder) -> tuple[str, ...]:
    """Say what rules keeping out before anything is looked at; empty where nothing does."""
    parameters = list(encoder.parameters())
    if any(parameter.is_meta for parameter in parameters):
        raise ValueError("frozen towers are looked for once the encoder has its weights")
    if not any(parameter.ndim > 1 and not parameter.requires_grad for parameter in parameters):
        return ("embedding_cache has no effect: all weights of the model train",)
    if encoder.multi_vector:
        return ("embedding_cache has no effect: it keeps one vector for each row, and the model gives several",)
    if encoder.mixes_rows():
        return ("embedding_cache has no effect: batch normalisation makes embeddings depend on the batch",)
    if any(parameter.dtype == torch.float64 for parameter in parameters):
        return ("embedding_cache has no effect: it would round the embeddings of torch_dtype float64 to float32",)
    return ()


def _probe(encoder: Encoder, samples: Mapping[Side, Item], passes: Passes) -> tuple[bool, bool]:
    """Encode an item of each side as training would; return whether all need no gradient, and if one is random."""
    was_training, alone = encoder.training, np.zeros(1, dtype=np.int64)
    before = RngState.capture(passes.device)
    encoder.train()
    are_frozen = []
    try:
        for side, item in samples.items():
            pool = Pool(encoder, encoder.collate, encoder.featurize([item], side), alone)
            calls = plan_calls([pool], alone, ChunkBudget(1, 1), Retention(0.0), passes.device)
            passes.first(calls, num_vectors=1)
            are_frozen += [call.frozen for call in calls]
        after = RngState.capture(passes.device)
    finally:
        encoder.train(was_training)
        before.restore()
    return all(are_frozen), not before.equals(after)


def _why_not(
    items: _Items, modality: Modality, *, is_random: bool, augments: bool, epochs: float, is_shared: bool
) -> str:
    """Say why items of a frozen tower are encoded in every step nevertheless; empty where they aren't."""
    if is_random:
        return "their tower draws random numbers (dropout): they are encoded in every step"
    if augments and modality != "text":
        return "image_augmentation or image_flip changes the pictures: they are encoded in every step"
    uses = epochs * sum(count for (kind, _), count in items.uses.items() if kind == modality)
    distinct = sum(len(places) for (kind, _), places in items.first.items() if kind == modality)
    if uses <= distinct and not is_shared:
        return f"this run sees each of the {distinct} only once: they are encoded as they come"
    return ""


def _side(encoder: Encoder, records: RecordTable, items: _Items, kind: tuple[Modality, Side], key: Key) -> FrozenSide:
    (modality, side), first = kind, items.first[kind]
    ids_U = np.sort(np.fromiter(first, dtype=np.int64, count=len(first)))
    places_U2 = np.array([first[identity] for identity in ids_U.tolist()], dtype=np.int64)
    sample = _take(records, places_U2[:: max(1, len(places_U2) // SAMPLE_ITEMS)][:SAMPLE_ITEMS])
    own: Key = {
        **key,
        "items": hashlib.sha256(ids_U.astype("<i8").tobytes()).hexdigest(),
        "preprocessing": features_digest(encoder, sample, side),
        "side": side,
    }
    return FrozenSide(modality, side, ids_U, places_U2, encoder.dimension, own)


def _with_room(sides: list[FrozenSide], folder: Path, *, is_shared: bool) -> tuple[list[FrozenSide], list[str]]:
    """Return what the disk has room for, and say so; a folder that the user named must have it."""
    if not sides:
        return [], []
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    wanted, free = sum(side.num_bytes for side in sides), shutil.disk_usage(there).free
    missing = [side for side in sides if not side.file(folder).array.exists()]
    if FREE_SHARE * sum(side.num_bytes for side in missing) > free and not is_shared:
        return [], [f"embedding_cache: not used, as {there} has {free} bytes free and {wanted} are wanted"]
    counts = " and ".join(f"{len(side.ids_U)} {MODALITY_WORDS[side.modality][1]} ({side.side})" for side in sides)
    note = (
        f"embedding_cache: {counts} of a frozen tower are encoded once, before the first step, and read from "
        f"{folder} in every step: {wanted} bytes"
    )
    return sides, [note]


@dataclass(slots=True)
class _Items:
    """The distinct items of records."""

    # where each identity was found first, by kind and side
    first: dict[tuple[Modality, Side], dict[int, tuple[int, int]]] = field(default_factory=dict)
    # how many items there are, repeated ones counted again
    uses: Counter[tuple[Modality, Side]] = field(default_factory=Counter)

    def add(self, row: int, record: Record) -> None:
        """Count the items of a record."""
        for place, item in enumerate(_items_of(record)):
            kind: tuple[Modality, Side] = modality_of(item), "query" if place == 0 else "document"
            self.uses[kind] += 1
            self.first.setdefault(kind, {}).setdefault(content_id(item), (row, place))

    def places(self, modality: Modality, side: Side) -> NDArray[np.int64]:
        """Return where the distinct items of a kind and side are, (U, 2)."""
        return np.array(list(self.first[modality, side].values()), dtype=np.int64)


def _items_of(record: Record) -> tuple[Item, ...]:
    return (record.query, *record.positives, *record.negatives)


def _take(records: RecordTable, places_N2: NDArray[np.int64]) -> Sequence[Item]:
    """Return the items at some places of the records."""
    rows, places = places_N2[:, 0], places_N2[:, 1].tolist()
    return [_items_of(record)[place] for record, place in zip(records.take(rows), places, strict=True)]
