"""docs/python.md: every example runs, in order, as it stands."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "python.md"
COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink")
THINGS = ("fox", "tree", "car", "lamp", "river", "stone", "bird", "house")


def test_every_example_runs(
    tmp_path: Path, beir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(f"a {colour} {thing}", f"un {thing[::-1]}o {colour[::-1]}a") for colour in COLOURS for thing in THINGS]
    rows = [json.dumps({"query": query, "positive": positive}) for query, positive in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    corpus = [json.dumps({"_id": f"d{number}", "text": text}) for number, (_, text) in enumerate(pairs)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(corpus))
    shutil.copytree(beir, tmp_path / "beir")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), flags=re.DOTALL)
    assert len(examples) == 5
    names: dict[str, object] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"{DOCUMENT.name}, example {number + 1}", "exec"), names)
    out = capsys.readouterr().out
    assert re.search(r"^1 0\.\d{3} d0 un xofo dera$", out, flags=re.MULTILINE), "the trained model finds the red fox"
    promised = re.findall(r"print\(error\)  # (.*)", DOCUMENT.read_text("utf-8"))
    assert promised == [out.splitlines()[-1]]
