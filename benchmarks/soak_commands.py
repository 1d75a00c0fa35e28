"""Start commands of vembed as processes of their own, watch them, and disturb them.

Importing torch and transformers takes seconds, so this process imports everything once and each command is a fork of
it: a process with a session, a folder and outputs of its own, that a signal hits as it hits any other. A fork is safe
as long as no thread runs here and nothing was computed; `warm_up` checks it.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MODULES = (
    "bm25s", "tensorboard", "transformers.models.bert.modeling_bert", "vembed.__main__", "vembed.api.retrieval",
    "vembed.entrypoints.evaluate", "vembed.entrypoints.export", "vembed.evaluation.leaderboard_page",
    "vembed.plugins.merge.choose", "vembed.vectors.mining",
    "vembed.evaluation.mining_report",
    "vembed.evaluation.report.run_report", "vembed.models.export", "vembed.training.card",
    "vembed.training.run",
)  # fmt: skip

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def warm_up() -> None:
    """Import all that the commands need, and check that a fork of this process is as good as a fresh one.

    The number of threads is left to the environment: torch's own setter makes a pool, which a fork would have to make
    anew, and two of its threads may do so at once and abort.
    """
    os.environ.update(ENVIRONMENT)
    for module in _MODULES:
        importlib.import_module(module)
    names = [Path(task, "comm").read_text("utf-8").strip() for task in Path("/proc/self/task").iterdir()]
    # pyarrow's allocator has a thread of its own, and jemalloc takes and frees its locks around a fork.
    threads = len(names) - names.count("jemalloc_bg_thd")
    if threads > 1:
        raise RuntimeError(f"{threads} threads run after the imports: a fork would inherit the locks that they hold")


@dataclass(frozen=True, slots=True)
class FileMoment:
    """Something that a command does to itself right before one of its own file operations."""

    number: int  # of the operation, counted from 0
    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and where it runs."""

    words: tuple[str, ...]  # behind "vembed"
    folder: Path
    said: Path  # file that gets both outputs
    temporary: Path  # folder of its temporary files
    is_fresh: bool = False  # a new interpreter, as a user starts it, rather than a fork
    moment: FileMoment | None = None  # only of a fork
    record: Path | None = None  # file that gets a line for each file operation; only of a fork


@dataclass(slots=True)
class Running:
    """A command that was started."""

    pid: int
    started: float = field(default_factory=time.monotonic)
    code: int | None = None  # exit code, or minus the signal; None while it runs

    def wait(self, seconds: float) -> bool:
        """Wait until the command has ended or the time is over; return whether it has ended."""
        until = time.monotonic() + seconds
        while self.code is None:
            reap(self)
            if time.monotonic() > until:
                break
            time.sleep(0.003)
        return self.code is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command unless it has ended."""
        if self.code is None:
            os.kill(self.pid, number)  # not reaped yet: the number is still its own


def start(command: Command) -> Running:
    """Start a command."""
    command.temporary.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ENVIRONMENT | {"TMPDIR": str(command.temporary)}
    pid = os.fork()
    if pid == 0:
        _become(command, environment)
    return Running(pid)


def _become(command: Command, environment: dict[str, str]) -> None:
    """Turn this fork into a command; never returns."""
    code = 1
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(command.folder)
        os.environ.update(environment)
        said = os.open(command.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
            os.dup2(source, target)
        if command.is_fresh:
            os.execve(sys.executable, [sys.executable, "-m", "vembed", *command.words], environment)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
        sys.argv = ["vembed", *command.words]
        if command.moment is not None or command.record is not None:
            _watch_files(command)
        from vembed.__main__ import main

        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does: shown, and counted as a failure
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch_files(command: Command) -> None:
    """Count what this process does to the files in its folder; record it, or act at a chosen one."""
    own, folder, count = os.getpid(), str(command.folder), 0
    moment = command.moment
    log = None if command.record is None else os.open(command.record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    started = time.monotonic()

    def hook(event: str, words: tuple[Any, ...]) -> None:
        nonlocal count, moment
        if event not in {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}:
            return
        if os.getpid() != own or not isinstance(words[0], (str, os.PathLike)):
            return
        if event == "open" and words[1] is not None and not words[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return  # reading; os.open, which comes before each fsync, has no mode and counts
        path = os.path.abspath(words[1 if event == "os.rename" else 0])  # noqa: PTH100 - links stay
        if not path.startswith(folder):
            return
        if log is not None:
            os.write(log, f"{time.monotonic() - started:.4f} {event} {path.removeprefix(folder)}\n".encode())
        number, count = count, count + 1
        if moment is not None and number >= moment.number:
            action, moment = moment.action, None
            action()

    sys.addaudithook(hook)


def kill_oneself(delay_seconds: float = 0) -> None:
    """End this process without any clean-up, now or in the middle of what it does next."""
    if delay_seconds:
        signal.setitimer(signal.ITIMER_REAL, delay_seconds)  # SIGALRM ends a process as SIGKILL does
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def become_keeper() -> None:
    """Become the parent of every process that a command leaves behind, and end with one's own parent."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def mount_disk(folder: Path, num_bytes: int) -> bool:
    """Mount a small disk for this process alone, which vanishes with it; return whether the system allows it."""
    folder.mkdir(parents=True, exist_ok=True)
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    return not _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode())


def fill_disk(filler: Path, leave_bytes: int) -> None:
    """Write a file that leaves only so many bytes of its disk."""
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    while True:
        disk = os.fstatvfs(descriptor)
        size = disk.f_bavail * disk.f_frsize - leave_bytes
        try:
            if size > 0:
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)
            break
        except OSError as error:  # the command wrote in between: look again
            if error.errno != errno.ENOSPC:
                raise
    os.close(descriptor)


def reap(running: Running | None = None) -> None:
    """Bury the children that have ended, and note the exit code of the command that is one of them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if running is not None and pid == running.pid:
            running.code = os.waitstatus_to_exitcode(status)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, nearest first; those that have ended don't count."""
    found = list(_children(pid))
    for child in found:
        found.extend(_children(child))
    return [child for child in found if _state(child) not in {"Z", "X", ""}]


def _children(pid: int) -> Iterator[int]:
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())
    except OSError:
        return


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that a launcher started as ranks."""
    ranks = []
    for child in _children(launcher):
        try:
            if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes():
                ranks.append(child)
        except OSError:
            continue
    return ranks


def where(pid: int) -> str:
    """Return how a process was started and what it waits for, for people."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
        return f"{pid} ({words.strip()}) {_state(pid)} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return f"{pid} has ended"


def fork(function: Callable[[], None]) -> int:
    """Call a function in a fork of this process and return its id; the fork ends with the function."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            function()
            code = 0
        except BaseException:  # noqa: BLE001 - shown, and told by the exit code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def in_child(function: Callable[[], None]) -> None:
    """Call a function in a fork, so that its threads and what it computes stay out of this process.

    Raises:
        RuntimeError: It failed there.
    """
    if os.waitpid(fork(function), 0)[1]:
        raise RuntimeError("failed in a fork; its traceback is above")
