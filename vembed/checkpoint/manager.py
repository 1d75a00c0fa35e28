"""Save atomically, keep the right checkpoints, and find the newest one that is whole.

1. Check the free disk: 1.2 x the expected bytes of all processes.
2. Write into `.saving-step-N` beside the target: each process its own files, forced to disk and hashed.
3. When all went well, the first process writes the manifest; otherwise it deletes everything, and all warn and train
   on. Three failures in a row end the run.
4. Rename to `step-N`, force the parent folder to disk, replace LATEST, and BEST for a new best.
5. Only then delete: the last k and the best stay.

Invariant: at every moment the newest `step-N` folder that validates is a whole checkpoint, whatever was killed where.
Invariant: with several processes all of them have the same outcome; an error on one is an error on all, never a wait.

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
from typing import TYPE_CHECKING, Final, Literal

from vembed.checkpoint.format import (
    BEST,
    DISK_MARGIN,
    JSON,
    LATEST,
    FutureCheckpointError,
    IncompleteCheckpointError,
    InvalidCheckpointError,
    Manifest,
    free_disk_bytes,
    parse_step,
    read_manifest,
    refuse_other_folder,
    step_name,
    steps_in,
)
from vembed.checkpoint.tensors import ALONE, LoadedCheckpoint, accept, read_checkpoint, validate, write_checkpoint
from vembed.errors import MachineError, NonFiniteError, VembedError
from vembed.files import fsync_path, replace_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from vembed.distributed.ranks import Ranks

MAX_FAILURES: Final = 3

_SAVING: Final = ".saving-"
_DELETING: Final = ".deleting-"
_ABANDONED: Final = "abandoned-"

_log = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one run, in one folder that no other run writes to.

    Making a manager touches nothing on disk, so that a reader can't disturb a run. With several processes all of them
    must call each method but `steps`, `make_room` and `whole_ones`, and all get the same outcome: the same checkpoint,
    or the same error.

    Args:
        folder: Where the step folders lie, the same for all processes; made at the first save.
        keep_last: Newest checkpoints kept besides the best; at least 2, because the newest may turn out to be broken.
        ranks: The processes of the run. The first one names, points and deletes.
        free_bytes: Returns the free bytes of a folder's disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        ranks: Ranks = ALONE,
        free_bytes: Callable[[Path], int] = free_disk_bytes,
    ) -> None:
        if keep_last < 2:
            raise ValueError(f"keep_last is {keep_last}; at least 2, because the newest checkpoint may be broken")
        self.folder = folder
        self.ranks = ranks
        self._keep_last = keep_last
        self._free_bytes = free_bytes
        self._num_failures = 0  # saves in a row

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending, whole or not."""
        return steps_in(self.folder)

    # Saving

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, JSON],
        stamp: Mapping[str, JSON],
        best: bool,
        reserved: int | None = None,
    ) -> Path | None:
        """Save a step; one that is there and whole is left as it is.

        When the disk refused, the older checkpoints are untouched and training can go on.

        Args:
            step: Optimizer steps done.
            tensors: Part ("model", "optimizer" ...) -> name -> tensor, on any device.
            state: Counters and numbers of the run.
            stamp: Identity of the run, with `STAMP_KEYS`.
            best: Whether no earlier checkpoint of the run has a better dev metric.
            reserved: For the last step alone: bytes that the save must leave free for the model. A disk that refuses
                then never ends the run.

        Returns:
            The step's folder, a whole checkpoint; None where the disk refused.

        Raises:
            ValueError: Parts, state or stamp can't be written.
            NonFiniteError: The model or the loss holds NaN or infinite weights; nothing was written.
            MachineError: The third save in a row that failed.
        """
        target, temporary = self.folder / step_name(step), self.folder / f"{_SAVING}{step_name(step)}"
        if not self._is_whole(target):
            try:
                write_checkpoint(
                    temporary,
                    step=step, best=best, tensors=tensors, state=state, stamp=stamp, ranks=self.ranks,
                    prepare=lambda num_bytes: self._make_ready(num_bytes, reserved or 0),
                )  # fmt: skip
                self.ranks.from_first(lambda: self._publish(temporary, target))
            except (OSError, NonFiniteError) as problem:
                self._judge_failure(problem, temporary, is_last=reserved is not None)
                return None
            self._num_failures = 0
        # The first process alone; the others needn't wait. Also where the step was there before, and BEST also for an
        # earlier one: a kill may have come between its rename and this.
        if self.ranks.is_first:
            best_step = step if best else max(self._best_of(self._manifests()), default=None)
            for name, pointed in ((LATEST, step), (BEST, best_step)):
                if pointed is not None and self._pointed(name) != pointed:
                    with _warns(f"{self.folder / name} can't be updated"):  # nothing here relies on them
                        replace_text(self.folder / name, f"{step_name(pointed)}\n")
            self._retain(step)
        return target

    def _is_whole(self, folder: Path) -> bool:
        if not self.ranks.from_first(folder.exists):
            return False
        try:
            validate(folder, self.ranks)
        except InvalidCheckpointError:
            return False
        return True

    def _make_ready(self, num_bytes: int, reserved: int) -> None:
        """Make the folder and see that the disk has room for a save and for the reserved bytes beside it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()  # of saves that were killed, whose bytes count as used
        needed, free = int(num_bytes * DISK_MARGIN), self._free_bytes(self.folder)
        if free < needed + reserved:
            kept = f" and {reserved / 1e6:.1f} MB kept for model/" if reserved else ""
            words = f"{needed / 1e6:.1f} MB needed (1.2 x the size){kept}, {free / 1e6:.1f} MB free"
            raise OSError(errno.ENOSPC, words)

    def _publish(self, temporary: Path, target: Path) -> None:
        """Give a written folder its name; whatever has that name was found broken and makes room."""
        if os.path.lexists(target):
            _log.warning("%s is broken and is replaced", target)
            self._delete(target)
        temporary.rename(target)
        fsync_path(self.folder)

    def _retain(self, newest: int) -> None:
        """Delete what is older than the last k whole checkpoints and not the best, and what kills have left."""
        self._clear_leftovers()
        manifests = self._manifests()
        # Whole ones are counted, by sizes: a broken checkpoint must not push a whole one out.
        whole = [step for step in manifests if step <= newest]
        best = self._best_of(manifests)[-1:]
        oldest_kept = min(whole[-self._keep_last :], default=0)
        for step in self.steps():
            if step < oldest_kept and step not in best:
                with _warns(f"Old checkpoint {step_name(step)} can't be deleted"):
                    self._delete(self.folder / step_name(step))

    def _judge_failure(self, problem: OSError | NonFiniteError, temporary: Path, *, is_last: bool) -> None:
        """Clear up after a failed save; raise for what training must not survive."""
        if self.ranks.is_first:
            with _warns(f"{temporary} can't be deleted"):
                _remove_tree(temporary)
        if isinstance(problem, NonFiniteError):
            raise problem
        self._num_failures += 1
        whole = self.ranks.from_first(self.whole_ones)
        if is_last:
            again = f"the same command would continue from there: {whole}" if whole else "no earlier one is whole"
            level = logging.WARNING if self.ranks.is_first else logging.DEBUG
            _log.log(level, "The last checkpoint is not saved in %s: %s; %s", self.folder, problem, again)
        elif self._num_failures >= MAX_FAILURES:
            saved = f"resume: {whole}" if whole else "start again: no checkpoint of this run is whole"
            raise MachineError(
                f"{self.folder}: {self._num_failures} saves in a row failed, the last with: {problem}. "
                f"Free some space or point output_dir at another disk, then {saved}"
            ) from problem
        elif self.ranks.is_first:
            _log.warning(
                "Checkpoint not saved in %s, training continues (failure %d of %d in a row): %s",
                self.folder, self._num_failures, MAX_FAILURES, problem,
            )  # fmt: skip

    # Loading

    def load(
        self,
        source: Literal["auto"] | Path,
        *,
        required: Collection[str] = (),
        check: Callable[[LoadedCheckpoint], object] = accept,
    ) -> LoadedCheckpoint | None:
        """Load a checkpoint after checking every byte of it.

        Args:
            source: A step's folder, or "auto" for the newest step that validates. Newest is the highest step number;
                times and LATEST play no part. Broken ones are skipped with one warning each.
            required: Parts or keys of the state that must be there.
            check: Raises `ValueError` where stamp or state hasn't the shape that the caller needs: a broken one.

        Returns:
            The checkpoint, or None for "auto" in a folder without any.

        Raises:
            ConfigError: The path names no checkpoint.
            MachineError: A process doesn't see the folder that the first one sees.
            InvalidCheckpointError: The named one, or every one, is broken; or a required name is missing.
            FutureCheckpointError: The newest was written by a later version of vembed.
        """
        if source != "auto":
            self.ranks.from_first(lambda: refuse_other_folder(source))
            self._refuse_unseen(source)
            return read_checkpoint(
                source, validate(source, self.ranks), required=required, check=check, ranks=self.ranks
            )
        self.ranks.from_first(lambda: _refuse_file(self.folder))
        steps = self.ranks.from_first(self.steps)
        if not steps:
            return None
        self._refuse_unseen(self.folder)
        for step in reversed(steps):
            folder = self.folder / step_name(step)
            try:
                manifest = validate(folder, self.ranks)
                return read_checkpoint(folder, manifest, required=required, check=check, ranks=self.ranks)
            except IncompleteCheckpointError:
                raise  # whole, but not enough to continue from: an older one would lack the same
            except InvalidCheckpointError as error:
                if self.ranks.is_first:
                    _log.warning("Checkpoint %s skipped: %s", folder.name, error)
        raise InvalidCheckpointError(
            f"{self.folder}: none of its {len(steps)} checkpoints is whole (see the lines above). "
            "Training does not start over by itself: set resume: never, or use another output_dir."
        )

    def best(self) -> Path | None:
        """Return the folder of the best checkpoint, every byte checked, or None when there is none.

        A broken one is reported with a warning, and the best before it is taken while it is still there.
        """
        best = self._validated_best()
        return None if best is None else best[0]

    def load_best(self, *, required: Collection[str] = ()) -> LoadedCheckpoint | None:
        """Load the checkpoint that `best` returns.

        Raises:
            InvalidCheckpointError: A required name is missing.
        """
        best = self._validated_best()
        return None if best is None else read_checkpoint(*best, required=required, ranks=self.ranks)

    def _validated_best(self) -> tuple[Path, Manifest] | None:
        for step in reversed(self.ranks.from_first(lambda: self._best_of(self._manifests()))):
            folder = self.folder / step_name(step)
            try:
                return folder, validate(folder, self.ranks)
            except InvalidCheckpointError as error:
                if self.ranks.is_first:
                    _log.warning("Best checkpoint %s skipped: %s", folder.name, error)
        return None

    def _refuse_unseen(self, folder: Path) -> None:
        """Refuse to continue where a process doesn't see what the first one sees."""
        sights = self.ranks.gather_objects(self.ranks.together(folder.is_dir))
        if blind := [rank for rank, sees in enumerate(sights) if not sees]:
            raise MachineError(
                f"{folder}: process 0 sees this folder and process {blind[0]} doesn't; output_dir must be on a file "
                f"system that all machines share"
            )

    # Going back, and making room

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, so that a run that restarts from `step` never mixes with them.

        Without this, a run that goes back would find its own step numbers taken by the weights of the abandoned run.
        Nothing is deleted.

        Returns:
            The new names.

        Raises:
            MachineError: A folder can't be renamed.
        """

        def rename() -> list[str]:
            # A run may go back several times; the names of each time bear a number of their own.
            attempt = next(n for n in itertools.count(1) if not any(self.folder.glob(f"{_ABANDONED}{n}-*")))
            names = []
            for name in (step_name(number) for number in self.steps() if number > step):
                target = self.folder / f"{_ABANDONED}{attempt}-{name}"
                try:
                    (self.folder / name).rename(target)
                except OSError as error:
                    raise MachineError(f"{target.with_name(name)}: can't be renamed ({error}); move it away") from error
                names.append(target.name)
            if names:
                fsync_path(self.folder)
            # A BEST that names a later step would mark what the run is about to save of that step. Last, and whether or
            # not anything was renamed: a kill may have come between, or the later folders were deleted by hand.
            if (self._pointed(BEST) or 0) > step:
                (self.folder / BEST).unlink()
            return names

        moved = [self.folder / name for name in self.ranks.from_first(rename)]
        if moved and self.ranks.is_first:
            _log.warning("The run continues from step %d; later checkpoints are kept as %s", step, [*map(str, moved)])
        return moved

    def make_room(self, kept: int) -> Path | None:
        """Delete the oldest checkpoint that nothing needs; called on the first process alone.

        Args:
            kept: A step that stays, as the newest whole one does.

        Returns:
            Where it was; None where there is none but these.

        Raises:
            OSError: The disk refused.
        """
        steps = self.steps()
        for newest in reversed(steps):
            with contextlib.suppress(VembedError):
                validate(self.folder / step_name(newest))
                break
        else:
            return None
        oldest = next((step for step in steps if step not in (newest, kept)), None)
        if oldest is None:
            return None
        self._delete(self.folder / step_name(oldest))
        return self.folder / step_name(oldest)

    def whole_ones(self) -> str:
        """Return which checkpoints are whole by their sizes, for a message."""
        names = [step_name(step) for step in self._manifests()]
        return f"{', '.join(names)} in {self.folder} {'is' if len(names) == 1 else 'are'} whole" if names else ""

    # The folders

    def _manifests(self) -> dict[int, Manifest]:
        """Return the manifests of the steps whose files have the right sizes, ascending; reads no tensors."""
        manifests = {}
        for step in self.steps():
            with contextlib.suppress(InvalidCheckpointError, FutureCheckpointError):
                manifests[step] = read_manifest(self.folder / step_name(step))
        return manifests

    def _best_of(self, manifests: Mapping[int, Manifest]) -> list[int]:
        """Return the steps that were the best when saved, ascending: each one beats those before it."""
        marked = {step for step, manifest in manifests.items() if manifest.best}
        # A step that was saved before it was known to be the best has only the pointer.
        pointed = self._pointed(BEST)
        if pointed in self.steps():
            marked.add(pointed)
        return sorted(marked)

    def _pointed(self, name: str) -> int | None:
        """Return the step that LATEST or BEST names, None where it isn't there or is damaged."""
        try:
            return parse_step((self.folder / name).read_text(encoding="utf-8").strip())
        except (OSError, ValueError):
            return None

    def _delete(self, folder: Path) -> None:
        """Rename, then delete: a kill in between leaves no half-empty folder with a checkpoint's name."""
        doomed = folder.with_name(f"{_DELETING}{folder.name}")
        folder.rename(doomed)
        _remove_tree(doomed)

    def _clear_leftovers(self) -> None:
        """Delete what killed saves and deletions left; only names that this class gives."""
        for path in self.folder.iterdir():
            if path.name.startswith((f"{_SAVING}step-", f"{_DELETING}step-")):
                with _warns(f"Leftover {path} can't be deleted"):
                    _remove_tree(path)


@contextlib.contextmanager
def _warns(action: str) -> Iterator[None]:
    """Make a warning of a disk that refuses."""
    try:
        yield
    except OSError as error:
        _log.warning("%s: %s", action, error)


def _remove_tree(path: Path) -> None:
    """Delete a folder, or whatever has its name, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _refuse_file(folder: Path) -> None:
    """Refuse a file, or a link to nothing, in place of the folder: a run that starts anew would delete it."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise InvalidCheckpointError(
            f"{folder} is no folder, and a run's checkpoints lie in one. Bring it back, or move this away to start anew"
        )
