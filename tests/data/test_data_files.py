"""What one kind of file or path alone promises; what all of them do stands in test_data_formats.py."""

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kit.rows import Jsonl, load, only, queries, refusal
from PIL import Image as Picture

from vembed.batch import Composed
from vembed.data import lines as lines_module
from vembed.data.describe import describe_source
from vembed.data.formats import iter_rows
from vembed.data.keys import Role

GOOD = {"query": "a query", "positive": "an answer"}


def locations(path: Path | str) -> list[str]:
    return [record.location for record in load(path).table]


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


def test_a_line_without_end_is_refused_before_memory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.data.lines.MAX_LINE_BYTES", 2**20)
    path = tmp_path / "train.jsonl"
    path.write_bytes(line_of("a") + b"\n" + b"\0" * (2**20 + 5))
    assert "train.jsonl:2: a line of over 1 MiB" in refusal(path)
    path.write_bytes(line_of("a") + b"\n" + line_of("x" * (2**20 - 100)) + b"\n")
    assert len(queries(path)) == 2


def test_json_is_a_list_of_objects_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps([{"query": q, "positive": "p"} for q in "ab"], indent=2))
    assert queries(path) == ["a", "b"]
    assert locations(path) == ["train.json:2", "train.json:6"]
    path.write_bytes(line_of("a") + b"\n" + line_of("b"))
    assert queries(path) == ["a", "b"]


GOOD_LINE = '{"query": "q", "positive": "p"}'
GOOD_LIST = '[{"query": "q", "positive": "p"}'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.jsonl", GOOD_LINE + '\n{"query": "caf\udce9"}\n', "t.jsonl:2: invalid UTF-8 at byte 15"),
        ("t.jsonl", "\udcff\udcfe" + "".join(f"{letter}\0" for letter in GOOD_LINE), "UTF-16; save it as UTF-8"),
        ("t.jsonl", "\n\n", "holds no rows"),
        ("t.json", "[]", "holds no rows"),
        ("t.json", GOOD_LIST + ',\n{"query": }\n]', "t.json:2: bad JSON"),
        ("t.json", GOOD_LIST + '\n{"query": "q"}]', "t.json:2: bad JSON: expected ','"),
        ("t.json", GOOD_LIST, "bad JSON"),
        ("t.json", GOOD_LIST + ",\n]", "t.json:2: bad JSON"),
        ("t.json", GOOD_LIST + "]\n x", "text after the end"),
        ("t.csv", "query,positive\nq,p,extra\n", "t.csv:2: 3 cells for 2 columns"),
        ("t.csv", 'query,positive\nq,p\n"never closed,p\nq,p\n', "t.csv:3: bad quoting"),
        ("t.csv", 'query,positive\n"q" x,p\n', "t.csv:2: bad quoting"),
        ("t.csv", "query,query\nq,p\n", "t.csv:1: the header names 'query' twice"),
        ("t.csv", "what is red,a red thing\nwhat is blue,a blue thing\n", "the first line of a CSV or TSV file names"),
        ("t.csv", "query;positive\n" + "a;b\n" * 50 + "a;b;c\n", "query;positive"),
        ("t.csv", "query;positive|x\na;b|c\n", "t.csv: semicolons and pipes both split its lines evenly"),
        ("t.csv", "query,positive\rq,p\r", "lines end with \\n"),
        ("t.csv", "query,positive\nq,p\rr,s\n", "lines end with \\n"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    assert words in refusal(tmp_path / name)


def write_csv(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as handle:
        csv.writer(handle).writerows(rows)


LISTS = [
    *[('["a", "b"]', ("a", "b")), (' ["a"] ', ("a",)), ('[{"title": "T", "text": "a"}]', ("T a",))],
    *[(cell, (cell,)) for cell in ("a text", "[1]", "[[1, 2]]", "[citation needed]", "['a', 'b']", '["a", "b"', '"a"')],
]


@pytest.mark.parametrize(("cell", "negatives"), [*LISTS, ("", ()), ("  ", ()), ("[]", ())])
def test_a_csv_cell_of_negatives_may_be_a_json_list(tmp_path: Path, cell: str, negatives: tuple[str, ...]) -> None:
    path = tmp_path / "t.csv"
    write_csv(path, [["query", "positive", "negatives"], ["q", "p", cell]])
    assert only(path).negatives == negatives


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.txt", "t.csv.gz"])
@pytest.mark.parametrize(("cell", "positives"), LISTS)
def test_a_cell_of_positives_may_be_a_json_list_in_any_table_of_texts(
    tmp_path: Path, name: str, cell: str, positives: tuple[str, ...]
) -> None:
    written = io.StringIO()
    delimiter = "," if "csv" in name else "\t"
    csv.writer(written, delimiter=delimiter).writerows([["query", "positive"], ["q", cell]])
    data = written.getvalue().encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert only(tmp_path / name).positives == positives
    told = "JSON lists in positive read as lists" in load(tmp_path / name).columns.text
    assert told == (positives != (cell,))


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("[]", "t.csv:2: positive: no positives"),
        ('["a", 1]', "t.csv:2: positive: expected text, got the number 1 (item 2 of 2)"),
        ('["a", " "]', "t.csv:2: positive: blank text (item 2 of 2)"),
    ],
)
def test_a_list_of_positives_in_a_cell_is_checked_as_any_other(tmp_path: Path, cell: str, words: str) -> None:
    write_csv(tmp_path / "t.csv", [["query", "positive"], ["q", cell]])
    assert words in refusal(tmp_path / "t.csv")


def test_a_csv_cell_of_pictures_may_be_a_json_list_and_hold_items_of_several(tmp_path: Path) -> None:
    for name in "abcd":
        Picture.new("RGB", (4, 4), f"#{ord(name):02x}0000").save(tmp_path / f"{name}.png")
    rows = [["query_image", "positive_image", "negative_images"]]
    rows += [["a.png", '["b.png", "c.png"]', '["d.png"]'], ['["a.png", "b.png"]', '[["c.png", "d.png"]]', ""]]
    write_csv(tmp_path / "t.csv", rows)
    one, other = load(tmp_path / "t.csv").table
    assert [len(row.positives) for row in (one, other)] == [2, 1]
    assert len(one.negatives) == 1
    assert isinstance(other.query, Composed)
    assert isinstance(other.positives[0], Composed)
    assert len(other.query.images) == len(other.positives[0].images) == 2


@pytest.mark.parametrize(
    ("column", "cell", "shown"), [("label", "1e-3", "0.001"), ("score", ".5", "0.5"), ("label", "007", "7")]
)
def test_csv_numbers_beside_two_texts_are_refused(tmp_path: Path, column: str, cell: str, shown: str) -> None:
    path = tmp_path / "t.csv"
    write_csv(path, [["query", "positive", column], ["q", "p", cell]])
    assert f"t.csv:2: {column} holds {shown} beside two texts" in refusal(path)
    assert queries(path, column_mapping={column: None}) == ["q"]


def test_csv_bytes_that_are_not_utf8_matter_where_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"query,positive,note\nq,p,x\ncaf\xe9,p,x\n")
    assert "t.csv:3: query: not valid UTF-8 text (character 4)" in refusal(path)
    path.write_bytes(b"query,positive,note\nq,p,caf\xe9\n")
    assert queries(path) == ["q"]


def test_csv_cells_over_the_modules_limit_are_read_whatever_other_table_ends_meanwhile(tmp_path: Path) -> None:
    long_cell = "x" * (2**17 + 1)
    write_csv(tmp_path / "t.csv", [["query", "positive"], ["q", "p"], ["r", long_cell]])
    assert [record.positives[0] for record in load(tmp_path / "t.csv").table] == ["p", long_cell]
    first, second = iter_rows(tmp_path / "t.csv"), iter_rows(tmp_path / "t.csv")
    assert next(first) == next(second) == (2, {"query": "q", "positive": "p"})
    first.close()  # type: ignore[attr-defined]
    assert next(second) == (3, {"query": "r", "positive": long_cell})


def test_a_folder_or_glob_is_read_in_order_of_names(tmp_path: Path) -> None:
    for name in "cab":
        pq.write_table(pa.table({"query": [name], "positive": ["p"]}), tmp_path / f"{name}.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    assert queries(tmp_path) == queries(f"{tmp_path}/*.parquet") == ["a", "b", "c"]
    assert queries(f"{tmp_path}/[ab].parquet") == ["a", "b"]
    assert locations(tmp_path) == ["a.parquet:1", "b.parquet:1", "c.parquet:1"]
    assert "no file matches" in refusal(f"{tmp_path}/*.csv")


def test_a_folder_of_several_kinds_is_refused(tmp_path: Path, jsonl: Jsonl) -> None:
    jsonl([GOOD], "a.jsonl")
    write_csv(tmp_path / "b.csv", [["query", "positive"], ["q", "p"]])
    assert "mixes .csv and .jsonl files" in refusal(tmp_path)
    assert queries(f"{tmp_path}/*.csv") == ["q"]


@pytest.mark.parametrize(
    ("role", "split", "expected"),
    [
        *[("train", None, ["train 0", "train 1"]), ("validation", None, ["val"]), ("test", None, ["test"])],
        *[("train", "test", ["test"]), ("test", "extra", ["extra"])],
    ],
)
def test_a_folder_of_named_splits_is_never_read_across_them(
    jsonl: Jsonl, tmp_path: Path, role: Role, split: str | None, expected: list[str]
) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "val", "test", "extra"):
        jsonl([{"query": f"{name[:5]} {name[10]}" if "-" in name else name, "positive": "p"}], f"{name}.jsonl")
    assert queries(tmp_path, role=role, split=split) == expected


@pytest.mark.parametrize(
    "names", [("Train", "Test"), ("quora-train", "quora_test"), ("x.train-0-of-1", "x.test-0-of-1")]
)
def test_names_that_hold_several_splits_tell_them_apart(jsonl: Jsonl, tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        jsonl([{"query": name, "positive": "p"}], f"{name}.jsonl")
    loaded = load(tmp_path)
    assert [record.query for record in loaded.table] == [names[0]]
    assert loaded.notes == (f"Read split 'train' of {tmp_path}: 1 file, 1 of other splits not read.",)
    assert queries(tmp_path, role="test") == queries(tmp_path, split="test") == [names[1]]
    assert "no file of split 'dev', 'val' or 'validation'" in refusal(tmp_path, "validation")


def test_a_name_that_holds_the_only_split_tells_nothing_apart(jsonl: Jsonl, tmp_path: Path) -> None:
    for name in ("unit-test-questions", "api"):
        jsonl([{"query": name, "positive": "p"}], f"{name}.jsonl")
    assert queries(tmp_path) == ["api", "unit-test-questions"]
    assert queries(tmp_path, split="api") == ["api"]


def test_two_stars_are_folders_at_any_depth(jsonl: Jsonl, tmp_path: Path) -> None:
    inside = [".", "a", "a/b", "a/b/c", ".hidden"]
    for folder in inside:
        jsonl([{"query": folder, "positive": "p"}], f"{folder}/x.jsonl")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    assert sorted(queries(f"{tmp_path}/**/x.jsonl")) == sorted(queries(f"{tmp_path}/**/**/x.jsonl")) == inside[:4]
    assert sorted(queries(f"{tmp_path}/a/**")) == sorted(queries(f"{tmp_path}/a/**/*.jsonl")) == inside[1:4]
    assert queries(f"{tmp_path}/**/b/x.jsonl") == ["a/b"]


def test_a_folder_without_the_split_lists_what_it_has(jsonl: Jsonl, tmp_path: Path) -> None:
    jsonl([GOOD], "train.jsonl")
    message = refusal(tmp_path, "validation")
    assert "no file of split 'dev', 'val' or 'validation'" in message
    assert "it has: train.jsonl" in message
    assert "val_data_split" in message


def test_a_missing_path_names_the_nearest(jsonl: Jsonl, tmp_path: Path) -> None:
    jsonl([GOOD], "train.jsonl")
    message = refusal(tmp_path / "trian.jsonl", "validation")
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


# Tables: delimiters and quotes are told from the file, strictly, and never with a row lost


ROWS = [["query", "positive"], ["what, is; red", "a red | thing"], ['say "hi"', "hi"], ["two\nlines", "and, more"]]


def pairs(path: Path) -> list[tuple[object, ...]]:
    return [(record.query, *record.positives) for record in load(path).table]


def columns(path: Path) -> str:
    return describe_source("p", load(path))["columns"]


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


def test_a_row_that_goes_on_behind_the_sample_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vembed.data.text_tables.SAMPLE_LINES", 3)
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
    assert [record.location for record in load(path).table][58:] == ["t.tsv:60", "t.tsv:61"]


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
    kept = load(path, skip_invalid_records=True)
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


def test_a_missing_column_of_one_of_several_columnar_files_is_told_with_all_columns_that_the_file_has(
    tmp_path: Path,
) -> None:
    for number, column in enumerate(("positive", "answr")):
        pq.write_table(pa.table({"query": ["q"], column: ["p"]}), tmp_path / f"part-{number}.parquet")
    assert "part-1.parquet:1: positive: missing" in (message := refusal(tmp_path))
    assert "the row has query, answr" in message
