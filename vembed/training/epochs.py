"""Batches that change with the model: before some epochs something is computed, and the batches from there on show it.

1. Asked for the first batch of such an epoch, data workers end: they would be ahead with batches of the old kind.
2. All ranks compute with the model as it stands; the first writes what was found to FOLDER/epoch-0000N.npz, whole or
   not at all, with a hash of the weights.
3. Workers start anew, with batches up to the next such epoch.

A run that is resumed inside of the epochs reads the file. At their beginning the file counts only while the weights are
those that it was computed with: after a crash the same steps may have been done otherwise.
"""

from __future__ import annotations

import json
import logging
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from vembed.errors import MachineError
from vembed.evaluation.provenance import digest, model_key
from vembed.files import new_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    import torch
    from numpy.typing import NDArray

    from vembed.distributed.ranks import Ranks
    from vembed.evaluation.provenance import Key
    from vembed.training.batches import Batches, BatchSource, PreparedBatch

_log = logging.getLogger(__name__)


class EpochWork(Protocol):
    """What is computed before some epochs, the first among them, and what it does to the batches."""

    @property
    def every(self) -> int | None:
        """Epochs from one time to the next; None is once, before the first."""

    @property
    def key(self) -> Key:
        """What it depends on beside the weights."""

    def compute(self, epoch: int) -> Mapping[str, NDArray[Any]]:
        """Compute with the model as it stands; all ranks call it, and what the first one returns is kept."""

    def applied(self, source: BatchSource, found: Mapping[str, NDArray[Any]]) -> BatchSource:
        """Return the source of the batches from there on."""


@dataclass(slots=True)
class EpochBatches:
    """Batches of a source that work before some epochs changes; use as a context manager."""

    work: EpochWork
    source: BatchSource
    open: Callable[[BatchSource, int], AbstractContextManager[Batches]]  # source and end -> what makes its batches
    folder: Path  # of the files; all ranks see it
    ranks: Ranks
    _opened: ExitStack = field(default_factory=ExitStack)
    _batches: Batches | None = None
    _end: int = 0  # first step beyond what is open
    _start: int = 0

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return self.source.device

    def batch(self, step: int) -> PreparedBatch:
        """Return the batch of a step, counted from 0.

        Raises:
            MachineError: What a resumed run needs is lost, or can't be written.
        """
        if self._batches is None or not self._start <= step < self._end:
            self._open(step)
        assert self._batches is not None
        return self._batches.batch(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, traceback)

    def _open(self, step: int) -> None:
        self._opened.close()  # data workers end
        self._batches = None
        per_epoch, every = self.source.sampler.batches_per_epoch, self.work.every
        epoch = step // per_epoch
        first = 0 if every is None else epoch - epoch % every
        self._start = first * per_epoch
        self._end = 2**62 if every is None else (first + every) * per_epoch
        path = self.folder / f"epoch-{first + 1:05}.npz"
        weights = model_key(self.source.encoder) if step == self._start else None
        found, why = self.ranks.from_first(lambda: self._read(path, weights))
        if found is None and weights is None:
            raise MachineError(
                f"{path}: {why}: it was computed with the model before epoch {first + 1}, and this run is beyond; go "
                f"on from an earlier checkpoint with resume=PATH, or start anew with resume=never"
            )
        source = self.work.applied(self.source, self._computed(path, first, weights) if found is None else found)
        self._batches = self._opened.enter_context(self.open(source, self._end))

    def _computed(self, path: Path, epoch: int, weights: Key | None) -> Mapping[str, NDArray[Any]]:
        found = self.work.compute(epoch)

        def write() -> None:
            made_of = np.array(json.dumps({"key": digest(self.work.key), "weights": digest(weights)}))
            arrays: dict[str, Any] = {"made_of": made_of, **found}
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with new_file(path) as temporary, temporary.open("wb") as file:
                    np.savez(file, **arrays)
            except OSError as error:
                raise MachineError(f"{path} can't be written: {error}; free some space there") from error

        self.ranks.from_first(write)
        return found

    def _read(self, path: Path, weights: Key | None) -> tuple[dict[str, NDArray[Any]] | None, str]:
        """Return what a file holds, or None and why not."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                made_of = json.loads(str(arrays["made_of"]))
                found = {name: arrays[name] for name in arrays.files if name != "made_of"}
        except FileNotFoundError:
            return None, "it isn't there"
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            return None, f"it can't be read ({error})"
        if made_of.get("key") != digest(self.work.key):
            return None, "it was computed with other data or settings"
        if weights is not None and made_of.get("weights") != digest(weights):
            return None, "it was computed with other weights"
        return found, ""
