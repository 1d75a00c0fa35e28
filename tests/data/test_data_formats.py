"""Every format of rows keeps the same promises: ours, and that of the plugin that CONTRIBUTING prints."""

import csv
import gc
import gzip
import io
import json
import re
import sys
import tarfile
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vembed
from vembed.data.formats import iter_rows
from vembed.data.lines import numbered_lines
from vembed.data.read import DataSource
from vembed.errors import ConfigError, DataError, MachineError
from vembed.registry import FORMATS
from vembed.testing.formats import NUM_ROWS, FormatContract, Row, pairs

ROOT = Path(vembed.__file__).parents[1]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Add a data format")[2].partition("\n## ")[0]
CODE, TEST_CODE = re.findall(r"```python\n(.*?)```", RECIPE, flags=re.DOTALL)


def write_text(path: Path, text: str) -> None:
    """Write a text, packed where the file's name says so."""
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())


class TestJsonl(FormatContract):
    suffix = ".jsonl"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:
        lines = [json.dumps(row) for row in rows]
        lines[number - 1] = lines[number - 1][:-1]
        write_text(path, "\n".join(lines))
        return True


class TestJson(FormatContract):
    suffix = ".json"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        # One list, its brackets on lines of their own.
        write_text(path, "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")

    def line(self, number: int) -> int:
        return number + 1

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:
        cells: list[object] = [*rows]
        cells[number - 1] = 7
        write_text(path, "[\n" + ",\n".join(map(json.dumps, cells)) + "\n]\n")
        return True


class TestCsv(FormatContract):
    suffix = ".csv"
    delimiter = ","
    has_types = False
    end_is_marked = False

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        written = io.StringIO()
        writer = csv.writer(written, delimiter=self.delimiter, lineterminator="\n")
        writer.writerow([*rows[0]] if rows else ["query", "positive"])
        writer.writerows(row.values() for row in rows)
        write_text(path, written.getvalue())

    def line(self, number: int) -> int:
        return number + 1

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:
        more = [{**row, "more": "x"} for row in rows]
        del more[number - 1]["more"]
        written = io.StringIO()
        writer = csv.writer(written, delimiter=self.delimiter, lineterminator="\n")
        writer.writerows([["query", "positive", "more"], *(row.values() for row in more)])
        write_text(path, written.getvalue())
        return True


class TestTsv(TestCsv):
    suffix = ".tsv"
    delimiter = "\t"


class TestTxt(TestCsv):
    suffix = ".txt"
    delimiter = "\t"
    is_corpus = False  # there, a .txt file has one document a line

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:
        return False  # a text whose lines differ in their cells is no table


class TestPackedJsonl(TestJsonl):
    suffix = ".jsonl.gz"


class TestPackedJson(TestJson):
    suffix = ".json.gz"


class TestPackedCsv(TestCsv):
    suffix = ".csv.gz"
    end_is_marked = True


class TestPackedTsv(TestTsv):
    suffix = ".tsv.gz"
    end_is_marked = True


class TestPackedTxt(TestTxt):
    suffix = ".txt.gz"
    end_is_marked = True


def arrow_table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist([*rows]) if rows else pa.table({"query": pa.array([], pa.string())})


class TestParquet(FormatContract):
    suffix = ".parquet"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        pq.write_table(arrow_table(rows), path, row_group_size=16)

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:
        # A text column whose bytes are no UTF-8 in one row.
        values = [row["positive"].encode() for row in rows]
        values[number - 1] = b"\xff"
        column = pa.array(values, pa.binary()).view(pa.string())
        pq.write_table(pa.table({"query": [row["query"] for row in rows], "positive": column}), path)
        return True


class TestArrow(FormatContract):
    """The stream form, as `datasets` saves it."""

    suffix = ".arrow"
    new_writer = staticmethod(pa.ipc.new_stream)

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        table = arrow_table(rows)
        with path.open("wb") as file, self.new_writer(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=16)


class TestArrowFile(TestArrow):
    """The file form, with a table of contents at its end."""

    new_writer = staticmethod(pa.ipc.new_file)


class TestTar(FormatContract):
    suffix = ".tar"
    is_corpus = False

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        with tarfile.open(path, "w") as shard:
            for number, row in enumerate(rows):
                self.add(shard, f"{number:04}.json", json.dumps(row).encode())

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:
        with tarfile.open(path, "w") as shard:
            for place, row in enumerate(rows, start=1):
                self.add(shard, f"{place:04}.json", b"{" if place == number else json.dumps(row).encode())
        return True

    @staticmethod
    def add(shard: tarfile.TarFile, name: str, data: bytes) -> None:
        header = tarfile.TarInfo(name)
        header.size = len(data)
        shard.addfile(header, io.BytesIO(data))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the formats that a test registers."""
    for table in ("_entries", "_plugins"):
        monkeypatch.setattr(FORMATS, table, dict(getattr(FORMATS, table)))
    return


@pytest.fixture
def recipe(registered: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """Import the plugin that CONTRIBUTING prints, from a file of its own."""
    file = tmp_path / "my_formats.py"
    file.write_text(CODE)
    module = types.ModuleType("my_formats")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "my_formats", module)
    exec(compile(CODE, file, "exec"), vars(module))
    return module


def test_file_of_the_recipe() -> type[FormatContract]:
    """Return the class of tests that CONTRIBUTING prints beside the plugin."""
    names: dict[str, Any] = {"__name__": "test_my_formats"}
    exec(compile(TEST_CODE.replace("import my_formats\n", ""), "test_my_formats.py", "exec"), names)
    return names["TestPairs"]


test_file_of_the_recipe.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.usefixtures("recipe")
class TestPlugin(test_file_of_the_recipe()):  # type: ignore[misc]
    """The recipe's own tests."""


def test_every_format_keeps_the_contract() -> None:
    classes = [each for each in globals().values() if isinstance(each, type) and issubclass(each, FormatContract)]
    assert {each.suffix for each in classes} - {"", ".pairs"} == {f".{name}" for name in FORMATS.names()}


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("xml", "a suffix begins with a dot, as '.xml' does"),
        (".csv", "data format 'csv' of .* is already that of vembed"),
        (".XML", "use lower-case letters"),
    ],
)
def test_a_suffix_that_cannot_be_had_is_refused(suffix: str, words: str, registered: None) -> None:
    with pytest.raises(ConfigError, match=words):
        vembed.register_format(suffix)(lambda path: ())


@pytest.fixture
def rows_of(registered: None, tmp_path: Path) -> Callable[[Callable[[Path], Any]], Path]:
    """Register a reader of .toy files, and return such a file."""

    def register(function: Callable[[Path], Any]) -> Path:
        vembed.register_format(".toy")(function)
        (tmp_path / "a.toy").write_text("anything")
        return tmp_path / "a.toy"

    return register


def test_what_a_reader_of_a_plugin_raises_is_told_with_the_file(rows_of: Callable[..., Path]) -> None:
    def undecodable(path: Path) -> Iterator[tuple[int, Row]]:
        yield 1, pairs(1)[0]
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    path = rows_of(undecodable)
    with pytest.raises(DataError, match=r"a\.toy:1: can't be read on as \.toy: .*invalid start byte"):
        DataSource(str(path), "train").records()

    def refused(path: Path) -> Iterator[tuple[int, Row]]:
        raise OSError(5, "Input/output error")
        yield

    with pytest.raises(MachineError, match=r"can't read .*a\.toy: Input/output error"):
        DataSource(str(rows_of(refused)), "train").records()


def test_what_a_plugin_yields_is_checked_as_a_row_of_json_is(rows_of: Callable[..., Path]) -> None:
    path = rows_of(lambda path: [(3, pairs(1)[0]), (5, ["no", "row"]), (9, "not whole"), (12, {"query": 1})])
    with pytest.raises(DataError) as caught:
        DataSource(str(path), "train").records()
    lines = str(caught.value).splitlines()
    assert "  a.toy:5: expected a JSON object, got list" in lines
    assert "  a.toy:9: not whole" in lines
    assert "  a.toy:12: query: expected text, got the number 1" in lines


def test_a_surplus_cell_that_csv_gives_no_name_is_an_invalid_row(rows_of: Callable[..., Path]) -> None:
    path = rows_of(lambda path: enumerate(csv.DictReader(["query,positive", "q,p", "q,p,surplus"]), start=2))
    with pytest.raises(DataError, match=r"a\.toy:3: the name of a column is no text"):
        DataSource(str(path), "train").records()


def test_rows_of_a_parsers_own_dictionary_are_rows(rows_of: Callable[..., Path]) -> None:
    path = rows_of(lambda path: [(1, OrderedDict(query="q", positive="p"))])
    assert [record.query for record in DataSource(str(path), "train").records().table] == ["q"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_packed_file_that_cannot_be_opened_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"can't read .*nope\.jsonl\.gz"):
        list(numbered_lines(tmp_path / "nope.jsonl.gz"))
    gc.collect()


def test_a_format_named_like_jsonl_is_read_by_its_plugin_in_every_way(registered: None, tmp_path: Path) -> None:
    @vembed.register_format(".jsonlines")
    def marked(path: Path) -> Iterator[tuple[int, Row]]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            row = json.loads(line)
            yield number, {**row, "query": f"plugin: {row['query']}"}

    # The rows are JSONL as well, so that our own reader would take them without a word.
    path = tmp_path / "rows.jsonlines"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    expected = [f"plugin: {row['query']}" for row in pairs()]
    source = DataSource(str(path), "train")
    assert [row["query"] for row in source.raw_rows(NUM_ROWS)] == expected
    assert [record.query for record in source.records().table] == expected
    assert [*source.judged().queries.values()] == expected


def test_a_cell_of_parquet_without_a_python_value_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    assert TestParquet().write_unreadable(path, pairs(), 3)
    with pytest.raises(DataError, match=r"rows\.parquet:3: positive: a value of type string invalid UTF-8"):
        DataSource(str(path), "train").records()


@pytest.mark.parametrize("names", ["rows.pairs", "{a.jsonl,rows.pairs}"])
def test_rows_that_are_kept_follow_from_the_code_that_read_them(
    recipe: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    from vembed.data import table_cache

    monkeypatch.setenv(table_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(table_cache, "LEAST_BYTES", 0)
    monkeypatch.chdir(tmp_path)
    Path("rows.pairs").write_text("q => d\n")
    Path("a.jsonl").write_text(json.dumps(pairs(1)[0]) + "\n")
    kept = {DataSource(names, "train").records().table.folder for _ in range(2)}
    Path(str(recipe.__file__)).write_text(CODE + "# changed\n")
    kept.add(DataSource(names, "train").records().table.folder)
    assert len(kept) == 2


def test_a_reader_is_closed_where_only_its_first_rows_are_taken(rows_of: Callable[..., Path]) -> None:
    closed = []

    def endless(path: Path) -> Iterator[tuple[int, Row]]:
        try:
            for number in range(1, 10**9):
                yield number, pairs(1)[0]
        finally:
            closed.append(path.name)

    path = rows_of(endless)
    DataSource(str(path), "train").peek()
    assert next(iter_rows(path))[0] == 1
    assert closed == ["a.toy"] * 2
