"""Small files for the data tests."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.rows import Jsonl, Paint, png

from vembed.data import table_cache


@pytest.fixture
def paint(tmp_path: Path) -> Paint:
    """Write pictures under the test's folder."""

    def write(name: str, colour: str = "red") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(colour))
        return path

    return write


@pytest.fixture
def jsonl(tmp_path: Path) -> Jsonl:
    """Write rows under the test's folder."""

    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the rows of files of any size."""
    monkeypatch.setenv(table_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(table_cache, "LEAST_BYTES", 1)
    return tmp_path / "cache" / "records"


@pytest.fixture
def beir_files(tmp_path: Path) -> Path:
    """A BEIR folder of 3 documents, 3 queries and a train and a test split."""
    folder = tmp_path / "tiny"
    (folder / "qrels").mkdir(parents=True)
    corpus = [("d1", "Red", "a red thing"), ("d2", "", "a blue thing"), ("d3", "Green", "")]
    lines = [json.dumps({"_id": name, "title": title, "text": text}) for name, title, text in corpus]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    queries = [("q1", "which is red"), ("q2", "which is blue"), ("q3", "which is unjudged")]
    (folder / "queries.jsonl").write_text("".join(json.dumps({"_id": a, "text": b}) + "\n" for a, b in queries))
    (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td2\t1\n")
    (folder / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq2\td2\t1\n")
    return folder
