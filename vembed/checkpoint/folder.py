"""The folder of a run's checkpoints, as one process changes it: names, pointers, what is kept and what goes.

LATEST and BEST are for people and scripts; whoever loads looks at the folders themselves, because a kill between the
rename and the pointer leaves the pointer one save behind.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
from typing import TYPE_CHECKING, Final

from vembed.checkpoint.format import (
    MANIFEST,
    FutureCheckpointError,
    InvalidCheckpointError,
    Manifest,
    parse_step,
    read_manifest,
    step_name,
)
from vembed.errors import ConfigError, MachineError
from vembed.files import fsync_path, replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

LATEST: Final = "LATEST"
BEST: Final = "BEST"

_SAVING: Final = ".saving-"
_DELETING: Final = ".deleting-"
_ABANDONED: Final = "abandoned-"
DISK_MARGIN: Final = 1.2
"""A save asks for so much more room than its bytes."""

_log = logging.getLogger(__name__)


def free_disk_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write where a folder lies."""
    return shutil.disk_usage(folder).free


class CheckpointFolder:
    """The step folders of one run; `path` holds them and is made at the first save."""

    def __init__(self, path: Path, *, keep_last: int, free_bytes: Callable[[Path], int]) -> None:
        self.path = path
        self._keep_last = keep_last
        self._free_bytes = free_bytes

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending, whole or not."""
        return steps_in(self.path)

    def step_folder(self, step: int) -> Path:
        """Return where a step's checkpoint is, or will be."""
        return self.path / step_name(step)

    def temporary_folder(self, step: int) -> Path:
        """Return where a step's checkpoint is written."""
        return self.path / f"{_SAVING}{step_name(step)}"

    def prepare(self, num_bytes: int, *, reserved: int = 0) -> None:
        """Make room for a save of so many bytes.

        Args:
            reserved: Bytes that must stay free beside it.

        Raises:
            OSError: The folder can't be made, or the disk hasn't 1.2 times the bytes.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        needed, free = int(num_bytes * DISK_MARGIN), self._free_bytes(self.path)
        if free < needed + reserved:
            kept = f" and {reserved / 1e6:.1f} MB kept for model/" if reserved else ""
            words = f"{needed / 1e6:.1f} MB needed (1.2 x the size){kept}, {free / 1e6:.1f} MB free"
            raise OSError(errno.ENOSPC, words)

    def publish(self, step: int) -> None:
        """Give a written folder its name; what stands there was found broken and makes room.

        Raises:
            OSError: The disk refused.
        """
        target = self.step_folder(step)
        if os.path.lexists(target):
            _log.warning("%s is broken and is replaced", target)
            self._delete(target)
        self.temporary_folder(step).rename(target)
        fsync_path(self.path)

    def discard(self, step: int) -> None:
        """Delete what a failed save has written; a failure is a warning."""
        temporary = self.temporary_folder(step)
        with _warns(f"{temporary} can't be deleted"):
            _remove_tree(temporary)

    def point(self, step: int, *, best: bool) -> None:
        """Bring LATEST and BEST up to date; a failure is a warning, because nothing here relies on them."""
        for name in (LATEST, BEST) if best else (LATEST,):
            with _warns(f"{self.path / name} can't be updated"):
                replace_text(self.path / name, f"{step_name(step)}\n")

    def retain(self, newest: int) -> None:
        """Delete what is older than the last k whole checkpoints and not the best, and what kills have left."""
        self._clear_leftovers()
        manifests = self._manifests()
        whole = [step for step in manifests if step <= newest]
        best = self._best_of(manifests)[-1:]
        oldest_kept = min(whole[-self._keep_last :], default=0)
        for step in self.steps():
            if step < oldest_kept and step not in best:
                with _warns(f"Old checkpoint {step_name(step)} can't be deleted"):
                    self._delete(self.step_folder(step))

    def drop_oldest(self, needed: Collection[int]) -> Path | None:
        """Delete the oldest checkpoint but those that are needed, and return where it was; None where there is none.

        Raises:
            OSError: The disk refused.
        """
        for step in self.steps():
            if step not in needed:
                self._delete(self.step_folder(step))
                return self.step_folder(step)
        return None

    def _delete(self, folder: Path) -> None:
        """Rename, then delete: a kill in between leaves no half-empty folder with a checkpoint's name."""
        doomed = folder.with_name(f"{_DELETING}{folder.name}")
        folder.rename(doomed)
        _remove_tree(doomed)

    def _clear_leftovers(self) -> None:
        """Delete what killed saves and deletions left; only names that this module gives."""
        for path in self.path.iterdir():
            if path.name.startswith((f"{_SAVING}step-", f"{_DELETING}step-")):
                with _warns(f"Leftover {path} can't be deleted"):
                    _remove_tree(path)

    def rename_after(self, step: int) -> list[str]:
        """Rename the checkpoints of later steps and return their new names.

        Raises:
            MachineError: A folder can't be renamed.
        """
        later = [number for number in self.steps() if number > step]
        run = next(n for n in itertools.count(1) if not any(self.path.glob(f"{_ABANDONED}{n}-*")))
        moved = []
        for name in map(step_name, later):
            target = self.path / f"{_ABANDONED}{run}-{name}"
            try:
                (self.path / name).rename(target)
            except OSError as error:
                raise MachineError(f"{target.with_name(name)}: can't be renamed ({error}); move it away") from error
            moved.append(target.name)
        if moved:
            fsync_path(self.path)
        return moved

    def _manifests(self) -> dict[int, Manifest]:
        """Return the manifests of the steps whose files have the right sizes, ascending; reads no tensors."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(InvalidCheckpointError, FutureCheckpointError):
                found[step] = read_manifest(self.step_folder(step))
        return found

    def whole_steps(self) -> list[int]:
        """Return the steps whose files have the right sizes, ascending."""
        return list(self._manifests())

    def best_steps(self) -> list[int]:
        """Return the steps that were the best when saved, ascending: each one beats those before it."""
        return self._best_of(self._manifests())

    def _best_of(self, manifests: Mapping[int, Manifest]) -> list[int]:
        marked = {step for step, manifest in manifests.items() if manifest.best}
        try:
            pointed = parse_step((self.path / BEST).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            pointed = None
        if pointed in self.steps():
            marked.add(pointed)
        return sorted(marked)


@contextlib.contextmanager
def _warns(what: str) -> Iterator[None]:
    """Make a warning of a disk that refuses."""
    try:
        yield
    except OSError as error:
        _log.warning("%s: %s", what, error)


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder, ascending; what only has the name of one counts, and is found broken."""
    if not folder.is_dir():
        return []
    found = (parse_step(path.name) for path in folder.iterdir())
    return sorted(step for step in found if step is not None)


def refuse_other_folder(path: Path) -> None:
    """Refuse a path that is no checkpoint, and name the newest one nearby.

    Raises:
        ConfigError: It is none.
    """
    if path.is_dir() and (parse_step(path.name) is not None or (path / MANIFEST).exists()):
        return
    for near in (path, path / "checkpoints", path.parent):
        if steps := steps_in(near):
            raise ConfigError(
                f"resume: {path} is not a checkpoint; the newest one nearby is {near / step_name(steps[-1])}"
            )
    raise ConfigError(f"resume: {path} is not a checkpoint; name a step-... folder, or use --resume auto")


def _remove_tree(path: Path) -> None:
    """Delete a folder that may not be there, or what stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
