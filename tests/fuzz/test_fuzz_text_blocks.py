"""Rows that are read block by block come out as those that are read one by one, or are refused in the same words."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fuzz_limits import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st

from vembed.data import lines
from vembed.data.check import RowChecker
from vembed.data.columns import WEIGHT_COLUMN
from vembed.data.keys import DataKeys
from vembed.data.read import DataSource
from vembed.errors import VembedError
from vembed.losses.registry import ANY_SCORE

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = (
    "", " ", "\x85", "\xa0a", "\0", "\ud800", "a\n", "\x7f", chr(34), "\\", "ü", "\U0001f600",
    "\u2028", "same", " same ",
)  # fmt: skip
VALUES = (None, 1, 1e999, float("nan"), 10**30, True, [], {}, {"title": "t", "text": "x"}, {"text": ""}, [[]], "\\")
MORE = [
    b"", b" ", b"\r", b"[]", b"1", b'"a"', b"{}", b'{"query": "q", "positive": "p"', b'{"query":\t"q",',
    b'"positive":"p"}',
    b'{"query": "q", "positive": "p"}', b'{"positive": "p", "query": "q"}', b' {"query": "q", "positive": "p"} ',
    b'{"query": "q", "positive": "p", "query": "r"}', b'{"query": "q", "positive": "p", "qu\\u0065ry": "r"}',
    b'{"query": "\\ud83d\\ude00", "positive": "\\udc00"}', b'{"query": "\\u0000", "positive": "p"}',
    b'{"query": "\xff", "positive": "p"}', b'{"query": "a\x01", "positive": "p"}', b"\xef\xbb\xbf{}", b"[" * 3000,
    b'{"query": "q", "positive": "p"} {"query": "q", "positive": "p"}',
    b'{"query": "q", "positive": ' + b"9" * 5000 + b"}",
]  # fmt: skip

texts = st.sampled_from(TEXTS) | st.text(max_size=5) | st.sampled_from("abcdefgh")
values = texts | st.lists(texts | st.sampled_from(VALUES), max_size=3) | st.sampled_from(VALUES)
usable = st.text('abcdefghü\U0001f600\u2028"\\ \n', max_size=6).map("t{}".format)
plain = st.fixed_dictionaries({"query": usable, "positive": usable, "negatives": st.lists(usable, max_size=2)})
rows = (
    plain
    | st.fixed_dictionaries({"query": usable, "positive": st.lists(usable, min_size=1, max_size=2), "negative": usable})
    | st.dictionaries(st.sampled_from(["query", "positive", "negatives", "negative_1", "label", "weight", "x"]), values)
)
written = st.builds(
    lambda row, plain: json.dumps(row, ensure_ascii=plain).encode(errors="surrogatepass"), rows, st.booleans()
)
files = st.lists(written, min_size=1, max_size=8) | st.lists(written | st.sampled_from(MORE), min_size=1, max_size=8)


class Weighed:
    """What a loss that takes weights asks of rows."""

    name, columns, takes, score_bounds = "own", (WEIGHT_COLUMN,), ("positives",), ANY_SCORE

    def for_source(self, number: int) -> Weighed:
        return self


def outcome(path: Path, options: dict[str, Any]) -> object:
    """Return all that reading a file gives, or why it is refused."""
    try:
        loaded = DataSource(str(path), **options).records()
    except VembedError as error:
        return type(error), str(error)
    items = loaded.table.items
    return (
        list(loaded.table),
        items.at(np.arange(len(items))),
        items.ids.tolist(),
        loaded.table.fingerprint,
        replace(loaded, table=None),
    )


@fuzzed(0.6)
@given(
    files,
    st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    st.sampled_from([b"", b"\n", b"\xef\xbb\xbf"]),
    st.integers(1, 400),
    st.booleans(),
    st.booleans(),
)
@example([b'{"query": "a", "positive": "b"}'] * 3, b"\n", b"\n", 64, False, False)
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_blocks_are_read_as_their_rows_are(
    name: str, tmp_path: Path, content: list[bytes], end: bytes, edge: bytes, size: int, skips: bool, is_weighed: bool
) -> None:
    data = edge * edge.startswith(b"\xef") + end.join(content) + edge * edge.startswith(b"\n")
    (tmp_path / name).write_bytes(gzip.compress(data)[: -size % 5 or None] if name.endswith(".gz") else data)
    keys = DataKeys(skip_invalid_records=skips, label_kind="class" if size % 2 else "auto")
    options = {"role": "train", "keys": keys, "loss": Weighed() if is_weighed else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", size)
        in_blocks = outcome(tmp_path / name, options)
        patch.setattr("vembed.data.row_loader.rows_alike", lambda block: None)
        assert outcome(tmp_path / name, options) == in_blocks


def test_plain_rows_are_never_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"query": f"q{i}", "positive": [f"p{i}"], "negatives": ["n"] * (i % 3) or None} for i in range(50)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.delattr(RowChecker, "check")
    table = DataSource(str(tmp_path / "t.jsonl"), "train", loss=Weighed()).records().table
    assert [record.negatives for record in table] == [("n",) * (i % 3) for i in range(50)]
    assert {record.columns["weight"] for record in table} == {1.0}
