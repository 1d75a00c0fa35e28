"""Vectors of a benchmark: written once for each model, set and side, and read back while they are still true.

`documents` and `queries` are an `ArrayFile` each, whose record also holds how many texts were cut, and the seconds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vembed.batch import Ragged
from vembed.evaluation.array_file import ArrayFile
from vembed.evaluation.directions import count_truncated
from vembed.evaluation.encode import rows_of
from vembed.evaluation.index import check_finite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.evaluation.encode import ItemEncoder, Vectors
    from vembed.evaluation.provenance import Key

FILE_NAMES: dict[Side, str] = {"document": "documents", "query": "queries"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What encoding had to say."""

    num_truncated: int  # texts that were longer than the model takes and were cut
    seconds: float  # wall time of encoding


class SideVectors:
    """The vectors of one side of a set: read where they are still true, else encoded, once."""

    def __init__(
        self, encode: ItemEncoder, texts: Sequence[Item], side: Side, key: Key, *, folder: Path, keep: bool
    ) -> None:
        self.key = key
        self._encode = encode
        self._texts = texts
        self._side = side
        self._folder = folder
        self._keep = keep
        self._found: tuple[Vectors, Facts] | None = None

    def get(self, title: str) -> tuple[Vectors, Facts]:
        """Return the vectors and what encoding them had to say; one log line says where they came from.

        Raises:
            MachineError: When they can't be written.
            NonFiniteError: When a vector holds NaN or infinity; nothing is kept then.
        """
        if self._found is None:
            self._found = self._read_or_encode(title)
        return self._found

    def count_truncated(self) -> int:
        """Return how many of the items are cut; they are tokenized and not encoded."""
        return count_truncated(self._encode.encoder, self._texts, self._side)

    def _read_or_encode(self, title: str) -> tuple[Vectors, Facts]:
        name = FILE_NAMES[self._side]
        if self._encode.encoder.multi_vector:  # kept in memory only: the file holds one vector for each row
            rows, facts = self._encoded()
            _logger.info("%s: %d %s encoded in %.1f s", title, len(self._texts), name, facts.seconds)
            return rows, facts
        found, reason = read_vectors(self._folder, self._side, self.key, rows=len(self._texts))
        if found is not None:
            _logger.info("%s: vectors of the %s unchanged, read from %s", title, name, self._folder)
            return found
        vectors_NE, facts = self._encoded()
        assert not isinstance(vectors_NE, Ragged)
        again = f" again ({reason})" if reason else ""
        _logger.info("%s: %d %s encoded%s in %.1f s", title, len(vectors_NE), name, again, facts.seconds)
        if self._keep:
            write_vectors(self._folder, self._side, self.key, vectors_NE, facts)
        return vectors_NE, facts

    def _encoded(self) -> tuple[Vectors, Facts]:
        """Encode, and refuse NaN and infinity."""
        before, started = self._encode.num_truncated[self._side], time.perf_counter()
        vectors = self._encode(self._texts, self._side)
        facts = Facts(self._encode.num_truncated[self._side] - before, time.perf_counter() - started)
        check_finite(vectors.values if isinstance(vectors, Ragged) else vectors, self._side)
        return vectors, facts


class SharedVectors:
    """The vectors of one side of a reversed set, taken from the other side of the set itself.

    Args:
        rows: Which of them, in order; None is all.
    """

    def __init__(
        self, own: SideVectors, source: SideVectors | SharedVectors, rows: NDArray[np.int64] | None = None
    ) -> None:
        self.key = own.key
        self._own = own
        self._source = source
        self._rows = rows

    def get(self, title: str) -> tuple[Vectors, Facts]:
        """Return the vectors and what encoding them had to say; it takes no time of its own.

        Raises:
            MachineError: When those can't be written.
            NonFiniteError: When a vector holds NaN or infinity.
        """
        vectors, facts = self._source.get(title)
        if self._rows is None:
            return vectors, Facts(facts.num_truncated, seconds=0.0)
        return rows_of(vectors, self._rows), Facts(
            self._own.count_truncated() if facts.num_truncated else 0, seconds=0.0
        )


def write_vectors(folder: Path, side: Side, key: Key, vectors_NE: NDArray[np.float32], facts: Facts) -> None:
    """Write the vectors of one side, then their key.

    Raises:
        MachineError: When there is no room for them, or the folder can't be written.
    """
    rows, dim = vectors_NE.shape
    _file(folder, side).write(key, (rows, dim), (vectors_NE,), lambda: asdict(facts))


def read_vectors(
    folder: Path, side: Side, key: Key, *, rows: int
) -> tuple[tuple[NDArray[np.float32], Facts] | None, str]:
    """Read the vectors of one side if they are whole and made of what the key says.

    Returns:
        Vectors and facts, or None; and why not, empty where there never were any.
    """
    file = _file(folder, side)
    content, reason = file.check(key, rows=rows)
    if content is None:
        return None, reason
    try:
        facts = Facts(int(content["num_truncated"]), float(content["seconds"]))
        return (file.read(mapped=False), facts), ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"{file.array.name} or {file.record.name} can't be read: {error}"


def _file(folder: Path, side: Side) -> ArrayFile:
    name = FILE_NAMES[side]
    return ArrayFile(folder, name, f"the vectors of the {name}", "add --no-keep-vectors")
