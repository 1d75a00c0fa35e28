"""docs/python.md: every example runs, in order, as it stands; so do the searches of docs/export.md."""

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from kit.balls import write_balls

from vembed.entrypoints import encode, search

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "python.md"
EXPORT = ROOT / "docs" / "export.md"
COLOURS = ("red", "blue", "green", "white", "black", "brown", "grey", "pink")
EXTRA_OF = {"runs/lance": "lancedb"}
"""What a command says -> the optional package that it needs."""

THINGS = ("fox", "tree", "car", "lamp", "river", "stone", "bird", "house")


@pytest.mark.slow
def test_every_example_runs(
    tmp_path: Path, beir: Path, clip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(f"a {colour} {thing}", f"un {thing[::-1]}o {colour[::-1]}a") for colour in COLOURS for thing in THINGS]
    rows = [json.dumps({"query": query, "positive": positive}) for query, positive in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    corpus = [json.dumps({"_id": f"d{number}", "text": text}) for number, (_, text) in enumerate(pairs)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(corpus))
    shutil.copytree(beir, tmp_path / "beir")
    shutil.copytree(clip, tmp_path / "clip")
    write_balls(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), flags=re.DOTALL)
    assert len(examples) == 11
    names: dict[str, object] = {}
    for number, example in enumerate(examples):
        exec(compile(example, f"{DOCUMENT.name}, example {number + 1}", "exec"), names)
    out = capsys.readouterr().out
    assert re.search(r"^1 0\.\d{3} d0 un xofo dera$", out, flags=re.MULTILINE), "the trained model finds the red fox"
    for name in ("red", "blue"):
        assert re.search(rf"^{name}\.png \d\.\d{{3}} True$", out, flags=re.MULTILINE), (
            "a text and a picture find theirs"
        )
    promised = re.findall(r"print\(error\)  # (.*)", DOCUMENT.read_text("utf-8"))
    assert promised == [out.splitlines()[-1]]
    text = EXPORT.read_text("utf-8") + DOCUMENT.read_text("utf-8")
    commands = re.findall(r"^vembed ((?:encode|search) .*)", text, flags=re.MULTILINE)
    assert len(commands) == 11
    for words in commands:
        extras = [package for sign, package in EXTRA_OF.items() if sign in words]
        if "--serve" not in words and all(map(importlib.util.find_spec, extras)):
            run_again(shlex.split(words, comments=True))
    assert re.search(r"^ 1 .*  red\.png$", capsys.readouterr().out, flags=re.MULTILINE)


def run_again(words: list[str]) -> None:
    """Run a command of the document; an index that an example wrote is replaced."""
    module = {"encode": encode, "search": search}[words[0]]
    more = ["--overwrite"] if words[0] == "encode" else []
    assert module.main([*words[1:], *more], program=f"vembed {words[0]}") == 0
