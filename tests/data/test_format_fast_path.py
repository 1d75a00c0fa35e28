"""A plugin's format whose suffix begins like one of ours is read by the plugin, in every way of reading."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import vembed
from vembed.data.read import read
from vembed.registry import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize("suffix", [".jsonlines", ".jsonld"])
def test_a_format_named_like_jsonl_is_read_by_its_plugin(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in ("_entries", "_plugins"):  # forgets the format after the test
        monkeypatch.setattr(FORMATS, table, dict(getattr(FORMATS, table)))

    @vembed.register_format(suffix)
    def graph(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            row = json.loads(line)
            yield number, {"query": f"plugin: {row['query']}", "positive": row["positive"]}

    # The rows are also valid JSONL, so that a reader of JSONL would take them without a word.
    path = tmp_path / f"rows{suffix}"
    path.write_text("".join(json.dumps({"query": f"q{n}", "positive": f"d{n}"}) + "\n" for n in range(3)))
    source = read(str(path), "train")
    assert source.raw_rows(1) == [{"query": "plugin: q0", "positive": "d0"}]
    assert [*source.peek()[0].used] == ["query", "positive"]
    assert [record.query for record in source.records().table] == ["plugin: q0", "plugin: q1", "plugin: q2"]
    assert len(source.judged().queries) == 3
    assert set(source.judged().queries.values()) == {"plugin: q0", "plugin: q1", "plugin: q2"}
