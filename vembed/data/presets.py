"""Published data sets in the form that they are published in: `NAME:FOLDER`, read from a local folder.

Here: the table of their names, which split a role gets, and where a set's parts lie. Not here: the sets themselves
(vembed/plugins/sets), downloading anything, and how records are batched. A file or folder whose own name begins with a
preset's is named with its folder, `./sop:mine.jsonl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vembed.data.columns import closest
from vembed.data.images import PictureFault
from vembed.data.keys import SPLIT_NAMES, Role, role_of, split_for
from vembed.errors import DataError
from vembed.files import home_path, is_file, is_folder
from vembed.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from vembed.batch import Image
    from vembed.data.check import ProblemLog
    from vembed.data.images import ImageRoot
    from vembed.data.judged import RetrievalData
    from vembed.data.read import DataSource
    from vembed.data.table import LoadedRecords

PRESETS = Registry(
    "published data set",
    {
        "flickr30k": "vembed.plugins.sets.flickr30k:PRESET",
        "sop": "vembed.plugins.sets.sop:PRESET",
        "cirr": "vembed.plugins.sets.cirr:PRESET",
    },
)
"""Name before the colon -> the `Preset`."""


class Preset(NamedTuple):
    """Splits of one set, and functions that read them."""

    splits: tuple[str, ...]
    load: Callable[[PresetSource, str], LoadedRecords]
    load_retrieval: Callable[[PresetSource, str], RetrievalData]
    fallbacks: Mapping[Role, str]  # role -> the split that serves it where the set has none of that role's names
    refused: Mapping[str, str]  # split, or role that has none -> why it can't be had


class PresetPath(NamedTuple):
    """A preset and the folder that a user named."""

    label: str  # as the user wrote it
    name: str  # a key of `PRESETS`
    folder: Path

    def records(self, wanted: DataSource, log: ProblemLog) -> LoadedRecords:
        """Return the records of the split that is wanted.

        Raises:
            DataError: Something is missing or broken, or there is no such split.
        """
        preset, split, source = self._opened(wanted, log)
        return preset.load(source, split)

    def retrieval(self, wanted: DataSource, log: ProblemLog) -> RetrievalData:
        """Return the split that is wanted as a task.

        Raises:
            DataError: Something is missing or broken, or there is no such split.
        """
        preset, split, source = self._opened(wanted, log)
        return preset.load_retrieval(source, split)

    def refuse_missing(self, wanted: DataSource) -> None:
        """Refuse a set whose folder isn't there.

        Raises:
            DataError: There is no such folder.
        """
        if not is_folder(self.folder):
            raise DataError(f"{wanted.path_key}: {self.label}: there is no folder {self.folder}")

    def _opened(self, wanted: DataSource, log: ProblemLog) -> tuple[Preset, str, PresetSource]:
        """Return the set, the split to read (the one asked for, or that of the role), and its folder."""
        self.refuse_missing(wanted)
        preset: Preset = PRESETS.load(self.name)
        role = wanted.role if wanted.split is None else role_of(wanted.split)
        split = wanted.split if wanted.split in preset.splits else None
        if split is None and role is not None:
            # A split that isn't the set's name for it may still name a role: "dev" is the "val" of a set.
            split = split_for(preset.splits, None, role) or preset.fallbacks.get(role)
        if split is None:
            reason = preset.refused.get(wanted.split or wanted.role) or preset.refused.get(role or "")
            shown = wanted.split or SPLIT_NAMES[wanted.role][0]
            listed = f"it has: {', '.join(preset.splits)}"
            raise DataError(f"{self.name} has no split {shown!r}: {reason or listed}")
        root = wanted.keys.image_root
        image_folder = self.folder if root is None else home_path(root)
        return preset, split, PresetSource(self.label, self.folder, wanted.images(self.folder), image_folder, log)


def preset_path(path: str) -> PresetPath | None:
    """Return the preset that a path names, or None when it names something else.

    Raises:
        DataError: It names a preset and no folder.
    """
    name, colon, folder = path.partition(":")
    if not colon or name not in PRESETS:
        return None
    if not folder:
        raise DataError(f"{path} names no folder: write {name}:FOLDER, the folder that the set lies in")
    return PresetPath(path, name, home_path(folder))


def preset_hint(path: str) -> str:
    """Return ` (did you mean 'sop:...'?)` for a path that begins like a preset, or an empty string."""
    name, colon, folder = path.partition(":")
    if not colon or not folder or "/" in name or folder.startswith("//"):  # a file, or an address such as s3://
        return ""
    return closest(name, PRESETS.names()).replace("'?)", ":...'?)")


class PresetSource(NamedTuple):
    """A set in a folder, and the policy for its broken rows."""

    label: str  # as the user wrote it, e.g. "sop:data/Stanford_Online_Products"
    folder: Path
    images: ImageRoot
    image_folder: Path  # start of the pictures' paths: the folder, or `image_root`
    log: ProblemLog

    def picture(self, path: str, *, where: str, column: str) -> Image | None:
        """Return the picture of a row, or note why there is none.

        Args:
            column: Name of the picture in the row.
        """
        try:
            return self.images.image(path, name=where)
        except PictureFault as fault:
            self.log.add(where, fault.reason, column=column, may_drop=not fault.escapes)
            return None

    def check(self) -> None:
        """Refuse the set when more of its rows are invalid than the policy drops."""
        self.log.refuse_over_budget(self.label)

    def find_parts(self, files: Sequence[Sequence[str]], pictures: Sequence[str] = ()) -> tuple[list[Path], str]:
        """Return where the parts of the set lie.

        Args:
            files: Names that a file may have, relative to the set's folder, the published one first; for each file.
            pictures: Names that the folder of pictures may have, relative to the image folder, the published one first.

        Returns:
            The files, in that order; and the name of the folder of pictures, "" where `image_root` is that folder.

        Raises:
            DataError: With all that is missing, and the folder that has it where it lies one deeper.
        """
        paths = [next((self.folder / name for name in names if is_file(self.folder / name)), None) for names in files]
        folder = next((name for name in pictures if is_folder(self.image_folder / name)), None)
        if folder is None and (not pictures or self.image_folder != self.folder):
            folder = ""  # image_root was set, and names the folder of pictures itself
        missing = [" or ".join(names) for names, path in zip(files, paths, strict=True) if path is None]
        if folder is None:
            missing.append(" or ".join(f"{name}/" for name in pictures))
        if missing or folder is None:
            # Archives often unpack into a folder of their own, one deeper than the folder that was named.
            hint = f" in {self.folder}"
            for entry in sorted(self.folder.iterdir()):
                if all(any(is_file(entry / name) for name in names) for names in files):
                    hint = f"; {entry} has it: name that folder, {self.label.partition(':')[0]}:{entry}"
                    break
            raise DataError(f"{self.label} is missing {', and '.join(missing)}{hint}")
        return [path for path in paths if path is not None], folder
