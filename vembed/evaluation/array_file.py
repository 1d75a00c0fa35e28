"""Vectors on disk, with what they were made of, so that they are read back only while they are still true.

    NAME.npy     (rows, dim) float32
    NAME.json    the key: what the vectors were made of; size and hash of the file; further facts

The key is written last and removed first, so that vectors with a key are whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.errors import MachineError
from vembed.evaluation.provenance import changed_parts
from vembed.files import file_sha256, new_file, replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from vembed.evaluation.provenance import Key

FORMAT = 1
"""Raised when the files change their meaning; other formats are made again."""

FREE_SHARE = 1.1
"""Free disk that is asked for, as a multiple of what is written."""


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """Vectors in a folder."""

    folder: Path  # where; made when they are written
    name: str  # of both files, without ending
    what: str  # what they are called in messages
    advice: str  # what else the user can do when they can't be written

    @property
    def array(self) -> Path:
        """The vectors."""
        return self.folder / f"{self.name}.npy"

    @property
    def record(self) -> Path:
        """The key and the facts."""
        return self.folder / f"{self.name}.json"

    def write(
        self,
        key: Key,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[np.float32]],
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Write vectors as they come, then their key.

        Args:
            facts: What else the record holds; asked after the last block.

        Raises:
            MachineError: When there is no room for them, or the folder can't be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free, wanted = shutil.disk_usage(self.folder).free, 4 * shape[0] * shape[1] * FREE_SHARE
            if free < wanted:
                raise MachineError(
                    f"{self.folder}: {wanted / 1e9:.1f} GB are needed to keep {self.what}, {free / 1e9:.1f} GB are "
                    f"free. Free some space, or {self.advice}."
                )
            with new_file(self.array, shared=True) as temporary:
                with temporary.open("wb") as file:
                    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                    for block in blocks:
                        file.write(np.ascontiguousarray(block, dtype="<f4").data)
                content = {"format": FORMAT, "key": key, "file": _file_facts(temporary), **facts()}
            replace_text(self.record, json.dumps(content, indent=1) + "\n", shared=True)
        except OSError as error:
            raise MachineError(
                f"{self.folder}: {self.what} can't be written: {error}. Free some space, choose another output folder, "
                f"or {self.advice}."
            ) from error

    def check(self, key: Key, *, rows: int) -> tuple[dict[str, Any] | None, str]:
        """Say whether the vectors are whole and made of what the key says.

        Returns:
            The record, or None; and why not, empty where there never were any.
        """
        if not self.record.is_file():
            return None, ""
        try:
            content: dict[str, Any] = json.loads(self.record.read_text("utf-8"))
            if content["format"] != FORMAT:
                return None, "another version of the file format"
            changed = changed_parts(content["key"], key)
            if changed:
                return None, f"changed: {', '.join(changed)}"
            if content["file"] != _file_facts(self.array):
                return None, f"{self.array.name} is damaged"
            vectors_NE = self.read(mapped=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return None, f"{self.array.name} or {self.record.name} can't be read: {error}"
        if vectors_NE.dtype != np.float32 or vectors_NE.ndim != 2 or len(vectors_NE) != rows:
            return None, f"{self.array.name} has another shape"
        return content, ""

    def read(self, *, mapped: bool) -> NDArray[np.float32]:
        """Return the vectors (rows, dim), unchecked."""
        vectors_NE: NDArray[np.float32] = np.load(self.array, allow_pickle=False, mmap_mode="r" if mapped else None)
        return vectors_NE


def _file_facts(path: Path) -> dict[str, object]:
    """Return size and hash of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
