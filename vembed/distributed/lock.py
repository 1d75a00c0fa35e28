"""One writer for each output folder: a second process is refused before it touches anything.

1. The writer opens `run.lock` in the folder and holds it by `flock`. The system drops the lock with the process,
   however it ends: what a kill leaves is taken over at once. What the writer forks, such as data workers, closes the
   file. (A POSIX record lock would need no such care, but it goes when anything in the process reads the file.)
2. The file says who writes, for the message to the second one. It goes when the writer is done.
3. Where the file system has no locks (Lustre without `-o flock`), a second writer can't be seen: that is warned of.

A folder that is written beside its place and renamed as a whole is locked beside it, by `.NAME.lock`. A command that
writes one leaves `.NAME.unfinished` there until it has cleaned up: after a kill, the same command tells by that file
whether the output is whole already.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shlex
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Final

from vembed.errors import ConfigError, MachineError
from vembed.files import in_the_way
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOCK_FILE: Final = "run.lock"

RETRY_SECONDS: Final = 0.1
RETRIES: Final = 5
"""A lock may be held for a moment by a process that only looks whether it could be."""

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_MAX_COMMAND: Final = 300  # characters of a command line in the lock file

_log = logging.getLogger(__name__)
_owners: dict[Path, int] = {}  # lock file -> thread of this process that holds it
_descriptors: set[int] = set()  # of the files that this process has locked
_guard = threading.Lock()


def _let_go() -> None:
    """Hold nothing in a process that was forked off: it may outlive the writer."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    _owners.clear()


os.register_at_fork(after_in_child=_let_go)


class FolderInUseError(ConfigError):
    """Another process writes in the output folder."""


def machine_name() -> str:
    """Return this machine since its start, without its containers; empty where the system doesn't say.

    Two processes with the same one see each other's pids. Host names don't tell: two containers may have the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Writer:
    """Content of the lock file: the process that writes in the folder."""

    host: str = field(default_factory=gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = field(default_factory=lambda: redact(shlex.join(sys.argv))[:_MAX_COMMAND])
    machine: str = field(default_factory=machine_name)

    @classmethod
    def from_text(cls, text: str) -> Writer | None:
        """Read what `to_text` wrote; None where it is something else, such as half of it."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None

    def to_text(self) -> str:
        """Return the content of the lock file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}: {self.command}"


@contextmanager
def hold_output(folder: Path, *, beside: bool = False) -> Iterator[None]:
    """Be the only process that writes in an output folder, for as long as the block lasts.

    Blocks of one thread may stand in each other. A folder that the block made and left empty goes again.

    Args:
        folder: The output folder; made where it isn't there.
        beside: Whether the folder is replaced as a whole, so that nothing inside it can be held.

    Raises:
        FolderInUseError: Another process, or thread, writes there.
        MachineError: The folder can't be written.
    """
    output = folder.expanduser().resolve()
    path = output.with_name(f".{output.name}.lock") if beside and output.name else output / LOCK_FILE
    this_thread = threading.get_ident()
    with _guard:
        owner = _owners.get(path)
        if owner not in (None, this_thread):
            raise FolderInUseError(f"{output} is written by another thread of this process; choose another folder")
        _owners[path] = this_thread
    if owner is not None:  # the block stands in another one of the same folder
        yield
        return
    # pathlib raises where a folder may not be entered, or a name is too long; opening the file below says so in words.
    made = [parent for parent in path.parents if not os.path.exists(parent)]  # noqa: PTH110
    descriptor = -1
    try:
        descriptor = _open_locked(path, output)
        _descriptors.add(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, Writer().to_text().encode(), 0)
        except OSError as error:
            raise _unwritable(path, error) from error
        yield
    finally:
        if descriptor in _descriptors:  # not in a process that was forked off inside the block
            # Deleted while it is still locked, and only as long as it is ours; a folder that was moved or is read-only
            # by now keeps the file, which nobody holds.
            with contextlib.suppress(OSError):
                if _is_at(path, descriptor):
                    path.unlink()
            _descriptors.remove(descriptor)
            os.close(descriptor)
        for parent in made:
            with contextlib.suppress(OSError):  # something was written there, or it is gone
                parent.rmdir()
        _owners.pop(path, None)


@contextmanager
def hold_for_command(output: Path, words: Sequence[str]) -> Iterator[bool]:
    """Hold an output that is replaced as a whole, from the start of a command to its end.

    Yields whether an earlier start of the same command has given the output its name and was killed behind that: then
    the output is whole, and only cleaning is left.

    Args:
        output: The folder or file.
        words: The command line; with the current folder it says which command this is.

    Raises:
        FolderInUseError: Another process, or thread, writes there.
        MachineError: The folder can't be written.
    """
    output = output.expanduser().resolve()
    mark = output.with_name(f".{output.name}.unfinished")
    command = hashlib.sha256("\0".join([str(Path.cwd()), *words]).encode(errors="surrogateescape")).hexdigest()
    with hold_output(output, beside=True):
        is_whole = _is_whole(mark, command, output)
        try:
            if not is_whole:
                mark.write_text(f"{command} {_inode(output)}\n", "utf-8")  # half of it says that nothing is whole
        except OSError as error:
            raise _unwritable(mark, error) from error
        try:
            yield is_whole
        finally:
            if not _is_whole(mark, command, output):  # nothing to finish: the command failed, or was refused
                mark.unlink(missing_ok=True)
    mark.unlink(missing_ok=True)  # the last step, behind the lock: no kill leaves a lock without this mark


def _is_whole(mark: Path, command: str, output: Path) -> bool:
    """Return whether something new stands at the output since a command wrote its mark."""
    try:
        marked, before = mark.read_text("utf-8").split()
    except (OSError, ValueError):
        return False
    return marked == command and _inode(output) not in ("none", before)


def _inode(path: Path) -> str:
    """Return the number of a file or folder, which renaming keeps; "none" where there is nothing."""
    try:
        return str(path.stat().st_ino)
    except OSError:
        return "none"


def _open_locked(path: Path, output: Path) -> int:
    """Open and lock the file, and return its descriptor."""
    text = ""
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(RETRY_SECONDS)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # a writer that ended just now took its empty folder along
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _log.warning(
                    "%s lies on a file system without locks: a second run that writes there would not be seen", output
                )
                return descriptor
            text = os.pread(descriptor, 1 << 16, 0).decode(errors="replace")
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise _unwritable(path, error) from error
        else:
            if _is_at(path, descriptor):
                return descriptor
            os.close(descriptor)  # deleted by its writer, who had just ended
            text = ""
    writer = Writer.from_text(text)
    fix = "Wait until it ends, stop it, or choose another folder"
    if writer is not None and writer.machine != machine_name():  # a file server may keep the lock of a lost machine
        fix += f"; if that machine is gone, delete {path}"
    raise FolderInUseError(f"{output} is being written by {'another process' if writer is None else writer}\n{fix}")


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path is still that of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unwritable(path: Path, error: OSError) -> MachineError:
    fix = "Free some space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
    # mkdir says "File exists" of a file at the folder's own path, and "Not a directory" of one above it.
    way = in_the_way(path.parent) if error.errno in (errno.EEXIST, errno.ENOTDIR) else ""
    return MachineError(
        f"output folder {path.parent} can't be written: {way or error.strerror or error}. {fix} another folder"
    )
