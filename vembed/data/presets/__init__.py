"""Published data sets in the form that they are published in: `NAME:FOLDER`, read from a local folder.

Here: one file per set, their registry, and which split a role gets. Not here: downloading anything, and how records are
batched. A file or folder whose own name begins with a preset's is named with its folder, `./sop:mine.jsonl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vembed.data.columns import closest
from vembed.data.keys import SPLIT_NAMES, Role, role_of, split_for
from vembed.data.presets import cirr, flickr30k, sop
from vembed.data.presets.common import PresetSource
from vembed.errors import DataError
from vembed.files import home_path, is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from vembed.data.check import ProblemLog
    from vembed.data.judged import RetrievalData
    from vembed.data.read import DataSource
    from vembed.data.table import LoadedRecords


class Preset(NamedTuple):
    """How one set is read."""

    splits: tuple[str, ...]
    load: Callable[[PresetSource, str], LoadedRecords]
    load_retrieval: Callable[[PresetSource, str], RetrievalData]
    fallbacks: Mapping[Role, str]  # role -> the split that serves it where the set has none of that role's names
    refused: Mapping[str, str]  # split, or role that has none -> why it can't be had


PRESETS: Mapping[str, Preset] = {
    "flickr30k": Preset(flickr30k.SPLITS, flickr30k.load, flickr30k.load_retrieval, fallbacks={}, refused={}),
    "sop": Preset(
        sop.SPLITS,
        sop.load,
        sop.load_retrieval,
        fallbacks={},
        refused={"validation": "leave val_data_path out, and whole products of the training pictures are held out"},
    ),
    "cirr": Preset(cirr.SPLITS, cirr.load, cirr.load_retrieval, fallbacks={"test": "val"}, refused=cirr.REFUSED),
}
"""Name before the colon -> the set."""


class PresetPath(NamedTuple):
    """A preset and the folder that a user named."""

    label: str  # what the user wrote
    name: str  # a key of `PRESETS`
    folder: Path

    def records(self, wanted: DataSource, log: ProblemLog) -> LoadedRecords:
        """Return the records of the split that is wanted.

        Raises:
            DataError: Something is missing or broken, or there is no such split.
        """
        split, source = self._opened(wanted, log)
        return PRESETS[self.name].load(source, split)

    def retrieval(self, wanted: DataSource, log: ProblemLog) -> RetrievalData:
        """Return the split that is wanted as a task.

        Raises:
            DataError: Something is missing or broken, or there is no such split.
        """
        split, source = self._opened(wanted, log)
        return PRESETS[self.name].load_retrieval(source, split)

    def _opened(self, wanted: DataSource, log: ProblemLog) -> tuple[str, PresetSource]:
        if not is_folder(self.folder):
            raise DataError(f"{wanted.path_key}: {self.label}: there is no folder {self.folder}")
        split = _split(self.name, wanted.split, wanted.role)
        root = wanted.keys.image_root
        image_folder = self.folder if root is None else home_path(root)
        return split, PresetSource(self.label, self.folder, wanted.images(self.folder), image_folder, log)


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
    near = closest(name, PRESETS) if colon and folder and "/" not in name and not folder.startswith("//") else ""
    return near.replace("'?)", ":...'?)")


def _split(name: str, asked: str | None, role: Role) -> str:
    """Return the split to read: the one asked for, or that of the role."""
    preset = PRESETS[name]
    if asked in preset.splits:
        return asked
    wanted = role if asked is None else role_of(asked)
    if wanted is not None:
        found = split_for(preset.splits, None, wanted) or preset.fallbacks.get(wanted)
        if found is not None:
            return found
    reason = preset.refused.get(asked or role) or preset.refused.get(wanted or "")
    shown = asked or SPLIT_NAMES[role][0]
    listed = f"it has: {', '.join(preset.splits)}"
    raise DataError(f"{name} has no split {shown!r}: {reason or listed}")
