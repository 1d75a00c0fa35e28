"""Built-in data sets, made from what is installed: nothing is downloaded.

Here: one file per set, and their registry. Not here: how records are checked or batched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.data.builtin import shapes, stdlib_code
from vembed.data.columns import closest
from vembed.data.splits import role_of
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vembed.data.records import LoadedRecords
    from vembed.data.retrieval import RetrievalData
    from vembed.data.splits import Role

BUILTIN_SETS: Mapping[str, Callable[[Role], LoadedRecords]] = {
    "shapes": shapes.load,
    "stdlib-code": stdlib_code.load,
}
"""Name after `builtin:` -> the function that returns one split's records."""

BUILTIN_RETRIEVAL: Mapping[str, Callable[[Role], RetrievalData]] = {"shapes": shapes.load_retrieval}
"""The sets that have judgements of their own, because a record names only some of what is relevant."""


def load_builtin(name: str, split: str) -> LoadedRecords:
    """Return one split of a built-in set.

    Args:
        name: A key of `BUILTIN_SETS`.
        split: train, dev (or val, validation) or test.

    Raises:
        DataError: There is no such set or split.
        MachineError: What the set is made from is not installed.
    """
    role = _role(name, split)
    return BUILTIN_SETS[name](role)


def load_builtin_retrieval(name: str, split: str) -> RetrievalData | None:
    """Return one split of a built-in set as a retrieval task, or None when the set's records say all.

    Args:
        name: A key of `BUILTIN_SETS`.
        split: train, dev (or val, validation) or test.

    Raises:
        DataError: There is no such set or split.
    """
    role = _role(name, split)
    return BUILTIN_RETRIEVAL[name](role) if name in BUILTIN_RETRIEVAL else None


def _role(name: str, split: str) -> Role:
    if name not in BUILTIN_SETS:
        msg = f"no built-in data set {name!r}{closest(name, BUILTIN_SETS)}; there are: {', '.join(BUILTIN_SETS)}"
        raise DataError(msg)
    role = role_of(split)
    if role is None:
        msg = f"builtin:{name} has no split {split!r}; it has: train, dev, test"
        raise DataError(msg)
    return role
