"""Embeddings of a frozen tower: each item is encoded once, and read from disk in every step.

A tower without trainable weights and without dropout makes the same of an item in every epoch, where the item itself
isn't changed at random.

1. `find_frozen` looks which kinds of items go through such a tower: it encodes one of each, and sees whether the result
   needs a gradient and whether a random number was drawn.
2. `FrozenItems.stored` encodes every distinct item of the training records before the first step (vectors/store.py);
   what an earlier run has left is read.
3. `stored_features` is a batch's view of the files. A stored row costs no tokens, and neither tokenizer, image decoder
   nor tower is called for it.

Of the model's weights only the frozen ones make a file untrue.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vembed.batch import MODALITY_WORDS, Features
from vembed.gradcache.chunks import ChunkBudget, Pool, plan_calls
from vembed.gradcache.passes import RngState
from vembed.vectors.items import ItemVectors, StoredSide, distinct_items
from vembed.vectors.provenance import model_key
from vembed.vectors.store import FREE_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.data.table import RecordTable
    from vembed.distributed.fsdp import ShardedEncoder
    from vembed.gradcache.passes import Passes
    from vembed.models.encoder import Encoder
    from vembed.vectors.encode import ItemEncoder
    from vembed.vectors.items import SideItems
    from vembed.vectors.provenance import Key

STORED = "stored"
"""Name of the features that are embeddings already."""

_log = logging.getLogger(__name__)


def stored_features(vectors_NE: NDArray[np.float32]) -> Features:
    """Return embeddings that are known as features of no tokens."""
    return Features({}, np.zeros(len(vectors_NE), dtype=np.int64), {STORED: vectors_NE})


def stored_pool(features: Features, slots: NDArray[np.int64]) -> Pool:
    """Return rows whose embeddings are known as the engine takes them."""
    # The forward pass has nothing to compute and padding nothing to pad: rows are looked up and handed on.
    return Pool(
        lambda inputs: inputs[STORED],
        lambda stored, rows, width: {STORED: torch.from_numpy(np.ascontiguousarray(stored.per_row[STORED][rows]))},  # noqa: ARG005
        features,
        slots,
    )


def is_stored(features: Features) -> bool:
    """Return whether features are embeddings already."""
    return STORED in features.per_row


@dataclass(frozen=True, slots=True)
class FrozenItems:
    """Items of the training records that are encoded once."""

    sides: tuple[StoredSide, ...]  # the items; none where nothing is
    notes: tuple[str, ...]  # why, one plain sentence each

    def stored(self, encode: ItemEncoder) -> ItemVectors | None:
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
        return ItemVectors.get(self.sides, lambda: encode, encode.ranks)


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
        return FrozenItems((), reasons if is_shared else ())
    items = distinct_items(records)
    words = {"what": "embeddings of a frozen tower", "advice": "set embedding_cache to never"}
    sides: list[StoredSide] = []
    notes: list[str] = []
    model: Key = {}
    for modality in sorted({each.modality for each in items}):
        own = [each for each in items if each.modality == modality]
        is_frozen, is_random = _probe(encoder, own, passes)
        if sharded is not None:
            # The probe has gathered weights for a backward pass that never comes.
            sharded.abandon()
            sharded.reshard()
        if not is_frozen:
            continue
        reason = _why_not(own, is_random=is_random, augments=augments, epochs=epochs, is_shared=is_shared)
        if reason:
            notes.append(f"embedding_cache: no weight behind the {MODALITY_WORDS[modality][1]} trains, but {reason}")
            continue
        model = model or model_key(encoder, frozen_only=True)
        key = {**model, "precision": precision}
        sides += [StoredSide.of(part, encoder, key, folder, **words) for part in own]
    if not sides and not notes and is_shared:
        notes.append("embedding_cache has no effect: every tower of the model trains")
    sides, room = _with_room(sides, folder, is_shared=is_shared)
    return FrozenItems(tuple(sides), (*notes, *room))


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


def _probe(encoder: Encoder, items: Sequence[SideItems], passes: Passes) -> tuple[bool, bool]:
    """Encode an item of each side as training would; return whether all need no gradient, and if one is random."""
    was_training, alone = encoder.training, np.zeros(1, dtype=np.int64)
    before = RngState.capture(passes.device)
    # As a step would: in training mode, so that dropout draws. A result without gradient is frozen, and random states
    # that differ afterwards say that it is another one each time. What was drawn here is put back.
    encoder.train()
    are_frozen = []
    try:
        for each in items:
            pool = Pool(encoder, encoder.collate, encoder.featurize(each.sample(1), each.side), alone)
            calls = plan_calls([pool], alone, ChunkBudget(1, 1), passes.device, retain=0.0)
            passes.first(calls, num_vectors=1)
            are_frozen += [call.frozen for call in calls]
        after = RngState.capture(passes.device)
    finally:
        encoder.train(was_training)
        before.restore()
    return all(are_frozen), not before.equals(after)


def _why_not(items: Sequence[SideItems], *, is_random: bool, augments: bool, epochs: float, is_shared: bool) -> str:
    """Say why items of a frozen tower are encoded in every step nevertheless; empty where they aren't."""
    if is_random:
        return "their tower draws random numbers (dropout): they are encoded in every step"
    if augments and items[0].modality != "text":
        return "image_augmentation or image_flip changes the pictures: they are encoded in every step"
    uses, distinct = epochs * sum(each.num_uses for each in items), sum(len(each) for each in items)
    if uses <= distinct and not is_shared:
        return f"this run sees each of the {distinct} only once: they are encoded as they come"
    return ""


def _with_room(sides: list[StoredSide], folder: Path, *, is_shared: bool) -> tuple[list[StoredSide], list[str]]:
    """Return what the disk has room for, and say so; a folder that the user named must have it."""
    if not sides:
        return [], []
    # The folder may not be there yet: ask the disk of the nearest parent that is.
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    wanted, free = sum(side.num_bytes for side in sides), shutil.disk_usage(there).free
    missing = wanted - sum(side.store.num_bytes for side in sides)
    if FREE_SHARE * missing > free and not is_shared:
        return [], [f"embedding_cache: not used, as {there} has {free} bytes free and {wanted} are wanted"]
    counts = " and ".join(side.items.counted for side in sides)
    note = (
        f"embedding_cache: {counts} of a frozen tower are encoded once, before the first step, and read from "
        f"{folder} in every step: {wanted} bytes"
    )
    return sides, [note]
