"""Keep the rows of large files on disk: later starts and all ranks map them instead of reading the files again.

1. Files of 64 MiB and more, together, are read into a hidden folder of the cache, which takes its name once it is whole
   and on disk: a kill leaves nothing that a later start would take for rows.
2. The name is a hash of the files (path, size, times), of how they are read, and of this version: what changes is read
   anew. `manifest.json` holds a hash of every file, which each start checks (0.5 s of CPU for a million rows).
3. One process reads under a lock; other ranks and runs wait for it, then map the same files.

Rows whose pictures lie in files of their own are not kept: every start owes those pictures a look.
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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vembed import __version__
from vembed.data.columns import ColumnsRead
from vembed.data.formats import SHARD_SUFFIX, suffix_of
from vembed.data.keys import DataKeys
from vembed.data.table import LoadedRecords, RecordTable
from vembed.errors import MachineError
from vembed.files import file_sha256, fsync_path, home_path, write_durably
from vembed.registry import FORMATS, module_code
from vembed.text import show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vembed.data.columns import ExtraColumn
    from vembed.data.read import DataSource

VARIABLE = "VEMBED_CACHE"
"""Environment variable that names the folder of the cache, or says `never`."""

LEAST_BYTES = 64 * 2**20
"""Smaller files, together, are read in seconds and not kept."""

FREE_SHARE = 2.0
"""Free disk that the cache needs, as a multiple of the files' bytes."""

FORMAT = 5
"""Raised when the Arrow files change their meaning, or rows of the same files are read otherwise."""

MANIFEST = "manifest.json"

KEYS_OF_USE = frozenset(
    {
        *("data_path", "val_data_path", "test_data_path", "guard_data"),
        *("data_split", "val_data_split", "test_data_split", "guard_data_split", "val_fraction", "leak"),
        *("data", "source_batches", "source_temperature"),  # of an entry, mapping and loss come with its source
        *("image_augmentation", "image_flip", "retrieval_mode", "num_workers", "prefetch_factor", "drop_last"),
    }
)
"""Data keys that say which files are read, or how rows are used: they don't change the rows of a file."""

_log = logging.getLogger(__name__)


def kept_or_read(
    files: Sequence[Path],
    source: DataSource,
    columns: Sequence[ExtraColumn],
    read: Callable[[Path | None], LoadedRecords],
) -> LoadedRecords:
    """Return the records of files from the cache, or read them and keep them there.

    Args:
        columns: Numbers that the rows have for the loss.
        read: Reads the files into an empty folder, or with None into memory.

    Raises:
        DataError: As `read`.
        MachineError: As `read`, or the cache's disk is full.
    """
    stamps = _stamps(files)
    num_bytes = sum(size for size, *_ in stamps)
    named = os.environ.get(VARIABLE)
    if named == "never" or num_bytes < LEAST_BYTES:
        return read(None)
    root = home_path(named or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/vembed") / "records"
    # Everything but the files' content that their rows follow from.
    loss = source.loss_needs
    by_suffix = {suffix_of(file): file for file in files}  # a list of paths may mix kinds
    plugins = sorted(filter(None, map(plugin_code, by_suffix.values())))
    used = sorted(DataKeys.model_fields.keys() - KEYS_OF_USE)
    how_read = {
        "format": FORMAT,
        "version": __version__,
        "files": [(os.path.realpath(file), source.file_names[file]) for file in files],
        "role": source.role,
        "loss": None if loss is None else (loss.name, sorted(loss.takes)),
        "columns": [repr(column) for column in columns],
        "keys": {name: getattr(source.keys, name) for name in used},
        **({"plugins": plugins} if plugins else {}),
    }
    reading = _digest(how_read)
    folder = root / f"{reading}-{_digest(stamps)}"
    # The pictures of tar shards stay where they are, so that what is kept of them is small.
    needed = 0 if {*by_suffix} == {SHARD_SUFFIX} or folder.is_dir() else FREE_SHARE * num_bytes
    if reason := _unusable(root, needed):
        loaded = read(None)
        return replace(loaded, notes=(*loaded.notes, f"The rows are not kept in {root}: {reason}."))
    with _locked(root / f".{reading}.lock", folder) as is_alone:
        loaded = _mapped(folder) or _filled(
            folder, read, lambda: _stamps(files) == stamps, old=f"{reading}-*" if is_alone else None
        )
    if loaded.table.folder != folder:
        return loaded
    note = f"The rows are kept in {folder} for later starts; {VARIABLE}=never reads them anew each time."
    return replace(loaded, notes=(*loaded.notes, note))


def plugin_code(path: Path) -> str:
    """Return a hash of the module that reads a file, where a plugin does: the rows that are kept follow from it."""
    module = FORMATS.plugins().get((suffix_of(path) or ".")[1:])
    return "" if module is None else module_code(module)


def _mapped(folder: Path) -> LoadedRecords | None:
    """Return the kept rows; None where there are none, or where they are damaged."""
    if not folder.is_dir():
        return None
    started = time.perf_counter()
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        for name, digest in manifest["files"].items():
            if file_sha256(folder / name) != digest:
                raise ValueError(f"{name} is damaged")
        columns = ColumnsRead(**manifest["columns"])
        loaded = LoadedRecords(RecordTable.mapped(folder), tuple(manifest["notes"]), manifest["num_invalid"], columns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _log.warning("%s: the data are read anew: %s", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    _log.info("%d rows mapped from %s in %.1f s", len(loaded.table), folder, time.perf_counter() - started)
    return loaded


def _filled(
    folder: Path, read: Callable[[Path | None], LoadedRecords], is_unchanged: Callable[[], bool], *, old: str | None
) -> LoadedRecords:
    """Read the rows into a folder.

    Args:
        is_unchanged: Whether the files are still as they were before they were read.
        old: Pattern of this source's older folders, to be deleted; None where another process may be writing one.
    """
    root = folder.parent
    if old is not None:
        for path in (*root.glob(old), *root.glob(f".{old}")):
            shutil.rmtree(path, ignore_errors=True)  # of files that have changed since, or left by a kill
    started = time.perf_counter()
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
        try:
            loaded = read(temporary)
            if loaded.table.items.has_files or not is_unchanged():
                return loaded  # a mapped file outlives its name
            _keep(loaded, temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise MachineError(
            f"the rows can't be kept in {root}: {error.strerror or error}; free some space, or set the "
            f"environment variable {VARIABLE} to a folder with room for them, or to never"
        ) from error
    _log.info("%d rows read in %.1f s and kept in %s", len(loaded.table), time.perf_counter() - started, folder)
    return replace(loaded, table=RecordTable.mapped(folder))


def _keep(loaded: LoadedRecords, temporary: Path, folder: Path) -> None:
    """Force the files to disk, then give their folder its name."""
    digests = {path.name: file_sha256(path) for path in sorted(temporary.iterdir())}
    manifest = {
        "files": digests,
        "notes": loaded.notes,
        "num_invalid": loaded.num_invalid,
        "columns": loaded.columns._asdict(),
    }
    for name in digests:
        fsync_path(temporary / name)
    write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1))
    fsync_path(temporary)
    with suppress(OSError):  # another process was first, where the file system has no locks
        temporary.rename(folder)
    fsync_path(folder.parent)


@contextmanager
def _locked(lock: Path, folder: Path) -> Iterator[bool]:
    """Wait until no other process reads the source; yield False where the file system has no locks."""
    is_alone = True
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process that reads the same data into %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            _log.info("%s: no locks here: %s", folder.parent, error)
            is_alone = False
        yield is_alone


def _unusable(root: Path, needed: float) -> str:
    """Return why a folder can't take so many bytes, or nothing."""
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(root).free
    except OSError as error:
        return error.strerror or str(error)
    if not os.access(root, os.W_OK):
        return "it can't be written"
    return f"it has {show_bytes(free)} free" if free < needed else ""


def _stamps(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """Return size, times and identity of each file; one that can't be looked at is refused when it is read."""
    stamps: list[tuple[int, ...]] = []
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            stamps.append((stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino))
    return stamps


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]
