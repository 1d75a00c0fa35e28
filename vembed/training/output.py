"""The output folder: what a run writes, and whose it is."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vembed.checkpoint.format import BEST, LATEST
from vembed.errors import ConfigError, MachineError
from vembed.files import in_the_way, replace_text
from vembed.models.names import MODEL_FOLDER, RUN_MARKS
from vembed.redact import RedactingFormatter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

OWN_NAMES = (
    "config.yaml",
    "plan.json",
    "exit.json",
    "metrics.jsonl",
    "checkpoints",
    "initial_model",
    "frozen_embeddings",
    "teacher",
    "hard_vectors",
    "mining",
    MODEL_FOLDER,
    "adapter",
    "evaluation",
    "report",
    "tensorboard",
    "trackers",
    "train.log",
)
"""Everything that a run writes, beside what `OWN_PATTERNS` match; nothing else in the folder is ever touched. The
log is deleted last: what a kill leaves of a folder can still be told from other people's files."""

OWN_PATTERNS = ("nonfinite-step-*.json", "metrics.jsonl.broken-*", "rows/*-????????????????.jsonl", "rows/.*.tmp")

EARLY_END = ["exit.json"]
"""Content of the folder of a run of several processes that failed before it began to write. Beside other files it is no
mark of a run."""


class _LogFile(logging.FileHandler):
    """The log's file; where it can't be written any more, that is said once, and the run continues."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - the signature that logging calls
        logger = logging.getLogger("vembed")
        logger.removeHandler(self)
        logger.warning("%s can't be written any more: %s", self.baseFilename, sys.exc_info()[1])


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def initial_model(self) -> Path:
        """Folder of an encoder from scratch before training: its tokenizer must outlive the process that trained it."""
        return self.path / "initial_model"

    @property
    def frozen_embeddings(self) -> Path:
        """Folder of the training items' embeddings by frozen towers."""
        return self.path / "frozen_embeddings"

    @property
    def teacher(self) -> Path:
        """Folder of a teacher's answers about the training items."""
        return self.path / "teacher"

    @property
    def hard_vectors(self) -> Path:
        """Folder of the vectors that hard batches are chosen by."""
        return self.path / "hard_vectors"

    @property
    def mining(self) -> Path:
        """Folder of each mining's hard negatives and report."""
        return self.path / "mining"

    @property
    def model(self) -> Path:
        """The exported model."""
        return self.path / MODEL_FOLDER

    @property
    def adapter(self) -> Path:
        """The adapters alone, where the run trained any."""
        return self.path / "adapter"

    def refuse_other_files(self) -> None:
        """Refuse a folder whose files have the names of a run's, but were not written by one.

        Raises:
            ConfigError: They would be replaced.
        """
        # Every run that writes anything writes plan.json or train.log. Other names of ours, such as a folder `model`,
        # are common: without a mark beside them they are somebody else's.
        present = [name for name in OWN_NAMES if (self.path / name).exists()]
        if present and present != EARLY_END and not any(name in RUN_MARKS for name in present):
            raise ConfigError(
                f"output_dir {self.path} holds {', '.join(present)}, which no run wrote and a run would replace; "
                f"choose an output_dir of its own, such as {self.path / 'run'}"
            )

    @property
    def holds_run(self) -> bool:
        """True with checkpoints or a model of a run; what a kill left of the first one (hidden) is neither."""
        return self._holds_checkpoints or self.model.exists()

    @property
    def _holds_checkpoints(self) -> bool:
        # Where the checkpoints were deleted by hand, the pointers to them are left, and nothing to continue from.
        return self.checkpoints.is_dir() and any(
            path.name[0] != "." and path.name not in (LATEST, BEST) for path in self.checkpoints.iterdir()
        )

    def refuse_taken(self, *, overwrite: bool, reads: Collection[Path] = ()) -> None:
        """Refuse a folder in which a run can't start from step 0.

        Args:
            overwrite: Whether another run's files may be deleted.
            reads: Files and folders that the new run reads.

        Raises:
            ConfigError: The folder holds another run, files that no run wrote, or what the new run reads.
        """
        self.refuse_other_files()
        if self.holds_run and not overwrite:
            what, way = "another run", "Continue it (resume=auto), choose"
            if not self._holds_checkpoints:
                what, way = "the model of a run, and no checkpoint to continue from", "Choose"
            raise ConfigError(
                f"output_dir {self.path} holds {what}. {way} another output_dir, or delete it with "
                f"overwrite_output_dir=true"
            )
        # Resolved, as a link may lead into the folder from outside.
        deleted = [(self.path / name).resolve() for name in OWN_NAMES]
        for path in reads:
            if any(path.resolve().is_relative_to(entry) for entry in deleted):
                raise ConfigError(
                    f"output_dir {self.path} holds what the run reads, and overwrite_output_dir would delete it: "
                    f"{path}; choose another output_dir"
                )

    def refuse_unwritable(self) -> None:
        """Refuse a folder that can't be made or written, as far as that shows without writing.

        Raises:
            MachineError: It can't.
        """
        path = self.path.expanduser().absolute()
        reason = in_the_way(path)
        if not reason:
            there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
            reason = "" if os.access(there, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
        if reason:
            raise MachineError(f"output folder {path} can't be written: {reason}. Choose another folder")

    def start_fresh(self, *, overwrite: bool, reads: Collection[Path] = ()) -> None:
        """Make the folder ready for a run from step 0.

        Args:
            overwrite: Whether another run's files may be deleted. Files of a run that was killed before its first
                checkpoint are deleted in any case, but for what its teacher said: nothing else can be used.
            reads: Files and folders that the new run reads: rows of a Python caller lie in the folder.

        Raises:
            ConfigError: The folder holds another run, files that no run wrote, or what the new run reads.
            MachineError: The folder can't be written.
        """
        self.refuse_taken(overwrite=overwrite, reads=reads)
        # Asking a teacher takes hours: what it said before a kill is kept, and checked where it is read.
        kept = {path.resolve() for path in (*reads, *(() if self.holds_run else (self.teacher,)))}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.teacher.glob(".*.tmp"):  # by a kill
                left.unlink()
            # In the order of OWN_NAMES, the log last: a kill in between leaves a folder that is still known as a run's.
            named = [path for pattern in OWN_PATTERNS for path in self.path.glob(pattern)]
            for entry in [*named, *(self.path / name for name in OWN_NAMES)]:
                if entry.resolve() in kept:
                    continue
                # Of a link the link alone goes: what it leads to isn't the run's.
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
        except OSError as error:
            raise MachineError(f"output_dir {self.path} can't be written: {error}") from error

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Write the program's log into train.log too, for as long as the block lasts.

        Raises:
            MachineError: The file can't be written.
        """
        try:
            handler = _LogFile(self.path / "train.log", encoding="utf-8")
        except OSError as error:
            raise MachineError(f"{self.path / 'train.log'} can't be written: {error}") from error
        handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("vembed")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            with suppress(OSError):  # of a full disk, which `handleError` has told
                handler.close()

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all.

        Raises:
            MachineError: The folder can't be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(self.path / name, text)
        except OSError as error:
            raise MachineError(f"{self.path / name} can't be written: {error}") from error
