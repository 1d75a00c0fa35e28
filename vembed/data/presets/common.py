"""What the presets share: where a set lies, what of it is missing, and how its pictures are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vembed.data.image_root import PictureFault
from vembed.errors import DataError
from vembed.files import is_file, is_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vembed.batch import Image
    from vembed.data.check import ProblemLog
    from vembed.data.image_root import ImageRoot


class PresetSource(NamedTuple):
    """A set in a folder, and how to check it."""

    label: str  # what the user wrote, e.g. "sop:data/Stanford_Online_Products"
    folder: Path
    images: ImageRoot
    image_folder: Path  # where their paths start from: the folder, or `image_root`
    log: ProblemLog

    def picture(self, path: str, *, where: str, column: str) -> Image | None:
        """Return the picture of a row, or note why there is none.

        Args:
            column: What the row calls its picture.
        """
        try:
            return self.images.image(path, name=where)
        except PictureFault as fault:
            self.log.add(where, fault.reason, column=column, may_drop=not fault.escapes)
            return None

    def check(self) -> None:
        """Refuse the set when more of its rows are invalid than the policy drops."""
        self.log.check(self.label)


def find_parts(
    source: PresetSource, files: Sequence[Sequence[str]], pictures: Sequence[str] = ()
) -> tuple[list[Path], str]:
    """Return where the parts of a set lie.

    Args:
        files: The names that each file may have, relative to the set's folder, the published one first.
        pictures: The names that the folder of pictures may have, relative to the image folder, the published one first.

    Returns:
        The files, in that order; and the name of the folder of pictures, "" where `image_root` is that folder.

    Raises:
        DataError: With all that is missing, and the folder that has it where it lies one deeper.
    """
    found = [next((source.folder / name for name in names if is_file(source.folder / name)), None) for names in files]
    folder = next((name for name in pictures if is_folder(source.image_folder / name)), None)
    if folder is None and (not pictures or source.image_folder != source.folder):
        folder = ""
    missing = [" or ".join(names) for names, path in zip(files, found, strict=True) if path is None]
    if folder is None:
        missing.append(" or ".join(f"{name}/" for name in pictures))
    if missing or folder is None:
        raise DataError(f"{source.label} is missing {', and '.join(missing)}{_deeper(source, files)}")
    return [path for path in found if path is not None], folder


def _deeper(source: PresetSource, files: Sequence[Sequence[str]]) -> str:
    """Return where the files lie instead, when that is one folder deeper, as archives unpack; else nothing."""
    for entry in sorted(source.folder.iterdir()):
        if all(any(is_file(entry / name) for name in names) for names in files):
            return f"; {entry} has it: name that folder, {source.label.partition(':')[0]}:{entry}"
    return f" in {source.folder}"
