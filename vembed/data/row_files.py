"""Rows that a path names: one local file, those of a folder, a glob or a range of shards; or a set of the hub."""

from __future__ import annotations

import glob
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vembed.data.columns import closest
from vembed.data.formats import row_suffixes, suffix_of
from vembed.data.json_lines import json_object
from vembed.data.judged import is_beir
from vembed.data.keys import SPLIT_NAMES, missing_split, split_for
from vembed.data.lines import os_errors_named
from vembed.data.presets import preset_hint
from vembed.errors import DataError, MachineError
from vembed.files import home_path, is_file, is_folder, listed_paths
from vembed.text import cut, first_line, one_of, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vembed.data.raw_rows import RawRow
    from vembed.data.read import DataSource

SHARD = re.compile(r"(?P<split>.+?)([-_.]\d+(-of-\d+)?)?")
"""The file names of a split: `train`, `train-00000-of-00004`, `train_7`."""

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?", re.ASCII)

_NUMBERED = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}", re.ASCII)
MAX_NUMBERED = 100_000
"""Most files that a path with {000..127} may name."""

HUB_BATCH_ROWS, PICTURE_BATCH_ROWS = 1000, 64
"""Rows of a hub set that are Python objects at a time; fewer where they hold bytes of pictures."""


def row_files(path: str, source: DataSource) -> tuple[list[Path], tuple[str, ...]]:
    """Return the local files that a path of a source names, in order, and notes; no files when it is a hub id.

    Raises:
        DataError: Nothing is there, files of several kinds are, or there is no such split.
    """
    if len(parts := listed_paths(path)) > 1:
        files: list[Path] = []
        notes: list[str] = []
        for part in parts:  # which may be of several kinds
            local = home_path(part)
            part_files, part_notes = ([], ()) if is_folder(local) and is_beir(local) else row_files(part, source)
            if not part_files:
                raise DataError(
                    f"{source.path_key}: a list takes files and folders of rows, and {cut(part, 1000)} is another "
                    "kind of set; name such sets one by one under data"
                )
            files += part_files
            notes += part_notes
        return files, tuple(notes)
    local = home_path(path)
    if is_folder(local):
        return _saved_files(local, source) or _folder_files(local, source)
    if is_file(local):
        files = [local]
    elif _NUMBERED.search(path):
        files = _numbered(path, source.path_key)
    elif glob.has_magic(path):
        files = _matching(local)
        if not files:
            raise DataError(f"{source.path_key}: no file matches {path}")
    elif (
        not preset_hint(path)
        and HUB_ID.fullmatch(path)
        and suffix_of(Path(path)) is None
        and not is_folder(Path(path).parent)
    ):
        return [], ()
    else:
        raise _missing(path, source.path_key)
    if source.split is not None:
        raise DataError(f"{path} has no splits: remove {source.split_key}: {source.split}, or name a folder or hub id")
    return _of_one_kind(files, path), ()


def _saved_files(folder: Path, source: DataSource) -> tuple[list[Path], tuple[str, ...]] | None:
    """Return the files of what `datasets` saved with `save_to_disk`, of the wanted split; None of another folder."""

    def is_plain(name: object) -> bool:
        """Return whether a name leads to nowhere but an entry of its folder."""
        is_name = isinstance(name, str) and name not in ("", ".", "..")
        return is_name and not any(sign in str(name) for sign in "/\\\0")

    note: tuple[str, ...] = ()
    chosen = None
    if is_file(folder / "dataset_dict.json"):
        splits = json_object(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not all(map(is_plain, splits)):
            raise DataError(f"{folder / 'dataset_dict.json'}: expected the names of splits under 'splits'")
        # The names come from a file, and become parts of paths: `is_plain` keeps them inside of the folder.
        chosen = split_for(splits, source.split, source.role)
        if chosen is None:
            raise missing_split(folder, splits, source.split, source.role, source.split_key)
        note = (f"Read split {chosen!r} of {folder}.",)
        folder /= chosen
    elif not (is_file(folder / "state.json") and is_file(folder / "dataset_info.json")):
        return None
    if chosen is None and source.split is not None:
        raise DataError(f"{folder} has no splits: remove {source.split_key}: {source.split}")
    listed = json_object(folder / "state.json").get("_data_files")
    files = listed if isinstance(listed, list) else []
    stored = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if not stored or not all(map(is_plain, stored)):
        raise DataError(f"{folder / 'state.json'}: expected the names of files of Arrow under '_data_files'")
    return _of_one_kind([folder / str(name) for name in stored], str(folder)), note


def _numbered(path: str, key: str) -> list[Path]:
    """Return the files that a path with {000..127} names, all of which must be there."""
    # Several ranges in one path multiply, so the count is checked before the names are made.
    names = [path]
    while match := _NUMBERED.search(names[0]):
        first, last = match[1], match[2]
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(names) * len(numbers) <= MAX_NUMBERED:
            raise DataError(f"{key}: {match[0]} names no file, or over {MAX_NUMBERED:,}")
        begin, end = match.span()
        names = [f"{name[:begin]}{number:0{len(first)}}{name[end:]}" for name in names for number in numbers]
    files = list(map(home_path, names))
    missing = [file for file in files if not is_file(file)]
    if missing:
        raise DataError(f"{key}: {cut(path, 1000)} names {len(files):,} files, and {missing[0]} doesn't exist")
    return files


def _matching(pattern: Path) -> list[Path]:
    """Return the files that a pattern names, in order; ** stands for folders at any depth, itself included."""

    def names(folder: Path, part: str) -> list[str]:
        return glob.glob(part, root_dir=folder)  # noqa: PTH207 - pathlib enters what is hidden

    def folders_below(folder: Path) -> Iterator[Path]:
        for inner, subfolders, _ in os.walk(folder):  # which follows no links
            subfolders[:] = sorted(name for name in subfolders if name[0] != ".")
            yield Path(inner)

    # Part by part instead of one call of glob: a folder that several names lead to is entered once, or links to folders
    # above them would lead to more and more.
    folders = [Path(pattern.anchor)]
    *parts, last = pattern.parts[bool(pattern.anchor) :]
    if last == "**":
        parts, last = [*parts, last], "*"
    for part in parts:
        inner = (
            path
            for folder in folders
            for path in (folders_below(folder) if part == "**" else map(folder.joinpath, sorted(names(folder, part))))
        )
        distinct: dict[str, Path] = {}
        for folder in filter(is_folder, inner):
            distinct.setdefault(os.path.realpath(folder), folder)
        folders = list(distinct.values())
    return sorted(filter(is_file, (folder / name for folder in folders for name in names(folder, last))))


def _folder_files(folder: Path, source: DataSource) -> tuple[list[Path], tuple[str, ...]]:
    """Return the row files of a folder: those of the wanted split where the names tell splits apart, else all."""
    suffixes = row_suffixes()
    with os_errors_named(folder):
        rows = (path for path in folder.iterdir() if suffix_of(path) in suffixes and path.name[0] != ".")
        files = sorted(filter(is_file, rows))
    if not files:
        raise DataError(f"{folder} holds no data files; expected {', '.join(suffixes)}, or the BEIR layout")
    splits: dict[Path, str] = {}
    for path in files:
        match = SHARD.fullmatch(path.name[: -len(suffix_of(path) or "")])
        splits[path] = match["split"] if match else path.name
    known = {name for names in SPLIT_NAMES.values() for name in names}
    if not known & set(splits.values()) and source.split not in splits.values():
        # No file is called as a split is. Where the words of the names hold several, as quora-train and quora_test do,
        # they tell splits apart; part-0 and part-1 don't, and neither does the one word of unit-test-questions.
        words = {
            path: [word for word in re.split("[^a-z]+", split.lower()) if word in known]
            for path, split in splits.items()
        }
        if len({of_name[0] for of_name in words.values() if of_name}) > 1:
            splits |= {path: of_name[0] for path, of_name in words.items() if of_name}
        elif source.split is None:
            return _of_one_kind(files, str(folder)), ()
    chosen = split_for(set(splits.values()), source.split, source.role)
    if chosen is None:
        names = SPLIT_NAMES[source.role] if source.split is None else (source.split,)
        raise DataError(
            f"{folder} has no file of split {one_of(map(repr, names))}"
            f"{closest(names[0], splits.values())}; it has: {', '.join(path.name for path in files)}. Choose one "
            f"with {source.split_key}, or name the file in {source.path_key}"
        )
    of_split = _of_one_kind([path for path, split in splits.items() if split == chosen], f"{folder} ({chosen})")
    others = len(files) - len(of_split)
    note = f"Read split {chosen!r} of {folder}: {plural(len(of_split), 'file')}, {others} of other splits not read."
    return of_split, (note,)


def _of_one_kind(files: Sequence[Path], source: str) -> list[Path]:
    """Refuse a mixture, such as train.jsonl beside its copy train.csv, and files of unknown kinds."""
    unknown = next((path for path in files if suffix_of(path) is None), None)
    if unknown is not None:
        raise DataError(f"{unknown}: unknown kind of file; expected {', '.join(row_suffixes())}")
    kinds = {(suffix_of(path) or "").removesuffix(".gz") for path in files}
    if len(kinds) > 1:
        raise DataError(f"{source} mixes {' and '.join(sorted(kinds))} files: name one kind, e.g. *{min(kinds)}")
    return list(files)


def _missing(path: str, key: str) -> DataError:
    """Return the error for a path that leads nowhere."""
    local, path = home_path(path), cut(path, 1000)
    if "://" in path:  # not echoed: an address may hold a password
        return DataError(f"{key} is an address; download it and name the local file, or give a hub id owner/name")
    if hint := preset_hint(path):
        return DataError(f"{key}: {path} doesn't exist{hint}")
    if os.path.lexists(local):
        return DataError(f"{key}: {path} is no regular file but a pipe, socket, device, or a link that leads nowhere")
    if not is_folder(local.parent):
        return DataError(f"{key}: {path} doesn't exist, nor does its folder {cut(str(local.parent), 1000)}")
    return DataError(f"{key}: {path} doesn't exist{nearest_entry(local)}")


def nearest_entry(path: Path) -> str:
    """Return ` (did you mean 'x'?)` for the nearest name in the folder of a missing file, or an empty string."""
    with suppress(OSError, ValueError):
        return closest(path.name, (entry.name for entry in path.parent.iterdir()))
    return ""


def hub_split(source: DataSource) -> tuple[str, Any]:
    """Return the name of the wanted split of a hub set, and its rows: a `datasets.Dataset`. No code of a set is run.

    Raises:
        DataError: The data set, its config or the split doesn't exist, or it needs code to be read.
        MachineError: The hub can't be reached and the data set is not in the local cache.
    """
    import datasets

    match = HUB_ID.fullmatch(source.path)
    assert match is not None, source.path
    name = match["name"]
    try:
        splits = datasets.load_dataset(name, match["config"])
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"no data set {name!r} on the hub, and no such local file or folder; if it is private or gated, log in "
            f"with `hf auth login`: {first_line(error)}"
        ) from error
    except (ConnectionError, TimeoutError, OSError) as error:
        raise MachineError(
            f"the data set {name!r} is not in the local cache and the hub can't be reached: {first_line(error)}. "
            f"Download it where there is a network (`hf download {name} --repo-type dataset`), or give a local file"
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"the data set {name!r} can't be read: {first_line(error)}") from error
    chosen = split_for(splits, source.split, source.role)
    if chosen is None:
        raise missing_split(source.path, list(splits), source.split, source.role, source.split_key)
    return chosen, splits[chosen]


def hub_rows(dataset: Any, wanted: Callable[[Sequence[str]], Sequence[str]]) -> Iterator[RawRow]:
    """Yield the rows of a `datasets.Dataset`, counted from 1; columns that nobody wants are not read.

    Args:
        wanted: Given its columns, says which to read.
    """
    import datasets

    def undecoded(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        inner = getattr(feature, "feature", None)  # of a list of pictures
        return type(feature)(datasets.Image(decode=False)) if isinstance(inner, datasets.Image) else feature

    names = list(wanted(dataset.column_names))
    if not names:
        yield from ((number, {}) for number in range(1, len(dataset) + 1))
        return
    dataset, batch_rows = dataset.select_columns(names), HUB_BATCH_ROWS
    # Pictures come as {"bytes", "path"}, so that their headers are checked before anything decodes them.
    features = {name: undecoded(feature) for name, feature in dataset.features.items()}
    if features != dict(dataset.features):
        dataset, batch_rows = dataset.cast(datasets.Features(features)), PICTURE_BATCH_ROWS
    number = 0
    for batch in dataset.iter(batch_size=batch_rows):
        for cells in zip(*(batch[name] for name in names), strict=True):
            number += 1
            yield number, dict(zip(names, cells, strict=True))
