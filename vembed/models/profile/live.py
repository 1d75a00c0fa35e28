"""Count the bytes that are alive while operations run, on fake tensors as well as on real ones.

Every allocation and every release is an event. Afterwards the events say which storages were alive at any moment, and
how large each was. A run with numbers of rows and tokens that divide nothing else tells by division alone how a storage
grows: with both, with the rows, with pairs of tokens, or not at all. One run so stands for all sizes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vembed.plan.memory import CallCost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class LiveBytes(TorchDispatchMode):
    """Records allocations and releases while it is entered."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[int] = []
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ignored: dict[int, torch.UntypedStorage] = {}
        self.ignore(known)

    def ignore(self, known: Iterable[Tensor]) -> None:
        """Let tensors count for nothing."""
        storages = [tensor.untyped_storage() for tensor in known]
        self._ignored |= {storage._cdata: storage for storage in storages}

    def __torch_dispatch__(  # type: ignore[no-untyped-def]  # the signature is torch's
        self, func, types, args=(), kwargs=None
    ) -> Any:
        """Run an operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._ignored or not size:
            return
        self.events.append(size)

        def released(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self.events.append(-size)

        self._alive[key] = weakref.ref(storage, released)

    def now(self) -> int:
        """Return the present moment: the number of events so far."""
        return len(self.events)

    def worst(self, first: int = 0) -> int:
        """Return the moment, not before `first`, at which most bytes are alive."""
        totals = list(accumulate(self.events, initial=0))
        return max(range(first, len(totals)), key=totals.__getitem__)

    def alive_at(self, moment: int) -> Counter[int]:
        """Return the sizes of the storages that are alive at a moment, with how many there are of each."""
        sizes: Counter[int] = Counter()
        for event in self.events[:moment]:
            sizes[abs(event)] += 1 if event > 0 else -1
        return +sizes


def as_cost(sizes: Counter[int], *, rows: int, width: int, fixed: bool = False) -> CallCost:
    """Return how the storages of a run grow with rows and tokens.

    Args:
        sizes: Bytes of each storage, with how many there are; negative counts are taken away.
        width: Tokens of a row; what grows with the rows alone is shared out over them.
        fixed: Whether all rows are of that width, as pictures are.
    """
    per_call = per_row = per_token = per_pair = 0.0
    for size, count in sizes.items():
        if size % rows:
            per_call += count * size
        elif not fixed and size % (rows * width * width) == 0:
            per_pair += count * size / (rows * width * width)
        elif not fixed and size % (rows * width) == 0:
            per_token += count * size / (rows * width)
        else:
            per_row += count * size / rows
    return CallCost(per_token + per_row / width, per_pair, per_call)
