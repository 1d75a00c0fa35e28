"""Vectors by the identity of what they are of, in blocks on disk that are each whole or not there.

1. A block is an `ArrayFile`: its record lists the identities; its key is what made the vectors, and the list's hash.
2. What no whole block holds is computed and written as further blocks: a process that was killed continues after its
   last block, and a set that has grown pays for its new items alone.
3. All ranks compute, the first one writes, all map the same files into memory.

Shape legend: U distinct identities, R wanted rows, T dim of the vectors.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vembed.batch import ranges
from vembed.errors import MachineError
from vembed.evaluation.array_file import ArrayFile
from vembed.evaluation.provenance import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.provenance import Key

Make: TypeAlias = "Callable[[NDArray[np.int64]], NDArray[np.float32]]"
"""Computes the vectors of some places of the wanted identities; called on all ranks, the first one's are kept."""

PIECE_ROWS = 8192
"""Vectors that are computed, gathered and written at a time; a block has at least so many."""

MOST_NEW_BLOCKS = 64
"""Blocks that a set is cut into: each keeps a file open, and a killed process loses at most one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VectorTable:
    """Vectors of identities, read from files that are mapped into memory."""

    ids_U: NDArray[np.int64]  # ascending
    places_U2: NDArray[np.int64]  # block and row of each
    blocks: tuple[NDArray[np.float32], ...]  # (rows, T) each

    def take(self, ids_R: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the vectors of identities that are all here, (R, T)."""
        found_R = np.searchsorted(self.ids_U, ids_R)
        assert (self.ids_U[found_R] == ids_R).all(), "vectors of all that is asked for were stored"
        blocks_R, rows_R = self.places_U2[found_R].T
        vectors_RT = np.empty((len(ids_R), self.blocks[0].shape[1]), dtype=np.float32)
        for block in np.unique(blocks_R):
            own = blocks_R == block
            vectors_RT[own] = self.blocks[block][rows_R[own]]
        return vectors_RT


@dataclass(frozen=True, slots=True)
class VectorStore:
    """The blocks of one kind of vectors in a folder."""

    folder: Path  # made when the first block is written
    kind: str  # what the names of its files begin with
    key: Key  # what the vectors are made of, beside the items
    what: str  # what they are called in messages
    advice: str  # what else the user can do when they can't be written

    @property
    def name(self) -> str:
        """What the names of all blocks begin with: each key has its own, so that runs can share a folder."""
        return f"{self.kind}-{digest(self.key)[:16]}"

    @property
    def num_bytes(self) -> int:
        """Bytes of vectors that lie there, whole or not."""
        return sum(path.stat().st_size for path in self.folder.glob(f"{self.name}-*.npy"))

    def block(self, ids_B: NDArray[np.int64]) -> ArrayFile:
        """Return the file of a block of identities."""
        return self._file(f"{self.name}-{_ids_hash(ids_B)[:16]}")

    def table(self, ids_U: NDArray[np.int64], dimension: int, make: Make, ranks: Ranks) -> VectorTable:
        """Return the vectors of identities, those that no whole block holds computed now.

        Args:
            ids_U: Distinct, ascending; the same on all ranks, which must all call this.
            dimension: T.

        Raises:
            MachineError: They can't be written, or a process doesn't see the folder.
        """
        names, reasons = ranks.from_first(self._check)
        table = self._open(names, ranks)
        missing = np.flatnonzero(~np.isin(ids_U, table.ids_U, assume_unique=True))
        if not len(missing):
            _log.info("%s: %d unchanged, read from %s", self.what, len(ids_U), self.folder)
            return table
        again = f" again ({'; '.join(sorted(set(reasons)))})" if reasons else ""
        _log.info("%s: computing %d of %d%s: %s", self.what, len(missing), len(ids_U), again, self.folder)
        return self._open((*names, *self._make(ids_U, missing, dimension, make, ranks)), ranks)

    def _make(
        self, ids_U: NDArray[np.int64], missing: NDArray[np.int64], dimension: int, make: Make, ranks: Ranks
    ) -> list[str]:
        """Compute and write what is missing, and return the names of the new blocks."""
        rows = max(PIECE_ROWS, -(-len(missing) // MOST_NEW_BLOCKS))
        names = []
        for start in range(0, len(missing), rows):
            places_B = missing[start : start + rows]
            ids_B, pieces = ids_U[places_B], _pieces(places_B, make)
            file = self.block(ids_B)
            names.append(file.name)
            if ranks.is_first:
                key = {**self.key, "items": _ids_hash(ids_B)}
                listed = base64.b64encode(ids_B.astype("<i8").tobytes()).decode()
                file.write(key, (len(ids_B), dimension), pieces, lambda listed=listed: {"ids": listed})  # type: ignore[misc]
            else:
                for _ in pieces:
                    pass
            ranks.gather_objects(None)  # all wait: it is whole now
        return names

    def _check(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the blocks that are whole and true, and why others aren't."""
        names, reasons = [], []
        for record in sorted(self.folder.glob(f"{self.name}-*.json")):
            file = self._file(record.stem)
            try:
                ids_B = _listed_ids(file)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reasons.append(f"{record.name} can't be read: {error}")
                continue
            content, reason = file.check({**self.key, "items": _ids_hash(ids_B)}, rows=len(ids_B))
            names += [record.stem] if content is not None else []
            reasons += [reason] if reason else []
        return tuple(names), tuple(reasons)

    def _open(self, names: Sequence[str], ranks: Ranks) -> VectorTable:
        """Map whole blocks into memory."""
        files = [self._file(name) for name in names]
        unseen = [file.array for file in files if not file.array.is_file()]
        everyone = ranks.gather_objects(unseen[0] if unseen else None)
        if any(everyone):
            rank = next(rank for rank, path in enumerate(everyone) if path)
            raise MachineError(
                f"{everyone[rank]}: process 0 sees this file and process {rank} doesn't; the folder must be on a file "
                f"system that all machines share, or {self.advice}"
            )
        ids = [_listed_ids(file) for file in files]
        counts = np.array([len(own) for own in ids], dtype=np.int64)
        ids_U, first_U = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *ids]), return_index=True)
        places_N2 = np.stack([np.repeat(np.arange(len(ids)), counts), ranges(np.zeros_like(counts), counts)], axis=1)
        return VectorTable(ids_U, places_N2[first_U], tuple(file.read(mapped=True) for file in files))

    def _file(self, name: str) -> ArrayFile:
        return ArrayFile(self.folder, name, self.what, self.advice)


def _pieces(places_B: NDArray[np.int64], make: Make) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(places_B), PIECE_ROWS):
        yield make(places_B[start : start + PIECE_ROWS])


def _ids_hash(ids_B: NDArray[np.int64]) -> str:
    return hashlib.sha256(ids_B.astype("<i8").tobytes()).hexdigest()


def _listed_ids(file: ArrayFile) -> NDArray[np.int64]:
    """Return the identities that a block lists.

    Raises:
        OSError, ValueError, KeyError, TypeError: Its record is damaged.
    """
    listed = json.loads(file.record.read_text("utf-8"))["ids"]
    return np.frombuffer(base64.b64decode(listed, validate=True), dtype="<i8").astype(np.int64)
