"""Rows that took long to read are kept on disk, and later starts map them.

1. Files of rows of 64 MiB and more, together, are read into a hidden folder of the cache, which takes its name when it
   is whole and on disk. Memory stays at a few thousand rows, however long the files are.
2. The name says of which files (path, size, times), how they were read and by which version: what has changed since has
   another name, and is read anew. The folder holds a hash of each of its files, which every start checks.
3. Whoever reads first holds a lock; other ranks and runs wait for it, and then map the same files.

Pictures in files of their own are looked at when the data are read, which every start owes: such rows are not kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vembed import __version__
from vembed.config.keys.data import DataKeys
from vembed.data.columns import ColumnsRead
from vembed.data.files import SHARD_SUFFIX, suffix_of
from vembed.data.records import LoadedRecords, RecordTable
from vembed.errors import MachineError
from vembed.files import file_sha256, fsync_path, home_path, write_durably
from vembed.text import show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vembed.data.columns import ExtraColumn
    from vembed.data.splits import SourceOptions

VARIABLE = "VEMBED_CACHE"
"""Environment variable that names the folder of the cache, or says `never`."""

LEAST_BYTES = 64 * 2**20
"""Files of fewer bytes, together, are read in seconds and not kept."""

FREE_SHARE = 2.0
"""Free disk that is asked for, as a multiple of the files' bytes."""

FORMAT = 3
"""Raised when the files change their meaning."""

_MANIFEST = "manifest.json"
_NOT_READ = frozenset(
    {
        *("data_path", "val_data_path", "test_data_path", "guard_data"),
        *("data_split", "val_data_split", "test_data_split", "guard_data_split"),
        *(
            "val_fraction",
            "image_augmentation",
            "image_flip",
            "retrieval_mode",
            "num_workers",
            "prefetch_factor",
            "drop_last",
        ),
    }
)
"""Keys of the data that change nothing of what is read from files."""

_log = logging.getLogger(__name__)


def kept_or_read(
    files: Sequence[Path],
    options: SourceOptions,
    columns: Sequence[ExtraColumn],
    read: Callable[[Path | None], LoadedRecords],
) -> LoadedRecords:
    """Return the records of files from the cache, or read them and keep them there.

    Args:
        columns: The columns of numbers that the rows have beside their items.
        read: Reads the files into an empty folder, or with None into memory.

    Raises:
        DataError: As `read`.
        MachineError: As `read`, or the cache's disk is full.
    """
    stamps = _stamps(files)
    num_bytes = sum(size for size, *_ in stamps)
    is_index = suffix_of(files[0]) == SHARD_SUFFIX  # pictures stay in the shards
    root = _root()
    if root is None or num_bytes < LEAST_BYTES:
        return read(None)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        missing = not os.access(root, os.W_OK) and "it can't be written"
        free = shutil.disk_usage(root).free
    except OSError as error:
        missing, free = error.strerror or str(error), 0
    store = _Store(root, _digest(_reading_of(files, options, columns)), _digest(stamps), tuple(columns))
    if not missing and free < FREE_SHARE * num_bytes * (not is_index) and not store.folder.is_dir():
        missing = f"it has {show_bytes(free)} free"
    if missing:
        loaded = read(None)
        return replace(loaded, notes=(*loaded.notes, f"The rows are not kept in {root}: {missing}."))
    with store.locked() as is_alone:
        loaded = store.load() or store.fill(read, lambda: _stamps(files) == stamps, is_alone=is_alone)
    if loaded.table.folder != store.folder:
        return loaded
    note = f"The rows are kept in {store.folder} for later starts; {VARIABLE}=never reads them anew each time."
    return replace(loaded, notes=(*loaded.notes, note))


@dataclass(frozen=True, slots=True)
class _Store:
    """The place of one source in the cache."""

    root: Path
    source: str  # digest of which files are read, and how
    stamp: str  # digest of the files' sizes and times
    columns: tuple[ExtraColumn, ...]

    @property
    def folder(self) -> Path:
        return self.root / f"{self.source}-{self.stamp}"

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Wait until nobody else reads the source; False where the file system has no locks, and the first one wins."""
        is_alone = True
        with (self.root / f".{self.source}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another process that reads the same data into %s", self.folder)
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                _log.info("%s: no locks here: %s", self.root, error)
                is_alone = False
            yield is_alone

    def load(self) -> LoadedRecords | None:
        """Map what is kept; None where there is nothing, or nothing whole."""
        if not self.folder.is_dir():
            return None
        started = time.perf_counter()
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_text("utf-8"))
            for name, digest in manifest["files"].items():
                if file_sha256(self.folder / name) != digest:
                    raise ValueError(f"{name} is damaged")
            table = RecordTable.mapped(self.folder, self.columns)
            loaded = LoadedRecords(
                table, tuple(manifest["notes"]), manifest["num_invalid"], ColumnsRead(**manifest["columns"])
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            _log.warning("%s: the data are read anew: %s", self.folder, error)
            shutil.rmtree(self.folder, ignore_errors=True)
            return None
        _log.info("%d rows mapped from %s in %.1f s", len(table), self.folder, time.perf_counter() - started)
        return loaded

    def fill(
        self, read: Callable[[Path | None], LoadedRecords], is_unchanged: Callable[[], bool], *, is_alone: bool
    ) -> LoadedRecords:
        """Read the rows, and keep them in place of those of before."""
        if is_alone:
            for old in (*self.root.glob(f"{self.source}-*"), *self.root.glob(f".{self.source}-*")):
                shutil.rmtree(old, ignore_errors=True)  # of files that have changed since, or left by a kill
        started = time.perf_counter()
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.root))
            try:
                loaded = read(temporary)
                if loaded.table.items.has_files or not is_unchanged():
                    return loaded  # what is mapped outlives its names
                self._keep(loaded, temporary)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise MachineError(
                f"the rows can't be kept in {self.root}: {error.strerror or error}; free some space, or set the "
                f"environment variable {VARIABLE} to a folder with room for them, or to never"
            ) from error
        seconds = time.perf_counter() - started
        _log.info("%d rows read in %.1f s and kept in %s", len(loaded.table), seconds, self.folder)
        return replace(loaded, table=RecordTable.mapped(self.folder, self.columns))

    def _keep(self, loaded: LoadedRecords, temporary: Path) -> None:
        """Give the folder its name once it is on disk."""
        digests = {path.name: file_sha256(path) for path in sorted(temporary.iterdir())}
        manifest = {"files": digests, "notes": loaded.notes, "num_invalid": loaded.num_invalid}
        manifest["columns"] = loaded.columns._asdict()
        for name in digests:
            fsync_path(temporary / name)
        write_durably(temporary / _MANIFEST, json.dumps(manifest, indent=1))
        fsync_path(temporary)
        with suppress(OSError):  # another process may have been first, where there are no locks
            temporary.rename(self.folder)
        fsync_path(self.root)


def _root() -> Path | None:
    """Return the folder of all kept rows; None where none are to be kept."""
    named = os.environ.get(VARIABLE)
    if named == "never":
        return None
    if named:
        return home_path(named) / "records"
    return home_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vembed" / "records"


def _stamps(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """Return size, times and identity of each file; a file that can't be looked at is refused when it is read."""
    stamps: list[tuple[int, ...]] = []
    for file in files:
        with suppress(OSError):
            found = file.stat()
            stamps.append((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino))
    return stamps


def _reading_of(files: Sequence[Path], options: SourceOptions, columns: Sequence[ExtraColumn]) -> dict[str, object]:
    """Return all that the rows follow from beside the files' content."""
    loss = options.loss
    return {
        "format": FORMAT,
        "version": __version__,
        "files": [(os.path.realpath(file), file.name) for file in files],
        "role": options.role,
        "loss": None if loss is None else (loss.name, sorted(loss.takes)),
        "columns": [repr(column) for column in columns],
        "keys": {name: getattr(options.keys, name) for name in sorted(DataKeys.model_fields) if name not in _NOT_READ},
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]
