"""Hashes of the files of an index, kept beside them and compared when the files are read.

checksums.json holds the SHA-256 of each block of 4 MiB of each file. What is read whole when an index is opened
(index.faiss, ids.jsonl, meta.json) is checked whole then. Of vectors and thumbnails, which stay on disk, a block is
checked when it is first used: opening an index that is larger than the memory costs no more than before.

Cost: 0.7 s for each GB that is read, 90 characters of checksums.json for 4 MiB.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING

from vembed.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CHECKSUMS_FILE = "checksums.json"
BLOCK_BYTES = 1 << 22

_log = logging.getLogger(__name__)


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the hashes of some files of a folder beside them."""
    content = {"block_bytes": BLOCK_BYTES, "sha256": {name: list(_hashes(folder / name)) for name in names}}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _hashes(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield hashlib.sha256(block).hexdigest()


class Checksums:
    """Hashes of the files of an index. Several threads may check.

    Args:
        folder: One of an older version has none, and nothing of it is checked.

    Raises:
        ConfigError: checksums.json is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hashes: dict[str, list[str]] | None = None
        self._checked: set[tuple[str, int]] = set()
        path = folder / CHECKSUMS_FILE
        try:
            content = json.loads(path.read_bytes())
            self._hashes = content["sha256"]
            is_ours = content["block_bytes"] == BLOCK_BYTES and isinstance(self._hashes, dict)
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is broken: {error}; encode the corpus again with --overwrite") from error
        if not is_ours:
            raise ConfigError(f"{path} is broken: it holds other blocks; encode the corpus again with --overwrite")

    def note_missing(self) -> None:
        """Say in the log that nothing is checked, where that is so."""
        if self._hashes is None:
            _log.warning(
                "%s has no %s, as it is of an older version: damage to its files goes unnoticed. Encode the corpus "
                "again with --overwrite to have them checked",
                self._folder,
                CHECKSUMS_FILE,
            )

    def check(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Compare the blocks of a file, or those that some bytes of it lie in, with their hashes; each block once.

        Raises:
            ConfigError: They are other bytes than were written, or can't be read.
        """
        if self._hashes is None:
            return
        path, hashes = self._folder / name, self._hashes.get(name)
        if not isinstance(hashes, list):
            raise ConfigError(
                f"{self._folder / CHECKSUMS_FILE} is broken: it has no hashes of {name}; encode the corpus again with "
                f"--overwrite"
            )
        end = len(hashes) if stop is None else -(-stop // BLOCK_BYTES)
        blocks = [block for block in range(start // BLOCK_BYTES, end) if (name, block) not in self._checked]
        if not blocks:
            return
        try:
            with path.open("rb") as file:
                for block in blocks:
                    file.seek(block * BLOCK_BYTES)
                    content = file.read(BLOCK_BYTES)
                    if block >= len(hashes) or hashlib.sha256(content).hexdigest() != hashes[block]:
                        raise ConfigError(
                            f"{path} is damaged: its bytes from {block * BLOCK_BYTES:,} on don't fit their hash in "
                            f"{CHECKSUMS_FILE}; encode the corpus again with --overwrite"
                        )
                    self._checked.add((name, block))
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}; encode the corpus again") from error
