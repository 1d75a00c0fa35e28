"""Roles and splits: which part of a data set a run trains, validates or tests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection

Role: TypeAlias = Literal["train", "validation", "test"]

SPLIT_NAMES: dict[Role, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("dev", "val", "validation"),
    "test": ("test",),
}
"""The names that a role's split goes by, the preferred one first."""

PATH_KEYS: dict[Role, str] = {"train": "data_path", "validation": "val_data_path", "test": "test_data_path"}
SPLIT_KEYS: dict[Role, str] = {"train": "data_split", "validation": "val_data_split", "test": "test_data_split"}
"""The config keys of each role, for error messages."""


def split_for(available: Collection[str], split: str | None, role: Role) -> str | None:
    """Return the split to read, or None when there is none.

    Args:
        available: Splits that exist.
        split: The user's choice; it wins over the role.
        role: What the data is for.
    """
    names = SPLIT_NAMES[role] if split is None else (split,)
    return next((name for name in names if name in available), None)


def is_for_evaluation(split: str) -> bool:
    """Return whether a split's name says that it is not for training: dev, validation, test, test_unseen."""
    return split.startswith((*SPLIT_NAMES["validation"], *SPLIT_NAMES["test"]))


def role_of(split: str) -> Role | None:
    """Return the role that a split's name stands for, or None."""
    return next((role for role, names in SPLIT_NAMES.items() if split in names), None)
