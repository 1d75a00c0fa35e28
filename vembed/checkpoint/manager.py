"""Save atomically, keep the right checkpoints, and find the newest one that is whole.

1. Check the free disk: 1.2 x the expected bytes.
2. Write into `.saving-step-N` beside the target, each file forced to disk, the manifest last.
3. All ranks agree that it went well; otherwise delete it, warn and train on. Three failures in a row end the run.
4. Rename to `step-N`, force the parent folder to disk, replace LATEST, and BEST for a new best.
5. Only then delete: the last k and the best stay.

Invariant: at every moment the newest `step-N` folder that validates is a whole checkpoint, whatever was killed where.
LATEST and BEST are for people and scripts; `load` and `best` look at the folders themselves, because a kill between the
rename and the pointer leaves the pointer one save behind.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from vembed.checkpoint.agreement import alone
from vembed.checkpoint.format import (
    JSON,
    MANIFEST,
    Checkpoint,
    FutureCheckpointError,
    InvalidCheckpointError,
    LoadedCheckpoint,
    Manifest,
    parse_step,
    read_checkpoint,
    read_manifest,
    refuse_nonfinite,
    step_name,
    validate,
    write_checkpoint,
)
from vembed.errors import ConfigError, MachineError, NonFiniteError
from vembed.files import fsync_path, replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from vembed.checkpoint.agreement import Agree

LATEST: Final = "LATEST"
BEST: Final = "BEST"
MAX_FAILURES: Final = 3

_SAVING: Final = ".saving-"
_DELETING: Final = ".deleting-"
_ABANDONED: Final = "abandoned-"
_DISK_MARGIN: Final = 1.2

_log = logging.getLogger(__name__)


def free_disk_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write where a folder lies."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of a save.

    Attributes:
        saved: True when a whole checkpoint of the step is in place.
        path: Its folder; None when it was not saved.
        num_bytes: Bytes written; 0 when the step was saved before, or not at all.
        seconds: Wall time.
        problem: Why it was not saved; empty when it was.
    """

    saved: bool
    path: Path | None
    num_bytes: int
    seconds: float
    problem: str = ""


class CheckpointManager:
    """The checkpoints of one run, in one folder that no other run writes to.

    Making a manager touches nothing on disk, so that a reader can't disturb a run.

    Args:
        folder: Where the step folders lie; made at the first save.
        keep_last: Newest checkpoints kept besides the best; at least 2, because the newest may turn out to be broken.
        agree: Returns True when every rank passes True. Called at the same points of every save on every rank.
        free_bytes: Returns the free bytes of a folder's disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        agree: Agree = alone,
        free_bytes: Callable[[Path], int] = free_disk_bytes,
    ) -> None:
        if keep_last < 2:
            raise ValueError(f"keep_last is {keep_last}; at least 2, because the newest checkpoint may be broken")
        self.folder = folder
        self._keep_last = keep_last
        self._agree = agree
        self._free_bytes = free_bytes
        self._failures = 0

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, JSON],
        stamp: Mapping[str, JSON],
        best: bool,
    ) -> SaveOutcome:
        """Save a step; one that is there and whole is left as it is.

        Args:
            step: Optimizer steps done.
            tensors: Part ("model", "optimizer", "loss", "rng" ...) -> name -> tensor, on any device.
            state: The counters and numbers of the run.
            stamp: What the run is: `config_hash`, `strategy`, `world_size`, and whatever else a resume compares.
            best: True when no earlier checkpoint of the run has a better dev metric.

        Returns:
            The outcome. When the disk refused, `saved` is False, the older checkpoints are untouched and training can
            go on.

        Raises:
            NonFiniteError: The model or the loss holds NaN or infinite weights; nothing was written.
            MachineError: The third save in a row that failed.
        """
        started = time.monotonic()
        checkpoint = Checkpoint(step, best, tensors, state, stamp)
        target = self.folder / step_name(step)
        if self._agree(_is_whole(target)):
            self._point(target, best=best)
            return SaveOutcome(saved=True, path=target, num_bytes=0, seconds=time.monotonic() - started)
        temporary = self.folder / f"{_SAVING}{target.name}"
        num_bytes, problem = self._write(temporary, checkpoint)
        if self._agree(problem is None):
            problem = self._publish(temporary, target)
        elif problem is None:
            problem = OSError("another process could not write its part")
        if problem is not None:
            return self._fail(temporary, problem, started)
        self._failures = 0
        self._point(target, best=best)
        self._retain(step)
        return SaveOutcome(saved=True, path=target, num_bytes=num_bytes, seconds=time.monotonic() - started)

    def load(self, source: Literal["auto"] | Path, *, required: Collection[str] = ()) -> LoadedCheckpoint | None:
        """Load a checkpoint after checking every byte of it.

        Args:
            source: A step's folder, or "auto" for the newest step that validates. Newest is the highest step number;
                times and LATEST play no part. Broken ones are skipped with one warning each.
            required: Parts or keys of the state that must be there.

        Returns:
            The checkpoint, or None for "auto" in a folder without any.

        Raises:
            ConfigError: The path names no checkpoint.
            InvalidCheckpointError: The named one, or every one, is broken; or a required name is missing.
            FutureCheckpointError: The newest was written by a later version of vembed.
        """
        if source == "auto":
            return self._load_newest(required)
        named_otherwise = parse_step(source.name) is None and not (source / MANIFEST).exists()
        if not source.is_dir() or named_otherwise:
            raise ConfigError(_no_checkpoint(source))
        return read_checkpoint(source, validate(source), required=required)

    def best(self) -> Path | None:
        """Return the folder of the best checkpoint, every byte checked, or None when there is none.

        A broken one is reported with a warning, and the best before it is taken while it is still there.
        """
        for step in reversed(self._best_steps(self._manifests())):
            folder = self.folder / step_name(step)
            try:
                validate(folder)
            except InvalidCheckpointError as error:
                _log.warning("Best checkpoint %s skipped: %s", folder.name, error)
            else:
                return folder
        return None

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending, whole or not."""
        return _steps_in(self.folder)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, so that a run that restarts from `step` never mixes with them.

        Without this, a run that goes back would find its own step numbers taken by the weights of the abandoned run.
        Nothing is deleted.

        Returns:
            The new names.

        Raises:
            MachineError: A folder can't be renamed.
        """
        later = [number for number in self.steps() if number > step]
        run = next(n for n in itertools.count(1) if not any(self.folder.glob(f"{_ABANDONED}{n}-*")))
        moved = []
        for name in map(step_name, later):
            target = self.folder / f"{_ABANDONED}{run}-{name}"
            try:
                (self.folder / name).rename(target)
            except OSError as error:
                raise MachineError(f"{target.with_name(name)}: can't be renamed ({error}); move it away") from error
            moved.append(target)
        if moved:
            fsync_path(self.folder)
            _log.warning("The run goes on from step %d; later checkpoints are kept as %s", step, [*map(str, moved)])
        return moved

    def _write(self, temporary: Path, checkpoint: Checkpoint) -> tuple[int, OSError | NonFiniteError | None]:
        """Write the temporary folder; return its bytes and, instead of raising it, what went wrong.

        Every rank must reach the agreement that follows, so a failure travels as a value.
        """
        try:
            refuse_nonfinite(checkpoint)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear_leftovers()
            self._check_disk(checkpoint.num_bytes)
            return write_checkpoint(temporary, checkpoint), None
        except (OSError, NonFiniteError) as error:
            return 0, error

    def _check_disk(self, num_bytes: int) -> None:
        """Refuse to begin what will not fit."""
        needed, free = int(num_bytes * _DISK_MARGIN), self._free_bytes(self.folder)
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.1f} MB needed (1.2 x the size), {free / 1e6:.1f} MB free")

    def _publish(self, temporary: Path, target: Path) -> OSError | None:
        """Give a written folder its name; what stands there was found broken and makes room."""
        try:
            if target.exists():
                _log.warning("%s is broken and is replaced", target)
                self._delete(target)
            temporary.rename(target)
            fsync_path(self.folder)
        except OSError as error:
            return error
        return None

    def _fail(self, temporary: Path, problem: OSError | NonFiniteError, started: float) -> SaveOutcome:
        """Clear up after a failed save; raise for what training must not survive."""
        try:
            _remove_tree(temporary)
        except OSError as error:
            _log.warning("%s can't be deleted: %s", temporary, error)
        if isinstance(problem, NonFiniteError):
            raise problem
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise MachineError(
                f"{self.folder}: {self._failures} saves in a row failed, the last with: {problem}. "
                "Free some space or point output_dir at another disk, then resume: the older checkpoints are whole."
            ) from problem
        _log.warning(
            "Checkpoint not saved in %s, training goes on (failure %d of %d in a row): %s",
            self.folder, self._failures, MAX_FAILURES, problem,
        )  # fmt: skip
        return SaveOutcome(
            saved=False, path=None, num_bytes=0, seconds=time.monotonic() - started, problem=str(problem)
        )

    def _point(self, target: Path, *, best: bool) -> None:
        """Bring LATEST and BEST up to date; a failure is a warning, because nothing here relies on them."""
        for name in (LATEST, BEST) if best else (LATEST,):
            try:
                replace_text(self.folder / name, f"{target.name}\n")
            except OSError as error:
                _log.warning("%s can't be updated: %s", self.folder / name, error)

    def _retain(self, newest: int) -> None:
        """Delete what is older than the last k whole checkpoints and not the best."""
        manifests = self._manifests()
        whole = [step for step in manifests if step <= newest]
        best = self._best_steps(manifests)[-1:]
        oldest_kept = min(whole[-self._keep_last :], default=0)
        for step in self.steps():
            if step < oldest_kept and step not in best:
                try:
                    self._delete(self.folder / step_name(step))
                except OSError as error:
                    _log.warning("Old checkpoint %s can't be deleted: %s", step_name(step), error)

    def _delete(self, folder: Path) -> None:
        """Rename, then delete: a kill in between leaves no half-empty folder with a checkpoint's name."""
        doomed = folder.with_name(f"{_DELETING}{folder.name}")
        folder.rename(doomed)
        _remove_tree(doomed)

    def _clear_leftovers(self) -> None:
        """Delete what killed saves and deletions left; only names that this module gives."""
        for path in self.folder.iterdir():
            if path.name.startswith((f"{_SAVING}step-", f"{_DELETING}step-")):
                try:
                    _remove_tree(path)
                except OSError as error:
                    _log.warning("Leftover %s can't be deleted: %s", path, error)

    def _load_newest(self, required: Collection[str]) -> LoadedCheckpoint | None:
        """Load the highest step that validates; None when there are no steps."""
        steps = self.steps()
        for step in reversed(steps):
            folder = self.folder / step_name(step)
            try:
                manifest = validate(folder)
            except InvalidCheckpointError as error:
                _log.warning("Checkpoint %s skipped: %s", folder.name, error)
            else:
                return read_checkpoint(folder, manifest, required=required)
        if steps:
            raise InvalidCheckpointError(
                f"{self.folder}: none of its {len(steps)} checkpoints is whole (see the lines above). "
                "Training does not start over by itself: set resume: never, or use another output_dir."
            )
        return None

    def _manifests(self) -> dict[int, Manifest]:
        """Return the manifests of the steps whose files have the right sizes, ascending; reads no tensors."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(InvalidCheckpointError, FutureCheckpointError):
                found[step] = read_manifest(self.folder / step_name(step))
        return found

    def _best_steps(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Return the steps that were the best when saved, ascending: each one beats those before it."""
        marked = {step for step, manifest in manifests.items() if manifest.best}
        try:
            pointed = parse_step((self.folder / BEST).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            pointed = None
        if pointed in self.steps():
            marked.add(pointed)
        return sorted(marked)


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is a checkpoint with every byte in place."""
    if not folder.exists():
        return False
    try:
        validate(folder)
    except InvalidCheckpointError:
        return False
    return True


def _steps_in(folder: Path) -> list[int]:
    """Return the steps that have a folder, ascending."""
    if not folder.is_dir():
        return []
    found = (parse_step(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(step for step in found if step is not None)


def _remove_tree(path: Path) -> None:
    """Delete a folder that may not be there."""
    if path.exists():
        shutil.rmtree(path)


def _no_checkpoint(path: Path) -> str:
    """Say that a path is no checkpoint, and name the newest one nearby."""
    for near in (path, path / "checkpoints", path.parent):
        if steps := _steps_in(near):
            return f"resume: {path} is not a checkpoint; the newest one nearby is {near / step_name(steps[-1])}"
    return f"resume: {path} is not a checkpoint; name a step-... folder, or use --resume auto"
