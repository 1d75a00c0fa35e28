"""Data sets that code makes: our own, made from what is installed without any download, and those of plugins.

Here: one file per set of our own, and `register_dataset`. Not here: how records are checked or batched.
"""

from __future__ import annotations

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
    """What stands behind `builtin:NAME`."""

    rows: MakeRows  # of one split; dictionaries are checked as rows of a file are
    retrieval: Callable[[Role], RetrievalData] | None = None  # where a row names only some of what is relevant
    holds_pictures: bool = False  # known without making the set; a plugin's set isn't known


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
    if rows is None:
        return lambda function: _registered(function, retrieval)
    return _registered(rows, retrieval)


def _registered(rows: MakeRows, retrieval: Callable[[Role], RetrievalData] | None) -> MakeRows:
    DATASETS.register(rows.__name__.replace("_", "-"), BuiltinSet(rows, retrieval), module=rows.__module__)
    return rows


def load_builtin(name: str, split: str) -> Rows:
    """Return one split of a built-in set: train, dev (or val, validation) or test.

    Raises:
        DataError: There is no such set or split.
        MachineError: What the set is made from is not installed.
    """
    made, role = _find(name, split)
    return made.rows(role)


def load_builtin_retrieval(name: str, split: str) -> RetrievalData | None:
    """Return one split of a built-in set as a retrieval task, or None when the set's rows say all.

    Raises:
        DataError: There is no such set or split.
    """
    made, role = _find(name, split)
    return None if made.retrieval is None else made.retrieval(role)


def _find(name: str, split: str) -> tuple[BuiltinSet, Role]:
    if name not in DATASETS:
        names = DATASETS.names()
        msg = f"no built-in data set {name!r}{closest(name, names)}; there are: {', '.join(names)}"
        raise DataError(msg)
    role = role_of(split)
    if role is None:
        msg = f"builtin:{name} has no split {split!r}; it has: train, dev, test"
        raise DataError(msg)
    return DATASETS.load(name), role
