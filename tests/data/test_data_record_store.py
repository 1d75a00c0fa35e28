"""Rows that were read once come back from disk as they were, and only while they are still true."""

from __future__ import annotations

import json
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from image_cases import png

from vembed.batch import Composed, Image
from vembed.data import table_cache, table_writer
from vembed.data.columns import ExtraColumn
from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.data.table import RecordTable
from vembed.data.table_writer import RecordWriter
from vembed.errors import DataError, MachineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vembed.data.table import LoadedRecords

TRAIN = {"role": "train"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the rows of files of any size."""
    monkeypatch.setenv(table_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(table_cache, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "records"


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(count: int, word: str = "p") -> list[dict[str, Any]]:
    return [{"query": f"q{i}", "positive": f"{word}{i}"} for i in range(count)]


def folders(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def is_mapped(loaded: LoadedRecords, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the rows came from the cache; forgets what was logged."""
    told = "mapped from" in caplog.text
    caplog.clear()
    assert loaded.table.folder is not None
    return told


def test_every_kind_of_row_comes_back_from_disk_as_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_writer, "BLOCK_ROWS", 50)
    picture, other = Image("a.png", b"a picture"), Image("b.png", b"another one" * 1000)
    columns = (ExtraColumn("weight/of ü", "how much it counts"), ExtraColumn("times", "how often", kind="int"))
    count = 203
    tables = []
    for folder in (None, tmp_path):
        writer = RecordWriter(columns, folder)
        for i in range(count):
            writer.add(
                picture if i % 7 == 1 else Composed((picture, other), f"both {i}") if i % 7 == 2 else f"q{i} é",
                positives=[f"p{i % 50}", other] if i % 3 else [],
                negatives=[f"n{i}"] * (i % 4),
                label=(None, i, f"class {i % 9}", 2**40)[0 if i < 100 else i % 4],
                scores=[0.5, float(i)][: i % 3],
                columns={"weight/of ü": i / 3, "times": i},
                file=f"file {i % 2}",
                line=i,
            )
        tables.append(writer.finish())
    held, stored = tables
    again = RecordTable.mapped(tmp_path)
    assert list(held) == list(stored) == list(again)
    assert held.fingerprint == stored.fingerprint == again.fingerprint
    assert held.subset([5, 3]).fingerprint == again.subset([5, 3]).fingerprint != again.fingerprint
    assert held.items.ids.tolist() == again.items.ids.tolist()


def test_a_second_start_maps_what_the_first_one_read(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", [*rows_of(5), {"query": "", "positive": "p"}])
    options = {"role": "train", "keys": DataKeys(skip_invalid_records=True)}
    first = read(path, **options).records()
    assert not is_mapped(first, caplog)
    fingerprint = first.table.fingerprint
    second = read(path, **options).records()
    assert is_mapped(second, caplog)
    assert list(first.table) == list(second.table)
    assert first.notes == second.notes
    assert "1 invalid row dropped" in first.notes[0]
    assert str(folders(cache)[0]) in first.notes[-1]
    assert first.num_invalid == second.num_invalid == 1
    assert second.table.fingerprint == fingerprint
    assert len(folders(cache)) == 1


def test_files_below_the_size_are_not_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(5))
    monkeypatch.setattr(table_cache, "LEAST_BYTES", (tmp_path / "a.jsonl").stat().st_size + 1)
    assert read(path, **TRAIN).records().table.folder is None
    monkeypatch.setattr(table_cache, "LEAST_BYTES", (tmp_path / "a.jsonl").stat().st_size)
    assert read(path, **TRAIN).records().table.folder in folders(cache)


def test_never_keeps_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(table_cache.VARIABLE, "never")
    assert read(write(tmp_path / "a.jsonl", rows_of(5)), **TRAIN).records().table.folder is None
    assert not cache.exists()


def test_what_changed_is_read_anew_and_takes_the_place_of_the_old(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", rows_of(5))
    before = read(path, **TRAIN).records()
    assert not is_mapped(before, caplog)
    assert is_mapped(read(path, **TRAIN).records(), caplog)
    stat = (tmp_path / "a.jsonl").stat()
    write(tmp_path / "a.jsonl", rows_of(5, "d"))
    os.utime(tmp_path / "a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = read(path, **TRAIN).records()  # equal size, and a time that was set back
    assert not is_mapped(after, caplog)
    assert after.table[0].positives == ("d0",)
    assert len(folders(cache)) == 1
    assert before.table[0].positives == ("p0",)  # what is mapped outlives its folder


@pytest.mark.parametrize(
    "changed",
    [
        {"role": "validation"},
        {"role": "train", "keys": DataKeys(column_mapping={"more": "negatives"})},
        {"role": "train", "keys": DataKeys(label_kind="class")},
        {"role": "train", "keys": DataKeys(skip_invalid_records=True)},
    ],
)
def test_rows_read_in_another_way_are_others(
    tmp_path: Path, cache: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", [{**row, "more": "n"} for row in rows_of(5)])
    read(path, **TRAIN).records()
    assert not is_mapped(read(path, **changed).records(), caplog)
    same = {"role": "train", "keys": DataKeys(num_workers=3, drop_last=True)}
    assert is_mapped(read(path, **same).records(), caplog)
    assert len(folders(cache)) == 2


def _truncate(folder: Path) -> None:
    os.truncate(folder / "items.arrow", 3)


def _flip(folder: Path) -> None:
    data = bytearray((folder / "items.arrow").read_bytes())
    data[0] ^= 1
    (folder / "items.arrow").write_bytes(data)


def _lose(folder: Path) -> None:
    (folder / "rows.arrow").unlink()


def _forget(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [_truncate, _flip, _lose, _forget])
def test_what_is_damaged_is_read_anew(
    tmp_path: Path, cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", rows_of(5))
    first = list(read(path, **TRAIN).records().table)
    damage(folders(cache)[0])
    again = read(path, **TRAIN).records()
    assert "the data are read anew" in caplog.text
    assert not is_mapped(again, caplog)
    assert list(again.table) == first
    assert is_mapped(read(path, **TRAIN).records(), caplog)


def test_what_a_kill_left_is_cleared_away_and_nothing_is_kept_of_refused_data(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "q"}])
    with pytest.raises(DataError, match="positive"):
        read(path, **TRAIN).records()
    assert folders(cache) == []
    write(tmp_path / "a.jsonl", rows_of(5))
    left = read(path, **TRAIN).records().table.folder
    assert left is not None
    shutil.copytree(left, cache / f".{left.name}.left")
    shutil.rmtree(left)
    assert read(path, **TRAIN).records().table.folder == left
    assert folders(cache) == [left]


def test_pictures_in_files_are_looked_at_in_every_start(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path / "a.jsonl", [{"query": f"q{i}", "positive_image": "a.png"} for i in range(3)])
    loaded = read(path, **TRAIN).records()
    assert folders(cache) == []
    assert loaded.table[2].positives == (Image(str((tmp_path / "a.png").resolve())),)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match="no such file"):
        read(path, **TRAIN).records()


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(5))
    stamps = iter([[(1, 2)], [(1, 3)]])
    monkeypatch.setattr(table_cache, "_stamps", lambda files: next(stamps))
    assert len(read(path, **TRAIN).records().table) == 5
    assert folders(cache) == []


def test_a_folder_without_room_is_named_and_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(5))
    monkeypatch.setattr(table_cache, "FREE_SHARE", 1e30)
    loaded = read(path, **TRAIN).records()
    assert loaded.table.folder is None
    assert loaded.notes[-1].startswith(f"The rows are not kept in {cache}: it has ")
    monkeypatch.setenv(table_cache.VARIABLE, path)
    loaded = read(path, **TRAIN).records()
    assert loaded.table.folder is None
    assert "Not a directory" in loaded.notes[-1]


def test_a_disk_that_fills_up_says_what_to_do(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "a.jsonl", rows_of(5))
    monkeypatch.setattr(table_cache, "fsync_path", full)
    with pytest.raises(MachineError, match=r"can't be kept in .*No space left on device; .*VEMBED_CACHE"):
        read(path, **TRAIN).records()
    assert folders(cache) == []


def test_processes_that_start_together_read_once_and_share(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(2000))
    children = []
    for _ in range(3):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            loaded = read(path, **TRAIN).records()
            stat = (cache / loaded.table.folder.name / "items.arrow").stat() if loaded.table.folder else None
            os.write(write_end, f"{loaded.table.fingerprint} {stat and stat.st_ino}".encode())
            os._exit(0)
        os.close(write_end)
        children.append((child, read_end))
    told = set()
    for child, read_end in children:
        with os.fdopen(read_end) as pipe:
            told.add(pipe.read())
        assert os.waitpid(child, 0)[1] == 0
    assert len(told) == 1
    assert len(folders(cache)) == 1


def test_without_locks_in_the_file_system_the_first_one_wins(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(95, "Operation not supported")

    path = write(tmp_path / "a.jsonl", rows_of(5))
    monkeypatch.setattr(table_cache.fcntl, "flock", refuse)
    keep = table_cache._keep

    def late(loaded: LoadedRecords, temporary: Path, folder: Path) -> None:
        shutil.copytree(temporary, tmp_path / "copy")
        keep(loaded, temporary, folder)
        keep(loaded, shutil.copytree(tmp_path / "copy", cache / ".another"), folder)

    monkeypatch.setattr(table_cache, "_keep", late)
    loaded = read(path, **TRAIN).records()
    assert [record.query for record in loaded.table] == [f"q{i}" for i in range(5)]
    assert loaded.table.folder in folders(cache)
