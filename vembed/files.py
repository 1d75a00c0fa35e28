"""Files that survive a crash: forced to disk, replaced in one step, identified by their content. And a user's files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a UTF-8 file and force it to disk; the caller makes its name durable."""
    path.write_text(text, encoding="utf-8")
    fsync_path(path)


def share_permissions(folder: Path) -> None:
    """Give the files of a folder the permissions that the folder has: safetensors writes for the owner alone."""
    for path in folder.rglob("*"):
        if path.is_file():
            # Without the execute bits: a folder has them to be entered, a file would be a program.
            path.chmod(folder.stat().st_mode & 0o666)


@contextmanager
def new_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Give a hidden path beside a file to write to; at the end of the block it replaces the file in one step.

    A reader, or a crash, sees the old file or the new one and nothing between. Where the block raises, the old
    one stays.

    Args:
        path: The file; its folder exists.
        shared: Whether several processes may write the file at once.

    Raises:
        OSError: The disk refused; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp" if shared else f".{path.name}.tmp")
    try:
        yield temporary
        # First the bytes, then the name, then the folder that holds it: no crash leaves the name on half a file.
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def replace_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Replace a UTF-8 file in one step, as `new_file` does.

    Raises:
        OSError: The disk refused; the old file is untouched.
    """
    with new_file(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(output: Path, *, keeps: Callable[[str], bool] = lambda _: False) -> Iterator[Path]:
    """Give an empty hidden folder beside the output to write into; at the end of the block it takes the output's name.

    Every file in it is on disk by then, with the permissions of the folder. Where the block raises, nothing of it
    stays, and what stood at the output is as it was; a crash between the two renames leaves that as `.NAME.old`, which
    the next call puts back.

    Args:
        output: The folder; its parents are made.
        keeps: Whether an entry of the old folder stays, by its name.

    Raises:
        OSError: The disk refused.
    """
    temporary, old = (output.with_name(f".{output.name}.{ending}") for ending in ("tmp", "old"))
    clean_beside(output, keeps=keeps)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        share_permissions(temporary)
        for path in (*temporary.rglob("*"), temporary):
            fsync_path(path)
        if output.exists():
            output.replace(old)  # no system renames a folder over one that holds files
        temporary.replace(output)
        fsync_path(output.parent)
    except Exception as error:
        if (refused := disk_error(error)) is None:
            raise
        raise refused from error
    finally:
        clean_beside(output, keeps=keeps)


def clean_beside(output: Path, *, keeps: Callable[[str], bool] = lambda _: False) -> None:
    """Remove what `new_folder` had beside the output when it was killed; the old folder is put back where need be.

    Args:
        keeps: As in `new_folder`.

    Raises:
        OSError: The disk refused.
    """
    shutil.rmtree(output.with_name(f".{output.name}.tmp"), ignore_errors=True)
    old = output.with_name(f".{output.name}.old")
    if not old.exists():
        return
    if not output.exists():
        # The crash came between the two renames: the old folder is the only whole one.
        old.replace(output)
        return
    for path in old.iterdir():
        if keeps(path.name) and not os.path.lexists(output / path.name):  # else it was made anew since
            path.replace(output / path.name)
    shutil.rmtree(old, ignore_errors=True)


def disk_error(error: Exception) -> OSError | None:
    """Return as an OSError what a disk refused and faiss, tokenizers or safetensors say in words; None for the rest."""
    if type(error).__name__ not in {"Exception", "RuntimeError", "SafetensorError"}:
        return None
    # The number of the error is lost on the way through C++ and Rust; the system's words are still in the message.
    known = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
    code = next((code for code in known if os.strerror(code) in str(error)), None)
    return None if code is None else OSError(code, os.strerror(code))


BROKEN_ARRAY = (OSError, ValueError, EOFError, SyntaxError, TokenError)
"""Errors that numpy raises for an array file with a damaged header, which it parses as Python."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_regular(path: Path | str) -> IO[bytes]:
    """Open a file that a user named; a folder, pipe, socket or device is refused at once, and never waited for.

    Raises:
        OSError: It is no regular file, or the system refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    except ValueError as error:
        raise OSError(errno.EINVAL, "not a usable path", str(path)) from error
    # Of what was opened, not of the name, which may lead elsewhere a moment later.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def is_file(path: Path | str) -> bool:
    """Return whether a name leads to a regular file; one that is too long, or not allowed, leads to none."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib raises for such a name


def is_folder(path: Path | str) -> bool:
    """Return whether a name leads to a folder; one that is too long, or not allowed, leads to none."""
    return os.path.isdir(path)  # noqa: PTH112 - pathlib raises for such a name


def in_the_way(folder: Path) -> str:
    """Say what stands where a folder, or one above it, is to be made; empty where nothing does."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if is_folder(there):
        return ""
    kind = "a link that leads nowhere" if there.is_symlink() and not os.path.exists(there) else "a file"  # noqa: PTH110
    return f"it is {kind}" if there == folder else f"{there} is {kind}"


def as_one_path(paths: Sequence[str]) -> str:
    """Return a list of paths as one text, which `listed_paths` reads back: "{a.jsonl,b.jsonl}".

    Raises:
        ValueError: A path holds what such a text can't.
    """
    path = paths[0] if len(paths) == 1 else "{" + ",".join(paths) + "}"
    # Read back rather than searched for characters that aren't allowed: so the two functions can't disagree.
    if listed_paths(path) != [*paths]:
        raise ValueError("a path in a list can't hold a comma or a single brace; rename the file, or name a pattern")
    return path


def listed_paths(path: str) -> list[str]:
    """Return the paths of a list "{a.jsonl,b.jsonl}", or the path alone."""
    if not (path.startswith("{") and path.endswith("}")):
        return [path]
    # A comma in inner braces belongs to a pattern, such as part-{0,1}.jsonl.
    found, depth = [""], 0
    for character in path[1:-1]:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return [path]
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found if len(found) > 1 and not depth and all(found) else [path]


def home_path(path: Path | str) -> Path:
    """Return a path with the folder that `~` stands for; a user whom the system doesn't know stays as written."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib raises for such a user
