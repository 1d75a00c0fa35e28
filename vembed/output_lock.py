"""One writer for each output folder: a second process is refused before it touches anything.

1. The writer opens `run.lock` in the folder and holds it by `flock`. The system drops the lock with the process,
   however it ends: what a kill leaves is taken over at once. What the writer forks, such as data workers, closes the
   file. (A POSIX record lock would need no such care, but it goes when anything in the process reads the file.)
2. The file says who writes, for the message to the second one. It goes when the writer is done.
3. Where the file system has no locks, the file alone must do: on the same machine the process is looked up; of one on
   another machine, `BEAT_SECONDS` apart, the file's time moves. It is taken over once that has stood still.

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
from vembed.files import replace_text
from vembed.redact import redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOCK_FILE: Final = "run.lock"

BEAT_SECONDS: Final = 10.0
STILL_SECONDS: Final = 60.0
"""A writer on another machine whose file stands still for this long has ended."""

SETTLE_SECONDS: Final = 1.0
"""Pause after which one of two processes that took over at once finds the other's name in the file."""

RETRY_SECONDS: Final = 0.1
RETRIES: Final = 5
"""A lock may be held for a moment by a process that only looks whether it could be."""

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_MAX_COMMAND: Final = 300

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


def _process_start(pid: int) -> str:
    """Return when a process of this machine began, in ticks since the machine did; empty where there is none."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else facts[18]  # a zombie has ended, and waits for its parent to notice


def _command() -> str:
    return redact(shlex.join(sys.argv))[:_MAX_COMMAND]


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes in a folder."""

    host: str = field(default_factory=gethostname)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = field(default_factory=_command)
    machine: str = field(default_factory=machine_name)
    start: str = field(default_factory=lambda: _process_start(os.getpid()))

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

    @property
    def has_ended(self) -> bool | None:
        """Whether the process is gone; None where it can't be seen from here."""
        if not self.machine or self.machine != machine_name():
            return None
        return _process_start(self.pid) != self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}: {self.command}"


@contextmanager
def hold_output(folder: Path, *, beside: bool = False) -> Iterator[None]:
    """Be the only process that writes in an output folder, for as long as the block lasts.

    Blocks of one thread may stand in each other. A folder that the block made and left empty goes again.

    Args:
        beside: Whether the folder is replaced as a whole, so that nothing inside it can be held.

    Raises:
        FolderInUseError: Another process, or thread, writes there.
        MachineError: The folder can't be written.
    """
    output = folder.expanduser().resolve()
    path = output.with_name(f".{output.name}.lock") if beside and output.name else output / LOCK_FILE
    own = threading.get_ident()
    with _guard:
        owner = _owners.get(path)
        if owner not in (None, own):
            raise FolderInUseError(f"{output} is written by another thread of this process; choose another folder")
        _owners[path] = own
    if owner is not None:
        yield
        return
    try:
        with _held(path, output):
            yield
    finally:
        _owners.pop(path, None)


@contextmanager
def hold_for_command(output: Path, words: Sequence[str]) -> Iterator[bool]:
    """Hold an output that is replaced as a whole, from the start of a command to its end.

    Yields whether an earlier start of the same command has given the output its name and was killed behind that: then
    the output is whole, and only cleaning is left.

    Args:
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


@contextmanager
def _held(path: Path, output: Path) -> Iterator[None]:
    made = [each for each in path.parents if not each.exists()]
    try:
        descriptor, has_locks = _open_locked(path, output)
        _descriptors.add(descriptor)
        try:
            with _as_writer(path, descriptor) if has_locks else _beating(path, output):
                yield
        finally:
            if descriptor in _descriptors:
                _descriptors.remove(descriptor)
                os.close(descriptor)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # something was written there, or it is gone
                each.rmdir()


@contextmanager
def _as_writer(path: Path, descriptor: int) -> Iterator[None]:
    """Say in the locked file who writes; delete it in the end, as long as it is still ours."""
    try:
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, Writer().to_text().encode(), 0)
        except OSError as error:
            raise _unwritable(path, error) from error
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder was moved or is read-only by now; the lock goes anyway
            if descriptor in _descriptors and _is_at(path, descriptor):
                path.unlink()


def _open_locked(path: Path, output: Path) -> tuple[int, bool]:
    """Open and lock the file.

    Returns:
        The descriptor, and whether the file system has locks.
    """
    for attempt in range(RETRIES + 1):
        if attempt:
            time.sleep(RETRY_SECONDS)
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor, False
            text = os.pread(descriptor, 1 << 16, 0).decode(errors="replace")
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise _unwritable(path, error) from error
        else:
            if _is_at(path, descriptor):
                return descriptor, True
            os.close(descriptor)  # deleted by its writer, who had just ended
            text = ""
    raise _in_use(output, path, Writer.from_text(text))


def _open(path: Path) -> int:
    for _ in range(RETRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # a writer that ended just now took its empty folder along
        except OSError as error:
            raise _unwritable(path, error) from error
    raise MachineError(f"{path.parent} can't be made: it is deleted again and again")


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path is still that of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _beating(path: Path, output: Path) -> Iterator[None]:
    """Hold the folder by the file's content alone, on a file system without locks."""
    found = Writer.from_text(path.read_text("utf-8", errors="replace"))
    if found is not None and not (_stands_still(path, found) if found.has_ended is None else found.has_ended):
        raise _in_use(output, path, found)
    own, pid = Writer().to_text(), os.getpid()
    try:
        replace_text(path, own, shared=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    time.sleep(SETTLE_SECONDS)
    if (now := path.read_text("utf-8", errors="replace")) != own:
        raise _in_use(output, path, Writer.from_text(now))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a network file system that is away for a moment
                os.utime(path)

    thread = threading.Thread(target=beat, name="vembed-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):  # the folder was moved or is read-only by now
            if os.getpid() == pid and path.read_text("utf-8", errors="replace") == own:
                path.unlink()


def _stands_still(path: Path, found: Writer) -> bool:
    """Wait for a sign of a writer on another machine, and return whether there was none."""
    _log.info("%s names %s; waiting up to %g s for a sign of it", path, found, STILL_SECONDS)
    until, first = time.monotonic() + STILL_SECONDS, _changed_at(path)
    while time.monotonic() < until:
        time.sleep(min(1.0, STILL_SECONDS / 10))
        if _changed_at(path) != first:
            return False
    return True


def _changed_at(path: Path) -> int:
    """Return the file's time; a network file system looks it up anew only for a file that is opened."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _unwritable(path: Path, error: OSError) -> MachineError:
    fix = "Free some space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Choose"
    return MachineError(
        f"output folder {path.parent} can't be written: {error.strerror or error}. {fix} another folder"
    )


def _in_use(output: Path, path: Path, writer: Writer | None) -> FolderInUseError:
    who = "another process" if writer is None else str(writer)
    fix = "Wait until it ends, stop it, or choose another folder"
    if writer is not None and writer.machine != machine_name():
        fix += f"; if that machine is gone, delete {path}"
    return FolderInUseError(f"{output} is being written by {who}\n{fix}")
