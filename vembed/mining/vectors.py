"""Vectors of distinct items on disk, in blocks: each is written whole, and a rerun encodes only what is missing.

A block is encoded by itself, so that its vectors don't depend on which others were there already.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vembed.errors import MachineError
from vembed.evaluation.array_file import ArrayFile
from vembed.evaluation.encode import refuse_several_vectors, values_of
from vembed.evaluation.index import check_finite
from vembed.evaluation.provenance import SAMPLE_TEXTS, model_key, vectors_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.evaluation.encode import ItemEncoder
    from vembed.evaluation.provenance import Key
    from vembed.mining.task import DistinctItems

BLOCK_ROWS = 65_536
"""Vectors of a file: 100 MB at 384 dimensions. What a kill costs is one such block."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StoredVectors:
    """The vectors of one side, mapped from their files."""

    key: Key  # what they are made of
    blocks: tuple[NDArray[np.float32], ...]  # of BLOCK_ROWS each, the last of fewer

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors of some rows, (rows, E)."""
        found = np.empty((len(rows), self.blocks[0].shape[1]), dtype=np.float32)
        numbers = rows // BLOCK_ROWS
        for number in np.unique(numbers).tolist():
            own = numbers == number
            found[own] = self.blocks[number][rows[own] - number * BLOCK_ROWS]
        return found


def shared_model_key(encode: ItemEncoder) -> Key:
    """Return what the encoder is, as the first rank sees it: where weights were received, configurations may differ."""
    return encode.ranks.gather_objects(model_key(encode.encoder))[0]


def stored_vectors(items: DistinctItems, side: Side, encode: ItemEncoder, model: Key, folder: Path) -> StoredVectors:
    """Encode what has no vector yet, on all ranks, and return all vectors.

    Args:
        model: What the encoder is (`shared_model_key`).
        folder: Where the blocks are; all ranks must see it.

    Raises:
        ConfigError: The encoder gives several vectors for an item.
        MachineError: The vectors can't be written.
        NonFiniteError: A vector holds NaN or infinity; its block isn't kept.
    """
    refuse_several_vectors(encode.encoder)
    step = max(1, len(items) // SAMPLE_TEXTS)
    sample = items.take(np.arange(0, len(items), step)[:SAMPLE_TEXTS])
    key = {**vectors_key(encode.encoder, model, sample, side, autocast_dtype=encode.autocast_dtype)}
    key["items"] = items.digest
    starts = list(range(0, len(items), BLOCK_ROWS))
    files = [_file(folder, side, number) for number in range(len(starts))]
    keys = [{**key, "first": start} for start in starts]
    counts = [min(BLOCK_ROWS, len(items) - start) for start in starts]
    missing = encode.ranks.from_first(
        lambda: [number for number in range(len(starts)) if not _is_true(files[number], keys[number], counts[number])]
    )
    if missing:
        _encode(items, side, encode, missing, files, keys)
        encode.ranks.gather_objects(None)  # all wait: the first has written the last block
    for file in files:
        if not all(encode.ranks.gather_objects(file.array.is_file())):
            raise MachineError(
                f"{file.array} isn't seen by all processes: it must lie on a file system that all machines share"
            )
    return StoredVectors(key, tuple(file.read(mapped=True) for file in files))


def _encode(
    items: DistinctItems,
    side: Side,
    encode: ItemEncoder,
    missing: list[int],
    files: list[ArrayFile],
    keys: list[Key],
) -> None:
    """Encode blocks and write each as soon as it is whole."""
    started = time.perf_counter()

    def batches() -> Iterator[list[Item]]:
        for number in missing:
            start = number * BLOCK_ROWS
            yield items.take(np.arange(start, min(start + BLOCK_ROWS, len(items))))

    done = 0
    with closing(encode.stream(batches(), side)) as streaming:
        for number, found in zip(missing, streaming, strict=True):
            vectors_NE = values_of(found)
            done += len(vectors_NE)
            if encode.ranks.is_first:
                check_finite(vectors_NE, side)
                rows, dimension = vectors_NE.shape
                files[number].write(keys[number], (rows, dimension), (vectors_NE,), dict)
            rate = done / (time.perf_counter() - started)
            _log.info("%s vectors: block %d of %d, %.0f a second", side, number + 1, len(files), rate)


def _file(folder: Path, side: Side, number: int) -> ArrayFile:
    return ArrayFile(folder, f"{side}-{number:05}", "the vectors", "choose another output")


def _is_true(file: ArrayFile, key: Key, rows: int) -> bool:
    content, reason = file.check(key, rows=rows)
    if reason:
        _log.info("%s is made again: %s", file.array.name, reason)
    return content is not None
