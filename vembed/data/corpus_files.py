"""Where a corpus lies: the file that a path means, or the pictures of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.data.formats import SHARD_SUFFIX, row_suffixes
from vembed.data.lines import nearest_entry
from vembed.errors import DataError, MachineError
from vembed.files import home_path, is_file, is_folder
from vembed.text import cut

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_FILES = (".txt", ".txt.gz")
CORPUS_FILES = ("corpus.jsonl", "corpus.jsonl.gz")
"""What a folder's corpus is called, as in BEIR."""

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""How a file that is taken for a picture ends, in any case; what it holds is told by its first bytes."""


def corpus_source(path: str) -> Path:
    """Return the file that holds the corpus, or a folder of pictures."""
    local = home_path(path)
    if is_folder(local):
        found = next((local / name for name in CORPUS_FILES if is_file(local / name)), None)
        if found is not None:
            return found
        if any(is_picture for _, is_picture in _files_below(local)):
            return local
        raise DataError(
            f"{path} has no {CORPUS_FILES[0]} and no pictures; name a BEIR folder, a folder of pictures, or the file "
            f"that holds the corpus"
        )
    if not is_file(local):
        if "://" in path:  # not echoed: an address may hold a password
            raise DataError("the corpus is an address; download it and name the local file")
        if os.path.lexists(local):
            raise DataError(f"{path} is no regular file but a pipe, socket, device, or a link that leads nowhere")
        raise DataError(
            f"{cut(path, 1000)} doesn't exist{nearest_entry(local)}; a corpus is a BEIR folder, a file, or builtin:SET"
        )
    kinds = (*(suffix for suffix in row_suffixes() if suffix != SHARD_SUFFIX), *TEXT_FILES)
    if not local.name.lower().endswith(kinds):
        raise DataError(f"{path}: unknown kind of file; expected {', '.join(kinds)}")
    return local


def find_pictures(folder: Path) -> tuple[list[str], int]:
    """Return the pictures in a folder and below it, relative and in the order of their names; and how many other files.

    Raises:
        MachineError: A folder can't be listed.
    """
    paths, num_others = [], 0
    for path, is_picture in _files_below(folder):
        if is_picture:
            paths.append(path.relative_to(folder).as_posix())
        else:
            num_others += 1
    return sorted(paths), num_others


def _files_below(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file in a folder and below it, and whether it is a picture by its name.

    Links to folders and hidden folders aren't entered.

    Raises:
        MachineError: A folder can't be listed.
    """

    def refuse(error: OSError) -> None:
        raise MachineError(f"{error.filename}: the folder can't be listed: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            yield Path(place) / name, name.lower().endswith(PICTURE_SUFFIXES) and not name.startswith(".")
