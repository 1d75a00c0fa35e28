"""Save atomically, keep the right checkpoints, and find the newest one that is whole.

1. Check the free disk: 1.2 x the expected bytes of all processes.
2. Write into `.saving-step-N` beside the target: each process its own files, forced to disk and hashed.
3. When all went well, the first process writes the manifest; otherwise it deletes everything, and all warn and train
   on. Three failures in a row end the run.
4. Rename to `step-N`, force the parent folder to disk, replace LATEST, and BEST for a new best.
5. Only then delete: the last k and the best stay.

Invariant: at every moment the newest `step-N` folder that validates is a whole checkpoint, whatever was killed where.
Invariant: with several processes all of them have the same outcome; an error on one is an error on all, never a wait.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from vembed.checkpoint.contents import ALONE, LoadedCheckpoint, accept, read_checkpoint, validate, write_checkpoint
from vembed.checkpoint.folder import CheckpointFolder, free_disk_bytes, refuse_other_folder
from vembed.checkpoint.format import (
    JSON,
    Checkpoint,
    IncompleteCheckpointError,
    InvalidCheckpointError,
    Manifest,
    step_name,
)
from vembed.errors import MachineError, NonFiniteError, VembedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from vembed.distributed.ranks import Ranks

MAX_FAILURES: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of a save."""

    path: Path | None  # the step's folder; None when it was not saved
    num_bytes: int = 0  # written; 0 when the step was saved before, or not at all
    problem: str = ""  # why it was not saved

    @property
    def saved(self) -> bool:
        """Whether a whole checkpoint of the step is in place."""
        return self.path is not None


class CheckpointManager:
    """The checkpoints of one run, in one folder that no other run writes to.

    Making a manager touches nothing on disk, so that a reader can't disturb a run. With several processes all of them
    must call each method but `steps`, and all get the same outcome: the same checkpoint, or the same error.

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
        self._folder = CheckpointFolder(folder, keep_last=keep_last, free_bytes=free_bytes)
        self._failures = 0

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, JSON],
        stamp: Mapping[str, JSON],
        best: bool,
        reserved: int | None = None,
    ) -> SaveOutcome:
        """Save a step; one that is there and whole is left as it is. The arguments are the fields of `Checkpoint`.

        When the disk refused, the outcome's `saved` is False, the older checkpoints are untouched and training can go
        on.

        Args:
            reserved: Given at the last step alone: bytes that the save must leave free for the model. A disk that
                refuses then never ends the run.

        Raises:
            NonFiniteError: The model or the loss holds NaN or infinite weights; nothing was written.
            MachineError: The third save in a row that failed.
        """
        checkpoint = Checkpoint(step, best, tensors, state, stamp)
        target = self._folder.step_folder(step)
        if self._is_whole(target):
            if self.ranks.is_first:  # a kill may have come before this was done
                self._folder.point(step, best=best)
                self._folder.retain(step)
            return SaveOutcome(target)
        temporary = self._folder.temporary_folder(step)
        try:
            prepare = partial(self._folder.prepare, reserved=reserved or 0)
            num_bytes = write_checkpoint(temporary, checkpoint, self.ranks, prepare=prepare)
            self.ranks.from_first(lambda: self._folder.publish(step))
        except (OSError, NonFiniteError) as problem:
            return self._fail(step, problem, is_last=reserved is not None)
        self._failures = 0
        if self.ranks.is_first:  # the others needn't wait for this
            self._folder.point(step, best=best)
            self._folder.retain(step)
        return SaveOutcome(target, num_bytes)

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
        if source == "auto":
            return self._load_newest(required, check)
        self.ranks.from_first(lambda: refuse_other_folder(source))
        self._refuse_unseen(source)
        manifest = validate(source, self.ranks)
        return read_checkpoint(source, manifest, required=required, check=check, ranks=self.ranks)

    def best(self) -> Path | None:
        """Return the folder of the best checkpoint, every byte checked, or None when there is none.

        A broken one is reported with a warning, and the best before it is taken while it is still there.
        """
        found = self._validated_best()
        return None if found is None else found[0]

    def load_best(self, *, required: Collection[str] = ()) -> LoadedCheckpoint | None:
        """Load what `best` finds.

        Raises:
            InvalidCheckpointError: A required name is missing.
        """
        found = self._validated_best()
        return None if found is None else read_checkpoint(*found, required=required, ranks=self.ranks)

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending, whole or not."""
        return self._folder.steps()

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, so that a run that restarts from `step` never mixes with them.

        Without this, a run that goes back would find its own step numbers taken by the weights of the abandoned run.
        Nothing is deleted.

        Returns:
            The new names.

        Raises:
            MachineError: A folder can't be renamed.
        """
        moved = [self.folder / name for name in self.ranks.from_first(lambda: self._folder.rename_after(step))]
        if moved and self.ranks.is_first:
            _log.warning("The run continues from step %d; later checkpoints are kept as %s", step, [*map(str, moved)])
        return moved

    def make_room(self, kept: int) -> Path | None:
        """Delete the oldest checkpoint that nothing needs; called on the first process alone.

        Args:
            kept: A step that stays, as the newest whole one does.

        Returns:
            Where it was; None where there is none but these.
        """
        newest = next((step for step in reversed(self.steps()) if _validates(self._folder.step_folder(step))), None)
        return None if newest is None else self._folder.drop_oldest((newest, kept))

    def whole_ones(self) -> str:
        """Return which checkpoints are whole by their sizes, for a message."""
        names = [step_name(step) for step in self._folder.whole_steps()]
        return f"{', '.join(names)} in {self.folder} {'is' if len(names) == 1 else 'are'} whole" if names else ""

    def _fail(self, step: int, problem: OSError | NonFiniteError, *, is_last: bool) -> SaveOutcome:
        """Clear up after a failed save; raise for what training must not survive."""
        if self.ranks.is_first:
            self._folder.discard(step)
        if isinstance(problem, NonFiniteError):
            raise problem
        self._failures += 1
        whole = self.ranks.from_first(self.whole_ones)
        if is_last:
            again = f"the same command would continue from there: {whole}" if whole else "no earlier one is whole"
            level = logging.WARNING if self.ranks.is_first else logging.DEBUG
            _log.log(level, "The last checkpoint is not saved in %s: %s; %s", self.folder, problem, again)
        elif self._failures >= MAX_FAILURES:
            saved = f"resume: {whole}" if whole else "start again: no checkpoint of this run is whole"
            raise MachineError(
                f"{self.folder}: {self._failures} saves in a row failed, the last with: {problem}. "
                f"Free some space or point output_dir at another disk, then {saved}"
            ) from problem
        elif self.ranks.is_first:
            _log.warning(
                "Checkpoint not saved in %s, training continues (failure %d of %d in a row): %s",
                self.folder, self._failures, MAX_FAILURES, problem,
            )  # fmt: skip
        return SaveOutcome(None, problem=str(problem))

    def _is_whole(self, folder: Path) -> bool:
        """Return whether a folder is a checkpoint with every byte in place."""
        if not self.ranks.from_first(folder.exists):
            return False
        try:
            validate(folder, self.ranks)
        except InvalidCheckpointError:
            return False
        return True

    def _refuse_unseen(self, folder: Path) -> None:
        """Refuse to continue where a process doesn't see what the first one sees.

        Raises:
            MachineError: Names the process.
        """
        seen = self.ranks.gather_objects(self.ranks.together(folder.is_dir))
        if blind := [rank for rank, sees in enumerate(seen) if not sees]:
            raise MachineError(
                f"{folder}: process 0 sees this folder and process {blind[0]} doesn't; output_dir must be on a file "
                f"system that all machines share"
            )

    def _load_newest(
        self, required: Collection[str], check: Callable[[LoadedCheckpoint], object]
    ) -> LoadedCheckpoint | None:
        """Load the highest step that validates; None when there are no steps."""
        self.ranks.from_first(lambda: _refuse_file(self.folder))
        steps = self.ranks.from_first(self.steps)
        if steps:
            self._refuse_unseen(self.folder)
        for step in reversed(steps):
            folder = self._folder.step_folder(step)
            try:
                manifest = validate(folder, self.ranks)
                return read_checkpoint(folder, manifest, required=required, check=check, ranks=self.ranks)
            except IncompleteCheckpointError:
                raise
            except InvalidCheckpointError as error:
                if self.ranks.is_first:
                    _log.warning("Checkpoint %s skipped: %s", folder.name, error)
        if steps:
            raise InvalidCheckpointError(
                f"{self.folder}: none of its {len(steps)} checkpoints is whole (see the lines above). "
                "Training does not start over by itself: set resume: never, or use another output_dir."
            )
        return None

    def _validated_best(self) -> tuple[Path, Manifest] | None:
        """Return the best checkpoint that validates."""
        steps = self.ranks.from_first(self._folder.best_steps)
        for step in reversed(steps):
            folder = self._folder.step_folder(step)
            try:
                return folder, validate(folder, self.ranks)
            except InvalidCheckpointError as error:
                if self.ranks.is_first:
                    _log.warning("Best checkpoint %s skipped: %s", folder.name, error)
        return None


def _refuse_file(folder: Path) -> None:
    """Refuse what stands in the place of the checkpoints: a run that starts anew would delete it.

    Raises:
        InvalidCheckpointError: It is no folder, or a link to nothing.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise InvalidCheckpointError(
            f"{folder} is no folder, and a run's checkpoints lie in one. Bring it back, or move this away to start anew"
        )


def _validates(folder: Path) -> bool:
    try:
        validate(folder)
    except VembedError:
        return False
    return True
