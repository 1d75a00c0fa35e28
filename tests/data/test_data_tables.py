"""Delimiters and quotes of tables: told from the file, strictly, and never with a row lost."""

from __future__ import annotations

import csv
import gzip
from typing import TYPE_CHECKING

import pytest

from vembed.data import lines as lines_module
from vembed.data.keys import DataKeys
from vembed.data.read import describe, read
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from vembed.data.table import LoadedRecords

ROWS = [["query", "positive"], ["what, is; red", "a red | thing"], ['say "hi"', "hi"], ["two\nlines", "and, more"]]


def loaded(path: Path, **keys: bool) -> LoadedRecords:
    return read(str(path), "train", DataKeys.model_validate(keys)).records()


def pairs(path: Path) -> list[tuple[object, ...]]:
    return [(record.query, *record.positives) for record in loaded(path).table]


def refusal(path: Path, **keys: bool) -> str:
    with pytest.raises(DataError) as caught:
        loaded(path, **keys)
    return str(caught.value)


def columns(path: Path) -> str:
    return describe("p", loaded(path))["columns"]


@pytest.mark.parametrize("text", ["query,positive\rq,p\r", "query,positive\nq,p\rr,s\n"])
def test_lines_that_end_as_on_old_machines_are_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text, newline="")
    assert "a line ends with \\r alone; save the file so that lines end with \\n" in refusal(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("name", "delimiter", "word"),
    [
        *[("t.csv", ",", ""), ("t.csv", ";", "semicolons"), ("t.csv", "\t", "tabs"), ("t.csv", "|", "pipes")],
        *[("t.tsv", "\t", ""), ("t.tsv", ",", "commas"), ("t.tsv", ";", "semicolons")],
        *[("t.txt", ",", "commas"), ("t.txt", "\t", "tabs"), ("t.TXT", ";", "semicolons"), ("t.txt", "|", "pipes")],
    ],
)
def test_every_delimiter_is_found_and_told_where_the_suffix_says_another(
    tmp_path: Path, name: str, delimiter: str, word: str
) -> None:
    with (tmp_path / name).open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(ROWS)
    assert pairs(tmp_path / name) == [tuple(row) for row in ROWS[1:]]
    assert columns(tmp_path / name) == "query, positive" + f"; cells split at {word}" * bool(word)
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert columns(packed) == columns(tmp_path / name)


def test_the_suffix_wins_where_it_splits_evenly(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("query,positive;x\na;b,c\nd,e;f\n".replace("positive;x", "positive"))
    assert pairs(path) == [("a;b", "c"), ("d", "e;f")]
    path.write_text("query,positive\na;1,c\nd;2,e\n")
    assert pairs(path) == [("a;1", "c"), ("d;2", "e")]


def test_a_delimiter_that_splits_one_line_otherwise_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("query;positive\n" + "a;b\n" * 50 + "a;b;c\n")
    assert "no row of" in refusal(path)
    assert "'query;positive'" in refusal(path) or "query;positive" in refusal(path)


def test_a_row_that_goes_on_behind_the_sample_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.data.formats.SAMPLE_LINES", 3)
    path = tmp_path / "t.csv"
    path.write_text('query;positive\na;b\n"c\nd\ne";f\n')
    assert pairs(path) == [("a", "b"), ("c\nd\ne", "f")]


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_one_bad_quote_is_told_by_its_line_and_hides_no_delimiter(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "rows.csv"
    lines = [("query", "positive"), *((f"q{number}", f"p{number}") for number in range(20))]
    lines[7] = ("q7", '"p" 7')
    path.write_text("".join(delimiter.join(cells) + "\n" for cells in lines))
    assert "rows.csv:8: bad quoting or cells" in refusal(path)
    assert "1 invalid row" in refusal(path)


def test_two_delimiters_that_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("query;positive|x\na;b|c\n")
    assert "t.csv: semicolons and pipes both split its lines evenly" in refusal(path)


def test_a_text_that_is_no_table_is_of_an_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Some prose, with commas.\nAnd a line.\n")
    assert "unknown kind of file" in refusal(tmp_path / "t.txt")
    (tmp_path / "rows.csv").write_text("query,positive\nq,p\n")
    assert pairs(tmp_path) == [("q", "p")], "a .txt in a folder is not looked at"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotes_of_tsv_swallow_no_rows(tmp_path: Path, end: str) -> None:
    rows = [[f"query {number}", f"answer {number}"] for number in range(60)]
    rows[7][0] = '"To be'
    rows[10][0] = 'not to be"'
    rows[20] = ['"quoted"', '"Hello" he said']
    rows[59][1] = '"never closed'
    path = tmp_path / "t.tsv"
    path.write_text(end.join(["query\tpositive", *map("\t".join, rows), ""]), newline="")
    assert pairs(path) == [tuple(row) for row in rows]
    assert columns(path) == "query, positive; quotes read as characters"
    assert [record.location for record in loaded(path).table][58:] == ["t.tsv:60", "t.tsv:61"]


def test_quotes_of_tsv_are_quotes_where_every_row_is_whole_with_them(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text('query\tpositive\n"a"\t"say ""hi"""\nb\t"c"\n')
    assert pairs(path) == [("a", 'say "hi"'), ("b", "c")]
    assert columns(path) == "query, positive"


def test_a_swallowing_quote_is_refused_by_line_where_lines_are_uneven(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text('query\tpositive\na\tb\n"c\td\ne"\tf\none cell\ng\th\n')
    message = refusal(path)
    assert "t.tsv:3: bad quoting: a quote opens here and closes 1 line below; each line is a row by itself" in message
    assert "t.tsv:5: 1 cells for 2 columns" in message
    kept = loaded(path, skip_invalid_records=True)
    assert [record.location for record in kept.table] == ["t.tsv:2", "t.tsv:6"]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_a_quote_that_is_never_closed_refuses_the_source_whatever_may_be_dropped(tmp_path: Path, name: str) -> None:
    cell = "," if name == "t.csv" else "\t"
    path = tmp_path / name
    path.write_text(f'query{cell}positive\na{cell}b\n"c{cell}d\n' + f"e{cell}f\n" * 9 + "x\n" * (name == "t.tsv"))
    message = refusal(path, skip_invalid_records=True)
    assert message.startswith(f"{name}:3: bad quoting: the quote that opens here is never closed")


def test_a_quote_that_closes_too_far_away_is_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 2000)
    path = tmp_path / "t.tsv"
    path.write_text('query\tpositive\n"a\tb\n' + "c\td\n" * 2000)
    assert len(pairs(path)) == 2001
