"""Built-in data sets, made from what is installed: nothing is downloaded.

Here: one file per set, and their registry. Not here: how records are checked or batched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vembed.data.builtin import stdlib_code
from vembed.data.columns import closest
from vembed.data.splits import role_of
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vembed.data.records import LoadedRecords
    from vembed.data.splits import Role

BUILTIN_SETS: Mapping[str, Callable[[Role], LoadedRecords]] = {"stdlib-code": stdlib_code.load}
"""Name after `builtin:` -> the function that returns one split's records."""


def load_builtin(name: str, split: str) -> LoadedRecords:
    """Return one split of a built-in set.

    Args:
        name: A key of `BUILTIN_SETS`.
        split: train, dev (or val, validation) or test.

    Raises:
        DataError: There is no such set or split.
        MachineError: What the set is made from is not installed.
    """
    if name not in BUILTIN_SETS:
        msg = f"no built-in data set {name!r}{closest(name, BUILTIN_SETS)}; there are: {', '.join(BUILTIN_SETS)}"
        raise DataError(msg)
    role = role_of(split)
    if role is None:
        msg = f"builtin:{name} has no split {split!r}; it has: train, dev, test"
        raise DataError(msg)
    return BUILTIN_SETS[name](role)
