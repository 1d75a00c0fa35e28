r"""The promises of every format of rows, as one class of tests.

Derive from it and say how a file is written, and a reader is proved:

    class TestPairs(FormatContract):
        suffix = ".pairs"

        def write(self, path, rows):
            path.write_text("".join(f"{row['query']} => {row['positive']}\n" for row in rows))

Promise                       Compared with
rows, file:line, a folder     the same rows as JSONL; the line that the writer put each one on
judged set, corpus            the same rows as JSONL
one broken row                the others, which come out as before; an error with file:line
empty, other content          an error with the file's name
truncated, at many bytes      an error with the file's name, or the rows before the cut
first rows                    a missing column is told before all rows are read; no file stays open
second start                  the first one's table, without a look at the file
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import vembed.data.row_loader
from vembed.data import table_cache
from vembed.data.formats import NAMED_SUFFIXES, iter_rows, suffix_of
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vembed.data.table import Record

Row = dict[str, Any]

NUM_ROWS, NUM_CUTS = 40, 60
BROKEN = 3
"""Number of the broken row, counted from 1."""

OPEN_FILES = Path("/proc/self/fd")
"""Of this process; other systems than Linux have none."""


def pairs(count: int = NUM_ROWS) -> list[Row]:
    """Return rows to train on, with the characters that formats tend to stumble over."""
    return [
        {"query": f'what, "exactly", is {number}; or {number}|2?', "positive": f"it's {number}, naïvely \U0001f600"}
        for number in range(1, count + 1)
    ]


class FormatContract:
    """Tests of one format: derive from it and override `suffix`, `write`, and what the format states otherwise."""

    suffix: ClassVar[str] = ""
    any_columns: ClassVar[bool] = True  # a row may have columns of any name, not query and positive alone
    is_corpus: ClassVar[bool] = True  # documents may be read from it; needs `any_columns`
    has_types: ClassVar[bool] = True  # a cell may be a number or a list, not a text alone
    end_is_marked: ClassVar[bool] = True  # else a file that ends within its last cell can't be told from a whole one

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """Write rows, whose values are texts, or numbers and lists of texts where `has_types`."""
        raise NotImplementedError

    def line(self, number: int) -> int:
        """Return the line, counted from 1, that a row begins on, counted from 1."""
        return number

    def write_unreadable(self, path: Path, rows: Sequence[Row], number: int) -> bool:  # noqa: ARG002
        """Write rows, one of which can't be read as a row; False where the format has no such rows."""
        return False

    @pytest.fixture(autouse=True)
    def _nothing_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(table_cache.VARIABLE, "never")

    def file(self, folder: Path, rows: Sequence[Row], name: str = "rows") -> Path:
        """Write a file of the format, and return it."""
        path = folder / f"{name}{self.suffix}"
        self.write(path, rows)
        assert suffix_of(path) == self.suffix, "no such format is registered"
        return path

    def refusal(self, path: Path) -> str:
        """Return the message with which a file is refused."""
        with pytest.raises(DataError) as caught:
            DataSource(str(path), "train").records()
        return str(caught.value)

    def test_rows_come_out_as_from_jsonl_each_with_its_line(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, pairs())
        table, expected = DataSource(str(path), "train").records().table, in_jsonl(tmp_path, pairs())
        assert contents(table) == contents(DataSource(str(expected), "train").records().table)
        assert table.fingerprint == DataSource(str(expected), "train").records().table.fingerprint
        assert [record.location for record in table] == [
            f"{path.name}:{self.line(number)}" for number in range(1, NUM_ROWS + 1)
        ]

    def test_lists_and_numbers_come_out_as_from_jsonl(self, tmp_path: Path) -> None:
        if not self.has_types:
            pytest.skip("every cell is a text")
        rows = [{**row, "negatives": [f"a{n}", f"b{n}"], "label": n // 2} for n, row in enumerate(pairs())]
        keys = DataKeys(label_kind="class")
        tables = [
            DataSource(str(path), "train", keys).records().table
            for path in (self.file(tmp_path, rows), in_jsonl(tmp_path, rows))
        ]
        assert contents(tables[0]) == contents(tables[1])
        assert tables[0][5].negatives == ("a5", "b5")
        assert tables[0][5].label == 2

    def test_the_files_of_a_folder_are_read_in_order(self, tmp_path: Path) -> None:
        if self.suffix in NAMED_SUFFIXES:
            pytest.skip("such a file is read where it is named")
        (tmp_path / "set").mkdir()
        self.file(tmp_path / "set", pairs()[20:], "b")
        self.file(tmp_path / "set", pairs()[:20], "a")
        table = DataSource(str(tmp_path / "set"), "train").records().table
        assert [record.query for record in table] == [row["query"] for row in pairs()]

    def test_a_judged_set_is_as_from_jsonl(self, tmp_path: Path) -> None:
        task, expected = (
            DataSource(str(path), "test").judged()
            for path in (self.file(tmp_path, pairs()), in_jsonl(tmp_path, pairs()))
        )
        assert (task.queries, task.documents, task.qrels) == (expected.queries, expected.documents, expected.qrels)
        assert len(task.qrels) == NUM_ROWS

    def test_a_corpus_is_as_from_jsonl(self, tmp_path: Path) -> None:
        if not (self.is_corpus and self.any_columns):
            pytest.skip("such a file holds no documents with an id")
        rows = [{"_id": f"d{n}", "title": f"title {n}", "text": f"text, of {n}"} for n in range(NUM_ROWS)]
        documents, expected = (
            list(DataSource(str(path), "test").documents())
            for path in (self.file(tmp_path, rows), in_jsonl(tmp_path, rows))
        )
        assert documents == expected
        assert documents[1].text == "title 1 text, of 1"
        wrong = self.file(tmp_path, [*rows, rows[0]])
        with pytest.raises(DataError, match=rf"{wrong.name}:{self.line(NUM_ROWS + 1)}: _id: 'd0' is given twice"):
            list(DataSource(str(wrong), "test").documents())

    def test_one_broken_row_is_named_and_the_others_come_out(self, tmp_path: Path) -> None:
        rows = pairs()
        rows[BROKEN - 1]["positive"] = ""
        self.check_broken(self.file(tmp_path, rows))

    def test_one_row_that_cannot_be_read_is_named_and_the_others_come_out(self, tmp_path: Path) -> None:
        path = tmp_path / f"rows{self.suffix}"
        if not self.write_unreadable(path, pairs(), BROKEN):
            pytest.skip("no row of such a file is unreadable by itself")
        self.check_broken(path)

    def check_broken(self, path: Path) -> None:
        """Check that row `BROKEN` of a file is refused with its line, and that all others come out without it."""
        where = f"{path.name}:{self.line(BROKEN)}: "
        assert where in self.refusal(path)
        loaded = DataSource(str(path), "train", DataKeys(skip_invalid_records=True)).records()
        assert loaded.num_invalid == 1
        assert where in loaded.notes[0]
        expected = [row["query"] for number, row in enumerate(pairs(), start=1) if number != BROKEN]
        assert [record.query for record in loaded.table] == expected

    def test_a_value_of_another_type_is_named(self, tmp_path: Path) -> None:
        if not self.has_types:
            pytest.skip("every cell is a text")
        rows = [{**row, "positive": [row["positive"]]} for row in pairs()]
        rows[BROKEN - 1]["positive"] = ["good", " "]
        path = self.file(tmp_path, rows)
        assert f"{path.name}:{self.line(BROKEN)}: positive: blank text (item 2 of 2)" in self.refusal(path)
        path = self.file(tmp_path, [{**row, "positive": 5} for row in pairs()])
        assert "positive: expected text, got the number 5" in self.refusal(path)

    def test_a_negative_that_is_a_positive_of_its_row_is_named(self, tmp_path: Path) -> None:
        if not self.has_types:
            pytest.skip("every cell is a text")
        # One positive in every row, or one and two in turn: blocks of rows are checked in another way then.
        for most in (1, 2):
            rows = [
                {**row, "positive": [row["positive"], f"p{n}"][: 1 + n % most], "negatives": [f"a{n}"]}
                for n, row in enumerate(pairs())
            ]
            rows[BROKEN - 1]["negatives"] = [f" {rows[BROKEN - 1]['positive'][0]}"]
            path = self.file(tmp_path, rows)
            assert f"{path.name}:{self.line(BROKEN)}: negatives: holds the row's own positive" in self.refusal(path)

    def test_an_empty_file_and_one_without_rows_are_refused(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, [])
        assert path.name in self.refusal(path)
        path.write_bytes(b"")
        assert path.name in self.refusal(path)

    def test_other_content_is_refused(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, pairs())
        for content in (b"\x00\xff\xfe" * 999, b"\x1f\x8b\x08\x00" + b"\x07" * 99, b"%PDF-1.7\n%\xe2\xe3", b"{" * 99):
            path.write_bytes(content)
            assert path.name in self.refusal(path)

    def test_a_truncated_file_is_refused_or_gives_the_rows_before_the_cut(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, pairs())
        # Cuts at equal steps over the whole file: in its header, within a row, between two rows, and near its end.
        content = path.read_bytes()
        expected = contents(DataSource(str(path), "train").records().table)
        num_refused = 0
        for number in range(NUM_CUTS):
            size = len(content) * number // NUM_CUTS
            path.write_bytes(content[:size])
            try:
                rows = contents(DataSource(str(path), "train").records().table)
            except DataError as error:
                num_refused += 1
                assert path.name in str(error)  # noqa: PT017 - some cuts are no fault
                continue
            # All rows are there where nothing but filling was cut, as behind the end mark of a tar file.
            assert len(rows) < NUM_ROWS or not self.end_is_marked or not content[size:].strip(b"\0\n")
            whole = rows if self.end_is_marked else rows[:-1]
            assert whole == expected[: len(whole)]
        assert num_refused > 0, "no cut was noticed"

    def test_a_missing_column_is_told_by_the_first_rows_and_no_file_stays_open(self, tmp_path: Path) -> None:
        path = self.file(tmp_path, pairs(500))
        before = len(list(OPEN_FILES.iterdir())) if OPEN_FILES.exists() else 0
        columns, modalities = DataSource(str(path), "train").peek()
        assert modalities == {"text"}
        assert [*columns.used] == ["query", "positive"]
        assert next(iter(iter_rows(path)))[1] == pairs(1)[0]
        assert not OPEN_FILES.exists() or len(list(OPEN_FILES.iterdir())) == before
        if self.any_columns:
            path = self.file(tmp_path, [{"ask": row["query"], "positive": row["positive"]} for row in pairs(500)])
            with pytest.raises(DataError, match=r"has a column 'query': missing .* the row has ask, positive"):
                DataSource(str(path), "train").peek()

    def test_a_second_start_takes_the_rows_without_a_look_at_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(table_cache.VARIABLE, str(tmp_path / "cache"))
        monkeypatch.setattr(table_cache, "LEAST_BYTES", 0)
        path = self.file(tmp_path, pairs())
        first = DataSource(str(path), "train").records()
        assert os.listdir(tmp_path / "cache" / "records")  # noqa: PTH208

        def read_again(*_: object) -> Iterator[object]:
            raise AssertionError("the file was read a second time")

        monkeypatch.setattr(vembed.data.row_loader, "iter_rows", read_again)
        monkeypatch.setattr(vembed.data.row_loader, "line_blocks", read_again)
        second = DataSource(str(path), "train").records()
        assert contents(second.table) == contents(first.table)
        assert second.table.fingerprint == first.table.fingerprint
        assert (second.columns.text, second.num_invalid) == (first.columns.text, 0)


def in_jsonl(folder: Path, rows: Sequence[Row]) -> Path:
    """Write rows as JSONL, and return the file."""
    path = folder / "expected.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(records: Iterable[Record]) -> list[tuple[object, ...]]:
    """Return everything of records but the places where they stand."""
    return [(each.query, each.positives, each.negatives, each.label, each.scores, each.columns) for each in records]
