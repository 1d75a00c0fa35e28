"""`vembed search` in the terminal and as JSON: ranks, lines that fit, text that can't steer a terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kit.runs import environment
from search_cases import DOCUMENTS

import vembed
from vembed.workflows.search.terminal import clip_to_width

if TYPE_CHECKING:
    from pathlib import Path


def test_the_right_document_is_first_and_every_line_fits(
    call: Any, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    done = call("search", index, "apple pie recipe", "-k", "4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert re.fullmatch(r" 1  {1,2}-?0\.\d{4}  d3", lines[0])
    assert lines[1] == "    a recipe for apple pie"
    assert len(lines) == 8
    assert all(len(line) <= 30 for line in lines)
    assert any(line.endswith("…") for line in lines), "something was long enough to be cut"


def test_text_can_not_steer_the_terminal(call: Any, index: Path) -> None:
    done = call("search", index, "hostile text", "-k", "1")
    assert "d4" in done.out
    assert r"\x1b[31m" in done.out
    assert r"\u202e" in done.out
    assert not {unicodedata.category(each) for each in done.out if each != "\n"} & {"Cc", "Cf"}


def test_json_is_one_object_and_nothing_else_on_the_output(call: Any, index: Path) -> None:
    done = call("search", index, "train leaves", "-k", "9", "--json")
    content = json.loads(done.out)
    assert content["query"] == "train leaves"
    assert [hit["rank"] for hit in content["hits"]] == [1, 2, 3, 4]
    assert content["hits"][0] | {"score": 0} == {
        "rank": 1, "id": "d2", "score": 0, "text": DOCUMENTS["d2"], "image": None,
    }  # fmt: skip
    assert "k = 9 is over the size of the index: 4 documents are ranked" in done.err
    assert done.out.isascii()
    assert "over the size" not in call("search", index, "train", "-k", "4").err


def test_scores_are_inner_products_best_first(index: Path, bag: Path) -> None:
    (hits,) = vembed.open_index(index).search(["apple trees"], k=4)
    model = vembed.load(bag)
    expected = model.encode(["apple trees"], "query")[0] @ model.encode(DOCUMENTS.values(), "document").T
    order = np.argsort(-expected)
    assert [hit.id for hit in hits] == [list(DOCUMENTS)[row] for row in order]
    np.testing.assert_allclose([hit.score for hit in hits], expected[order], atol=1e-6)
    assert [hit.text for hit in hits] == [DOCUMENTS[hit.id] for hit in hits]


def test_latency_is_one_line_behind_the_hits_and_the_last_object_of_json(
    call: Any, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *hits, line = call("search", index, "apple pie", "-k", "1", "--latency").out.splitlines()
    assert hits == call("search", index, "apple pie", "-k", "1").out.splitlines()
    number = r"(\d[\d.]*)"
    found = re.fullmatch(rf"latency: p50 {number} ms, p95 {number} ms, p99 {number} ms; 100 searches of .*", line)
    assert found is not None, line
    assert 0 < float(found[1]) <= float(found[2]) <= float(found[3])

    monkeypatch.setattr("sys.stdin", io.StringIO("apple pie\n" * 120 + "train at noon\n"))
    *answers, last = map(json.loads, call("search", index, "--json", "--latency").out.splitlines())
    assert len(answers) == 121
    assert list(last) == ["latency"]
    assert last["latency"]["num_timed"] == 121, "each query once where there are enough"
    p50, p95, p99 = (last["latency"][f"milliseconds_{name}"] for name in ("per_query", "p95", "p99"))
    assert 0 < p50 <= p95 <= p99

    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert call("search", index, "--latency").out == ""
    assert "leave one of them out" in call("search", index, "--serve", "--latency").err


def test_queries_come_from_the_input_line_by_line(call: Any, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for as_json in (False, True):
        monkeypatch.setattr("sys.stdin", io.StringIO("apple pie\n\n  train at noon\n"))
        done = call("search", index, "-k", "1", *(["--json"] if as_json else []))
        assert done.code == 0
        if as_json:
            assert [json.loads(line)["hits"][0]["id"] for line in done.out.splitlines()] == ["d3", "d2"]
        else:
            assert re.findall(r"^query> (.+)$|  (d\d)$", done.out, flags=re.MULTILINE) == [
                ("apple pie", ""), ("", "d3"), ("train at noon", ""), ("", "d2"),
            ]  # fmt: skip


def test_a_terminal_is_asked_with_a_prompt(call: Any, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("apple pie\n"))
    done = call("search", index, "-k", "1")
    assert done.err.count("query> ") == 2, "once for the query, once before the end of the input"
    assert "query>" not in done.out
    assert "d3" in done.out


@pytest.mark.slow
def test_output_that_nobody_reads_on_is_no_error(index: Path, tmp_path: Path) -> None:
    (tmp_path / "queries.txt").write_text("apple\n" * 20_000)
    command = f"{sys.executable} -m vembed search {index} < queries.txt | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment(), cwd=tmp_path,
                          timeout=120, check=True)  # fmt: skip
    assert done.stdout.splitlines() == ["query> apple", "0"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "-k", "0"], "-k: must be >= 1, got 0"),
        ([" "], "the query is empty"),
        (["bad \udcff"], "the query: not valid UTF-8 text (character 5)"),
        (["x", "--serve"], "leave out the query"),
        (["--serve", "--port", "70000"], "--port: must be <= 65535, got 70000"),
        (["x", "--port", "80"], "add --serve"),
    ],
)
def test_contradictions_are_refused(call: Any, index: Path, words: list[str], message: str) -> None:
    refused = call("search", index, *words)
    assert refused.code == 2
    assert message in refused.err


def test_clipping_counts_terminal_columns() -> None:
    assert clip_to_width("abcdef", 6) == "abcdef"
    assert clip_to_width("abcdefg", 6) == "abcde…"
    assert clip_to_width("日本語日本語", 7) == "日本語…"
    assert clip_to_width("日本語", 6) == "日本語"
    assert clip_to_width("e\u0301" * 6, 6) == "e\u0301" * 6
