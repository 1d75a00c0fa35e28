"""Data sets that code makes: our own, made from what is installed without any download, and those of plugins.

Here: one file per set of our own, and `register_dataset`. Not here: how records are checked or batched.

A set is a function from a split to rows, and that is all that a plugin writes (CONTRIBUTING.md, "Add a built-in set").
One of our own is the same in a file of this folder, wrapped in a `BuiltinSet` that `DATASETS` of registry.py names, so
that a list of names imports none of them. Its rows must be equal on every machine: a split is a function of hashes
(`role_by_hash`), never of a random generator, and its test pins the numbers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

from vembed.data.columns import closest
from vembed.data.keys import role_of
from vembed.errors import DataError
from vembed.registry import DATASETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vembed.data.judged import RetrievalData
    from vembed.data.keys import Role
    from vembed.data.table import LoadedRecords, Record

    Rows: TypeAlias = LoadedRecords | Iterable[Mapping[str, Any] | Record]
    MakeRows: TypeAlias = Callable[[Role], Rows]


class BuiltinSet(NamedTuple):
    """Functions behind `builtin:NAME`."""

    rows: MakeRows  # of one split; dictionaries are checked as rows of a file are
    retrieval: Callable[[Role], RetrievalData] | None = None  # where a row names only some of what is relevant
    holds_pictures: bool = False  # known without making the set; of a plugin's set it isn't known


@overload
def register_dataset(rows: MakeRows) -> MakeRows: ...
@overload
def register_dataset(*, retrieval: Callable[[Role], RetrievalData]) -> Callable[[MakeRows], MakeRows]: ...
def register_dataset(
    rows: MakeRows | None = None, *, retrieval: Callable[[Role], RetrievalData] | None = None
) -> MakeRows | Callable[[MakeRows], MakeRows]:
    """Add a data set as `builtin:NAME` under the name of its function, "_" as "-"; also a decorator.

    Args:
        rows: Gets a split's name (train, validation or test) and returns or yields its rows: dictionaries with the
            columns of docs/data.md, or checked `Record`s.
        retrieval: Returns a split as `RetrievalData` where a row names only some of what is relevant. Without it, the
            documents of a retrieval task are those of the rows, and a query's positives are relevant to it.

    Raises:
        ConfigError: The name is taken.
    """

    # `@register_dataset` gets the function at once, `@register_dataset(retrieval=...)` afterwards.
    def register(rows: MakeRows) -> MakeRows:
        DATASETS.register(rows.__name__.replace("_", "-"), BuiltinSet(rows, retrieval), module=rows.__module__)
        return rows

    return register if rows is None else register(rows)


def load_builtin(name: str, split: str) -> Rows:
    """Return one split of a built-in set: train, dev (or val, validation) or test.

    Raises:
        DataError: There is no such set or split.
        MachineError: What the set is made from is not installed.
    """
    builtin, role = find_builtin(name, split)
    return builtin.rows(role)


def load_builtin_retrieval(name: str, split: str) -> RetrievalData | None:
    """Return one split of a built-in set as a retrieval task, or None when the set's rows say all.

    Raises:
        DataError: There is no such set or split.
    """
    builtin, role = find_builtin(name, split)
    return None if builtin.retrieval is None else builtin.retrieval(role)


def find_builtin(name: str, split: str) -> tuple[BuiltinSet, Role]:
    """Return a set, and the role that a split serves.

    Raises:
        DataError: There is no such set or split.
    """
    if name not in DATASETS:
        names = DATASETS.names()
        msg = f"no built-in data set {name!r}{closest(name, names)}; there are: {', '.join(names)}"
        raise DataError(msg)
    role = role_of(split)  # by any of its names: dev, val and validation are one
    if role is None:
        msg = f"builtin:{name} has no split {split!r}; it has: train, dev, test"
        raise DataError(msg)
    return DATASETS.load(name), role


def hash_of(text: str) -> int:
    """Return 64 bits of the SHA-256 of a text, equal on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def role_by_hash(group: str) -> Role:
    """Return the split of rows that must stay together: of all names of groups 80% train, 10% validation, 10% test."""
    bucket = hash_of(group) % 10
    if bucket < 8:
        return "train"
    return "validation" if bucket == 8 else "test"
