"""Files that survive a crash: forced to disk, replaced in one step, identified by their content."""

from __future__ import annotations

import hashlib
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


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


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new one and nothing between.

    Raises:
        OSError: The disk refused; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_durably(temporary, text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def replace_folder(temporary: Path, output: Path) -> None:
    """Let a new folder take the name of an old one, if any; on failure the old one is as it was."""
    old = output.with_name(f".{output.name}.old")
    try:
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)
            output.replace(old)  # no system renames a folder over one that holds files
        temporary.replace(output)
        fsync_path(output.parent)
    finally:
        if old.exists() and not output.exists():
            old.replace(output)
    shutil.rmtree(old, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
