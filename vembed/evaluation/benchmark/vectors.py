"""Vectors on disk: written once for each model, set and side, and read back while they are still true.

    documents.npy    (D, E) float32
    documents.json   the key: what the vectors were made of; size and hash of the file; texts that were cut, seconds
    queries.npy, queries.json   the same of the judged queries

The key is written last and removed first, so that vectors with a key are whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.errors import MachineError
from vembed.evaluation.benchmark.identity import changed_parts
from vembed.evaluation.directions import count_truncated
from vembed.evaluation.index import check_finite

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.batch import Item, Side
    from vembed.evaluation.benchmark.identity import Key
    from vembed.evaluation.encode import ItemEncoder

FORMAT = 1
"""Raised when the files change their meaning; other formats are encoded again."""

FREE_SHARE = 1.1
"""Free disk that is asked for, as a multiple of what is written."""

FILE_NAMES: dict[Side, str] = {"document": "documents", "query": "queries"}

_HASHED_BYTES = 1 << 22

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What encoding had to say.

    Attributes:
        num_truncated: Texts that were longer than the model takes and were cut.
        seconds: Wall time of encoding.
    """

    num_truncated: int
    seconds: float


class SideVectors:
    """The vectors of one side of a set: read where they are still true, else encoded, once.

    Args:
        encode: Turns texts into vectors.
        texts: The texts, in order.
        side: Which side they are.
        key: What the vectors are made of.
        folder: Where vectors are kept.
        keep: Whether new ones are written there.

    Attributes:
        key: What the vectors are made of.
    """

    def __init__(
        self, encode: ItemEncoder, texts: Sequence[Item], side: Side, key: Key, *, folder: Path, keep: bool
    ) -> None:
        self.key = key
        self._encode = encode
        self._texts = texts
        self._side = side
        self._folder = folder
        self._keep = keep
        self._found: tuple[NDArray[np.float32], Facts] | None = None

    def get(self, title: str) -> tuple[NDArray[np.float32], Facts]:
        """Return the vectors (rows, dim) and what encoding them had to say; one log line says where they came from.

        Args:
            title: Model and set, for that line.

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

    def _read_or_encode(self, title: str) -> tuple[NDArray[np.float32], Facts]:
        name = FILE_NAMES[self._side]
        found, reason = read_vectors(self._folder, self._side, self.key, rows=len(self._texts))
        if found is not None:
            _logger.info("%s: vectors of the %s unchanged, read from %s", title, name, self._folder)
            return found
        before, started = self._encode.num_truncated[self._side], time.perf_counter()
        vectors_NE = self._encode(self._texts, self._side)
        facts = Facts(self._encode.num_truncated[self._side] - before, time.perf_counter() - started)
        check_finite(vectors_NE, self._side)
        again = f" again ({reason})" if reason else ""
        _logger.info("%s: %d %s encoded%s in %.1f s", title, len(vectors_NE), name, again, facts.seconds)
        if self._keep:
            write_vectors(self._folder, self._side, self.key, vectors_NE, facts)
        return vectors_NE, facts


class SharedVectors:
    """The vectors of one side of a reversed set, taken from the other side of the set itself.

    Args:
        own: What would encode them: their key, and the items.
        source: The vectors to take.
        rows: Which of them, in order; None is all.

    Attributes:
        key: What the vectors are made of.
    """

    def __init__(
        self, own: SideVectors, source: SideVectors | SharedVectors, rows: NDArray[np.int64] | None = None
    ) -> None:
        self.key = own.key
        self._own = own
        self._source = source
        self._rows = rows

    def get(self, title: str) -> tuple[NDArray[np.float32], Facts]:
        """Return the vectors (rows, dim) and what encoding them had to say; it takes no time of its own.

        Args:
            title: Model and set, for the log line of those that they are taken from.

        Raises:
            MachineError: When those can't be written.
            NonFiniteError: When a vector holds NaN or infinity.
        """
        vectors_NE, facts = self._source.get(title)
        if self._rows is None:
            return vectors_NE, Facts(facts.num_truncated, seconds=0.0)
        return vectors_NE[self._rows], Facts(self._own.count_truncated() if facts.num_truncated else 0, seconds=0.0)


def write_vectors(folder: Path, side: Side, key: Key, vectors_NE: NDArray[np.float32], facts: Facts) -> None:
    """Write the vectors of one side, then their key.

    Args:
        folder: Where; made where it is missing.
        side: Which side.
        key: What the vectors are made of.
        vectors_NE: The vectors, (rows, dim) float32.
        facts: What encoding had to say.

    Raises:
        MachineError: When there is no room for them, or the folder can't be written.
    """
    array, record = _paths(folder, side)
    temporary = array.with_name(f".{array.name}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free, wanted = shutil.disk_usage(folder).free, vectors_NE.nbytes * FREE_SHARE
        if free < wanted:
            raise MachineError(
                f"{folder}: {wanted / 1e9:.1f} GB are needed to keep the vectors of the {FILE_NAMES[side]}, "
                f"{free / 1e9:.1f} GB are free. Free some space, or add --no-keep-vectors."
            )
        record.unlink(missing_ok=True)
        with temporary.open("wb") as file:
            np.save(file, vectors_NE, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        content = {"format": FORMAT, "key": key, "file": _file_facts(temporary), **asdict(facts)}
        temporary.replace(array)
        temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        temporary.replace(record)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(
            f"{folder}: the vectors can't be written: {error}. Free some space, choose another output folder, or add "
            "--no-keep-vectors."
        ) from error


def read_vectors(
    folder: Path, side: Side, key: Key, *, rows: int
) -> tuple[tuple[NDArray[np.float32], Facts] | None, str]:
    """Read the vectors of one side if they are whole and made of what the key says.

    Args:
        folder: Where they were written.
        side: Which side.
        key: What they must be made of.
        rows: How many there must be.

    Returns:
        Vectors and facts, or None; and why not, empty where there never were any.
    """
    array, record = _paths(folder, side)
    if not record.is_file():
        return None, ""
    try:
        content: dict[str, Any] = json.loads(record.read_text("utf-8"))
        if content["format"] != FORMAT:
            return None, "another version of the file format"
        changed = changed_parts(content["key"], key)
        if changed:
            return None, f"changed: {', '.join(changed)}"
        if content["file"] != _file_facts(array):
            return None, f"{array.name} is damaged"
        facts = Facts(int(content["num_truncated"]), float(content["seconds"]))
        vectors_NE = np.load(array, allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{array.name} or {record.name} can't be read: {error}"
    if vectors_NE.dtype != np.float32 or vectors_NE.ndim != 2 or len(vectors_NE) != rows:
        return None, f"{array.name} has another shape"
    return (vectors_NE, facts), ""


def _paths(folder: Path, side: Side) -> tuple[Path, Path]:
    """Return the files of one side: array and key."""
    name = FILE_NAMES[side]
    return folder / f"{name}.npy", folder / f"{name}.json"


def _file_facts(path: Path) -> dict[str, object]:
    """Return size and hash of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_HASHED_BYTES):
            total.update(part)
    return {"bytes": path.stat().st_size, "sha256": total.hexdigest()}
