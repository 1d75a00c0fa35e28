"""Tables of rows: they come back as they went in, from memory and from disk, known by their content."""

import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.rows import Paint, load, png, table_of

from vembed.batch import MODALITY_WORDS, Composed, Image, Item, content_id, modality_of
from vembed.data import table_cache, table_writer
from vembed.data.columns import WEIGHT_COLUMN, ExtraColumn
from vembed.data.table import BLOCK_ROWS, ItemColumn, LoadedRecords, Record, RecordTable
from vembed.data.table_writer import ItemWriter, Numbering, RecordWriter
from vembed.errors import DataError, MachineError

ROWS: list[tuple[str, tuple[str, ...], tuple[str, ...], str | int | None]] = [
    ("q0", ("p0",), (), None),
    ("q1 é\n", ("p1", "p1b"), ("n1",), 7),
    ("q2", ("p2",), ("n2", "n2b", "n2c"), "class"),
]


def test_records_come_back_as_they_went_in() -> None:
    table = table_of(ROWS, "a.jsonl")
    assert len(table) == 3
    assert [table[i] for i in range(3)] == [Record(*row, f"a.jsonl:{i + 1}") for i, row in enumerate(ROWS)]
    assert list(table) == table.take([0, 1, 2])
    assert table[-1] == table[2]
    assert [type(record.label) for record in table] == [type(None), int, str]
    assert [record.query for record in table.take([2, 0, 2])] == ["q2", "q0", "q2"]
    assert [record.query for record in table.subset([2, 0]).subset([1])] == ["q0"]
    assert table.take([]) == list(table_of([])) == []


HARD_TEXTS = ["plain", 'a "quote"', "back\\slash", "tab\t", "del\x7f", "ü", "\U0001f600", " ", "", "a\u2028b", "~ }!"]


def slow_fingerprint(table: RecordTable) -> str:
    """Hash the content ids and numbers of records one by one, as `RecordTable.fingerprint` says it hashes columns."""
    records, digest = list(table), hashlib.sha256(b"vembed records 2")
    digest.update(np.array([content_id(record.query) for record in records], dtype="<i8").tobytes())
    for column in ([record.positives for record in records], [record.negatives for record in records]):
        digest.update(np.array([len(items) for items in column], dtype="<i8").tobytes())
        digest.update(np.array([content_id(item) for items in column for item in items], dtype="<i8").tobytes())
    columns: dict[str, list[Any]] = {
        "label": [None if record.label is None else json.dumps(record.label) for record in records],
        "scores": [list(record.scores) or None for record in records],
        **{f"loss:{name}": [record.columns[name] for record in records] for name in sorted(records[0].columns)},
    }
    for name, cells in columns.items():
        if set(map(str, cells)) - {"None"} and not (name == "loss:weight" and set(cells) == {1.0}):
            digest.update(json.dumps([name, cells]).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("weights", [None, [1.0, 1.0], [1.0, 0.5]])
@pytest.mark.parametrize("label", [None, 7, 'a "class" é'])
def test_the_fingerprint_hashes_what_each_row_holds(label: str | int | None, weights: list[float] | None) -> None:
    writer = RecordWriter([] if weights is None else [WEIGHT_COLUMN])
    for number, text in enumerate(HARD_TEXTS):
        documents, columns = [text, *HARD_TEXTS[:number]], {} if weights is None else {"weight": weights[number % 2]}
        writer.add(
            text,
            positives=documents[: number % 3],
            negatives=documents[number % 3 :] * (number % 2),
            label=None if number == 3 else label,
            scores=[0.25] * (number // 8),
            columns=columns,
            file="f",
            line=number,
        )
    table = writer.finish()
    assert table.fingerprint == slow_fingerprint(table)
    part = table.subset([3, 1, 4])
    assert part.fingerprint == slow_fingerprint(part) != table.fingerprint
    assert table.items.ids.tolist() == [content_id(text) for text in HARD_TEXTS]


@pytest.mark.parametrize("index", [3, -4])
def test_a_position_outside_is_an_index_error(index: int) -> None:
    table = table_of(ROWS)
    with pytest.raises(IndexError):
        table[index]
    with pytest.raises(IndexError):
        table.take([0, index])
    with pytest.raises(IndexError):
        table.subset([index])
    assert table[2].query == "q2"


def test_records_survive_the_borders_of_blocks() -> None:
    count = BLOCK_ROWS * 2 + 3
    rows = [(f"q{i}", (f"p{i % 7}",), (f"n{i % 9}",) * (i % 3), i % 5 or None) for i in range(count)]
    table = table_of(rows)
    assert list(table) == [Record(*row, f"rows.jsonl:{i + 1}") for i, row in enumerate(rows)]
    assert [table[i].query for i in (0, BLOCK_ROWS - 1, BLOCK_ROWS, -1)] == [
        rows[i][0] for i in (0, BLOCK_ROWS - 1, BLOCK_ROWS, -1)
    ]
    assert len(table.items) == count + 7 + 6, "a document of many rows is stored once"


def test_fingerprint_is_of_content_not_of_location() -> None:
    assert table_of(ROWS).fingerprint == table_of(ROWS, "elsewhere.jsonl").fingerprint
    assert table_of(ROWS).subset([0, 1]).fingerprint == table_of(ROWS[:2]).fingerprint


def test_fingerprint_changes_with_order_and_every_field() -> None:
    variants = [
        ROWS, ROWS[::-1], ROWS[:2], [("q0!", *ROWS[0][1:]), *ROWS[1:]], [("q0", ("p0", "more"), (), None), *ROWS[1:]],
        [("q0", ("p0",), ("more",), None), *ROWS[1:]], [("q0", ("p0",), (), 0), *ROWS[1:]],
        [("q0", ("p0",), (), "0"), *ROWS[1:]],
    ]  # fmt: skip
    prints = {table_of(rows).fingerprint for rows in variants}
    assert len(prints) == len(variants)
    assert all(len(value) == 64 for value in prints)


def test_items_are_numbered_as_they_first_occur_however_many_there_are() -> None:
    writer, drawn = ItemWriter(), random.Random(0).choices(range(60_000), k=60_000)
    of: dict[str, int] = {}
    for start in range(0, len(drawn), 7000):
        items = [f"item {number}" for number in drawn[start : start + 7000]]
        assert writer.numbers(items).tolist() == [of.setdefault(item, len(of)) for item in items]
    items = writer.finish()
    assert items.at(np.arange(len(items))) == list(of)
    assert len(of) > 2 * BLOCK_ROWS, "the table of what is known must grow"


def test_keys_that_share_a_slot_keep_their_own_numbers() -> None:
    keys = np.concatenate([np.arange(300, dtype=np.int64) << 40, np.array([-1, 0, -1, 5 << 40])])  # low bits all 0
    of: dict[int, int] = {}
    numbers, new = Numbering().numbers(keys)
    assert numbers.tolist() == [of.setdefault(key, len(of)) for key in keys.tolist()]
    assert keys[new].tolist() == list(of)


def test_items_that_look_alike_stay_apart_and_their_content_alone_makes_the_fingerprint(paint: Paint) -> None:
    red, blue = (Image(str(paint(f"{colour}.png", colour))) for colour in ("red", "blue"))
    pictures = [red, blue, Composed((red,), "a"), Composed((red,), "b"), Composed((red, blue), "")]
    pictures += [Composed((blue, red), ""), Composed((red, blue, red), "a")]
    items = (*pictures, "a", "b", "1:\0p", "\0pa", "", " spaced ", red.path)
    assert len({table_of([(item, ["p"])]).fingerprint for item in items}) == len(items)

    def in_memory(picture: Image) -> Image:
        return Image(f"n:{picture.path[-8:]}", png("red" if picture is red else "blue"))

    held = [
        Composed(tuple(map(in_memory, each.images)), each.text) if isinstance(each, Composed) else in_memory(each)
        for each in pictures
    ]
    for item, moved in zip(pictures, held, strict=True):
        assert table_of([(item, ["p"])]).fingerprint == table_of([(moved, ["p"])]).fingerprint
    everything = (*items, *held)
    table = table_of((item, everything, everything[::-1]) for item in everything)
    assert len(table.items) == len(everything)
    assert len(table.items._blobs) == 2, "equal bytes are kept once"
    assert [(each.query, each.positives, each.negatives) for each in table] == [
        (item, everything, everything[::-1]) for item in everything
    ]
    assert table.subset([3, 16]).subset([1])[0].query == everything[16]


def graded_table(rows: list[tuple[tuple[float, ...], float, int]]) -> RecordTable:
    writer = RecordWriter([ExtraColumn("line", "weight"), ExtraColumn("topic", "number of the topic", kind="int")])
    for line, (scores, weight, topic) in enumerate(rows):
        columns = {"line": weight, "topic": topic}
        writer.add("q", positives=["p"], negatives=["n"], scores=scores, columns=columns, file="f", line=line)
    return writer.finish()


def test_scores_and_the_columns_of_a_loss_come_back() -> None:
    rows: list[tuple[tuple[float, ...], float, int]] = [((1.0, 0.25), 0.5, 3), ((), -1.0, 2**40), ((0.0, 0.0), 0.0, 0)]
    table = graded_table(rows)
    for chosen in ([0, 1, 2], [2, 0]):
        found = table.subset(chosen)
        assert [(record.scores, dict(record.columns)) for record in found] == [
            (rows[row][0], {"line": rows[row][1], "topic": rows[row][2]}) for row in chosen
        ]
    assert all(type(record.columns["topic"]) is int for record in table)
    changed = [
        graded_table([(scores, weight, topic), *rows[1:]])
        for scores, weight, topic in (((1.0, 0.5), 0.5, 3), ((), 0.5, 3), ((1.0, 0.25), 0.6, 3), ((1.0, 0.25), 0.5, 4))
    ]
    assert len({each.fingerprint for each in (table, *changed)}) == 5


def test_items_have_the_ids_and_modalities_of_their_content() -> None:
    picture = Image("a.png", b"bytes of a picture")
    items = ["q", " q ", picture, Composed((picture,), "and a text"), Composed((picture, picture), "")]
    writer = RecordWriter()
    for line, item in enumerate(items, start=1):
        writer.add(item, positives=["p", item], negatives=[f"n{line}"] * (line % 2), file="a", line=line)
    for table in (writer.finish(), table_of(ROWS)):
        part = table.subset(range(1, len(table)))
        records = list(part)
        found: dict[ItemColumn, list[tuple[int, Item]]] = {
            "query": [(row, record.query) for row, record in enumerate(records)],
            "positives": [(row, item) for row, record in enumerate(records) for item in record.positives],
            "negatives": [(row, item) for row, record in enumerate(records) for item in record.negatives],
        }
        names = list(MODALITY_WORDS)
        for column, expected in found.items():
            rows, numbers = part.numbers(column)
            assert list(zip(rows.tolist(), part.items.at(numbers), strict=True)) == expected
            assert part.items.ids[numbers].tolist() == [content_id(item) for _, item in expected]
            assert [names[code] for code in part.items.modalities[numbers]] == [
                modality_of(item) for _, item in expected
            ]


# Rows that were read once come back from disk, and only while they are still true


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
    first = load(path, skip_invalid_records=True)
    assert not is_mapped(first, caplog)
    fingerprint = first.table.fingerprint
    second = load(path, skip_invalid_records=True)
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
    assert load(path).table.folder is None
    monkeypatch.setattr(table_cache, "LEAST_BYTES", (tmp_path / "a.jsonl").stat().st_size)
    assert load(path).table.folder in folders(cache)


def test_never_keeps_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(table_cache.VARIABLE, "never")
    assert load(write(tmp_path / "a.jsonl", rows_of(5))).table.folder is None
    assert not cache.exists()


def test_what_changed_is_read_anew_and_takes_the_place_of_the_old(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", rows_of(5))
    before = load(path)
    assert not is_mapped(before, caplog)
    assert is_mapped(load(path), caplog)
    stat = (tmp_path / "a.jsonl").stat()
    write(tmp_path / "a.jsonl", rows_of(5, "d"))
    os.utime(tmp_path / "a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = load(path)  # equal size, and a time that was set back
    assert not is_mapped(after, caplog)
    assert after.table[0].positives == ("d0",)
    assert len(folders(cache)) == 1
    assert before.table[0].positives == ("p0",)  # what is mapped outlives its folder


@pytest.mark.parametrize(
    "changed",
    [
        {"role": "validation"},
        {"column_mapping": {"more": "negatives"}},
        {"label_kind": "class"},
        {"skip_invalid_records": True},
    ],
)
def test_rows_read_in_another_way_are_others(
    tmp_path: Path, cache: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", [{**row, "more": "n"} for row in rows_of(5)])
    load(path)
    assert not is_mapped(load(path, **changed), caplog)
    assert is_mapped(load(path, num_workers=3, drop_last=True), caplog)
    assert len(folders(cache)) == 2


def test_how_sources_are_mixed_keeps_no_further_copy_of_their_rows(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a.jsonl", rows_of(5))
    source: dict[str, Any] = {"path": path}
    load(path, data=[source])
    for changed in ({"weight": 2}, {"query_prompt": "question: "}):
        assert is_mapped(load(path, data=[source | changed, {"path": "b.jsonl"}]), caplog)
    assert is_mapped(load(path, data=[source], source_batches="single", source_temperature=2), caplog)
    assert len(folders(cache)) == 1


def test_rows_of_files_of_one_name_are_kept_with_the_paths_that_name_them(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("en", "de"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", rows_of(1))
    monkeypatch.chdir(tmp_path)
    for start in (f"{tmp_path}/", ""):
        table = load(f"{{{start}en/a.jsonl,{start}de/a.jsonl}}").table
        assert table.folder is not None
        assert [record.location for record in table] == [f"{start}en/a.jsonl:1", f"{start}de/a.jsonl:1"]


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
    first = list(load(path).table)
    damage(folders(cache)[0])
    again = load(path)
    assert "the data are read anew" in caplog.text
    assert not is_mapped(again, caplog)
    assert list(again.table) == first
    assert is_mapped(load(path), caplog)


def test_what_a_kill_left_is_cleared_away_and_nothing_is_kept_of_refused_data(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "q"}])
    with pytest.raises(DataError, match="positive"):
        load(path)
    assert folders(cache) == []
    write(tmp_path / "a.jsonl", rows_of(5))
    left = load(path).table.folder
    assert left is not None
    shutil.copytree(left, cache / f".{left.name}.left")
    shutil.rmtree(left)
    assert load(path).table.folder == left
    assert folders(cache) == [left]


def test_pictures_in_files_are_looked_at_in_every_start(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path / "a.jsonl", [{"query": f"q{i}", "positive_image": "a.png"} for i in range(3)])
    loaded = load(path)
    assert folders(cache) == []
    assert loaded.table[2].positives == (Image(str((tmp_path / "a.png").resolve())),)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match="no such file"):
        load(path)


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(5))
    stamps = iter([[(1, 2)], [(1, 3)]])
    monkeypatch.setattr(table_cache, "_stamps", lambda files: next(stamps))
    assert len(load(path).table) == 5
    assert folders(cache) == []


def test_a_folder_without_room_is_named_and_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(5))
    monkeypatch.setattr(table_cache, "FREE_SHARE", 1e30)
    loaded = load(path)
    assert loaded.table.folder is None
    assert loaded.notes[-1].startswith(f"The rows are not kept in {cache}: it has ")
    monkeypatch.setenv(table_cache.VARIABLE, path)
    loaded = load(path)
    assert loaded.table.folder is None
    assert "Not a directory" in loaded.notes[-1]


def test_a_disk_that_fills_up_says_what_to_do(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "a.jsonl", rows_of(5))
    monkeypatch.setattr(table_cache, "fsync_path", full)
    with pytest.raises(MachineError, match=r"can't be kept in .*No space left on device; .*VEMBED_CACHE"):
        load(path)
    assert folders(cache) == []


def test_processes_that_start_together_read_once_and_share(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows_of(2000))
    children = []
    for _ in range(3):
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            loaded = load(path)
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
    loaded = load(path)
    assert [record.query for record in loaded.table] == [f"q{i}" for i in range(5)]
    assert loaded.table.folder in folders(cache)
