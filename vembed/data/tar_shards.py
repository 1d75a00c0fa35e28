"""Read tar shards in the form of WebDataset: members `KEY.EXTENSION`, those of one key in a row, are one sample.

A shard is mapped, never unpacked, and its members are found once: what a picture holds stays where it is in the shard,
known by offset and size. Refused are members other than regular files, names that lead out of the shard, pickles, keys
whose members are in two places, truncated shards, and shards with data after their end mark.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import tarfile
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vembed.data import lines
from vembed.data.json_lines import unique_keys
from vembed.data.raw_rows import MAX_COLUMNS, Unreadable
from vembed.errors import DataError, MachineError
from vembed.files import open_regular
from vembed.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vembed.data.raw_rows import RawRow

BLOCK_BYTES = tarfile.BLOCKSIZE
PIECE_BYTES = 2**20
MAX_EXTENDED_BYTES = 2**20
"""Longest extended header (long names); nothing else in a header needs room."""

MAX_EXTENDED_HEADERS = 16
"""Of one member. Writers give a member one or two."""

MAX_RECORDS = 1000
"""Of one extended header. Writers give a dozen, and one for each extended attribute of a file."""

PICTURES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"})
COLUMN_OF = {"txt": "text", "cls": "label", **dict.fromkeys(PICTURES, "image")}
"""The column of a member `KEY.EXTENSION`; `KEY.COLUMN.EXTENSION` names its own. `KEY.json` holds columns."""

PICKLES = frozenset({"pkl", "pickle", "pyd", "pt", "pth", "joblib"})
_REGULAR = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_KINDS = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a link",
    tarfile.GNUTYPE_LONGLINK: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


@cache
def _raise_open_files() -> int:
    """Raise the limit of open files as far as the process may: the usual thousand are too few for many shards."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


class MappedFile(mmap.mmap):
    """A file mapped for reading, which knows its path: a view of it (`memoryview.obj`) can be found again later."""

    path: str

    @classmethod
    def of(cls, path: Path | str) -> MappedFile:
        """Map a file; it stays open for as long as one of its views is used.

        Raises:
            MachineError: Too many files are open.
            OSError: It is no regular file, or the system refuses.
            ValueError: It is empty.
        """
        most = _raise_open_files()
        try:
            with open_regular(path) as file:
                mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise MachineError(
                f"{path}: this process may open {most:,} files and has no more left; raise the limit with "
                f"'ulimit -Hn', or pack the data into fewer and larger files"
            ) from error
        mapped.path = os.path.realpath(path)
        return mapped

    def offset_of(self, view: memoryview) -> int:
        """Return the byte of the file at which a view of it begins."""
        start, first = (np.frombuffer(buffer, np.uint8).ctypes.data for buffer in (view, self))
        return int(start - first)


def shard_rows(path: Path) -> Iterator[RawRow]:
    """Yield (sample counted from 1, its columns or why it can't be read).

    Raises:
        DataError: The shard is refused, or can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    number, key, row = 0, "", dict[str, Any]()
    problem, known = "", set[str]()
    for name, data in members(path):
        folder, _, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        if not stem or not extension:
            raise _refused(path, name, "a member's name is KEY.EXTENSION, such as 0001.jpg")
        # Members of one key follow each other, as writers of WebDataset promise: a sample is complete where the next
        # key begins, so that one sample is in memory, and a key that comes again is an error.
        if (key_of_member := f"{folder}/{stem}") != key:
            if number:
                yield number, Unreadable(problem) if problem else row
            if key_of_member in known:
                raise _refused(path, name, "its key comes twice; put all members of a key next to each other")
            known.add(key_of_member)
            number, key, row, problem = number + 1, key_of_member, {}, ""
        try:
            cells = _cells(extension.lower(), data, decoder)
        except ValueError as error:
            problem = problem or f"{base}: {error}"
            continue
        for column in cells.keys() & row.keys():
            problem = problem or f"{base}: the sample has the column {quoted(column)} twice"
        row |= cells
        if len(row) > MAX_COLUMNS:
            raise _refused(path, name, f"a sample of over {MAX_COLUMNS:,} columns")
    if number:
        yield number, Unreadable(problem) if problem else row


def _cells(extension: str, data: memoryview, decoder: json.JSONDecoder) -> dict[str, Any]:
    """Return the columns that a member gives; of one of an unknown kind its name alone, so that it is told.

    Raises:
        ValueError: It can't be read.
    """
    column, _, kind = extension.rpartition(".")
    if kind in PICTURES:
        return {column or COLUMN_OF[kind]: data}
    if kind not in {"txt", "cls", "json"}:
        return {extension: None}
    if len(data) > lines.MAX_LINE_BYTES:
        raise ValueError(f"over {lines.MAX_LINE_BYTES // 2**20} MiB")
    try:
        text = bytes(data).decode().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start + 1}") from error
    if kind == "txt":
        return {column or "text": text}
    if kind == "cls":
        return {column or "label": int(text) if text.isdecimal() and len(text) < 19 else text}
    try:
        value = decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"bad JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}") from error
    if column:
        return {column: value}
    if type(value) is not dict:
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def members(path: Path) -> Iterator[tuple[str, memoryview]]:
    """Yield the name and the bytes of each regular file of a shard, in order; folders are passed over.

    Raises:
        DataError: The shard is refused, or can't be read on.
        OSError: The system refuses to read it, or it is no regular file.
    """
    try:
        shard = memoryview(MappedFile.of(path))
    except ValueError as error:
        raise DataError(f"{path.name}: the shard is empty") from error
    at, extended, num_extended = 0, dict[str, str](), 0
    # A shard is headers of 512 bytes, each followed by the member's bytes, filled up to a multiple of 512; two blocks
    # of zeros end it. `at` goes from header to header, so that no byte of a picture is touched. Not `tarfile.open`: it
    # takes a truncated shard, or one joined by `cat`, for a shorter one without a word.
    while True:
        block = bytes(shard[at : at + BLOCK_BYTES])
        if len(block) < BLOCK_BYTES:
            raise DataError(f"{path.name}: the shard is truncated at byte {len(shard):,}: it has no end mark")
        if not block.strip(b"\0"):
            pieces = (bytes(shard[start : start + PIECE_BYTES]) for start in range(at, len(shard), PIECE_BYTES))
            if extended or any(piece.strip(b"\0") for piece in pieces):
                raise DataError(
                    f"{path.name}: byte {at:,}: data follows the end mark; was this made by joining shards?"
                )
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise DataError(f"{path.name}: byte {at:,}: no header of a tar member: {error}") from error
        name, kind = extended.get("path", header.name), header.type
        # A size that is no number is beyond every shard, and so refused as truncated.
        size = header.size
        if (extended_size := extended.get("size")) is not None:
            size = (
                int(extended_size)
                if extended_size.isascii() and extended_size.isdecimal() and len(extended_size) < 19
                else 2**63
            )
        begin, end = at + BLOCK_BYTES, at + BLOCK_BYTES + size
        if not 0 <= begin <= end <= len(shard):
            raise _refused(path, name, f"the shard is truncated: it ends at byte {len(shard):,}, the member at {end:,}")
        at = begin + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if kind in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
            num_extended += 1
            if num_extended > MAX_EXTENDED_HEADERS:
                raise DataError(
                    f"{path.name}: byte {begin:,}: a member with over {MAX_EXTENDED_HEADERS} extended headers"
                )
            extended |= _extended(path, kind, shard[begin:end])
            continue
        extended, num_extended = {}, 0
        if kind == tarfile.DIRTYPE:
            continue
        if kind not in _REGULAR:
            raise _refused(path, name, f"it is {_KINDS.get(kind, 'no regular file')}, and shards hold regular files")
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or not name.isprintable():
            raise _refused(path, name, "its name leads out of the shard, or has forbidden characters")
        if name.rpartition(".")[2].lower() in PICKLES:
            raise _refused(path, name, "it is a pickle, which may run code when it is read; leave it out of the shard")
        yield name, shard[begin:end]


def _extended(path: Path, kind: bytes, data: memoryview) -> dict[str, str]:
    """Return what an extended header says of the next member's name and size.

    Source: POSIX.1-2001, pax interchange format; GNU tar manual, "Basic Tar Format".
    """
    if len(data) > MAX_EXTENDED_BYTES:
        raise DataError(f"{path.name}: an extended header of {len(data):,} bytes")
    try:
        if kind == tarfile.GNUTYPE_LONGNAME:
            return {"path": bytes(data).rstrip(b"\0").decode()}
        content, at, values = bytes(data).rstrip(b"\0"), 0, dict[str, str]()
        # Each record is "LENGTH NAME=VALUE\n"; one pass, so the cost grows with the bytes and not with their square.
        for _ in range(MAX_RECORDS + 1):
            if at == len(content):
                break
            space = content.index(b" ", at, at + 20)
            end = at + int(content[at:space])
            if not space < end <= len(content) or content[end - 1 : end] != b"\n":
                raise ValueError(f"no whole record at its byte {at:,}")
            name, _, value = content[space + 1 : end - 1].decode().partition("=")
            values[name] = value
            at = end
        else:
            raise ValueError(f"over {MAX_RECORDS:,} records")
    except ValueError as error:
        raise DataError(f"{path.name}: a broken extended header: {error}") from error
    telling = {name: value for name, value in values.items() if name in {"path", "size"}}
    if any(name.startswith("GNU.sparse") for name in values) or "linkpath" in values:
        raise DataError(f"{path.name}: it holds a link or a sparse file, and shards hold regular files")
    if telling and kind == tarfile.XGLTYPE:
        raise DataError(f"{path.name}: a header gives all members one name")
    return telling


def _refused(path: Path, name: str, reason: str) -> DataError:
    return DataError(f"{path.name}: member {quoted(name, 120)}: {reason}")
