"""Which local files a path names: one, a folder's or a glob's, or a range of numbered shards."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vembed.data.beir import is_beir
from vembed.data.columns import closest
from vembed.data.formats import row_suffixes, suffix_of
from vembed.data.hub import HUB_ID
from vembed.data.lines import json_object, nearest_entry, reading
from vembed.data.presets import preset_hint
from vembed.data.splits import SPLIT_NAMES, missing_split, split_for
from vembed.errors import DataError
from vembed.files import home_path, is_file, is_folder, listed_paths
from vembed.text import cut, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vembed.data.splits import SourceOptions

SHARD = re.compile(r"(?P<split>.+?)([-_.]\d+(-of-\d+)?)?")
"""The file names of a split: `train`, `train-00000-of-00004`, `train_7`."""

_NUMBERED = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}", re.ASCII)
MAX_NUMBERED = 100_000
"""Most files that a path with {000..127} may name."""


def row_files(path: str, options: SourceOptions) -> tuple[list[Path], tuple[str, ...]]:
    """Return the local files that a path names, and notes; no files when it is a hub id."""
    if len(listed := listed_paths(path)) > 1:
        return _listed_files(listed, options)
    local = home_path(path)
    if is_folder(local):
        return _saved_files(local, options) or _folder_files(local, options)
    if is_file(local):
        found = [local]
    elif _NUMBERED.search(path):
        found = _numbered(path, options.path_key)
    elif glob.has_magic(path):
        found = _matching(local)
        if not found:
            msg = f"{options.path_key}: no file matches {path}"
            raise DataError(msg)
    elif _may_be_hub_id(path):
        return [], ()
    else:
        raise DataError(_missing_message(path, options.path_key))
    if options.split is not None:
        msg = f"{path} has no splits: remove {options.split_key}: {options.split}, or name a folder or hub id"
        raise DataError(msg)
    return _of_one_kind(found, path), ()


def _listed_files(paths: Sequence[str], options: SourceOptions) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files of all paths of a list, which may be of several kinds."""
    files: list[Path] = []
    notes: list[str] = []
    for path in paths:
        local = home_path(path)
        found, said = ([], ()) if is_folder(local) and is_beir(local) else row_files(path, options)
        if not found:
            raise DataError(
                f"{options.path_key}: {cut(path, 1000)} stands in a list, which takes files and folders of "
                "rows; name sets of other kinds one by one under data"
            )
        files += found
        notes += said
    return files, tuple(notes)


def _saved_files(folder: Path, options: SourceOptions) -> tuple[list[Path], tuple[str, ...]] | None:
    """Return the files of what `datasets` saved with `save_to_disk`, of the wanted split; None of another folder."""
    note: tuple[str, ...] = ()
    chosen = None
    if is_file(folder / "dataset_dict.json"):
        splits = json_object(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not all(isinstance(name, str) and _is_plain(name) for name in splits):
            raise DataError(f"{folder / 'dataset_dict.json'}: expected the names of splits under 'splits'")
        chosen = split_for(splits, options.split, options.role)
        if chosen is None:
            raise missing_split(folder, splits, options.split, options.role, options.split_key)
        note = (f"Read split {chosen!r} of {folder}.",)
        folder /= chosen
    elif not (is_file(folder / "state.json") and is_file(folder / "dataset_info.json")):
        return None
    if chosen is None and options.split is not None:
        raise DataError(f"{folder} has no splits: remove {options.split_key}: {options.split}")
    listed = json_object(folder / "state.json").get("_data_files")
    files = listed if isinstance(listed, list) else []
    stored = [each.get("filename") if isinstance(each, dict) else None for each in files]
    if not stored or not all(isinstance(name, str) and _is_plain(name) for name in stored):
        raise DataError(f"{folder / 'state.json'}: expected the names of files of Arrow under '_data_files'")
    return _of_one_kind([folder / str(name) for name in stored], str(folder)), note


def _is_plain(name: str) -> bool:
    """Return whether a name leads to nowhere but an entry of its folder."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


def _numbered(path: str, key: str) -> list[Path]:
    """Return the files that a path with {000..127} names, all of which must be there."""
    names = [path]
    while match := _NUMBERED.search(names[0]):
        first, last = match[1], match[2]
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(names) * len(numbers) <= MAX_NUMBERED:
            raise DataError(f"{key}: {match[0]} names no file, or over {MAX_NUMBERED:,}")
        begin, end = match.span()
        names = [f"{name[:begin]}{number:0{len(first)}}{name[end:]}" for name in names for number in numbers]
    found = list(map(home_path, names))
    missing = [file for file in found if not is_file(file)]
    if missing:
        raise DataError(f"{key}: {cut(path, 1000)} names {len(found):,} files, and {missing[0]} doesn't exist")
    return found


def _matching(pattern: Path) -> list[Path]:
    """Return the files that a pattern names, in order.

    A folder that several names lead to is entered once, or links to folders above them would lead to more and more.
    """
    folders = [Path(pattern.anchor)]
    *parts, last = pattern.parts[bool(pattern.anchor) :]
    for part in parts:
        found = (folder / name for folder in folders for name in sorted(_names(folder, part)))
        distinct: dict[str, Path] = {}
        for folder in filter(is_folder, found):
            distinct.setdefault(os.path.realpath(folder), folder)
        folders = list(distinct.values())
    return sorted(filter(is_file, (folder / name for folder in folders for name in _names(folder, last))))


def _names(folder: Path, pattern: str) -> list[str]:
    return glob.glob(pattern, root_dir=folder)  # noqa: PTH207 - pathlib enters what is hidden


def _folder_files(folder: Path, options: SourceOptions) -> tuple[list[Path], tuple[str, ...]]:
    """Return the row files of a folder: those of the wanted split where the names tell splits apart, else all."""
    with reading(folder):
        rows = (path for path in folder.iterdir() if suffix_of(path) in row_suffixes() and path.name[0] != ".")
        found = sorted(filter(is_file, rows))
    if not found:
        msg = f"{folder} holds no data files; expected {', '.join(row_suffixes())}, or the BEIR layout"
        raise DataError(msg)
    splits = {path: _split_name(path) for path in found}
    known = {name for names in SPLIT_NAMES.values() for name in names}
    if options.split is None and not known & set(splits.values()):
        return _of_one_kind(found, str(folder)), ()
    chosen = split_for(set(splits.values()), options.split, options.role)
    if chosen is None:
        names = SPLIT_NAMES[options.role] if options.split is None else (options.split,)
        msg = (
            f"{folder} has no file of split {' or '.join(repr(name) for name in names)}"
            f"{closest(names[0], splits.values())}; it has: {', '.join(path.name for path in found)}. Choose one "
            f"with {options.split_key}, or name the file in {options.path_key}"
        )
        raise DataError(msg)
    files = _of_one_kind([path for path, split in splits.items() if split == chosen], f"{folder} ({chosen})")
    others = len(found) - len(files)
    note = f"Read split {chosen!r} of {folder}: {plural(len(files), 'file')}, {others} of other splits not read."
    return files, (note,)


def _split_name(path: Path) -> str:
    match = SHARD.fullmatch(path.name[: -len(suffix_of(path) or "")])
    return match["split"] if match else path.name


def _of_one_kind(files: Sequence[Path], source: str) -> list[Path]:
    """Refuse a mixture, such as train.jsonl beside its own train.csv, and files of unknown kinds."""
    unknown = next((path for path in files if suffix_of(path) is None), None)
    if unknown is not None:
        msg = f"{unknown}: unknown kind of file; expected {', '.join(row_suffixes())}"
        raise DataError(msg)
    kinds = {(suffix_of(path) or "").removesuffix(".gz") for path in files}
    if len(kinds) > 1:
        msg = f"{source} mixes {' and '.join(sorted(kinds))} files: name one kind, e.g. *{min(kinds)}"
        raise DataError(msg)
    return list(files)


def _may_be_hub_id(path: str) -> bool:
    if preset_hint(path):
        return False
    return bool(HUB_ID.fullmatch(path)) and suffix_of(Path(path)) is None and not is_folder(Path(path).parent)


def _missing_message(path: str, key: str) -> str:
    local, path = home_path(path), cut(path, 1000)
    if "://" in path:  # not echoed: an address may hold a password
        return f"{key} is an address; download it and name the local file, or give a hub id owner/name"
    if hint := preset_hint(path):
        return f"{key}: {path} doesn't exist{hint}"
    if os.path.lexists(local):
        return f"{key}: {path} is no regular file but a pipe, socket, device, or a link that leads nowhere"
    if not is_folder(local.parent):
        return f"{key}: {path} doesn't exist, nor does its folder {cut(str(local.parent), 1000)}"
    return f"{key}: {path} doesn't exist{nearest_entry(local)}"
