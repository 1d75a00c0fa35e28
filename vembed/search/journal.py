"""What a killed encoding has done: files that only grow, and a line about each slice whose bytes are on disk.

1. A slice's bytes are appended and reach the disk, then its line in journal.jsonl does.
2. A later start cuts the files behind the last line that is whole and true, and continues with the next slice.
3. Slices are encoded by themselves, so that the bytes are those of an encoding that was never killed.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

JOURNAL_FILE = "journal.jsonl"


class Entry(NamedTuple):
    """A slice that is done."""

    num_documents: int
    lengths: list[int] | None  # vectors of each document, where they have several
    copy_lengths: list[int]  # bytes of the thumbnails
    sha256: list[str]  # of what was appended to each file
    ends: list[int]  # bytes of each file behind the slice
    items: str  # what tells its documents from others


class Journal:
    """Files that grow together, with the slices that they hold.

    Args:
        key: What the bytes are made of; those of another key are thrown away.
        files: Name of each file, and how many bytes come before the first slice.
        items: What tells the documents of each slice from others; from the first that differ on, all is thrown away.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], files: Mapping[str, int], items: Sequence[str]) -> None:
        self._items = items
        self._path = folder / JOURNAL_FILE
        self._paths = [folder / name for name in files]
        self._starts = list(files.values())
        head = json.dumps({"key": dict(key)}, sort_keys=True)
        self.done = self._read(head)
        self._ends = self.done[-1].ends if self.done else self._starts
        text = "".join(f"{line}\n" for line in (head, *(json.dumps(entry) for entry in self.done)))
        self._path.write_text(text, encoding="utf-8")
        self._files = []
        for path, end in zip(self._paths, self._ends, strict=True):
            path.touch()
            file = path.open("r+b")
            file.truncate(end)
            file.seek(end)
            self._files.append(file)
        self._lines = self._path.open("a", encoding="utf-8")

    def append(self, parts: Sequence[bytes], num_documents: int, lengths: list[int] | None, copies: list[int]) -> None:
        """Append the bytes of a slice to each file."""
        for file, part in zip(self._files, parts, strict=True):
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
        self._ends = [end + len(part) for end, part in zip(self._ends, parts, strict=True)]
        hashes = [hashlib.sha256(part).hexdigest() for part in parts]
        entry = Entry(num_documents, lengths, copies, hashes, self._ends, self._items[len(self.done)])
        self.done.append(entry)
        self._lines.write(json.dumps(entry) + "\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        """Close the files."""
        for file in (*self._files, self._lines):
            file.close()

    @staticmethod
    def holds_slices(folder: Path) -> bool:
        """Return whether a folder keeps slices of an encoding that hasn't ended."""
        try:
            return (folder / JOURNAL_FILE).read_bytes().count(b"\n") > 1
        except OSError:
            return False

    def _read(self, head: str) -> list[Entry]:
        """Return the slices whose bytes are there."""
        found: list[Entry] = []
        try:
            first, *lines = self._path.read_text("utf-8").splitlines()
            files = [path.open("rb") for path in self._paths]
        except (OSError, ValueError):
            return []
        try:
            for file, start in zip(files, self._starts, strict=True):
                file.seek(start)
            for line in lines if first == head else ():
                entry = Entry(*json.loads(line))
                before = found[-1].ends if found else self._starts
                parts = [file.read(end - start) for file, start, end in zip(files, before, entry.ends, strict=True)]
                if entry.items not in self._items[len(found) : len(found) + 1]:
                    break
                if [hashlib.sha256(part).hexdigest() for part in parts] != entry.sha256:
                    break
                found.append(entry)
        except (ValueError, TypeError):  # a last line that was cut
            return found
        finally:
            for file in files:
                file.close()
        return found
