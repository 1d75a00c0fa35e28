"""Each kind of file, folder and path, with what is accepted and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vembed.data.keys import DataKeys
from vembed.data.read import read
from vembed.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import WriteJsonl

    from vembed.data.keys import Role

TRAIN = {"role": "train"}
GOOD = {"query": "a query", "positive": "an answer"}


def queries(path: Path | str, options: dict[str, Any] = TRAIN) -> list[str]:
    return [record.query for record in read(str(path), **options).records().table]


def locations(path: Path | str) -> list[str]:
    return [record.location for record in read(str(path), **TRAIN).records().table]


def refusal(path: Path | str, options: dict[str, Any] = TRAIN) -> str:
    with pytest.raises(DataError) as caught:
        read(str(path), **options).records()
    return str(caught.value)


def line_of(query: str) -> bytes:
    return json.dumps({"query": query, "positive": "p"}).encode()


def test_bom_crlf_and_blank_lines_are_accepted_and_lines_stay_true(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line_of("a") + b"\r\n\r\n  \r\n" + line_of("b") + b"\r\n\n" + line_of("c"))
    assert queries(path) == ["a", "b", "c"]
    assert locations(path) == ["train.jsonl:1", "train.jsonl:4", "train.jsonl:6"]


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"query": "a\u2028b\x85c", "positive": "p"}\n{"query": "d", "positive": "p"}\n', encoding="utf-8")
    assert queries(path) == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        (tmp_path / name).write_bytes(content)
        assert "holds no rows" in refusal(tmp_path / name)


def test_a_truncated_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(line_of("a") + b"\n" + line_of("b")[:-5])
    assert "train.jsonl:2: bad JSON" in refusal(path)
    path.write_bytes(line_of("a") + b"\n" + line_of("b"))
    assert queries(path) == ["a", "b"]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(line_of("a") + b'\n{"query": "caf\xe9"}\n')
    assert "train.jsonl:2: invalid UTF-8 at byte 15" in refusal(path)
    path.write_bytes(bytes(range(256)) * 50)
    assert "train.jsonl:1: " in refusal(path)
    path.write_bytes("".encode("utf-16") + line_of("a").decode().encode("utf-16-le"))
    assert "UTF-16; save it as UTF-8" in refusal(path)


def test_a_line_without_end_is_refused_before_memory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.data.lines.MAX_LINE_BYTES", 2**20)
    path = tmp_path / "train.jsonl"
    path.write_bytes(line_of("a") + b"\n" + b"\0" * (2**20 + 5))
    assert "train.jsonl:2: a line of over 1 MiB" in refusal(path)
    path.write_bytes(line_of("a") + b"\n" + line_of("x" * (2**20 - 100)) + b"\n")
    assert len(queries(path)) == 2


def test_gzip_is_read_as_the_file_inside(tmp_path: Path) -> None:
    data = line_of("a") + b"\n" + line_of("b") + b"\n"
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(data))
    assert queries(path) == ["a", "b"]
    path.write_bytes(gzip.compress(data * 1000)[:-20])
    assert "train.jsonl.gz:" in refusal(path)
    assert "truncated or broken" in refusal(path)
    path.write_bytes(data)
    assert "truncated or broken" in refusal(path)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"query,positive\nq,p\n"))
    assert queries(tmp_path / "t.csv.gz") == ["q"]


def test_json_is_a_list_of_objects_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([{"query": q, "positive": "p"} for q in "ab"], indent=2))
    assert queries(path) == ["a", "b"]
    assert locations(path) == ["train.json:2", "train.json:6"]
    path.write_bytes(line_of("a") + b"\n" + line_of("b"))
    assert queries(path) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds no rows"),
        ('[\n{"query": "q", "positive": "p"},\n{"query": }\n]', "train.json:3: bad JSON"),
        ('[\n{"query": "q", "positive": "p"}\n{"query": "q"}]', "train.json:3: bad JSON: expected ','"),
        ('[{"query": "q", "positive": "p"}', "bad JSON"),
        ('[{"query": "q", "positive": "p"},\n]', "train.json:2: bad JSON"),
        ('[{"query": "q", "positive": "p"}]\n x', "text after the end"),
        ('[{"query": "q", "positive": "p"},\n 5]', "train.json:2: expected a JSON object, got int"),
    ],
)
def test_a_broken_json_list_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    assert words in refusal(path)


def write_csv(path: Path, rows: list[list[str]], dialect: str = "excel") -> None:
    with path.open("w", newline="") as handle:
        csv.writer(handle, dialect).writerows(rows)


@pytest.mark.parametrize(("name", "dialect"), [("t.csv", "excel"), ("t.tsv", "excel-tab")])
def test_csv_and_tsv_hold_what_the_csv_module_wrote(tmp_path: Path, name: str, dialect: str) -> None:
    path = tmp_path / name
    hard = 'a "quoted", tab\tand\nnew line'
    write_csv(path, [["query", "positive", "negatives", "label"], [hard, hard + "!", hard + "?", "x"]], dialect)
    (record,) = read(str(path), **TRAIN).records().table
    assert (record.query, record.positives, record.negatives) == (hard, (hard + "!",), (hard + "?",))
    assert record.label == "x"


def test_csv_rows_are_located_by_the_line_that_they_begin_on(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbfquery,positive\r\n"two\r\nlines",p\r\n\r\nb,p\r\n')
    assert locations(path) == ["t.csv:2", "t.csv:5"]


@pytest.mark.parametrize(
    ("cell", "negatives"),
    [
        ("", ()),
        ("  ", ()),
        ("[]", ()),
        ('["a", "b"]', ("a", "b")),
        ('[{"title": "T", "text": "a"}]', ("T a",)),
        ("a text", ("a text",)),
        ("[1]", ("[1]",)),
        ("[citation needed]", ("[citation needed]",)),
    ],
)
def test_a_csv_cell_of_negatives_may_be_a_json_list(tmp_path: Path, cell: str, negatives: tuple[str, ...]) -> None:
    path = tmp_path / "t.csv"
    write_csv(path, [["query", "positive", "negatives"], ["q", '["p"]', cell]])
    (record,) = read(str(path), **TRAIN).records().table
    assert record.negatives == negatives
    assert record.positives == ('["p"]',)


@pytest.mark.parametrize(("cell", "label"), [("", None), ("7", "7"), ("spam", "spam"), ("1.0", "1.0"), ("007", "007")])
def test_csv_labels_are_texts(tmp_path: Path, cell: str, label: str | None) -> None:
    path = tmp_path / "t.csv"
    write_csv(path, [["query", "positive", "label"], ["q", "p", cell]])
    (record,) = read(str(path), "train", DataKeys(label_kind="class")).records().table
    assert record.label == label


@pytest.mark.parametrize(
    ("column", "cell", "shown"),
    [
        *[("label", "0.75", "0.75"), ("label", "1e-3", "0.001"), ("score", "1.0", "1"), ("score", ".5", "0.5")],
        *[("label", "7", "7"), ("label", "007", "7"), ("label", " 0 ", "0"), ("score", "3", "3")],
    ],
)
def test_csv_numbers_beside_two_texts_are_refused(tmp_path: Path, column: str, cell: str, shown: str) -> None:
    path = tmp_path / "t.csv"
    write_csv(path, [["query", "positive", column], ["q", "p", cell]])
    assert f"t.csv:2: {column} holds {shown} beside two texts" in refusal(path)
    assert queries(path, {"role": "train", "keys": DataKeys(column_mapping={column: None})}) == ["q"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("query,positive\nq,p,extra\n", "t.csv:2: 3 cells for 2 columns"),
        ("query,positive\nq\n", "t.csv:2: 1 cells for 2 columns"),
        ("query,positive\nq,p\nq,\n", "t.csv:3: positive: empty text"),
        ('query,positive\nq,p\n"never closed,p\nq,p\n', "t.csv:3: bad quoting"),
        ('query,positive\n"q" x,p\n', "t.csv:2: bad quoting"),
        ("query,query\nq,p\n", "t.csv:1: the header names 'query' twice"),
        ("query,positive\n", "holds no rows"),
        ("what is red,a red thing\nwhat is blue,a blue thing\n", "the first line of a CSV or TSV file names"),
    ],
)
def test_a_broken_csv_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    assert words in refusal(path)


def test_csv_bytes_that_are_not_utf8_matter_where_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"query,positive,note\nq,p,x\ncaf\xe9,p,x\n")
    assert "t.csv:3: query: not valid UTF-8 text (character 4)" in refusal(path)
    path.write_bytes(b"query,positive,note\nq,p,caf\xe9\n")
    assert queries(path) == ["q"]


def test_csv_cells_over_the_modules_limit_are_read_and_the_limit_is_put_back(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    write_csv(tmp_path / "t.csv", [["query", "positive"], ["q", "x" * (before + 1)]])
    (record,) = read(str(tmp_path / "t.csv"), **TRAIN).records().table
    assert len(record.positives[0]) == before + 1
    assert csv.field_size_limit() == before


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_parquet_rows_become_records(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    passage = {"title": "T", "text": "x"}
    write_parquet(
        path,
        [
            {"query": "a", "positive_passages": [passage], "negatives": ["n"], "label": 3, "vector": [0.1]},
            {"query": "b", "positive_passages": [passage], "negatives": None, "label": None, "vector": [0.2]},
        ],
    )
    loaded = read(str(path), "train", DataKeys(label_kind="class")).records()
    first, second = loaded.table
    assert (first.query, first.positives, first.negatives, first.label) == ("a", ("T x",), ("n",), 3)
    assert (second.negatives, second.label, second.location) == ((), None, "t.parquet:2")
    assert loaded.notes == ("Ignored columns: vector.",)


def test_a_broken_parquet_file_or_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_parquet(path, [{"query": "a", "positive": "p"}, {"query": "", "positive": "p"}])
    assert "t.parquet:2: query: empty text" in refusal(path)
    data = path.read_bytes()
    for broken in (b"", b"PAR1", data[:-30], data[:4] + b"\xff" * (len(data) - 12) + data[-8:]):
        path.write_bytes(broken)
        assert "t.parquet:1: can't be read as Parquet" in refusal(path)
    write_parquet(path, [{"qury": "a", "positive": "p"}])
    assert "has a column 'query'" in refusal(path)
    write_parquet(path, [{"query": "a", "image": b"x"}])
    assert "t.parquet:1: image: the picture's bytes: no picture of a known format" in refusal(path)


def test_a_folder_or_glob_is_read_in_order_of_names(tmp_path: Path) -> None:
    for name in "cab":
        write_parquet(tmp_path / f"{name}.parquet", [{"query": name, "positive": "p"}])
    (tmp_path / "notes.txt").write_text("not data")
    assert queries(tmp_path) == queries(f"{tmp_path}/*.parquet") == ["a", "b", "c"]
    assert queries(f"{tmp_path}/[ab].parquet") == ["a", "b"]
    assert locations(tmp_path) == ["a.parquet:1", "b.parquet:1", "c.parquet:1"]
    assert "no file matches" in refusal(f"{tmp_path}/*.csv")


def test_a_folder_of_several_kinds_is_refused(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    write_jsonl([GOOD], "a.jsonl")
    write_csv(tmp_path / "b.csv", [["query", "positive"], ["q", "p"]])
    assert "mixes .csv and .jsonl files" in refusal(tmp_path)
    assert queries(f"{tmp_path}/*.csv") == ["q"]


@pytest.mark.parametrize(
    ("role", "split", "expected"),
    [
        ("train", None, ["train 0", "train 1"]),
        ("validation", None, ["val"]),
        ("test", None, ["test"]),
        ("train", "test", ["test"]),
        ("test", "extra", ["extra"]),
    ],
)
def test_a_folder_of_named_splits_is_never_read_across_them(
    write_jsonl: WriteJsonl, tmp_path: Path, role: Role, split: str | None, expected: list[str]
) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "val", "test", "extra"):
        write_jsonl([{"query": f"{name[:5]} {name[10]}" if "-" in name else name, "positive": "p"}], f"{name}.jsonl")
    assert queries(tmp_path, {"role": role, "split": split}) == expected


def test_a_folder_without_the_split_lists_what_it_has(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    write_jsonl([GOOD], "train.jsonl")
    message = refusal(tmp_path, {"role": "validation"})
    assert "no file of split 'dev' or 'val' or 'validation'" in message
    assert "it has: train.jsonl" in message
    assert "val_data_split" in message


def test_a_file_has_no_splits(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([GOOD])
    assert "remove test_data_split: dev" in refusal(path, {"role": "test", "split": "dev"})
    assert queries(path, {"role": "test"}) == ["a query"]


def test_a_missing_path_names_the_nearest(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    write_jsonl([GOOD], "train.jsonl")
    message = refusal(tmp_path / "trian.jsonl", {"role": "validation"})
    assert message.startswith("val_data_path: ")
    assert "did you mean 'train.jsonl'?" in message
    assert "nor does its folder" in refusal(tmp_path / "no/such/train.jsonl")
    (tmp_path / "empty").mkdir()
    assert "holds no data files" in refusal(tmp_path / "empty")
    (tmp_path / "a.txt").write_text("x")
    assert "unknown kind of file" in refusal(tmp_path / "a.txt")


def test_a_relative_path_with_a_local_folder_is_not_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data/train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'train'?" in refusal("data/trian")


def test_an_address_is_refused_without_its_password() -> None:
    message = refusal("https://user:canary@example.org/train.jsonl")
    assert "download it" in message
    assert "canary" not in message


def test_importing_the_room_loads_no_heavy_package() -> None:
    code = (
        "import sys, vembed.data.read, vembed.data.sampler, vembed.data.hold_out, vembed.data.collate;"
        "print([name for name in ('torch', 'datasets', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
