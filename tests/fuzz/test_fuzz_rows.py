"""Whatever a file of rows holds, it is refused in our own words or read exactly as it was written."""

from __future__ import annotations

import csv
import gzip
import io
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz_bytes import bent, check_message
from fuzz_limits import fuzzed, within_limits
from hypothesis import assume, example, given
from hypothesis import strategies as st

from vembed.data.read import DataSource
from vembed.data.row_files import HUB_ID
from vembed.errors import VembedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRAIN, TEST = {"role": "train"}, {"role": "test"}
ROWS = [
    {"query": "what flies?", "positive": ["a bird", "ein Vogel \u00fc\U0001f600"], "negatives": ["a stone"]},
    {"query": "q2", "positive": "p2", "negatives": []},
    {"_id": "d1", "title": "T", "text": "a text", "query": "q3", "positive": "p3"},
    {"caption": "a ball", "image": "ball.png"},
]
TOKENS = [
    b'"', b"\n", b"\r", b",", b"\t", b"[", b"]", b"{", b"}", b"\\u", b"\\ud800", b"null", b"NaN", b"1e999",
    b"\xef\xbb\xbf",
    b"\xff\xfe", b'"query"', b'"positive": ', b"-", b"9" * 5000, b"[" * 3000, b"\x1b[31m", b"\x1f\x8b", b"PAR1",
]  # fmt: skip

texts = st.text(st.characters() | st.sampled_from("\x00\x07\x1b\x85\u2028\ufeff\ud800\r\n\t \",'\\[]{}"), max_size=20)


def csv_bytes(rows: list[list[str]], dialect: str) -> bytes:
    handle = io.StringIO(newline="")
    csv.writer(handle, dialect).writerows(rows)
    return handle.getvalue().encode(errors="surrogatepass")


def parquet_bytes(columns: dict[str, Any], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **options)
    return bytes(sink.getvalue())


def jsonl_bytes(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


CELLS = [["query", "positive", "negative"], ["what flies?", 'a "bird"', "a stone\nof two lines"], ["q2", "p2", ""]]
PAIRS = {
    "query": ["a", "b"],
    "positive": [["c"], ["d", "e"]],
    "label": [1, None],
    "when": pa.array([1, 2], pa.date32()),
}
FILES = {
    "t.jsonl": [jsonl_bytes(ROWS[:2]), jsonl_bytes(ROWS[2:3]), jsonl_bytes(ROWS)],
    "t.json": [json.dumps(ROWS[:2]).encode(), json.dumps(ROWS, indent=1).encode(), jsonl_bytes(ROWS[:1])],
    "t.csv": [csv_bytes(CELLS, "excel")],
    "t.tsv": [csv_bytes(CELLS, "excel-tab")],
    "t.jsonl.gz": [gzip.compress(jsonl_bytes(ROWS[:2]), mtime=0), gzip.compress(b"\n" * 10**4, mtime=0)],
    "t.parquet": [
        parquet_bytes(PAIRS),
        parquet_bytes(PAIRS, use_dictionary=False, compression="zstd", column_encoding={"query": "DELTA_BYTE_ARRAY"}),
        parquet_bytes({"_id": ["a"], "text": ["b"], "image": pa.array([b"GIF89a"])}, data_page_version="2.0"),
    ],
    "t.txt": [b"first\n\nsecond \xc3\xbc\r\n"],
}
READERS: list[Callable[[str], object]] = [
    lambda path: list(DataSource(path, **TRAIN).records().table),
    lambda path: DataSource(path, **TEST).judged(),
    lambda path: list(DataSource(path, "test").documents()),
]


def read_or_refused(path: str) -> None:
    """Read a file every way; what is refused is refused in our own words, safe to look at."""
    for read_it in READERS:
        with within_limits():
            try:
                read_it(path)
            except VembedError as error:
                check_message(error)


@fuzzed(0.2)
@given(st.data())
@pytest.mark.parametrize("name", FILES)
def test_a_bent_file_is_read_or_refused(name: str, tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / name).write_bytes(data.draw(bent(FILES[name], TOKENS)))
    read_or_refused(str(tmp_path / name))


@fuzzed(0.2)
@given(bent(FILES["t.jsonl"], TOKENS) | st.binary(min_size=1, max_size=40), st.sampled_from([10, 10**4, 2 * 10**6]))
@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.json.gz", "t.csv.gz"])
def test_a_packed_file_of_repeats_is_read_or_refused(name: str, tmp_path: Path, content: bytes, size: int) -> None:
    (tmp_path / name).write_bytes(gzip.compress(content * (size // max(1, len(content))), compresslevel=1))
    read_or_refused(str(tmp_path / name))


def is_usable(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def written(name: str, rows: list[dict[str, Any]]) -> bytes:
    """Return rows as a file of some kind, by the writers that others use."""
    if name.endswith(".gz"):
        return gzip.compress(written(name.removesuffix(".gz"), rows))
    if name.endswith(".jsonl"):
        return jsonl_bytes(rows)
    if name.endswith(".json"):
        return json.dumps(rows, indent=1).encode()
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    if name.endswith(".parquet"):
        return parquet_bytes(columns)
    cells = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    return csv_bytes(cells, "excel-tab" if name.endswith(".tsv") else "excel")


@fuzzed(0.3)
@given(
    st.lists(st.fixed_dictionaries({"query": texts, "positive": texts}), min_size=1, max_size=4),
    st.lists(st.lists(texts, max_size=3), min_size=4, max_size=4),
)
@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.csv", "t.tsv", "t.jsonl.gz", "t.parquet"])
def test_texts_are_read_as_they_were_written(
    name: str, tmp_path: Path, rows: list[dict[str, Any]], negatives: list[list[str]]
) -> None:
    has_lists = not name.endswith((".csv", ".tsv"))
    expected = [
        (row["query"], (row["positive"],), tuple(more) if has_lists else ())
        for row, more in zip(rows, negatives, strict=False)
    ]
    if has_lists:
        rows = [{**row, "negatives": more} for row, more in zip(rows, negatives, strict=False)]
    try:
        (tmp_path / name).write_bytes(written(name, rows))
    except UnicodeEncodeError:  # Parquet holds no half of a pair
        assume(False)
    with within_limits():
        try:
            table = list(DataSource(str(tmp_path / name), **TRAIN).records().table)
        except VembedError:
            clashes = any(each.strip() == right.strip() for _, (right,), wrong in expected for each in wrong)
            texts_of_rows = [text for query, right, wrong in expected for text in (query, *right, *wrong)]
            assert clashes or not all(map(is_usable, texts_of_rows))
            return
    assert [(each.query, each.positives, each.negatives) for each in table] == expected


TEXT_KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary()]
KINDS = st.recursive(
    st.sampled_from([
        *TEXT_KINDS, pa.binary(3), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.null(),
        pa.date32(), pa.date64(), pa.timestamp("us"), pa.timestamp("ns", "Nowhere/x"), pa.duration("ms"),
        pa.time64("ns"), pa.uuid(), pa.decimal128(38, 3), pa.decimal256(76, 2), pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.date32()),
    ]),
    lambda inner: st.one_of(
        st.builds(pa.list_, inner),
        st.builds(lambda kind: pa.list_(kind, 2), inner),
        st.builds(lambda kind: pa.struct([("title", pa.string()), ("text", kind), ("bytes", pa.binary())]), inner),
        st.builds(lambda kind: pa.map_(pa.string(), kind), inner),
    ),
    max_leaves=3,
)  # fmt: skip


def array_of(kind: pa.DataType, data: bytes, count: int) -> pa.Array:
    """Return an array whose flat values are any bytes: what a writer that checks nothing leaves."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(kind.storage_type, data, count))
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), array_of(kind.value_type, data, count))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(array_of(kind.value_type, data, 2 * count), 2)
    if pa.types.is_map(kind):
        keys = pa.array(["k"] * count)
        return pa.MapArray.from_arrays(list(range(count + 1)), keys, array_of(kind.item_type, data, count))
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([array_of(each.type, data, count) for each in kind], fields=list(kind))
    if pa.types.is_dictionary(kind):
        values = array_of(kind.value_type, data, 1)
        return pa.DictionaryArray.from_arrays(pa.array([0] * count, kind.index_type), values)
    if pa.types.is_null(kind):
        return pa.nulls(count)
    if kind in TEXT_KINDS:
        forms = {pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
        return pa.array([data[at : at + 5] for at in range(count)], forms.get(kind, pa.binary())).view(kind)
    values = data * (count * kind.bit_width // 8 + 1)
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])


@fuzzed(2)
@given(
    st.dictionaries(
        st.sampled_from(["query", "positive", "negatives", "label", "query_image", "_id", "text", "title", "image"]),
        st.tuples(KINDS, st.binary(min_size=1, max_size=16)),
        max_size=3,
    ),
    st.integers(1, 3),
)
def test_parquet_of_any_type_is_read_or_refused(
    tmp_path: Path, columns: dict[str, tuple[pa.DataType, bytes]], count: int
) -> None:
    usual = {"query": pa.array(["a", "b", "c"][:count]), "positive": pa.array(["d", "e", "f"][:count])}
    if "query_image" in columns:
        del usual["query"]
    table = usual | {name: array_of(kind, data, count) for name, (kind, data) in columns.items()}
    try:
        (tmp_path / "t.parquet").write_bytes(parquet_bytes(table))
    except (pa.ArrowException, OSError):  # what the writer has no form for
        assume(False)
    read_or_refused(str(tmp_path / "t.parquet"))


ids = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=6)
grades = st.dictionaries(ids, st.integers(-2, 1_000_000), min_size=1, max_size=3)


@fuzzed(1)
@given(st.dictionaries(ids, grades, min_size=1, max_size=3), st.sampled_from(["\n", "\r\n", "\r"]), st.booleans())
def test_judgements_are_read_as_they_were_written(
    tmp_path: Path, qrels: dict[str, dict[str, int]], end: str, has_header: bool
) -> None:
    names = {name for of_query in qrels.values() for name in of_query}
    assume(not {*qrels, *names} & {"query-id", "query_id", "qid", "query"})
    folder = tmp_path / "set"
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_bytes(jsonl_bytes([{"_id": name, "text": f"of {name}"} for name in names]))
    (folder / "queries.jsonl").write_bytes(jsonl_bytes([{"_id": name, "text": f"for {name}"} for name in qrels]))
    rows = [("query-id", "corpus-id", "score")] * has_header
    rows += [(query, name, str(grade)) for query, of_query in qrels.items() for name, grade in of_query.items()]
    (folder / "qrels/test.tsv").write_bytes(end.join(map("\t".join, rows)).encode())
    with within_limits():
        task = DataSource(str(folder), **TEST).judged()
    assert task.qrels == {query: {name: max(0, grade) for name, grade in of.items()} for query, of in qrels.items()}
    assert task.documents == {name: f"of {name}" for name in names}


BEIR = {
    "corpus.jsonl": [jsonl_bytes([{"_id": "d1", "title": "T", "text": "t"}, {"_id": "d2", "text": "u"}])],
    "queries.jsonl": [jsonl_bytes([{"_id": "q1", "text": "a"}, {"_id": "q2", "text": "b"}])],
    "qrels/test.tsv": [b"query-id\tcorpus-id\tscore\nq1\td1\t2\nq2\td2\t1\n", b"q1 0 d1 1\nq2 0 d2 0\n"],
}


@fuzzed(0.4)
@given(st.data())
@pytest.mark.parametrize("name", BEIR)
def test_a_bent_beir_folder_is_read_or_refused(name: str, tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "qrels").mkdir(exist_ok=True)
    for file, (content, *_) in BEIR.items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / name).write_bytes(data.draw(bent(BEIR[name], [*TOKENS, b"\t", b"-1", b"1" * 30])))
    read_or_refused(str(tmp_path))


@fuzzed(0.4)
@given(st.text(st.characters() | st.sampled_from("*?[]~./\0\x1b"), max_size=30), st.sampled_from([1, 40]))
@example("x", 300)
def test_a_text_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, times: int) -> None:
    path = text * times
    assume(not HUB_ID.fullmatch(path) and not path.startswith(("/", "..", "~")) and "/.." not in path)
    monkeypatch.chdir(tmp_path)
    read_or_refused(path)
