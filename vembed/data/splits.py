"""Which part of a data set a run trains, validates or tests on, and how a source is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from vembed.batch import ImageLimits
from vembed.data.check import ProblemLog
from vembed.data.columns import closest
from vembed.data.image_root import ImageRoot
from vembed.data.keys import DataKeys
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vembed.data.columns import LossNeeds

Role: TypeAlias = Literal["train", "validation", "test", "guard"]

SPLIT_NAMES: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "val", "validation"),
    "test": ("test",),
    "guard": ("test",),
}
"""The names that a role's split goes by, the preferred one first."""

PATH_KEYS: dict[Role, str] = {
    "train": "data_path",
    "validation": "val_data_path",
    "test": "test_data_path",
    "guard": "guard_data",
}
SPLIT_KEYS: dict[Role, str] = {
    "train": "data_split",
    "validation": "val_data_split",
    "test": "test_data_split",
    "guard": "guard_data_split",
}
"""The config keys of each role, for error messages."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which part of a data source to read, and how."""

    role: Role  # what the data is for; chooses the split where there are several
    split: str | None = None  # the split to read instead
    keys: DataKeys = field(default_factory=DataKeys)  # of these: columns, labels, pictures and invalid rows
    loss: LossNeeds | None = None  # what is trained on the rows; of other roles' rows, nothing is asked for it
    problems: ProblemLog | None = None  # collects the invalid rows in place of the keys' policy; nothing is cached then
    named: tuple[str, str] | None = None  # what the user called path and split, where those aren't the keys of the role
    scratch: Path | None = None  # with `problems`: an empty folder that rows of files are read into; None: memory

    @property
    def path_key(self) -> str:
        """What the user called the path."""
        return PATH_KEYS[self.role] if self.named is None else self.named[0]

    @property
    def split_key(self) -> str:
        """What the user called the split."""
        return SPLIT_KEYS[self.role] if self.named is None else self.named[1]

    @property
    def image_limits(self) -> ImageLimits:
        """Caps on each picture."""
        return ImageLimits(max_pixels=self.keys.max_image_pixels)

    def images(self, folder: Path | None) -> ImageRoot:
        """Return what checks the pictures of a source in a folder, None when it has none.

        Raises:
            DataError: `image_root` doesn't exist.
        """
        root = self.keys.image_root
        return ImageRoot(folder if root is None else Path(root), self.image_limits)

    def log(self) -> ProblemLog:
        """Return what collects the invalid rows of a source."""
        return self.problems or ProblemLog(self.keys.max_invalid_records if self.keys.skip_invalid_records else None)


def split_for(available: Collection[str], split: str | None, role: Role) -> str | None:
    """Return the split to read, the user's choice or the role's; None when there is none."""
    names = SPLIT_NAMES[role] if split is None else (split,)
    return next((name for name in names if name in available), None)


def missing_split(where: object, available: Sequence[str], split: str | None, role: Role, key: str | None) -> DataError:
    """Return the error for a source that has none of the splits that `split_for` looks for."""
    names = SPLIT_NAMES[role] if split is None else (split,)
    return DataError(
        f"{where} has no split {' or '.join(map(repr, names))}{closest(names[0], available)}; it has: "
        f"{', '.join(available)}. Choose one with {key or SPLIT_KEYS[role]}"
    )


def is_for_evaluation(split: str) -> bool:
    """Return whether a split's name says that it is not for training: dev, validation, test, test_unseen."""
    return split.startswith((*SPLIT_NAMES["validation"], *SPLIT_NAMES["test"]))


def role_of(split: str) -> Role | None:
    """Return the role that a split's name stands for, or None."""
    return next((role for role, names in SPLIT_NAMES.items() if split in names), None)
