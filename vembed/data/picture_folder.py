"""A plain folder of pictures as a corpus: each file is one document, its path below the folder is its id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vembed.errors import MachineError

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
"""How a file that is taken for a picture ends, in any case; what it holds is told by its first bytes."""


@dataclass(frozen=True, slots=True)
class PictureFolder:
    """The pictures below a folder.

    Attributes:
        paths: Relative to the folder, with `/`, in the order of their names.
        num_others: Files that no picture's suffix ends, and hidden ones.
    """

    paths: tuple[str, ...]
    num_others: int


def find_pictures(folder: Path) -> PictureFolder:
    """Return the pictures in a folder and all folders below it; links to folders and hidden folders aren't entered.

    Args:
        folder: Where to look.

    Raises:
        MachineError: A folder can't be listed.
    """
    paths = []
    num_others = 0
    for place, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if is_picture_name(name):
                paths.append((Path(place) / name).relative_to(folder).as_posix())
            else:
                num_others += 1
    return PictureFolder(tuple(sorted(paths)), num_others)


def is_picture_name(name: str) -> bool:
    """Return whether a file's name is a picture's, and not hidden."""
    return name.lower().endswith(PICTURE_SUFFIXES) and not name.startswith(".")


def _raise(error: OSError) -> None:
    raise MachineError(f"{error.filename}: the folder can't be listed: {error.strerror}") from error
