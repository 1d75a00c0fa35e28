"""Files that no honest set holds, and very large ones: bounded memory, and errors with the file, the row, the cure."""

import gzip
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.rows import Jsonl, load, png, queries

from vembed.data import arrow_files, lines, table_writer
from vembed.data.builtin import hash_of
from vembed.data.columns import ColumnResolver
from vembed.data.read import DataSource
from vembed.entrypoints.command import run_command
from vembed.errors import DataError, MachineError, VembedError

ROW = {"query": "q", "positive": "p"}

READERS: dict[str, Callable[[str], object]] = {
    "records": lambda path: DataSource(path, "train").records(),
    "retrieval": lambda path: DataSource(path, "test").judged(),
    "corpus": lambda path: list(DataSource(path, "test").documents()),
}


def refused_by(path: Path | str, reader: str = "records") -> str:
    with pytest.raises(VembedError) as caught:
        READERS[reader](str(path))
    return str(caught.value)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


MAKERS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "endless link": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [*MAKERS.values(), make_socket], ids=[*MAKERS, "socket"])
def test_only_regular_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], reader: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    path = tmp_path / "x.jsonl"
    make(path.relative_to(tmp_path))
    assert "no regular file but a pipe, socket, device, or a link that leads nowhere" in refused_by(path, reader)


@pytest.mark.parametrize("make", [*MAKERS.values(), Path.mkdir], ids=[*MAKERS, "folder"])
def test_judgements_are_read_from_a_regular_file_only(beir_files: Path, make: Callable[[Path], None]) -> None:
    path = beir_files / "qrels" / "test.tsv"
    path.unlink()
    make(path)
    assert re.search(
        r"can't read .*test.tsv: (not a regular file|Too many levels)", refused_by(beir_files, "retrieval")
    )


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "text", ["what is the longest name of all " * 12, "x" * 5000, "~nobody-at-all/x", "a\0b", "\ud800"]
)
def test_a_text_where_a_path_belongs_is_said_not_to_exist(text: str, reader: str) -> None:
    assert "doesn't exist" in refused_by(text, reader)


def test_an_overlong_folder_of_pictures_is_said_not_to_exist(jsonl: Jsonl) -> None:
    path = jsonl([{"caption": "c", "image": "x.png"}])
    with pytest.raises(DataError, match="isn't a folder"):
        load(path, image_root="x" * 300)


def test_links_to_folders_above_are_entered_once(tmp_path: Path, jsonl: Jsonl) -> None:
    jsonl([ROW], "a/b/t.jsonl")
    for number in range(3):
        (tmp_path / "a" / f"link{number}").symlink_to(tmp_path)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "a" / "b")
    assert queries(f"{tmp_path}/*/t.jsonl") == ["q"]
    assert queries(f"{tmp_path}/a/*/t.jsonl") == ["q"]
    assert queries(f"{tmp_path}/{'*/' * 30}t.jsonl") == ["q"]


ODD_VALUES = {
    "duration": pa.array([2**62, 1], pa.duration("s")),
    "timestamp": pa.array([2**62, 1], pa.timestamp("us")),
    "date32": pa.array([2**31 - 1, 1], pa.date32()),
    "date64": pa.array([2**62, 1], pa.date64()),
    "list of dates": pa.array([[2**31 - 1], [1]], pa.list_(pa.date32())),
    "struct of dates": pa.array([{"text": 2**31 - 1}, {"text": 1}], pa.struct([("text", pa.date32())])),
    "map": pa.array([[("a", 2**31 - 1)], [("b", 1)]], pa.map_(pa.string(), pa.date32())),
    "dictionary": pa.array([2**31 - 1, 1], pa.date32()).dictionary_encode(),
    "decimal": pa.array([Decimal(1), Decimal(2)]),
    "huge number": pa.array([2**64 - 1, 1], pa.uint64()),
    "null": pa.nulls(2),
    "bytes": pa.array([b"a", b"b"], pa.binary(1)),
    "not UTF-8": pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    ),
}


@pytest.mark.parametrize("column", ["query", "positive", "negatives", "query_image", "label"])
@pytest.mark.parametrize("kind", ODD_VALUES)
def test_values_of_parquet_that_are_no_texts_are_refused_by_row(tmp_path: Path, kind: str, column: str) -> None:
    columns = {"query": ["a", "b"], "positive": ["c", "d"]} | {column: ODD_VALUES[kind]}
    if column == "query_image":
        del columns["query"]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path)
    if kind == "null" and column in {"negatives", "label"}:
        assert queries(path) == ["a", "b"]
        return
    assert re.search(rf"\b(t.parquet:1: {column}: |t.parquet:1: {column} holds )", refused_by(path))


def test_a_parquet_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=["query", "query", "positive"])
    pq.write_table(table, tmp_path / "t.parquet")
    assert "names the column 'query' twice" in refused_by(tmp_path / "t.parquet")


def test_a_text_that_parquet_stores_once_is_refused_before_its_repeats_fill_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "ROW_FREE_BYTES", 2**25)
    path = tmp_path / "t.parquet"
    stored_once = pa.DictionaryArray.from_arrays(pa.array([0] * 4096), pa.array(["x" * 2**18]))
    pq.write_table(pa.table({"query": ["q"] * 4096, "positive": stored_once}), path, store_schema=False)
    assert path.stat().st_size < 20_000
    assert re.search(r"t.parquet:\d+: the rows so far hold .* times the file's size", refused_by(path))
    assert pa.total_allocated_bytes() < 2**26


def test_pages_that_unpack_to_hundreds_of_times_their_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "PAGE_FREE_BYTES", 2**20)
    path = tmp_path / "t.parquet"
    table = pa.table({"query": ["q"] * 4, "positive": ["x" * 2**20] * 4})
    pq.write_table(table, path, use_dictionary=False, compression="zstd")
    assert "its rows unpack to 4.0 MiB, over 200 times the file's size" in refused_by(path)


def test_rows_of_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"query": pa.nulls(2_000_000, pa.string())}), path)
    assert "2,000,000 rows in " in refused_by(path)


def test_a_row_of_parquet_over_the_limit_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "MAX_ROW_BYTES", 2**20)
    texts = ["a", "b" * (2**20 + 1), "c" * (2**20 - 100)]
    pq.write_table(pa.table({"query": ["q"] * 3, "positive": texts}), tmp_path / "t.parquet")
    assert refused_by(tmp_path / "t.parquet").splitlines()[1] == "  t.parquet:2: a row of over 1 MiB"
    pq.write_table(pa.table({"query": ["q"] * 2, "positive": texts[::2]}), tmp_path / "t.parquet")
    table = load(tmp_path / "t.parquet").table
    assert [len(record.positives[0]) for record in table] == [1, 2**20 - 100]


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.json.gz", "t.csv.gz", "t.tsv.gz"])
@pytest.mark.parametrize("content", [b" ", b" 0,\n"])
def test_a_gzip_file_that_unpacks_to_hundreds_of_times_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.setattr(lines, "GZIP_FREE_BYTES", 2**17)
    path = tmp_path / name
    path.write_bytes(gzip.compress(content * (2**20 // len(content))))
    assert re.search(r"t\..*.gz: it unpacks to over 200 times its size, .* unpack it with gunzip", refused_by(path))


def test_texts_that_repeat_themselves_a_hundredfold_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "GZIP_FREE_BYTES", 2**16)
    rows = [json.dumps({"query": f"what is {number}", "positive": "it is this " * 40}) for number in range(4000)]
    packed = gzip.compress("\n".join(rows).encode())
    assert sum(map(len, rows)) > 40 * len(packed)
    (tmp_path / "t.jsonl.gz").write_bytes(packed)
    assert len(queries(tmp_path / "t.jsonl.gz")) == 4000


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.json.gz", "t.csv.gz"])
def test_a_gzip_file_that_is_cut_short_names_the_line_up_to_which_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 2**14)
    rows = [{"query": f"q {hash_of(str(number))}", "positive": "p"} for number in range(3000)]
    texts = {
        "t.jsonl.gz": "\n".join(json.dumps(row) for row in rows),
        "t.json.gz": json.dumps(rows, indent=0).replace('\n"', '"').replace("\n}", "}"),
        "t.csv.gz": "\n".join(["query,positive", *(f"{row['query']},p" for row in rows)]),
    }
    packed = gzip.compress(texts[name].encode())
    (tmp_path / name).write_bytes(packed[: len(packed) * 9 // 10])
    found = re.search(r"t\..*gz:(\d+): the gzip data is truncated", refused_by(tmp_path / name))
    assert found is not None
    assert 2600 < int(found[1]) < 2800


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.json"])
def test_blank_lines_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(lines, "MAX_BLANK_LINES", 100)
    (tmp_path / name).write_bytes(b"\n \r\n" * 51)
    assert f"{name}:101: over 100 blank lines in a row" in refused_by(tmp_path / name)
    (tmp_path / "ok.jsonl").write_bytes((b"\n" * 99 + json.dumps(ROW).encode() + b"\n") * 3)
    assert len(queries(tmp_path / "ok.jsonl")) == 3


def test_a_json_list_is_read_object_by_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 7)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    rows = [{"query": f"q{number} \u00e9\U0001f600\n\\", "positive": "p", "label": number - 50} for number in range(99)]
    path = tmp_path / "t.json"
    for indent, ascii_only in ((None, True), (2, False)):
        path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only), "utf-8")
        table = load(path, label_kind="class").table
        assert [(each.query, each.label) for each in table] == [(row["query"], row["label"]) for row in rows]
    assert table[3].location == "t.json:17"
    path.write_text(json.dumps([ROW, {"query": "x" * 300, "positive": "p"}]))
    assert "t.json:1: a JSON object of over" in refused_by(path)


def test_a_csv_row_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    (tmp_path / "t.csv").write_text("query,positive\n" + "q,p\n" * 500 + '"' + "never closed\n" * 100)
    assert "t.csv:578: a row of over" in refused_by(tmp_path / "t.csv")


def test_rows_of_many_columns_are_refused_at_once(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(100_000)]
    (tmp_path / "t.csv").write_text(",".join(names) + "\n")
    assert "t.csv:1: 100,000 columns, and a row has at most 10,000" in refused_by(tmp_path / "t.csv")
    (tmp_path / "t.jsonl").write_text(json.dumps(dict.fromkeys(names, 1)) + "\n")
    assert "t.jsonl:1: 100,000 columns" in refused_by(tmp_path / "t.jsonl")
    twice = json.dumps(dict.fromkeys(names, 1))[:-1] + ', "c99999": 1}'
    (tmp_path / "t.jsonl").write_text(twice + "\n")
    assert "t.jsonl:1: bad JSON: the key 'c99999' is given twice" in refused_by(tmp_path / "t.jsonl")


def test_the_nearest_name_is_sought_only_for_the_row_that_is_listed(
    jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    missing = ColumnResolver.missing

    def counted(self: ColumnResolver, name: str, row: Any) -> str:
        asked.append(name)
        return missing(self, name, row)

    monkeypatch.setattr(ColumnResolver, "missing", counted)
    message = refused_by(jsonl([ROW, *[{"qury": "q", "positive": "p"}] * 500]))
    assert "500 invalid rows" in message
    assert message.count("if 'qury' is meant") == len(asked) == 1


STEERING = "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e\r"


def test_characters_of_data_that_steer_a_terminal_are_shown_in_errors(
    tmp_path: Path, jsonl: Jsonl, beir_files: Path
) -> None:
    rows = [
        {STEERING: 1, "positive": "p"},
        {"query": "q", "positive": STEERING, "negatives": STEERING},
        {"caption": "c", "image": STEERING},
    ]
    messages = [refused_by(jsonl([row])) for row in rows]
    (tmp_path / "t.csv").write_text("{0},{0}\n".format(STEERING.strip()))
    messages.append(refused_by(tmp_path / "t.csv"))
    messages.append(refused_by(tmp_path / f"{STEERING}.jsonl"))
    (beir_files / "qrels/test.tsv").write_text(f"q1\td1\t{STEERING}x\n")
    messages.append(refused_by(beir_files, "retrieval"))
    assert [message for message in messages if "\\x1b" not in message] == []
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", "".join(messages))


@pytest.mark.slow
def test_long_values_are_cut_in_errors(jsonl: Jsonl, beir_files: Path) -> None:
    long = "x" * 10**6
    rows = [
        {long: 1, "positive": "p"},
        {"query": "q", "positive": "p", long: 1, f"{long}y": 2},
        {"query": "q", "positive": long, "negatives": long},
        {"caption": "c", "image": long},
        {"query": "q", "positive": "p", "negatives": [{long: 1}]},
    ]
    for row in rows[:1] + rows[2:]:
        assert len(refused_by(jsonl([row]))) < 4000
    assert len("".join(load(jsonl([rows[1]])).notes)) < 400
    (beir_files / "qrels/test.tsv").write_text(f"q1\td1\t{long}\n")
    assert len(refused_by(beir_files, "retrieval")) < 400
    assert len(str(MachineError(long))) < 6000


def test_what_a_command_logs_of_data_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        logging.getLogger("vembed.data").warning("Ignored columns: %s.", STEERING)
        raise DataError(f"column {STEERING}")

    assert run_command(command) == 3
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert captured.out.startswith("warning: Ignored columns: \\x1b]0;owned\\x07")
    assert captured.err.startswith("error: column \\x1b]0;owned\\x07")


def test_pictures_of_parquet_lie_on_disk_beyond_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_writer, "BLOB_BYTES", 2**10)
    monkeypatch.setattr(table_writer, "HELD_BYTES", 2**12)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pictures = [png(f"#{number:06x}", (30, 30)) + bytes(500) for number in range(40)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"caption": [f"c{number}" for number in range(40)], "image": pictures}), path)
    before = pa.total_allocated_bytes()
    table = load(path).table
    assert pa.total_allocated_bytes() - before < 10_000 < sum(map(len, pictures))
    held = [record.positives[0] for record in table]
    assert pa.total_allocated_bytes() - before < 10_000
    assert [image.data for image in held] == [image.read() for image in held] == pictures
    assert len(set(held)) == 40
    assert [record.positives[0].data for record in table.take([39, 0])] == [pictures[39], pictures[0]]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["t.parquet"]  # no name is left behind


# Large manifests: the last row is checked before anything trains


def write_rows(path: Path, count: int, last: str) -> None:
    with path.open("w") as handle:
        handle.writelines(
            f'{{"query": "query number {i}", "positive": "passage number {i}", "negatives": ["other {i}"]}}\n'
            for i in range(count - 1)
        )
        handle.write(last + "\n")


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_an_error_in_the_last_row_is_named(tmp_path: Path, count: int) -> None:
    path = tmp_path / "train.jsonl"
    write_rows(path, count, '{"query": "q", "positive": "p", "negatives": ["p"]}')
    with pytest.raises(DataError, match=rf"train\.jsonl:{count}: negatives: holds the row's own positive"):
        load(path)
    loaded = load(path, skip_invalid_records=True, max_invalid_records=1)
    assert len(loaded.table) == count - 1
    assert loaded.table[count - 2].location == f"train.jsonl:{count - 1}"


PEAK = """
import resource, sys
from vembed.data.read import DataSource
loaded = DataSource(sys.argv[1], "train").records()
print(len(loaded.table), int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]))
"""


@pytest.mark.slow
def test_memory_stays_near_the_size_of_the_texts(tmp_path: Path) -> None:
    peaks = {}
    for count in (1000, 1_000_000):
        path = tmp_path / f"{count}.jsonl"
        write_rows(path, count, '{"query": "q", "positive": "p"}')
        done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
        rows, peaks[count] = (int(value) for value in done.stdout.split())
        assert rows == count
    grown_bytes = (peaks[1_000_000] - peaks[1000]) * 1024
    # As Python objects the rows would take over 600 bytes each; as Arrow, about 50 of text and 80 of offsets.
    assert grown_bytes < 400 * 1_000_000, f"{grown_bytes / 1e6:.0f} MB"
